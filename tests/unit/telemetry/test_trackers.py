"""Trackers: one run over restarts, whatever was killed when; missing packages; slow and failing ones."""

import csv
import re
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tfdist.config import TelemetryConfig
from tfdist.control.exit_codes import ConfigError, UnsupportedError
from tfdist.control.optional_packages import optional_module
from tfdist.telemetry.background import Background
from tfdist.telemetry.events import Event, FanOut, Observer
from tfdist.telemetry.jsonl import JsonlObserver, read_jsonl, replay
from tfdist.telemetry.jsonl import history as kept_history
from tfdist.telemetry.observers import build_observers
from tfdist.telemetry.plot import read_series
from tfdist.telemetry.run_log import RunLog
from tfdist.telemetry.tensorboard import TensorBoardObserver
from tfdist.telemetry.trackers import Run, by_path, make_trackers


def train_event(step, loss, **values):
    return Event("train", step, {"train/loss": loss, "perf/steps_per_s": 2.0, **values})


def attempt(folder, trackers, number, resumed, steps, *, evaluate=(), ending="killed", **run):
    """One attempt of a run: its events; loss = step + number / 10, so that it tells who told it."""
    observers = build_observers(
        TelemetryConfig(progress="none", trackers=trackers),
        Run(folder, "run5", number, resumed, **run),
        total_steps=60,
        epoch_at=lambda step: None,
    )
    observers(Event("start", resumed, {"flags": "--steps=60", "config_digest": "d"}))
    for step in steps:
        observers(train_event(step, step + number / 10))
        if step in evaluate:
            observers(Event("eval", step, {"eval/loss": step + number / 10}))
    if ending != "killed":
        observers(Event("end", steps[-1], {"stopped": False}))
    observers.close()


def history(folder):
    return [
        (event.kind, event.step, event.values[f"{event.kind}/loss"])
        for event in replay(folder / "logs" / "rank-0.jsonl", 1000)
    ]


def test_the_history_of_a_run_has_each_step_once(tmp_path):
    log = JsonlObserver(tmp_path / "logs" / "rank-0.jsonl", run_id="r", attempt=0, rank=0)
    for event in (
        Event("start", 0, {}),
        train_event(10, 1.0),
        train_event(20, 2.0),
        Event("eval", 20, {"eval/loss": 9.0}),
        train_event(30, 3.0),
        train_event(20, 2.5),  # a rollback
        Event("start", 10, {}),
        train_event(15, 1.5),
        train_event(20, np.nan),
    ):
        log(event)
    assert [entry[:2] for entry in history(tmp_path)] == [("train", 10), ("train", 15), ("train", 20)]
    assert np.isnan(history(tmp_path)[-1][2])
    assert [event.step for event in replay(tmp_path / "logs" / "rank-0.jsonl", 15)] == [10, 15]


def rolled_back(folder):
    """The log of a run that went back from 60 to 30, with an evaluation after each third log line."""
    log = JsonlObserver(folder / "logs" / "rank-0.jsonl", run_id="r", attempt=0, rank=0)
    for event in (
        Event("start", 0, {}),
        *(train_event(step, step) for step in (20, 40, 60)),
        Event("eval", 60, {"eval/loss": 9.0}),
        train_event(35, 3.5),
        Event("eval", 35, {"eval/loss": 8.0}),
    ):
        log(event)
    log.close()
    return folder / "logs" / "rank-0.jsonl"


def test_curves_and_trackers_have_the_same_history(tmp_path):
    path = rolled_back(tmp_path)
    assert history(tmp_path) == [("train", 20, 20.0), ("train", 35, 3.5), ("eval", 35, 8.0)]
    for series in (read_series(path), RunLog(tmp_path, "").series):
        assert series["train/loss"] == {20: 20.0, 35: 3.5} and series["eval/loss"] == {35: 8.0}


def test_a_rollback_replaces_evaluations_of_later_steps_at_once(tmp_path):
    path = rolled_back(tmp_path)
    records = list(read_jsonl(path))
    assert [(record["kind"], record["step"]) for record in kept_history(records[:-1])] == [("train", 20), ("train", 35)]
    assert [(record["kind"], record["step"]) for record in kept_history(records[:-2])] == [
        ("train", 20),
        ("train", 40),
        ("train", 60),
        ("eval", 60),
    ]


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_csv_is_one_table_over_restarts(tmp_path):
    attempt(tmp_path, "csv", 0, 0, (10, 20, 30), evaluate=(20, 30))
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("40,20")  # killed in the middle of a row
    attempt(tmp_path, "csv", 1, 20, (30, 40), evaluate=(40,))
    assert [(row["step"], row["train/loss"]) for row in rows(tmp_path / "metrics.csv")] == [
        ("10", "10.0"),
        ("20", "20.0"),
        ("30", "30.1"),
        ("40", "40.1"),
    ]
    assert [(row["step"], row["eval/loss"]) for row in rows(tmp_path / "evaluations.csv")] == [
        ("20", "20.0"),
        ("40", "40.1"),
    ]


@pytest.mark.parametrize("left", [0, 2], ids=["removed", "renamed after step 20"])
def test_csv_keeps_rows_from_before_the_log(tmp_path, left):
    """logrotate takes the log away, but not the tables."""
    attempt(tmp_path, "csv", 0, 0, (10, 20, 30), evaluate=(20, 30))
    log = tmp_path / "logs" / "rank-0.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[len(lines) - left :]))
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("2")  # killed in the middle of a row
    attempt(tmp_path, "csv", 1, 30, (40,), evaluate=(40,))
    table, evaluations = rows(tmp_path / "metrics.csv"), rows(tmp_path / "evaluations.csv")
    assert list(table[0]) == ["step", "time", "train/loss", "perf/steps_per_s"]
    assert [row["train/loss"] for row in table] == ["10.0", "20.0", "30.0", "40.1"]
    assert [(row["step"], row["eval/loss"]) for row in evaluations] == [("20", "20.0"), ("30", "30.0"), ("40", "40.1")]


def test_csv_forgets_rows_of_a_run_that_was_begun_again(tmp_path):
    attempt(tmp_path, "csv", 0, 0, (10, 20))
    attempt(tmp_path, "", 1, 0, (15,))
    attempt(tmp_path, "csv", 2, 15, (25,))
    assert [row["train/loss"] for row in rows(tmp_path / "metrics.csv")] == ["15.1", "25.2"]


def test_csv_columns_keep_their_places(tmp_path):
    (tracker,) = make_trackers("csv", Run(tmp_path, "r"))
    for step in (1, 2, 3):
        tracker(train_event(step, 1.0, **({"perf/compute_s": 0.5} if step > 1 else {})))
    tracker(train_event(2, 7.0))  # after a rollback
    tracker.close()
    assert list(rows(tmp_path / "metrics.csv")[0]) == [
        "step",
        "time",
        "train/loss",
        "perf/steps_per_s",
        "perf/compute_s",
    ]
    assert [(row["step"], row["train/loss"], row["perf/compute_s"]) for row in rows(tmp_path / "metrics.csv")] == [
        ("1", "1.0", ""),
        ("2", "7.0", ""),
    ]


def test_tensorboard_has_hyper_parameters_histograms_and_forgets_rollbacks(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, metadata

    weights = {"dense/kernel": np.arange(6.0).reshape(2, 3)}
    attempt(
        tmp_path,
        "tensorboard",
        0,
        0,
        (10, 20, 30, 40, 30, 40, 50, 60),
        ending="end",
        flags={"learning_rate": 0.5, "model": "cnn", "shuffle": True, "histograms_every": 25},
        weights=lambda: weights,
    )
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [scalar.step for scalar in found.Scalars("train/loss")] == [10, 20, 30, 40, 50, 60]
    assert [tensor.step for tensor in found.Tensors("weights/dense/kernel")] == [30, 50]
    start = metadata.parse_session_start_info_plugin_data(
        found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    assert (
        start.hparams["learning_rate"].number_value == 0.5
        and start.hparams["model"].string_value == "cnn"
        and start.group_name == "run5"
    )
    assert (
        metadata.parse_session_end_info_plugin_data(
            found.SummaryMetadata("_hparams_/session_end_info").plugin_data.content
        ).status
        == api_pb2.STATUS_SUCCESS
    )


def test_tensorboard_forgets_an_evaluation_that_comes_again(tmp_path):
    """After a rollback to the last train event, where no train event goes back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    observer = TensorBoardObserver(tmp_path, 0)
    for step, kind in ((100, "train"), (100, "eval"), (150, "eval"), (150, "eval"), (200, "train"), (200, "eval")):
        observer(Event(kind, step, {f"{kind}/loss": 1.0}))
    observer.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [scalar.step for scalar in found.Scalars("eval/loss")] == [100, 150, 200]
    assert [scalar.step for scalar in found.Scalars("train/loss")] == [100, 200]


def test_weights_that_share_a_path_are_told_apart():
    weights = [SimpleNamespace(path=path, numpy=lambda n=n: n) for n, path in enumerate(["a/b", "c", "a/b", "a/b"])]
    assert by_path(weights) == {"a/b": 0, "c": 1, "a/b_2": 2, "a/b_3": 3}


def mlflow_run(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("tfdist").experiment_id])
    return found, {
        kind: [(point.step, point.value) for point in client.get_metric_history(found.info.run_id, f"{kind}/loss")]
        for kind in ("train", "eval")
    }


@pytest.mark.slow
def test_mlflow_is_one_run_and_is_told_what_it_missed(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    attempt(tmp_path, "none", 0, 0, (5, 10))  # MLflow is asked for later only
    attempt(tmp_path, "mlflow", 1, 10, (15, 20, 30), evaluate=(20,), flags={"learning_rate": 0.5})
    attempt(tmp_path, "mlflow", 2, 20, (30, 40), evaluate=(40,), ending="end")
    found, points = mlflow_run(tmp_path)
    # Step 30 keeps the value that was told first.
    assert points == {
        "train": [(5, 5.0), (10, 10.0), (15, 15.1), (20, 20.1), (30, 30.1), (40, 40.2)],
        "eval": [(20, 20.1), (40, 40.2)],
    }
    assert found.info.status == "FINISHED" and found.data.params == {"learning_rate": "0.5"}


def wandb_history(path):
    """[(step, names)] of an offline file: blocks of 32 KiB with pieces of records, 7 bytes before each (checksum,
    length, kind).
    """
    from wandb.proto import wandb_internal_pb2

    data, at, record, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0:  # the rest of a block
            at += 32768 - at % 32768
            continue
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        if kind in (1, 4):  # whole, or the last piece
            message = wandb_internal_pb2.Record.FromString(record)
            record = b""
            if message.WhichOneof("record_type") == "history":
                found.append(
                    (message.history.step.num, {item.key or item.nested_key[0] for item in message.history.item})
                )
    return found


def test_wandb_is_one_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    attempt(tmp_path, "wandb", 0, 0, (10, 20, 30), evaluate=(20,))
    attempt(tmp_path, "wandb", 1, 20, (30, 40), ending="end")
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-run5.wandb"))
    told = [entry for path in files for entry in wandb_history(path)]
    assert len(files) == 2 and [step for step, _ in told] == [10, 20, 30, 40]
    assert "eval/loss" in told[1][1] and all("train/loss" in names for _, names in told)


def own_tracker(run):
    return lambda event: (run.folder / "own.txt").write_text(f"{run.run_id} {event.kind} {event.step}")


def test_a_users_own_tracker(tmp_path):
    attempt(tmp_path, "tests.unit.telemetry.test_trackers:own_tracker", 0, 0, (10,))
    assert (tmp_path / "own.txt").read_text() == "run5 train 10"
    with pytest.raises(
        ConfigError,
        match="--trackers=tensorbord is unknown: use tensorboard, csv, mlflow, wandb, or package.module:function.",
    ):
        make_trackers("csv,tensorbord", Run(tmp_path, "r"))


def test_a_tracker_that_cannot_be_made_may_be_left_out(tmp_path, capsys):
    """As in an elastic job on a full disk, which goes on from memory."""
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(ConfigError, match="--trackers=csv"):
        make_trackers("csv", Run(tmp_path, "r"))
    assert make_trackers("csv", Run(tmp_path, "r"), may_fail=True) == []
    assert re.search("WARNING: --trackers=csv .* It is switched off", capsys.readouterr().err)


def as_a_function(told):
    return lambda event: told.append(event.kind)


def as_a_builtin(told):
    class Kinds(list):
        def append(self, event):
            told.append(event.kind)

    return Kinds().append


class Closing:
    def __init__(self, told):
        self.told = told

    def __call__(self, event):
        self.told.append(event.kind)

    def close(self):
        self.told.append("close")


class Following(Closing):
    def enter(self, section):  # by another name than `Observer` has for it
        self.told.append(f"enter {section}")

    def leave(self, section, failed):
        self.told.append(f"leave {section} {failed}")


class Inheriting(Observer):
    def __init__(self, told):
        self.told = told

    def leave(self, name, failed):
        self.told.append(f"leave {name} {failed}")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (as_a_function, ["train"]),
        (as_a_builtin, ["train"]),
        (Closing, ["train", "close"]),
        (Following, ["enter save", "train", "leave save False", "close"]),
        (Inheriting, ["leave save False"]),
    ],
)
def test_what_users_may_give_for_an_observer(tmp_path, monkeypatch, make, expected):
    told = []
    monkeypatch.setitem(sys.modules, "own_observers", SimpleNamespace(track=lambda run: make(told)))
    fan_out = FanOut(make_trackers("own_observers:track", Run(tmp_path, "r")))
    around = FanOut([fan_out])
    with around.section("save"):
        around(train_event(1, 1.0))
    around.close()
    assert told == expected
    assert isinstance(fan_out, Observer) and fan_out.observers == around.observers == []


@pytest.mark.parametrize("make", [as_a_function, Closing, Following])
def test_a_users_own_observer_is_named_as_it_is(make, capsys):
    own = make(None)  # which cannot be appended to
    FanOut([own])(train_event(1, 1.0))
    name = getattr(own, "__qualname__", type(own).__name__)
    assert f"WARNING: {name} failed (AttributeError: " in capsys.readouterr().err


@pytest.mark.parametrize(("trackers", "package"), [("mlflow", "mlflow"), ("wandb", "wandb")])
def test_a_missing_package_is_a_sentence(tmp_path, monkeypatch, trackers, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # what Python takes for "there is none"
    with pytest.raises(
        UnsupportedError,
        match=(
            rf"^--trackers={trackers} needs the Python package {package}, which is not installed: pip install"
            rf" .*{package}"
        ),
    ):
        make_trackers(trackers, Run(tmp_path, "r"))
    with pytest.raises(
        UnsupportedError, match="^--x needs the Python package tfdist_absent, which is not installed: pip install y$"
    ):
        optional_module("tfdist_absent", "--x", "y")


def test_a_slow_tracker_holds_nobody_up_and_a_failing_one_is_switched_off(capsys):
    go, seen = threading.Event(), []

    def slow(event):
        go.wait(60)
        seen.append(event.step)

    def broken():
        raise OSError("no server")

    fan_out = FanOut([Background("the slow one", lambda: slow), Background("the broken one", broken)])
    fan_out.observers[1]._thread.join()
    for step in range(100):
        fan_out(train_event(step, 1.0))
    assert seen == []
    go.set()
    fan_out.close()
    assert seen == list(range(100))
    assert capsys.readouterr().err.count("the broken one failed (OSError: no server) and is switched off") == 1


def test_a_tracker_that_never_ends_is_left_behind():
    background = Background("stuck", lambda: lambda event: threading.Event().wait(), last_seconds=0.1)
    background(train_event(1, 1.0))
    with pytest.raises(TimeoutError, match="not passed on within 0.1 s"):
        background.close()


def stuck(event):
    threading.Event().wait()


def test_the_end_of_a_run_waits_for_a_hanging_tracker_once(capsys):
    fan_out = FanOut([Background("stuck", lambda: stuck, last_seconds=0.5)])
    fan_out(train_event(1, 1.0))
    begin = time.monotonic()
    fan_out.close()
    assert 0.5 <= time.monotonic() - begin < 0.9
    assert capsys.readouterr().err.count("stuck failed (TimeoutError: 1 events were not passed on within 0.5 s)") == 1


def test_a_tracker_for_which_too_much_waits_is_left_behind(monkeypatch, capsys):
    """At the close, too, which waits for what was told; and not during the training, which would stand still."""
    monkeypatch.setattr("tfdist.telemetry.background._MOST_WAITING", 2)
    full, late = (Background("stuck", lambda: stuck, last_seconds=last_seconds) for last_seconds in (0.1, 60))
    for background in (full, late):
        background(train_event(0, 1.0))
        while background._events.qsize():
            time.sleep(0.001)
        for step in (1, 2):
            background(train_event(step, 1.0))
    with pytest.raises(TimeoutError, match="3 events were not passed on within 0.1 s"):
        full.close()
    fan_out = FanOut([late])
    begin = time.monotonic()
    fan_out(train_event(3, 1.0))
    assert time.monotonic() - begin < 30 and fan_out.observers == []
    assert "stuck failed (TimeoutError: 2 events are waiting to be passed on)" in capsys.readouterr().err


def test_a_failing_tracker_of_ones_own_is_named_by_its_flag(tmp_path, monkeypatch, capsys):
    (tmp_path / "failing.py").write_text("def track(run):\n    return lambda event: 1 / 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    FanOut(make_trackers("failing:track", Run(tmp_path, "r")))(train_event(1, 1.0))
    assert "WARNING: --trackers=failing:track failed (ZeroDivisionError" in capsys.readouterr().err


def test_a_tracker_that_ends_its_thread_is_switched_off(capsys):
    """Else what it was told would be lost without a word."""

    def leaving():
        raise SystemExit(0)

    fan_out = FanOut([Background("the leaving one", leaving)])
    fan_out.close()
    assert "the leaving one failed (SystemExit: 0) and is switched off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def track(): pass", r"takes \(\): a tracker is a function \(run\) that returns a function of an Event"),
        ("def track(run): raise KeyError('x')", "in track: KeyError: 'x'"),
        ("def track(run): return 3", r"returned 3: a tracker is a function \(run\)"),
    ],
)
def test_a_tracker_of_ones_own_that_is_none(tmp_path, monkeypatch, code, words):
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_tracker", raising=False)
    (tmp_path / "own_tracker.py").write_text(code)
    name = f"{tmp_path}/own_tracker.py:track"
    with pytest.raises(ConfigError, match=words) as raised:
        make_trackers(name, Run(tmp_path, "id"))
    assert f"--trackers={name}" in str(raised.value)
