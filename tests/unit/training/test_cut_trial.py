"""What a trial of a model before and after it is cut makes of differences; with processes: tests/parity."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.control.exit_codes import ConfigError
from tfdist.training.parallel.cut_trial import CutTrial
from tfdist.training.parallel.tensor import VariablePart, cut

MICRO_BATCH = 6
RUNTIME = SimpleNamespace(
    all_gather=lambda array: array,
    group=lambda axis: SimpleNamespace(index=1, size=2, all_reduce=lambda x: 2 * x),
    mesh=SimpleNamespace(describe=lambda: "model=2", degree=lambda *axes: 1),
)


def rows_of_x(number):
    return np.random.default_rng(0).normal(size=(number, 4)).astype("float32")


def _model(*more) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6, activation="tanh", name="up"), *more, keras.layers.Dense(3, name="down")]
    return keras.Sequential([keras.Input((4,)), *layers])


def _trial(model: keras.Model) -> CutTrial:
    return CutTrial(RUNTIME, model, rows_of_x, micro_batch=MICRO_BATCH, sequence_parallel=False)


def _scale(layer: keras.Layer, by: float) -> None:
    """As if the layer gave other numbers once the model is cut."""
    inner = layer.call
    layer.call = lambda x, training=False: by * inner(x, training=training)


def test_other_outputs_are_refused():
    model = _model()
    trial = _trial(model)
    model.get_layer("down").bias.assign([0.0, 0.5, 0.0])
    with pytest.raises(ConfigError, match=r"--mesh=model=2 cuts layers of sequential.*its outputs differ"):
        trial.check({}, frozenset())


def test_other_gradients_are_refused_but_for_parts_that_are_summed():
    model = _model()
    trial, up = _trial(model), model.get_layer("up")
    inner = up.call
    # half of the gradient, as of half of the positions
    up.call = lambda x, training=None: 0.5 * inner(x) + keras.ops.stop_gradient(0.5 * inner(x))
    with pytest.raises(ConfigError, match=r"the gradient of \S*up/kernel differs"):
        trial.check({}, frozenset())
    assert trial.check({}, frozenset(id(variable) for variable in up.trainable_variables)) == 0


def test_all_workers_add_up_whatever_one_of_them_finds(monkeypatch):
    """Else one would wait for the other, which refuses what it has found in the outputs."""
    model, summed = _model(), []
    group = SimpleNamespace(index=1, size=2, all_reduce=lambda x: summed.append(x) or x)
    monkeypatch.setattr(RUNTIME, "group", lambda axis: group)
    trial, partial = _trial(model), frozenset(map(id, model.get_layer("up").trainable_variables))
    model.get_layer("down").bias.assign([0.0, 0.5, 0.0])
    with pytest.raises(ConfigError, match="outputs differ"):
        trial.check({}, partial)
    assert len(summed) == 2


class Summed(keras.layers.Layer):
    """Adds a loss: a mean over what it sees, or of half of that twice the mean over half of it."""

    halves = False

    def call(self, x):
        parts = keras.ops.split(x, 2, -1) if self.halves else [x]
        means = [keras.ops.mean(keras.ops.square(each)) for each in parts]
        # The value stays, of a part of it.
        self.add_loss(sum(means) / len(means) + (len(means) - 1) * (means[0] - keras.ops.stop_gradient(means[0])))
        return x


def test_gradients_of_added_losses_are_looked_at():
    model = _model(Summed())
    trial = _trial(model)
    assert trial.check({}, frozenset()) == 0
    model.layers[-2].halves = True
    with pytest.raises(ConfigError, match=r"the gradient of the losses that layers add of \S*up/kernel differs"):
        trial.check({}, frozenset())


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_nothing_hides_behind_an_initial_0_nor_in_half_precision(policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = _model(Centered())
    finally:
        keras.config.set_dtype_policy("float32")
    model.get_layer("down").kernel.assign(np.zeros([6, 3]))
    trial, centered = _trial(model), model.layers[-2]
    assert trial.check({}, frozenset()) == 0
    assert not model.get_layer("down").kernel.numpy().any()
    _scale(centered, 1.002)
    with pytest.raises(ConfigError, match="its outputs differ"):
        trial.check({}, frozenset())


def _beside(make_large, between):
    """A model with a large number beside a small one, which is behind `between`."""
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    up, down = keras.layers.Dense(6, activation="tanh", name="up"), keras.layers.Dense(1, name="down")
    return make_large(x, down(between(up(x))))


LARGE = {
    "channel": lambda x, y: keras.Model(
        x, keras.layers.Concatenate()([keras.layers.Rescaling(1e6)(keras.layers.Dense(1)(x)), y])
    ),
    "output": lambda x, y: keras.Model(x, [keras.layers.Rescaling(1e6)(keras.layers.Dense(1)(x)), y]),
}


def _half_of_the_gradient(y):
    return 0.5 * y + keras.ops.stop_gradient(0.5 * y)


@pytest.mark.parametrize("name", LARGE)
def test_nothing_hides_beside_large_numbers(name):
    """A price in dollars beside a number of rooms, in other outputs or in channels of one."""
    model = _beside(LARGE[name], layer := Centered())
    trial = _trial(model)
    assert trial.check({}, frozenset()) == 0
    inner = layer.call
    for change, words in (
        (lambda y: 1.002 * y, "its outputs differ"),
        (_half_of_the_gradient, r"gradient of \S*up/kernel"),
    ):
        layer.call = lambda x, training=False, change=change: change(inner(x, training=training))
        with pytest.raises(ConfigError, match=words):
            trial.check({}, frozenset())


class LargeLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(1e6 * keras.ops.mean(keras.ops.square(x)))
        return x


def test_no_added_loss_hides_beside_a_large_one():
    model = _model(Summed(), LargeLoss())
    trial = _trial(model)
    assert trial.check({}, frozenset()) == 0
    model.layers[-3].halves = True
    with pytest.raises(ConfigError, match=r"the gradient of the losses that layers add of \S*up/kernel differs"):
        trial.check({}, frozenset())


class Rounded(keras.layers.Layer):
    """Casts to half precision by itself."""

    def call(self, x):
        return x + keras.ops.cast(keras.ops.tanh(keras.ops.cast(x, "bfloat16")), "float32")


def test_a_cast_of_the_users_hides_no_five_percent():
    model = _model(Rounded(), layer := Centered())
    trial = _trial(model)
    assert trial.check({}, frozenset()) == 0
    _scale(layer, 1.05)
    with pytest.raises(ConfigError, match="its outputs differ"):
        trial.check({}, frozenset())


class InFunction(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        seed = keras.random.SeedGenerator(1)
        self.seed, self.drop = (
            seed,
            tf.function(
                lambda x: keras.random.dropout(x, 0.5, seed=seed),
                input_signature=[tf.TensorSpec([None, 6])],
                autograph=False,
            ),
        )

    def call(self, x, training=False):
        return self.drop(x) if training else x


def test_functions_that_layers_hold_keep_nothing_of_a_trial():
    model = _model(InFunction())
    assert _trial(model).check({}, frozenset()) == 0
    dropped = (model.layers[-2](tf.ones([32, 6]), training=True).numpy() == 0).sum()
    assert 48 < dropped < 144


def test_numbers_that_are_always_the_same_are_looked_at():
    """As of a fixed projection."""

    class Projected(keras.layers.Layer):
        def call(self, x):
            return x * keras.random.normal((x.shape[-1],), seed=self.seed)

    layer = Projected()
    layer.seed = 7
    model = _model(layer)
    trial = _trial(model)
    layer.seed = 8  # as other numbers of a part
    with pytest.raises(ConfigError, match="its outputs differ"):
        trial.check({}, frozenset())


class Centered(keras.layers.Layer):
    """In training, and where what it draws says so."""

    def call(self, x, training=False):
        drawn = keras.random.uniform(()) if training else 1.0
        return keras.ops.where(drawn < 0.5, x - keras.ops.mean(x, -1, keepdims=True), x)


def test_what_is_another_in_training_only_is_refused():
    """Random layers are tried, too: constants take the place of what they draw. The trial changes no variable."""
    model = _model(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), Centered())
    trial, centered = _trial(model), model.layers[-2]
    before = [variable.numpy() for variable in model.variables]
    assert trial.check({}, frozenset()) == 0
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    inner = centered.call
    centered.call = lambda x, training=False: keras.ops.concatenate(  # what it does with halves of x
        [inner(half, training=training) for half in keras.ops.split(x, 2, -1)], -1
    )
    with pytest.raises(ConfigError, match="something else in training than whole: its outputs differ"):
        trial.check({}, frozenset())


def test_a_part_has_its_part_of_the_gradient():
    model = _model()
    trial, down = _trial(model), model.get_layer("down")
    part = VariablePart((6, 3), 0, (np.arange(3), np.arange(3)), 1, "model")  # the wrong half
    with pytest.raises(ConfigError, match=r"the gradient of \S*down/kernel differs"):
        trial.check({id(down.kernel): part}, frozenset())


def test_logits_may_come_in_parts():
    model = _model()
    model.get_layer("up").trainable = False  # whose gradient would be the sum over the workers
    trial, down, group = _trial(model), model.get_layer("down"), RUNTIME.group("model")
    parts = cut(keras_layers.stored_kernel(down), 1, group) | cut(down.bias, 0, group)
    assert trial.check(parts, frozenset()) == 3


def test_layers_that_no_longer_fit_are_a_sentence():
    model = _model()
    trial = _trial(model)
    model.get_layer("down").call = lambda x, training=None: x @ np.zeros((5, 3), "float32")
    with pytest.raises(ConfigError, match=r"its layers no longer fit \([^()\n]+"):
        trial.check({}, frozenset())


def test_the_cause_is_told_also_of_what_autograph_has_converted():
    model = _model()
    trial = _trial(model)

    @tf.function
    def call(x, training=None):
        return x @ np.zeros((5, 3), "float32")

    model.get_layer("down").call = call
    with pytest.raises(ConfigError, match=r"its layers no longer fit \(\w+Error: \w+"):
        trial.check({}, frozenset())


class Grouped(keras.layers.Layer):
    """Takes rows in groups of three."""

    def call(self, x):
        return keras.ops.reshape(keras.ops.reshape(x, (-1, 3, x.shape[-1])), (-1, x.shape[-1]))


class Scaled(keras.layers.Layer):
    """By the root of weights that are not below 0, by a constraint or by what else keeps them so."""

    def __init__(self, constraint=None):
        super().__init__()
        self.factor = self.add_weight(shape=(6,), initializer=keras.initializers.Constant(0.1), constraint=constraint)

    def call(self, x):
        return x * keras.ops.sqrt(self.factor)


class Checked(Scaled):
    def call(self, x):
        tf.debugging.assert_non_negative(self.factor)
        return super().call(x)


@pytest.mark.parametrize("make", [Grouped, Scaled, lambda: Scaled("non_neg"), Checked, lambda: Checked("non_neg")])
def test_models_that_do_not_run_as_they_are_tried_first_are_tried_again(make):
    model = _model(make(), layer := Centered())
    trial = _trial(model)
    assert trial.check({}, frozenset()) == 0
    _scale(layer, 1.002)
    with pytest.raises(ConfigError, match="its outputs differ"):
        trial.check({}, frozenset())


def test_a_model_that_cannot_be_tried_is_refused():
    class Fails(keras.layers.Layer):
        def call(self, x):
            tf.debugging.assert_less(keras.ops.max(x), -100.0, message="so many")
            return x

    with pytest.raises(
        ConfigError, match="cuts layers of sequential.* cannot be tried .*so many.*the 6 rows of a micro"
    ):
        _trial(_model(Fails()))


def test_numbers_that_are_finite_whole_or_cut_only_are_other_numbers():
    model = _model(layer := Centered())
    trial = _trial(model)
    _scale(layer, float("nan"))
    with pytest.raises(ConfigError, match="its outputs differ"):
        trial.check({}, frozenset())


def test_a_worker_on_which_the_cut_model_fails_waits_for_nobody(monkeypatch):
    """The others may wait for it inside the model."""
    model = _model(layer := Centered())
    trial, inner, asked = _trial(model), layer.call, []
    monkeypatch.setattr(RUNTIME, "all_gather", lambda array: asked.append(array) or array)

    def fails(x, training=False):
        asked.clear()  # what comes before the run may be a collective: all workers trace
        with tf.control_dependencies([tf.debugging.assert_less(keras.ops.max(x), -100.0, message="so many")]):
            return inner(x, training=training)

    layer.call = fails
    with pytest.raises(ConfigError, match="it fails .*so many"):
        trial.check({}, frozenset())
    assert len(asked) == 1  # whether all could trace


def test_what_is_random_is_not_tried():
    class Noise(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(3)

        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x), seed=self.seed)

    assert _trial(_model(Noise())).check({}, frozenset()) in (None, 0)
