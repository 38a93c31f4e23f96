"""--backup_dir=URL (tfdist/run/remote_backup.py): against a real server, with a state of two arrays for a model."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from tests.stores.s3_server import BUCKET
from tests.unit.run.test_recovery import recovery_of
from tfdist.config import Config
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.control.lease_owner import Patience
from tfdist.storage import object_store

BACKUP = "backups/one"
URL = f"s3://{BUCKET}/{BACKUP}"


@pytest.fixture
def not_tried_long(monkeypatch):
    """How long a run that ends tries to give back its place in a store that is away, or refuses."""
    monkeypatch.setattr("tfdist.run.remote_backup._GIVE_BACK_SECONDS", 0.5)
    monkeypatch.setattr(object_store, "_REFUSED_SECONDS", 0.2)


def opened(tmp_path, machine="here", run="run", run_id="abc", **flags):
    """A run that has restored, on a machine of its own; its run folder is on that machine, too."""
    folder = tmp_path / machine / run
    folder.mkdir(parents=True, exist_ok=True)
    flags = {"backup_dir": URL, "backup_every": 2, "store_timeout": 20.0, **flags}
    recovery = recovery_of(folder, cache_dir=str(tmp_path / machine / "cache"), **flags)
    recovery.run_id = run_id
    try:
        return recovery, *recovery.restore()
    except BaseException:
        recovery.files.close()
        raise


def ended(recovery, finished=False):
    recovery.files.end_backup(finished)
    recovery.files.close()


def backed_up(recovery, *steps):
    for step in steps:
        recovery.state.go_to(step)
        recovery.back_up(step)
        recovery.files.backup.writer.wait()
        recovery.files._stored_backup.send_rest()


def steps_there(s3, expected):
    """The one before is removed after the next is there."""
    deadline = time.monotonic() + 10
    while (found := _steps_there(s3)) != expected and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _steps_there(s3):
    return sorted({int(name.split("step-")[1][:8]) for name in s3.names(BACKUP) if "/manifest.json" in name})


def test_a_backup_is_gone_on_with_on_another_machine_and_deleted_at_the_end(s3, tmp_path):
    first, _, step = opened(tmp_path)
    assert step == 0
    backed_up(first, 2, 4, 6)
    assert steps_there(s3, [6]) == [6], "each takes the place of the one before"
    assert s3.content(f"{BACKUP}/lease.json")
    ended(first)
    assert s3.content(f"{BACKUP}/lease.json") is None
    second, messages, step = opened(tmp_path, "there")
    assert step == 6 and (second.state.arrays["model/0000"] == 6).all() and "resumed from" in messages[0]
    backed_up(second, 8)
    assert steps_there(s3, [8]) == [8]
    ended(second, finished=True)
    assert not s3.names(BACKUP) and not second.files.backup.store.steps()


@pytest.mark.slow
def test_the_one_before_is_kept_too_if_asked_for_and_believed_if_the_newest_is_damaged(s3, tmp_path):
    first, *_ = opened(tmp_path, double_backup=True, delete_backup=False)
    backed_up(first, 2, 4, 6)
    assert steps_there(s3, [4, 6]) == [4, 6]
    ended(first, finished=True)
    data = next(name for name in s3.names(f"{BACKUP}/checkpoints/step-00000006") if ".data-" in name)
    s3.change(data, s3.content(data)[:-1] + b"?")
    second, messages, step = opened(tmp_path, "there", double_backup=True)
    assert step == 4 and "skipped" in messages[0]
    backed_up(second, 6)
    ended(second, finished=True)
    assert not s3.names(BACKUP), "nothing of the damaged one is left"


def test_a_run_that_has_only_a_damaged_backup_is_refused_as_often_as_it_starts(s3, tmp_path):
    first, *_ = opened(tmp_path)
    backed_up(first, 2)
    ended(first)
    (data,) = (name for name in s3.names(BACKUP) if ".data-" in name)
    s3.change(data, s3.content(data)[:-1] + b"?")
    before = s3.names()
    for machine in ("there", "elsewhere"):
        with pytest.raises(CheckpointError, match=f"No snapshot .* is valid .*{URL}.*--run_dir and --backup_dir"):
            opened(tmp_path, machine)
        assert s3.names() == before


def test_what_is_half_sent_is_not_believed(s3, tmp_path):
    first, *_ = opened(tmp_path)
    backed_up(first, 2)
    s3.change(f"{BACKUP}/checkpoints/step-00000004/state-4.index", b"half")
    ended(first)
    second, _, step = opened(tmp_path, "there")
    assert step == 2 and not s3.names(f"{BACKUP}/checkpoints/step-00000004")
    ended(second)


@pytest.mark.slow
def test_of_what_the_cache_holds_only_this_runs_counts(s3, tmp_path):
    first, *_ = opened(tmp_path)
    backed_up(first, 2, 4)
    ended(first)
    s3.empty()
    (tmp_path / "here" / "run" / "status.json").write_text(json.dumps({"status": "running", "run_id": "abc"}))
    same, _, step = opened(tmp_path)
    assert step == 4
    same.files._stored_backup.send_rest()
    ended(same)
    s3.empty()
    other, _, step = opened(tmp_path, run="other", run_id="def")  # in whose run folder there is nothing yet
    assert step == 0
    backed_up(other, 2)
    assert steps_there(s3, [2]) == [2]
    ended(other)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "403"])
def test_what_was_not_sent_is_gone_on_with_on_the_same_machine(
    s3, tmp_path, through_proxy, not_tried_long, capsys, fault
):
    """The store is away, or has become one that may only be read."""
    away = []
    with through_proxy(lambda method, path: fault if away and (fault == "500" or method != "GET") else ""):
        first, *_ = opened(tmp_path, store_timeout=0.5)
        backed_up(first, 2)
        away.append(True)
        backed_up(first, 4)
        said, deadline = "", time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            said = "".join(values["message"] for kind, values in first.files.messages() if kind == "warning")
            time.sleep(0.02)
        assert said.startswith(f"NOT SENT: the backup: {URL}") and "Training continues" in said
        ended(first)
        away.clear()
    assert "THE LAST BACKUP WAS NOT SENT" in capsys.readouterr().err
    s3.remove(f"{BACKUP}/lease.json")  # as of a process that has ended
    (tmp_path / "here" / "run" / "status.json").write_text(json.dumps({"status": "running", "run_id": "abc"}))
    second, _, step = opened(tmp_path)
    assert step == 4
    second.files._stored_backup.send_rest()
    assert steps_there(s3, [4]) == [4]
    ended(second)


@pytest.mark.slow
def test_a_store_that_is_away_when_the_run_has_finished_is_told_of(s3, tmp_path, through_proxy, not_tried_long, capsys):
    away = []
    with through_proxy(lambda method, path: "500" if away else ""):
        first, *_ = opened(tmp_path, store_timeout=0.5)
        backed_up(first, 2)
        away.append(True)
        ended(first, finished=True)
    assert "THE BACKUP WAS NOT DELETED" in capsys.readouterr().err


def test_a_second_job_is_refused(s3, tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.storage.store_lease._PATIENCE", Patience(dead=60.0, damaged=1.0, to_end=0.1))
    first, *_ = opened(tmp_path)
    with pytest.raises(ConfigError, match=f"--backup_dir={URL} is in use by another job"):
        opened(tmp_path, "there")
    ended(first)


def test_the_snapshots_of_a_run_are_no_backups(s3, tmp_path):
    kept = [f"{BACKUP}/checkpoints/step-00000004/manifest.json", f"{BACKUP}/status.json"]
    for name in kept:
        s3.change(name, b"{}")
    with pytest.raises(ConfigError, match=f"--backup_dir={URL} contains a run"):
        opened(tmp_path)
    assert [name for name in s3.names() if "lease" not in name] == kept


def test_a_cache_that_cannot_be_written(s3, tmp_path):
    (tmp_path / "here").mkdir()
    shutil.copyfile(__file__, tmp_path / "here" / "cache")
    with pytest.raises(ConfigError, match=f"--backup_dir={URL}.*--cache_dir"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s3:/x/y", "s3://x/y"),
        ("s4://x/y", "s4://"),
        ("s3://x", "names no place"),
        ("s3://b/run/backup", "outside the run"),
        ("s3://b/run/", "outside the run"),
        ("s3://b", "names no place"),
    ],
)
def test_urls_that_name_no_place(place, words):
    with pytest.raises(ConfigError, match="--backup_dir") as error:
        Config().replace(steps=1, run_dir="s3://b/run", backup_dir=place).validate()
    assert words in str(error.value)
