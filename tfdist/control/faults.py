"""Injects faults, for tests and scripts/chaos.py: kill, stop or break a worker at a chosen step.

TFDIST_FAULTS lists them as RANK:STEP:KIND, separated by commas, for example "1:30:kill,0:50:stuck". Each happens once
per run folder, at the first chance at or after its step: RUN_DIR/faults/ records it across restarts. With the value
"armed", files trigger the faults instead: RUN_DIR/faults/arm-RANK-KIND is removed and its fault happens at the next
chance, and every call begins with a sleep of as many seconds as the file "pace" in that folder says.

| kind          | what happens                                                                       |
|---------------|------------------------------------------------------------------------------------|
| kill          | SIGKILL to itself, between two steps                                               |
| kill_save     | SIGKILL while a snapshot (on a mesh: its part) is being written, before its rename |
| kill_restore  | SIGKILL while restoring (the step does not count)                                  |
| term          | SIGTERM to itself                                                                  |
| stop          | SIGSTOP to itself                                                                  |
| stuck         | sleeps forever in Python                                                           |
| error         | raises an exception                                                                |
| slow          | sleeps 0.1 s before every call from then on                                        |
| disk_full     | the next two attempts to write a snapshot fail                                     |
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from tfdist.control.exit_codes import ConfigError
from tfdist.control.terminal import say_at_once

VARIABLE = "TFDIST_FAULTS"
KINDS = ("kill", "kill_save", "kill_restore", "term", "stop", "stuck", "error", "slow", "disk_full")
_PLACE = {"kill_save": "save", "disk_full": "save", "kill_restore": "restore"}  # the others: "step"
_FAILED_WRITES = 2


class Faults:
    """The faults of one rank. If there are none, `at` costs nothing."""

    def __init__(self, planned: Mapping[tuple[int, str], str], folder: Path, armed_rank: int | None = None):
        self.planned, self.folder, self.armed_rank = (
            dict(planned),
            folder,
            armed_rank,
        )  # (step, kind) -> name of the file that records it
        self._slow = False
        self._writes_to_fail = 0

    @classmethod
    def parse(cls, text: str, rank: int, run_dir: Path) -> Faults:
        """Returns the faults of `rank` that have not happened yet. Raises ConfigError."""
        if text == "armed":
            return cls({}, run_dir / "faults", rank)
        planned = {}
        for entry in filter(None, text.split(",")):
            pieces = entry.strip().split(":")
            if len(pieces) != 3 or not pieces[0].isdecimal() or not pieces[1].isdecimal() or pieces[2] not in KINDS:
                raise ConfigError(
                    f"{VARIABLE} has {entry!r}: write RANK:STEP:KIND, with KIND one of {', '.join(KINDS)}."
                )
            name = "-".join(pieces)
            if int(pieces[0]) == rank and not (run_dir / "faults" / name).exists():
                planned[int(pieces[1]), pieces[2]] = name
        return cls(planned, run_dir / "faults")

    def at(self, place: str, step: int) -> None:
        """Triggers the faults that are due at a place: "step" (between calls), "save" (files written, not yet renamed)
        or "restore"."""
        if self._slow and place == "step":
            time.sleep(0.1)
        if self._writes_to_fail and place == "save":
            self._writes_to_fail -= 1
            raise OSError(errno.ENOSPC, "No space left on device (injected)")
        if self.armed_rank is not None:
            self._at_armed(place, step)
        for (due, kind), name in sorted(self.planned.items()):
            if _PLACE.get(kind, "step") == place and (step >= due or place == "restore"):
                del self.planned[due, kind]
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / name).touch()
                self._do(kind, step)

    def _at_armed(self, place: str, step: int) -> None:
        for kind in KINDS:
            if _PLACE.get(kind, "step") == place:
                try:
                    (self.folder / f"arm-{self.armed_rank}-{kind}").unlink()
                except FileNotFoundError:
                    continue
                self._do(kind, step)
        if place == "step":
            with contextlib.suppress(FileNotFoundError):  # the file may be removed at any moment
                time.sleep(float((self.folder / "pace").read_text()))

    def _do(self, kind: str, step: int) -> None:
        say_at_once(f"tfdist: injected fault: {kind} at step {step}.")
        if kind.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "stuck":
            while True:
                time.sleep(1)
        elif kind == "error":
            raise RuntimeError("an injected error")
        elif kind == "slow":
            self._slow = True
        elif kind == "disk_full":
            self._writes_to_fail = _FAILED_WRITES - 1
            raise OSError(errno.ENOSPC, "No space left on device (injected)")
