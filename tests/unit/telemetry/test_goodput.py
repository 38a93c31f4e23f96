"""Goodput of made logs, to the millisecond."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.telemetry.goodput import PARTS, account

TWO_KILLS = [
    # (seconds, attempt, kind, step, values); a step takes 1 s, the first process was started at 0
    (10, 0, "start", 0, {"startup_s": 10.0}),
    (27, 0, "train", 10, {"perf/steps_per_s": 10 / 15}),  # 2 s to open the data, 5 s of tracing
    (31, 0, "eval", 10, {"eval/loss": 1.0}),
    (33, 0, "save", 10, {"save/step": 10}),
    (42, 0, "train", 20, {"perf/steps_per_s": 1.0, "pause/evaluation_s": 4.0, "pause/saving_s": 1.0}),
    (52, 0, "train", 30, {"perf/steps_per_s": 1.0}),  # killed at 55, which no log tells; started again at 58
    (66, 1, "start", 10, {"startup_s": 8.0}),
    (66, 1, "restore", 10, {"message": "resumed"}),
    (83, 1, "train", 20, {"perf/steps_per_s": 10 / 16}),  # 1 s to open the data, 6 s of tracing
    (93, 1, "train", 30, {"perf/steps_per_s": 1.0}),
    (94, 1, "save", 30, {"save/step": 30}),
    (104, 1, "error", 35, {"message": "PeerLostError: lost contact with rank 1"}),  # 5 s of waiting for it
    (110, 2, "start", 30, {"startup_s": 30.0}),  # a spare process, older than the failure
    (124, 2, "train", 40, {"perf/steps_per_s": 10 / 14}),  # 4 s of tracing
    (134, 2, "train", 50, {"perf/steps_per_s": 1.0}),
    (137, 2, "eval", 50, {"eval/loss": 0.5}),
    (138, 2, "save", 50, {"save/step": 50}),
    (140, 2, "end", 50, {"stopped": False, "train_s": 50.0}),
]


def record(seconds, attempt, kind, step, values):
    return {
        "v": 1,
        "run_id": "r",
        "attempt": attempt,
        "rank": 0,
        "host": "h",
        "kind": kind,
        "step": step,
        "values": values,
        "time": datetime.fromtimestamp(1_800_000_000 + seconds, UTC).isoformat(timespec="milliseconds"),
    }


def records(history):
    return [record(*event) for event in history]


def parts(history):
    """The parts that are not 0; all must add up to the wall time."""
    goodput = account(records(history))
    assert sum(goodput.parts.values()) == pytest.approx(goodput.wall_s, abs=1e-6)
    assert all(
        one.end == pytest.approx(other.begin, abs=1e-6)
        for one, other in zip(goodput.spans, goodput.spans[1:], strict=False)
    )
    return {part: round(seconds, 3) for part, seconds in goodput.parts.items() if seconds > 1e-6}


def test_two_kills():
    assert parts(TWO_KILLS) == {
        "train": 50,
        "lost": 25,
        "restart": 36,
        "startup": 12,
        "trace": 5,
        "evaluation": 7,
        "saving": 3,
        "results": 2,
    }
    goodput = account(records(TWO_KILLS))
    assert goodput.wall_s == 140 and goodput.fraction == pytest.approx(50 / 140)
    assert {within: round(seconds, 3) for within, seconds in goodput.restart_parts.items()} == {
        "failure": 5,
        "down": 6,
        "startup": 15,
        "trace": 10,
    }
    assert (goodput.lost_steps, goodput.state, goodput.unsaved_steps) == (25, "finished", 0)
    assert [(each.attempt, each.from_step, each.to_step, each.reason) for each in goodput.restarts] == [
        (1, 30, 10, "no final event: it was killed"),
        (2, 35, 30, "PeerLostError: lost contact with rank 1"),
    ]


def test_a_kill_before_the_first_new_step_makes_one_long_restart():
    history = [
        *TWO_KILLS[:6],
        (66, 1, "start", 10, {"startup_s": 8.0}),
        (80, 2, "start", 10, {"startup_s": 8.0}),
        (95, 2, "train", 20, {"perf/steps_per_s": 10 / 15}),
        (105, 2, "train", 30, {"perf/steps_per_s": 1.0}),
    ]
    assert parts(history) == {
        "train": 30,
        "lost": 20,
        "restart": 33,
        "startup": 12,
        "trace": 5,
        "evaluation": 4,
        "saving": 1,
    }  # 52 to 85
    assert account(records(history)).state == "running or killed" and account(records(history)).unsaved_steps == 20


def test_a_group_that_changes_in_order_was_not_killed():
    history = [
        *TWO_KILLS[:6],
        (53, 0, "regroup", 30, {"message": "a new group of workers is formed at step 30"}),
        (66, 1, "start", 30, {"startup_s": 8.0}),
    ]
    (change,) = account(records(history)).restarts
    assert change.reason == "a new group of workers is formed at step 30"


def test_an_older_snapshot_loses_the_steps_of_several_attempts():
    history = [*TWO_KILLS[:12], (110, 2, "start", 5, {"startup_s": 6.0})]
    assert account(records(history)).lost_steps == (30 - 5) + (35 - 10)
    assert parts(history)["train"] == 5


def test_steps_after_the_last_snapshot_of_a_failed_run_are_lost_and_those_of_a_running_one_are_not():
    failed = account(records(TWO_KILLS[:12]))
    assert (failed.state, failed.lost_steps, failed.unsaved_steps) == ("failed", 20 + 5, 5)
    running = account(records(TWO_KILLS[:11]))
    assert (running.state, running.lost_steps, running.unsaved_steps) == ("running or killed", 20, 0)


def test_stopped_and_trained_on_later():
    stopped = [
        *TWO_KILLS[:6],
        (55, 0, "save", 32, {"save/step": 32}),
        (56, 0, "end", 32, {"stopped": True}),
        (70, 1, "start", 32, {"startup_s": 8.0}),
        (85, 1, "train", 42, {"perf/steps_per_s": 10 / 15}),
    ]
    assert parts(stopped) == {
        "train": 42,
        "restart": 6 + 8 + 5,
        "startup": 12,
        "trace": 5,
        "evaluation": 4,
        "saving": 1 + 1,
        "results": 1,
    }
    assert account(records(stopped)).restarts[0].reason == "stopped on request, after saving"
    later = [
        *TWO_KILLS,
        (1000, 3, "start", 50, {"startup_s": 10.0}),
        (1015, 3, "train", 60, {"perf/steps_per_s": 10 / 15}),
        (1017, 3, "end", 60, {"stopped": False}),
    ]
    found = parts(later)
    assert (found["idle"], found["startup"], found["trace"], found["restart"], found["results"]) == (850, 22, 10, 36, 4)
    assert len(account(records(later)).restarts) == 2


def test_going_back_from_bad_numbers_is_lost():
    history = [
        *TWO_KILLS[:6],
        (60, 0, "warning", 20, {"message": "went back"}),
        (60, 0, "warning", 20, {"message": "twice"}),
        (71, 0, "train", 30, {"perf/steps_per_s": 1.0}),
    ]
    assert parts(history) == {
        "train": 30,
        "lost": 18,
        "startup": 12,
        "trace": 5,
        "evaluation": 4,
        "saving": 1,
        "other": 1,
    }
    saved = [
        *TWO_KILLS[:6],
        (54, 0, "save", 31, {"save/step": 30}),
        (60, 0, "warning", 30, {"message": "went back"}),
        (70, 0, "train", 40, {"perf/steps_per_s": 1.0}),
    ]
    assert parts(saved) == {"train": 40, "lost": 1 + 6, "startup": 12, "trace": 5, "evaluation": 4, "saving": 1 + 1}


def test_a_log_without_pauses_or_paces_still_adds_up():
    assert parts([(10, 0, "start", 0, {}), (20, 0, "train", 10, {})]) == {"train": 10}
    assert parts([(10, 0, "start", 0, {"startup_s": 4.0})]) == {"startup": 4}
    assert parts([]) == {}
    assert parts([(10, 0, "start", 0, {"startup_s": 4.0}), (20, 0, "save", 3, {"save/step": 3})]) == {
        "startup": 4,
        "train": 10,
    }


EVENTS = st.tuples(
    st.floats(-5, 50),
    st.booleans(),
    st.sampled_from(["train", "train", "train", "eval", "save", "backup", "warning", "error", "end", "phases"]),
    st.integers(-5, 20),
    st.fixed_dictionaries(
        {},
        optional={
            "perf/steps_per_s": st.one_of(st.floats(0, 100), st.just("nan")),
            "pause/evaluation_s": st.floats(0, 60),
            "pause/saving_s": st.floats(0, 60),
        },
    ),
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=30))
def test_whatever_the_log_says_the_parts_add_up(drawn):
    """Clocks that go back, pauses longer than the time, steps out of order, attempts that end anywhere."""
    at, attempt, step, history = 0.0, 0, 0, [(0, 0, "start", 0, {"startup_s": 3.0})]
    for seconds, again, kind, more, values in drawn:
        at, step = at + seconds, max(0, step + more)
        if again:
            attempt += 1
            history.append((at, attempt, "start", step, {"startup_s": 3.0}))
        else:
            history.append((at, attempt, kind, step, values))
    parts(history)
    goodput = account(json.loads(json.dumps(records(history))))
    assert set(goodput.parts) == set(PARTS) and all(span.seconds >= -1e-6 for span in goodput.spans)
    trained = [span for span in goodput.spans if span.last_step > span.first_step]
    assert goodput.lost_steps + sum(
        span.last_step - span.first_step for span in trained if span.part == "train"
    ) == sum(span.last_step - span.first_step for span in trained)
