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
pytestmark = pytest.mark.slow  # eight exports, and a start of TensorFlow
CASES = {
    "mlp": ("mlp", "widths=(16,16),dropout=0.1", IMAGE),
    "cnn": ("cnn", "widths=(4,8),dropout=0.1", IMAGE),
    "cnn_group": ("cnn", "widths=(8,),norm=group", IMAGE),
    "transformer": ("transformer", "layers=1,width=32,heads=2,dropout=0.1", TOKENS),
    "transformer_experts": ("transformer", "layers=1,width=32,heads=2,experts=4,tied=False,context=20", TOKENS),
    "vit": ("vit", "layers=1,width=32,heads=2,dropout=0.1,pool=class", IMAGE),
    "vit_mean": ("vit", "layers=1,width=32,heads=2", IMAGE),
    "applications": ("applications", "name=SmallNetwork", IMAGE),
}
# Options that CASES has together.
ONE_BY_ONE = {
    "transformer_experts": ("transformer", "layers=1,width=32,heads=2,experts=4", TOKENS),
    "transformer_untied": ("transformer", "layers=1,width=32,heads=2,tied=False,context=20", TOKENS),
    "vit_class": ("vit", "layers=1,width=32,heads=2,pool=class", IMAGE),
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


def small_network(weights, include_top, input_tensor, input_shape, classes, classifier_activation):
    """Stands in for those of keras.applications, all of which have dozens of layers of Keras: what tfdist puts around
    one is what could keep a file from being loaded."""
    features = keras.layers.DepthwiseConv2D(3, activation="relu6")(input_tensor)
    features = keras.layers.BatchNormalization()(features)
    logits = keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(features))
    return keras.Model(keras.utils.get_source_inputs(input_tensor), logits, name="small_network")


@pytest.fixture(autouse=True)
def applications_have_it(monkeypatch):
    monkeypatch.setattr(keras.applications, "SmallNetwork", small_network, raising=False)


def build(model, args, x_spec, seed=0):
    keras.utils.set_random_seed(seed)
    return build_model(ModelConfig(model=model, model_args=args), x_spec, OUTPUTS)


def sample(x_spec, batch=4):
    rng = np.random.default_rng(0)
    shape = (batch, *x_spec.shape)
    return (
        rng.integers(0, OUTPUTS, shape, dtype=np.int32)
        if x_spec.dtype.is_integer
        else rng.random(shape, dtype=np.float32)
    )


@pytest.mark.parametrize("cases", [CASES, pytest.param(ONE_BY_ONE, marks=pytest.mark.thorough)])
def test_saved_models_load_without_tfdist(cases, tmp_path):
    """In one process, which starts TensorFlow: the logits of both kinds of files are those of here."""
    here = {}
    for case, (model, args, x_spec) in cases.items():
        built, x = build(model, args, x_spec), sample(x_spec)
        here[case] = built(x).numpy()
        built.save(tmp_path / f"{case}.keras")
        built.export(str(tmp_path / f"{case}_saved"), verbose=False)
        np.save(tmp_path / f"{case}_x.npy", x)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), *cases], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for case, expected in here.items():
        assert np.abs(expected).max() > 0
        there = np.load(tmp_path / f"{case}_y.npz")
        for kind in ("keras", "saved"):
            np.testing.assert_allclose(there[kind], expected, rtol=1e-5, atol=1e-6, err_msg=f"{case}, {kind}")
