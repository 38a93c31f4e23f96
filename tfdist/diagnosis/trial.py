"""python -m tfdist.diagnosis.trial: a matrix product and a convolution in each precision, with and without XLA.

It runs in a separate process (trials.py), since a driver may crash or hang in it. It prints a line of JSON for each
result: {"build": ...}, then {"name": ..., "seconds": ...} or {"name": ..., "error": ...}, and with GPUs finally
{"cudnn": ...}, the version that was loaded for the convolutions.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.control.user_errors import first_line

_WIDTH = 256
# Products of `_WIDTH` numbers near 1 differ by rounding; a wrong kernel differs by much more. Relative to the largest
# number of the result. float32: GPUs may round to TensorFloat-32.
_TOLERANCE = {"float32": 1e-2, "bfloat16": 5e-2, "float16": 1e-2}


def main() -> None:
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    tell({"build": {**_build(), "devices": len(gpus)}})
    for index in range(max(len(gpus), 1)):
        device = f"GPU:{index}" if gpus else "CPU:0"
        for precision in _TOLERANCE:
            for jit in (False, True):
                for operation in ("matrix product", "convolution"):
                    name = f"{operation}, {precision}{', XLA' if jit else ''}, on {device}"
                    try:
                        tell({"name": name, "seconds": _tried(operation, precision, jit, device)})
                    except Exception as error:  # noqa: BLE001 - the trial is there to find what TensorFlow raises
                        tell({"name": name, "error": f"{type(error).__name__}: {first_line(error)}"[:300]})
    if cudnn := _loaded_cudnn():
        tell({"cudnn": cudnn})


def tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def _build() -> dict[str, Any]:
    info = tf.sysconfig.get_build_info()
    return {
        "cuda": info.get("cuda_version", "") if info.get("is_cuda_build") else "",
        "capabilities": list(info.get("cuda_compute_capabilities", ())),
    }


def _loaded_cudnn() -> str:
    """Returns the version of the library that this process has loaded, wherever it came from; "" if none is loaded."""
    with contextlib.suppress(OSError, AttributeError):
        if found := re.search(r"/\S*/libcudnn\.so\S*", Path("/proc/self/maps").read_text()):
            return cudnn_version(ctypes.CDLL(found[0]).cudnnGetVersion())
    return ""


def cudnn_version(number: int) -> str:
    """Converts a number from cudnnGetVersion into a version: 91002 is 9.10.2, 8905 is 8.9.5."""
    thousands = 10_000 if number >= 90_000 else 1_000
    return f"{number // thousands}.{number % thousands // 100}.{number % 100}"


def _tried(operation: str, precision: str, jit: bool, device: str) -> float:
    """Returns the seconds of the second call. Raises ArithmeticError for a wrong result."""
    rng = np.random.default_rng(0)
    if operation == "convolution":
        arrays = [rng.uniform(size=(4, 16, 16, 32)), rng.uniform(size=(3, 3, 32, 32))]

        def compute(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
            return tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME"))  # fused, as in a model
    else:
        arrays = [rng.uniform(size=(_WIDTH, _WIDTH)) for _ in range(2)]

        def compute(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
            return x @ w

    with tf.device("CPU:0"):
        expected = compute(*(tf.constant(array, tf.float64) for array in arrays)).numpy()
    with tf.device(device):
        step = tf.function(compute, jit_compile=jit, autograph=False)
        inputs = [tf.constant(array, precision) for array in arrays]
        step(*inputs)
        begun = time.perf_counter()
        result = tf.cast(step(*inputs), tf.float64).numpy()
        seconds = time.perf_counter() - begun
    off = float(np.max(np.abs(result - expected)) / np.max(np.abs(expected)))
    if not off < _TOLERANCE[precision]:
        raise ArithmeticError(f"the result is off by {off:.1e} of the largest number")
    return seconds


if __name__ == "__main__":
    main()
