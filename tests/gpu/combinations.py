"""Combinations to audit (models, precisions, strategies, options) as command lines, and the tracing of their functions.

They are traced as if the process had a GPU: TensorFlow reports one, and everything that is not pinned is placed on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tests.gpu import graph_audit
from tests.gpu.graph_audit import Audit, audit
from tfdist import flags
from tfdist.build import Job, compose, start_runtime
from tfdist.control.cluster import Cluster
from tfdist.runtime import host

IMAGES = ("--source=synthetic", "--source_args=shape=(32,32,3),classes=10", "--global_batch=16")
TEXT = ("--source=synthetic", "--source_args=task=text,vocab=300", "--sequence_length=32", "--global_batch=16")
TRANSFORMER = (*TEXT, "--model=transformer", "--model_args=layers=1,width=64,heads=4,dropout=0.1")
EXPERTS = (*TEXT, "--model=transformer", "--model_args=layers=1,width=64,heads=4,experts=4,balance=0.1")
MODELS = {
    "mlp": (*IMAGES, "--model=mlp"),
    "cnn": (*IMAGES, "--model=cnn"),
    "resnet50": (*IMAGES, "--model=resnet50"),
    "vit": (*IMAGES, "--model=vit", "--model_args=layers=2"),
    "transformer": TRANSFORMER,
    "experts": EXPERTS,
}
PRECISIONS = ("float32", "bfloat16", "float16")
OPTIONS = {
    "plain": (),
    "accumulation, clipping": ("--accumulation=2", "--clip_norm=1"),
    "moving averages, adamw": ("--ema=0.9", "--optimizer=adamw", "--weight_decay=0.1"),
    "momentum, NaN skipped": ("--optimizer=momentum", "--on_nan=skip"),
    "lamb": ("--optimizer=lamb",),
    "adafactor": ("--optimizer=adafactor",),
    "recompute": ("--recompute=block",),
    "deterministic": ("--deterministic",),
    "no phases": ("--phase_every=0",),
    "rows of a table": ("--optimizer=sgd",),
    "several devices": ("--strategy=mirrored", "--virtual_devices=2"),
    "mesh": ("--strategy=mesh", "--mesh=data=1"),
    "mesh, ZeRO-3": ("--strategy=mesh", "--mesh=data=1", "--zero=3"),
}
_PAIRS = (
    [(model, precision, "plain") for model in MODELS for precision in PRECISIONS]
    + [("transformer", "bfloat16", option) for option in OPTIONS if option != "plain"]
    + [("cnn", "float16", option) for option in OPTIONS if option not in ("plain", "rows of a table", "recompute")]
)
COMBINATIONS = {
    f"{model}, {precision}, {option}": (*MODELS[model], f"--precision={precision}", *OPTIONS[option])
    for model, precision, option in _PAIRS
}


HOST = "CPU:9"  # stands for the host, because the replicas themselves may be on CPUs


class _Traced(Exception):
    """Ends a call before it computes anything."""


class _Tracer:
    """Takes the place of a tf.function: traces it as if on a GPU and keeps the result."""

    def __init__(self, function):
        self._function = function

    def __call__(self, *arguments):
        self.traced = self._function.get_concrete_function(*arguments)
        raise _Traced


@contextlib.contextmanager
def as_on_gpu(in_scope: bool = True) -> Iterator[None]:
    """Context manager in which TensorFlow reports a GPU. in_scope: what is not pinned is placed on it, too."""
    gpu = tf.config.LogicalDevice("/device:GPU:0", "GPU")
    listed = tf.config.list_logical_devices

    def list_devices(kind: str | None = None) -> list:
        return [gpu] if kind == "GPU" else listed(kind)

    with (
        mock.patch.object(tf.config, "list_logical_devices", list_devices),
        mock.patch.object(host, "HOST", HOST),
        tf.device("GPU:0") if in_scope else contextlib.nullcontext(),
    ):
        yield


def of_training(command_line: tuple[str, ...]) -> Audit:
    """Audits the training step of a command line."""
    with job_of(command_line) as job:
        return of_step(job)


def of_step(job: Job) -> Audit:
    """Audits the training step of a job."""
    return _audit(job, job.step, lambda: job.step(job.iterators(0), 1))


def waits_of_training(command_line: tuple[str, ...]) -> list[str]:
    """Returns where the training step of a command line waits for the GPU."""
    with job_of(command_line) as job:
        return graph_audit.waits(_traced(job, job.step, lambda: job.step(job.iterators(0), 1)), HOST)


def of_evaluation(command_line: tuple[str, ...]) -> Audit:
    """Audits the evaluation of a command line."""
    with job_of(command_line) as job:
        evaluator = job.evaluator()
        return _audit(job, evaluator, evaluator)


def _audit(job: Job, owner: Any, call: Callable[[], object]) -> Audit:
    return audit(_traced(job, owner, call), HOST)


def _traced(job: Job, owner: Any, call: Callable[[], object]) -> Any:
    tracer = owner._function = _Tracer(owner._function)
    with contextlib.suppress(_Traced), as_on_gpu(in_scope=job.runtime.local_replicas == 1):
        call()
    return tracer.traced


@contextlib.contextmanager
def job_of(command_line: tuple[str, ...]) -> Iterator[Job]:
    given = {argument.partition("=")[0] for argument in command_line}
    config = flags.parse(
        [*command_line, "--steps=2", *([] if "--strategy" in given else ["--strategy=one_device"])]
    ).config
    keras.backend.clear_session(free_memory=False)
    try:
        runtime = start_runtime(config, Cluster())
        with as_on_gpu(in_scope=runtime.local_replicas == 1):
            job = compose(config, runtime)
        yield job
        runtime.close()
    finally:
        keras.config.set_dtype_policy("float32")
