"""Writes snapshots in parallel to training: the caller only waits for the copy to host memory, a thread does the rest.

A failed write (disk full, read-only, folder gone) never stops training and never deletes anything: it is counted and
reported every time, and the next save tries again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.artifacts.manifest import MANIFEST, parse
from tfdist.artifacts.policy import Retention
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.control.user_errors import first_line


@dataclass
class WriterStats:
    """Counts and seconds since the start."""

    saves: int = 0
    failures: int = 0
    bytes: int = 0
    wait_s: float = 0.0  # training waited because the previous write was not done


class SnapshotWriter:
    """`save` hands arrays over; `messages` reports the results. Only the chief has a writer, unless all workers write
    parts.

    retention: None if another worker deletes old snapshots. attempts: number of attempts to write a snapshot.
    """

    def __init__(
        self,
        store: SnapshotFolder,
        retention: Retention | None,
        *,
        asynchronous: bool = True,
        attempts: int = 2,
        retry_after: float = 1.0,
    ):
        self.store, self.retention, self.asynchronous, self.attempts, self.retry_after = (
            store,
            retention,
            asynchronous,
            attempts,
            retry_after,
        )
        self.stats = WriterStats()
        self.last_failure = ""
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._messages: queue.SimpleQueue[tuple[str, dict]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._done_with: Mapping[str, np.ndarray] | None = None

    def save(self, step: int, arrays: Any, fields: Mapping[str, Any]) -> None:
        """Starts writing a snapshot, after the previous one is done.

        arrays: what the store takes; they must not change before `recycled` returns them.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(step, arrays, fields), name="tfdist-snapshot", daemon=False
        )
        self._thread.start()
        if not self.asynchronous:
            self.wait()

    def recycled(self) -> Mapping[str, np.ndarray] | None:
        """Returns the arrays of a finished write, once: their memory may be reused."""
        arrays, self._done_with = self._done_with, None
        return arrays

    def wait(self, seconds: float | None = None) -> None:
        """Returns when nothing is being written, or after `seconds`; the time counts as `wait_s`."""
        if self._thread:
            start = time.monotonic()
            self._thread.join(seconds)
            self._thread = self._thread if self._thread.is_alive() else None
            self.stats.wait_s += time.monotonic() - start

    def messages(self) -> list[tuple[str, dict]]:
        """The messages since the last call: ("save", values) or ("warning", {"message": ...})."""
        found = []
        while not self._messages.empty():
            found.append(self._messages.get())
        return found

    def _write(self, step: int, arrays: Any, fields: Mapping[str, Any]) -> None:
        start = time.monotonic()
        size = self._try(step, arrays, fields)
        self._done_with = arrays if isinstance(arrays, Mapping) else None
        if size is None:
            self.stats.failures += 1
            self._messages.put(
                (
                    "warning",
                    {
                        "message": (
                            f"SNAPSHOT NOT WRITTEN (failure number {self.stats.failures}), {self.last_failure}."
                            f" Training continues; the next save tries again. Free or repair {self.store.directory}."
                        ),
                        "failures": self.stats.failures,
                    },
                )
            )
            return
        self.last_failure = ""
        self.stats.saves += 1
        self.stats.bytes += size
        self._metrics[step] = fields.get("metrics", {})
        self._messages.put(
            (
                "save",
                {
                    "message": f"snapshot {self.store.path(step)}",
                    "save/bytes": size,
                    "save/write_s": time.monotonic() - start,
                    "save/step": step,
                },
            )
        )
        if self.store.not_pointed:
            message = (
                f"{self.store.directory}/checkpoint, with which TensorFlow finds the newest snapshot, names an older"
                f" one ({self.store.not_pointed}); the next save writes it again."
            )
            self._messages.put(("warning", {"message": message}))
        if self.retention:
            self._retain(self.retention)

    def _try(self, step: int, arrays: Any, fields: Mapping[str, Any]) -> int | None:
        """Returns the bytes written; None: `last_failure` says why not."""
        for attempt in range(1, self.attempts + 1):
            try:
                return self.store.write(step, arrays, fields)
            except Exception as error:  # noqa: BLE001 - any error must be reported, and must not end this thread
                self.last_failure = f"step {step}: {type(error).__name__}: {first_line(error)}"
                if attempt < self.attempts:
                    time.sleep(self.retry_after)
        return None

    def _retain(self, retention: Retention) -> None:
        """Deletes snapshots that need not be kept; only ever after a newer snapshot has been committed."""
        try:
            steps = self.store.steps()
            self._learn_metrics(steps)
            for doomed in retention.to_delete(steps, self._metrics):
                self.store.delete(doomed)
        except (OSError, tf.errors.OpError) as error:
            self._messages.put(("warning", {"message": f"An old snapshot could not be deleted: {error}"}))

    def delete_after(self, step: int) -> None:
        """Deletes the snapshots after `step`, to which the run has gone back: they must not displace later ones, and
        nobody must resume from them. Those that are kept forever are renamed. Raises OSError."""
        steps = self.store.steps()
        self._learn_metrics(steps)
        kept = self.retention.kept_for_ever(steps, self._metrics) if self.retention else set()
        for doomed in steps:
            if doomed > step and doomed in kept:
                self.store.set_aside(doomed, "kept")
            elif doomed > step:
                self.store.delete(doomed)

    def _learn_metrics(self, steps: Iterable[int]) -> None:
        for known in steps:
            if known not in self._metrics:
                self._metrics[known] = self._stored_metrics(known)

    def _stored_metrics(self, step: int) -> Mapping[str, float]:
        try:
            with tf.io.gfile.GFile(f"{self.store.path(step)}/{MANIFEST}") as file:
                return parse(file.read(), MANIFEST, step).get("metrics") or {}
        except (tf.errors.OpError, ValueError):  # CheckpointError is a ValueError
            return {}
