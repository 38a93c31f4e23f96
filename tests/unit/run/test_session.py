"""A session from start to end, with fakes: what it opens is closed again, in order, wherever it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
from types import SimpleNamespace

import numpy as np
import pytest

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import CheckpointError, ConfigError, ExitCode, PeerLostError
from tfdist.run import session
from tfdist.run.progress import Progress
from tfdist.run.session import GroupChange, Start
from tfdist.run.trainer import Trainer, shown_weights
from tfdist.telemetry.events import Event
from tfdist.telemetry.timer import Clock
from tfdist.training.log_interval import IntervalSums
from tfdist.training.loop import TrainResult
from tfdist.training.step_output import NOTHING, Requests

# In the order in which a session comes to them.
PHASES = ["runtime", "signals", "connect", "agree", "compose", "recovery", "restore", "weights", "identify"] + [
    "observers",
    "bad_samples",
    "flagfile",
    "announce",
    "trainer",
    "train",
    "save",
    "finish",
    "results",
    "barrier",
]
# The first phase whose failure finds it open.
OPEN_FROM = {
    "lease": "runtime",
    "monitor": "runtime",
    "runtime": "signals",
    "files": "restore",
    "observer": "bad_samples",
    "trainer": "train",
}


class World:
    """Everything that a session touches. Fails with `error` at `fails_at`; `said`: what happened."""

    def __init__(self, monkeypatch, tmp_path, fails_at="", error=None, size=1, result=None, unwritten=""):
        self.said, self.events, self.fails_at = [], [], fails_at
        self.error, self.result = error or ConfigError("no"), result or TrainResult(6, False, {"loss": 0.5}, left=False)
        self.unwritten, self.config = unwritten, Config().replace(run_dir=str(tmp_path), steps=6)
        self.runtime = SimpleNamespace(
            rank=0, size=size, name="fake", close=self.note("close runtime"), barrier=self.note("barrier")
        )
        self.runtime.all_gather = lambda array: np.stack([array] * size)
        split = SimpleNamespace(size=60)
        self.job = SimpleNamespace(
            config=self.config,
            runtime=self.runtime,
            plan=SimpleNamespace(global_batch=4),
            train_split=split,
            step=SimpleNamespace(counter=SimpleNamespace(numpy=lambda: 3)),
            evaluator=lambda: None,
        )
        self.memory = None
        put = lambda name, value, where=session: monkeypatch.setattr(where, name, value)  # noqa: E731
        put("HealthMonitor", self.make_monitor)
        put("start_runtime", lambda *_: self.at("runtime") or self.runtime, session.build)
        put("memory_limits", lambda *_: None, session.build)
        put("compose", lambda *_: self.at("compose") or self.job, session.build)
        put("check_same_identity", self.note("agree"))
        put("check_same_options", lambda *_: None)
        put("check_weights", self.note("weights"))
        put("identify", lambda *_: self.at("identify") or session.RunIdentity("abc", 0))
        put("Recovery", lambda *_: self.at("recovery") or self.make_recovery())
        put("build_observers", lambda *_, **__: self.at("observers") or self.make_observer())
        put("BadSamples", lambda *_: self.at("bad_samples") or SimpleNamespace(naming=contextlib.nullcontext))
        put("write_flagfile", self.note("flagfile"), session.flags)
        put("write_status", lambda folder, status, run_id, attempt: self.say(f"status {status}"))
        put("train", lambda *_: self.at("train") or self.result)
        put("leave_results", self.note("results"), session.results)
        put("exportable", lambda job: job, session.results)
        put("run_summary", lambda *_: {}, session.results)
        announcement = SimpleNamespace(built=lambda: None, restored=lambda messages: None, events=self.announce)
        put("Announcement", lambda memory: announcement)
        put("held", self.lease, session.lease)

    def at(self, place):
        self.said.append(place)
        if place == self.fails_at:
            raise self.error

    def say(self, what):
        self.said.append(what)

    def note(self, place):
        return lambda *_, **__: self.at(place)

    def announce(self, *_):
        self.at("announce")
        yield Event("start", 0, {})

    @contextlib.contextmanager
    def lease(self, folder, job, name, even_if_full):
        self.even_if_full = even_if_full
        self.say("lease")
        try:
            yield
        finally:
            self.say("close lease")

    def make_monitor(self, config, cluster, requests):
        self.say("monitor")

        def failed(error):
            self.say("failed")
            return self.cause(error)

        return SimpleNamespace(
            watchdog=SimpleNamespace(section=contextlib.nullcontext, enter=lambda name: None),
            faults=None,
            cluster=cluster,
            signals=lambda: self.at("signals") or SimpleNamespace(save=False, stop=False),
            connect=lambda runtime: self.at("connect"),
            all_saved=self.note("all saved"),
            failed=failed,
            explain_with=lambda explanation: None,
            close=lambda: self.say("close monitor"),
        )

    def cause(self, error):
        return error

    def make_recovery(self):
        files = SimpleNamespace(
            give_up=lambda: self.say("give up"),
            finish=lambda: self.at("finish") or self.unwritten,
            messages=lambda: [],
            end_backup=lambda finished: self.say("delete backup" if finished else "keep backup"),
            close=lambda: self.say("close files"),
            store=SimpleNamespace(directory="here"),
        )
        return SimpleNamespace(
            job=self.job,
            runtime=self.runtime,
            clock=Clock(),
            files=files,
            restore=lambda checkpoint: self.at("restore") or ([], 0),
            state=SimpleNamespace(held=lambda: []),
            backup_period=lambda: 0,
            interval_sums=IntervalSums(),
            progress=Progress(4, None),
            check_epochs=lambda run, step: None,
            stream_cut=1,
            save=lambda step: self.at("save"),
            back_up=None,
            copy=lambda step, memory, now=False: self.say(f"copy {step} {now}"),
            weights=dict,
        )

    def make_observer(self):
        class Observer:
            section = staticmethod(contextlib.nullcontext)
            close = staticmethod(lambda: self.say("close observer"))

            def __call__(_, event):
                self.events.append(event)

        return Observer()

    def make_trainer(self, inputs):
        self.at("trainer")
        trainer = Trainer()
        trainer.schedule, trainer.step = inputs.schedule, lambda *_: None
        trainer.close = self.close_trainer
        return trainer

    def run(self):
        start = Start(self.config, Cluster(), "command", memory=self.memory, make_trainer=self.make_trainer)
        return session.run(start)

    def close_trainer(self):
        self.say("close trainer")

    def closed(self):
        """In which order, each once."""
        return list(dict.fromkeys(what.removeprefix("close ") for what in self.said if what.startswith("close ")))


def test_a_run_that_ends_well(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    assert world.run() == ExitCode.OK
    happened = [what for what in world.said if what in PHASES]
    assert list(dict.fromkeys(happened)) == PHASES and happened.count("agree") == 2
    assert "status running" in world.said and "status finished" in world.said and "delete backup" in world.said
    assert world.closed() == ["trainer", "observer", "monitor", "runtime", "files", "lease"]
    assert [event.kind for event in world.events] == ["start", "end"]
    assert world.events[-1].values["eval/loss"] == 0.5 and "give up" not in world.said
    order = [world.said.index(what) for what in ("status finished", "barrier", "all saved", "close trainer")]
    assert order == sorted(order)


@pytest.mark.parametrize("phase", PHASES)
def test_whatever_fails_all_that_was_opened_is_closed(monkeypatch, tmp_path, phase):
    world = World(monkeypatch, tmp_path, fails_at=phase)
    with pytest.raises(ConfigError, match="^no$"):
        world.run()
    reached = PHASES.index(phase)
    opened = [name for name, first in OPEN_FROM.items() if PHASES.index(first) <= reached]
    assert set(world.closed()) == set(opened), world.said
    assert world.closed()[-1] == "lease" and world.said.index("failed") < world.said.index("close monitor")
    assert ("give up" in world.said) == (reached > PHASES.index("recovery"))
    assert [event.kind for event in world.events if event.kind == "error"] == (
        ["error"] if reached > PHASES.index("observers") else []
    )
    assert world.closed() == [
        name for name in ("trainer", "observer", "monitor", "runtime", "files", "lease") if name in opened
    ]


def test_an_error_is_told_by_its_cause_before_anything_is_closed(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, fails_at="train", error=OSError("reset"))
    world.cause = lambda error: PeerLostError("worker 1 is gone")
    with pytest.raises(PeerLostError, match="worker 1 is gone") as raised:
        world.run()
    assert isinstance(raised.value.__cause__, OSError)
    assert world.events[-1].values == {"message": "PeerLostError: worker 1 is gone"} and world.events[-1].step == 3
    order = [world.said.index(what) for what in ("failed", "give up", "close trainer", "close observer")]
    assert order == sorted(order)


def test_after_an_error_nobody_waits_for_others(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, fails_at="train", size=2)
    with pytest.raises(ConfigError):
        world.run()
    assert world.closed() == ["trainer", "observer", "monitor", "files", "lease"]
    world = World(monkeypatch, tmp_path, size=2)
    assert world.run() == ExitCode.OK and "runtime" in world.closed()


def test_what_goes_wrong_in_giving_up_does_not_hide_the_error(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, fails_at="train")
    making = world.make_recovery

    def make_recovery():
        recovery = making()

        def give_up():
            raise OSError("disk full")

        recovery.files.give_up = give_up
        return recovery

    def close():
        raise OSError("gone")

    world.make_recovery, world.close_trainer = make_recovery, close
    with pytest.raises(ConfigError, match="^no$"):
        world.run()
    assert world.events[-1].kind == "error" and world.closed() == ["observer", "monitor", "runtime", "files", "lease"]


def test_a_full_disk_at_the_start_is_a_sentence(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(session, "write_status", full)
    with pytest.raises(
        ConfigError, match=r"--run_dir=.* cannot be written \(No space left on device\): make room there"
    ):
        world.run()


def test_an_interrupt_closes_too(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, fails_at="train", error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        world.run()
    assert world.closed() == ["trainer", "observer", "monitor", "runtime", "files", "lease"]


def test_a_run_that_is_stopped_leaves_no_results(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, result=TrainResult(4, True, {}, left=False))
    assert world.run() == ExitCode.PREEMPTED
    assert not {"save", "results", "status finished", "delete backup"} & set(world.said)
    assert world.events[-1].values["stopped"] and "runtime" in world.closed()


def test_a_last_snapshot_that_is_not_there_is_an_error_when_all_is_closed(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, unwritten="no space")
    with pytest.raises(CheckpointError, match=r"could not be written \(no space\): free or repair here"):
        world.run()
    assert "delete backup" not in world.said and world.said.index("failed") > world.said.index("close runtime")


def test_all_end_alike_if_one_could_not_write_the_last_snapshot(monkeypatch, tmp_path):
    """The chief ended with 9, the others with 42. Slurm, which sees the highest, started the job again without end."""
    world = World(monkeypatch, tmp_path, size=2, result=TrainResult(4, True, {}, left=False))
    of_the_chief = b"step 4: OSError: no space"
    world.runtime.rank = 1
    world.runtime.all_gather = lambda own: np.stack([np.frombuffer(of_the_chief.ljust(own.size), np.uint8), own])
    with pytest.raises(CheckpointError, match=r"could not be written \(rank 0: step 4: OSError: no space\): free"):
        world.run()
    assert "all saved" not in world.said and "close runtime" in world.said


def test_a_group_that_changes_keeps_a_copy_and_leaves_in_order(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, size=2, result=TrainResult(4, False, {}, left=True))
    world.memory = SimpleNamespace(signals=None, checkpoint=None, member=SimpleNamespace(leave=True))
    with pytest.raises(GroupChange, match="step 4"):
        world.run()
    assert "copy 4 True" in world.said and "failed" not in world.said and "save" not in world.said
    assert world.closed() == ["trainer", "observer", "monitor", "runtime", "files", "lease"]
    assert world.events[-1].kind == "regroup"


@pytest.mark.parametrize("checkpoint", [None, "a copy"])
def test_a_worker_that_keeps_its_process_closes_its_runtime_after_an_error(monkeypatch, tmp_path, checkpoint):
    """The others, in a collective, would wait for it. Once it has a copy of the state, it needs no file."""
    world = World(monkeypatch, tmp_path, fails_at="train", size=2)
    world.memory = SimpleNamespace(signals=None, checkpoint=checkpoint, member=None)
    with pytest.raises(ConfigError, match="^no$"):
        world.run()
    assert "runtime" in world.closed() and world.even_if_full == bool(checkpoint)


@pytest.mark.parametrize(
    "name, error", [("write_status", CheckpointError("full")), ("flags.write_flagfile", OSError(errno.ENOSPC, "full"))]
)
def test_a_regroup_on_a_full_disk_ends_nothing(monkeypatch, tmp_path, name, error):
    world = World(monkeypatch, tmp_path)

    def full(*_):
        raise error

    monkeypatch.setattr(f"tfdist.run.session.{name}", full)
    world.memory = SimpleNamespace(signals=None, checkpoint="a copy", member=None)
    world.result = TrainResult(4, True, {}, left=False)
    assert world.run() == ExitCode.PREEMPTED


def test_what_lies_on_servers_is_brought_before_the_exports(monkeypatch, tmp_path):
    """Without a last snapshot and evaluation nobody had: the weights of the start were exported."""
    world = World(monkeypatch, tmp_path)
    world.config = world.job.config = world.config.replace(save_final=False, export="keras")
    making_trainer, making_recovery = world.make_trainer, world.make_recovery

    def make_trainer(inputs):
        trainer = making_trainer(inputs)
        trainer.pull_state = lambda step: world.say(f"settle {step}")
        return trainer

    def make_recovery():
        recovery = making_recovery()
        recovery.weights = lambda: world.say("export") or {}
        return recovery

    world.make_trainer, world.make_recovery = make_trainer, make_recovery
    assert world.run() == ExitCode.OK
    assert [what for what in world.said if what in ("save", "settle 6", "export")] == ["settle 6", "export"]


def test_trackers_see_the_weights_of_now(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    weight, seen = SimpleNamespace(path="kernel", numpy=lambda: world.said.count("shown")), []
    world.job.model = SimpleNamespace(trainable_variables=[weight])
    making = world.make_trainer

    def make_trainer(inputs):
        trainer = making(inputs)
        trainer.show_weights = lambda: world.say("shown")
        return trainer

    def build_observers(telemetry, run, **_):
        observer = world.make_observer()
        monkeypatch.setattr(type(observer), "__call__", lambda _, event: seen.append((event.kind, run.weights())))
        return observer

    world.make_trainer = make_trainer
    monkeypatch.setattr(session, "build_observers", build_observers)
    assert world.run() == ExitCode.OK
    assert seen == [("start", {"kernel": 0}), ("end", {"kernel": 1})]  # at the start there is no trainer yet
    world.job.config = world.job.config.replace(strategy="mesh", mesh="data=2, model=2")
    with pytest.raises(ConfigError, match="^--mesh=model=2: a tracker cannot have the weights"):
        shown_weights(world.job, Trainer())


def test_a_run_that_rolls_back_has_something_to_go_back_to(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    world.config = world.job.config = world.config.replace(on_nan="rollback")
    assert world.run() == ExitCode.OK
    assert world.said.index("save") < world.said.index("train")


def hooks_of(memory=None, due=False, rank=0):
    said = []
    files = SimpleNamespace(messages=lambda: [("save", {"save/step": 4})])
    recovery = SimpleNamespace(
        runtime=SimpleNamespace(rank=rank),
        files=files,
        time_policy=SimpleNamespace(due=lambda: due),
        save=lambda step: said.append(f"save {step}"),
        copy=lambda step, memory: said.append(f"copy {step}"),
        learning_rate=lambda: said.append("rate") or 0.5,
    )
    trainer = Trainer()
    trainer.extra_values = lambda: said.append("extra") or {"staleness/0": 1}
    faults = SimpleNamespace(at=lambda place, step: said.append(f"{place} {step}"))
    return said, session.SessionHooks(
        recovery,
        trainer,
        SimpleNamespace(called_at=0),
        lambda event: said.append(event.kind),
        SimpleNamespace(faults=faults),
        SimpleNamespace(save=False, stop=False),
        memory,
    )


@pytest.mark.parametrize(
    ("flags", "past"),
    [({"deterministic": True, "save_every": 5}, 10), ({"save_every": 5}, 7), ({"deterministic": True}, 7)],
)
def test_a_run_that_repeats_goes_past_a_whole_period(monkeypatch, flags, past):
    _, hooks = hooks_of()
    hooks.recovery.job = SimpleNamespace(config=Config().replace(on_nan="rollback", **flags))
    hooks.recovery.rollback = lambda step, past: (said.append((step, past)), ([], 5))[1]
    said = []
    hooks.bad_samples.flaws = lambda: ""
    monkeypatch.setattr(session.SessionHooks, "_iterators", lambda self, step: [step])
    assert hooks._rollback(7, 10) == (5, [5]) and said == [(7, past)]


def test_a_score_that_is_no_number_is_told():
    _, hooks = hooks_of()
    hooks.recovery.job, events = SimpleNamespace(config=Config().replace(keep_best="min:loss")), []
    hooks = dataclasses.replace(hooks, observer=events.append)
    hooks._observe(Event("eval", 4, {"eval/loss": 0.5}))
    assert hooks.recovery.evaluated == (4, {"loss": 0.5}) and len(events) == 1
    hooks._observe(Event("eval", 5, {"eval/loss": math.nan}))
    assert events[2].values["message"].startswith("--keep_best=min:loss: loss is nan, so the snapshot of this step")


def test_what_a_worker_asks_for():
    said, hooks = hooks_of()
    assert hooks._requests(4) == NOTHING and said == ["step 4", "save"] and hooks.bad_samples.called_at == 4
    hooks.signals.save = True
    assert hooks._requests(5) == Requests(save=True) and hooks._requests(6) == NOTHING  # asked once
    hooks.signals.stop = True
    assert hooks._requests(7) == hooks._requests(8) == Requests(stop=True)
    assert hooks_of(due=True)[1]._requests(1).save and not hooks_of(due=True, rank=1)[1]._requests(1).save
    said, hooks = hooks_of(memory=SimpleNamespace(member=SimpleNamespace(leave=True)))
    assert hooks._requests(9) == Requests(leave=True) and said[-1] == "copy 9"


def test_what_lies_on_servers_is_brought_before_it_is_saved():
    said, hooks = hooks_of()
    hooks.save(3)
    hooks.trainer.pull_state = lambda step: said.append(f"settle {step}")
    hooks.save(5)
    assert said == ["save 3", "settle 5", "save 5"]
    assert hooks._extra_values() == {"train/learning_rate": 0.5, "staleness/0": 1}
    assert said[-2:] == ["extra", "rate"]  # the rate may depend on what the trainer brings up to date
