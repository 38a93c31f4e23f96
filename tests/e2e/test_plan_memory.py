"""What the planner predicts against what TensorFlow allocates: three real models on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.job import ENVIRONMENT
from tfdist import flags
from tfdist.plan import model_shape
from tfdist.planner.layout import Layout
from tfdist.planner.memory import memory

pytestmark = pytest.mark.slow

IMAGES = ["--source=synthetic", "--source_args=shape=(64,64,3),classes=10,fixed=True,samples=1000,eval_samples=10"]
RUNS = {
    "resnet50": [*IMAGES, "--model=resnet50", "--global_batch=16", "--optimizer=momentum"],
    "transformer": [
        "--source=synthetic",
        "--source_args=task=text,vocab=256",
        "--sequence_length=128",
        "--model=transformer",
        "--model_args=size=small,layers=4",
        "--global_batch=8",
    ],
    "vit, accumulation, moving average": [
        *IMAGES,
        "--model=vit",
        "--model_args=layers=3",
        "--global_batch=32",
        "--accumulation=2",
        "--ema=0.99",
    ],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "transformer" else pytest.mark.thorough) for name in RUNS]
)
def test_memory_is_as_predicted(name):
    arguments = [*RUNS[name], "--steps=10"]
    config = flags.parse(arguments).config
    layout = Layout(
        micro_batch=config.batch.global_batch // (config.batch.accumulation or 1),
        micro_batches=config.batch.accumulation or 1,
    )
    planned = memory(model_shape(config, arguments, input_shape="", outputs=0), config, layout)
    output = subprocess.run(
        [sys.executable, "-m", "tests.e2e.memory_worker", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert output.returncode == 0, output.stderr[-2000:]
    measured = json.loads(output.stdout.splitlines()[-1])
    print(name, measured, planned)
    assert planned.parameters == pytest.approx(measured["parameters"], rel=0.05)
    assert planned.gradients == pytest.approx(measured["gradients"], rel=0.05)
    assert planned.optimizer == pytest.approx(measured["slots"], rel=0.05)
    assert planned.peak == pytest.approx(measured["peak"], rel=0.25)
