"""Tests on the CPU what a job has only on a GPU: the way tfdist composes it there, and cuDNN's attention.

A case with "gpu" on one device is composed as on a GPU (XLA by default, the update compiled, batches copied). On other
runtimes it has the attention alone; tests/gpu/cudnn_kernel.py substitutes the kernel. The oracle is the same as without
"gpu".
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.fuzz import resume_space

HALVES = ("bfloat16", "float16")
ATTENTION = {"attention", "attention_causal"}
RUNTIMES = ("one_device", "mirrored", "sockets", "multi_worker", "fit", "fit_ring")

REAL = "TFDIST_FUZZ_GPU"  # an environment variable: the workers have a GPU
# One GPU for all processes, and products in full float32, because the oracle computes on the CPU.
ON_GPU = {
    REAL: "1",
    "CUDA_VISIBLE_DEVICES": "0",
    "NVIDIA_TF32_OVERRIDE": "0",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}

Case = Mapping[str, Any]


def is_real() -> bool:
    """Whether the workers have a GPU, so that nothing has to be substituted."""
    return REAL in os.environ


def left_out(case: Case, blocks: Sequence[str]) -> str:
    """Why a case is not run on a GPU; "" if it is."""
    if "lstm" in blocks:
        return "slow to compile"
    if {"stored", "data_in_store"} & set(case):
        return "needs a server of S3, and nothing of it is computed on a GPU"
    if {"resumed", *resume_space.KEYS} & set(case) or {"backup", "plain_backup"} & set(case.get("fit", {})):
        return "no two runs on a GPU are the same bit for bit without --deterministic"
    return ""


def prepare() -> None:
    """Prepares a worker with a GPU before TensorFlow starts: as `tfdist.train`, but with products in full float32."""
    from tfdist.control import versions

    versions.prefer_cublas()
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)


def drawn(case: Case, blocks: Sequence[str], chance: random.Random) -> dict[str, Any]:
    """Returns the case, sometimes with "gpu": if it has attention (then in half precision), or runs on one device."""
    attends = bool(ATTENTION & set(blocks))
    if chance.random() >= (0.3 if attends else 0.05) or not (attends or case["runtime"] == "one_device"):
        return dict(case)
    found = {**case, "gpu": True}
    if attends:
        part = "compile" if case["kind"] == "fit" else "options"
        found[part] = dict(sorted({**case[part], "precision": chance.choice(HALVES), "jit_compile": True}.items()))
    return found


def conflicts(case: Case, blocks: Sequence[str]) -> str:
    """Why a case cannot have "gpu"; "" if it can."""
    kind = case["runtime"].partition(":")[0]
    options = case.get("options") or case["compile"]
    if (
        kind not in RUNTIMES
        or {"moved", "stored", "data_in_store"} & set(case)
        or case.get("loop", "on_batch") != "on_batch"
    ):
        return "not there"
    if kind == "one_device":
        return "slow to compile" if "lstm" in blocks or "nan" in case["data"] else ""
    is_compiled = options.get("jit_compile") and not options.get("run_eagerly")
    if not (ATTENTION & set(blocks) and options.get("precision") in HALVES and is_compiled):
        return "no attention that a GPU has another form of"
    return ""


@contextlib.contextmanager
def composed(case: Case) -> Iterator[None]:
    """Context manager in which a job is composed as the case demands."""
    from tests.gpu.combinations import as_on_gpu

    is_made = "gpu" in case and case["runtime"] == "one_device" and not is_real()
    with as_on_gpu() if is_made else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def kernels(case: Case) -> Iterator[None]:
    """Context manager in which TensorFlow has the kernels that the case demands."""
    from tests.gpu.cudnn_kernel import cudnn_kernel

    with cudnn_kernel() if "gpu" in case and not is_real() else contextlib.nullcontext():
        yield
