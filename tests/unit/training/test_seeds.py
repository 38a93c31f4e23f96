"""What replicas and micro-batches draw by tf.random in a step: each other numbers, and outside of it all the same."""

import contextlib
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tests.unit.training.test_step import batches, make_step
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.keras_fit.random_numbers import RandomNumbers
from tfdist.runtime.one_device import OneDevice
from tfdist.training.replica_gradients import ReplicaGradients
from tfdist.training.seeds import drawing
from tfdist.training.step_options import Parallelism, StepOptions

function = tf.function(lambda: tf.random.normal([]))


def draws():
    """Also with a seed of its own, in a graph inside, and in a function that keeps its trace."""
    inside = tf.cond(tf.random.uniform([]) >= 0, lambda: tf.random.normal([]), lambda: 0.0)
    return [tf.random.normal([]), tf.random.normal([], seed=1000), inside, function()]


def model():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])


def of_worker(number, is_known):
    """What a worker draws in a step, and what all draw alike after it."""
    net = model()
    keras.utils.set_random_seed(3)
    unknown = tf.Variable(number)
    replica = (lambda: tf.constant(number)) if is_known else unknown.read_value
    runtime = SimpleNamespace(replica_id=replica, first_replica=number, local_replicas=1, replicas=3)

    @tf.function(autograph=False)
    def step():
        with drawing(net, runtime):
            own = draws()
        return own, draws()

    own, alike = zip(*(step() for _ in range(2)), strict=True)
    return [[float(one) for ones in both for one in ones] for both in (own, alike)]


@pytest.fixture(autouse=True)
def _traced_before():
    """As where a model is built."""
    keras.utils.set_random_seed(3)
    function()


@pytest.mark.parametrize("is_known", [True, False])
def test_replicas_draw_different_numbers_in_their_steps_alone(is_known):
    own, alike = zip(*(of_worker(number, is_known) for number in range(3)), strict=True)
    assert len({number for numbers in own for number in numbers}) == 24
    assert alike[0] == alike[1] == alike[2]
    keras.utils.set_random_seed(3)
    plain = tf.function(lambda: draws()[:3], autograph=False)
    assert own[0][:3] == [float(one) for one in plain()]  # the first draws as in one process


@pytest.mark.parametrize(
    ("scope", "replicas", "is_refused"),
    [
        (drawing, 2, True),
        (drawing, 1, False),
        (lambda net, runtime: RandomNumbers(runtime).of_own_rows(), 2, True),
    ],
    ids=["train", "alone", "fit"],
)
def test_xla_which_ignores_seeds_is_refused_on_several_workers(scope, replicas, is_refused):
    runtime = SimpleNamespace(
        replica_id=lambda: tf.constant(0), rank=0, first_replica=0, local_replicas=1, replicas=replicas
    )

    net = model()

    def traced(draw):
        def step():
            with scope(net, runtime):
                return draw()

        tf.function(step, jit_compile=True, autograph=False).get_concrete_function()

    traced(lambda: tf.zeros([]))
    refused = pytest.raises(
        ConfigError, match="XLA compiles the forward pass, which draws by tf.random .*, or (add|comp)"
    )
    with refused if is_refused else contextlib.nullcontext():
        traced(draws)


class Notes(keras.layers.Layer):
    """Keeps what it draws in each micro-batch."""

    def __init__(self):
        super().__init__()
        self.drawn = tf.Variable(tf.zeros([8, 4]), trainable=False)
        self.count = tf.Variable(0, trainable=False)

    def call(self, x, training=False):
        if training:
            place = self.count.assign_add(1) - 1
            self.drawn.scatter_nd_update([[place]], [tf.stack(draws())])
        return x


@pytest.mark.parametrize("accumulation", [2, 4])
def test_micro_batches_draw_different_numbers(accumulation):
    notes = Notes()
    step = make_step(
        model=keras.Sequential([keras.Input((6,)), notes, keras.layers.Dense(4)]), accumulation=accumulation
    )
    step(batches(16 // accumulation), 8 // accumulation)
    assert len(set(notes.drawn.numpy().ravel().tolist())) == 32


def test_forward_passes_of_a_pipeline_draw_different_numbers():
    """Stages begin to count anew, and so does a graph inside of each pass."""

    def of_stage(stage):
        found = []

        def pipeline(batches, begin, total, added, sums):
            for part in (stage, stage + 2):
                for micro in range(2):
                    begin(micro, part)
                    found.extend(draws())
            return [], tf.zeros([sums])

        options, total = StepOptions(BatchPlan(4, 2, 1), 0), SimpleNamespace(sums_count=1)
        update = SimpleNamespace(keep=lambda gradients: gradients)
        replica = ReplicaGradients(OneDevice(), model(), total, update, options, Parallelism(pipeline=pipeline))

        keras.utils.set_random_seed(3)

        @tf.function(autograph=False)
        def step():
            rows = tf.zeros([2, 6]), tf.zeros([2], tf.int32), tf.ones([2])
            replica.of_pipeline(tf.constant(0), tf.constant(1.0), rows, rows)
            return tf.stack(found)

        return step().numpy().tolist()

    assert len({*of_stage(0), *of_stage(1)}) == 32
