"""The step on one device and on two virtual devices, against plain Keras and against closed forms."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.marks import slow_but
from tfdist.compat.keras_random import global_seed_generator, made_global_seed_generator, use_generator
from tfdist.config import OptimizerConfig, PrecisionConfig
from tfdist.config.optimizers import OPTIMIZERS
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.runtime.one_device import OneDevice
from tfdist.training.measured_step import MeasuredStep
from tfdist.training.objectives import classification
from tfdist.training.optimizer import FusedAdam, make_optimizer, switch_off_reduction
from tfdist.training.precision import LossScale, set_policy
from tfdist.training.schedule import Schedule
from tfdist.training.seeds import reseed, seed_states, with_generator
from tfdist.training.step import TrainStep
from tfdist.training.step_options import StepOptions
from tfdist.training.step_output import Requests

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(96, 6)).astype("float32")
Y = RANDOM.integers(0, 4, 96).astype("int32")
W = np.ones(96, "float32")
INPUTS = tf.TensorSpec([None, 6])


@pytest.fixture(autouse=True)
def _float32_policy():
    yield
    keras.config.set_dtype_policy("float32")


def make_step(
    *,
    optimizer="sgd",
    precision="float32",
    growth_steps=2000,
    scale=32768.0,
    batch=16,
    accumulation=1,
    dropout=0.0,
    objective=None,
    model=None,
    generator=False,
    inputs=INPUTS,
    rule=None,
    **options,
):
    keras.utils.set_random_seed(1)
    config = PrecisionConfig(precision=precision, loss_scale_growth_steps=growth_steps, loss_scale_initial=scale)
    set_policy(config)
    model = model or keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(4, dtype="float32"),
        ]
    )
    model = with_generator(model, own_objective=False) if generator else model
    rule = rule or make_optimizer(OptimizerConfig(optimizer=optimizer), Schedule("constant", 0.1, 0, 10, 0.1, 0.0))
    rule.build(model.trainable_variables)
    spec = (inputs, tf.TensorSpec(inputs.shape[:1], tf.int32), tf.TensorSpec(inputs.shape[:1]))
    plan = BatchPlan(batch, accumulation, 1)
    return (MeasuredStep if options.get("phase_every") else TrainStep)(
        OneDevice(),
        model,
        rule,
        objective or classification(),
        LossScale(config),
        StepOptions(plan, 0, **options),
        spec,
    )


def batches(size, x=X, y=Y, w=W):
    return [iter(tf.data.Dataset.from_tensor_slices((x, y, w)).repeat().batch(size, drop_remainder=False))]


def weights(step):
    return np.concatenate([value.ravel() for value in step.model.get_weights()])


def test_equals_plain_keras():
    step = make_step(optimizer="adamw")
    twin = keras.models.clone_model(step.model)
    twin.set_weights(step.model.get_weights())
    twin.compile(FusedAdam(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    output = step(batches(16), 12)
    history = twin.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(
        weights(step), np.concatenate([value.ravel() for value in twin.get_weights()]), atol=1e-6
    )
    assert output.means["loss"] == pytest.approx(np.mean(history), abs=1e-5)
    assert (output.step, output.weight, output.skipped, output.finite) == (12, 192, 0, True)


def test_a_bad_row_that_nobody_looks_up_makes_the_weights_bad():
    """Of a table that plain SGD updates by the row, and which is read where it is."""
    table = keras.layers.Embedding(20, 4)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(4)])
    step = make_step(model=model, inputs=tf.TensorSpec([16, 3], tf.int32))
    x = np.random.default_rng(0).integers(0, 19, (96, 3)).astype("int32")
    whole = [iter(tf.data.Dataset.from_tensor_slices((x, Y, W)).repeat().batch(16, drop_remainder=True))]
    assert step(whole, 3).finite and step(whole, 1).finite
    table.embeddings.value.scatter_update(tf.IndexedSlices(tf.constant([[1.0, np.inf, 1.0, 1.0]]), tf.constant([19])))
    output = step(whole, 1)
    assert np.isfinite(output.means["loss"]) and not output.finite


def test_accumulation_is_the_same_step():
    whole, parts = make_step(), make_step(accumulation=4)
    whole(batches(16), 6)
    parts(batches(4), 6)
    np.testing.assert_allclose(weights(whole), weights(parts), atol=1e-6)


def test_weights_count_over_the_whole_global_batch():
    """Half of the samples weigh nothing, unevenly over micro-batches: as if only the others were there."""
    w = np.zeros(96, "float32")
    w[[0, 1, 2, 3, 4, 9, 13, 14]] = 1
    some, alone = make_step(accumulation=4), make_step(batch=8)
    some(batches(4, w=w), 1)
    alone(batches(8, X[w > 0], Y[w > 0], np.ones(8, "float32")), 1)
    np.testing.assert_allclose(weights(some), weights(alone), atol=1e-6)


def test_clipping_is_of_the_whole_gradient():
    free, clipped = make_step(), make_step(clip_norm=0.01, accumulation=2)
    start = weights(free)
    norm = free(batches(16), 1).gradient_norm
    assert clipped(batches(8), 1).gradient_norm == pytest.approx(norm, rel=1e-5)
    assert np.linalg.norm(weights(free) - start) == pytest.approx(0.1 * norm, rel=1e-4)
    assert np.linalg.norm(weights(clipped) - start) == pytest.approx(0.1 * 0.01, rel=1e-3)


@pytest.mark.parametrize("number, optimizer", slow_but(enumerate(OPTIMIZERS), (2, "adam")))
def test_an_update_compiled_by_xla_is_the_same(number, optimizer):
    """As on GPUs."""
    clip_norm, precision = [(0.0, "float32"), (0.1, "float16")][number % 2]
    if optimizer == "muon":  # 1e-7 after a step in float16, too; but a weight that rounds the other way there changes
        precision = "float32"  # the next gradient, of which Muon's iteration makes 1e-5 (on a Xeon, not on an EPYC)
    found = []
    for compiled in (False, True):
        # Each variable is a part of the program that XLA compiles: a matrix and a vector are enough.
        keras.utils.set_random_seed(1)
        set_policy(PrecisionConfig(precision=precision))
        in_float32 = keras.layers.Activation("linear", dtype="float32")
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), in_float32])
        step = make_step(
            model=model,
            optimizer=optimizer,
            precision=precision,
            clip_norm=clip_norm,
            jit_compile=True,
            compiled_update=compiled,
        )
        output = step(batches(16), 5)
        found.append((weights(step), output.means["loss"], output.gradient_norm))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1][1:], found[0][1:], rtol=1e-5)


def test_any_n_is_one_trace():
    step = make_step()
    iterators = batches(16)
    for n in (1, 2, 7):
        step(iterators, n)
    assert step._function.experimental_get_tracing_count() == 1
    assert int(step.counter) == 10


@pytest.mark.slow
def test_float16_without_overflow_equals_keras_loss_scale_optimizer():
    step = make_step(precision="float16", growth_steps=3, optimizer="momentum")
    twin = keras.models.clone_model(step.model)
    twin.set_weights(step.model.get_weights())
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=32768.0, dynamic_growth_steps=3
    )
    twin.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    output = step(batches(16), 6)
    twin.fit(X, Y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    twin_scale = float(optimizer.dynamic_scale)
    np.testing.assert_allclose(
        weights(step), np.concatenate([value.ravel() for value in twin.get_weights()]), atol=2e-4
    )
    assert output.loss_scale == twin_scale == 32768.0 * 4
    assert output.skipped == 0


def test_float16_overflow_skips_and_halves():
    x = X.copy()
    x[20] = 1e30  # in the second batch of 16
    step = make_step(precision="float16", scale=1024.0, optimizer="momentum")
    iterators = batches(16, x)
    assert step(iterators, 1).loss_scale == 1024
    before = weights(step)
    output = step(iterators, 1)
    assert (output.skipped, output.loss_scale, output.finite) == (1, 512, True)
    np.testing.assert_array_equal(weights(step), before)
    assert (int(step.optimizer.iterations), int(step.counter)) == (1, 2)
    assert step(iterators, 3).skipped == 0
    assert np.isfinite(weights(step)).all() and (weights(step) != before).any()


def test_nan_is_reported_or_skipped():
    x = X.copy()
    x[20] = np.nan
    assert not make_step()(batches(16, x), 3).finite
    step = make_step(skip_non_finite=True)
    output = step(batches(16, x), 6)
    assert output.skipped == 1 and np.isfinite(weights(step)).all()


def test_signals_come_back():
    step = make_step()
    assert step(batches(16), 2).signals == {"save": False, "stop": False, "leave": False}
    assert step(batches(16), 2, Requests(save=True)).signals == {"save": True, "stop": False, "leave": False}
    assert step(batches(16), 2, Requests(leave=True)).signals == {"save": False, "stop": False, "leave": True}


def test_dropout_masks_depend_on_seed_step_micro_batch_and_replica_only():
    step = make_step(dropout=0.5)
    states = seed_states(step.model)
    assert len(states) == 1

    def state(*numbers):
        reseed(states, numbers[0], *(tf.constant(number) for number in numbers[1:]))
        return tuple(states[0].numpy())

    seen = [
        state(seed, at, micro, replica) for seed in (0, 1) for at in (0, 1) for micro in (0, 1) for replica in (0, 1)
    ]
    assert len(set(seen)) == len(seen)
    assert state(1, 1, 1, 1) == seen[-1]


class Noisy(keras.layers.Layer):
    """Draws without a generator."""

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


def test_what_is_drawn_without_a_generator_depends_on_the_same():
    """So that workers draw others, and a run that goes on the same. Of Keras' own layers none is made for it."""
    keras.utils.set_random_seed(0)
    model = with_generator(
        keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), Noisy()]), own_objective=False
    )
    states = seed_states(model)
    of_a_model = states[:1]

    def drawn(*numbers):
        reseed(states, 7, *(tf.constant(number) for number in numbers))
        return tuple(model.layers[-1](tf.zeros([2, 3])).numpy().ravel())

    seen = [drawn(*numbers) for numbers in np.ndindex(2, 2, 2)]
    assert len(set(seen)) == len(seen) and drawn(1, 1, 1) == seen[-1]
    reseed(of_a_model, 7, *(tf.constant(number) for number in (1, 1, 1)))
    assert states[0].numpy().tolist() == of_a_model[0].numpy().tolist()
    use_generator(None)
    assert len(seed_states(with_generator(keras.Sequential(model.layers[:1]), own_objective=False))) == 1


def test_a_thread_draws_from_the_generator_that_it_is_given():
    """For Keras each has its own, whose variable a replica could not make."""
    keras.utils.set_random_seed(0)
    generator, found = made_global_seed_generator(), []

    def draw(given):
        use_generator(given)
        keras.random.normal([2])
        found.append(global_seed_generator())

    for given in (generator, None):
        thread = threading.Thread(target=draw, args=(given,))
        thread.start()
        thread.join()
    assert found[0] is generator and found[1] is not generator


def test_optimizer_options():
    schedule = Schedule("constant", 0.1, 0, 10, 0.1, 0.0)
    for name in ("sgd", "momentum", "adam", "adamw", "lion", "lamb", "adafactor", "muon"):
        make_optimizer(OptimizerConfig(optimizer=name), schedule)
    assert make_optimizer(OptimizerConfig(optimizer_args="beta_2=0.95"), schedule).beta_2 == 0.95
    for text, word in (("clipnorm=1.0", "--clip_norm"), ("betta=1", "betta"), ("use_ema=True", "--ema")):
        with pytest.raises(ConfigError, match=word):
            make_optimizer(OptimizerConfig(optimizer_args=text), schedule)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "lion", "lamb", "adafactor", "muon"])
def test_every_optimizer_learns(name):
    step = make_step(optimizer=name)
    iterators = batches(16)
    first = step(iterators, 6).means["loss"]
    for _ in range(3):
        last = step(iterators, 6).means["loss"]
    assert last < first


def test_excluded_variables_do_not_decay():
    keras.utils.set_random_seed(1)
    layer = keras.layers.Dense(4, bias_initializer="ones")
    layer.build((None, 3))
    rule = make_optimizer(
        OptimizerConfig(optimizer="sgd", weight_decay=0.5), Schedule("constant", 0.1, 0, 10, 0.1, 0.0)
    )
    rule.build(layer.trainable_variables)
    kernel, bias = layer.get_weights()
    rule.apply([tf.zeros_like(kernel), tf.zeros_like(bias)], layer.trainable_variables)
    np.testing.assert_allclose(layer.get_weights()[0], kernel * (1 - 0.1 * 0.5), rtol=1e-6)
    np.testing.assert_array_equal(layer.get_weights()[1], bias)


@pytest.mark.slow
def test_what_is_skipped_leaves_nothing_and_is_not_shown():
    """Of four micro-batches one has a NaN: nothing of all four stays, and the loss that is shown is that of the other
    steps.
    """

    class Counts(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mine = tf.Variable(0.0, trainable=False)

        def build(self, shape):
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.seen.assign(self.seen + keras.ops.sum(x))
            self.mine.assign_add(1.0)
            return x

    def run(x, steps, **options):
        keras.utils.set_random_seed(1)
        layer = Counts()
        model = keras.Sequential(
            [keras.layers.Input((6,)), layer, keras.layers.BatchNormalization(), keras.layers.Dense(4)]
        )
        rule = make_optimizer(OptimizerConfig(optimizer="sgd"), Schedule("constant", 0.1, 0, 10, 0.1, 0.0))
        rule.build(model.trainable_variables)
        spec = (tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int32), tf.TensorSpec([None]))
        step = TrainStep(
            OneDevice(),
            model,
            rule,
            classification(),
            LossScale(PrecisionConfig()),
            StepOptions(BatchPlan(16, 4, 1), 0, **options),
            spec,
        )
        output = step(batches(4, x, Y[: len(x)], W[: len(x)]), steps)
        return [*(variable.numpy() for variable in model.variables), layer.mine.numpy()], output

    bad = X[:48].copy()
    bad[16 + 9] = np.nan
    found, output = run(bad, 3, skip_non_finite=True)
    expected, reference = run(np.concatenate([X[:16], X[32:48]]), 2)  # labels of the second batch are others
    assert (output.skipped, output.weight, reference.weight) == (1, 32, 32) and np.isfinite(output.means["loss"])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)  # sums of what was seen
    assert found[-1] == expected[-1] == 8
    for value, wanted in zip(found[3:5], expected[3:5], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    only, output = run(np.full_like(X[:16], np.nan), 2, skip_non_finite=True)
    assert (
        output.skipped == 2
        and output.weight == 0
        and np.isnan(output.means["loss"])
        and all(np.isfinite(value).all() for value in only)
    )


def test_a_loss_on_which_nothing_depends_is_refused():
    step = make_step(objective=lambda outputs, y, w: classification()(tf.stop_gradient(outputs), y, w))
    with pytest.raises(ConfigError, match="depends on none of the model's trainable variables"):
        step(batches(16), 1)


class Uses(keras.layers.Dense):
    """Has a weight more than it uses."""

    def build(self, input_shape):
        super().build(input_shape)
        self.spare = self.add_weight(name="spare", shape=(3,), initializer="ones")


@pytest.mark.parametrize("options", [{}, {"accumulation": 2, "clip_norm": 0.1}, {"jit_compile": True}], ids=str)
def test_a_variable_without_a_gradient_is_left_as_keras_leaves_it(options):
    """Not decayed, either, nor are its slots changed; its moving average is itself."""

    def rule():
        optimizer = FusedAdam(0.01, weight_decay=1.0, use_ema=True, ema_momentum=0.9)
        return switch_off_reduction(optimizer)

    def network():
        inputs = keras.Input((6,))
        hidden = Uses(8, name="hidden")(inputs)
        outputs = keras.layers.Dense(4, name="used")(hidden), keras.layers.Dense(2, name="unused")(hidden)
        return keras.Model(inputs, outputs)

    def objective(outputs, y, w):
        return classification()(outputs[0], y, w)

    size = 16 // options.get("accumulation", 1)
    step = make_step(model=network(), objective=objective, rule=rule(), **options)
    twin, optimizer = keras.models.clone_model(step.model), rule()
    twin.set_weights(step.model.get_weights())
    outputs = [step(batches(size), 6), step(batches(size), 1)]
    for first in [*range(0, 96, 16), 0]:
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    Y[first : first + 16], twin(X[first : first + 16], training=True)[0], from_logits=True
                )
            )
        found = tape.gradient(loss, twin.trainable_variables)
        if "clip_norm" in options:
            found = tf.clip_by_global_norm(found, options["clip_norm"])[0]
        optimizer.apply(found, twin.trainable_variables)
    expected = [*twin.variables, *optimizer.variables]
    for own, other in zip([*step.model.variables, *step.optimizer.variables], expected, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), atol=2e-6, err_msg=own.path)
    assert np.array_equal(step.model.get_layer("hidden").spare.numpy(), np.ones(3))
    sentence = "The loss does not depend on 3 of the 7 trainable variables (hidden/spare, unused/kernel, unused/bias)"
    assert [len(output.news) for output in outputs] == [1, 0] and outputs[0].news[0].startswith(sentence)
