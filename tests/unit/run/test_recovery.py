"""What a run goes on from, with a state of two arrays in place of a model."""

from __future__ import annotations

import contextlib
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.stores.s3_server import BUCKET
from tests.unit.control.test_own_files import let_own
from tfdist.artifacts.restore import LossContinuity
from tfdist.artifacts.sharded_snapshots import Shard
from tfdist.config import Config
from tfdist.config.run_options import RunConfig
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import CheckpointError, ConfigError, DivergedError
from tfdist.control.faults import Faults
from tfdist.control.lease_owner import Patience
from tfdist.data.sources.split import missing
from tfdist.run.in_memory_checkpoint import WorkerMemory
from tfdist.run.recovery import Recovery
from tfdist.run.remote_run import RemoteRun
from tfdist.run.remote_shards import RemoteShards
from tfdist.runtime.one_device import OneDevice
from tfdist.telemetry.timer import Clock


class State:
    """In place of the state of a model. `arrays`: what it is; "train/step" is the counter."""

    def __init__(self):
        self.arrays = {"model/0000": np.zeros(3, np.float32), "train/step": np.zeros((), np.int64)}

    def table(self):
        return {key: (key, list(array.shape), str(array.dtype)) for key, array in self.arrays.items()}

    def to_host(self, wanted=True, into=None, only=""):
        return {key: array.copy() for key, array in self.arrays.items() if key.startswith(only)} if wanted else {}

    def held(self):
        return []

    def check(self, stored):
        assert set(stored) == set(self.arrays)

    def fitted(self, arrays):
        return arrays

    def assign(self, arrays):
        self.arrays = {key: np.array(array) for key, array in arrays.items()}

    def first_of_stage(self):
        return 0

    def go_to(self, step):
        self.arrays = {"model/0000": np.full(3, step, np.float32), "train/step": np.array(step, np.int64)}


class Worker(OneDevice):
    """Rank 1 of 2, which hears `messages` from the chief."""

    rank, size, replicas = 1, 2, 2

    def __init__(self, chief):
        self.chief = chief

    def all_gather(self, array):
        return np.stack([array, array])

    def broadcast(self, arrays):
        return self.chief


def recovery_of(folder, memory=None, runtime=None, samples=(7, 8), size=80, stored=None, **flags):
    """samples: checksums of what the data hold; a function that tells them."""
    config = Config().replace(**{"run_dir": str(folder), "steps": 100, "global_batch": 8, **flags})
    contents = samples if callable(samples) else lambda: [*samples]
    state = State()
    update = SimpleNamespace(averaged=contextlib.nullcontext)
    job = SimpleNamespace(
        config=config,
        runtime=runtime or OneDevice(),
        state=state,
        plan=SimpleNamespace(global_batch=config.batch.global_batch),
        train_split=SimpleNamespace(
            size=size, stream=missing, stream_shards=1, records=None, name="fake", contents=contents
        ),
        step=SimpleNamespace(
            counter=SimpleNamespace(numpy=lambda: state.arrays["train/step"]), update=update, variables={}
        ),
        schedule=lambda iterations: config.schedule.learning_rate,
        optimizer=SimpleNamespace(iterations=SimpleNamespace(value=0)),
        model=SimpleNamespace(non_trainable_variables=[]),
        stream_cut=1,
    )
    if job.runtime.size > 1:
        job.state = None
    return Recovery(job, folder, Clock(), Faults({}, folder / "faults"), memory, stored)


def saved(folder, *steps, **flags):
    recovery = recovery_of(folder, **flags)
    for step in steps:
        recovery.state.go_to(step)
        recovery.save(step)
    assert recovery.files.finish() == ""
    return recovery


def test_a_run_goes_on_from_its_newest_snapshot(tmp_path):
    saved(tmp_path, 5, 9)
    recovery = recovery_of(tmp_path)
    messages, step = recovery.restore()
    assert step == 9 and recovery.progress.consumed(9) == 72 and (recovery.state.arrays["model/0000"] == 9).all()
    assert "resumed from" in messages[0] and "step 9, 72 samples consumed" in messages[0]
    recovery.save(9)  # there is one
    assert recovery.files.finish() == "" and recovery.files.writer.stats.saves == 0
    assert recovery_of(tmp_path / "other").restore() == ([], 0)


def test_who_must_not_go_on_says_so(tmp_path):
    saved(tmp_path, 5)
    with pytest.raises(CheckpointError, match="--resume=never"):
        recovery_of(tmp_path, resume="never").restore()
    with pytest.raises(CheckpointError, match="another configuration .*--seed: 0 there, 1 now"):
        recovery_of(tmp_path, seed=1).restore()


def test_a_changed_learning_rate_is_refused_or_said(tmp_path):
    saved(tmp_path, 5, learning_rate=0.01)
    with pytest.raises(CheckpointError, match="--learning_rate: 0.01 there, 0.5 now"):
        recovery_of(tmp_path, learning_rate=0.5).restore()
    messages, step = recovery_of(tmp_path, learning_rate=0.5, allow_config_change=True).restore()
    assert step == 5 and "the learning rate jumps from 0.01 to 0.5" in messages[-1]


def test_the_sums_since_the_last_log_line_are_gone_on_with(tmp_path):
    recovery = recovery_of(tmp_path)
    recovery.interval_sums.restore({"steps": 3, "weight": 24.0, "skipped": 1, "sums": {"loss": 0.1}})
    recovery.state.go_to(5)
    recovery.save(5)
    recovery.interval_sums.restore({})  # a log line
    assert recovery.files.finish() == ""
    second = recovery_of(tmp_path)
    second.restore()
    assert second.interval_sums.fields() == {"steps": 3, "weight": 24.0, "skipped": 1, "sums": {"loss": 0.1}}
    changed = recovery_of(tmp_path, label_smoothing=0.1, allow_config_change=True)  # another loss
    changed.restore()
    assert changed.interval_sums.steps == 0


def test_with_another_batch_samples_are_counted_on_and_epochs_are_refused(tmp_path):
    """--epochs would come to steps of the new batch from the beginning: it would end too early, or too late."""
    saved(tmp_path, 6)
    recovery = recovery_of(tmp_path)
    batch, size = recovery.job.plan.global_batch, recovery.job.train_split.size
    assert recovery.restore()[1] == 6
    recovery.check_epochs(RunConfig(epochs=2.0), 6)
    changed = recovery_of(tmp_path, global_batch=2 * batch, allow_config_change=True)
    assert (
        changed.restore()[1] == 6
        and changed.progress.trained(6) == 6 * batch
        and changed.progress.trained(8) == 10 * batch
    )
    assert changed.progress.epochs(6) == 6 * batch / size
    end = 6 + math.ceil((9 * size - 6 * batch) / (2 * batch))
    with pytest.raises(
        ConfigError, match=f"--epochs=9 .* trained on {6 * batch:,} samples in 6 .*--steps={end}, .* 9 "
    ):
        changed.check_epochs(RunConfig(epochs=9.0), 6)
    changed.check_epochs(RunConfig(steps=end), 6)
    changed.state.go_to(8)
    changed.save(8)
    changed.files.finish()
    again = recovery_of(tmp_path, global_batch=2 * batch, allow_config_change=True)
    assert again.restore()[1] == 8 and again.progress.trained(8) == 10 * batch


def test_what_compression_carried_on_is_left_out_only_where_a_change_is_allowed(tmp_path):
    before = recovery_of(tmp_path, strategy="mesh", compression="topk")
    before.state.go_to(5)
    before.state.arrays["train/compression_error_0000"] = np.ones((2, 3), np.float32)
    before.state.arrays["train/compression_basis_0000"] = np.ones((3, 2), np.float32)
    before.save(5)
    assert before.files.finish() == ""
    with pytest.raises(CheckpointError, match="--compression: 'topk' there, 'none' now"):
        recovery_of(tmp_path).restore()
    recovery = recovery_of(tmp_path, allow_config_change=True)
    messages, step = recovery.restore()
    assert step == 5 and sorted(recovery.state.arrays) == ["model/0000", "train/step"]
    assert "dropped gradients of 1 arrays that --compression had not sent yet" in messages[0]


def test_other_data_that_are_allowed_are_told(tmp_path):
    saved(tmp_path, 5)
    messages, _ = recovery_of(tmp_path, samples=(7, 9), allow_config_change=True).restore()
    assert "The data have changed since" in messages[0] and "resumed from" in messages[1]
    assert len(recovery_of(tmp_path, allow_config_change=True).restore()[0]) == 1


def test_a_damaged_snapshot_is_passed_over_and_set_aside(tmp_path):
    saved(tmp_path, 5, 9)
    (data,) = (tmp_path / "checkpoints" / "step-00000009").glob("*.data-*")
    data.write_bytes(b"x" * data.stat().st_size)
    messages, step = recovery_of(tmp_path).restore()
    assert step == 5 and messages[0].startswith("skipped a snapshot") and "resumed from" in messages[1]
    assert not (tmp_path / "checkpoints" / "step-00000009").exists()


def test_a_counter_that_is_not_the_snapshots_is_not_trusted(tmp_path):
    recovery = recovery_of(tmp_path)
    recovery.state.go_to(4)
    recovery.save(5)
    recovery.files.finish()
    with pytest.raises(CheckpointError, match="step 5 has a step counter of 4"):
        recovery_of(tmp_path).restore()


def test_bad_numbers_lead_back_and_past_their_samples_but_not_for_ever(tmp_path):
    recovery = saved(tmp_path, 5, on_nan="rollback", max_rollbacks=2)
    recovery.state.go_to(8)
    messages, step = recovery.rollback(8, 8)
    assert step == 5 and (recovery.state.arrays["model/0000"] == 5).all()
    assert (
        recovery.progress.consumed(5) == 64 and recovery.progress.consumed(6) == 72
    )  # as if steps 5 to 8 had been made
    assert messages[-1] == (
        "NaN or infinite values before step 8: rolled back to step 5 and skipped 24 samples, which are not trained on"
        " (rollback 1 of 2)"
    )
    recovery.save(5)  # anew: the one on disk leads back to the bad batches
    recovery.files.finish()
    again = recovery_of(tmp_path, on_nan="rollback", max_rollbacks=2)
    assert again.restore()[1] == 5 and again.progress.consumed(5) == 64
    assert recovery.rollback(6, 6)[1] == 5 and recovery.progress.consumed(5) == 72
    with pytest.raises(DivergedError, match=r"after 2 rollbacks \(--max_rollbacks=2\)"):
        recovery.rollback(7, 7)


def test_bad_numbers_lead_where_they_lead_a_run_that_nobody_stopped(tmp_path):
    """A snapshot of step 7, where the job was asked to end, is gone on from, and not gone back to; nor does it push out
    the one that is gone back to."""
    flags = {"on_nan": "rollback", "max_rollbacks": 1, "save_every": 5, "deterministic": True, "keep": 1}
    stopped = saved(tmp_path, 5, 7, 8, **flags)
    assert stopped.files.store.steps() == [5, 8]
    run = recovery_of(tmp_path, **flags)
    assert run.restore()[1] == 8
    assert run.rollback(9, 10)[1] == 5 and run.progress.consumed(5) == 10 * 8
    run.state.go_to(6)
    run.save(6)
    assert run.files.finish() == "" and run.files.store.steps() == [5, 6]
    again = recovery_of(tmp_path, **flags)
    assert again.restore()[1] == 6
    with pytest.raises(DivergedError, match=r"after 1 rollbacks \(--max_rollbacks=1\)"):
        again.rollback(9, 9)  # that it has gone back is kept
    changed = recovery_of(tmp_path, **flags, clip_norm=1.0, allow_config_change=True)
    assert changed.restore()[1] == 6 and changed.rollback(7, 7)[1] == 5


def test_bad_numbers_do_not_lead_back_to_a_backup_that_a_stop_leaves_out(tmp_path):
    """A snapshot that is asked for takes the place of its step's backup. A newer backup is in the way of others."""
    places = {"backup_dir": str(tmp_path / "backup"), "backup_every": 2}
    run = saved(tmp_path / "run", 5, on_nan="rollback", save_every=5, deterministic=True, **places)
    run.state.go_to(8)
    run.back_up(8)
    assert run.rollback(9, 10)[1] == 5 and run.files.backup.store.steps() == []
    run.state.go_to(6)
    run.back_up(6)
    run.files.give_up()
    assert run.files.backup.store.steps() == [6]


def test_nor_is_a_newer_backup_in_the_way_where_snapshots_are_made_of_parts(tmp_path):
    """It stayed, and each later one was deleted as an older one. Snapshots in the store stay until the next is made."""
    places = {"backup_dir": str(tmp_path / "backup"), "backup_every": 2}
    run = saved(tmp_path / "run", 5, 7, on_nan="rollback", save_every=5, deterministic=True, **places)
    run.state.go_to(8)
    run.back_up(8)
    files = run.files
    files._in_store = SimpleNamespace(reads=files.store, finish_or_drop=lambda seconds: None)
    files._sent, files._sends = object(), True
    snapshot, _ = files.bring_and_pick(run.config, back=True)
    assert snapshot.step == 5 and files.store.steps() == [5, 7] and files.backup.store.steps() == []


def test_bad_numbers_cost_neither_the_best_nor_what_is_kept_for_ever(tmp_path):
    flags = {"on_nan": "rollback", "save_every": 5, "deterministic": True, "keep_best": "min:loss", "keep_every": 4}
    run = saved(tmp_path, 5, **flags)
    for step, loss in ((7, 0.1), (8, 0.9), (9, 0.5)):
        run.evaluated = step, {"loss": loss}
        run.state.go_to(step)
        run.save(step)
    assert run.rollback(9, 10)[1] == 5 and run.files.store.steps() == [5]
    aside = sorted(path.name[:18] for path in (tmp_path / "checkpoints").glob("kept-step-*"))
    assert aside == ["kept-step-00000007", "kept-step-00000008"]  # and nobody goes on from them


def test_the_backup_of_the_last_step_becomes_a_snapshot(tmp_path):
    """Of a run that was killed between the two: the backup is deleted when the run has finished."""
    places = {"backup_dir": str(tmp_path / "backup"), "backup_every": 2}
    first = saved(tmp_path / "run", 5, **places)
    first.state.go_to(6)
    first.back_up(6)
    first.files.give_up()
    first.files.close()
    second = recovery_of(tmp_path / "run", **places)
    assert second.restore()[1] == 6
    second.save(6)
    assert second.files.finish() == "" and second.files.store.steps() == [5, 6]


def test_a_snapshot_gets_the_scores_that_came_after_it(tmp_path):
    """Of a run that was stopped at its last step, before that was evaluated."""
    flags = {"keep_best": "min:loss", "keep": 1}
    saved(tmp_path, 5, **flags)
    again = recovery_of(tmp_path, **flags)
    assert again.restore()[1] == 5
    again.evaluated = 5, {"loss": 0.5}
    again.save(5)
    again.evaluated = 5, {"loss": 0.5000000001}  # added up by another number of workers
    again.save(5)
    assert again.files.finish() == "" and again.files.writer.stats.saves == 1
    assert again.files.store.verify(5).manifest["metrics"] == {"loss": 0.5}
    without = recovery_of(tmp_path)
    without.restore()
    without.evaluated = 5, {"loss": 0.4}
    without.save(5)
    assert without.files.finish() == "" and without.files.writer.stats.saves == 0


@pytest.mark.parametrize("others", [{"deterministic": False}, {"save_every": 0}, {"save_every": 3}])
def test_else_bad_numbers_lead_back_to_the_newest(tmp_path, others):
    """Time, too, decides when to save; or there is none of a regular step."""
    flags = {"on_nan": "rollback", "save_every": 5, "deterministic": True, **others}
    saved(tmp_path, 5, 7, **flags)
    assert recovery_of(tmp_path, **flags).rollback(8, 8)[1] == 7


def test_the_best_is_what_was_evaluated_and_not_what_came_after_it(tmp_path):
    flags = {"keep_best": "max:accuracy", "keep": 1}
    recovery = saved(tmp_path, **flags)
    for step, accuracy in ((5, 0.9), (6, None), (7, None), (10, 0.8), (11, None)):
        if accuracy:
            recovery.evaluated = step, {"accuracy": accuracy}
        recovery.state.go_to(step)
        recovery.save(step)
    assert recovery.files.finish() == "" and recovery.files.store.steps() == [5, 11]
    again = recovery_of(tmp_path, **flags)
    again.restore()
    again.state.go_to(12)
    again.save(12)
    assert again.files.finish() == "" and again.files.store.steps() == [5, 12]


def test_a_newer_backup_of_another_run_is_not_gone_on_from(tmp_path):
    flags = {"backup_dir": str(tmp_path / "backup"), "backup_every": 2}
    first = saved(tmp_path / "one", **flags)
    first.run_id = "one"
    first.state.go_to(6)
    first.back_up(6)
    first.files.give_up()
    two = recovery_of(tmp_path / "two")
    two.run_id = "two"
    two.state.go_to(5)
    two.save(5)
    assert two.files.finish() == ""
    second = recovery_of(tmp_path / "two", **flags)
    with pytest.raises(
        CheckpointError, match=r"backup/step-00000006 belongs to another run.*choose another --backup_dir"
    ):
        second.restore()
    second.files.close()
    assert recovery_of(tmp_path / "three", **flags).restore()[1] == 6  # where the first run's folder is lost


def test_backups_in_the_folder_of_another_user_are_refused(monkeypatch, tmp_path):
    """He could put weights of his own there, which were restored without a word."""
    folder = tmp_path / "backup"
    folder.mkdir()
    let_own(monkeypatch, folder)
    with pytest.raises(
        ConfigError, match=r"^--backup_dir=.*/backup cannot be used \(it belongs to another user\): name"
    ):
        recovery_of(tmp_path, backup_dir=str(folder), backup_every=2)


def test_bad_numbers_without_a_snapshot_lead_nowhere(tmp_path):
    run = recovery_of(tmp_path, on_nan="rollback")
    with pytest.raises(DivergedError, match=r"before step 4, and .*/checkpoints has no snapshot to roll back to"):
        run.rollback(4, 4)


def test_the_newer_of_snapshot_and_backup_counts(tmp_path):
    flags = {"backup_dir": str(tmp_path / "backup"), "backup_every": 2}
    recovery = saved(tmp_path, 5, **flags)
    assert recovery.backup_period() == 2
    recovery.state.go_to(6)
    recovery.back_up(6)
    recovery.files.give_up()  # waits for it
    second = recovery_of(tmp_path, **flags)
    assert second.restore()[1] == 6
    second.files.close()
    recovery.files.end_backup(finished=True)
    assert recovery_of(tmp_path, **flags).restore()[1] == 5
    assert recovery_of(tmp_path, backup_dir=str(tmp_path / "backup")).backup_period() == 10  # an epoch


def test_a_second_job_with_the_same_place_for_backups_is_refused(tmp_path, monkeypatch):
    """In another run folder; else each would remove the other's as older ones."""
    monkeypatch.setattr("tfdist.control.lease._PATIENCE", Patience(dead=60.0, damaged=1.0, to_end=0.1))
    flags = {"backup_dir": str(tmp_path / "backup"), "backup_every": 2}
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
    first = recovery_of(tmp_path / "one", **flags)
    first.restore()
    assert [path.name for path in (tmp_path / "backup").iterdir()] == ["lease.json"]
    with pytest.raises(ConfigError, match=f"--backup_dir={tmp_path}/backup is in use by another job"):
        recovery_of(tmp_path / "two", **flags).restore()
    first.files.close()
    assert recovery_of(tmp_path / "two", **flags).restore()[1] == 0


def test_bad_numbers_lead_back_to_the_backup_that_is_being_written(tmp_path):
    recovery = saved(tmp_path / "run", 5, on_nan="rollback", backup_dir=str(tmp_path / "backup"), backup_every=2)
    recovery.state.go_to(6)
    recovery.back_up(6)
    recovery.files.backup.store.before_commit = lambda step: time.sleep(0.5)
    recovery.state.go_to(8)
    recovery.back_up(8)
    assert recovery.rollback(9, 9)[1] == 8 and (recovery.state.arrays["model/0000"] == 8).all()


def test_a_copy_in_memory_is_gone_on_from(tmp_path):
    memory = WorkerMemory(member=None, signals=None)
    first = recovery_of(tmp_path, memory, elastic_commit_every=3)
    for step in (3, 4, 6):
        first.state.go_to(step)
        first.copy(step, memory)
    assert memory.checkpoint.step == 6
    first.state.go_to(7)
    first.copy(7, memory)  # not yet
    assert memory.checkpoint.step == 6
    first.copy(7, memory, now=True)
    second = recovery_of(tmp_path, memory)
    messages, step = second.restore(checkpoint=memory.checkpoint)
    assert step == 7 and messages == ["continued from memory: step 7, 56 samples consumed, by 1 workers before, now 1"]
    assert second.time_policy is first.time_policy
    second.save(7)  # none is on disk
    assert second.files.finish() == "" and recovery_of(tmp_path).restore()[1] == 7


def test_all_workers_end_by_the_chiefs_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.run.recovery.state.collect", lambda *_: {})
    chiefs = ["CheckpointError", "it is damaged"]
    monkeypatch.setattr(Worker, "broadcast_object", lambda self, value: chiefs)
    with pytest.raises(CheckpointError, match="^it is damaged$"):
        recovery_of(tmp_path, runtime=Worker([])).restore()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"samples": (7, 9)}, "fake had other samples, or another order of them"),
        ({"samples": (7,)}, "fake had other samples"),
        ({"size": 81}, "fake had 80 samples, and has 81 samples"),
        ({"size": None}, "fake had 80 samples, and has no known number of samples"),
    ],
)
def test_changed_data_are_refused(tmp_path, changed, says):
    saved(tmp_path, 4)
    with pytest.raises(CheckpointError, match=f"The data have changed since .*{says}.*--allow_config_change"):
        recovery_of(tmp_path, **changed).restore()
    assert recovery_of(tmp_path, **changed, allow_config_change=True).restore()[1] == 4
    assert recovery_of(tmp_path).restore()[1] == 4


def test_data_that_are_drawn_at_each_reading_are_no_change(tmp_path):
    numbers = iter(range(9))
    saved(tmp_path, 4, samples=lambda: [7, next(numbers)])
    assert recovery_of(tmp_path, samples=lambda: [7, next(numbers)]).restore()[1] == 4
    with pytest.raises(CheckpointError, match="other samples"):
        recovery_of(tmp_path, samples=lambda: [8, next(numbers)]).restore()


def test_a_snapshot_that_says_nothing_of_its_data_is_believed(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr("tfdist.data.contents.identity", lambda split: {})
        saved(tmp_path, 4)
    assert recovery_of(tmp_path, samples=(1, 2)).restore()[1] == 4


def test_a_snapshot_without_a_cut_is_read_unless_its_data_are_a_stream(tmp_path, monkeypatch):
    """0.1.0 did not note into how many parts it had cut a stream."""
    fields = Recovery._manifest_fields
    with monkeypatch.context() as older:
        older.setattr(
            Recovery,
            "_manifest_fields",
            lambda self, step: {name: value for name, value in fields(self, step).items() if name != "stream_cut"},
        )
        saved(tmp_path, 4)
        saved(tmp_path / "stream", 4, size=None)
    recovery = recovery_of(tmp_path)
    assert recovery.restore()[1] == 4 and recovery.stream_cut == 1
    with pytest.raises(CheckpointError, match="step 4 is of tfdist 0.1.0 .* the stream fake .* another --run_dir"):
        recovery_of(tmp_path / "stream", size=None).restore()


def test_a_run_that_goes_on_from_memory_sends_its_snapshots(s3, tmp_path):
    """As each group of workers after the first does."""
    url = f"s3://{BUCKET}/runs/one"
    with RemoteRun(RunConfig(run_dir=url, store_timeout=10.0), tmp_path, Cluster(), "job") as stored:
        recovery = recovery_of(tmp_path, stored=stored)
        recovery.restore()
        recovery.state.go_to(10)
        memory = WorkerMemory(None, None)
        recovery.copy(10, memory, now=True)
    with RemoteRun(RunConfig(run_dir=url, store_timeout=10.0), tmp_path, Cluster(), "job") as stored:
        recovery = recovery_of(tmp_path, stored=stored)
        recovery.restore(checkpoint=memory.checkpoint)
        recovery.state.go_to(20)
        recovery.save(20)
        recovery.files.finish()
    assert "runs/one/checkpoints/step-00000020/manifest.json" in s3.names()


def test_bad_numbers_on_another_machine_lead_where_they_lead_on_the_first(s3, tmp_path):
    """Its working copy is empty, and the store is not asked when the numbers are bad."""
    options = RunConfig(run_dir=f"s3://{BUCKET}/runs/one", store_timeout=10.0)
    flags = {"on_nan": "rollback", "save_every": 5, "deterministic": True, "keep": 1}
    with RemoteRun(options, tmp_path / "first", Cluster(), "job") as stored:
        first = recovery_of(tmp_path / "first", stored=stored, **flags)
        first.restore()
        for step in (5, 7):
            first.state.go_to(step)
            first.save(step)
        first.files.finish()
    with RemoteRun(options, tmp_path / "second", Cluster(), "job") as stored:
        second = recovery_of(tmp_path / "second", stored=stored, **flags)
        assert second.restore()[1] == 7
        assert second.rollback(8, 8)[1] == 5 and (second.state.arrays["model/0000"] == 5).all()


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("steps", [(5, 7), (7,)])
def test_a_damaged_snapshot_in_a_store_is_set_aside_only_if_another_is_chosen(s3, tmp_path, in_parts, steps):
    """Without another the run is refused, as often as it starts: it began anew, the second time without a word."""
    options = RunConfig(run_dir=f"s3://{BUCKET}/runs/one", store_timeout=10.0)
    with RemoteRun(options, tmp_path / "first", Cluster(), "job") as stored:
        first = recovery_of(tmp_path / "first", stored=stored)
        first.restore()
        for step in steps:
            first.state.go_to(step)
            first.save(step)
            first.files.finish()
            assert first.files._sent.sender.finish_soon(30.0) == []
    (data,) = (name for name in s3.names() if "state-7.data-" in name)
    s3.change(data, b"?" + s3.content(data)[1:])
    before = s3.names()
    for start in ("second", "third"):
        with RemoteRun(options, tmp_path / start, Cluster(), "job") as stored:
            recovery = recovery_of(tmp_path / start, stored=stored)
            if in_parts:
                read_in_parts(recovery, stored)
            if steps == (7,):
                with pytest.raises(CheckpointError, match=r"No snapshot in s3://.* is valid \(.*state-7.data"):
                    recovery.restore()
            else:
                messages, step = recovery.restore()
                told = [
                    message for message in messages if "skipped a snapshot" in message and "state-7.data" in message
                ]
                assert step == 5 and len(told) == len(messages) - 1 == (start == "second")
    now = s3.names() if steps == (7,) else [name.replace("damaged-manifest", "manifest") for name in s3.names()]
    assert sorted(now) == before and (before == s3.names()) == (steps == (7,))


def read_in_parts(recovery, stored):
    """Lets a recovery read as one of several workers that see no common folder."""
    files, shards = recovery.files, [Shard("model/0000", (3,), ((0, 3),))]
    files._in_store = RemoteShards(recovery.runtime, stored, lambda step: None, files._sent)
    recovery._own_parts = SimpleNamespace(
        wanted=lambda variables: shards, read=lambda prefix: recovery.state.go_to(int(prefix.rsplit("-")[-1]))
    )


def test_a_save_that_was_refused_is_tried_again_at_the_same_step(tmp_path, monkeypatch):
    """Else the last snapshot was missing, and the run ended as if it were there."""
    recovery, refusals = recovery_of(tmp_path), iter(["away", "away", ""])
    recovery._own_parts = SimpleNamespace(to_shards=recovery.state.to_host)
    recovery.files._in_store = SimpleNamespace(agree=lambda step: next(refusals))
    recovery.state.go_to(4)
    for refusal in ("away", "away", "", ""):
        recovery.save(4)
        assert recovery.files.finish() == refusal
    assert recovery.files.store.steps() == [4] and not list(refusals)


def test_losses_go_on_where_some_were_no_numbers():
    """In float16 those of the first steps, while the loss scale is too large."""
    losses = LossContinuity([math.nan, 2.0, 2.1, 1.9])
    assert not losses.add(math.nan) and "the loss jumps from 2 " in losses.add(9.0)
    assert losses.losses == [2.0, 2.1, 1.9, 9.0] and not losses.add(9.0)
