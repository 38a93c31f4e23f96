"""Follows a running job: evaluates each new snapshot until training is over. For `tfdist.evaluate --follow`, and for an
evaluator that is started as part of the job.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tfdist import flags
from tfdist.artifacts.read_snapshots import bring_for_reading
from tfdist.artifacts.run_folder import EVALUATOR_EVENTS, EVALUATOR_LOG, is_evaluators
from tfdist.config import Config
from tfdist.control import sections
from tfdist.control.exit_codes import CheckpointError, StartupError
from tfdist.control.own_files import written_whole
from tfdist.control.status_file import STATUS_FILE, parse_status
from tfdist.control.terminal import say
from tfdist.run import snapshot_evaluation as evaluation
from tfdist.run.health import section_limits
from tfdist.storage.reader_copy import ReadRun, copies_changed
from tfdist.storage.store_errors import as_sentence
from tfdist.telemetry.events import Event
from tfdist.telemetry.jsonl import JsonlObserver, next_attempt
from tfdist.telemetry.tensorboard import TensorBoardObserver

_ENDED = ("finished", "failed")  # in status.json
_POLL_SECONDS = 1.0
_SILENT_SECONDS = 5.0  # until it is said that a run is waited for


def follow(config: Config, argv: list[str] | None = None) -> int:
    """Evaluates every new snapshot of a running job; returns when the job is over and its last snapshot is done.

    argv: flags that complete those in the run's folder. None: `config` has all flags, as in an evaluator that is
    started together with the workers: then those in the folder may be of an earlier start.
    """
    run = evaluation.read_run(config)
    status = _Status(run, config.cluster.startup_timeout if argv is not None else _longest_start(config))
    status.await_start()
    run.bring()
    composed = _with_batch_of(run.folder, config) if argv is None else flags_now(config, argv, run)
    job, store, done, told = evaluation.compose(composed), evaluation.snapshots_of(run), -1, set[str]()
    observers = _observers(config, run.folder, status.run_id)
    while True:
        status.look()  # before searching: later snapshots are found next time
        over = status.is_over(all_done=done >= (job.config.run.steps or 0))
        bring_for_reading(run.objects, store, told=told, after=done)
        # Only a newer one is worth being verified, for which it is read as a whole.
        snapshot = store.newest_valid()[0] if max(store.steps(), default=-1) > done else None
        if snapshot and snapshot.step > done:
            # The flags after the snapshot: the run had written them before it.
            if argv is not None and (now := flags_now(config, argv, run)) != composed:
                composed, job = now, evaluation.compose(now, job.runtime)
            values = evaluation.evaluate_snapshot(job, store, snapshot)
            if values is None:  # there is a newer one
                continue
            done = snapshot.step
            evaluation.show(values, snapshot.path)
            for observer in observers:
                observer(Event("eval", done, {f"eval/{name}": value for name, value in values.items()}))
            run.send_back(is_evaluators)
        elif over:
            break
        else:
            status.say_awaited()
            time.sleep(_POLL_SECONDS)
    status.say_end()
    if done < 0:
        say(f"{store.directory} has no valid snapshot: nothing was evaluated.")
    for observer in observers:
        observer.close()
    run.send_back(is_evaluators)
    return 0


class _Status:
    """What status.json says of the run, and whether that means that it is over.

    patience: seconds for it to appear; and for a run that has ended to start again.
    """

    def __init__(self, run: ReadRun, patience: float):
        self._run, self._patience = run, patience
        self.run_id, self._status, self._was_running, self._has_warned = "", "", False, False
        self._begun = time.monotonic()

    def await_start(self) -> None:
        """Waits until there is a run, with its flags. Raises StartupError."""
        has_said, place = False, self._run.place
        while missing := self._missing():
            waited = time.monotonic() - self._begun
            if not has_said and waited > _SILENT_SECONDS:
                has_said = True
                say(f"Waiting {self._patience:g} s for a run in --run_dir={place}.")
            if waited > self._patience:
                raise StartupError(
                    f"No run appeared in --run_dir={place} within {self._patience:g} s (there is no {missing}): start"
                    " the workers, or raise --startup_timeout."
                )
            time.sleep(_POLL_SECONDS)
        self._begun = time.monotonic()

    def _missing(self) -> str:
        """The file without which there is no run yet; "" if there is one."""
        if not self.look():
            return STATUS_FILE
        # In a folder they are older than the status, or will never come.
        return flags.FLAGS_FILE if self._run.objects and not self._run.text(flags.FLAGS_FILE) else ""

    def look(self) -> dict[str, Any]:
        """Reads the status. Raises CheckpointError if it is now that of another run."""
        found = parse_status(self._run.text(STATUS_FILE))
        if (other := found.get("run_id", "")) and self.run_id and other != self.run_id:
            raise CheckpointError(f"--run_dir={self._run.place} now contains another run: start again to follow it.")
        self.run_id, self._status = self.run_id or other, found.get("status", "")
        self._was_running |= self._status == "running"
        return found

    def is_over(self, all_done: bool) -> bool:
        """Whether the run has ended and is not expected to continue. all_done: its last step has been evaluated.

        The status of a run that will be resumed is "finished" or "failed" until it has started again.
        """
        waited = time.monotonic() - self._begun > self._patience
        return self._status in _ENDED and (self._was_running or all_done or waited)

    def say_awaited(self) -> None:
        """Says once if a run that has ended is waited for."""
        if self._status in _ENDED and not (self._was_running or self._has_warned):
            self._has_warned = True
            say(f"The run has {self._status}: waiting {self._patience:g} s in case it continues.")

    def say_end(self) -> None:
        """Says how the run has ended, unless it has finished."""
        if self._status == "failed":
            say(f"The run has ended with an error, which is in the logs of {self._run.place}.")


def _longest_start(config: Config) -> float:
    """Seconds that the workers of a job may need to start."""
    return section_limits(config.cluster)[sections.START_UP]


def _with_batch_of(folder: Path, config: Config) -> Config:
    """`config` with the global batch of the run in `folder`, if it has none: in the evaluator's one process, --epochs
    would mean other steps."""
    stored = folder / flags.FLAGS_FILE
    if config.batch.global_batch or not stored.exists():
        return config
    return config.replace(global_batch=flags.parse([f"--flagfile={stored}"]).config.batch.global_batch)


def flags_now(config: Config, argv: list[str], run: ReadRun) -> Config:
    """The flags that the run has now, completed by those of `argv`."""
    if run.objects and (text := run.text(flags.FLAGS_FILE)):
        with as_sentence(), copies_changed(run.folder), written_whole(run.folder / flags.FLAGS_FILE) as file:
            file.write(text)
    return evaluation.run_configuration(config, argv, run.folder)


def _observers(config: Config, folder: Path, run_id: str) -> list[JsonlObserver | TensorBoardObserver]:
    """What records the evaluations."""
    log = folder / EVALUATOR_LOG
    observers: list[JsonlObserver | TensorBoardObserver] = [
        JsonlObserver(log, run_id=run_id, attempt=next_attempt(log), rank=-1)
    ]
    if "tensorboard" in config.telemetry.trackers.split(","):
        observers.append(TensorBoardObserver(folder / EVALUATOR_EVENTS, 0, forgets=False))
    return observers
