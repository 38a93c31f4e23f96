"""Pipelines in one process: what a model is called with and gives, and the state that its blocks share."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan, plan_batch
from tfdist.runtime.mesh import Mesh
from tfdist.runtime.one_device import OneDevice
from tfdist.training.parallel.compose import compose_mesh
from tfdist.training.parallel.pipe_schedule import make_schedule
from tfdist.training.parallel.pipeline_parts import divide, stages_of
from tfdist.training.parallel.pipeline_stages import Pipeline
from tfdist.training.parallel.segments import cut_into_blocks
from tfdist.training.parallel.shared_state import refuse_kept, refuse_shared
from tfdist.training.replica_gradients import ReplicaGradients
from tfdist.training.seeds import with_generator
from tfdist.training.step_options import Parallelism, StepOptions

WIDTH = 3


class Counter(layers.Layer):
    """Counts its calls in training; in a variable of Keras', through its value, or in one of TensorFlow's."""

    def __init__(self, how="keras", **options):
        super().__init__(**options)
        self.how = how
        if how == "hidden":
            self.calls = tf.Variable(0.0, trainable=False, name="calls")

    def build(self, shape):
        if self.how != "hidden":
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=False):
        if training:
            (self.calls.value if self.how == "value" else self.calls).assign_add(1.0)
        return x * tf.convert_to_tensor(self.calls)


class Table(layers.Layer):
    """A weight that nobody sets."""

    def build(self, shape):
        self.table = self.add_weight(shape=(WIDTH,), initializer="ones", trainable=False, name="table")

    def call(self, x):
        return x + self.table


def model_of(shared=None, blocks=(), count=2, takes=lambda x: x, gives=lambda x: x):
    """As many blocks, of which `blocks` call the layer `shared`."""
    x = inputs = keras.Input((WIDTH,), name="a")
    for number in range(count):
        name = f"block_0{number}"
        y = layers.Dense(WIDTH, name=f"{name}_mlp")(layers.LayerNormalization(name=f"{name}_norm_1")(x))
        x = layers.Add(name=f"{name}_mlp_add")([x, shared(y) if number in blocks else y])
    return keras.Model(takes(inputs), gives(layers.Dense(2, name="head")(x)))


class Adds(layers.Layer):
    """Adds constants that are made outside, and one that it makes once."""

    outside = tf.random.normal([256, 1])  # more than TensorFlow copies into a graph
    inside = None

    def call(self, x):
        if self.inside is None:
            self.inside = tf.fill(tf.shape(x)[-1:], 2.0)
        return x + self.outside[:WIDTH, 0] + self.inside

    def compute_output_shape(self, shape):
        return shape


class Keeping(layers.Layer):
    """At its second call, adds the tensor that it has kept from its first."""

    def __init__(self, is_mask=False, **options):
        super().__init__(**options)
        self.is_mask = is_mask

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.kept = None

    def call(self, x):
        if self.kept is None:
            self.kept = tf.cast(tf.not_equal(x, 0), x.dtype) if self.is_mask else x * self.scale
            return x
        kept, self.kept = self.kept, None
        return x + kept


CUT = "block_01,block_02,block_03"  # with which the stages 1, 0 and 1 begin


@pytest.mark.parametrize(
    "make, blocks, chunks, words",
    [
        (lambda: Counter(name="own"), (0, 1), 1, "layer own sets its weight own/calls .* stages 0 and 1 .*each block"),
        (lambda: Counter("value", name="own"), (0, 1), 1, "layer own sets its weight own/calls .* stages 0 and 1"),
        (lambda: Counter("hidden", name="own"), (0, 1), 1, "layer own sets its weight calls:0 .* stages 0 and 1"),
        (lambda: Counter(name="own"), (0, 2), 2, "layer own sets .*, which chunks 0 and 1 of stage 0 .*another order"),
        (lambda: layers.BatchNormalization(name="own"), (1, 2), 2, "layer own sets its weight own/moving_mean"),
        (
            lambda: layers.Dropout(0.5, name="own"),
            (0, 1),
            1,
            "layer own sets .*seed_generator_state",
        ),
        (lambda: layers.SpectralNormalization(layers.Dense(WIDTH), name="own"), (0, 1), 1, "layer own sets .*stages"),
        (lambda: Keeping(name="own"), (0, 1), 1, "block_01 .* takes the tensor .*own.* an earlier part.*use data="),
        (lambda: Keeping(True, name="own"), (0, 1), 1, "block_01 .* takes the tensor .*own.* an earlier part.*data="),
        (lambda: Keeping(name="own"), (0, 2), 2, "block_02 .* takes the tensor .*own.* an earlier part.*use data="),
    ],
)
def test_state_that_is_set_in_several_parts_is_refused_on_all_workers(make, blocks, chunks, words):
    mesh = Mesh.create(pipe=2)
    runtime = SimpleNamespace(mesh=mesh, group=lambda *axes: SimpleNamespace(size=mesh.degree(*axes), index=0))
    cut, count = (CUT, 4) if chunks == 2 else ("block_01", 2)
    config = Config().replace(global_batch=8, accumulation=2, mesh="pipe=2", pipe_chunks=chunks, pipe_cut=cut)
    with pytest.raises(ConfigError, match=f"^--mesh=pipe=2, but {words}"):
        compose_mesh(
            config,
            runtime,
            model_of(make(), blocks, count),
            keras.optimizers.SGD(),
            None,
            plan_batch(config.batch, 1),
            rows=None,
        )


@pytest.mark.parametrize(
    "make, blocks",
    [
        (lambda: Counter(), (1,)),
        (lambda: Table(), (0, 1)),
        (lambda: layers.Dense(WIDTH, trainable=False), (0, 1)),
        (lambda: layers.BatchNormalization(trainable=False), (0, 1)),
        (lambda: layers.Dense(WIDTH), (0, 1)),  # which is trained on both
        (lambda: layers.Dropout(0.0), (0, 1)),
    ],
)
def test_what_no_forward_pass_sets_may_be_shared(make, blocks):
    model = model_of(make(), blocks)
    before = [variable.numpy() for variable in model.variables]
    refuse_shared(model, divide(cut_into_blocks(model, "--mesh"), 2, "block_01"), 2, "--mesh=pipe=2", 4)
    tf.function(lambda x: model(x, training=True), autograph=False).get_concrete_function(tf.TensorSpec([4, WIDTH]))
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_constants_that_several_parts_use_are_not_kept_by_an_earlier_one():
    own = Adds()
    model = model_of(own, (0, 1))
    refuse_kept(model, divide(cut_into_blocks(model, "--mesh"), 2, "block_01"), "--mesh=pipe=2", 4)
    assert own.inside is None
    assert np.isfinite(tf.function(model)(tf.ones([4, WIDTH]))).all()


def alone(model):
    """The pipeline of a mesh of one worker."""
    group = SimpleNamespace(index=0, size=1, ranks=(0,), all_reduce=lambda x: x, broadcast=lambda x, rank: x)
    parts = divide(cut_into_blocks(model, "--mesh"), 1, cut="")
    trainable = model.trainable_variables
    update = SimpleNamespace(
        sources=lambda: [variable.value for variable in trainable],
        storage_variables=dict,
        stages=stages_of(model, parts, 1),
        trainable=trainable,
    )
    runtime = SimpleNamespace(group=lambda axis: group, group_of=lambda ranks: group, for_copies=lambda group: group)
    return Pipeline(runtime, model, parts, make_schedule("1f1b", 1, 2), update, 2)


@pytest.mark.parametrize(
    "takes, gives, given, logits",
    [
        (lambda a: {"a": a}, lambda y: y, lambda x: {"a": x}, lambda y: y),
        (lambda a: a, lambda y: {"k": y}, lambda x: x, lambda y: y["k"]),
        (lambda a: [a], lambda y: [y], lambda x: [x], lambda y: y),
        (lambda a: {"p": {"a": a}}, lambda y: {"k": (y,)}, lambda x: {"p": {"a": x}}, lambda y: y["k"][0]),
    ],
    ids=["named input", "named output", "lists", "nested"],
)
def test_one_input_and_one_output_in_a_structure(takes, gives, given, logits):
    keras.utils.set_random_seed(0)  # else a number may come so near 0 that rounding is more than 1e-5 of it
    model = model_of(takes=takes, gives=gives)
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 4, WIDTH)), tf.float32)
    variables = [variable.value for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        whole = logits(model(given(tf.reshape(x, [8, WIDTH])), training=True))
        loss = tf.reduce_sum(whole**2)
    expected = tape.gradient(loss, variables)
    pipeline = alone(model)

    def total(outputs, y, w, losses):
        loss = tf.reduce_sum(logits(outputs) ** 2)
        return loss, tf.stack([loss])

    @tf.function(autograph=False)
    def run(x):
        batches = [(given(micro), None, None) for micro in tf.unstack(x)]
        return model(given(x[0])), pipeline(batches, lambda micro, part: None, total, total, 1)

    outputs, (gradients, sums) = run(x)
    np.testing.assert_allclose(logits(outputs), whole[:4], rtol=1e-5)
    np.testing.assert_allclose(sums, [loss], rtol=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_parts_draw_different_numbers_from_the_global_generator():
    """Each stage sets a copy of its own; one device draws for all parts in turn."""

    def pipeline(batches, begin, *_):
        drawn = []
        for micro, part in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 1)):
            begin(micro, part)
            drawn += [keras.random.uniform((), dtype="float64"), keras.random.uniform((), dtype="float64")]
        return [tf.stack(drawn)], tf.zeros([1])

    replica = ReplicaGradients(
        OneDevice(),
        with_generator(model_of(), own_objective=True),
        SimpleNamespace(sums_count=1),
        SimpleNamespace(keep=lambda gradients: gradients),
        StepOptions(BatchPlan(8, 2, 1), 0),
        Parallelism(pipeline=pipeline),
    )
    batch = tf.zeros([4, WIDTH]), tf.zeros([4]), tf.ones([4])
    run = tf.function(lambda step: replica.of_pipeline(step, tf.constant(1.0), batch, batch).gradients[0])
    first, second = run(tf.constant(0, tf.int64)).numpy(), run(tf.constant(1, tf.int64)).numpy()
    assert len({*first, *second}) == 16  # all but those of a part and micro-batch that come again
    np.testing.assert_array_equal(first[2:4], first[-2:])
