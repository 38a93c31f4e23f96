"""Runs in an object store: killed while they send, gone on with on another machine, by other numbers of workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.e2e import job
from tests.stores.faulty_proxy import faulty_proxy
from tests.stores.s3_server import BUCKET
from tests.unit.data.test_source_tfrecord import SPEC, examples, write
from tfdist.artifacts.read_snapshots import bring_for_reading
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.control.run_address import working_folder
from tfdist.storage.object_store import ObjectStore

pytestmark = pytest.mark.slow
URL = f"s3://{BUCKET}/runs/one"
FLAGS = [*job.TRAINED, "--deterministic", "--steps=40", "--save_every=10", "--keep=2"]


@pytest.fixture(autouse=True)
def environment(s3, monkeypatch) -> None:
    """Jobs are started with an environment that was read when the tests began."""
    for name, value in s3.environment().items():
        monkeypatch.setitem(job.ENVIRONMENT, name, value)


def machine(tmp_path: Path, name: str, url: str = URL) -> tuple[str, Path]:
    """The flag that makes a process one of a machine of its own, and the working copy there."""
    return f"--cache_dir={tmp_path / name}", working_folder(url, str(tmp_path / name))


def pace(folder: Path, seconds: float) -> None:
    """Each step of a run with TFDIST_FAULTS=armed takes so much longer."""
    (folder / "faults").mkdir(parents=True)
    (folder / "faults" / "pace").write_text(str(seconds))


def arrays(folder: Path) -> dict[str, np.ndarray]:
    store = SnapshotFolder(str(folder / "checkpoints"))
    snapshot, passed_over = store.newest_valid()
    assert snapshot and not passed_over
    return store.read(snapshot)


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(first[key].tobytes() == second[key].tobytes() for key in first)


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["values"]["train/loss"] for record in job.records(folder, kind="train")}


def test_a_run_killed_while_it_sends_ends_elsewhere_as_if_undisturbed(s3, tmp_path):
    flags = [*FLAGS, "--eval_every=0", "--trackers=tensorboard"]
    job.run(2, [*flags, f"--run_dir={tmp_path / 'undisturbed'}"])
    first, here = machine(tmp_path, "first")
    with faulty_proxy(s3.port) as proxy:
        # So slow that the second snapshot is on its way for seconds.
        proxy.draw = lambda method, path: "delay" if "step-00000020" in path else ""
        environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "TFDIST_FAULTS": "armed"}
        pace(here, 0.2)  # so that one snapshot is sent before the next
        process = job.start(2, [*flags, "--steps_per_loop=1", f"--run_dir={URL}", first], environment=environment)
        half = f"{URL.partition(BUCKET + '/')[2]}/checkpoints/step-00000020"
        deadline = time.monotonic() + 120
        while not (names := s3.names(half)) or any("manifest" in name for name in names):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        workers = [int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()]
        for pid in (process.pid, *workers):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    assert any(s3.names(half))
    second, folder = machine(tmp_path, "second")
    output = job.run(2, [*flags, f"--run_dir={URL}", second], launch_flags=("--evaluator",))
    assert "resumed from" in output
    assert b'"step": 40' in s3.content("runs/one/logs/evaluator.jsonl")
    assert same(arrays(folder), arrays(tmp_path / "undisturbed"))
    assert losses(folder) == losses(tmp_path / "undisturbed"), "the logs of both machines, as one"
    assert {name.split("/")[3] for name in s3.names("runs/one/checkpoints/step")} == {"step-00000030", "step-00000040"}
    assert json.loads(s3.content("runs/one/status.json"))["status"] == "finished"
    assert s3.content("runs/one/lease.json") is None
    assert any("tfevents" in name for name in s3.names("runs/one/tensorboard"))
    assert b"secret" not in b"".join(s3.content(name) or b"" for name in s3.names("runs/one") if "/step-" not in name)
    environment = {**job.ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "fifth")}
    told = subprocess.run([sys.executable, "-m", "tfdist.report", URL], env=environment, capture_output=True, text=True)
    assert told.returncode == 0 and s3.content("runs/one/report.html"), told.stderr


@pytest.mark.thorough
def test_divided_state_of_four_workers_is_gone_on_with_by_two_elsewhere(s3, tmp_path):
    sharded = [*FLAGS, "--strategy=mesh", "--zero=3", f"--run_dir={URL}"]
    first, here = machine(tmp_path, "first")
    job.run(4, [*sharded, first, "--steps=20"])
    second, folder = machine(tmp_path, "second")
    output = job.run(2, [*sharded, second, "--steps=20", "--eval_every=-1"])
    assert "resumed from" in output
    assert same(arrays(folder), arrays(here))


def on_machines(
    tmp_path: Path, names: list[str], *flags: str, environment: dict[str, str] | None = None
) -> tuple[list[subprocess.Popen], list[Path]]:
    """A worker on each of these, which have no common folder; and their working copies."""
    port, processes, folders = job.free_ports(len(names)), [], []
    workers = [f"127.0.0.1:{port + rank}" for rank in range(len(names))]
    for rank, name in enumerate(names):
        flag, folder = machine(tmp_path, name)
        folders.append(folder)
        cluster = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
        command = [sys.executable, "-m", "tfdist.train", *FLAGS, f"--run_dir={URL}", flag, *flags]
        variables = {**job.ENVIRONMENT, **(environment or {}), "TF_CONFIG": cluster}
        processes.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return processes, folders


def all_end_with(processes: list[subprocess.Popen], code: int) -> str:
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(outputs)
    return "\n".join(outputs)


def test_workers_on_machines_of_their_own_send_their_own_logs(s3, tmp_path):
    processes, folders = on_machines(tmp_path, ["machine-0", "machine-1"], "--steps=20")
    all_end_with(processes, 0)
    for rank, folder in enumerate(folders):
        own = folder / "logs" / f"rank-{rank}.jsonl"
        assert s3.content(f"runs/one/logs/rank-{rank}.jsonl") == own.read_bytes()
    assert not (folders[1] / "checkpoints").exists()


@pytest.mark.thorough
def test_parts_from_four_machines_are_gone_on_with_by_two_others(s3, tmp_path):
    """Each of the four sends its own part, and has no other; the two are compared with what the four became."""
    sharded = ["--strategy=mesh", "--zero=3", "--steps=20", "--model_args=widths=(16,)"]
    processes, folders = on_machines(tmp_path, [f"first-{rank}" for rank in range(4)], *sharded)
    all_end_with(processes, 0)
    for rank, folder in enumerate(folders):
        (data,) = (folder / "parts" / "step-00000020").glob("state-20.data-*")
        assert data.name == f"state-20.data-{rank:05d}-of-00004" and not SnapshotFolder(f"{folder}/checkpoints").steps()
    objects, undisturbed = ObjectStore(URL), SnapshotFolder(str(tmp_path / "four" / "checkpoints"))
    bring_for_reading(objects, undisturbed)
    objects.remove("checkpoints/step-00000020/manifest.json")
    processes, _ = on_machines(tmp_path, ["second-0", "second-1"], *sharded)
    output = all_end_with(processes, 0)
    assert "resumed from" in output and "step 10, " in output and "written by 4 workers, now 2" in output
    bring_for_reading(objects, SnapshotFolder(str(tmp_path / "two" / "checkpoints")))
    two, four = arrays(tmp_path / "two"), arrays(tmp_path / "four")
    assert two.keys() == four.keys()
    for key, array in four.items():  # two add up gradients in another order than four
        np.testing.assert_allclose(two[key], array, rtol=0.02, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("second", ["kept", pytest.param("lost", marks=pytest.mark.thorough)])
def test_of_parts_killed_on_their_way_nothing_half_is_gone_on_with(s3, tmp_path, second):
    """The second worker's part of step 20 does not get through before both are killed. If its machine is there again,
    that part is sent by the next attempt; else step 20 is lost, and what is there of it removed.
    """
    sharded = [*FLAGS, "--strategy=mesh", "--zero=3", "--steps=30"]
    job.run(2, [*sharded, f"--run_dir={tmp_path / 'undisturbed'}"])
    stuck = "step-00000020/state-20.data-00001"
    with faulty_proxy(s3.port, lambda method, path: "drop" if stuck in path and method == "PUT" else "") as proxy:
        environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
        processes, _ = on_machines(tmp_path, ["first", "second"], *sharded, environment=environment)
        deadline = time.monotonic() + 120
        while not proxy.done["drop"] or not any("step-00000020/part-00000.json" in name for name in s3.names()):
            assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.communicate()
    assert not any("step-00000020/manifest" in name for name in s3.names())
    processes, _ = on_machines(tmp_path, ["first", "second" if second == "kept" else "third"], *sharded)
    output = all_end_with(processes, 0)
    # Step 30 may have been written as well: both parts of it are on the two machines.
    resumed = re.findall(r"resumed from .*: step (\d+), ", output)
    assert set(resumed) <= ({"20", "30"} if second == "kept" else {"10"}) and resumed, output
    bring_for_reading(ObjectStore(URL), SnapshotFolder(str(tmp_path / "reader" / "checkpoints")))
    assert same(arrays(tmp_path / "reader"), arrays(tmp_path / "undisturbed"))
    assert [name for name in s3.names() if "/part-" in name] == [], output


@pytest.mark.thorough
def test_a_store_that_goes_away_ends_no_training(s3, tmp_path):
    flag, folder = machine(tmp_path, "first")
    away, flags = [], [*FLAGS, "--steps=100", "--steps_per_loop=1", "--store_timeout=3", f"--run_dir={URL}", flag]
    with faulty_proxy(s3.port, lambda method, path: "drop" if away else "") as proxy:
        pace(folder, 0.1)
        environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "TFDIST_FAULTS": "armed"}
        process = job.start(1, flags, environment=environment)
        deadline = time.monotonic() + 120
        while not any("/manifest" in name for name in s3.names()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        away.append(True)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 9, output
    assert "NOT SENT: s3://" in output and "start again on this machine" in output
    assert "Traceback" not in output


def test_a_rollback_asks_nothing_of_a_store_that_is_away(s3, tmp_path):
    flag, _ = machine(tmp_path, "first")
    written = []

    def draw(method: str, path: str) -> str:
        if "HEAD" in written:
            return "drop"
        if path.endswith("/flags.txt") and (method == "PUT" or written):  # written, and looked at: the last thing
            written.append(method)  # before the first step
        return ""

    flags = [*FLAGS, "--source=tests.e2e.sources:with_nan", "--noshuffle", "--steps=20", "--on_nan=rollback"]
    with faulty_proxy(s3.port, draw) as proxy:
        environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
        process = job.start(1, [*flags, "--store_timeout=1", f"--run_dir={URL}", flag], environment=environment)
        output, _ = process.communicate(timeout=240)
    assert "rolled back to step 0" in output and "step 20/20" in output, output
    assert process.returncode == 9 and "start again on this machine" in output, output


@pytest.mark.parametrize("kind", ["at random", pytest.param("from front to back", marks=pytest.mark.thorough)])
def test_data_of_a_store_train_as_those_of_a_folder(s3, tmp_path, kind):
    """Two workers that share a cache; the stream stopped, and gone on with on another machine."""
    folder = tmp_path / "records"
    folder.mkdir()
    for number in range(12):
        write(folder / f"train-{number:02d}.tfrecord", examples(2 * number, 2 * number + 2))
    write(folder / "test.tfrecord", examples(24, 30))
    for file in folder.iterdir():
        s3.change(f"data/{file.name}", file.read_bytes())
    stream = ",stream=True" if kind == "from front to back" else ""
    flags = [*FLAGS, "--source=tfrecord", f"--source_args={SPEC}{stream}", "--eval_every=-1", "--global_batch=8"]
    job.run(2, [*flags, f"--data_dir={folder}", f"--run_dir={tmp_path / 'folder'}"])
    stored = [*flags, f"--data_dir=s3://{BUCKET}/data", f"--run_dir={tmp_path / 'store'}"]
    for steps, cache in ((20, "first"), (40, "second"))[0 if stream else 1 :]:
        job.run(2, [*stored, f"--steps={steps}", f"--cache_dir={tmp_path / cache}", "--cache_gb=1e-5"])
    assert same(arrays(tmp_path / "store"), arrays(tmp_path / "folder"))
    assert losses(tmp_path / "store") == losses(tmp_path / "folder")


def test_mistakes_get_their_sentence(s3, tmp_path):
    def said(*flags: str, code: int = 2, **variables: str) -> str:
        ended = job.train([*FLAGS, "--steps=10", *flags], environment=variables)
        assert ended.returncode == code and "Traceback" not in ended.stderr, ended.stdout + ended.stderr
        return ended.stderr

    cache, run = f"--cache_dir={tmp_path / 'cache'}", f"--run_dir={tmp_path / 'run'}"
    assert (
        "s3://nowhere/run" in (sentence := said("--run_dir=s3://nowhere/run", cache)) and "does not exist" in sentence
    )
    none = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SHARED_CREDENTIALS_FILE": "/none"}
    assert "no credentials were found" in said(f"--run_dir={URL}", cache, **none)
    assert "--run_dir=ftp://host/run" in said("--run_dir=ftp://host/run")
    assert "needs the Python package adlfs" in said("--run_dir=abfs://bucket/run", cache, code=10)
    assert "--backup_dir: s3://nowhere/backup" in said("--backup_dir=s3://nowhere/backup", cache, run)
    records = ["--source=tfrecord", f"--source_args={SPEC}", cache, run]
    assert "--data_dir: s3://nowhere/data" in said(*records, "--data_dir=s3://nowhere/data")
    assert "has no file *train* for train" in said(*records, "--data_dir=s3://bucket/none", code=4)
    file = tmp_path / "file"
    file.write_text("")
    assert "--cache_dir" in said(f"--run_dir={URL}", f"--cache_dir={file}")
