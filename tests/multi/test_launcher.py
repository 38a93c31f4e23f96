"""The launcher with real workers: MultiWorkerMirroredStrategy on ports that the launcher holds."""

import io
import os
import sys

import pytest

from tfdist.launcher.local_job import LocalJob

pytestmark = pytest.mark.slow

# One worker: looks for its peers while it imports TensorFlow, starts the strategy, sums (rank + 1) over all, and says
# how many threads and cores it has.
WORKER = """
import os, pathlib, time
from tfdist.control.resolvers import resolve_cluster
from tfdist.control.preflight import Preflight

cluster = resolve_cluster(os.environ)
with Preflight(cluster, 120):
    import tensorflow as tf
os.environ["TF_CONFIG"] = cluster.tf_config()
strategy = tf.distribute.MultiWorkerMirroredStrategy()
{fault}

@tf.function(autograph=False)
def summed():
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(cluster.rank + 1.0)))

total = summed()
cores = len(os.sched_getaffinity(0))
print(f"sum {{float(total)}} of {{strategy.num_replicas_in_sync}} on {{cores}} cores", flush=True)
here = pathlib.Path(__file__).parent
(here / f"done-{{cluster.rank}}").touch()
while len(list(here.glob("done-*"))) < 2:
    time.sleep(0.01)
os._exit(0)
"""


def run(tmp_path, fault="", grace=10.0):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(fault=fault))
    output = io.StringIO()
    made = LocalJob(
        [sys.executable, str(script)],
        2,
        tmp_path / "logs",
        output=output,
        grace=grace,
        environment={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    made.start()
    return made.wait(), output.getvalue()


def test_two_workers_reduce_over_reserved_ports(tmp_path):
    result, output = run(tmp_path)
    assert result.code == 0, output
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in (0, 1):
        assert f"[worker {rank}] sum 3.0 of 2 on {cores} cores" in output


def test_the_worker_that_was_killed_is_the_cause(tmp_path):
    """Its peer waits for TensorFlow's heartbeat to notice, and is ended before that."""
    result, output = run(tmp_path, "if cluster.rank == 1: os.kill(os.getpid(), 9)", grace=1.0)
    assert result.code == 6 and "worker 1 was killed by signal 9 (SIGKILL)" in result.cause, output
    assert result.exit_codes["worker 0"] != 0
