"""The mixture of experts: the same numbers as token by token in NumPy, what is dropped, the balance loss, what a
position sees.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfdist import build
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.models.blocks import normal
from tfdist.models.experts import Experts, mixture
from tfdist.models.transformer import transformer
from tfdist.training.dropped_tokens import with_dropped
from tfdist.training.objectives import Scores, classification

T, D = 6, 8


def alone(experts: Experts) -> keras.Model:
    """One mixture, with biases and a router far from equal, as a model."""
    keras.utils.set_random_seed(1)
    x = keras.Input((T, D))
    model = keras.Model(x, mixture(x, "block_00", experts, normal(), normal()))
    for variable in model.trainable_variables:
        variable.assign(np.random.default_rng(len(variable.path)).normal(size=variable.shape, scale=0.5))
    return model


def by_hand(model: keras.Model, experts: Experts, x: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """(outputs, balance loss, dropped part of each token), one token after the other."""
    weights = {variable.path: variable.numpy().astype("float64") for variable in model.trainable_variables}
    y, dropped, losses = np.zeros_like(x, "float64"), np.zeros(x.shape[:2]), []
    for b in range(len(x)):
        used, chosen, likes = np.zeros(experts.count, int), np.zeros(experts.count), np.zeros(experts.count)
        for t in range(T):
            scores = np.exp(x[b, t].astype("float64") @ weights["block_00_router/kernel"])
            scores /= scores.sum()
            best = np.argsort(-scores)[: experts.per_token]
            likes += scores / T
            total = scores[best].sum() if experts.per_token > 1 else 1.0
            for e in best:
                chosen[e] += 1 / (T * experts.per_token)
                if used[e] == experts.places(T):
                    dropped[b, t] += 1 / experts.per_token
                    continue
                used[e] += 1
                up = x[b, t] @ weights["block_00_experts_up/kernel"][e] + weights["block_00_experts_up/bias"][e, 0]
                up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
                y[b, t] += (
                    scores[e]
                    / total
                    * (up @ weights["block_00_experts_down/kernel"][e] + weights["block_00_experts_down/bias"][e, 0])
                )
        losses.append(experts.count * chosen @ likes)
    return y, experts.balance * np.mean(losses), dropped


@pytest.mark.parametrize(
    "experts", [Experts(4, 2, 1.0, 0.1), Experts(4, 1, 1.0, 0.1), Experts(5, 3, 0.7, 1.0), Experts(2, 2, 9.0, 0.0)]
)
def test_same_numbers_as_token_by_token(experts):
    model, x = alone(experts), np.random.default_rng(0).normal(size=(3, T, D)).astype("float32")
    expected, loss, dropped = by_hand(model, experts, x)
    np.testing.assert_allclose(model(x), expected, atol=1e-4)
    assert float(sum(model.losses)) == pytest.approx(loss, rel=1e-5)
    told = keras.Model(model.input, model.get_layer("block_00_router_dropped").output)(x)
    np.testing.assert_allclose(told[..., 0], dropped, atol=1e-6)
    assert (dropped.sum() > 0) == (experts.capacity <= 1)


@pytest.mark.slow
def test_dropped_tokens_are_a_metric_of_the_model_that_was_called_last():
    model = transformer(
        x_spec=tf.TensorSpec((8,), tf.int32), num_outputs=11, layers=2, width=8, heads=2, experts=4, capacity=0.5
    )
    objective = with_dropped(classification(), model)
    tokens = np.random.default_rng(0).integers(0, 11, (3, 8)).astype("int32")

    @tf.function(autograph=False)
    def score(x):
        return objective(model(x), x, tf.ones([3])).metrics["dropped_fraction"]

    told = keras.Model(model.input, [model.get_layer(f"block_0{index}_router_dropped").output for index in range(2)])(
        tokens
    )
    np.testing.assert_allclose(score(tokens), (told[0] + told[1])[..., 0] / 2, atol=1e-6)
    assert 0.4 < np.mean(told) < 0.8  # half of the places are missing
    specs = tf.function(objective).get_concrete_function(
        tf.TensorSpec((3, 8, 11)), tf.TensorSpec((3, 8), tf.int32), tf.TensorSpec((3,))
    )
    assert specs.structured_outputs.metrics["dropped_fraction"].shape == (3, 8)
    plain = classification()
    assert with_dropped(plain, keras.Sequential([layers.Input((2,)), layers.Dense(2)])) is plain


def test_dropped_tokens_of_rows_that_an_objective_sees_in_a_condition():
    """As in an evaluation that cuts off the padding of a last batch."""
    model = keras.Sequential([layers.Input((2, 1)), layers.Identity(name="block_00_router_dropped")])

    def of_tokens(outputs, y, w):
        losses = tf.reshape(outputs, [-1])
        return Scores(losses, tf.ones_like(losses), {})

    objective = with_dropped(of_tokens, model)

    @tf.function(autograph=False)
    def score(x, count):
        outputs = model(x)
        return tf.cond(
            count > 0,
            lambda: objective(outputs[:count], None, tf.ones([count])).metrics["dropped_fraction"],
            lambda: tf.zeros([0]),
        )

    dropped = np.arange(6, dtype="float32").reshape(3, 2, 1)
    np.testing.assert_allclose(score(dropped, tf.constant(2)), [0, 1, 2, 3])


def test_a_position_sees_no_later_one_although_places_are_few():
    keras.utils.set_random_seed(0)
    model = transformer(
        x_spec=tf.TensorSpec((16,), tf.int32), num_outputs=11, width=32, heads=4, experts=4, capacity=0.5
    )
    tokens = np.random.default_rng(0).integers(0, 11, (4, 16)).astype("int32")
    changed = tokens.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 11
    difference = np.abs(model(changed) - model(tokens)).max((0, 2))
    assert (difference[:7] == 0).all() and (difference[7:] > 1e-6).all()


def padded(outputs, y, w):
    """Next tokens, of which some are padding and others count more: nothing about rows is in these weights."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=outputs)
    return Scores(losses, tf.cast(y > 20, tf.float32) * tf.cast(1 + y % 3, tf.float32), {})


@pytest.mark.slow
def test_token_weights_leave_the_balance_loss_a_mean_over_sequences():
    """Against a plain Keras gradient of the whole batch, at two ways to cut it."""
    config = Config().replace(
        strategy="one_device",
        steps=1,
        source="synthetic",
        source_args="task=text,vocab=61,samples=64,eval_samples=16",
        sequence_length=8,
        model="transformer",
        optimizer="sgd",
        model_args="layers=1,width=32,heads=4,experts=4,balance=1.0",
        objective=f"{__name__}:padded",
        row_mixing="replica",  # without a trial of the objective
        global_batch=16,
        accumulation=1,
    )
    found, expected = [], []
    for changes in (
        {"accumulation": 2},
        {"strategy": "mesh", "zero": 3, "recompute": "block", "accumulation": 4},
    ):
        keras.backend.clear_session()
        job = build.compose(config.replace(**changes), build.start_runtime(config.replace(**changes), Cluster()))
        if not expected:
            micro_batches = job.iterators(0)[0]
            x, y, w = (tf.concat(parts, 0) for parts in zip(*(next(micro_batches) for _ in range(2)), strict=True))
            with tf.GradientTape() as tape:
                scores = padded(job.model(x, training=True), y, w)
                loss = tf.reduce_sum(scores.losses * scores.weights) / tf.reduce_sum(scores.weights)
                balance = tf.add_n(job.model.losses)
                total = loss + balance
            expected = [
                float(loss),
                float(balance),
                float(
                    tf.linalg.global_norm(tape.gradient(total, [each.value for each in job.model.trainable_variables]))
                ),
            ]
        output = job.step(job.iterators(0), 1)
        found.append([output.means["loss"], output.means["regularization"], output.gradient_norm])
    np.testing.assert_allclose(found, [expected] * len(found), rtol=1e-5)


def test_half_precision_routes_in_float32():
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        model = transformer(x_spec=tf.TensorSpec((8,), tf.int32), num_outputs=11, width=16, heads=2, experts=4)
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    tokens = np.zeros((2, 8), "int32")
    assert model(tokens).dtype == tf.float32 and all(loss.dtype == tf.float32 for loss in model.losses)
    assert (
        model.get_layer("block_00_router").output.dtype == "float32"
        and model.get_layer("block_00_experts_up").output.dtype == "bfloat16"
    )


@pytest.mark.parametrize(
    "options, words",
    [
        ({"experts": 1}, ["experts=1", "at least 2"]),
        ({"experts": 4, "experts_per_token": 5}, ["experts_per_token=5", "experts=4"]),
        ({"experts": 4, "capacity": 0}, ["capacity=0"]),
        ({"experts": 4, "balance": -1.0}, ["balance=-1"]),
        ({"capacity": 2.0}, ["capacity", "without experts"]),
        ({"experts_per_token": 2}, ["experts_per_token", "without experts"]),
    ],
)
def test_refused(options, words):
    with pytest.raises(ConfigError) as error:
        transformer(x_spec=tf.TensorSpec((8,), tf.int32), num_outputs=11, **options)
    assert all(word in str(error.value) for word in words), error.value


def test_parameters_follow_the_closed_form():
    def count(**options):
        model = transformer(
            x_spec=tf.TensorSpec((8,), tf.int32), num_outputs=11, layers=1, width=16, heads=2, **options
        )
        return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)

    assert count(experts=4) - count() == 4 * (8 * 16**2 + 6 * 16) - (8 * 16**2 + 5 * 16)
