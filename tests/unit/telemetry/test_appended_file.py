"""The files of a run's events when the disk is full for a while, or somebody removes them."""

import contextlib
import json
import resource
import shutil

from tfdist.telemetry import appended_file
from tfdist.telemetry.events import Event, FanOut
from tfdist.telemetry.jsonl import JsonlObserver, read_jsonl
from tfdist.telemetry.plot import draw_curves


@contextlib.contextmanager
def longest_file(size):
    """As a full disk: what goes beyond this size is not written, and a piece across it only in part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train(step):
    return Event("train", step, {"train/loss": 1 / step})


def log_of(path, run_id="r"):
    return FanOut([JsonlObserver(path, run_id=run_id, attempt=0, rank=0)])


def begun(tmp_path):
    """The path of a log and the log, with one event."""
    path = tmp_path / "logs" / "rank-0.jsonl"
    log = log_of(path)
    log(train(1))
    return path, log


def steps(path):
    return [record["step"] for record in read_jsonl(path)]


def test_a_disk_that_is_full_for_a_while_costs_no_line(tmp_path, capsys):
    path, log = begun(tmp_path)
    with longest_file(path.stat().st_size + 40):
        log(train(2))
        log(train(3))
        assert path.stat().st_size == len(path.read_bytes().split(b"\n")[0]) + 41 and steps(path) == [1]
    error = capsys.readouterr().err
    assert error == (
        f"tfdist: WARNING: {path} cannot be written (File too large): its events are kept in memory until it can.\n"
    )
    log(train(4))
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert capsys.readouterr().err == f"tfdist: {path} can be written again.\n"


def test_what_waits_for_a_full_disk_is_bounded(tmp_path, capsys, monkeypatch):
    path = tmp_path / "rank-0.jsonl"
    log = log_of(path)
    log(train(1))
    monkeypatch.setattr(log.observers[0]._log, "_limit", 3 * path.stat().st_size + 50)
    with longest_file(path.stat().st_size + 40):
        for step in range(2, 9):
            log(train(step))
    log(train(9))
    assert steps(path) == [1, 2, 8, 9]  # of 2 a part was in the file
    assert "can be written again. 5 events are lost: there were too many for the memory." in capsys.readouterr().err
    for step in (10, 11):
        log(train(step))
    assert steps(path)[-2:] == [10, 11] and capsys.readouterr().err == ""


def test_a_log_that_is_whole_again_at_the_end_only(tmp_path, capsys):
    path = tmp_path / "rank-0.jsonl"
    log = log_of(path)
    with longest_file(10):
        log(train(1))
    log.close()
    assert steps(path) == [1] and "JsonlObserver failed" not in capsys.readouterr().err


def test_a_full_standard_error_does_not_switch_the_log_off(tmp_path, monkeypatch):
    """`> RUN/output.txt 2>&1` is on the same full disk."""

    def full(sentence):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(appended_file, "say", full)
    path = tmp_path / "rank-0.jsonl"
    log = log_of(path)
    with longest_file(10):
        log(train(1))
    log(train(2))
    assert steps(path) == [1, 2]


def test_a_log_that_is_removed_or_renamed_goes_on_under_its_name(tmp_path, capsys):
    path, log = begun(tmp_path)
    shutil.rmtree(path.parent)
    log(train(2))
    log(train(3))
    path.rename(path.with_suffix(".1"))
    log(train(4))
    other = path.with_suffix(".2")
    other.write_text(path.read_text() + '{"half')
    other.replace(path)
    log(train(5))
    assert steps(path.with_suffix(".1")) == [2, 3] and steps(path) == [4, 5]
    shutil.rmtree(path.parent)
    log.close()
    assert not path.parent.exists()
    error = capsys.readouterr().err
    assert error.count(f"WARNING: {path} was removed or renamed: it is reopened.") == 3 == error.count("\n")


def test_what_was_cut_by_a_full_disk_is_whole_in_the_new_file(tmp_path, capsys):
    path, log = begun(tmp_path)
    with longest_file(path.stat().st_size + 40):
        log(train(2))
    shutil.rmtree(path.parent)
    path.parent.write_text("in the way")
    log(train(3))
    path.parent.unlink()
    log(train(4))
    assert steps(path) == [2, 3, 4]
    assert capsys.readouterr().err.count("\n") == 3


def test_a_link_in_place_of_a_removed_log_is_not_followed(tmp_path, capsys):
    path, other = tmp_path / "rank-0.jsonl", tmp_path / "other"
    log = log_of(path)
    log(train(1))
    path.unlink()
    other.write_text("")
    path.symlink_to(other)
    log(train(2))
    assert other.read_text() == "" and "cannot be written (Too many levels of symbolic" in capsys.readouterr().err
    path.unlink()
    log.close()
    assert steps(path) == [2]


def test_a_folder_in_place_of_the_log_may_pass(tmp_path, capsys):
    path, log = begun(tmp_path)
    path.rename(tmp_path / "old")
    path.mkdir()
    log(train(2))
    assert "no picture" in draw_curves(path, tmp_path / "picture.png", None)
    path.rmdir()
    log(train(3))
    log.close()
    assert steps(path) == [2, 3] and "is switched off" not in capsys.readouterr().err


def test_a_log_of_another_run_is_not_appended_to(tmp_path, capsys):
    """The folder of a run was removed, and another run has begun there."""
    path = tmp_path / "rank-0.jsonl"
    log = log_of(path)
    log(train(1))
    path.unlink()
    log_of(path, run_id="other")(train(2))
    log(train(3))
    assert steps(path) == [2]
    assert f"{path} now belongs to another run" in capsys.readouterr().err
