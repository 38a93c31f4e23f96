"""A softmax whose gradient keeps half precision, against TensorFlow's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.models.short_softmax import keep_softmax_short
from tfdist.models.transformer import transformer


@pytest.fixture(autouse=True)
def _float32_policy():
    yield
    keras.config.set_dtype_policy("float32")


def gpt(dtype):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype)
    return transformer(x_spec=tf.TensorSpec([16], tf.int32), num_outputs=50, layers=2, width=32, heads=2)


def attention(dtype):
    """One head, of the operations of which transformers are made."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype)
    tokens = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(50, 32)(tokens)
    # No biases: one of the keys has a gradient of 0, but for rounding.
    query, key, value = (keras.layers.Dense(32, use_bias=False)(x) for _ in range(3))
    scores = keras.ops.cast(keras.ops.matmul(query, keras.ops.transpose(key, (0, 2, 1))), "float32")
    weights = keras.ops.cast(keras.ops.softmax(scores), value.dtype)
    return keras.Model(tokens, keras.layers.Dense(50, dtype="float32")(keras.ops.matmul(weights, value)))


def loss_and_gradients(model, scale=1.0):
    x = np.random.default_rng(0).integers(0, 50, (4, 16))

    @tf.function(jit_compile=True, autograph=False)
    def compute(x):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = scale * tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(x[:, ::-1], logits))
        return logits, tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    logits, gradients = compute(tf.constant(x, tf.int32))
    return logits.numpy(), [tf.convert_to_tensor(gradient).numpy() / scale for gradient in gradients]


def own_calls(model):
    return [operation for operation in model.operations if "call" in vars(operation)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [("mixed_bfloat16", 0.02), ("mixed_float16", 0.003)])
def test_the_result_is_the_same_and_the_gradient_as_half_precision_rounds(dtype, bound):
    model, plain = attention(dtype), attention(dtype)
    keep_softmax_short(model)
    assert len(own_calls(model)) == 1
    logits, found = loss_and_gradients(model, 1024.0)
    expected_logits, expected = loss_and_gradients(plain, 1024.0)
    np.testing.assert_array_equal(logits, expected_logits)
    assert any((a != b).any() for a, b in zip(found, expected, strict=True))
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


def test_the_formula_is_the_gradient_of_a_softmax():
    """In which nothing is lost: weights that half precision has exactly."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.ops.cast(keras.ops.softmax(inputs), "float16"))
    keep_softmax_short(model)
    assert len(own_calls(model)) == 1
    x, upstream = tf.math.log(tf.constant([[1.0, 1.0, 2.0, 4.0]])), tf.constant([[1.0, -2.0, 0.5, 3.0]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cast(model(x), tf.float32)
    w = np.array([[0.125, 0.125, 0.25, 0.5]])
    np.testing.assert_allclose(y, w, atol=1e-3)
    expected = w * (upstream - np.sum(upstream * w, -1, keepdims=True))
    np.testing.assert_allclose(tape.gradient(y, x, upstream), expected, rtol=1e-5)


@pytest.mark.parametrize("used", ["in float32, too", "as an output", "in float32", "twice"])
def test_others_stay_as_they_are(used):
    inputs = keras.Input((4,))
    weights = keras.ops.softmax(inputs)
    short = keras.ops.cast(weights, "float32" if used == "in float32" else "bfloat16")
    outputs = {
        "in float32, too": [short, weights * 2.0],
        "as an output": [short, weights],
        "in float32": [short],
        "twice": [short, keras.ops.cast(weights, "bfloat16")],
    }[used]
    model = keras.Model(inputs, outputs)
    keep_softmax_short(model)
    assert not own_calls(model)


def test_a_saved_model_knows_nothing_of_it(tmp_path):
    model = gpt("mixed_bfloat16")
    keep_softmax_short(model)
    assert len(own_calls(model)) == 2  # one a block
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    x = np.arange(16)[None]
    assert not own_calls(again)
    np.testing.assert_array_equal(model.predict(x, verbose=0), again.predict(x, verbose=0))


def test_models_of_other_kinds_are_not_looked_into():
    class Own(keras.Model):
        def call(self, x):
            return keras.ops.cast(keras.ops.softmax(x), "bfloat16")

    model = Own()
    keep_softmax_short(model)
    assert model(np.ones((1, 4), "float32")).dtype == tf.bfloat16
