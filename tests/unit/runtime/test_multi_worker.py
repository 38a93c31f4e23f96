"""The runtime of tf.distribute's multi-worker strategy."""

import json

import pytest
from tensorflow.python.distribute import collective_all_reduce_strategy

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.multi_worker import MultiWorker, Worker, check_alike

CPU, GPU = Worker("auto", 0), Worker("auto", 1)


def test_a_worker_that_is_alone_opens_no_port(monkeypatch):
    cluster = Cluster.of_workers(["127.0.0.1:2222"], 0)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster.spec, "task": {"type": "worker", "index": 0}}))
    runtime = MultiWorker.create(Config(), cluster)
    [device] = runtime.strategy.extended.worker_devices
    assert "/job:localhost/" in device, "TensorFlow's server has been started, on all interfaces"


def test_a_worker_that_is_alone_has_all_its_gpus(monkeypatch):
    monkeypatch.setattr(collective_all_reduce_strategy.context, "num_gpus", lambda: 2)
    extended = MultiWorker.create(Config(), Cluster()).strategy.extended
    found = extended._initialize_local_devices(extended._cluster_resolver, worker_device="")
    assert found == (("/device:GPU:0", "/device:GPU:1"), "GPU")


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([CPU, CPU, CPU._replace(asked="ring")], "--communication=auto on rank 0, but --communication=ring on rank 2"),
        ([GPU, CPU], "GPUs that TensorFlow sees: 1 on rank 0, but 0 on rank 1. Give every worker the same"),
        ([GPU, GPU._replace(gpus=2)], "1 on rank 0, but 2 on rank 1"),
    ],
)
def test_workers_whose_collectives_would_not_match_are_told_so(workers, words):
    """One took the other's address for beacons for that of a ring; a worker without GPU was a lost peer."""
    for alike in workers[:2]:
        check_alike([alike, alike])
    with pytest.raises(ConfigError) as error:
        check_alike(workers)
    assert words in str(error.value)
