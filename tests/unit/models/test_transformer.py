"""The transformer: parameter counts, what a position sees, and the same numbers as GPT-2 written in NumPy."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.models.transformer import transformer
from tfdist.models.transformer_sizes import TRANSFORMERS


def build(length: int = 8, vocabulary: int = 11, **options) -> keras.Model:
    keras.utils.set_random_seed(0)
    return transformer(x_spec=tf.TensorSpec((length,), tf.int32), num_outputs=vocabulary, **options)


def closed_form(size: str, vocabulary: int, context: int) -> int:
    d = TRANSFORMERS[size].width
    return (vocabulary + context + 2) * d + TRANSFORMERS[size].layers * (12 * d * d + 13 * d)


def count(model: keras.Model) -> int:
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


@pytest.mark.parametrize(("size", "parameters"), [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168)])
def test_gpt2_has_the_published_number_of_parameters(size, parameters):
    with keras.StatelessScope(initialize_variables=False):  # counts shapes; allocates nothing
        model = build(16, 50257, size=size, context=1024)
    assert count(model) == parameters == closed_form(size, 50257, 1024)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_small_sizes_follow_the_closed_form(size):
    assert count(build(128, 256, size=size)) == closed_form(size, 256, 128)


def test_an_untied_head_is_a_matrix_of_its_own():
    model = build(tied=False)
    assert count(model) == closed_form("tiny", 11, 8) + 11 * 64
    tokens = np.ones((1, 8), np.int32)
    before = model(tokens).numpy()
    model.get_layer("embed_tokens").reverse_embeddings.assign_add(np.eye(64, 11))
    assert np.abs(model(tokens) - before).max() > 1e-3


def test_names_are_stable():
    names = [layer.name for layer in build(layers=1).layers if layer.weights]
    assert names == [
        "embed_tokens",
        "embed_positions",
        "block_00_norm_1",
        "block_00_attention_qkv",
        "block_00_attention_out",
        "block_00_norm_2",
        "block_00_mlp_up",
        "block_00_mlp_down",
        "final_norm",
    ]
    assert [v.path for v in build(layers=1).trainable_variables] == [
        v.path for v in build(layers=1).trainable_variables
    ]


def test_a_position_sees_itself_and_the_past_only():
    model = build()
    tokens = np.random.default_rng(0).integers(0, 11, (1, 8)).astype(np.int32)
    changed = tokens.copy()
    changed[0, 4] = (changed[0, 4] + 1) % 11
    difference = np.abs(model(changed) - model(tokens)).max(-1)[0]
    assert (difference[:4] == 0).all()
    assert (difference[4:] > 1e-6).all()


def test_the_model_can_be_cut_between_blocks():
    """As pipeline stages need it: a stage takes one tensor, and holds its own blocks and no others."""
    model, tokens = build(layers=4, width=32, heads=2), np.arange(16).reshape(2, 8).astype(np.int32) % 11
    cuts = [model.get_layer(name).output for name in ("block_01_mlp_add", "block_03_mlp_add")]
    stages = [keras.Model(model.input, cuts[0]), keras.Model(*cuts), keras.Model(cuts[1], model.output)]
    x = tokens
    for stage in stages:
        x = stage(x)
    np.testing.assert_allclose(x, model(tokens), atol=1e-6)
    middle = [variable.path for variable in stages[1].trainable_variables]
    assert len(middle) == 24
    assert all(path.startswith(("block_02", "block_03")) for path in middle)


@pytest.mark.slow
@pytest.mark.parametrize(("half", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_every_matrix_product_is_in_the_policy_and_the_logits_in_float32(half, tolerance):
    tokens = np.arange(16).reshape(2, 8).astype(np.int32) % 11
    exact = build()
    keras.mixed_precision.set_dtype_policy(f"mixed_{half}")
    try:
        mixed = build()
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    assert mixed(tokens).dtype == tf.float32
    np.testing.assert_allclose(mixed(tokens), exact(tokens), atol=tolerance)
    graph = tf.function(mixed).get_concrete_function(tf.TensorSpec((2, 8), tf.int32)).graph
    products = [op.outputs[0].dtype.name for op in graph.get_operations() if op.type in ("MatMul", "BatchMatMulV2")]
    assert products == [half] * (2 * 6 + 1)


def test_position_matters():
    logits = build()(np.full((1, 8), 3, np.int32)).numpy()[0]
    assert np.abs(np.diff(logits, axis=0)).max(-1).min() > 1e-6


def test_initial_weights():
    model = build(8, 256, layers=8, width=64)
    assert model.get_layer("block_03_mlp_up").kernel.numpy().std() == pytest.approx(0.02, rel=0.05)
    for name in ("block_03_attention_out", "block_03_mlp_down"):
        assert model.get_layer(name).kernel.numpy().std() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.get_layer("embed_tokens").embeddings.numpy().std() == pytest.approx(0.02, rel=0.05)


def test_context_and_vocabulary_may_be_larger_than_the_data():
    model = build(context=32, vocabulary=11)
    assert model.get_layer("embed_positions").embeddings.shape == (32, 64)
    wide = transformer(x_spec=tf.TensorSpec((8,), tf.int32), num_outputs=11, vocabulary=64)
    assert wide.output_shape == (None, 8, 64)


def test_dropout_acts_in_training_only():
    model, tokens = build(dropout=0.5), np.ones((2, 8), np.int32)
    assert np.array_equal(model(tokens), model(tokens))
    assert not np.array_equal(model(tokens, training=True), model(tokens, training=True))


@pytest.mark.slow
def test_compiled_by_xla_gives_the_same_logits():
    model, tokens = build(), np.arange(16).reshape(2, 8).astype(np.int32) % 11
    compiled = tf.function(lambda x: model(x), jit_compile=True)
    np.testing.assert_allclose(compiled(tokens), model(tokens), atol=1e-5)


def test_same_logits_as_gpt2_in_numpy():
    model = build(layers=1)
    random = np.random.default_rng(1)
    for variable in model.trainable_variables:  # also biases and norms, which start at 0 and 1
        variable.assign(variable.numpy() + random.normal(0, 0.1, variable.shape))
    tokens = random.integers(0, 11, (3, 8)).astype(np.int32)
    expected = np.stack(
        [
            gpt2_in_numpy({v.path: v.numpy().astype(np.float64) for v in model.trainable_variables}, row, heads=4)
            for row in tokens
        ]
    )
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(model(tokens), expected, atol=1e-4)


def gpt2_in_numpy(weights: dict[str, np.ndarray], tokens: np.ndarray, heads: int) -> np.ndarray:
    """One block, one sequence, float64, head by head and position by position, from the GPT-2 paper's description."""

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{name}/gamma"]
            + weights[f"{name}/beta"]
        )

    def dense(x, name):
        return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    x = weights["embed_tokens/embeddings"][tokens] + weights["embed_positions/embeddings"][: len(tokens)]
    d = x.shape[1]
    qkv, k = dense(norm(x, "block_00_norm_1"), "block_00_attention_qkv"), d // heads
    mixed = np.zeros_like(x)
    for head in range(heads):
        q, key, value = (qkv[:, part * d + head * k : part * d + (head + 1) * k] for part in range(3))
        for t in range(len(tokens)):
            scores = np.exp(key[: t + 1] @ q[t] / np.sqrt(k))
            mixed[t, head * k : (head + 1) * k] = (scores / scores.sum()) @ value[: t + 1]
    x = x + dense(mixed, "block_00_attention_out")
    up = dense(norm(x, "block_00_norm_2"), "block_00_mlp_up")
    up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    x = x + dense(up, "block_00_mlp_down")
    return norm(x, "final_norm") @ weights["embed_tokens/embeddings"].T
