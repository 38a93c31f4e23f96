"""Events and what becomes of them: logs, TensorBoard, console, picture, clock."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tfdist.config import TelemetryConfig
from tfdist.telemetry import plot, summary
from tfdist.telemetry.console import BarConsole, PlainConsole, make_console
from tfdist.telemetry.events import Event, FanOut
from tfdist.telemetry.jsonl import JsonlObserver, next_attempt, read_jsonl
from tfdist.telemetry.observers import build_observers
from tfdist.telemetry.timer import Clock
from tfdist.telemetry.trackers import Run


def _no_epoch(step):
    return None


def train_event(step, loss=1.0, **values):
    return Event(
        "train",
        step,
        {
            "train/loss": loss,
            "train/accuracy": 0.5,
            "train/learning_rate": 1e-3,
            "train/gradient_norm": 1.0,
            "train/loss_scale": 512.0,
            "train/skipped_steps": 0,
            "perf/steps_per_s": 2.0,
            "perf/samples_per_s": 4312.0,
            **values,
        },
    )


def test_a_failing_observer_is_switched_off_loudly_and_alone(capsys):
    seen = []

    def broken(event):
        raise OSError("disk full")

    observers = FanOut([broken, seen.append])
    observers(train_event(1))
    observers(train_event(2))
    assert [event.step for event in seen] == [1, 2]
    error = capsys.readouterr().err
    assert error.count("disk full") == 1 and "broken" in error


def test_a_full_disk_ends_the_log_not_the_training(capsys):
    seen = []
    observers = FanOut([JsonlObserver(Path("/dev/full"), run_id="r", attempt=0, rank=0), seen.append])
    for step in (1, 2):
        observers(train_event(step))
    observers.close()
    assert len(seen) == 2
    assert capsys.readouterr().err.count("JsonlObserver failed (OSError") == 1


def test_jsonl_survives_torn_lines_and_odd_numbers(tmp_path):
    path = tmp_path / "logs" / "rank-1.jsonl"
    for attempt in range(2):
        assert next_attempt(path) == attempt
        log = JsonlObserver(path, run_id="abc", attempt=attempt, rank=1)
        log(Event("start", 0, {"flags": "not in the log"}))
        log(train_event(5, loss=(math.nan, np.float32("nan"))[attempt]))
        with open(path, "a") as file:
            file.write('{"v": 1, "kind": "tr')  # killed in the middle of a line
    log = JsonlObserver(path, run_id="abc", attempt=2, rank=1)
    log(train_event(9, loss=math.inf))
    found = list(read_jsonl(path))
    assert [(record["kind"], record["step"], record["attempt"]) for record in found] == [
        ("start", 0, 0),
        ("train", 5, 0),
        ("start", 0, 1),
        ("train", 5, 1),
        ("train", 9, 2),
    ]
    assert (
        found[1]["values"]["train/loss"] == "nan"
        and found[3]["values"]["train/loss"] == "nan"
        and found[4]["values"]["train/loss"] == "inf"
        and found[0]["values"] == {}
    )
    assert {"v", "time", "run_id", "attempt", "rank", "host", "kind", "step", "values"} == set(found[0])


def test_tensorboard_is_one_run_over_restarts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def observers(resumed):
        return build_observers(
            TelemetryConfig(progress="none"),
            Run(tmp_path, "r", 0, resumed, 0),
            total_steps=40,
            epoch_at=_no_epoch,
        )

    first = observers(0)
    first(Event("start", 0, {"flags": "--steps=40"}))
    for step in (10, 20, 30):
        first(train_event(step, loss=step))
    first.close()
    second = observers(20)  # the snapshot of step 20 was the last: step 30 is made again
    for step in (30, 40):
        second(train_event(step, loss=step + 0.5))
    second.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(scalar.step, scalar.value) for scalar in found.Scalars("train/loss")] == [
        (10, 10),
        (20, 20),
        (30, 30.5),
        (40, 40.5),
    ]
    assert b"--steps=40" in found.Tensors("flags")[0].tensor_proto.string_val[0]


def test_tensorboard_forgets_an_attempt_that_died_before_its_first_snapshot(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for attempt, steps in enumerate([(10, 20, 30), (10, 20)]):
        observers = build_observers(
            TelemetryConfig(progress="none"),
            Run(tmp_path, "r", attempt, 0, 0),
            total_steps=40,
            epoch_at=_no_epoch,
        )
        for step in steps:
            observers(train_event(step, loss=step + attempt / 2))
        observers.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(scalar.step, scalar.value) for scalar in found.Scalars("train/loss")] == [(10, 10.5), (20, 20.5)]


def test_other_ranks_write_their_log_only(tmp_path):
    observers = build_observers(TelemetryConfig(), Run(tmp_path, "r", 0, 0, 2), total_steps=40, epoch_at=_no_epoch)
    observers(train_event(1))
    observers.close()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        "logs/rank-2.jsonl"
    ]


def test_lines():
    console = PlainConsole(500, epoch_at=lambda step: step / 40.0)
    assert (
        console.line(train_event(100))
        == "step 100/500 | epoch 2.50 | loss 1.0000 | accuracy 0.5000 | lr 1.0e-03 | 4,312 samples/s | eta 0:03:20"
    )
    assert "skipped 3 steps, loss scale 512" in console.line(train_event(100, **{"train/skipped_steps": 3}))
    assert (
        console.line(Event("train", 100, {"train/loss": math.nan, "perf/steps_per_s": math.nan}))
        == "step 100/500 | epoch 2.50 | loss nan"
    )
    assert "loss 2.000e-05 " in console.line(train_event(100, loss=2e-5))
    assert (
        console.line(Event("eval", 100, {"eval/loss": 0.25, "eval/samples": 360.0}))
        == "evaluation at step 100: loss 0.25  (360 samples)"
    )
    for told, weight, size in (
        ({"evaluated_samples": 11, "eval_weighted": True}, 11.0, "11 samples"),
        ({"evaluated_samples": 11, "eval_weighted": True}, 10007.0, "weight 10,007"),
        ({"evaluated_samples": 11, "eval_weighted": True}, 0.25, "weight 0.25"),
        ({"evaluated_samples": 16, "eval_weighted": False}, 128.0, "weight 128"),  # of tokens
        ({"evaluated_samples": None, "eval_weighted": False}, 12.0, "12 samples"),  # a stream
        ({"evaluated_samples": None, "eval_weighted": True}, 12.0, "weight 12"),
    ):
        console.line(Event("start", 0, told))
        line = console.line(Event("eval", 100, {"eval/loss": 0.25, "eval/samples": weight}))
        assert line == f"evaluation at step 100: loss 0.25  ({size})"
    assert console.line(Event("warning", 7, {"message": "careful"})) == "WARNING at step 7: careful"
    assert console.line(Event("end", 7, {"stopped": False})) == ""


def test_bar_on_a_terminal_lines_elsewhere(monkeypatch, capsys):
    assert make_console("none", 10, _no_epoch) is None and type(make_console("auto", 10, _no_epoch)) is PlainConsole
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    console = make_console("auto", 10, _no_epoch)
    assert type(console) is BarConsole
    console(Event("start", 4, {}))
    assert console._bar.tasks[0].completed == 4
    console(train_event(5))
    console(Event("eval", 5, {"eval/loss": 0.25}))
    console.close()
    assert "evaluation at step 5" in capsys.readouterr().out


def test_clock_counts_training_only_and_goes_on_after_a_restart():
    now = [100.0]
    clock = Clock(lambda: now[0])
    now[0] += 5
    assert clock.seconds == 0
    clock.start()
    now[0] += 10
    with clock.pause("evaluation"):
        now[0] += 3
        assert clock.seconds == 10
    now[0] += 1
    other = Clock(lambda: now[0])
    other.restore(json.loads(json.dumps(clock.state())))
    now[0] += 50
    assert other.seconds == 11 and other.pauses == {"evaluation": 3}
    other.start()
    now[0] += 2
    other.stop()
    with other.pause("saving"):  # standing still, it does not begin to count afterwards
        now[0] += 1
    now[0] += 2
    assert other.seconds == 13 and other.pauses == {"evaluation": 3, "saving": 1}


def test_picture_and_summary(tmp_path, capsys):
    log = JsonlObserver(tmp_path / "run" / "logs" / "rank-0.jsonl", run_id="r", attempt=0, rank=0)
    picture = tmp_path / "run" / "curves.png"
    assert "no steps" in plot.draw_curves(tmp_path / "run" / "logs" / "rank-0.jsonl", picture, reference=None)
    for step in (10, 20, 10, 20):
        log(train_event(step, loss=1 / step))
    log(Event("eval", 20, {"eval/loss": 0.1, "eval/accuracy": 0.9}))
    assert plot.draw_curves(tmp_path / "run" / "logs" / "rank-0.jsonl", picture, {"entropy": 0.2}) == ""
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert plot.read_series(tmp_path / "run" / "logs" / "rank-0.jsonl")["train/loss"] == {
        10: pytest.approx(0.1),
        20: pytest.approx(0.05),
    }


def test_the_curve_of_a_dead_attempt_ends_where_the_next_one_went_on(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    for attempt, (start, steps) in enumerate([(0, (10, 20, 30, 40)), (20, (25, 45))]):  # with another --log_every
        log = JsonlObserver(path, run_id="r", attempt=attempt, rank=0)
        log(Event("start", start, {}))
        for step in steps:
            log(train_event(step))
        log.close()
    assert list(plot.read_series(path)["train/loss"]) == [10, 20, 25, 45]


def test_no_picture_is_a_sentence_not_a_failure(tmp_path):
    log = JsonlObserver(tmp_path / "rank-0.jsonl", run_id="r", attempt=0, rank=0)
    log(train_event(1))
    assert plot.draw_curves(tmp_path / "rank-0.jsonl", tmp_path / "absent" / "curves.png", reference=None).startswith(
        "no picture: "
    )


def test_summary(tmp_path, capsys, monkeypatch):
    values = {"steps": 1000, "pauses_s": {"saving": 1.5}, "eval/loss": math.nan, "stopped": False, "export": ""}
    summary.write_summary(tmp_path / "summary.json", values)
    assert json.loads((tmp_path / "summary.json").read_text()) == values | {"eval/loss": "nan"}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    summary.print_summary(values)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["steps", "1,000"], ["pauses_s", "saving", "1.5"], ["eval/loss", "nan"], ["stopped", "False"]]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    summary.print_summary(values)
    table = capsys.readouterr().out
    assert "┌" in table and "steps" in table and "1,000" in table


def test_an_observer_that_ends_the_program_is_switched_off(capsys):
    """Else the run would end as if all were well."""
    seen = []

    class Leaving:
        def __call__(self, event):
            raise SystemExit(0)

        def close(self):
            raise SystemExit(0)

    observers = FanOut([Leaving(), seen.append])
    observers(train_event(1))
    observers.close()
    told = capsys.readouterr().err
    assert len(seen) == 1 and "Leaving failed (SystemExit: 0) and is switched off" in told
    assert "training continues" not in told  # the run may be ending


def test_what_an_observer_changes_is_its_own():
    seen, event = [], train_event(1)
    before = dict(event.values)
    FanOut([lambda event: event.values.clear(), seen.append])(event)
    assert event.values == before and seen[0].values == before


def test_what_an_observer_reports_at_its_end_reaches_the_others():
    """As the profiler does of a trace that the end of a run cuts short."""
    seen, calls = [], []

    class Reporting:
        def __call__(self, event):
            pass

        def close(self):
            observers(train_event(7))

    class File:
        def __call__(self, event):
            assert not calls, "closed"
            seen.append(event.step)

        def close(self):
            calls.append("closed")

    observers = FanOut([File(), Reporting()])
    observers.close()
    assert seen == [7] and calls == ["closed"] and not observers.observers
