"""Implements `python -m tfdist.evaluate`: evaluates a snapshot or an export of a run, or follows a running job."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist import flags
from tfdist.artifacts.run_folder import EVALUATOR_EVENTS, EVALUATOR_LOG, is_evaluators
from tfdist.config import Config, option
from tfdist.config.training_options import ScheduleConfig
from tfdist.control import versions
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import CheckpointError, ConfigError, StartupError
from tfdist.control.run_address import is_url
from tfdist.control.status_file import STATUS_FILE, parse_status
from tfdist.control.terminal import say
from tfdist.storage.reader_copy import ReadRun

if TYPE_CHECKING:
    import keras

    from tfdist.artifacts.snapshot_folder import Snapshot, SnapshotFolder
    from tfdist.build import Job

_POLL_SECONDS = 1.0
_SILENT_SECONDS = 5.0  # until it is said that a run is waited for
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
        return follow(given.config, argv)
    run = _run(given.config)
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
        _show(_evaluate_file(_compose(config), options.model_file), options.model_file)
        return
    from tfdist.artifacts.read_snapshots import bring_for_reading

    store, step, job = _store(run), options.at_step, None
    for _ in range(_CHOICES if step < 0 else 1):
        bring_for_reading(run.objects, store, step)
        snapshot = _choose(store, step)  # before the slow part
        job = job or _compose(config)
        # The run may still be active, and remove snapshots that it does not keep.
        if snapshot and (values := _evaluate_snapshot(job, store, snapshot)):
            _show(values, store.directory)
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
        config = config.replace(**{name: own[name] for name in _OF_TRAINING})
    elif not (config.run.steps or config.run.epochs):
        config = config.replace(steps=1)  # nothing is trained
    return config.validate()


def follow(config: Config, argv: list[str] | None = None) -> int:
    """Evaluates every new snapshot of a running job; returns when the job is over and its last snapshot is done."""
    from tfdist.artifacts.read_snapshots import bring_for_reading
    from tfdist.telemetry.events import Event
    from tfdist.telemetry.jsonl import JsonlObserver, next_attempt
    from tfdist.telemetry.tensorboard import TensorBoardObserver

    run = _run(config)
    _await_start(run, config.cluster.startup_timeout)
    folder = run.bring()
    job = _compose(run_configuration(config, argv or [], folder))
    store, done, target = _store(run), -1, job.config.run.steps
    was_running, has_warned, begun, told = False, False, time.monotonic(), set[str]()
    log, run_id = folder / EVALUATOR_LOG, _status(run).get("run_id", "")
    observers: list[JsonlObserver | TensorBoardObserver] = [
        JsonlObserver(log, run_id=run_id, attempt=next_attempt(log), rank=-1)
    ]
    if "tensorboard" in config.telemetry.trackers.split(","):
        observers.append(TensorBoardObserver(folder / EVALUATOR_EVENTS, 0, forgets=False))
    while True:
        # Read the status before searching: later snapshots are found next time.
        found = _status(run)
        if (other := found.get("run_id", "")) and run_id and other != run_id:
            raise CheckpointError(f"--run_dir={run.place} now contains another run: start again to follow it.")
        status = found.get("status")
        was_running |= status == "running"
        # The status of a run that will be resumed is "finished" or "failed" until it has started again.
        waited = time.monotonic() - begun > config.cluster.startup_timeout
        has_ended = status in ("finished", "failed")
        over = has_ended and (was_running or done >= (target or 0) or waited)
        bring_for_reading(run.objects, store, told=told)
        snapshot, _ = store.newest_valid()
        if snapshot and snapshot.step > done:
            values = _evaluate_snapshot(job, store, snapshot)
            if values is None:  # there is a newer one
                continue
            done = snapshot.step
            _show(values, snapshot.path)
            for observer in observers:
                observer(Event("eval", done, {f"eval/{name}": value for name, value in values.items()}))
            run.send_back(is_evaluators)
        elif over:
            break
        else:
            if has_ended and not (was_running or has_warned):
                has_warned = True
                say(f"The run has {status}: waiting {config.cluster.startup_timeout:g} s in case it continues.")
            time.sleep(_POLL_SECONDS)
    if status == "failed":
        say(f"The run has ended with an error, which is in the logs of {run.place}.")
    if done < 0:
        say(f"{store.directory} has no valid snapshot: nothing was evaluated.")
    for observer in observers:
        observer.close()
    run.send_back(is_evaluators)
    return 0


def _run(config: Config) -> ReadRun:
    return ReadRun(config.with_absolute_folders().run.run_dir, config.run.cache_dir)


def _status(run: ReadRun) -> dict[str, Any]:
    """The run's current status.json."""
    return parse_status(run.text(STATUS_FILE))


def _await_start(run: ReadRun, timeout: float) -> None:
    deadline, has_said = time.monotonic() + timeout, False
    while not _status(run):
        if not has_said and time.monotonic() > deadline - timeout + _SILENT_SECONDS:
            has_said = True
            say(f"Waiting {timeout:g} s for a run in --run_dir={run.place}.")
        if time.monotonic() > deadline:
            raise StartupError(
                f"No run appeared in --run_dir={run.place} within {timeout:g} s: start the workers, or raise"
                " --startup_timeout."
            )
        time.sleep(_POLL_SECONDS)


def _compose(config: Config) -> Job:
    from tfdist import build

    alone = config.in_one_process()
    job = build.compose(alone, build.start_runtime(alone, Cluster()))
    if job.eval_split is None:
        raise ConfigError(f"--source={config.data.source} has no evaluation split: use one that has.")
    return job


def _scores(job: Job, model: keras.Model | None = None) -> dict[str, float]:
    """The scores of the job's model, or of another one."""
    evaluator = job.evaluator(model)
    assert evaluator  # there is an evaluation split
    return evaluator()


def _store(run: ReadRun) -> SnapshotFolder:
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


def _evaluate_snapshot(job: Job, store: SnapshotFolder, snapshot: Snapshot) -> dict[str, float] | None:
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


def _show(values: dict[str, float], origin: str) -> None:
    print(f"evaluation of {origin}: " + json.dumps(values), flush=True)
