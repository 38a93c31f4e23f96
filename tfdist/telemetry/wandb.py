"""Weights & Biases: one of its runs per tfdist run, with the same id.

Its own environment variables apply: WANDB_MODE=offline writes RUN_DIR/wandb for a later `wandb sync`, one folder per
attempt; WANDB_PROJECT (default "tfdist"), WANDB_ENTITY, WANDB_API_KEY.
"""

from __future__ import annotations

import os
from types import ModuleType

from tfdist.control.exit_codes import ConfigError
from tfdist.control.optional_packages import optional_module
from tfdist.control.user_errors import first_line
from tfdist.telemetry.events import Event, Observer
from tfdist.telemetry.jsonl import read_jsonl
from tfdist.telemetry.trackers import Run, numbers


def track(run: Run) -> WandbTracker:
    """Makes the tracker `wandb`. Raises UnsupportedError without the package, ConfigError if it is not logged in."""
    return WandbTracker(run, optional_module("wandb", "--trackers=wandb", "wandb"))


class WandbTracker(Observer):
    """Logs a row per step, shared by its train and eval values. Steps only grow in W&B: the first values stay."""

    def __init__(self, run: Run, wandb: ModuleType):
        known = any((run.folder / "wandb").glob(f"*-{run.run_id}"))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "tfdist"),
                id=run.run_id,
                name=run.folder.resolve().name,
                resume="allow",
                dir=str(run.folder),
                config=dict(run.flags),
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"--trackers=wandb: {first_line(error)} Set WANDB_API_KEY, or WANDB_MODE=offline."
            ) from error
        if self._run.resumed:
            last_step = self._run.step - 1
        else:  # offline, W&B cannot tell what an earlier attempt sent; assume all that is in the log
            last_step = (
                max(
                    (record["step"] for record in read_jsonl(run.log) if record["kind"] in ("train", "eval")),
                    default=-1,
                )
                if known
                else -1
            )
        self._last_steps = {"train": last_step, "eval": last_step}
        for event in run.replay(after=self._last_steps):
            self(event)

    def __call__(self, event: Event) -> None:
        if event.step > self._last_steps.get(event.kind, event.step):
            self._run.log(numbers(event), step=event.step)
            self._last_steps[event.kind] = event.step
        if event.kind in ("end", "error"):
            self._run.finish(exit_code=int(event.kind == "error"))

    def close(self) -> None:
        self._run.finish()
