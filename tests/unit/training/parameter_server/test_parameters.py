"""Weights in pieces on parameter servers (here: twice the CPU of this process), and what a worker does with them."""

import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.training.test_unsaved_state_checks import HELD
from tfdist import build
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.data import input_pipeline
from tfdist.training.optimizer import make_optimizer
from tfdist.training.parameter_server.parameters import Parameters, place
from tfdist.training.parameter_server.remote_step import RemoteOptions, RemoteStep

DEVICES = ["/device:CPU:0", "/device:CPU:0"]
BASE = {
    "source": "digits",
    "model": "tests.parity.models:dense",
    "global_batch": 24,
    "steps": 6,
    "learning_rate": 0.01,
    "strategy": "one_device",
}


def make_job(**changes):
    keras.backend.clear_session()
    config = Config().replace(**{**BASE, **changes}).validate()
    return build.compose(config, build.start_runtime(config, Cluster()))


def make_step(job, piece_bytes=400, batch=None, kind=Parameters, **options):
    config = job.config
    parameters = kind(
        job.model,
        job.optimizer,
        job.schedule,
        lambda schedule: make_optimizer(config.optimizer, schedule),
        DEVICES,
        piece_bytes,
        on_step=lambda step: None,
    )
    parameters.push(0)
    batch = batch or input_pipeline.batch_fetch(
        job.train_split, input_pipeline.Reading(seed=config.run.seed, shuffle=True)
    )
    plan = dataclasses.replace(job.plan, replicas=options.pop("slices", 1))
    spec = build.train_dataset(config, job.train_split, job.plan, 0, 0).element_spec
    return RemoteStep(
        parameters,
        job.model,
        job.objective,
        batch,
        spec,
        RemoteOptions(plan, config.run.seed, config.optimizer.clip_norm, **options),
        added=None,
    )


def variables_of(job):
    return [*job.model.variables, *job.optimizer.variables]


def expected_after(job, steps):
    """The values of its variables after so many steps of its own, on one device; they are then what they were."""
    before = [variable.numpy() for variable in variables_of(job)]
    job.step(job.iterators(0), steps)
    after = [variable.numpy() for variable in variables_of(job)]
    for variable, value in zip(variables_of(job), before, strict=True):
        variable.assign(value)
    return after


def assert_near(job, expected, atol):
    for variable, value in zip(variables_of(job), expected, strict=True):
        if not variable.path.endswith("seed_generator_state"):
            np.testing.assert_allclose(variable.numpy(), value, rtol=0, atol=atol, err_msg=variable.path)


def call(step, function, *numbers):
    fetched = function(*(tf.constant(number, tf.int64) for number in numbers))
    return step.result(tuple(tensor.numpy() for tensor in fetched))


@pytest.mark.slow
def test_every_row_lies_somewhere_once_and_servers_hold_about_the_same():
    shapes = [(1000, 64), (64,), (), (3, 3, 8, 16), (5, 1000), (64, 10), (2, 100_000)]
    pieces = place(shapes, 3, 4096)
    for weight, shape in enumerate(shapes):
        own = [piece for piece in pieces if piece.weight == weight]
        assert [row for piece in own for row in range(piece.start, piece.stop)] == list(range(shape[0] if shape else 1))
    assert (
        len([piece for piece in pieces if piece.weight == 0]) == 3
        and len([piece for piece in pieces if piece.weight == 3]) == 1
    )
    load = [
        sum(
            np.prod(shapes[piece.weight][1:]) * (piece.stop - piece.start) for piece in pieces if piece.server == server
        )
        for server in range(3)
    ]
    assert max(load) < 1.5 * min(load)
    assert len(place(shapes, 3, 0)) == len(shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"optimizer": "momentum", "clip_norm": 0.5, "accumulation": 4},
        {"optimizer": "adamw", "weight_decay": 0.1, "ema": 0.9, "schedule": "cosine", "warmup_steps": 3},
        {"optimizer": "muon"},
        {"optimizer": "adamw", "weight_decay": 0.1, "ema": 0.9, "model": "tests.parity.models:towers"},
        {"optimizer": "adamw", "weight_decay": 0.5, "ema": 0.9, "model": "tests.parity.models:idle"},
        {"optimizer": "adam", "model": "mlp", "model_args": "widths=(16,),dropout=0.3"},
        {"optimizer": "sgd", "model": "tests.parity.models:noisy"},
    ],
    ids=str,
)
def test_updates_are_those_of_one_device(flags):
    """Weights, slots, averages and all: after three steps here, pushed again, and three more."""
    job = make_job(**flags)
    expected = expected_after(job, 6)
    whole = flags["optimizer"] == "muon"
    step = make_step(job, 0 if whole else 400)
    assert whole or len(step.parameters.pieces) > len(step.parameters.weights)
    for number in range(3):
        result = call(step, step.update, number, number * 24)
        assert (
            result.applied
            and result.finite
            and (result.version, result.staleness) == (number, 0)
            and result.sums[1] == 24
        )
    step.parameters.pull(3)
    for variable in step.parameters._values:
        variable.assign(tf.zeros_like(variable))  # so that only a push can bring them back
    step.parameters.push(3)
    for number in range(3, 6):
        call(step, step.update, number, number * 24)
    step.parameters.pull(6)
    assert_near(job, expected, 2e-6)


@pytest.mark.slow
def test_slices_add_up_to_the_batch():
    job = make_job(optimizer="sgd", global_batch=25)
    expected = expected_after(job, 2)
    step = make_step(job, slices=3)
    for number in range(2):
        results = [call(step, step.differentiate, number, number * 25, replica) for replica in range(3)]
        assert [result.version for result in results] == [number] * 3 and [result.sums[1] for result in results] == [
            8,
            8,
            9,
        ]
        norm, finite = step.apply(step.combine(results), 50.0, 25.0)
        assert finite and norm > 0
    assert not step.apply(step.combine(results), math.nan, 25.0)[1]  # of the loss alone
    step.parameters.pull(2)
    for found, value in zip(job.model.variables, expected, strict=False):  # after them come those of the optimizer
        np.testing.assert_allclose(found.numpy(), value, rtol=0, atol=1e-6)


def test_a_weight_on_which_the_loss_does_not_depend_stays_as_it_is():
    """In synchronous updates, too."""
    flags = {"optimizer": "adamw", "weight_decay": 0.5, "model": "tests.parity.models:idle"}
    job = make_job(**flags)
    expected = expected_after(job, 2)
    step = make_step(job)
    for number in range(2):
        step.apply(step.combine([call(step, step.differentiate, number, number * 24, 0)]), 48.0, 24.0)
    step.parameters.pull(2)
    for found, value in zip(job.model.variables, expected, strict=False):  # after them come those of the optimizer
        np.testing.assert_allclose(found.numpy(), value, rtol=0, atol=1e-6, err_msg=found.path)
    assert np.array_equal(job.model.get_layer("block_00_mlp_up").spare.numpy(), np.ones((3, 4)))
    assert "(start/kernel, start/bias, block_00_mlp_up/spare, block_01_mlp_up/spare)" in step.connected.news()[0]


class Aging(Parameters):
    """While a worker computes, others update the weights `updates` times."""

    updates = 3

    def read(self):
        weights, states = super().read()
        with tf.control_dependencies(weights):
            self.counter.assign_add(self.updates)
        return weights, states


@pytest.mark.slow
def test_a_gradient_that_is_too_stale_changes_nothing():
    job = make_job(optimizer="sgd")
    step = make_step(job, kind=Aging, max_staleness=2)
    before = job.model.get_weights()
    result = call(step, step.update, 0, 0)
    assert not result.applied and result.finite and result.staleness == 3
    assert step.parameters.counter.numpy() == 3
    step.parameters.pull(0)
    assert all(np.array_equal(a, b) for a, b in zip(before, job.model.get_weights(), strict=True))
    step = make_step(job, kind=Aging, max_staleness=3)
    assert call(step, step.update, 0, 0).applied and step.parameters.counter.numpy() == 4


@pytest.mark.slow
def test_staleness_divides_the_learning_rate():
    moves, job = [], make_job(optimizer="sgd")
    before = job.model.get_weights()
    for scaling in (False, True):
        job.model.set_weights(before)
        step = make_step(job, kind=Aging, staleness_scaling=scaling)
        call(step, step.update, 0, 0)
        step.parameters.pull(1)
        moves.append([after - weight for after, weight in zip(job.model.get_weights(), before, strict=True)])
    for plain, scaled in zip(*moves, strict=True):
        np.testing.assert_allclose(scaled, plain / 4, rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_what_is_not_finite_changes_nothing():
    job = make_job(optimizer="sgd")
    plain = input_pipeline.batch_fetch(job.train_split, input_pipeline.Reading(seed=0, shuffle=True))
    step = make_step(job, batch=lambda positions: (plain(positions)[0] * float("nan"), *plain(positions)[1:]))
    before = job.model.get_weights()
    result = call(step, step.update, 0, 0)
    assert not result.finite and not result.applied
    step.parameters.pull(0)
    assert all(np.array_equal(a, b) for a, b in zip(before, job.model.get_weights(), strict=True))


@pytest.mark.slow
def test_data_in_memory_is_part_of_the_function_and_python_is_refused():
    job = make_job()
    step = make_step(job)
    assert all(tensor.dtype == tf.resource for tensor in step.update.graph.external_captures)

    def python(positions):
        x = tf.numpy_function(lambda n: np.zeros([len(n), 8, 8, 1], "float32"), [positions], tf.float32)
        return (
            tf.ensure_shape(x, [None, 8, 8, 1]),
            tf.zeros_like(positions, tf.int32),
            tf.ones_like(positions, tf.float32),
        )

    with pytest.raises(ConfigError, match="runs Python"):
        make_step(job, batch=python)
    variable = tf.Variable(1.0)
    with pytest.raises(ConfigError, match="contains tables"):
        make_step(job, batch=lambda positions: (tf.zeros_like(positions, tf.float32) * variable,) * 3)


def test_skipped_steps_are_no_updates():
    """Steps go on, but the optimizer, and with it the learning rate, counts as on one device: here and after a
    resume.
    """
    job = make_job(optimizer="sgd", schedule="linear", learning_rate=0.1)
    step = make_step(job)
    for number in range(2):
        call(step, step.update, number, number * 24)
    step.parameters.skipped += 1
    step.parameters.pull(3)
    assert int(job.optimizer.iterations) == 2
    job.optimizer.iterations.assign(2)
    step.parameters.skipped = 0
    step.parameters.push(3)
    assert step.parameters.skipped == 1 and int(step.parameters.counter) == 3
    assert all(int(optimizer.iterations) == 2 for optimizer in step.parameters._optimizers.values())


class Halves(keras.layers.Dense):
    """Sets its weight in its own forward pass."""

    def call(self, inputs, training=None):
        if training:
            self.kernel.assign(self.kernel / 2)
        return super().call(inputs)


@pytest.mark.parametrize("function", ["update", "differentiate"])
@pytest.mark.parametrize("spectral", [True, False], ids=["SpectralNormalization", "own"])
def test_a_layer_that_sets_its_trainable_weight_is_refused(function, spectral):
    """The servers, which hold the weight, would not learn of it."""
    job = make_job()
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(10)) if spectral else Halves(10)
    job.model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), layer])
    job.optimizer = make_optimizer(job.config.optimizer, job.schedule)
    job.optimizer.build(job.model.trainable_variables)
    with pytest.raises(ConfigError, match=r"--strategy=parameter_server, but layer .* sets its weight .*kernel"):
        getattr(make_step(job), function)


def of_layer(call, **changes):
    """A job whose model calls this function."""
    job = make_job(**changes)
    own = keras.layers.Lambda(call)
    job.model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), own, keras.layers.Dense(10)])
    job.optimizer = make_optimizer(job.config.optimizer, job.schedule)
    job.optimizer.build(job.model.trainable_variables)
    return job


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("function", ["update", "differentiate"])
def test_a_variable_of_a_module_is_refused(function, accumulation):
    job = of_layer(lambda x: HELD(x), accumulation=accumulation)
    with pytest.raises(ConfigError, match="--strategy=parameter_server: each step sets the variable '.*calls'"):
        getattr(make_step(job), function)


@pytest.mark.parametrize("function", ["update", "differentiate"])
def test_what_every_worker_would_draw_alike_is_refused(function):
    job = of_layer(lambda x: x + tf.random.normal(tf.shape(x)))
    with pytest.raises(ConfigError, match="--strategy=parameter_server: the step draws by tf.random .* keras.random"):
        getattr(make_step(job), function)
