"""Whether XLA pays, measured at the start of a run (--jit_tune): it makes some models faster and others slower.

Steps are made with and without --jit_compile by jobs that are thrown away: whole ones, with their reduction and update,
on the run's own data. What was found is in RUN_DIR/xla.json: a run that is resumed computes as it did before.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist import build
from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.planner.memory_check import MemoryLimits
from tfdist.run.agreement import broadcast_json
from tfdist.runtime.base import Runtime
from tfdist.telemetry.summary import write_summary

FILE = "xla.json"
_WINDOWS, _WINDOW_S, _MOST_STEPS = 3, 0.5, 50
_PAYS = 0.95  # of the time without: less is noise, and compiling takes time


def tuned(config: Config, runtime: Runtime, run_dir: Path, limits: MemoryLimits | None = None) -> tuple[Config, str]:
    """(the configuration with the faster --jit_compile, a sentence about it). Every worker must call it.

    limits: as for `compose`.
    """
    config = config.replace(jit_tune=False)
    found = broadcast_json(runtime, _read(run_dir / FILE) if runtime.rank == 0 else None)
    if found is None:
        found = _measure(config, runtime, limits)
        if runtime.rank == 0:
            write_summary(run_dir / FILE, found)
    return config.replace(jit_compile=found["jit_compile"]), found["message"]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"jit_compile": bool(found["jit_compile"]), "message": str(found["message"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _measure(config: Config, runtime: Runtime, limits: MemoryLimits | None) -> dict[str, Any]:
    without = _seconds(config.replace(jit_compile=False), runtime, limits)
    try:
        compiled = _seconds(config.replace(jit_compile=True), runtime, limits)
    except ConfigError as error:
        return {"jit_compile": False, "message": f"XLA is not used: {error}"}
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):  # on all workers alike, when it is compiled
        return {"jit_compile": False, "message": "XLA is not used: it cannot compile this model"}
    pays = compiled < _PAYS * without
    return {
        "jit_compile": pays,
        "message": (
            f"XLA makes a step take {compiled * 1e3:.4g} ms in place of {without * 1e3:.4g} ms:"
            f" {'' if pays else 'not '}used"
        ),
    }


def _seconds(config: Config, runtime: Runtime, limits: MemoryLimits | None) -> float:
    """Of a step, by the chief's clock."""
    try:
        job = build.compose(config, runtime, limits)
        iterators = job.iterators(0)
        job.step(iterators, 1)  # traces and compiles
        begun = time.monotonic()
        job.step(iterators, 1)
        steps = broadcast_json(runtime, min(_MOST_STEPS, max(1, int(_WINDOW_S / max(time.monotonic() - begun, 1e-6)))))
        windows = []
        for _ in range(_WINDOWS):
            begun = time.monotonic()
            job.step(iterators, steps)
            windows.append((time.monotonic() - begun) / steps)
        return broadcast_json(runtime, min(windows))
    finally:
        job = iterators = None
        keras.backend.clear_session()  # variables of the job to come must have the names that they have without
        gc.collect()
