"""Metrics that a layer updates in its call."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.keras_fit.test_forward import distribute  # noqa: F401 - a fixture
from tfdist.artifacts.hidden_state import metrics_in_layers
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit.metrics_inside import Additions


class Measured(keras.layers.Layer):
    """Counts and adds up its rows."""

    def __init__(self, **options):
        super().__init__(**options)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        self.mean.update_state(keras.ops.sum(x, axis=1))
        return x


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_what_a_metric_is_given_is_collected_and_not_kept(policy):
    layer = Measured(dtype=policy)
    layer.mean.total.assign(0.1)  # which half precision would round
    before = [float(variable) for variable in layer.mean.variables]
    additions = Additions(metrics_in_layers(layer))

    @tf.function
    def forward(x):
        with additions.collected():
            layer(x)
        return additions.values

    assert [float(value) for value in forward(tf.ones([4, 3]))] == [12.0, 4.0]
    np.testing.assert_array_equal([float(variable) for variable in layer.mean.variables], before)


class Given(keras.layers.Layer):
    """Gives its metric something that is made of the rows."""

    def __init__(self, made, kind=keras.metrics.Sum, beside=None):
        super().__init__()
        self.made, self.beside = made, beside
        (self if beside is None else beside).metric = kind(name="given")

    def call(self, x):
        made = self.made(x)
        metric = (self if self.beside is None else self.beside).metric
        metric.update_state(*(made if isinstance(made, tuple) else (made,)))
        return x


ops, metrics = keras.ops, keras.metrics
OF_ROWS = {
    "rows": lambda x: x,
    "flat": lambda x: ops.reshape(x, [-1]),
    "halves": lambda x: ops.reshape(x, [-1, 6]),
    "turned": ops.transpose,
    "some": lambda x: tf.boolean_mask(x, x > 0.5),
}
OF_NO_ROWS = {
    "mean of columns": lambda x: ops.mean(x, axis=0),
    "kept dim": lambda x: ops.mean(x, axis=0, keepdims=True),
    "one number": lambda x: ops.reshape(ops.sum(x), [1]),
    "nothing of the rows": lambda x: ops.ones([3]),
}


@pytest.mark.parametrize("rows", [4, None])
@pytest.mark.parametrize("name", [*OF_ROWS, *OF_NO_ROWS])
def test_a_metric_needs_values_of_rows(distribute, name, rows):  # noqa: F811
    """Other values would be those of a worker's own rows, and neither a sum nor a mean over all of them."""
    layer = Given({**OF_ROWS, **OF_NO_ROWS}[name])
    model = keras.Sequential([keras.Input((3,)), layer])
    distribute(model)
    step = tf.function(lambda x: model(x), autograph=False)
    spec = tf.TensorSpec([rows, 3])
    if name in OF_NO_ROWS:
        with pytest.raises(ConfigError, match="The metric given is updated .* whose number does not follow the rows"):
            step.get_concrete_function(spec)
    else:
        step.get_concrete_function(spec)
        assert float(layer.metric.total) == 0


RIGHT_MEANS = {
    "weighted rows": (metrics.Mean, lambda x: (x, x[:, :1])),
    "pairs": (metrics.MeanSquaredError, lambda x: (x[:, :1], x[:, 1:])),
    "numbers of which it takes no mean": (metrics.RootMeanSquaredError, lambda x: (x[:, 0], x[:, 1])),
}
MEANS_OVER_ROWS = {
    "turned": (metrics.Mean, ops.transpose),
    "one weight": (metrics.Mean, lambda x: (x, 0.5)),
    "numbers": (metrics.MeanSquaredError, lambda x: (x[:, 0], x[:, 1])),
}


@pytest.mark.parametrize("name", [*RIGHT_MEANS, *MEANS_OVER_ROWS])
def test_a_mean_counts_rows(distribute, name):  # noqa: F811
    """Otherwise a worker with few rows counts as much as one with many."""
    kind, made = {**RIGHT_MEANS, **MEANS_OVER_ROWS}[name]
    distribute(model := keras.Sequential([keras.Input((3,)), Given(made, kind)]))
    step = tf.function(lambda x: model(x), autograph=False)
    if name in MEANS_OVER_ROWS:
        with pytest.raises(ConfigError, match="The metric given .* takes the mean over these rows .* whose first dim"):
            step.get_concrete_function(tf.TensorSpec([4, 3]))
    else:
        step.get_concrete_function(tf.TensorSpec([4, 3]))


@pytest.mark.parametrize("rows", [4, None])
def test_a_metric_that_keras_does_not_find_counts_the_rows_of_all_workers(distribute, rows):  # noqa: F811
    """In an object of the user's own."""
    for name in ("rows", "one number"):
        layer = Given({**OF_ROWS, **OF_NO_ROWS}[name], beside=types.SimpleNamespace())
        distribute(model := keras.Sequential([keras.Input((3,)), layer]))
        step = tf.function(lambda x, model=model: model(x), autograph=False, input_signature=[tf.TensorSpec([rows, 3])])
        if name in OF_NO_ROWS:
            with pytest.raises(ConfigError, match="whose number does not follow the rows"):
                step(tf.ones([4, 3]))
        else:
            step(tf.ones([4, 3]))
            assert float(layer.beside.metric.total) == 12


@pytest.mark.parametrize("average", ["micro", None])
def test_an_f_score_is_that_of_all_rows(distribute, average):  # noqa: F811
    half = tf.constant([[0.9, 0.2, 0.4], [0.1, 0.3, 0.2]])
    x = tf.concat([half, half], 0)  # the other worker has the same rows

    def kind(name):
        return metrics.F1Score(average, 0.35, name)

    def made(x):
        return ops.cast(x[:, ::-1] > 0.25, "float32"), x

    layer, expected = Given(made, kind), kind("expected")
    distribute(model := keras.Sequential([keras.Input((3,)), layer]))
    for _ in range(2):
        model(x)
        expected.update_state(*made(x))
    np.testing.assert_array_equal(layer.metric.result(), expected.result())


def test_what_an_f_score_is_given_first_is_collected():
    """Keras makes its variables then."""
    score = metrics.F1Score()
    additions = Additions([score])
    with additions.collected():
        score.update_state(tf.eye(3), tf.ones([3, 3]) - tf.eye(3))
    assert [float(tf.reduce_sum(value)) for value in additions.values] == [0, 6, 3, 3]
    assert [float(tf.reduce_sum(variable)) for variable in score.variables] == [0, 0, 0, 0]


def test_a_single_number_is_refused_as_one(distribute):  # noqa: F811
    model = keras.Sequential([keras.Input((3,)), Given(ops.mean)])
    distribute(model)
    with pytest.raises(ConfigError, match="with a single number"):
        model(tf.ones([4, 3]))


def test_also_where_the_step_runs_eagerly(distribute):  # noqa: F811
    for name, of in ({"kept dim": OF_NO_ROWS} | {"flat": OF_ROWS}).items():
        model = keras.Sequential([keras.Input((3,)), Given(of[name], keras.metrics.Mean)])
        distribute(model)
        if of is OF_ROWS:
            model(tf.ones([4, 3]))
        else:
            with pytest.raises(ConfigError, match="whose number does not follow the rows"):
                model(tf.ones([4, 3]))
