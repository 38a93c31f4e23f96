"""Refuses versions of Python, TensorFlow and Keras with which tfdist has not been tested, before the import. Also
prepares the import of TensorFlow and Keras.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import metadata

from tfdist.control.exit_codes import UnsupportedError

PYTHON = ((3, 11), (3, 13))
# distribution names -> the release series that works. Keras internals are overridden in training/optimizer.py.
SERIES = {("tensorflow", "tensorflow-cpu", "tensorflow-intel"): "2.21", ("keras",): "3.15"}


def check(python: tuple[int, int] = sys.version_info[:2], installed=metadata.version) -> None:
    """Raises UnsupportedError with a sentence if a version is not supported. `installed`: name -> version."""
    if not PYTHON[0] <= python <= PYTHON[1]:
        raise UnsupportedError(f"Python {python[0]}.{python[1]} is not supported: use Python 3.11, 3.12 or 3.13.")
    for names, series in SERIES.items():
        found = _first_version(names, installed)
        if found is None:
            raise UnsupportedError(f"{names[0]} is not installed: pip install '{names[0]}~={series}.0'.")
        if not (found == series or found.startswith(series + ".")):
            raise UnsupportedError(
                f"{names[0]} {found} is not supported, its internals may differ: pip install '{names[0]}~={series}.0'."
            )


def _first_version(names: tuple[str, ...], installed) -> str | None:
    for name in names:
        try:
            return installed(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def quiet() -> None:
    """Keeps TensorFlow's start-up notices off the terminal; does not change variables that are already set.

    Must be called before TensorFlow is imported.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # the default; setting it avoids the notice about it


def prefer_cublas() -> None:
    """Makes XLA use cuBLAS for matrix products on GPUs, and not try kernels of its own, unless XLA_FLAGS says
    otherwise. GPT-2 on an H200 trained 9 % faster, and began after 29 seconds instead of 89, most spent on trying.

    Must be called before TensorFlow is imported.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    names_a_file = flags and not flags.startswith("--")
    if not names_a_file and "xla_gpu_enable_triton_gemm" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_triton_gemm=false".strip()


def import_keras() -> None:
    """Imports Keras without scikit-learn and Matplotlib, which it would load, if installed, for its wrappers and
    galleries: a quarter of a worker's start-up time. `keras.visualization` then cannot draw.

    Garbage collection is off during the import, and permanently skips the imported objects: it would traverse them
    again and again while the first step is traced (a seventh of the processor time until then)."""
    if "keras" in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()
    hidden = [name for name in ("sklearn", "matplotlib") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # makes the import statement fail
    try:
        import keras  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        if collects:
            gc.enable()
