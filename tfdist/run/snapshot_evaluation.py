"""Implements `python -m tfdist.evaluate`: evaluates a snapshot or an export of a run. follower.py follows a job."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist import flags
from tfdist.config import Config, option
from tfdist.config.training_options import ScheduleConfig
from tfdist.control import versions
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.control.run_address import is_url
from tfdist.storage.reader_copy import ReadRun

if TYPE_CHECKING:
    import keras

    from tfdist.artifacts.snapshot_folder import Snapshot, SnapshotFolder
    from tfdist.build import Job
    from tfdist.runtime.base import Runtime

# A run resolves these when it starts (--epochs to a number of steps), and an evaluation does not use them.
_OF_TRAINING = ("steps", "epochs", "jit_compile", "jit_tune", *(field.name for field in fields(ScheduleConfig)))
_CHOICES = 10  # attempts to read the newest snapshot, if the run removes each before it is read


@dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate."""

    at_step: int = option(-1, "The step whose snapshot is evaluated. -1: the newest valid one.", least=-1)
    model_file: str = option("", "A .keras file to evaluate instead of a snapshot.")
    follow: bool = option(False, "Evaluate every new snapshot until training is over.")


def main(argv: list[str], usage: str = "") -> int:
    """Runs the command `python -m tfdist.evaluate`. Returns the exit code."""
    given = flags.parse(argv, usage=usage, command=EvaluateOptions)
    if given.command.follow and given.command.at_step >= 0:
        raise ConfigError(
            f"--at_step={given.command.at_step} evaluates one snapshot, --follow each new one: drop one of them."
        )
    versions.check()
    versions.quiet()
    if given.command.follow:
        from tfdist.run.follower import follow

        return follow(given.config, argv)
    run = read_run(given.config)
    run.bring()
    _check_folder(run.folder, given)
    config = run_configuration(given.config, argv, run.folder)
    try:
        _evaluate(config, given.command, run)
    except Exception as error:  # an error of TensorFlow may have a known cause
        from tfdist.runtime.errors import explain

        found = explain(error, Cluster())
        if found is None:
            raise
        raise found from error
    return 0


def _evaluate(config: Config, options: EvaluateOptions, run: ReadRun) -> None:
    if options.model_file:
        show(_evaluate_file(compose(config), options.model_file), options.model_file)
        return
    from tfdist.artifacts.read_snapshots import bring_for_reading

    store, step, job = snapshots_of(run), options.at_step, None
    for _ in range(_CHOICES if step < 0 else 1):
        bring_for_reading(run.objects, store, step)
        snapshot = _choose(store, step)  # before the slow part
        job = job or compose(config)
        # The run may still be active, and remove snapshots that it does not keep.
        if snapshot and (values := evaluate_snapshot(job, store, snapshot)):
            show(values, store.directory)
            return
    raise CheckpointError(
        f"--at_step={step}: the run has removed {store.path(step)} before it was read: use a newer one, or have the run"
        " keep it with --keep_every."
        if step >= 0
        else f"The run has removed {_CHOICES} snapshots in {store.directory} before they were read: keep more with"
        " --keep, or save less often."
    )


def _check_folder(folder: Path, given: flags.Parsed) -> None:
    """Raises ConfigError if there is no run to evaluate."""
    place = given.config.run.run_dir
    # Snapshots in a store are searched later.
    expected = folder / (flags.FLAGS_FILE if is_url(place) else "checkpoints")
    if not given.command.model_file and not expected.exists():
        what = (
            "has no snapshots yet"
            if (folder / flags.FLAGS_FILE).exists()
            else "contains no run (no flags.txt, no checkpoints)"
            if folder.is_dir()
            else "is a file"
            if folder.exists()
            else "does not exist"
        )
        raise ConfigError(f"--run_dir={place} {what}: give the folder of a run, or a --model_file.")


def run_configuration(config: Config, argv: list[str], folder: Path) -> Config:
    """The flags of the run in `folder`, overridden by those of `argv`, except those that only training uses: given
    again, they could contradict what the run has resolved."""
    stored = folder / flags.FLAGS_FILE
    if stored.exists():
        own = flags.parse([f"--flagfile={stored}"]).config.flat()
        config = flags.parse([f"--flagfile={stored}", *argv], command=EvaluateOptions).config
        config = config.replace(histograms_every=0, compression="none", **{name: own[name] for name in _OF_TRAINING})
    elif not (config.run.steps or config.run.epochs):
        config = config.replace(steps=1)  # nothing is trained
    return config.validate()


def read_run(config: Config) -> ReadRun:
    """The run that a configuration names, to be read."""
    return ReadRun(config.with_absolute_folders().run.run_dir, config.run.cache_dir)


def compose(config: Config, runtime: Runtime | None = None) -> Job:
    """Builds a run's model and evaluation in this process. runtime: that of a job which this one replaces."""
    import keras

    from tfdist import build

    alone = config.in_one_process()
    if runtime:
        keras.backend.clear_session()  # variables must get the names that they have in snapshots
    job = build.compose(alone, runtime or build.start_runtime(alone, Cluster()))
    if job.eval_split is None:
        raise ConfigError(f"--source={config.data.source} has no evaluation split: use one that has.")
    return job


def _scores(job: Job, model: keras.Model | None = None) -> dict[str, float]:
    """The scores of the job's model, or of another one."""
    evaluator = job.evaluator(model)
    assert evaluator  # there is an evaluation split
    return evaluator()


def snapshots_of(run: ReadRun) -> SnapshotFolder:
    """The folder in which a run's snapshots are read."""
    from tfdist.artifacts.snapshot_folder import SnapshotFolder

    return SnapshotFolder(str(run.folder / "checkpoints"))


def _choose(store: SnapshotFolder, step: int) -> Snapshot | None:
    """The snapshot of a step, or the newest one (-1); None if all that existed have been removed meanwhile. Raises
    CheckpointError."""
    from tfdist.artifacts.snapshot_folder import must_be_of

    if step >= 0:
        must_be_of(step, store.steps(), store.directory)
        return store.verify(step)
    snapshot, passed_over = store.newest_valid()
    there = store.steps()
    damaged = [reason for at, reason in zip(store.damaged, passed_over, strict=True) if at in there]
    for reason in damaged:
        print(f"skipped a snapshot: {reason}", file=sys.stderr)
    if snapshot is None and len(damaged) == len(passed_over):
        raise CheckpointError(f"{store.directory} has no valid snapshot: check --run_dir.")
    return snapshot


def evaluate_snapshot(job: Job, store: SnapshotFolder, snapshot: Snapshot) -> dict[str, float] | None:
    """The scores of a snapshot; None if the run has removed it meanwhile."""
    from tfdist.artifacts import state
    from tfdist.artifacts.read_snapshots import read_if_there

    found = read_if_there(store, snapshot)
    if found is None:
        return None
    # The arrays left out are for training only.
    arrays = {key: array for key, array in found.items() if not key.startswith("train/compression_")}
    state.assign(state.collect(job.model, job.optimizer, job.step.variables), arrays)
    return {**_scores(job), "step": snapshot.step}


def _evaluate_file(job: Job, path: str) -> dict[str, float]:
    from tfdist.artifacts.export import load_export
    from tfdist.training.model_data_checks import check_inputs

    model = load_export(path)
    if job.eval_split:
        check_inputs(f"--model_file={path}", model, job.eval_split.element_spec[0], job.eval_split.name)
    return _scores(job, model)


def show(values: dict[str, float], origin: str) -> None:
    """Prints the scores of a snapshot or a file."""
    print(f"evaluation of {origin}: " + json.dumps(values), flush=True)
