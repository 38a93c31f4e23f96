"""The files of every model load in a process that has no tfdist, and give the same logits: .keras and SavedModel."""

from __future__ import annotations

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import ModelConfig
from tfdist.models.build_model import build_model

IMAGE = tf.TensorSpec((16, 16, 3), tf.float32)
TOKENS = tf.TensorSpec((12,), tf.int32)
OUTPUTS = 10
pytestmark = pytest.mark.slow  # nine exports
CASES = {
    "mlp": ("mlp", "widths=(16,16),dropout=0.1", IMAGE),
    "cnn": ("cnn", "widths=(4,8),dropout=0.1", IMAGE),
    "cnn_group": ("cnn", "widths=(8,16),norm=group", IMAGE),
    "transformer": ("transformer", "layers=2,width=32,heads=2,dropout=0.1", TOKENS),
    "transformer_experts": ("transformer", "layers=1,width=32,heads=2,experts=4", TOKENS),
    "transformer_untied": ("transformer", "layers=1,width=32,heads=2,tied=False,context=20", TOKENS),
    "vit": ("vit", "layers=1,width=32,heads=2,dropout=0.1", IMAGE),
    "vit_class": ("vit", "layers=1,width=32,heads=2,pool=class", IMAGE),
    "applications": ("applications", "name=MobileNetV2,alpha=0.35", tf.TensorSpec((32, 32, 3), tf.float32)),
}

LOAD = """
import sys
sys.modules["tfdist"] = None  # importing it raises ImportError
import keras, numpy as np, tensorflow as tf
folder = sys.argv[1]
for name in sys.argv[2:]:
    x = np.load(f"{folder}/{name}_x.npy")
    y_keras = keras.models.load_model(f"{folder}/{name}.keras")(x)
    saved = tf.saved_model.load(f"{folder}/{name}_saved")
    y_saved = saved.serve(x)
    np.savez(f"{folder}/{name}_y.npz", keras=y_keras, saved=y_saved)
"""


def build(case, seed=0):
    model, args, x_spec = CASES[case]
    keras.utils.set_random_seed(seed)
    return build_model(ModelConfig(model=model, model_args=args), x_spec, OUTPUTS)


def sample(case, batch=4):
    x_spec, rng = CASES[case][2], np.random.default_rng(0)
    shape = (batch, *x_spec.shape)
    return (
        rng.integers(0, OUTPUTS, shape, dtype=np.int32)
        if x_spec.dtype.is_integer
        else rng.random(shape, dtype=np.float32)
    )


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """{case: (logits here, {"keras": ..., "saved": ...} logits of a process that has no tfdist)}."""
    folder, here = tmp_path_factory.mktemp("models"), {}
    for case in CASES:
        model = build(case)
        here[case] = model(sample(case)).numpy()
        model.save(folder / f"{case}.keras")
        model.export(str(folder / f"{case}_saved"), verbose=False)
        np.save(folder / f"{case}_x.npy", sample(case))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), *CASES], capture_output=True, text=True, cwd=folder, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {case: (here[case], np.load(folder / f"{case}_y.npz")) for case in CASES}


@pytest.mark.parametrize("kind", ["keras", "saved"])
@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_loads_without_tfdist(reloaded, case, kind):
    here, there = reloaded[case]
    assert np.abs(here).max() > 0
    np.testing.assert_allclose(there[kind], here, rtol=1e-5, atol=1e-6)
