"""Divided state of workers on machines of their own, whose parts meet in an object store: the way back from bad
numbers, and a lease that another job has taken over.
"""

from __future__ import annotations

import time

import pytest

from tests.e2e import job
from tests.e2e.test_object_store import URL, all_end_with, arrays, environment, on_machines, same  # noqa: F401
from tests.stores.faulty_proxy import faulty_proxy
from tests.stores.s3_server import BUCKET
from tfdist.artifacts.read_snapshots import bring_for_reading
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.control.lease_owner import Owner
from tfdist.storage.object_store import ObjectStore

SHARDED = ["--strategy=mesh", "--zero=3"]
PLACE = URL.partition(f"{BUCKET}/")[2]


@pytest.mark.thorough
def test_parts_on_several_machines_go_back_from_bad_numbers(s3, tmp_path):
    """Sample 70 is in step 9: from step 10 back to the snapshot of step 5, of which each machine has its own part."""
    bad = ["--source=tests.e2e.sources:with_nan", "--noshuffle", "--global_batch=8", "--on_nan=rollback"]
    flags = [*SHARDED, *bad, "--steps=20", "--save_every=5", "--log_every=5"]
    processes, _ = on_machines(tmp_path, ["first", "second"], *flags)
    output = all_end_with(processes, 0)
    assert "rolled back to step 5 and skipped 40 samples" in output and "step 20/20" in output, output
    bring_for_reading(ObjectStore(URL), SnapshotFolder(str(tmp_path / "reader" / "checkpoints")))
    job.run(2, [*job.CLUSTERS, "--deterministic", *flags, f"--run_dir={tmp_path / 'folder'}"])
    assert same(arrays(tmp_path / "reader"), arrays(tmp_path / "folder"))
    assert not any("/part-" in name for name in s3.names())


@pytest.mark.thorough
def test_a_worker_sends_nothing_more_when_another_job_has_taken_over(s3, tmp_path):
    """It asks the store again after 30 seconds, in the middle of what it tries to send, too."""
    taken_over: list[float] = []

    def draw(method: str, path: str) -> str:
        late = bool(taken_over) and time.monotonic() - taken_over[0] > 35
        return "drop" if "state-10.data-00001" in path and method == "PUT" and not late else ""

    with faulty_proxy(s3.port, draw) as proxy:
        variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
        processes, _ = on_machines(tmp_path, ["first", "second"], *SHARDED, "--steps=10", environment=variables)
        job.wait_for(lambda: any(process.poll() is not None for process in processes) or proxy.done["drop"])
        job.wait_for(lambda: any("part-00000.json" in name for name in s3.names()))
        s3.change(f"{PLACE}/lease.json", Owner.myself("another job").lease().encode())
        taken_over.append(time.monotonic())
        output = all_end_with(processes, 2)
    assert output.count("taken over by") >= 2 and "Traceback" not in output, output
    assert not any("data-00001" in name or "/manifest" in name for name in s3.names())
