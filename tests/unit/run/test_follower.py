"""When a run that is followed is over, and by which flags its snapshots are evaluated."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tfdist import flags
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.artifacts.status import write_status
from tfdist.config import Config
from tfdist.control.exit_codes import StartupError
from tfdist.run import follower, snapshot_evaluation


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """A run that has finished at step 10. `story` has what happens next, one function each time the follower sleeps.
    `evaluated` gets (step, --eval_samples) of each evaluation."""
    run = SimpleNamespace(folder=tmp_path, story=[], evaluated=[], now=0.0)
    run.store = SnapshotFolder(str(tmp_path / "checkpoints"))
    run.config = Config().replace(run_dir=str(tmp_path), trackers="none", steps=10, global_batch=8, eval_samples=5)

    def sleep(seconds):
        run.now += seconds
        if run.story:
            run.story.pop(0)()

    def save(step, config=None):
        """As a run does: its flags, its status, a snapshot."""
        flags.write_flagfile(config or run.config, tmp_path / flags.FLAGS_FILE, "")
        write_status(tmp_path, "running", "abc")
        run.store.write(step, {"train/step": np.array(step)}, {})

    def evaluate(job, store, snapshot):
        run.evaluated.append((snapshot.step, job.config.data.eval_samples))
        return {"step": snapshot.step}

    run.save, run.status = save, lambda status: write_status(tmp_path, status, "abc")
    save(10)
    run.status("finished")
    monkeypatch.setattr(follower, "time", SimpleNamespace(monotonic=lambda: run.now, sleep=sleep))
    monkeypatch.setattr(snapshot_evaluation, "evaluate_snapshot", evaluate)
    monkeypatch.setattr(
        snapshot_evaluation, "compose", lambda config, runtime=None: SimpleNamespace(config=config, runtime=None)
    )
    return run


def test_an_evaluator_of_a_job_waits_for_it_and_uses_its_flags(resumed):
    """It took the flags of the attempt before from flags.txt, and the run for finished."""
    config = resumed.config.replace(steps=20, eval_samples=9)
    resumed.story = [lambda: None, lambda: resumed.save(20, config), lambda: resumed.status("finished")]
    assert follower.follow(config) == 0
    assert resumed.evaluated == [(10, 9), (20, 9)] and not resumed.story


def test_one_that_follows_sees_that_a_resumed_run_has_other_flags(resumed):
    """All further snapshots were evaluated by the flags of the attempt before."""
    resumed.status("running")  # that attempt was killed
    resumed.story = [lambda: resumed.save(20, resumed.config.replace(eval_samples=9)), lambda: resumed.status("failed")]
    argv = [f"--run_dir={resumed.folder}", "--trackers=none"]
    assert follower.follow(flags.parse(argv).config, argv) == 0
    assert resumed.evaluated == [(10, 5), (20, 9)] and not resumed.story


def test_the_flags_that_a_run_has_now_are_those_in_its_store(tmp_path):
    (tmp_path / "flags.txt").write_text("--steps=5\n--global_batch=8\n")
    run = SimpleNamespace(objects=object(), folder=tmp_path, text={"flags.txt": "--steps=5\n--global_batch=16\n"}.get)
    argv = [f"--run_dir={tmp_path}"]
    assert follower.flags_now(flags.parse(argv).config, argv, run).batch.global_batch == 16


@pytest.mark.parametrize("steps, seconds", [(10, 1), (20, 1200)])
def test_an_evaluator_that_comes_after_the_end_does_not_wait_for_another(resumed, steps, seconds):
    assert follower.follow(resumed.config.replace(steps=steps, startup_timeout=300.0)) == 0
    assert resumed.evaluated == [(10, 5)] and resumed.now == pytest.approx(seconds, abs=1.5)


def test_a_snapshot_that_has_been_evaluated_is_not_verified_again(resumed, monkeypatch):
    """Each second all of it was read."""
    verified, verify = [], SnapshotFolder.verify
    monkeypatch.setattr(SnapshotFolder, "verify", lambda self, step: (verified.append(step), verify(self, step))[1])
    resumed.story = [lambda: None] * 5 + [lambda: resumed.save(20), lambda: resumed.status("finished")]
    assert follower.follow(resumed.config.replace(steps=20)) == 0
    assert verified == [10, 20]


@pytest.mark.parametrize("argv, seconds", [(None, 1200), ([], 300)])
def test_an_evaluator_of_a_job_waits_as_long_as_a_start_may_take(resumed, argv, seconds):
    (resumed.folder / "status.json").unlink()
    config = resumed.config.replace(startup_timeout=300.0)
    with pytest.raises(StartupError, match=f"No run appeared in .* within {seconds} s"):
        follower.follow(config, argv)
    assert resumed.now == pytest.approx(seconds, abs=1.5)


def test_the_global_batch_that_an_evaluator_of_a_job_is_not_told_is_the_runs(resumed, monkeypatch):
    """Else --epochs would mean other steps in its one process."""
    composed = []
    monkeypatch.setattr(
        snapshot_evaluation,
        "compose",
        lambda config, runtime=None: composed.append(config) or SimpleNamespace(config=config, runtime=None),
    )
    assert follower.follow(resumed.config.replace(global_batch=0, micro_batch=4)) == 0
    assert [config.batch.global_batch for config in composed] == [8]


@pytest.mark.parametrize("complete", [False, True])
def test_one_that_follows_a_run_in_a_store_waits_for_its_flags(resumed, monkeypatch, complete):
    """They came 20 seconds after the status: until then it had the flags of a run of the digits."""
    file = resumed.folder / flags.FLAGS_FILE
    text, composed, compose = file.read_text(), [], snapshot_evaluation.compose
    file.unlink()
    resumed.status("running")
    resumed.story = [lambda: file.write_text(text), lambda: resumed.status("finished")]
    run = SimpleNamespace(place="s3://bucket/run", objects=object(), folder=resumed.folder, bring=lambda: None)
    run.send_back = lambda made: None
    run.text = lambda name: file.with_name(name).read_text() if file.with_name(name).exists() else ""
    monkeypatch.setattr(snapshot_evaluation, "read_run", lambda config: run)
    monkeypatch.setattr(follower, "bring_for_reading", lambda *_, **__: None)
    monkeypatch.setattr(
        snapshot_evaluation,
        "compose",
        lambda config, runtime=None: composed.append(config.batch.global_batch) or compose(config),
    )
    config, argv = resumed.config.replace(global_batch=0), None
    if not complete:
        argv = [f"--run_dir={resumed.folder}", "--trackers=none"]
        config = flags.parse(argv).config
    assert follower.follow(config, argv) == 0
    assert composed == [8] and resumed.evaluated and not resumed.story


def test_a_run_in_a_store_whose_flags_never_come_is_none(resumed, monkeypatch):
    run = SimpleNamespace(place="s3://bucket/run", objects=object())
    run.text = {"status.json": '{"status": "running", "run_id": "abc"}'}.get
    monkeypatch.setattr(snapshot_evaluation, "read_run", lambda config: run)
    with pytest.raises(
        StartupError, match=r"No run appeared in --run_dir=s3://bucket/run within 300 s \(there is no flags.txt\)"
    ):
        follower.follow(resumed.config.replace(startup_timeout=300.0), [])
