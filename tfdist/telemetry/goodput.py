"""Goodput: the share of a run folder's lifetime spent on training steps that were kept.

All data comes from logs/rank-0.jsonl, over all attempts. The lifetime begins when the first process that logged
anything was started, and ends with the last event. `account` cuts it into consecutive spans without gaps, so the parts
always add up to the lifetime.

train       steps that were kept
lost        steps that were repeated or never kept, and rollbacks after bad numbers
restart     from the last event before a death to the first new step: failure, down, start-up and first step together
startup     start of a process that does not follow a death: imports, building, restoring, opening the data
trace       tracing and compiling: the extra time of an attempt's first steps over the same number of later ones
evaluation  training paused for an evaluation
saving      training paused for a snapshot or a backup
results     after the last snapshot: export, picture, summary
idle        after a finished training, until somebody continued it
other       not explained by the log

Between two train events the log has the seconds of training (steps / perf/steps_per_s) and of each pause
(pause/NAME_s). After the last train event of an attempt it has only steps and times: those steps are counted at the
attempt's median pace. What a process did after its last event is in no log; it counts as restart.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any, NamedTuple

from tfdist.telemetry.jsonl import steady_values

PARTS = ("train", "lost", "restart", "startup", "trace", "evaluation", "saving", "results", "idle", "other")
_PAUSES = {"evaluation": "evaluation", "saving": "saving", "rollback": "lost"}  # pause/NAME_s -> part
_AFTER = {
    "eval": "evaluation",
    "save": "saving",
    "backup": "saving",
    "error": "failure",
    "end": "results",
}  # kind -> what the time before it was spent on


@dataclass(frozen=True)
class Span:
    """A part of the lifetime.

    Times in Unix seconds. Steps (first_step, last_step] were trained in it; none if the two are equal.
    """

    part: str
    begin: float
    end: float
    attempt: int
    first_step: int = 0
    last_step: int = 0
    within: str = ""  # for a restart: "failure", "down", "startup" or "trace"

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Restart:
    """A death, a stop on request, or a change of an elastic group, after which the run continued."""

    attempt: int  # number of the new attempt
    died: float  # Unix seconds of the last event before the restart
    reason: str
    from_step: int  # the last step logged before
    to_step: int  # the step from which the new attempt continued


class _Reset(NamedTuple):
    """A point at which the run went back to an earlier step: training before it, beyond that step, is lost."""

    spans: int  # number of spans before it
    step: int


@dataclass(frozen=True)
class Goodput:
    """The lifetime of a run folder, in consecutive spans without gaps."""

    spans: tuple[Span, ...]
    restarts: tuple[Restart, ...]
    lost_steps: int
    # "finished", "stopped" (on request), "failed", or "running or killed": the log cannot tell these two apart
    state: str
    unsaved_steps: int  # done, but in no snapshot that the log mentions

    @property
    def wall_s(self) -> float:
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """part -> seconds, for every part, in the order of PARTS; the sum is `wall_s`."""
        return {part: sum(span.seconds for span in self.spans if span.part == part) for part in PARTS}

    @property
    def restart_parts(self) -> dict[str, float]:
        """The seconds of "restart", by component."""
        return {
            within: sum(span.seconds for span in self.spans if span.within == within)
            for within in ("failure", "down", "startup", "trace")
        }

    @property
    def fraction(self) -> float:
        """Useful training seconds per second of lifetime; 0 for a lifetime without length."""
        return self.parts["train"] / self.wall_s if self.wall_s else 0.0


def seconds_of(record: Mapping[str, Any]) -> float:
    """Returns a record's time as Unix seconds."""
    return datetime.fromisoformat(record["time"]).timestamp()


def account(records: Iterable[Mapping[str, Any]]) -> Goodput:
    """Accounts for the lifetime recorded in a rank-0.jsonl (jsonl.read_jsonl)."""
    attempts = [_Attempt(list(group)) for _, group in groupby(_in_order(records), key=lambda record: record["attempt"])]
    paces = [pace for attempt in attempts for pace in attempt.paces]
    spans: list[Span] = []
    resets: list[_Reset] = []
    restarts: list[Restart] = []
    recovering = False  # no new step has been done since a death
    for before, attempt in zip([None, *attempts], attempts, strict=False):
        if before and not before.finished:
            recovering = True
            restarts.append(
                Restart(attempt.number, before.last["at"], before.reason, before.last["step"], attempt.first["step"])
            )
        if before:
            resets.append(_Reset(len(spans), attempt.first["step"]))
        walk = _Walk(attempt, attempt.pace or _median(paces))
        walk.start(before)
        walk.go()
        resets += [reset._replace(spans=len(spans) + reset.spans) for reset in walk.resets]
        for span in walk.spans:
            recovering = recovering and span.first_step == span.last_step
            is_restart = span.part in ("failure", "down") or (recovering and span.part in ("startup", "trace"))
            spans.append(replace(span, part="restart", within=span.part) if is_restart else span)
    last = attempts[-1] if attempts else None
    if last and last.state == "failed":
        resets.append(_Reset(len(spans), last.saved_step))
    spans = _split(spans, resets)
    return Goodput(
        tuple(spans),
        tuple(restarts),
        sum(span.last_step - span.first_step for span in spans if span.part == "lost"),
        last.state if last else "",
        last.last["step"] - last.saved_step if last and not last.finished else 0,
    )


def _in_order(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records with "at", Unix seconds that never go back: a chief may return on a host whose clock lags."""
    latest, found = float("-inf"), []
    for record in records:
        latest = max(latest, seconds_of(record))
        found.append({**record, "at": latest})
    return found


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _number(values: Mapping[str, Any], name: str) -> float:
    """Returns a value of a record; 0 if it is missing or not a number."""
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


class _Attempt:
    """The records of one attempt, and figures derived from all of them."""

    def __init__(self, records: list[dict[str, Any]]):
        self.records, self.first, self.last = records, records[0], records[-1]
        self.number = self.first["attempt"]
        self.paces = [1 / speed for speed in steady_values(records, "perf/steps_per_s")]
        self.pace = _median(self.paces)  # seconds per step
        ends = [record for record in records if record["kind"] in ("end", "error")]
        self.finished = bool(ends) and ends[-1]["kind"] == "end" and not ends[-1]["values"].get("stopped")
        self.state = (
            "finished"
            if self.finished
            else "running or killed"
            if not ends
            else "stopped"
            if ends[-1]["kind"] == "end"
            else "failed"
        )
        self.reason = {
            "failed": str(ends[-1]["values"].get("message", "an error")) if ends else "",
            "stopped": "stopped on request, after saving",
            "running or killed": "no final event: it was killed",
        }.get(self.state, "")
        if self.last["kind"] == "regroup":  # instead of a final event
            self.reason = str(self.last["values"].get("message", ""))
        saves = [
            int(record["values"].get("save/step", record["step"]))
            for record in records
            if record["kind"] in ("save", "backup")
        ]
        self.saved_step = max([self.first["step"], *saves])


class _Walk:
    """Goes through an attempt's records and adds consecutive spans."""

    def __init__(self, attempt: _Attempt, pace: float):
        self.attempt, self.pace = attempt, pace
        self.spans: list[Span] = []
        self.resets: list[_Reset] = []
        self.at, self.step = attempt.first["at"], attempt.first["step"]  # everything before is accounted for
        self.trained = False

    def start(self, before: _Attempt | None) -> None:
        """Accounts for the time from the previous attempt's last event, if any, to this attempt's first event."""
        first = self.attempt.first["at"]
        born = first - _number(self.attempt.first["values"], "startup_s")
        self.at = before.last["at"] if before else born
        self._lay(
            "idle" if before and before.finished else "down", born - self.at
        )  # negative if a spare process was started before the other died
        self._lay("startup", first - self.at)

    def go(self) -> None:
        pending: list[dict[str, Any]] = []  # since the last train event
        for record in self.attempt.records[1:]:
            if record["step"] < (pending[-1]["step"] if pending else self.step):  # rolled back after bad numbers
                self._tail(pending)
                self._lay("lost", record["at"] - self.at)
                self.step, pending = record["step"], []
                self.resets.append(_Reset(len(self.spans), self.step))
            elif record["kind"] == "train":
                self._interval(record)
                pending = []
            else:
                pending.append(record)
        self._tail(pending)

    def _interval(self, record: Mapping[str, Any]) -> None:
        """Accounts up to a train event. Pauses come first, since they are due where the previous event was."""
        values, gap, steps = record["values"], record["at"] - self.at, record["step"] - self.step
        speed = _number(values, "perf/steps_per_s")
        clock = min(gap, steps / speed) if speed else gap
        training = clock if self.trained or not self.pace else min(clock, steps * self.pace)
        left = gap - clock
        pauses = {part: min(left, _number(values, f"pause/{name}_s")) for name, part in _PAUSES.items()}
        rest = "lost" if pauses["lost"] else "other" if self.trained else "startup"  # lost: steps before a rollback
        self._lay(rest, max(0.0, left - sum(pauses.values())))
        self._lay("trace", clock - training)
        for part, seconds in pauses.items():
            self._lay(part, min(seconds, record["at"] - training - self.at))
        self._train(record["at"] - self.at, record["step"])

    def _tail(self, pending: list[dict[str, Any]]) -> None:
        """Accounts for the time after the last train event."""
        for record in [record for record in pending if record["kind"] in _AFTER or record is pending[-1]]:
            gap, steps = record["at"] - self.at, record["step"] - self.step
            training = (min(gap, steps * self.pace) if self.pace else gap) if steps else 0.0
            if steps and not self.trained and record["kind"] != "error":
                self._lay("trace", gap - training)
            if steps:
                self._train(training, record["step"])
            self._lay(_AFTER.get(record["kind"], "other" if self.trained else "startup"), record["at"] - self.at)

    def _train(self, seconds: float, step: int) -> None:
        self.spans.append(Span("train", self.at, self.at + seconds, self.attempt.number, self.step, step))
        self.at, self.step, self.trained = self.at + seconds, step, True

    def _lay(self, part: str, seconds: float) -> None:
        if seconds > 0:
            self.spans.append(Span(part, self.at, self.at + seconds, self.attempt.number))
            self.at += seconds


def _split(spans: list[Span], resets: list[_Reset]) -> list[Span]:
    """Marks training beyond the step of a later reset as lost."""
    kept, limit, found = sorted(resets), float("inf"), []
    for number in range(len(spans) - 1, -1, -1):
        while kept and kept[-1].spans > number:
            limit = min(limit, kept.pop().step)
        span = spans[number]
        if span.part != "train" or span.last_step <= limit:
            found.append(span)
            continue
        cut = max(span.first_step, int(limit))
        middle = span.begin + span.seconds * (cut - span.first_step) / max(1, span.last_step - span.first_step)
        found.append(replace(span, part="lost", begin=middle, first_step=cut))
        if cut > span.first_step:
            found.append(replace(span, end=middle, last_step=cut))
    return found[::-1]
