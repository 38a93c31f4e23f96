"""What Keras and TensorFlow refuse on several workers names the part of the model that it is about."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.control.user_errors import part_at_fault
from tfdist.keras_fit import api


def names(node: str) -> str:
    return f"Incompatible shapes: [9,8] vs. [9]\n\t [[{{{{node {node}}}}}]] [Op:__inference_one_step_512]"


def test_what_is_refused_names_the_part(monkeypatch):
    node = "gradient_tape/compile_loss/sparse_categorical_crossentropy/mul/BroadcastGradientArgs"
    refused = tf.errors.InvalidArgumentError(None, None, f"Graph execution error:\n\n{names(node)}")

    def refuse(*_):
        raise refused

    for name, value in (("init", lambda: None), ("has_peers", lambda runtime: True), ("agree_on", refuse)):
        monkeypatch.setattr(api, name, value)
    with pytest.raises(ConfigError) as found:
        api.predict(keras.Sequential([keras.Input((2,))]), np.zeros([2, 2]))
    words = "tfdist.predict failed in the loss sparse_categorical_crossentropy: Incompatible shapes: [9,8] vs. [9]"
    assert str(found.value) == words


def test_of_keras_own_refusal():
    """A loss for each of 8 places of 9 rows, and a weight for each row."""
    model = keras.Sequential([keras.Input((8, 3)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
    with pytest.raises(ValueError) as raised:
        model.fit(np.ones([9, 8, 3]), np.zeros([9, 8]), sample_weight=np.ones(9), batch_size=9, verbose=0)
    assert part_at_fault(str(raised.value)) == " in the loss sparse_categorical_crossentropy"


@pytest.mark.parametrize(
    "node, part",
    [
        ("compile_loss/mse/sub", " in the loss mse"),
        ("compile_metrics/accuracy/mul", " in the metric accuracy"),
        ("net_1/mine_1/mul", " in net_1/mine_1"),
        ("gradient_tape/net_1/mine_1/mul/BroadcastGradientArgs", " in net_1/mine_1"),
        ("MatMul", ""),
        ("gradient_tape/MatMul", ""),
    ],
)
def test_parts(node, part):
    assert part_at_fault(names(node)) == part
    assert part_at_fault("Incompatible shapes") == ""
