"""Gradients of tables as slices, against the same gradients as tensors."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.e2e.job import ENVIRONMENT
from tfdist.runtime.one_device import OneDevice
from tfdist.training.dtypes import scaled
from tfdist.training.optimizer import switch_off_reduction
from tfdist.training.update import DataParallel, clipping, compiled, unscaling

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.01),
}


def make_update(optimizer="sgd", rows=8, replicas=1, slices=True, bfloat16=False, dtype="float32"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input([3], dtype="int32"), keras.layers.Embedding(rows, 2, dtype=dtype)])
    runtime, rule = OneDevice(), switch_off_reduction(OPTIMIZERS[optimizer]())
    runtime.replicas = replicas
    rule.build(model.trainable_variables)
    return DataParallel(runtime, model, rule, slices, bfloat16)


def gradient(rows=8):
    """Row 1 was looked up twice."""
    return tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tf.constant([1, 5 % rows, 1]), tf.constant([rows, 2])
    )


@pytest.mark.parametrize(
    "rows, replicas, slices, stays",
    [(8, 1, True, True), (8, 2, True, True), (8, 3, True, False), (2, 1, True, False), (8, 1, False, False)],
)
def test_slices_stay_while_they_are_few(rows, replicas, slices, stays):
    (kept,) = make_update(rows=rows, replicas=replicas, slices=slices).keep([gradient(rows)])
    assert isinstance(kept, tf.IndexedSlices) is stays


def test_slices_of_an_unknown_number_become_a_tensor():
    update = make_update()
    kinds = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def keep(values):
        kinds.extend(update.keep([tf.IndexedSlices(values, tf.range(tf.shape(values)[0]), tf.constant([8, 2]))]))

    keep(tf.ones([3, 2]))
    assert not isinstance(kinds[0], tf.IndexedSlices)


@pytest.mark.parametrize("replicas, stays", [(1, True), (3, False)])
def test_xla_leaves_rows_as_rows(replicas, stays):
    update = make_update(replicas=replicas)

    def differentiate(tokens):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.gather(update.sources()[0], tokens) ** 2)
        return [tape.gradient(total, update.sources()[0])], total

    @tf.function(input_signature=[tf.TensorSpec([3], tf.int32)])
    def kept(tokens):
        gradients, _ = compiled(differentiate, update)(tokens)
        (gradient,) = update.keep(gradients)
        assert isinstance(gradient, tf.IndexedSlices) is stays
        assert gradient.shape == [8, 2] and (not stays or gradient.values.shape == [3, 2])
        return tf.convert_to_tensor(gradient)

    tokens = tf.constant([1, 5, 1])
    np.testing.assert_allclose(kept(tokens), tf.convert_to_tensor(differentiate(tokens)[0][0]), rtol=1e-6)


def reduced(update):
    pieces, _ = update.reduce([gradient()], tf.zeros([1]), tf.zeros([1]))
    return pieces


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_norm_counts_each_row_once(optimizer):
    update = make_update(optimizer)
    assert float(update.norm(reduced(update))) == pytest.approx(np.linalg.norm([6.0, 8.0, 3.0, 4.0]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_update_is_that_of_the_tensor(optimizer):
    sparse, dense = make_update(optimizer), make_update(optimizer)
    for _ in range(3):
        sparse.apply([scaled(piece, 0.5) for piece in reduced(sparse)])
        dense.apply([0.5 * tf.convert_to_tensor(gradient())])
    np.testing.assert_allclose(sparse.model.get_weights()[0], dense.model.get_weights()[0], rtol=1e-6, atol=1e-7)


def test_a_table_of_a_short_type_is_rounded_once():
    """64 times a 64th of what can be told from 1."""
    update = make_update(dtype="bfloat16")
    update.sources()[0].assign(tf.ones([8, 2], tf.bfloat16))
    many = tf.IndexedSlices(tf.fill([64, 2], 10 * 2.0**-14), tf.ones([64], tf.int32), tf.constant([8, 2]))
    update.apply(update.reduce([many], tf.zeros([1]), tf.zeros([1]))[0])
    np.testing.assert_array_equal(update.model.get_weights()[0][1].astype("float32"), [1 - 2.0**-8] * 2)


@pytest.mark.parametrize(
    "slices, sent, whole",
    [(True, 3 * 2 * 4 + 3 * 4, 3 * 2 * 4 + 3 * 4), (False, 8 * 2 * 2, 8 * 2 * 4)],
    ids=["slices stay float32", "tensors halve"],
)
def test_the_bytes_told_are_those_that_travel(slices, sent, whole):
    update = make_update(replicas=2, slices=slices, bfloat16=True)
    update.reduce(update.keep([gradient()]), tf.zeros([1]), tf.zeros([1]))
    assert update.figures() == {"compression/sent_bytes": sent, "compression/whole_bytes": whole}


OFTEN_THE_SAME_ROWS = """
import keras, numpy as np, tensorflow as tf
from tests.unit.training.test_update import make_update
random = np.random.default_rng(0)
values, rows = random.normal(size=(50_000, 2)), random.integers(0, 1000, 50_000)
shape = tf.constant([100_000, 2], tf.int64)
slices = tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(rows), shape)
found = set()
for _ in range(20):
    update = make_update(rows=100_000)
    update.apply(update.reduce([slices], tf.zeros([1]), tf.zeros([1]))[0])
    found.add(update.model.get_weights()[0].tobytes())
print("different:", len(found))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_several_threads_make_the_same_update(tmp_path):
    """As replicas must, each of which makes it for itself."""
    script = tmp_path / "script.py"
    script.write_text(OFTEN_THE_SAME_ROWS)
    environment = {**ENVIRONMENT, "TF_NUM_INTRAOP_THREADS": "4"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("different: 1\n"), done.stdout + done.stderr


@pytest.mark.parametrize("weight, scale, expected", [(8.0, 1.0, 2.0), (16.0, 4.0, 0.25), (0.0, 1.0, 0.0)])
def test_the_factor_of_the_mean_loss(weight, scale, expected):
    assert float(unscaling(tf.constant(weight), 16.0, tf.constant(scale))) == expected


@pytest.mark.parametrize("norm, expected", [(4.0, 0.25), (0.5, 1.0), (0.0, 1.0)])
def test_clipping_shortens_only_what_is_longer(norm, expected):
    assert float(clipping(tf.constant(norm), 1.0)) == expected
