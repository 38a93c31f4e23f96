"""Workers on machines of their own, several of which are killed again and again while they send their parts, behind a
proxy that lists what was there before and drops what it likes.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable

import pytest

from tests.e2e import job
from tests.e2e.test_object_store import URL, all_end_with, arrays, environment, on_machines, pace, same  # noqa: F401
from tests.stores.faulty_proxy import faulty_proxy
from tfdist.artifacts.read_snapshots import bring_for_reading
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.storage.object_store import ObjectStore

PASSING = ("drop", "drop_answer", "delay", "500", "503", "truncate")


@pytest.mark.thorough
def test_of_stale_lists_and_kills_nothing_is_believed_that_is_not_whole(s3, tmp_path):
    chance, flags = random.Random(0), ["--strategy=mesh", "--zero=3", "--steps=40", "--save_every=5"]
    job.run(3, [*job.CLUSTERS, "--deterministic", *flags, f"--run_dir={tmp_path / 'undisturbed'}"])

    def draw(method: str, path: str) -> str:
        if "list-type" in path and chance.random() < 0.3:
            return "stale"
        return chance.choice(PASSING) if chance.random() < 0.03 else ""

    def told() -> set[str]:
        return {name for name in s3.names() if "/part-" in name or "/manifest.json" in name}

    machines = ["first", "second", "third"]
    with faulty_proxy(s3.port, draw) as proxy:
        variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "TFDIST_FAULTS": "armed"}
        for kills in (3, 2, 3):
            processes, folders = on_machines(tmp_path, machines, *flags, "--steps_per_loop=1", environment=variables)
            for folder in folders:
                if not (folder / "faults").exists():
                    pace(folder, 0.15)
            wait_for_more(told, processes)
            assert [process.poll() for process in processes] == [None] * 3, processes[0].communicate()[0]
            for process in chance.sample(processes, kills):
                process.kill()
            for process in processes:
                process.communicate(timeout=120)
            machines[chance.randrange(3)] = f"new-{chance.random()}"
        processes, _ = on_machines(tmp_path, machines, *flags, environment=variables)
        all_end_with(processes, 0)
        assert proxy.done["stale"]
    bring_for_reading(ObjectStore(URL), SnapshotFolder(str(tmp_path / "reader" / "checkpoints")))
    assert same(arrays(tmp_path / "reader"), arrays(tmp_path / "undisturbed"))
    # What a removal did not see in an old listing is removed by the next start; it has no manifest.
    assert {name.split("/")[3] for name in told() if "/manifest.json" in name} == {"step-00000035", "step-00000040"}


def wait_for_more(told: Callable[[], set[str]], processes: list[subprocess.Popen]) -> None:
    before = told()
    job.wait_for(lambda: told() - before or any(process.poll() is not None for process in processes))
