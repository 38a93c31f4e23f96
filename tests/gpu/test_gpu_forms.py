"""What a job is made of where there is a GPU, run on the CPU: it computes what the CPU's own form does."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest

from tests.gpu.combinations import EXPERTS, IMAGES, TRANSFORMER, as_on_gpu
from tests.gpu.cudnn_kernel import cudnn_kernel
from tfdist import flags
from tfdist.build import compose, start_runtime
from tfdist.control.cluster import Cluster

NO_DROPOUT = "--model_args=layers=1,width=64,heads=4"


@pytest.fixture(autouse=True)
def _float32_policy():
    yield
    keras.config.set_dtype_policy("float32")


def trained(command_line: tuple[str, ...], on_gpu: bool):
    """Losses of a few steps, how all weights changed, and the options of the step."""
    config = flags.parse([*command_line, "--steps=6", "--strategy=one_device"]).config
    with as_on_gpu() if on_gpu else contextlib.nullcontext():
        job = compose(config, start_runtime(config, Cluster()))
    iterators, before = job.iterators(0), weights(job)
    losses = [job.step(iterators, 2).means["loss"] for _ in range(3)]
    return losses, weights(job) - before, job.step.options


def weights(job):
    return np.concatenate([np.ravel(weight).astype("float32") for weight in job.model.get_weights()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "command_line, bound",
    [
        ((*IMAGES, "--model=mlp", "--precision=float16", "--ema=0.9", "--accumulation=2"), 1e-5),
        (
            (*TRANSFORMER, NO_DROPOUT, "--precision=bfloat16", "--recompute=block", "--optimizer=sgd", "--clip_norm=1"),
            0.01,
        ),
        pytest.param((*IMAGES, "--model=cnn", "--optimizer=momentum"), 1e-5, marks=pytest.mark.thorough),
        pytest.param((*EXPERTS, "--precision=float16", "--optimizer=sgd"), 0.01, marks=pytest.mark.thorough),
    ],
)
def test_the_form_for_gpus_computes_the_same(command_line, bound):
    losses, change, options = trained((*command_line, "--jit_compile"), on_gpu=False)
    found_losses, found_change, found_options = trained(command_line, on_gpu=True)  # which compiles by default
    assert found_options.jit_compile and found_options.compiled_update and not options.compiled_update
    np.testing.assert_allclose(found_losses, losses, rtol=bound)
    assert np.linalg.norm(found_change - change) <= bound * np.linalg.norm(change)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, bound",
    [
        (("--precision=bfloat16", "--recompute=block", "--accumulation=2", "--clip_norm=1"), 0.01),
        pytest.param(("--precision=float16", "--recompute=attention", "--ema=0.9"), 0.002, marks=pytest.mark.thorough),
    ],
)
def test_with_cudnns_attention_it_computes_the_same(options, bound):
    command_line = (*TRANSFORMER, NO_DROPOUT, "--optimizer=sgd", *options)
    losses, change, _ = trained(command_line, on_gpu=True)
    with cudnn_kernel() as calls:
        found_losses, found_change, found_options = trained(command_line, on_gpu=True)
    assert found_options.jit_compile and len(calls) > 4
    np.testing.assert_allclose(found_losses, losses, rtol=bound)
    assert np.linalg.norm(found_change - change) <= bound * np.linalg.norm(change)
