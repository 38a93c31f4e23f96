"""What Keras' Trainer keeps under private names."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat import keras_trainer


class OneHot(keras.Model):
    """Its step makes other labels of a batch, and uses a layer that no call outside of training uses."""

    def __init__(self):
        super().__init__()
        self.dense, self.aside = keras.layers.Dense(3), keras.layers.Dense(3)

    def call(self, x, training=False):
        return self.dense(x) + (self.aside(x) if training else 0.0)

    def train_step(self, data):
        x, y = data[0][:, :5], tf.one_hot(data[1], 3)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, outputs)


@pytest.mark.parametrize("is_built", [False, True])
def test_a_model_is_built_by_its_own_step(is_built):
    model = OneHot()
    if is_built:
        model(np.zeros([2, 5], "float32"), training=True)
    model.compile("adam", "mse", metrics=["accuracy"])
    keras_trainer.build_for(model, (tf.zeros([4, 8]), tf.zeros([4], tf.int32)))
    [accuracy] = keras_trainer.compiled_metrics(model)
    assert model.aside.built and model.dense.kernel.shape == (5, 3) and not model.optimizer.built
    assert accuracy._fn is keras.metrics.categorical_accuracy and accuracy.variables[0].path == "accuracy/total"
