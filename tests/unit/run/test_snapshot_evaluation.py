"""What tfdist.evaluate says where there is nothing to evaluate."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tfdist import flags
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.artifacts.status import note_failure, read_status, write_status
from tfdist.config import Config
from tfdist.control.exit_codes import (
    CheckpointError,
    ConfigError,
    DivergedError,
    ExitCode,
    PeerFailedError,
    PeerLostError,
)
from tfdist.run import follower, snapshot_evaluation


def test_a_folder_that_holds_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"--run_dir=.*/nowhere does not exist: give the folder of a run"):
        snapshot_evaluation.main([f"--run_dir={tmp_path / 'nowhere'}"])
    with pytest.raises(ConfigError, match=r"contains no run \(no flags.txt, no checkpoints\)"):
        snapshot_evaluation.main([f"--run_dir={tmp_path}"])
    (tmp_path / "flags.txt").write_text("--steps=5\n")
    with pytest.raises(ConfigError, match="has no snapshots yet"):
        snapshot_evaluation.main([f"--run_dir={tmp_path}"])


def test_a_step_that_has_no_snapshot(tmp_path):
    (tmp_path / "flags.txt").write_text("--steps=50\n--global_batch=8\n")
    store = SnapshotFolder(str(tmp_path / "checkpoints"))
    for step in (10, 20):
        store.write(step, {"train/step": np.array(step)}, {})
    with pytest.raises(
        CheckpointError, match=r"--at_step=7: .*/checkpoints has no snapshot of that step; it has 10, 20\.$"
    ):
        snapshot_evaluation.main([f"--run_dir={tmp_path}", "--at_step=7"])


def test_one_step_and_each_new_one_are_two_wishes():
    with pytest.raises(ConfigError, match="--at_step=4 evaluates one snapshot, --follow each new one"):
        snapshot_evaluation.main(["--run_dir=x", "--follow", "--at_step=4"])


def test_where_no_flags_are_stored_nobody_asks_how_long_to_train(tmp_path):
    config = Config().replace(run_dir=str(tmp_path), source="digits", model="mlp", global_batch=8)
    assert snapshot_evaluation.run_configuration(config, [], tmp_path).run.steps == 1


def test_flags_given_again_do_not_contradict_what_the_run_has_resolved(tmp_path):
    """The launcher's evaluator gets all flags of the workers: with --epochs or --jit_tune nothing was evaluated."""
    given = ["--flagfile=flags/digits_cnn.flags", "--jit_tune", f"--run_dir={tmp_path}"]
    config = flags.parse(given).config
    resolved = config.replace(steps=30, epochs=0.0, warmup_steps=5, jit_tune=False, jit_compile=True)
    # Runs were begun so before it was refused.
    resolved = resolved.replace(strategy="mesh", mesh="model=2", histograms_every=9)
    flags.write_flagfile(resolved, tmp_path / flags.FLAGS_FILE, "")
    found = snapshot_evaluation.run_configuration(config, [*given, "--eval_samples=7"], tmp_path)
    assert found == resolved.replace(eval_samples=7, histograms_every=0)


@pytest.fixture
def running(tmp_path, monkeypatch):
    """A run that writes a snapshot and removes the one before while the model of an evaluation is built, and, if
    `again` says so, while each is read. The evaluation sees the weights only."""
    (tmp_path / "flags.txt").write_text("--steps=50\n--global_batch=8\n")
    store = SnapshotFolder(str(tmp_path / "checkpoints"))
    run = SimpleNamespace(folder=tmp_path, store=store, again=False, composed=0, assigned=[], next=11)

    def go_on():
        store.write(run.next, {"train/step": np.array(run.next)}, {})
        store.delete(run.next - 1)
        run.next += 1

    def compose(config):
        run.composed += 1
        go_on()
        return SimpleNamespace(model=None, optimizer=None, step=SimpleNamespace(variables={}))

    read = SnapshotFolder.read

    def read_late(self, snapshot):
        if run.again:
            go_on()
        return read(self, snapshot)

    store.write(10, {"train/step": np.array(10)}, {})
    monkeypatch.setattr(SnapshotFolder, "read", read_late)
    monkeypatch.setattr(snapshot_evaluation, "compose", compose)
    monkeypatch.setattr(snapshot_evaluation, "_scores", lambda job: {"loss": 1.0})
    monkeypatch.setattr("tfdist.artifacts.state.collect", lambda *_: {})
    monkeypatch.setattr("tfdist.artifacts.state.assign", lambda there, arrays: run.assigned.append(arrays))
    return run


def test_where_the_run_removes_the_newest_snapshot_meanwhile_another_is_taken(running, capsys):
    """It ended with a traceback of TensorFlow's."""
    assert snapshot_evaluation.main([f"--run_dir={running.folder}"]) == 0
    assert running.composed == 1 and running.assigned == [{"train/step": 11}]
    out, err = capsys.readouterr()
    assert json.loads(out.partition("evaluation of ")[2].partition(": ")[2])["step"] == 11 and "skipped" not in err


def test_a_run_that_removes_each_snapshot_before_it_is_read(running):
    running.again = True
    with pytest.raises(
        CheckpointError, match=r"has removed 10 snapshots in .*checkpoints before they were read: keep more with --keep"
    ):
        snapshot_evaluation.main([f"--run_dir={running.folder}"])
    assert running.composed == 1


def test_a_step_whose_snapshot_the_run_removes_meanwhile(running):
    with pytest.raises(
        CheckpointError, match=r"^--at_step=10: the run has removed .*/step-00000010 before it was read"
    ):
        snapshot_evaluation.main([f"--run_dir={running.folder}", "--at_step=10"])


def test_a_snapshot_that_is_removed_while_its_files_are_compared_is_not_called_damaged(running, monkeypatch, capsys):
    verify = SnapshotFolder.verify

    def verify_late(self, step):
        if step == 10:
            self.write(20, {"train/step": np.array(20)}, {})
            self.delete(10)
            running.next = 21
        return verify(self, step)

    monkeypatch.setattr(SnapshotFolder, "verify", verify_late)
    assert snapshot_evaluation.main([f"--run_dir={running.folder}"]) == 0
    assert running.assigned == [{"train/step": 21}] and "skipped" not in capsys.readouterr().err


def test_a_snapshot_that_is_there_and_cannot_be_read_is_no_removed_one(running, monkeypatch):
    def fail(self, snapshot):
        raise KeyError("of the reader")

    monkeypatch.setattr(SnapshotFolder, "read", fail)
    monkeypatch.setattr(snapshot_evaluation, "compose", lambda config: SimpleNamespace())
    with pytest.raises(KeyError, match="of the reader"):
        snapshot_evaluation.main([f"--run_dir={running.folder}"])


@pytest.mark.parametrize("status", ["finished", "failed"])
def test_one_that_follows_goes_on_with_the_next(running, status, monkeypatch, capsys):
    write_status(running.folder, "running", "abc")
    read = SnapshotFolder.read

    def read_late(self, snapshot):
        if snapshot.step == 11:
            self.write(12, {"train/step": np.array(12)}, {})
            self.delete(11)
            write_status(running.folder, status, "abc")
        return read(self, snapshot)

    monkeypatch.setattr(SnapshotFolder, "read", read_late)
    config = Config().replace(run_dir=str(running.folder), trackers="none")
    monkeypatch.setattr(snapshot_evaluation, "run_configuration", lambda *_: config)
    job = SimpleNamespace(config=config, model=None, optimizer=None, step=SimpleNamespace(variables={}))
    compose = snapshot_evaluation.compose
    monkeypatch.setattr(snapshot_evaluation, "compose", lambda config: compose(config) and job)
    assert follower.follow(config) == 0
    assert running.assigned == [{"train/step": 12}]
    assert ("has ended with an error" in capsys.readouterr().err) == (status == "failed")


def test_only_what_no_restart_mends_counts_as_failed(tmp_path):
    for error, status in [
        (PeerLostError("gone"), "running"),
        (ConfigError("another job has taken over the folder"), "running"),
        (KeyError("of the user's"), "running"),
        (DivergedError("NaN"), "failed"),
        (PeerFailedError("worker 1 failed: no data", ExitCode.DATA), "failed"),
    ]:
        write_status(tmp_path, "running", "abc")
        note_failure(tmp_path, error, "abc")
        assert read_status(tmp_path) == {"status": status, "run_id": "abc", "attempt": 0}
