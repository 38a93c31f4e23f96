"""Makes the `Rates` of telemetry/rates.py, from the configuration, the model and the devices."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import keras
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.data.sources.split import Split
from tfdist.planner.formulas import shape_of
from tfdist.planner.hardware import DEVICES
from tfdist.planner.shapes import Sample
from tfdist.runtime.base import Runtime
from tfdist.runtime.host import own_devices
from tfdist.telemetry.rates import Rates, host_memory
from tfdist.telemetry.run_log import RunLog
from tfdist.training.model_cost import forward_flops, tokens_of


def make_rates(config: Config, runtime: Runtime, model: keras.Model, split: Split, rows: int) -> Rates:
    """Makes the Rates of a run. rows: rows of one forward pass.

    Raises ConfigError if --scaling_baseline is neither a number nor the folder of a finished run of one worker."""
    x = split.element_spec[0]
    return Rates(
        forward_flops=_formula(config, split) or (forward_flops(model, x, rows) if runtime.holds_whole_model else 0.0),
        tokens=tokens_of(x),
        peak_flops=peak_flops(config) * runtime.size * runtime.local_replicas,
        baseline=baseline(config.telemetry.scaling_baseline),
        workers=runtime.size,
        samples=split.size or 0,
    )


def _formula(config: Config, split: Split) -> float:
    """Returns the operations of one sample's forward pass by the planner's formula; 0 if there is no formula."""
    x = split.element_spec[0]
    if not isinstance(x, tf.TensorSpec) or not x.shape.is_fully_defined():
        return 0.0
    try:
        shape = shape_of(
            config, Sample(tuple(size or 0 for size in x.shape), split.num_classes or 1)
        )  # a split without a number of classes has it in --model_args
    except ConfigError:
        return 0.0
    return shape.flops if shape else 0.0


def peak_flops(config: Config) -> float:
    """Returns the peak operations per second of one device in the compute type: from --peak_tflops, or from the
    planner's table by the name of the GPU; 0 if neither has it."""
    if config.telemetry.peak_tflops:
        return config.telemetry.peak_tflops * 1e12
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return 0.0
    name = str(
        tf.config.experimental.get_device_details(gpus[0]).get("device_name", "")
    )  # "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB"
    words = name.lower().replace("-", " ").split()
    found = next((device for device in DEVICES.values() if device.name in words), None)
    return found.tflops(config.precision.precision) * 1e12 if found else 0.0


def baseline(text: str) -> float:
    """Returns --scaling_baseline as samples per second; 0 for none. Raises ConfigError."""
    if not text:
        return 0.0
    with contextlib.suppress(ValueError):
        speed = float(text)
        if 0 < speed < math.inf:
            return speed
    try:
        summary = json.loads((Path(text) / "summary.json").read_text(encoding="utf-8"))
        log, workers = RunLog(Path(text), ""), summary["workers"]
        # The summary's own rate includes tracing and compiling, and all attempts.
        mean = float(summary["samples_per_s"]) if set(log.workers.values()) <= {1} else 0.0
        speed = log.steady_rate(workers=1) or mean
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"--scaling_baseline={text} is neither a number nor the folder of a finished run: give samples per second"
            " of one worker, above 0, or the --run_dir of a run of one worker."
        ) from None
    if workers != 1:
        raise ConfigError(
            f"--scaling_baseline={text} was trained by {workers} workers: give a run of one worker, which the"
            " efficiency is measured against."
        )
    if not speed:
        raise ConfigError(
            f"--scaling_baseline={text} has fewer than two log lines of an attempt by one worker: give a run that one"
            " worker has trained for longer."
        )
    return speed


def memory() -> dict[str, float]:
    """Returns the bytes in use, now and at their peak so far: of the host and, if there are GPUs, of this worker's
    fullest one."""
    found = host_memory()
    devices = [tf.config.experimental.get_memory_info(name.removeprefix("/device:")) for name in own_devices("GPU")]
    if devices:
        found |= {
            "memory/device_bytes": float(max(each["current"] for each in devices)),
            "memory/device_peak_bytes": float(max(each["peak"] for each in devices)),
        }
    return found
