"""Exports load without tfdist (that, in a process of its own: tests/e2e) and replace earlier ones whole."""

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts.export import export_model


def test_export(tmp_path):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    for _ in range(2):  # the second replaces the first
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
        paths = export_model(model, tmp_path / "export", ("keras", "saved_model"))
    assert sorted(path.name for path in paths) == sorted(path.name for path in (tmp_path / "export").iterdir()) == ["model.keras", "saved_model"]
    np.testing.assert_allclose(keras.models.load_model(paths[0])(x), model(x), atol=1e-6)
    loaded = tf.saved_model.load(str(paths[1]))
    np.testing.assert_allclose(loaded.serve(x), model(x), atol=1e-6)
