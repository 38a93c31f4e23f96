"""Attention by cuDNN's kernel, or what stands in its place where there is no GPU."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import backend
from keras.src.ops.nn import DotProductAttention

from tests.gpu.combinations import as_on_gpu
from tests.gpu.cudnn_kernel import computed, cudnn_kernel
from tests.marks import slow_but
from tfdist.compat import keras_attention, tensorflow_xla
from tfdist.models import cudnn_attention
from tfdist.models.transformer import transformer


@pytest.fixture
def kernel():
    with cudnn_kernel() as calls:
        yield calls


def inputs(sizes, dtype):
    batch, queries, keys, heads, width = sizes
    rng = np.random.default_rng(0)
    shapes = [(batch, n, heads, width) for n in (queries, keys, keys, queries)]
    return [tf.cast(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize(
    "sizes, is_causal, mask",
    [
        ((2, 6, 6, 3, 8), True, None),
        ((2, 6, 6, 3, 8), False, None),
        ((1, 3, 7, 2, 16), False, None),
        ((2, 6, 6, 3, 8), True, (2, 1, 6, 6)),  # of which some queries see no key
        ((2, 4, 6, 3, 8), False, (1, 3, 4, 6)),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_output_gradients_and_theirs_are_the_formulas(kernel, dtype, sizes, is_causal, mask):
    scores = cudnn_attention.Scores(0.4, is_causal, None if mask is None else cudnn_attention.random_mask(mask))

    def all_of(attention, *tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            first = cudnn_attention.with_gradients(attention, scores)(*tensors)
            weighed = [tf.cast(each * each, tf.float32) for each in first[1:]]
        return [*first, *tape.gradient(weighed, tensors)]

    tensors = inputs(sizes, dtype)
    found = all_of(cudnn_attention.cudnn_attention, *tensors)
    assert len(kernel) == 2
    expected = all_of(cudnn_attention.attention_by_formula, *(tf.cast(x, tf.float32) for x in tensors))
    bound = 0.02 if dtype == "bfloat16" else 0.003
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and np.linalg.norm(np.float32(one) - other) <= bound * np.linalg.norm(other)


def computing(model, xla):
    """A function of a batch: the loss and its gradients, in one vector."""

    @tf.function(jit_compile=xla, autograph=False)
    def compute(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(model(x, training=True), tf.float32) ** 2)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        return tf.concat([tf.reshape(tf.cast(value, tf.float32), [-1]) for value in (loss, *gradients)], 0)

    return compute


def loss_and_gradients(model, x, xla):
    return computing(model, xla)(tf.constant(x)).numpy()


def trace(model):
    """As for XLA, which need not compile it: the kernel is taken, or not, while the model is traced."""
    computing(model, True).get_concrete_function(tf.TensorSpec(X.shape))


def is_near(found, expected):
    return np.linalg.norm(found - expected) <= 0.02 * np.linalg.norm(expected)


def attending(layer):
    """A model with the layer of Keras, made and called the same each time."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 16), batch_size=4)
    return keras.Model(inputs, layer()(inputs))


def masked(x, positions=8):
    mask = np.tri(positions)[::-1, ::-1].copy()[None] == 1
    return keras.layers.MultiHeadAttention(2, 8, dtype="mixed_bfloat16")(x, x, attention_mask=mask)


def padded(x):
    """A mask as of padding, by which some queries see nothing."""
    is_real = keras.ops.cast(x[..., :1] > -0.5, x.dtype)
    x = keras.layers.Masking()(x * is_real)
    return keras.layers.MultiHeadAttention(2, 8, dtype="mixed_bfloat16")(x, x, use_causal_mask=True)


LAYERS = {
    "causal": lambda: (
        lambda x: keras.layers.MultiHeadAttention(2, 8, dtype="mixed_bfloat16")(x, x, use_causal_mask=True)
    ),
    "grouped": lambda: lambda x: keras.layers.GroupQueryAttention(8, 4, 2, dtype="mixed_bfloat16")(x, x),
    "float16": lambda: lambda x: keras.layers.MultiHeadAttention(2, 8, dtype="mixed_float16")(x, x),
    "masked": lambda: masked,
    "masked and causal": lambda: padded,
}
X = np.random.default_rng(0).normal(size=(4, 8, 16)).astype("float32")


@pytest.mark.parametrize("layer", slow_but(LAYERS, "causal", "masked and causal"))
def test_layers_of_keras_take_the_kernel_where_xla_compiles(kernel, layer, monkeypatch):
    found = loss_and_gradients(attending(LAYERS[layer]), X, True)
    name = "__cudnn$fmhaScaleBiasSoftmax" if "masked" in layer else "__cudnn$fmhaSoftmax"
    assert set(kernel) == {name, f"{name}Backward"}
    kernel.clear()
    without = loss_and_gradients(attending(LAYERS[layer]), X, False)  # by the formula
    assert not kernel
    monkeypatch.setattr(backend.nn, "dot_product_attention", keras_attention._of_keras)
    expected = loss_and_gradients(attending(LAYERS[layer]), X, False)
    assert is_near(found, expected) and is_near(without, expected)


OTHERS = {
    "odd positions, masked": lambda x: masked(x[:, 1:], 7),
    "float32": lambda x: keras.layers.MultiHeadAttention(2, 8, dtype="float32")(x, x),
    "6 wide": lambda x: keras.layers.MultiHeadAttention(2, 6, dtype="mixed_bfloat16")(x, x),
    "136 wide": lambda x: keras.layers.MultiHeadAttention(2, 136, dtype="mixed_bfloat16")(x, x),
    "dropout": lambda x: keras.layers.MultiHeadAttention(2, 8, dropout=0.1, dtype="mixed_bfloat16")(x, x),
}


@pytest.mark.parametrize("layer", slow_but(OTHERS, "odd positions, masked"))
def test_others_do_not(kernel, layer):
    trace(attending(lambda: OTHERS[layer]))
    assert not kernel


def test_turned_off_by_kerass_own_switch(kernel):
    keras.config.disable_flash_attention()
    try:
        trace(attending(LAYERS["causal"]))
    finally:
        keras.config.enable_flash_attention()
    assert not kernel


@pytest.mark.parametrize("wrong", slow_but(["numbers", "an error"], "numbers"))
def test_a_kernel_that_fails_its_trial_is_not_used_and_named(kernel, wrong, monkeypatch, capsys):
    def custom_call(target, *args):
        if wrong == "an error":
            raise tf.errors.InternalError(None, None, "no engine was found\nat line 7")
        first, *others = computed(target, *args)
        return [first * tf.cast(1.05, first.dtype), *others]

    monkeypatch.setattr(tensorflow_xla, "custom_call", custom_call)
    found = loss_and_gradients(attending(LAYERS["causal"]), X, True)
    expected = loss_and_gradients(attending(LAYERS["causal"]), X, False)
    assert is_near(found, expected)
    said = "fails: no engine was found" if wrong == "an error" else "is 0.048 off the formula"
    # TensorFlow may say something, too.
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("tfdist: ")] == [
        f"tfdist: warning: cuDNN's attention of 8 x 8 positions, 8 wide, in bfloat16 {said}: the formula is used,"
        " which is slower and takes more memory."
    ]


def test_models_of_tfdist_call_kerass_operation_on_gpus_in_half_precision():
    def attentions(policy, dropout):
        keras.config.set_dtype_policy(policy)
        try:
            with as_on_gpu():
                model = transformer(x_spec=tf.TensorSpec([8], tf.int32), num_outputs=9, layers=3, dropout=dropout)
        finally:
            keras.config.set_dtype_policy("float32")
        return sum(type(operation) is DotProductAttention for operation in model.operations)

    assert attentions("mixed_bfloat16", 0.0) == attentions("mixed_float16", 0.0) == 3
    assert attentions("float32", 0.0) == attentions("mixed_bfloat16", 0.1) == 0
