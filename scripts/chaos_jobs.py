"""The two kinds of jobs of chaos.py: how each is started, and which results must equal an undisturbed run's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Protocol

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.e2e.job import CLUSTERS, records, snapshot  # noqa: E402

SAVE_EVERY = 20
_FIT_SCRIPT = ROOT / "tests" / "e2e" / "fit_scripts" / "disturbed.py"


class ChaosJob(Protocol):
    """A job to disturb. Both kinds write RUN_DIR/logs/rank-0.jsonl.

    kinds: the faults it can be subject to. steps_between: range of the random number of steps before the next fault.
    pace: seconds by which each step is slowed down, so that there is time for faults.
    """

    kinds: tuple[str, ...]
    steps_between: tuple[int, int]
    pace: float

    def arguments(self, run_dir: Path) -> list[str]:
        """Returns the arguments of tfdist.launch after `--`."""

    def differences(self, undisturbed: Path, disturbed: Path) -> list[str]:
        """Returns the names of all results that differ; [] is expected."""


class TrainJob:
    """tfdist.train, with any strategy."""

    kinds = (
        "kill_chief",
        "kill_worker",
        "kill_launcher",
        "term_worker",
        "term_all",
        "stop",
        "kill_save",
        "kill_restore",
        "corrupt",
        "disk_full",
        "second_job",
    )
    steps_between = (5, 2 * SAVE_EVERY)
    pace = 0.05

    def __init__(self, arguments: argparse.Namespace):
        self.steps, self.more = arguments.steps or 100 + 60 * arguments.kills, arguments.train.split()
        self.goes_back, source = arguments.bad_numbers, "identified"
        if self.goes_back:
            source = "identified_with_nan"
            self.more = ["--on_nan=rollback", "--max_rollbacks=10000", *self.more]
            # A full disk costs a snapshot; without it, a rollback would go back further.
            self.kinds = tuple(kind for kind in self.kinds if kind != "disk_full")
        self.source = f"--source=tests.e2e.sources:{source}"

    def arguments(self, run_dir: Path) -> list[str]:
        return [
            *CLUSTERS,
            self.source,
            "--objective=tests.e2e.sources:identifying",
            "--model_args=widths=(16,),dropout=0.1,num_outputs=2",
            f"--steps={self.steps}",
            "--deterministic",
            "--optimizer=adamw",
            "--ema=0.9",
            "--schedule=cosine",
            "--accumulation=2",
            "--log_every=1",
            f"--save_every={SAVE_EVERY}",
            "--progress=none",
            "--trackers=none",
            "--heartbeat_timeout=3",
            "--eval_every=500",
            *self.more,
            f"--run_dir={run_dir}",
        ]

    def differences(self, undisturbed: Path, disturbed: Path) -> list[str]:
        wrong = _arrays(snapshot(undisturbed, self.steps), snapshot(disturbed, self.steps))
        evaluations = [
            {record["step"]: record["values"] for record in records(folder, kind="eval")}
            for folder in (undisturbed, disturbed)
        ]
        wrong += [
            f"evaluation at step {step}" for step in evaluations[0] if evaluations[0][step] != evaluations[1].get(step)
        ]
        names = ("train/first_checksum", "train/second_checksum", "data/consumed_samples", "train/loss")
        seen = [steps_told(folder, names, self.goes_back) for folder in (undisturbed, disturbed)]
        return wrong + [f"global batch of step {step}" for step in _unlike(*seen, self.steps)]


class FitJob:
    """A Keras script with tfdist.fit and BackupAndRestore; a step is an epoch. The further faults of TrainJob concern
    snapshots. A script has only one backup file, which is refused when it is damaged."""

    kinds = (
        "kill_chief",
        "kill_worker",
        "kill_launcher",
        "term_worker",
        "term_all",
        "stop",
        "kill_backup",
        "second_job",
    )
    steps_between = (1, 5)
    pace = 0.1

    def __init__(self, arguments: argparse.Namespace):
        self.steps = arguments.steps or 6 + 6 * arguments.kills

    def arguments(self, run_dir: Path) -> list[str]:
        return [str(_FIT_SCRIPT), str(run_dir), str(self.steps)]

    def differences(self, undisturbed: Path, disturbed: Path) -> list[str]:
        ends = [dict(np.load(folder / "end.npz")) for folder in (undisturbed, disturbed)]
        names = ("loss", "accuracy", "val_loss", "val_accuracy")
        seen = [steps_told(folder, names) for folder in (undisturbed, disturbed)]
        return _arrays(*ends) + [f"history of epoch {step}" for step in _unlike(*seen, self.steps)]


def steps_told(run_dir: Path, names: tuple[str, ...], goes_back: bool = False) -> dict[int, tuple]:
    """Returns step -> its values of these names. A step that was repeated must have had the same values. goes_back: it
    has other samples, and the last values count.
    """
    seen: dict[int, tuple] = {}
    for record in records(run_dir, kind="train"):
        values = tuple(record["values"][name] for name in names)
        if goes_back:
            seen[record["step"]] = values
        elif seen.setdefault(record["step"], values) != values:
            raise SystemExit(
                f"step {record['step']} was done again with other samples or another loss: {seen[record['step']]}, then"
                f" {values}"
            )
    return seen


def _unlike(one: dict[int, tuple], other: dict[int, tuple], steps: int) -> list[int]:
    return [step for step in range(1, steps + 1) if step not in one or one[step] != other.get(step)]


def _arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    return [
        f"array {key}"
        for key in sorted({*one, *other})
        if key not in one or key not in other or one[key].tobytes() != other[key].tobytes()
    ]
