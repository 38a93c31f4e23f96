"""Models with variables of several dtypes, and gradients without static shapes, in one process: against a loop of plain
Keras, and norms against NumPy.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.marks import thorough_but
from tfdist.config import Config, PrecisionConfig
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.runtime.one_device import OneDevice
from tfdist.training.composition_checks import check_compiled, with_xla
from tfdist.training.dtypes import as_summands, global_norm, scaled
from tfdist.training.objectives import classification
from tfdist.training.optimizer import switch_off_reduction
from tfdist.training.parallel.compression import Compression
from tfdist.training.parallel.mesh_update import MeshUpdate
from tfdist.training.parallel.recompute import recomputed
from tfdist.training.parallel.zero import Zero3Update, ZeroUpdate
from tfdist.training.precision import LossScale
from tfdist.training.step import TrainStep
from tfdist.training.step_options import Parallelism, StepOptions
from tfdist.training.update import DataParallel

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(24, 4, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 24).astype("int32")
W = RANDOM.uniform(0.5, 2.0, 24).astype("float32")
STEPS, BATCH = 3, 8


class Mixed(keras.layers.Layer):
    """Variables of two dtypes in one layer."""

    def build(self, shape):
        self.wide = self.add_weight(shape=(shape[-1],), initializer="ones", dtype="float64", name="wide")
        self.narrow = self.add_weight(shape=(shape[-1],), initializer="zeros", dtype="float32", name="narrow")

    def call(self, x):
        return x * tf.cast(self.wide, x.dtype) + self.narrow


def make_model():
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(6, activation="tanh", dtype=dtype, name=f"of_{dtype}")
        for dtype in ("float32", "float64", "bfloat16", "float16")
    ]
    head = keras.layers.Dense(3, dtype="float32")
    return keras.Sequential([keras.layers.Input((4, 6)), *layers, Mixed(), keras.layers.Flatten(), head])


def mesh_update(kind, zero, **options):
    def update(model, rule):
        runtime = MeshRuntime.create(Config().replace(strategy="mesh", zero=zero), Cluster())
        return runtime, kind(runtime, model, rule, *([zero] if zero else []), **options)

    return update


def data_parallel(model, rule):
    rule.build(model.trainable_variables)
    return OneDevice(), DataParallel(OneDevice(), model, rule)


UPDATES = {
    "one_device": data_parallel,
    "mesh": mesh_update(MeshUpdate, 0),
    "mesh, one bucket each": mesh_update(MeshUpdate, 0, bucket_bytes=0),
    "compression": mesh_update(MeshUpdate, 0, compression="topk", compression_after=100),
    "zero 1": mesh_update(ZeroUpdate, 1),
    "zero 2": mesh_update(ZeroUpdate, 2),
    "zero 3": mesh_update(Zero3Update, 3),
}


@functools.cache
def expected_weights(accumulation, clip_norm):
    """A plain loop: (weights, norm of the last gradient)."""
    model, rule, norm = make_model(), keras.optimizers.SGD(0.1, momentum=0.9), 0.0
    for start in range(0, STEPS * BATCH, BATCH):
        rows = slice(start, start + BATCH)
        total = [np.zeros(variable.shape) for variable in model.trainable_variables]
        for part in np.split(np.arange(BATCH), accumulation):
            with tf.GradientTape() as tape:
                outputs = model(X[rows][part], training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(Y[rows][part], outputs)
                loss = tf.reduce_sum(losses * W[rows][part]) / BATCH
            found = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
            total = [before + gradient.numpy().astype("float64") for before, gradient in zip(total, found, strict=True)]
        total = [gradient * BATCH / W[rows].sum() for gradient in total]
        norm = np.sqrt(sum((gradient**2).sum() for gradient in total))
        factor = min(1.0, clip_norm / norm)
        variables = model.trainable_variables
        clipped = [tf.constant(gradient * factor, each.dtype) for gradient, each in zip(total, variables, strict=True)]
        rule.apply(clipped, variables)
    return [variable.numpy() for variable in model.trainable_variables], norm


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, accumulation",
    thorough_but(itertools.product(UPDATES, [1, 2]), ("zero 3", 1), *((name, 2) for name in UPDATES)),
)
def test_variables_of_several_dtypes_are_trained_as_by_keras(name, accumulation):
    model, rule = make_model(), switch_off_reduction(keras.optimizers.SGD(0.1, momentum=0.9))
    runtime, update = UPDATES[name](model, rule)
    plan = BatchPlan(BATCH, accumulation, 1)
    # Of an unknown number of rows: kernels' gradients have no static shape.
    spec = (tf.TensorSpec([None, 4, 6]), tf.TensorSpec([None], tf.int32), tf.TensorSpec([None]))
    options = StepOptions(plan, 0, clip_norm=0.5)
    step = TrainStep(
        runtime, model, rule, classification(), LossScale(PrecisionConfig()), options, spec, Parallelism(update)
    )
    output = step([iter(tf.data.Dataset.from_tensor_slices((X, Y, W)).batch(BATCH // accumulation))], STEPS)
    expected, norm = expected_weights(accumulation, 0.5)
    held = update.optimized if name == "zero 3" else model.trainable_variables
    assert output.finite and output.gradient_norm == pytest.approx(norm, rel=1e-2)  # some of it is known to 8 bits
    for variable, wanted in zip(held, expected, strict=True):
        assert variable.dtype == wanted.dtype.name
        bound = 2e-2 if variable.dtype in ("bfloat16", "float16") else 2e-3  # some activations have 8 bits
        found = variable.numpy().reshape(wanted.shape).astype("float64")
        np.testing.assert_allclose(found, wanted.astype("float64"), atol=bound)


def test_norms_neither_overflow_nor_lose_digits():
    def norm(*arrays):
        return float(global_norm([tf.constant(values, dtype) for values, dtype in arrays]))

    assert norm(([300.0, 400.0], "float16"), ([0.0], "float32")) == 500.0  # 400^2 is infinite in float16
    assert norm(([3e-5, 4e-5], "float16")) == pytest.approx(5e-5, rel=1e-2)  # whose squares are 0 in float16
    assert norm(([3e25, 4e25], "float64"), ([1.0], "float32")) == pytest.approx(5e25)  # squares: inf in float32
    assert norm(([1.0] * 1000, "bfloat16")) == pytest.approx(1000**0.5)
    assert not np.isfinite(norm(([np.inf], "float16"), ([1.0], "float64")))


def test_the_norm_of_float32_has_the_bits_that_it_had():
    tensors = [tf.constant(RANDOM.normal(size=size).astype("float32")) for size in ((100, 30), (7,), (3, 3, 5))]
    tensors.append(tf.IndexedSlices(tensors[0], tf.range(100), tf.constant([200, 30])))
    assert global_norm(tensors).numpy() == tf.linalg.global_norm(tensors).numpy()


def test_gradients_of_half_precision_are_added_up_and_scaled_in_float32():
    table = tf.IndexedSlices(tf.constant([[1.0], [2.0]], tf.bfloat16), tf.constant([0, 0]), tf.constant([4, 1]))
    half, double = tf.constant([6e-5], tf.float16), tf.constant([1 / 3], tf.float64)
    found = as_summands([table, half, double], [tf.zeros([4, 1]), tf.zeros([1]), tf.zeros([1])])
    assert [gradient.dtype for gradient in found] == [tf.float32, tf.float32, tf.float64]
    assert float(scaled(found[1], tf.constant(1e-6))[0]) == pytest.approx(6e-11, rel=1e-2)  # 0 in float16
    assert float(scaled(found[2], tf.constant(0.5))[0]) == 1 / 6


def test_compressed_gradients_keep_their_dtype():
    class Alone:
        size = 1

        def all_reduce(self, x):
            return x

    variables = [keras.Variable(np.zeros((40, 40)), dtype=dtype) for dtype in ("float64", "float32")]
    gradients = [tf.constant(RANDOM.normal(size=(40, 40)), variable.dtype) for variable in variables]
    for kind in ("fp16", "bf16", "powersgd"):
        found, _ = Compression(kind, variables, Alone(), after=0)(gradients)
        assert [total.dtype for total in found] == [tf.float64, tf.float32]


def test_xla_refuses_only_synchronised_batch_normalization_that_is_trained():
    def check(trainable):
        runtime, layer = OneDevice(), keras.layers.BatchNormalization(synchronized=True, trainable=trainable)
        runtime.replicas = 2
        model = keras.Sequential([keras.layers.Input((3,)), layer, keras.layers.Dense(2)])
        check_compiled(Config().replace(jit_compile=True), runtime, model)

    check(trainable=False)
    with pytest.raises(ConfigError, match="synchronized BatchNormalization"):
        check(trainable=True)


class Dropped(keras.layers.Layer):
    def call(self, x, training=False):
        return tf.nn.dropout(x, 0.5) if training else x


def noisy(outputs, y, w):
    return classification()(outputs + tf.random.normal(tf.shape(outputs)), y, w)


def test_xla_is_the_default_on_gpus_where_it_can(monkeypatch):
    def used(*layers, devices=("GPU:0",), replicas=1, loss=None, **flags):
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: list(devices) if kind == "GPU" else [])
        runtime = OneDevice()
        runtime.replicas = replicas
        model = keras.Sequential([keras.layers.Input((4, 3)), *layers, keras.layers.Dense(2)])
        y = tf.TensorSpec([8, 4], tf.int32)
        spec = (tf.TensorSpec([8, 4, 3]), y, tf.TensorSpec([8]))
        return with_xla(Config().replace(**flags), runtime, model, loss or classification(), spec).model.jit_compile

    synchronized = keras.layers.BatchNormalization(synchronized=True)
    assert used() is True and used(devices=()) is False
    assert used(jit_compile=False) is False and used(devices=(), jit_compile=True) is True
    assert used(deterministic=True) is False and used(strategy="parameter_server") is False
    assert used(synchronized, replicas=2) is False and used(synchronized) is True
    assert used(keras.layers.LSTM(3)) is keras.layers.LSTM(3).supports_jit
    # What draws by tf.random would draw the same on every replica; `drawing` refuses that.
    assert used(Dropped()) is True and used(Dropped(), replicas=2) is False
    own = {"objective": f"{__name__}:noisy", "loss": noisy}
    assert used(**own) is True and used(**own, replicas=2) is False
    assert used(keras.layers.Dropout(0.5), replicas=2, objective=f"{__name__}:plain") is True


def test_recomputed_layers_keep_their_statistics_in_their_dtype():
    layer = keras.layers.BatchNormalization(momentum=0.0, dtype="float64")
    x = 1.0 + 1e-9 * RANDOM.normal(size=(8, 3))
    layer.build(x.shape)
    states = layer.non_trainable_variables
    out = recomputed(lambda rows: layer(rows, training=True), tf.constant(x), layer.trainable_variables, states, layer)
    assert out.dtype == tf.float64
    np.testing.assert_allclose(layer.moving_mean.numpy(), x.mean(0), rtol=1e-15)
