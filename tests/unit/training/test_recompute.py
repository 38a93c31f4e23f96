"""Recomputation against keeping: the same outputs, gradients, masks and state."""

import functools
import subprocess
import sys
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.e2e.job import ENVIRONMENT
from tests.fuzz.layers import HoldsFunction
from tfdist import build
from tfdist.compat.keras_random import made_global_seed_generator
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.models.transformer import transformer
from tfdist.training.parallel.recompute import recomputed
from tfdist.training.parallel.segments import cut_into_blocks, recompute
from tfdist.training.seeds import reseed, seed_states

TOKENS = tf.constant(np.random.default_rng(0).integers(0, 31, [3, 8]), tf.int32)


def result(kind, precision="float32"):
    """(outputs, gradients, seeds) of one pass with dropout."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(precision)
    model = transformer(x_spec=tf.TensorSpec([8], tf.int32), num_outputs=31, layers=2, width=16, heads=2, dropout=0.3)
    if kind:
        recompute(model, kind, {})
    reseed(seed_states(model), 7, *(tf.constant(number) for number in (3, 0, 0)))

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            y = model(TOKENS, training=True)
            loss = tf.reduce_sum(y * y)
        return y, [
            tf.convert_to_tensor(gradient)
            for gradient in tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        ]

    y, gradients = run()
    return y.numpy(), [gradient.numpy() for gradient in gradients], [state.numpy() for state in seed_states(model)]


@pytest.fixture(autouse=True)
def _float32_policy():
    yield
    keras.config.set_dtype_policy("float32")


def test_what_is_drawn_without_a_generator_is_drawn_again():
    keras.utils.set_random_seed(1)
    made_global_seed_generator()
    x, owner = tf.ones([2, 3]), keras.layers.Dense(3)

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recomputed(lambda given: given * keras.random.normal([2, 3]), x, [], [], owner)
        return y, tape.gradient(y, x)

    first, second = run(), run()
    np.testing.assert_array_equal(*first)
    assert np.any(first[0] != second[0])


@functools.cache
def result_if_kept(precision):
    return result("", precision)


@pytest.mark.slow
@pytest.mark.usefixtures("rewritten_graphs")
@pytest.mark.parametrize(
    "kind, precision", [("block", "float32"), ("attention", "float32"), ("block", "mixed_bfloat16")]
)
def test_recomputed_is_the_same(kind, precision):
    kept, again = result_if_kept(precision), result(kind, precision)
    tolerance = 1e-6 if precision == "float32" else 1e-2
    np.testing.assert_allclose(again[0], kept[0], rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(again[1], kept[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=10 * tolerance * max(1.0, np.abs(theirs).max()))
    for ours, theirs in zip(again[2], kept[2], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_second_pass_is_there_and_changes_no_state():
    """BatchNormalization moves its statistics once; the layer is called twice."""
    layer, calls = keras.layers.BatchNormalization(momentum=0.5), []
    layer.build((None, 2))

    def function(x):
        calls.append(0)
        return layer(x, training=True)

    x = tf.constant([[1.0, 2.0], [3.0, 6.0]])

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(
                recomputed(function, x, layer.trainable_variables, layer.non_trainable_variables, layer) ** 2
            )
        return tape.gradient(loss, layer.gamma.value)

    run()
    assert len(calls) == 2
    np.testing.assert_allclose(layer.moving_mean.numpy(), [1.0, 2.0])


class Half(keras.layers.Layer):
    """A frozen and a trained weight, a state that it moves and one that it leaves alone."""

    def build(self, shape):
        for name, trainable in (("frozen", False), ("trained", True), ("moved", False), ("left", False)):
            setattr(
                self,
                name,
                self.add_weight(shape=shape[1:], initializer="random_normal", trainable=trainable, name=name),
            )

    def call(self, x):
        self.moved.assign(self.moved + 1)
        return x * self.frozen + self.trained * self.moved * self.left


class After(NamedTuple):
    """others: what is not trained, its paths, and its values before and after the steps."""

    others: tuple[list[str], list[np.ndarray], list[np.ndarray]]
    trained: list[np.ndarray]


@functools.cache
def after_three_steps(**changes):
    config = Config().replace(
        strategy="one_device",
        steps=3,
        source="digits",
        model=f"{__name__}:half",
        global_batch=24,
        accumulation=1,
        precision="bfloat16",
        optimizer="sgd",
    )
    config = config.replace(**changes)
    keras.backend.clear_session()
    job = build.compose(config, build.start_runtime(config, Cluster()))
    others = job.model.non_trainable_variables
    before = [variable.numpy() for variable in others]
    job.step(job.iterators(0), 3)
    values = [variable.path for variable in others], before, [variable.numpy() for variable in others]
    return After(values, [np.ravel(shard) for shard in job.step.update.sources()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"recompute": "block"}, {"strategy": "mesh", "zero": 3}, {"strategy": "mesh", "zero": 3, "recompute": "block"}],
)
def test_bfloat16_leaves_frozen_float32_weights_alone(changes):
    """And moves those that the layer moves by the right amount, in all 24 bits."""
    plain, found = after_three_steps(), after_three_steps(**changes)
    for path, before, ours, theirs in zip(*found.others, plain.others[-1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ("moved" in path) == (ours != before).any(), path
    for ours, theirs in zip(found.trained, plain.trained, strict=True):  # of bfloat16's products, in another order
        np.testing.assert_allclose(ours, theirs, atol=1e-2)


def half(num_outputs):
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Flatten()(inputs)
    y = Half(name="block_00_half")(keras.layers.LayerNormalization(name="block_00_norm_1")(x))
    x = keras.layers.Add(name="block_00_mlp_add")([x, y])
    return keras.Model(inputs, keras.layers.Dense(num_outputs, dtype="float32")(x))


def test_the_blocks_of_a_model():
    model = transformer(x_spec=tf.TensorSpec([8], tf.int32), num_outputs=31, layers=3, width=16, heads=2)
    segments = cut_into_blocks(model, "--recompute=block").segments
    assert [segment.gives for segment in segments] == [
        ("start",),
        ("block_00",),
        ("block_01",),
        ("block_02",),
        ("outputs",),
    ]
    with pytest.raises(ConfigError, match="--recompute=block"):
        cut_into_blocks(keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)]), "--recompute=block")


def block(number, x, inside):
    y = inside(keras.layers.LayerNormalization(name=f"block_{number:02}_norm_1")(x))
    return keras.layers.Add(name=f"block_{number:02}_mlp_add")(
        [x, keras.layers.Dense(4, name=f"block_{number:02}_mlp_out")(y)]
    )


def several_outputs():
    inputs = keras.Input((4,))
    x = block(1, block(0, inputs, keras.layers.Dense(4)), keras.layers.Dense(4))
    return keras.Model(inputs, {"size": keras.layers.Dense(1)(x), "kind": keras.layers.Dense(3)(x)}), X


def masks():
    """One mask, which is used in both blocks and after them."""
    inputs = keras.Input((3,), dtype="int32")
    x = block(0, keras.layers.Embedding(5, 4, mask_zero=True)(inputs), keras.layers.LSTM(4, return_sequences=True))
    x = block(1, x, lambda y: keras.layers.MultiHeadAttention(1, 4)(y, y))
    return keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(x)), tf.constant([[1, 2, 0], [3, 0, 0]])


def early_and_late():
    """An output of the first block, which does not come first, and an input that the second block uses."""
    first, late = keras.Input((4,), name="first"), keras.Input((4,), name="late")
    x = block(0, first, keras.layers.Dense(4))
    y = block(1, x, lambda y: keras.layers.Add()([y, late]))
    return keras.Model({"late": late, "first": first}, [keras.layers.Dense(2)(y), x]), {"late": -X, "first": X}


X = tf.constant(np.random.default_rng(1).normal(size=[2, 4]), tf.float32)


@pytest.mark.slow
@pytest.mark.parametrize("make", [several_outputs, masks, early_and_late])
def test_all_that_crosses_a_cut_travels(make):
    keras.utils.set_random_seed(3)
    model, x = make()

    def run():
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = tf.add_n([tf.reduce_sum(tf.sin(output)) for output in keras.tree.flatten(outputs)])
        return outputs, tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    kept = run()
    recompute(model, "block", {})
    again = tf.function(run, autograph=False)()
    keras.tree.assert_same_structure(kept[0], again[0])
    for ours, theirs in zip(keras.tree.flatten(again), keras.tree.flatten(kept), strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(ours), tf.convert_to_tensor(theirs), rtol=1e-5, atol=1e-6)


def test_weights_that_a_recomputed_layer_sets_are_refused():
    inputs = keras.Input((4,))
    x = block(0, inputs, keras.layers.SpectralNormalization(keras.layers.Dense(4), name="spectral"))
    model = keras.Model(inputs, x)
    recompute(model, "block", {})
    with pytest.raises(
        ConfigError, match="^--recompute=block, but layer spectral sets its weight .*kernel in the forward pass"
    ):
        tf.function(lambda: model(X, training=True), autograph=False)()


class Otherwise(keras.layers.Layer):
    """Is another one when it is called again."""

    def __init__(self, how):
        super().__init__()
        self.how, self.generator, self.count = how, tf.random.Generator.from_seed(3), tf.Variable(1.0, trainable=False)

    def call(self, x):
        if self.how == "tf.random":
            return x * tf.random.uniform(tf.shape(x))
        if self.how == "a loop":
            return tf.map_fn(lambda row: row * tf.random.normal([4]), x)
        if self.how == "a generator":
            return x * self.generator.normal(tf.shape(x))
        if self.how == "a variable":
            return x * self.count.assign_add(1.0)
        return x * keras.random.uniform(tf.shape(x)) * self.count


@pytest.mark.parametrize("how", ["tf.random", "a loop", "a generator", "a variable", "as ever"])
def test_what_would_be_another_one_in_the_backward_pass_is_refused(how):
    made_global_seed_generator()
    inputs = keras.Input((4,))
    model = keras.Model(inputs, block(0, inputs, Otherwise(how)))
    recompute(model, "block", {})
    run = tf.function(lambda: model(X, training=True), autograph=False)
    if how == "as ever":
        run()
        return
    found = "sets a tf.Variable that Keras does not track" if how == "a variable" else "draws by tf.random or a"
    with pytest.raises(ConfigError, match=f"^--recompute and --zero=3 .* layer block_00\\w* {found}"):
        run()


@pytest.mark.slow
def test_micro_batches_are_taken_in_order():
    """Each has its own dropout masks: with the second batch taken first the loss of a step is another one."""
    config = Config().replace(
        strategy="one_device",
        steps=1,
        source="synthetic",
        source_args="task=text,vocab=61,samples=64,eval_samples=4",
        sequence_length=8,
        model="transformer",
        model_args="layers=1,width=32,heads=4,dropout=0.1",
        global_batch=16,
        accumulation=2,
        optimizer="sgd",
        recompute="attention",
    )
    keras.backend.clear_session()
    job = build.compose(config, build.start_runtime(config, Cluster()))
    weights, losses = job.model.get_weights(), set()
    for _ in range(8):
        job.model.set_weights(weights)
        job.step.counter.assign(0)
        losses.add(job.step(job.iterators(0), 1).means["loss"])
    assert len(losses) == 1


PEAK = """
import sys
from pathlib import Path
from tfdist import build
from tfdist.compat.keras_random import made_global_seed_generator
from tfdist.config import Config
from tfdist.control.cluster import Cluster

config = Config().replace(
    strategy="one_device", steps=1, global_batch=64, optimizer="sgd", recompute=sys.argv[1], sequence_length=128,
    source="synthetic", source_args="task=text,vocab=64,samples=64,eval_samples=4",
    model="transformer", model_args="layers=12,width=64,heads=4",
)
job = build.compose(config, build.start_runtime(config, Cluster()))
job.step(job.iterators(0), 1)
# Not ru_maxrss, in which a process inherits what its parent needed: a test process that has run other tests needs
# more than this.
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_the_peak_is_lower():
    """Of the whole process, with TensorFlow's own 600 MB: by a quarter, on a deep model."""
    peaks = {
        kind: int(
            subprocess.run(
                [sys.executable, "-c", PEAK, kind], env=ENVIRONMENT, check=True, capture_output=True, text=True
            ).stdout
        )
        for kind in ("none", "block")
    }
    assert peaks["block"] < 0.8 * peaks["none"], peaks


class AroundLayers(keras.Model):
    def call(self, inputs, training=None, mask=None):
        return 2.0 * super().call(inputs, training=training, mask=mask)


class AroundTheCall(keras.Model):
    def __call__(self, *args, **options):
        return 2.0 * super().__call__(*args, **options)


@pytest.mark.parametrize("kind", [AroundLayers, AroundTheCall])
def test_a_call_around_the_layers_is_not_left_out(kind):
    x = keras.Input([4])
    hidden = keras.layers.LayerNormalization(name="block_00_norm_1")(x)
    hidden = keras.layers.Dense(4, name="block_00_mlp_out")(hidden)
    model = kind(x, keras.layers.Add(name="block_00_mlp_add")([x, hidden]), name="mine")
    with pytest.raises(ConfigError, match=f"^--recompute=block: {kind.__name__} mine has its own call"):
        recompute(model, "block", {})


def test_a_function_that_a_layer_holds_has_the_weights_of_its_own_pass():
    """It would keep the tensors of the forward pass, and its weights would have no gradient in the backward pass."""
    gradients = []
    for kind in ("", "block"):
        keras.utils.set_random_seed(1)
        x = inputs = keras.Input((4,))
        for number in range(2):
            x = block(number, x, HoldsFunction(4))
        model = keras.Model(inputs, keras.layers.Dense(2)(x))
        if kind:
            recompute(model, kind, {})

        @tf.function(autograph=False)
        def run(model=model):
            with tf.GradientTape() as tape:
                y = model(tf.constant(np.random.default_rng(0).normal(size=[3, 4]), tf.float32), training=True)
                loss = tf.reduce_sum(y * y)
            return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

        gradients.append([gradient.numpy() for gradient in run()])
    for kept, computed_again in zip(*gradients, strict=True):
        np.testing.assert_allclose(computed_again, kept, rtol=1e-5, atol=1e-6)
