"""Finds what slows a run down, in one sentence: input, communication, storage, a slow rank, or just the computing.

Judged from the phases of all workers (phases.py), as shares of the time without evaluations. All workers take part in
each step, so the time is the same for all; if one worker takes longer, the others spend that time in gradient_sync:

storage        the longest checkpoint of any worker
slow rank      how much longer the slowest worker takes for forward, backward, optimizer and other than the median of
               the others
input          the longest data wait and host to device of any worker: if all readers are equally slow, the other
               workers read ahead while they wait for the last one
communication  the shortest gradient_sync of any worker: that worker waits for nobody
compute        forward, backward pass and optimizer, median of the workers
host           other, median of the workers
nothing        none of these reaches its threshold

The largest of the first four is the verdict if its share is at least LEAST, else the larger of the next two if its
share is at least MOST.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tfdist.control.amounts_text import short_time
from tfdist.telemetry.phases import PHASES, Phase

LEAST, MOST = 0.2, 0.5
_PATIENCE = 2  # accounts in a row that must agree before a change is reported
_INPUT = [Phase.DATA_WAIT, Phase.HOST_TO_DEVICE]
_COMPUTE = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
_OWN = [*_COMPUTE, Phase.OTHER]


class _Subject(NamedTuple):
    """The subject of a verdict: while it stays the same, so does the verdict."""

    kind: str
    rank: int


class _Account(NamedTuple):
    """How the time of some steps was spent."""

    first_step: int
    steps: int
    by_rank: np.ndarray  # see `judge`


@dataclass(frozen=True)
class Finding:
    """What slows a run down, and how much."""

    kind: str  # "storage", "slow rank", "input", "communication", "compute", "host" or "nothing"
    share: float  # of the time
    rank: int = -1  # the worker that all wait for; -1: no single one
    phase: str = ""  # the phase in which that worker is slow
    phase_s: float = 0.0  # its seconds per step in that phase
    others_s: float = 0.0  # those of the others, median
    beside: str = ""  # how the rest of the time is spent, if nothing takes most of it

    @property
    def subject(self) -> _Subject:
        return _Subject(self.kind, self.rank)

    def sentence(self, since: int | None) -> str:
        """Returns the verdict with its figure, since when it holds, and what to do."""
        percent = f"{100 * self.share:.0f} % of the time"
        when = f", since step {since}" if since is not None else ""
        about, advice = _ADVICE[self.kind]
        if self.rank >= 0:
            when += (
                f"; rank {self.rank} takes {short_time(self.phase_s)} a step for {_WORDS[self.phase]}, the others"
                f" {short_time(self.others_s)}"
            )
        return about.format(percent=percent, rank=self.rank, beside=self.beside) + when + ". " + advice


_WORDS = {name: name.replace("_", " ") for name in PHASES} | {
    "data_wait": "waiting for data",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "other": "what is between the steps",
}
_ADVICE = {
    "slow rank": (
        "a slow rank: all wait {percent} for rank {rank}",
        "Look at its machine: clock, temperature, other processes.",
    ),
    "storage": (
        "stalled on storage: {percent} waiting for snapshots",
        (
            "Save less often (--save_every, --save_minutes), write to faster storage, keep --async_save; --backup_dir"
            " on a local disk saves the work in between."
        ),
    ),
    "input": (
        "input-bound: {percent} waiting for data",
        (
            "Raise --reader_threads, give the workers more processor cores, move the data closer (--data_dir on a local"
            " disk), or make reading and --augment cheaper."
        ),
    ),
    "communication": (
        "communication-bound: {percent} in gradient synchronization that nothing hides",
        (
            "Raise --global_batch (with --zero=2 or 3 also --micro_batch), try --pack_mb, use a faster network or"
            " fewer, larger workers."
        ),
    ),
    "compute": (
        "compute-bound: {percent} is computing (forward pass, backward pass and optimizer)",
        "So the devices are the limit; --precision=bfloat16, --jit_compile or more workers make it faster.",
    ),
    "nothing": (
        (
            "nothing in particular slows the run down: {percent} is computing (forward pass, backward pass and"
            " optimizer), {beside}"
        ),
        "No single one of these matters much; a larger batch reduces all but the computing.",
    ),
    "host": (
        "slowed down between the steps: {percent} outside of the training function",
        "Raise --log_every and --steps_per_loop, or the batch: the steps are too short for the work between them.",
    ),
}


def judge(by_rank: np.ndarray) -> Finding:
    """Judges one account. by_rank: float64 [workers, len(PHASES)], seconds per step of each phase on each worker."""
    time = max(float(np.median(np.delete(by_rank, Phase.EVALUATION, axis=1).sum(axis=1))), 1e-12)
    computing, fed = by_rank[:, _OWN].sum(axis=1), by_rank[:, _INPUT].sum(axis=1)
    slow, starved = int(computing.argmax()), int(fed.argmax())
    losses = {
        "storage": float(by_rank[:, Phase.CHECKPOINT].max()),
        "input": float(fed[starved]),
        "communication": float(by_rank[:, Phase.GRADIENT_SYNC].min()),
        "slow rank": float(computing[slow] - np.median(np.delete(computing, slow))) if len(computing) > 1 else 0.0,
    }
    kind = max(losses, key=losses.__getitem__)
    if losses[kind] < LEAST * time:
        rest = {
            "compute": float(np.median(by_rank[:, _COMPUTE].sum(axis=1))),
            "host": float(np.median(by_rank[:, Phase.OTHER])),
        }
        kind = max(rest, key=rest.__getitem__)
        if rest[kind] < MOST * time:
            small_shares = {
                "between the steps": rest["host"],
                "waiting for data": losses["input"],
                "gradient synchronization": losses["communication"],
                "waiting for snapshots": losses["storage"],
            }
            beside = ", ".join(
                f"{100 * seconds / time:.0f} % {what}"
                for what, seconds in sorted(small_shares.items(), key=lambda each: -each[1])
                if seconds >= 0.005 * time
            )
            return Finding("nothing", min(1.0, rest["compute"] / time), beside=beside)
        return Finding(kind, min(1.0, rest[kind] / time))
    share = min(1.0, losses[kind] / time)
    if kind == "slow rank":
        return _of_rank(kind, share, by_rank, slow, _OWN)
    if kind == "input" and len(fed) > 1 and fed[starved] > 2 * np.median(np.delete(fed, starved)):
        return _of_rank(kind, share, by_rank, starved, _INPUT)
    return Finding(kind, share)


def _of_rank(kind: str, share: float, by_rank: np.ndarray, rank: int, phases: list[Phase]) -> Finding:
    """Returns the finding about a rank, with the phase of `phases` in which it is furthest behind the others."""
    others = np.median(np.delete(by_rank, rank, axis=0), axis=0)
    phase = max(phases, key=lambda phase: by_rank[rank, phase] - others[phase])
    return Finding(kind, share, rank, PHASES[phase], float(by_rank[rank, phase]), float(others[phase]))


class Verdicts:
    """The accounts of a run, one after the other, and the verdict on them."""

    def __init__(self):
        self._accounts: list[_Account] = []
        self._concluded: _Subject | None = None

    def add(self, first_step: int, steps: int, by_rank: np.ndarray) -> str:
        """Adds one account. Returns a sentence if the verdict is new or has changed, and is confirmed; else ""."""
        self._accounts.append(_Account(first_step, steps, by_rank))
        last = self._accounts[-_PATIENCE:]
        subjects = {judge(each.by_rank).subject for each in last}
        if len(last) < _PATIENCE or len(subjects) > 1 or subjects == {self._concluded}:
            return ""
        (self._concluded,) = subjects
        return judge(_mean(last)).sentence(self._since(self._concluded))

    def final(self) -> str:
        """Returns the verdict on the whole run (for a slow rank: on the time in which it was slow); "" if there is no
        account.
        """
        if not self._accounts:
            return ""
        finding = judge(_mean(self._accounts))
        since = self._since(finding.subject)
        if finding.rank >= 0 and since is not None:
            finding = judge(_mean([account for account in self._accounts if account.first_step >= since]))
        return finding.sentence(since)

    def _since(self, subject: _Subject) -> int | None:
        """Returns the step since which this has been the verdict without interruption; None if it is not the current
        one, or if it has always been and concerns no rank.
        """
        since = None
        for account in reversed(self._accounts):
            if judge(account.by_rank).subject != subject:
                return since
            since = account.first_step
        return since if subject.rank >= 0 else None


def _mean(accounts: Sequence[_Account]) -> np.ndarray:
    """Returns the mean of a step, by rank."""
    return np.average([each.by_rank for each in accounts], axis=0, weights=[each.steps for each in accounts])
