"""Measures at the start of a run (--jit_tune) whether XLA, and BatchNormalization as one operation, make steps faster:
each speeds up some models and slows down others.

The measured steps belong to jobs that are discarded afterwards. They are complete steps, with reduction and update, on
the run's own data. The result is kept in RUN_DIR/xla.json, so a resumed run computes as before.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import build
from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.models.fused_batch_norm import is_fused
from tfdist.planner.memory_check import MemoryLimits
from tfdist.runtime.base import Runtime
from tfdist.telemetry.summary import write_summary

FILE = "xla.json"
_WINDOWS, _WINDOW_S, _MOST_STEPS = 3, 0.5, 50
_PAYS = 0.95  # as a fraction of the time without: less gain is noise, and compiling takes time


class Timed(NamedTuple):
    """The measured time of steps computed in one way."""

    seconds: float  # per step, by the chief's clock
    fused: bool  # whether some BatchNormalization of the model was one operation


def tuned(config: Config, runtime: Runtime, run_dir: Path, limits: MemoryLimits | None = None) -> tuple[Config, str]:
    """Returns the configuration with the faster choices, and a sentence about them. Every worker must call it.

    limits: as for `compose`.
    """
    config = config.replace(jit_tune=False)
    found = runtime.broadcast_object(_read(run_dir / FILE) if runtime.rank == 0 else None)
    if found is None:
        found = _measure(config, runtime, limits)
        if runtime.rank == 0:
            write_summary(run_dir / FILE, found)
    chosen = {"jit_compile": found["jit_compile"], "fused_batchnorm": found["fused_batchnorm"]}
    return config.replace(**chosen), found["message"]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            "jit_compile": bool(found["jit_compile"]),
            "fused_batchnorm": bool(found.get("fused_batchnorm", True)),
            "message": str(found["message"]),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _Way(NamedTuple):
    """One way to compute a step."""

    jit: bool
    fused: bool


def _measure(config: Config, runtime: Runtime, limits: MemoryLimits | None) -> dict[str, Any]:
    given = _Way(jit=False, fused=config.model.fused_batchnorm)
    first = _timed(_with(config, given), runtime, limits)
    seconds, refused = {given: first.seconds}, ""
    for way in _others(given, first.fused):
        if refused and way.jit:
            continue
        try:
            seconds[way] = _timed(_with(config, way), runtime, limits).seconds
        except ConfigError as error:
            refused = f"XLA is not used: {error}"
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):  # the same on all workers
            refused = "XLA is not used: it cannot compile this model"
    best = min(seconds, key=seconds.__getitem__)
    if seconds[best] >= _PAYS * first.seconds:
        best = given
    message = refused or _compared("XLA makes", given, _Way(True, given.fused), seconds, best.jit)
    if first.fused:
        message += "; " + _compared(
            "BatchNormalization as several operations makes",
            _Way(best.jit, True),
            _Way(best.jit, False),
            seconds,
            not best.fused,
        )
    return {"jit_compile": best.jit, "fused_batchnorm": best.fused, "message": message}


def _others(given: _Way, fuses: bool) -> list[_Way]:
    """The ways besides the given one that can differ from it."""
    composed = [_Way(jit=False, fused=False), _Way(jit=True, fused=False)] if fuses else []
    return [given._replace(jit=True), *composed]


def _with(config: Config, way: _Way) -> Config:
    return config.replace(jit_compile=way.jit, fused_batchnorm=way.fused)


def _compared(what: str, without: _Way, changed: _Way, seconds: dict[_Way, float], used: bool) -> str:
    return (
        f"{what} a step take {seconds[changed] * 1e3:.4g} ms instead of {seconds[without] * 1e3:.4g} ms:"
        f" {'' if used else 'not '}used"
    )


def _timed(config: Config, runtime: Runtime, limits: MemoryLimits | None) -> Timed:
    try:
        job = build.compose(config, runtime, limits)
        iterators = job.iterators(0)
        job.step(iterators, 1)  # traces and compiles
        begun = time.monotonic()
        job.step(iterators, 1)
        steps = runtime.broadcast_object(min(_MOST_STEPS, max(1, int(_WINDOW_S / max(time.monotonic() - begun, 1e-6)))))
        windows = []
        for _ in range(_WINDOWS):
            begun = time.monotonic()
            job.step(iterators, steps)
            windows.append((time.monotonic() - begun) / steps)
        return Timed(runtime.broadcast_object(min(windows)), is_fused(job.model))
    finally:
        job = iterators = None
        keras.backend.clear_session()  # the next job's variables must get the same names as without tuning
        gc.collect()
