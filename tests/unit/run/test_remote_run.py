"""tfdist/run/remote_run.py: which run a working copy is of, whose files are whose, what is said of one that is away."""

from __future__ import annotations

import json
import os
import time

import pytest

from tests.stores.s3_server import BUCKET
from tests.unit.artifacts.test_run_identity import lose_status, snapshots
from tfdist.artifacts.status import is_finished, stored_status, write_status
from tfdist.config.run_options import RunConfig
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.control.lease_owner import Patience
from tfdist.run.remote_run import RemoteRun, remote_run
from tfdist.storage.object_store import ObjectStore
from tfdist.telemetry.events import Event
from tfdist.telemetry.jsonl import JsonlObserver

URL = f"s3://{BUCKET}/runs/one"
ALONE = Cluster()
SECOND = Cluster.of_workers(["127.0.0.1:1", "127.0.0.1:2"], 1)


def stored(folder, cluster: Cluster = ALONE, timeout: float = 20.0, job: str = "job") -> RemoteRun:
    folder.mkdir(exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    return RemoteRun(RunConfig(run_dir=URL, store_timeout=timeout), folder, cluster, job)


def begin(run: RemoteRun) -> None:
    """As a session does."""
    (run.folder / "flags.txt").write_text("--steps=5\n")
    write_status(run.folder, "running", "abc")
    run.start()


def test_a_folder_needs_none_of_it(tmp_path):
    with remote_run(RunConfig(run_dir=str(tmp_path)), tmp_path, ALONE, "job") as nothing:
        assert nothing is None


def test_what_is_left_is_sent_at_the_end_and_the_status_last(s3, tmp_path):
    with stored(tmp_path / "here") as run:
        begin(run)
        assert b"running" in s3.content("runs/one/status.json")
        (run.folder / "logs" / "rank-0.jsonl").write_text("one\n")
        (run.folder / "logs" / "rank-1.jsonl").write_text("another worker's\n")
        (run.folder / "tensorboard").mkdir()
        (run.folder / "tensorboard" / "events").write_text("")
        write_status(run.folder, "finished", "abc")
        assert s3.content("runs/one/lease.json")
    assert sorted(s3.names()) == [
        "runs/one/flags.txt",
        "runs/one/logs/rank-0.jsonl",
        "runs/one/status.json",
        "runs/one/tensorboard/events",
    ]
    assert is_finished(URL, tmp_path / "elsewhere", before={}, seconds=0.0)
    ended = stored_status(URL, tmp_path / "elsewhere")
    assert not is_finished(URL, tmp_path / "elsewhere", ended, seconds=0.0), "it may go on with more steps"
    assert is_finished(URL, tmp_path / "elsewhere", ended | {"attempt": ended["attempt"] - 1}, seconds=0.0)


def test_the_flags_are_there_from_the_start_but_not_before_the_status(s3, tmp_path, monkeypatch):
    """Without them an evaluator composed another model. Alone, they would be a file of something else."""
    sent, send = [], ObjectStore.send
    monkeypatch.setattr(ObjectStore, "send", lambda self, file, name: (sent.append(name), send(self, file, name)))
    with stored(tmp_path / "here") as run:
        begin(run)
        assert sent == ["status.json", "flags.txt"]
        assert s3.content("runs/one/flags.txt") == b"--steps=5\n"


def test_logs_go_on_on_another_machine(s3, tmp_path):
    with stored(tmp_path / "here") as run:
        write_status(run.folder, "running", "abc")
        (run.folder / "logs" / "rank-0.jsonl").write_text("one\n")
    s3.change("runs/one/logs/rank-1.jsonl", b"of rank 1\n")
    s3.change("runs/one/faults/arm-0-kill", b"")
    with stored(tmp_path / "there") as run:
        assert (run.folder / "logs" / "rank-0.jsonl").read_text() == "one\n"
        assert json.loads((run.folder / "status.json").read_text())["run_id"] == "abc"
        assert not (run.folder / "faults").exists()
    with stored(tmp_path / "second", SECOND) as run:
        assert not (run.folder / "logs" / "rank-1.jsonl").exists()
        run.bring_own("abc")
        assert (run.folder / "logs" / "rank-1.jsonl").read_text() == "of rank 1\n"
        assert os.listdir(run.folder) == ["logs"]


@pytest.mark.parametrize("there", ["nothing", "another run"])
def test_a_working_copy_of_another_run_is_set_aside(s3, tmp_path, capsys, there):
    with stored(tmp_path / "here") as run:
        write_status(run.folder, "running", "abc")
        (run.folder / "checkpoints" / "step-00000010").mkdir(parents=True)
        (run.folder / "logs" / "rank-0.jsonl").write_text("one\n")
        (run.folder / "logs" / "worker-0.log").write_text("the launcher has begun it\n")
    s3.empty()
    if there == "another run":
        s3.change("runs/one/status.json", b'{"status": "running", "run_id": "def"}')
    with stored(tmp_path / "here") as run:
        assert not (run.folder / "checkpoints").exists()
        assert os.listdir(run.folder / "logs") == ["worker-0.log"]
        (aside,) = run.folder.glob("set-aside-*")
        assert {path.name for path in aside.iterdir()} == {"status.json", "checkpoints", "rank-0.jsonl"}
        assert (run.folder / "status.json").exists() == (there == "another run")
    said = capsys.readouterr().err
    assert URL in said and aside.name in said
    assert not any("set-aside" in name for name in s3.names())


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_working_copy_without_its_status_is_compared_by_its_snapshots(s3, tmp_path, capsys, how):
    """It went on from the snapshot of another run, and put it in the place of the store's."""
    snapshots(tmp_path / "here", step_60="abc")
    lose_status(tmp_path / "here", how)
    s3.change("runs/one/status.json", b'{"status": "running", "run_id": "def"}')
    with stored(tmp_path / "here") as run:
        assert not (run.folder / "checkpoints").exists()
        assert json.loads((run.folder / "status.json").read_text())["run_id"] == "def"
    assert "contains another run" in capsys.readouterr().err
    s3.change("runs/one/status.json", b'{"status": "running", "run_id": "abc"}')
    snapshots(tmp_path / "same", step_60="abc")
    lose_status(tmp_path / "same", how)
    with stored(tmp_path / "same") as run:
        assert (run.folder / "checkpoints" / "step-00000060").exists()
        assert json.loads((run.folder / "status.json").read_text())["run_id"] == "abc"


def test_other_machines_set_their_files_of_another_run_aside(s3, tmp_path, capsys):
    """The chief sees only its own working copy: they were sent into this run."""
    with stored(tmp_path / "here", Cluster.of_workers(["one:1", "two:1"], 1)) as run:
        log, events = run.folder / "logs" / "rank-1.jsonl", run.folder / "tensorboard" / "events"
        events.parent.mkdir()
        events.touch()
        observer = JsonlObserver(log, run_id="abc", attempt=0, rank=1)
        observer(Event("start", 0, {}))
        observer.close()
        run.bring_own("abc")
        assert log.exists() and events.exists()
        run.bring_own("def")
        assert os.listdir(log.parent) == [] and not events.parent.exists()
        (aside,) = run.folder.glob("set-aside-*")
        assert sorted(os.listdir(aside)) == ["rank-1.jsonl", "tensorboard"] and aside.name in capsys.readouterr().err
    assert not s3.names()


@pytest.mark.parametrize("name", ["train-00.tfrecord", "one/status.json", "flags.txt"])
def test_a_place_that_holds_something_else_is_refused(s3, tmp_path, name):
    s3.change(f"runs/one/{name}", b"anything")
    with (
        pytest.raises(ConfigError, match=f"--run_dir={URL} contains {name}, which is not part of a run"),
        stored(tmp_path / "a"),
    ):
        pass
    assert s3.names() == [f"runs/one/{name}"] and not (tmp_path / "a" / name).exists()


def test_a_working_copy_of_the_same_run_is_gone_on_with(s3, tmp_path, capsys):
    for _ in range(2):
        with stored(tmp_path / "here") as run:
            write_status(run.folder, "running", "abc")
            (run.folder / "logs" / "rank-0.jsonl").open("a").write("more\n")
    assert s3.content("runs/one/logs/rank-0.jsonl") == b"more\nmore\n"
    assert capsys.readouterr().err == ""


def test_a_second_job_is_refused_and_nothing_of_the_first_touched(s3, tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.storage.store_lease._PATIENCE", Patience(dead=60.0, damaged=1.0, to_end=0.1))
    with stored(tmp_path / "here"):
        lease = s3.content("runs/one/lease.json")
        with pytest.raises(ConfigError, match="in use by another job"), stored(tmp_path / "there", job="another"):
            pass
        assert s3.content("runs/one/lease.json") == lease


@pytest.fixture
def not_tried_long(monkeypatch):
    """How long a run that ends tries to give back its place in a store that is away."""
    monkeypatch.setattr("tfdist.run.remote_run._GIVE_BACK_SECONDS", 0.3)


def first_said(run: RemoteRun) -> list[str]:
    """What the run says first of its store, within 30 seconds."""
    deadline, said = time.monotonic() + 30, []
    while not said and time.monotonic() < deadline:
        said = list(run.messages())
        time.sleep(0.02)
    return said


@pytest.mark.slow
def test_a_store_that_is_away_is_said_once_and_again_later(through_proxy, not_tried_long, tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.storage.mirror._PERIOD_SECONDS", 0.05)
    away = []
    with through_proxy(lambda method, path: "500" if away else ""):
        refusal = pytest.raises(CheckpointError, match="Not all of the run could be sent.*start again on this machine")
        with refusal, stored(tmp_path / "here", timeout=0.5) as run:
            begin(run)
            assert list(run.messages()) == []
            away.append(True)
            (run.folder / "logs" / "rank-0.jsonl").write_text("one\n")
            said = first_said(run)
            assert len(said) == 1 and said[0].startswith(f"NOT SENT: {URL}")
            assert list(run.messages()) == []


@pytest.mark.slow
def test_a_silent_store_is_said_and_holds_the_end_up_no_longer_than_allowed(
    through_proxy, not_tried_long, tmp_path, monkeypatch
):
    monkeypatch.setattr("tfdist.storage.mirror._PERIOD_SECONDS", 0.05)
    monkeypatch.setattr("tfdist.run.remote_run.SILENT_SECONDS", 0.5)
    silent = []
    with through_proxy(lambda method, path: "silence" if silent else ""):
        with pytest.raises(CheckpointError, match="does not answer"), stored(tmp_path / "here", timeout=1.0) as run:
            begin(run)
            silent.append(True)
            (run.folder / "logs" / "rank-0.jsonl").write_text("one\n")
            said = first_said(run)
            assert len(said) == 1 and "writing logs/rank-0.jsonl has taken" in said[0]
            ending = time.monotonic()
        assert time.monotonic() - ending < 15


@pytest.mark.slow
def test_an_error_of_the_run_is_not_hidden_by_the_store(through_proxy, not_tried_long, tmp_path):
    away = []
    raised = pytest.raises(KeyError, match="of the run")
    with (
        through_proxy(lambda method, path: "500" if away else ""),
        raised,
        stored(tmp_path / "here", timeout=0.5) as run,
    ):
        (run.folder / "logs" / "rank-0.jsonl").write_text("one\n")
        away.append(True)
        raise KeyError("of the run")


def test_a_status_that_is_none_in_a_store_is_no_run(s3, tmp_path):
    write_status(tmp_path, "finished", "abc")  # a working copy, of a chief that was here before
    for text in (b"[1]", b"{", b'{"run_id": 3}'):
        s3.change("runs/one/status.json", text)
        assert not is_finished(URL, tmp_path, before={}, seconds=0.0)
    assert ObjectStore(URL).text("status.json")
