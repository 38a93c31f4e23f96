"""Steps by workers, with workers that only count: what is under way when, driven by the loop of all runs."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from tfdist.control.exit_codes import ConfigError, DivergedError
from tfdist.telemetry.timer import Clock
from tfdist.training.connected import Connected
from tfdist.training.loop import train
from tfdist.training.loop_hooks import LoopHooks, LoopSchedule
from tfdist.training.parameter_server.asynchronous import Asynchronous
from tfdist.training.parameter_server.remote_step import Result
from tfdist.training.parameter_server.server_steps import Workers
from tfdist.training.parameter_server.synchronous import Synchronous
from tfdist.training.step_output import NOTHING, Fields, Requests


class Servers:
    """In place of Parameters."""

    def __init__(self):
        self.skipped, self.pulled, self.local = 0, [], []

    def pull(self, step):
        self.pulled.append(step)

    def set_local_step(self, step):
        self.local.append(step - self.skipped)


class Remote:
    """In place of RemoteStep. `outcome`: (batch, attempt) -> Result, or None if it is not known."""

    update, differentiate = "update", "differentiate"

    def __init__(self, outcome=lambda batch, attempt: good()):
        self.sums, self.parameters, self.outcome = Fields(("loss", "weight", "regularization")), Servers(), outcome
        self.connected = Connected([])
        self.begun, self.done, self._lock = [], [], threading.Lock()

    def call(self, function, arguments):
        """As ParameterServer.call."""
        batch = int(arguments[0])
        with self._lock:
            self.begun.append(batch)
            found = self.outcome(batch, self.begun.count(batch))

        def fetch():
            with self._lock:
                if found is None or found.applied or not found.finite:
                    self.done.append(batch)
            return found and (found,)

        return fetch

    def result(self, fetched):
        return fetched[0]

    def apply(self, flat, loss, weight):
        return 1.5, bool(np.isfinite(flat).all() and np.isfinite(loss))

    def combine(self, results):
        return np.sum([result.values for result in results], axis=0)


def good(version=0, staleness=0, applied=True, finite=True, loss=2.0, gradient=1.0):
    return Result(
        version, staleness, applied, finite, 1.5, np.array([8 * loss, 8.0, 0.25]), (np.array([gradient], np.float32),)
    )


def workers_of(remote, schedule, count=2, skip=False, backup=0, warnings=None):
    return Workers(
        remote.call,
        lambda: [],
        lambda step, sentence: (warnings if warnings is not None else []).append(sentence),
        count,
        backup,
        skip,
        lambda step: 8 * step,
        schedule.next_use_of_state,
    )


def drive(step, schedule, requests=lambda number: NOTHING, first=0):
    """Trains. Returns (TrainResult, train events, what was evaluated and saved)."""
    events, used = [], []

    def use(what):
        step.pull_state(step.done)
        used.append((what, step.done, len(step.remote.begun), step.under_way))
        return {"loss": 0.0}

    hooks = LoopHooks(
        step=step,
        iterators=[],
        schedule=schedule,
        global_batch=8,
        position=lambda number: 8 * number,
        clock=Clock(),
        observer=lambda event: events.append(event) if event.kind == "train" else None,
        extra_values=step.extra_values,
        evaluate=lambda: use("evaluate"),
        save=lambda number: use("save"),
        backup=lambda number: None,
        requests=requests,
        section=lambda name: contextlib.nullcontext(),
        pull_state=step.pull_state,
    )
    result = train(hooks, first)
    step.close()
    return result, events, used


def test_asynchronous_batches_are_under_way_at_log_lines_but_never_where_the_state_is_used():
    schedule = LoopSchedule(30, 3, 10, 15, steps_per_loop=1)
    remote = Remote()
    step = Asynchronous(remote, workers_of(remote, schedule), 0)
    ahead = []
    values = step.extra_values
    step.extra_values = lambda: ahead.append(step._begun - step.done) or values()
    result, events, used = drive(step, schedule)
    assert result.step == 30 and sorted(remote.begun) == sorted(remote.done) == list(range(30))
    assert [event.step for event in events] == list(range(3, 31, 3))
    assert used == [
        (what, number, number, False)
        for what, number in (
            ("evaluate", 10),
            ("save", 15),
            ("evaluate", 20),
            ("evaluate", 30),
            ("save", 30),
        )
    ]
    assert max(ahead) >= 2  # the log does not wait for what is under way
    assert remote.parameters.pulled == [10, 15, 20, 30]
    last = events[-1].values
    assert last["train/loss"] == 2.0 and last["train/gradient_norm"] == 1.5 and last["data/consumed_samples"] == 240
    assert last["staleness/0"] == 3 and step.staleness.values()["staleness/0"] == 30


def test_asynchronous_weights_are_shown_only_where_no_update_is_under_way():
    schedule = LoopSchedule(8, 1, -1, 0, steps_per_loop=1)
    remote = Remote()
    step = Asynchronous(remote, workers_of(remote, schedule), 0)
    step([], 1, NOTHING)
    with pytest.raises(
        ConfigError, match="--ps_mode=async: the weights cannot be read at step 1, .*use --ps_mode=sync"
    ):
        step.show_weights()
    step([], 7, NOTHING)
    step.show_weights()
    step.close()
    assert remote.parameters.pulled == [8]


@pytest.mark.parametrize("request_", [Requests(save=True), Requests(stop=True)], ids=["save", "stop"])
def test_after_a_request_nothing_is_begun_and_the_answer_comes_with_the_last(request_):
    schedule = LoopSchedule(1000, 0, -1, 0, steps_per_loop=1)
    remote = Remote()
    step = Asynchronous(remote, workers_of(remote, schedule, count=3), 0)
    begun = []

    def requests(number):
        if number == 7:
            begun.append(step._begun)
        return request_ if number == 7 else Requests(stop=number >= 20)

    result, _, used = drive(step, schedule, requests)
    saves = [used_at for what, used_at, *_ in used if what == "save"]
    assert saves[0] == begun[0] <= 7 + 12 and all(not under_way for *_, under_way in used)
    assert result.stopped and (saves == [result.step] if request_.stop else len(saves) == 2)
    assert sorted(remote.done) == list(range(result.step))


def test_a_call_makes_exactly_the_steps_that_it_is_asked_for():
    schedule = LoopSchedule(100, 0, -1, 0)
    remote = Remote()
    step = Asynchronous(remote, workers_of(remote, schedule), 0)
    out = step([], 10, NOTHING)
    assert (out.step, out.weight, out.means["loss"], out.finite) == (10, 80.0, 2.0, True) and step.under_way
    out = step([], 10, Requests(save=True))
    assert out.step == 20 and out.signals["save"] and not out.signals["stop"] and not step.under_way
    assert sorted(remote.begun) == list(range(20))
    assert not step([], 1, NOTHING).signals["save"]
    step.close()


def test_a_gradient_that_was_too_stale_is_made_again_and_counted_as_dropped():
    schedule = LoopSchedule(6, 6, -1, 0, steps_per_loop=1)
    remote = Remote(lambda batch, attempt: good(staleness=3, applied=False) if batch == 2 and attempt == 1 else good())
    result, events, _ = drive(Asynchronous(remote, workers_of(remote, schedule), 0), schedule)
    assert result.step == 6 and remote.begun.count(2) == 2 and sorted(remote.done) == list(range(6))
    assert events[0].values["staleness/dropped"] == 1 and events[0].values["staleness/0"] == 6


def test_a_worker_that_died_before_it_could_tell_has_made_its_step():
    schedule = LoopSchedule(6, 3, -1, 0, steps_per_loop=1)
    remote = Remote(lambda batch, attempt: None if batch == 2 else good())
    result, events, _ = drive(Asynchronous(remote, workers_of(remote, schedule), 0), schedule)
    assert result.step == 6 and sorted(remote.begun) == list(range(6))
    assert [event.step for event in events] == [3, 6] and events[0].values["train/loss"] == 2.0


def test_what_is_not_finite_stops_the_run_or_is_skipped():
    schedule = LoopSchedule(4, 4, -1, 0, steps_per_loop=1)

    def outcome(batch, attempt):
        return good(applied=False, finite=False, loss=float("nan")) if batch == 1 else good()

    remote = Remote(outcome)
    with pytest.raises(DivergedError, match="at step [1-4] .loss nan.: .* or use --on_nan=skip"):
        drive(Asynchronous(remote, workers_of(remote, schedule), 0), schedule)
    remote = Remote(outcome)
    result, events, _ = drive(Asynchronous(remote, workers_of(remote, schedule, skip=True), 0), schedule)
    assert result.step == 4 and events[0].values["train/skipped_steps"] == 1 and events[0].values["train/loss"] == 2.0
    assert remote.parameters.skipped == 1 and remote.parameters.local[-1] == 3


def test_a_loss_that_is_not_finite_stops_a_synchronous_run_too():
    """Though its gradients are finite."""
    schedule = LoopSchedule(4, 4, -1, 0, steps_per_loop=1)
    remote = Remote(lambda batch, attempt: good(version=batch, loss=float("nan") if batch == 1 else 2.0))
    with pytest.raises(DivergedError, match="at step [1-4] .loss nan.: "):
        drive(Synchronous(remote, workers_of(remote, schedule), 0), schedule)


def test_synchronous_slices_are_one_step_each_and_requests_are_answered_at_once():
    schedule = LoopSchedule(9, 3, 4, 0, steps_per_loop=1)
    remote = Remote(lambda batch, attempt: good(version=batch))
    step = Synchronous(remote, workers_of(remote, schedule, count=3), 0)
    values = step.extra_values
    step.extra_values = lambda: step.show_weights() or values()  # as a tracker asks at a train event
    result, events, used = drive(step, schedule, lambda number: Requests(save=number == 5))
    assert result.step == 9 and remote.begun == [batch for batch in range(9) for _ in range(3)]
    assert [event.step for event in events] == [3, 6, 9] and events[0].values["train/loss"] == 2.0
    assert [(what, number) for what, number, *_ in used] == [
        ("evaluate", 4),
        ("save", 6),
        ("evaluate", 8),
        ("evaluate", 9),
    ]
    assert remote.parameters.pulled == [3, 4, 6, 8, 9]


def test_synchronous_results_of_other_weights_do_not_count():
    schedule = LoopSchedule(2, 2, -1, 0, steps_per_loop=1)
    remote = Remote(lambda batch, attempt: None if attempt == 1 else good(version=batch))
    step = Synchronous(remote, workers_of(remote, schedule, count=2, backup=1), 0)
    result, events, _ = drive(step, schedule)
    assert result.step == 2 and events[0].values["train/loss"] == 2.0 and step.slices == 1


def test_a_run_that_went_on_counts_from_there():
    schedule = LoopSchedule(12, 2, -1, 0, steps_per_loop=1)
    remote = Remote()
    step = Asynchronous(remote, workers_of(remote, schedule), 10)
    result, events, _ = drive(step, schedule, first=10)
    assert result.step == 12 and sorted(remote.begun) == [10, 11] and [event.step for event in events] == [12]
