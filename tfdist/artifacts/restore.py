"""Chooses the snapshot that a run resumes from, and decides whether it may.

1. The newest valid snapshot of the run folder, or the backup if that is newer. Damaged ones are passed over, and named.
2. --resume=never refuses a folder that has one; --resume=must refuses one that has none.
3. A snapshot of another configuration (by digest) is refused with the fields that differ, unless --allow_config_change.
4. Another number of workers is allowed, and reported: the data order does not depend on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.artifacts.policy import ALL_STEPS, ScheduledSteps
from tfdist.artifacts.snapshot_folder import Snapshot, SnapshotFolder
from tfdist.config import Config
from tfdist.config.run_options import RunConfig
from tfdist.control.exit_codes import CheckpointError, ConfigError

# The entries of a manifest that are needed to resume.
REQUIRED = ("consumed", "config_digest", "identity", "workers", "generators", "clock")


def pick_snapshot(
    store: SnapshotFolder,
    config: Config,
    others: Sequence[SnapshotFolder] = (),
    steps: ScheduledSteps = ALL_STEPS,
    passed_over: Sequence[str] = (),
) -> tuple[Snapshot | None, list[str]]:
    """Returns the snapshot to resume from (None: start from the beginning), and messages for the user. A snapshot of
    the `others` is chosen only if it is newer. steps: choose only among these steps if `store` has one of them, and
    then ignore `others`, which may have been written at any step. passed_over: messages on damaged snapshots that were
    not brought from an object store. Raises CheckpointError, and errors of the stores.
    """
    snapshot, messages = store.newest_valid(steps)
    if snapshot and steps.periods:
        others = ()
    elif steps.periods:
        snapshot, messages = store.newest_valid()
    flag = store.options.flag
    for each in others:
        newer, more = each.newest_valid()
        messages += more
        if newer and (snapshot is None or newer.step > snapshot.step):
            if snapshot and _are_of_two_runs(newer, snapshot):
                raise CheckpointError(
                    f"{newer.path} belongs to another run than {snapshot.path}, and is newer: choose another"
                    f" {each.options.flag}, or remove the one that is not wanted."
                )
            snapshot, flag = newer, each.options.flag
    messages = [*passed_over, *(f"skipped a snapshot: {reason}" for reason in messages)]
    resume = config.checkpoint.resume
    if snapshot is None:
        if resume == "must":
            raise CheckpointError(
                f"--resume=must, but {store.place} has no valid snapshot ({'; '.join(messages) or 'it is empty'}):"
                " check --run_dir, or use --resume=auto."
            )
        if messages:
            flags = " and ".join(dict.fromkeys(each.options.flag for each in (store, *others)))
            raise CheckpointError(
                f"No snapshot in {store.place} is valid ({'; '.join(messages)}): restore one from elsewhere, or choose"
                f" another {flags} to start from the beginning."
            )
        return None, messages
    if resume == "never":
        raise CheckpointError(
            f"--resume=never, but {snapshot.path} exists: choose another {flag}, or use --resume=auto."
        )
    check_configuration(snapshot.manifest, config, snapshot.path, flag)
    return snapshot, messages


def _are_of_two_runs(one: Snapshot, other: Snapshot) -> bool:
    runs = {each.manifest.get("run_id") for each in (one, other)}
    return len(runs) == 2 and all(runs)  # snapshots of early versions name none


def scheduled(config: Config) -> ScheduledSteps:
    """The steps whose snapshots can be rolled back to after bad numbers, wherever the job was interrupted."""
    if not config.run.deterministic or config.loop.on_nan != "rollback":
        return ALL_STEPS
    return ScheduledSteps(config.checkpoint.save_every, config.loop.eval_every if config.checkpoint.keep_best else 0)


def check_configuration(manifest: Mapping[str, Any], config: Config, path: str, flag: str) -> None:
    """Refuses a snapshot of another configuration, naming the fields. Raises CheckpointError."""
    if manifest["config_digest"] == config.digest() or config.checkpoint.allow_config_change:
        return
    saved, now = manifest["identity"], config.identity()
    different = [
        f"--{name}: {saved.get(name)!r} there, {now.get(name)!r} now"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]
    raise CheckpointError(
        f"{path} belongs to another configuration ({'; '.join(different)}): use its flags, choose another {flag}, or,"
        " if the variables are the same, allow it with --allow_config_change."
    )


def check_consistency(manifest: Mapping[str, Any], step: int, global_batch: int) -> None:
    """Compares a snapshot's manifest with the restored values. Raises CheckpointError."""
    if step != manifest["step"]:
        raise CheckpointError(
            f"The snapshot of step {manifest['step']} has a step counter of {step}: it cannot be trusted, remove it."
        )
    skipped = manifest.get("skipped_samples", 0)
    if manifest["consumed"] != step * manifest["identity"]["global_batch"] + skipped:
        raise CheckpointError(
            f"The snapshot of step {step} has consumed {manifest['consumed']} samples, which is not step x global batch"
            f" {manifest['identity']['global_batch']} + {skipped} skipped: it cannot be trusted, remove it."
        )
    if manifest["consumed"] % global_batch:
        raise CheckpointError(
            f"The snapshot has consumed {manifest['consumed']} samples, not a multiple of"
            f" --global_batch={global_batch}: keep --global_batch={manifest['identity']['global_batch']}, with which it"
            " was saved, or use another divisor of that number."
        )


def stream_cut(manifest: Mapping[str, Any], name: str, is_stream: bool) -> int:
    """The number of parts into which the run reads the data set `name`; 1 means no cut. Raises CheckpointError for a
    stream whose snapshot does not tell."""
    if "stream_cut" not in manifest and is_stream:
        raise CheckpointError(
            f"The snapshot of step {manifest['step']} is of tfdist 0.1.0 (2026-11-21), which did not note how it"
            f" divided the stream {name} among workers: finish the run with that version, or choose another --run_dir"
            " to start from the beginning."
        )
    return manifest.get("stream_cut", 1)


def check_epochs(run: RunConfig, trained: int, step: int, global_batch: int, size: int | None) -> None:
    """Raises ConfigError if --epochs is to define the end of a run of `size` samples whose earlier steps used another
    batch size: the number of steps would not match. trained: samples in `step` steps."""
    if size and not run.steps and trained != step * global_batch:
        end = step + max(0, math.ceil((run.epochs * size - trained) / global_batch))
        raise ConfigError(
            f"--epochs={run.epochs:g} with --global_batch={global_batch}: this run was started with another batch, and"
            f" has trained on {trained:,} samples in {step:,} steps. Set its end with --steps={end}, which makes"
            f" {run.epochs:g} epochs in all."
        )


def check_learning_rate(manifest: Mapping[str, Any], learning_rate: float, config_digest: str) -> str:
    """Checks that the learning rate continues where it was.

    Returns a warning for a changed configuration, else "". Raises CheckpointError.
    """
    saved = manifest.get("learning_rate")
    if saved is None or abs(saved - learning_rate) <= 1e-6 * max(abs(saved), abs(learning_rate)):
        return ""
    if manifest["config_digest"] == config_digest:
        raise CheckpointError(
            f"The snapshot of step {manifest['step']} was written at learning rate {saved:g}, but it is"
            f" {learning_rate:g} after restoring: the schedule cannot be trusted, remove the snapshot."
        )
    return f"the learning rate jumps from {saved:g} to {learning_rate:g}, as the configuration was changed"


class LossContinuity:
    """Checks whether the loss after a restore continues where it was: a first check for silent damage. Warns once.

    Keeps the last losses of the log intervals; those of a snapshot are restored with it.
    """

    KEPT, STANDARD_DEVIATIONS, LEAST = 10, 6.0, 0.3  # LEAST: a jump by less than this part of the loss is not named

    def __init__(self, saved: Sequence[float] = ()):
        self.losses = [loss for loss in saved if math.isfinite(loss)]
        self._expected = self.losses

    def add(self, loss: float) -> str:
        """Adds the mean loss of one interval; NaN if the loss scale was still too large in each of its steps.

        Returns a sentence if it does not continue where the restored run was, else "".
        """
        if not math.isfinite(loss):
            return ""
        self.losses = [*self.losses, loss][-self.KEPT :]
        expected, self._expected = self._expected, []
        if len(expected) < 3:
            return ""
        mean, deviation = statistics.fmean(expected), statistics.stdev(expected)
        if loss <= mean + max(self.STANDARD_DEVIATIONS * deviation, self.LEAST * abs(mean)):
            return ""
        return (
            f"the loss jumps from {mean:.4g} (mean before the restart) to {loss:.4g}: check that data, code and package"
            " versions are those of the snapshot"
        )
