"""The pieces of a distributed model that need no second worker: what stands in for one returns what this worker has
sent.
"""

import contextlib
import dataclasses
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat import keras_random, tensorflow_random
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit import lookups, rows, used_outside, worker_dependence
from tfdist.keras_fit.batch_inputs import of_the_batch
from tfdist.keras_fit.example_batch import ExampleBatch
from tfdist.keras_fit.forward import DistributedCall
from tfdist.keras_fit.gradients import Gradients
from tfdist.keras_fit.kept_tensors import KeptTensors
from tfdist.keras_fit.model import DistributedModel
from tfdist.keras_fit.pass_traces import PassTraces
from tfdist.keras_fit.random_numbers import RandomNumbers
from tfdist.models.blocks import positions


class Mirror:
    """Rank 0 of two workers, of which the other sends the same."""

    rank, size = 0, 2

    def __init__(self):
        self.gathers, self.sums = 0, 0

    def gather(self, tensors, same=(), stamp=None):
        self.gathers += 1
        rows = [tf.concat([tensor, tensor], 0) for tensor in tensors]
        for row, tensor in zip(rows, tensors, strict=True):
            row.set_shape([None, *tensor.shape[1:]])
        return rows

    def all_reduce(self, tensors):
        self.sums += 1
        return [2 * tensor for tensor in tensors]

    def all_gather(self, array):
        return np.stack([array, array])

    def broadcast(self, arrays):
        return arrays

    def broadcast_object(self, value, name=""):
        return value


@pytest.fixture
def distribute():
    """A function that replaces the call of a model, and the runtime; tf.GradientTape is replaced meanwhile."""
    runtime = Mirror()
    gradients, numbers = Gradients(runtime), RandomNumbers(runtime)
    models = []

    def one(model):
        models.append(DistributedCall(model, runtime, gradients, numbers).installed())
        models[-1].__enter__()
        return runtime

    with gradients.installed(), numbers.installed():
        yield one
    for model in models:
        model.__exit__(None, None, None)


def network():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


class CallsInner(keras.Model):
    """Its step calls an inner model in place of itself."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.inner(data[0], training=True)))
        weights = self.inner.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def test_nothing_stays_replaced_if_a_callback_has_evaluated_the_model():
    runtime = Mirror()
    runtime.end_call = lambda: None
    model = CallsInner()
    model.build((None, 3))
    model.compile("sgd", run_eagerly=True)
    distributed = DistributedModel(model, runtime)
    with distributed.installed(training=True):
        with distributed.installed(training=False):
            pass
        model.train_function(iter([(tf.ones([4, 3]), tf.ones([4, 2]))]))
        assert "call" in vars(model.inner)
    assert "call" not in vars(model.inner)


@pytest.mark.parametrize("watched", [False, True])
def test_a_gradient_of_inputs_costs_a_gather_only_where_it_is_asked_for(distribute, watched):
    model = network()
    runtime = distribute(model)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            if watched:
                tape.watch(x)
            loss = tf.reduce_mean(tf.square(model(x)))
        return tape.gradient(loss, [*model.trainable_variables, *([x] if watched else [])])

    graph = step.get_concrete_function(tf.TensorSpec([None, 3])).graph
    assert runtime.gathers == 1 + watched and runtime.sums == 1
    assert len([op for op in graph.get_operations() if op.type == "PyFunc"]) == 0  # what Mirror does needs none


def test_a_gradient_that_tensorflow_takes_to_recompute_a_layer_is_of_own_rows(distribute):
    class Recomputed(keras.layers.Dense):
        def call(self, x):
            return tf.recompute_grad(lambda x: tf.tanh(x @ self.kernel.value))(x)

    model = keras.Sequential([keras.Input((3,)), Recomputed(3, use_bias=False)])
    runtime = distribute(model)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        return tape.gradient(loss, model.trainable_variables)

    step.get_concrete_function(tf.TensorSpec([None, 3]))
    assert runtime.sums == 1


def test_a_gradient_of_a_jacobian_of_weights_is_refused(distribute):
    model = network()
    distribute(model)
    x = tf.ones([4, 3])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = model(x)
    with pytest.raises(ConfigError, match="tape.jacobian"):
        tape.jacobian(y, model.trainable_variables)


def test_the_tape_is_tensorflows_own_again():
    before = tf.GradientTape.gradient
    gradients = Gradients(Mirror())
    with gradients.installed(), gradients.installed():
        assert tf.GradientTape.gradient is not before
    assert tf.GradientTape.gradient is before


def test_outputs_that_are_no_rows_are_refused(distribute):
    inputs = keras.Input((6,))
    for output in (keras.layers.Lambda(lambda x: tf.reshape(x, [-1, 3])), keras.layers.Lambda(lambda x: x[:, 0][:1])):
        model = keras.Model(inputs, output(inputs))
        distribute(model)
        with pytest.raises(ConfigError, match="one row for each row"):
            model(tf.ones([8, 6]))


def test_which_inputs_hold_the_batch():
    def fitting(*batch):
        """A model of which these inputs are added up, and the others are tables."""

        def returned(dims):
            own = {dims[place] for place in batch}
            return (own.pop(),) if len(own) == 1 else None

        return returned

    assert of_the_batch([None, None], fitting(0, 1)) == of_the_batch([None, None], lambda dims: None) == [True, True]
    assert of_the_batch([None, None, None], fitting(1)) == [False, True, False]
    assert of_the_batch([16], None) == of_the_batch([None], None) == [True]  # nobody is asked
    for dims in ([16, 16, 100], [16, 16, 16], [None, None, 16], [None, 16, 16]):
        assert of_the_batch(dims, fitting(0, 1)) == [True, True, False]
    assert of_the_batch([100, 16], fitting(1)) == [False, True]
    assert of_the_batch([16, 16], fitting(1)) == [False, True]
    assert of_the_batch([16, 16, 100], lambda dims: None) == [True, True, False]  # shapes tell nothing
    assert of_the_batch([16, 16], fitting(1), lambda dims: False) == [True, True]  # it fits in no run
    towers = lambda dims: (dims[0], dims[1])  # noqa: E731 - each with an output of its own
    assert of_the_batch([16, 16], towers) == [True, True]
    assert of_the_batch([16, 16, 16], towers) == [True, True, False]
    assert of_the_batch([16, 16], lambda dims: (dims[0], None)) == [True, True]


def test_an_input_whose_rows_tracing_does_not_know(distribute):
    words = keras.layers.TextVectorization(
        output_mode="tf_idf", max_tokens=4, vocabulary=["a", "b", "c"], idf_weights=[1.0, 1.0, 1.0]
    )
    text, number = keras.Input((), dtype="string"), keras.Input((2,))
    joined = keras.layers.Concatenate()([words(text), keras.layers.Lambda(lambda x: x + tf.random.uniform([]))(number)])
    model = keras.Model([text, number], keras.layers.Dense(1)(joined))
    call = DistributedCall(model, Mirror(), Gradients(Mirror()), RandomNumbers(Mirror()))
    inputs = [tf.constant(["a", "b", "c"]), tf.ones([3, 2])]
    tf.random.set_seed(3)
    before = tensorflow_random.state_digest()
    assert call.of_the_batch(((inputs,), {})) == [True, True]
    assert tensorflow_random.state_digest() == before  # it has run


def traces_of(call, spec, example):
    batch = ExampleBatch()
    batch.inputs = [example]
    return PassTraces(call, [spec], [True], contextlib.nullcontext, batch, workers=2)


@pytest.mark.parametrize("in_a_branch", [False, True])
def test_which_lookups_depend_on_the_rows(in_a_branch):
    table = tf.Variable(tf.ones([9, 2]))
    found, once = {}, {}

    def call(tensors):
        [own] = tensors
        unique, places = tf.unique(tf.reshape(own, [-1]))
        return {
            "own": own,
            "length of a row": tf.range(tf.shape(own)[1]),
            "last": tf.range(tf.shape(own)[-1]),
            "rows": tf.range(tf.shape(own)[0]),
            "zeros": tf.zeros_like(own),
            "zeros of columns": tf.zeros_like(tf.transpose(tf.ensure_shape(own, [None, 3]))),
            "sum of zeros": tf.reduce_sum(tf.zeros_like(tf.ensure_shape(own, [None, 3])), 0),
            "positions": tf.cumsum(1 + tf.reduce_sum(tf.zeros_like(own, tf.int32), 0, keepdims=True), 1) - 1,
            "a row of own": own[:1],
            "constant": tf.constant([1, 1, 2]),
            "one": tf.constant(3),
            "rows in columns": tf.range(tf.shape(tf.transpose(own))[1]),
            "rows in columns, by row": tf.range(tf.shape(2 * tf.gather(table, tf.transpose(own)))[1]),
            "length of a column": tf.range(tf.shape(tf.transpose(own))[0]),
            "unique": unique,
            "unique, by Keras": unique,
            "unique, or 0": tf.where(unique > 5, tf.zeros_like(unique), unique),
            "unique, again": tf.gather(unique, places),
            "as many as unique": tf.range(tf.size(tf.unique(own[:, 0])[0][tf.newaxis][0])),
            "as many as unique, by its shape": tf.range(tf.shape(tf.unique(own[:, 0])[0])[0]),
            "third output": tf.split(own, 3, axis=1)[2],
            "random": tf.random.uniform([3], maxval=9, dtype=tf.int32),
        }

    ids_given = tf.constant(np.arange(24).reshape(8, 3) % 9, tf.int64)
    spec = tf.TensorSpec([None, None], tf.int64)

    @tf.function(input_signature=[spec], autograph=False)
    def trace(ids):
        own = worker_dependence.mark_worker_dependent(ids[:2])
        with worker_dependence.over_own_rows(traces_of(call, spec, ids_given).sizes):
            kinds = call([own])
        unique = kinds["unique"]
        kinds |= {
            "whole": ids[0],
            "random, outside of the pass": tf.random.uniform([3], maxval=9, dtype=tf.int32),
            "gathered": tf.argmax(rows.every_row(Mirror(), [tf.one_hot(own[:, 0], 9)])[0], -1),
            "read": tf.cast(table[0], tf.int32),
        }
        with tf.GradientTape(persistent=True) as tape:
            losses = {name: tf.reduce_sum(tf.gather(table, numbers)) for name, numbers in kinds.items()}
            losses["unique, by Keras"] = tf.reduce_sum(keras.ops.take(table, unique, axis=0))
            bags = tf.nn.embedding_lookup_sparse(tf.identity(table), tf.sparse.from_dense(own), None)
            losses["sparse"] = tf.reduce_sum(bags)
            losses["together"] = sum(tf.reduce_sum(tf.gather(table, kinds[name])) for name in TOGETHER)

        def look():
            for name, loss in losses.items():
                parts = lookups.lookups(tape.gradient(loss, table))
                found[name] = sorted(lookup.is_worker_dependent for lookup in parts)
                once[name] = any(lookup.has_each_row_once for lookup in parts)
            return 0

        return tf.cond(losses["own"] > 0, look, lambda: 1) if in_a_branch else look()

    trace.get_concrete_function()
    assert found == {
        "own": [True],
        "one": [False],
        "rows in columns": [True],
        "rows in columns, by row": [True],
        "length of a column": [False],
        "length of a row": [False],
        "last": [False],
        "rows": [True],
        "zeros": [True],
        "zeros of columns": [True],
        "sum of zeros": [False],
        "positions": [False],
        "a row of own": [True],
        "whole": [False],
        "constant": [False],
        "random": [True],
        "random, outside of the pass": [False],
        "gathered": [False],
        "read": [False],
        "unique": [True],
        "unique, by Keras": [True],
        "unique, or 0": [True],
        "unique, again": [True],
        "as many as unique": [True],
        "as many as unique, by its shape": [True],
        "third output": [True],
        "sparse": [True],
        "together": [False, True, True],
    }
    assert {name for name in once if once[name]} == {"unique", "unique, by Keras", "sparse"}


TOGETHER = ("own", "constant", "zeros")


@pytest.fixture(scope="module")
def layers_of_steps():
    layers = [
        keras.layers.SimpleRNN(2, return_sequences=True),
        keras.layers.SimpleRNN(2, return_sequences=True, unroll=True),
        keras.layers.Conv1D(2, 1),
        keras.layers.TimeDistributed(keras.layers.Dense(2)),
    ]
    for layer in layers:
        layer.build((None, 5, 2))
    return layers


def test_which_sizes_differ_between_workers(layers_of_steps):
    rnn, unrolled, conv, of_each_step = layers_of_steps

    def call(tensors):
        [x] = tensors
        five = tf.ensure_shape(x, [None, 5, 2])
        columns, turned = tf.transpose(x, [1, 0, 2]), tf.transpose(x, [0, 2, 1])
        dense, unknown = of_each_step.layer(columns), tf.roll(columns, 1, 0)
        steps = tf.range(tf.shape(x)[1])
        deep = x
        for _ in range(20):  # each asks what is before it twice
            deep = deep + tf.map_fn(tf.nn.relu, deep)
        results = {  # with rows in their first dim, unless their name says something else
            "rnn": rnn(x),
            "rnn of unknown": rnn(conv(x)),
            "rnn of known length": rnn(five),
            "unrolled rnn": unrolled(five),
            "rnn in columns": tf.transpose(rnn(x), [1, 0, 2]),
            "unrolled rnn in columns": tf.transpose(unrolled(five), [1, 0, 2]),
            "stack": tf.stack([x[:, 0], x[:, 1], x[:, 2]]),
            "TimeDistributed": of_each_step(five),
            "dense, time-major": dense,
            "dense, transposed back": tf.transpose(dense, [1, 0, 2]),
            "unknown, transposed back": tf.transpose(unknown, [1, 0, 2]),
            "one step": keras.ops.take(x, [0], axis=1),
            "last of an rnn": tf.while_loop(lambda _: True, lambda a: [a + 1], [x], maximum_iterations=2)[0],
            "dropped, time-major": tf.nn.dropout(columns, 0.5),
            "convolved, in columns": tf.transpose(conv(x), [1, 0, 2]),
            "dense, convolved, in columns": tf.transpose(conv(of_each_step.layer(x)), [1, 0, 2]),
            "rnn, convolved, in columns": tf.transpose(conv(rnn(x)), [1, 0, 2]),
            "cut in two, in columns": tf.transpose(tf.split(x, 2, 2)[0], [1, 0, 2]),
            "of a scale for each": tf.transpose(tf.ones([3, 1, 1]) * x[:, 0], [1, 0, 2]),
            "einsum": tf.einsum("abc,cd->bad", x, tf.ones([2, 2])),
            "a part, time-major": columns[:, :, :1],
            "a channel, in columns": tf.transpose(x[..., 0]),
            "argmax, in columns": tf.transpose(tf.argmax(x, -1)),
            "joined, time-major": tf.concat([columns, columns], 2),
            "a step more, time-major": tf.concat([columns[:1], columns], 0),
            "shifted, time-major": tf.pad(columns, [[1, 0], [0, 0], [0, 0]])[:-1],
            "sorted, time-major": tf.sort(columns, 0),
            "silu, time-major": tf.nn.silu(columns),
            "of each of several": tf.transpose(tf.matmul(x[:, 0][None], tf.ones([3, 2, 2])), [1, 0, 2]),
            "map_fn": deep,
            "map_fn of turned rows": tf.transpose(tf.map_fn(tf.nn.relu, turned), [0, 2, 1]),
            "map_fn, time-major": tf.transpose(tf.map_fn(tf.nn.relu, x), [1, 0, 2]),
            "map_fn over steps": tf.map_fn(lambda step: x[:, step], steps, fn_output_signature=tf.float32),
            "scan over steps": tf.scan(lambda sum, step: sum + x[:, step], steps, tf.zeros_like(x[:, 0])),
            "grown in a loop": tf.while_loop(
                lambda grown: tf.shape(grown)[0] < tf.shape(x)[0],
                lambda grown: [tf.concat([grown, grown[:1]], 0)],
                [tf.zeros([1, 3])],
                shape_invariants=[tf.TensorShape([None, 3])],
            )[0],
        }
        return {name: (tf.shape(result)[0], tf.shape(result)[1]) for name, result in results.items()} | {
            "no rows": [tf.shape(tf.stack([steps, steps]))[1]] * 2,
            "lists": (tf.shape(columns)[:2], tf.shape(x)[1:]),
            "lists of one": (tf.shape(x)[:-2], tf.shape(columns)[:1]),
            "gathered": (tf.gather(tf.shape(x), 0), tf.gather(tf.shape(x), 1)),
            "unstacked": tf.unstack(tf.shape(x))[:2],
            "of another type": tf.unstack(tf.cast(tf.shape(x), tf.int64))[:2],
            "calculated": (2 * tf.shape(x)[0] - 1, tf.reduce_max(tf.shape(x)[1:])),
            "parts of many": (tf.shape(x)[0] // 16, tf.shape(x)[1] // 16),
            "lists of parts": (tf.stack([tf.shape(x)[0] // 16, tf.shape(x)[0]])[0], tf.stack([tf.shape(x)[0], 1])[1]),
            "parts": (tf.shape(x)[0] // 3, tf.shape(x)[1] // 3),
            "rest": (tf.shape(x)[0] % 2, tf.shape(x)[1] % 2),
            "at most": (tf.minimum(tf.shape(x)[0], 2), tf.minimum(tf.shape(x)[1], 2)),
            "the first": (tf.shape(x[:2])[0], tf.shape(x[:2])[1]),
        }

    def call_of_few(tensors):
        results = {"known rows": tensors[0] + tensors[0], "map_fn of known rows": tf.map_fn(tf.nn.relu, tensors[0])}
        return {name: (tf.shape(result)[0], tf.shape(result)[1]) for name, result in results.items()}

    def ask(call, spec, example):
        @tf.function(input_signature=[spec], autograph=False)
        def trace(x):
            own = worker_dependence.mark_worker_dependent(tf.identity(x))
            with worker_dependence.over_own_rows(traces_of(call, spec, example).sizes):
                sizes = call([own])
            for name, each in sizes.items():
                found[name] = [
                    [worker_dependence.is_worker_dependent(size, if_untold) for if_untold in (False, True)]
                    for size in each
                ]
            return 0

        trace.get_concrete_function()

    found = {}
    ask(call, tf.TensorSpec([None, None, 2]), tf.ones([4, 5, 2]))
    ask(call_of_few, tf.TensorSpec([2, None, 2]), tf.ones([4, 5, 2]))
    differs, same, untold = [True, True], [False, False], [False, True]
    assert {name: sizes for name, sizes in found.items() if sizes != [differs, same]} == {
        "dense, time-major": [same, differs],
        "rnn in columns": [same, differs],
        "unrolled rnn in columns": [same, differs],
        "stack": [same, differs],
        "dropped, time-major": [same, differs],
        "convolved, in columns": [same, differs],
        "dense, convolved, in columns": [same, differs],
        "rnn, convolved, in columns": [same, differs],
        "cut in two, in columns": [same, differs],
        "einsum": [same, differs],
        "a part, time-major": [same, differs],
        "a channel, in columns": [same, differs],
        "argmax, in columns": [same, differs],
        "joined, time-major": [same, differs],
        "a step more, time-major": [same, differs],
        "shifted, time-major": [same, differs],
        "sorted, time-major": [same, differs],
        "silu, time-major": [same, differs],
        "map_fn, time-major": [same, differs],
        "map_fn over steps": [same, differs],
        "scan over steps": [same, differs],
        "no rows": [same, same],
        "parts of many": [untold, same],  # 0 for all numbers of rows in use
        "lists of parts": [untold, same],
    }
    assert len(found) == 50


class Unique(keras.layers.Embedding):
    """Looks up each row once: by tf.unique, and by a sparse tensor."""

    def call(self, ids):
        unique, places = tf.unique(tf.reshape(ids, [-1]))
        found = tf.reshape(tf.gather(super().call(unique), places), [-1, 4, self.output_dim])
        table = tf.convert_to_tensor(self.embeddings)
        return found + tf.nn.safe_embedding_lookup_sparse(table, tf.sparse.from_dense(ids))[:, None]


class Positions(keras.layers.Embedding):
    def call(self, ids):
        return super().call(ids) + super().call(positions(ids))


class OfEachRow(keras.layers.Embedding):
    """Looks up the same row for each number of the batch, whatever it is; Python knows how many."""

    def call(self, ids):
        zeros = super().call(keras.ops.reshape(keras.ops.zeros_like(ids), [-1]))
        ids = tf.cast(ids, self.of_others)
        return super().call(ids) + tf.reshape(zeros, [-1, 4, 3]) + super().call(tf.constant([1, 1]))[0]

    of_others = "int32"


class OfEachRowBesideInt64(OfEachRow):
    of_others = "int64"  # a tape casts the numbers of all lookups to one dtype


@pytest.mark.parametrize("in_a_branch", [False, True])
@pytest.mark.parametrize("kind", [keras.layers.Embedding, Unique, Positions, OfEachRow, OfEachRowBesideInt64])
def test_the_gradient_of_a_table_has_the_rows_that_it_has_in_one_process(distribute, kind, in_a_branch):
    ids = keras.Input((4,), dtype="int32")
    model = keras.Model(ids, kind(9, 3)(ids))
    table = model.trainable_variables[0]

    def step(batch):
        with tf.GradientTape(persistent=True) as tape:  # both branches are traced
            loss = tf.reduce_mean(tf.square(model(batch)))

        def update():
            gradient = tape.gradient(loss, table)
            return gradient.indices, gradient.values

        return tf.cond(loss > 0, update, update) if in_a_branch else update()

    def run():
        spec = tf.TensorSpec([6 if issubclass(kind, OfEachRow) else None, 4], tf.int32)
        numbers, values = tf.function(step, autograph=False, input_signature=[spec])(BATCH)
        return sorted((int(number), *np.round(value, 6)) for number, value in zip(numbers, values.numpy(), strict=True))

    wanted = run()
    distribute(model)
    np.testing.assert_allclose(run(), wanted, atol=2e-6)
    if kind is not keras.layers.Embedding and not in_a_branch:
        with pytest.raises(ConfigError, match="without run_eagerly=True"):
            step(tf.constant(BATCH))


BATCH = np.array([[1, 2, 3, 1], [2, 2, 0, 5], [1, 8, 0, 0]] * 2, np.int32)


class Token(keras.layers.Layer):
    """Adds a row of a table to each step of what another layer returns, and one in front of them."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.table = layer, keras.layers.Embedding(9, 2)

    def call(self, x):
        x = self.layer(x)
        start = self.table(tf.zeros([keras.ops.shape(x)[0], 1], tf.int32))
        return tf.concat([start, x + self.table(1 + keras.ops.arange(keras.ops.shape(x)[1]))], 1)


def of_each_step(x):
    steps = tf.map_fn(lambda step: x[:, step], tf.range(tf.shape(x)[1]), fn_output_signature=tf.float32)
    return tf.transpose(steps, [1, 0, 2])


def fewer_than_eight(x):
    with tf.control_dependencies([tf.debugging.assert_less(tf.shape(x)[0], 8)]):
        return tf.identity(x)


@tf.function(autograph=False)
def without_mean(x):
    return x - tf.reduce_sum(x, 1, keepdims=True) / tf.reduce_sum(tf.zeros([tf.shape(x)[1], 1]) + 1)


def in_pairs(x):
    return tf.concat(tf.split(x, [2] * (x.shape[0] // 2)), 0)


@pytest.mark.parametrize(
    "rows, layer, refused",
    [
        (None, keras.layers.SimpleRNN(2, return_sequences=True), None),
        (4, keras.layers.Conv1D(2, 5), None),
        (4, in_pairs, None),
        (None, lambda x: tf.transpose(tf.roll(tf.transpose(x, [1, 0, 2]), 1, 0), [1, 0, 2]), None),
        (None, of_each_step, None),
        (None, without_mean, None),  # sizes by the same names are others outside of the function
        (None, fewer_than_eight, r"fails when it is tried on other rows \(InvalidArgumentError: "),
    ],
)
def test_a_row_for_each_row_and_rows_for_each_step(distribute, rows, layer, refused):
    model, x = keras.Sequential([Token(layer)]), tf.tile(tf.random.normal([2, 7, 2]), [2, 1, 1])
    model(x)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        gradient = tape.gradient(loss, model.layers[0].table.embeddings)
        return gradient.indices, gradient.values

    def run():
        numbers, values = tf.function(step, autograph=False, input_signature=[tf.TensorSpec([rows, None, 2])])(x)
        return sorted((int(number), *value) for number, value in zip(numbers, values.numpy(), strict=True))

    wanted = run()
    distribute(model)
    model.call.example.inputs = tf.tile(x, [4, 1, 1]) if refused else x
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        np.testing.assert_allclose(run(), wanted, atol=1e-6)


def test_sizes_are_measured_anew_in_a_call_that_has_changed(distribute):
    settings = {"looks again": True}

    def layer(x):
        return x[: tf.shape(x)[0]] if settings["looks again"] else x

    def step():
        def of(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x)))
            return tape.gradient(loss, model.layers[0].table.embeddings).indices

        indices = tf.function(of, autograph=False, input_signature=[tf.TensorSpec([None, None, 2])])(x)
        return sorted(indices.numpy().tolist())

    model, x = keras.Sequential([Token(layer)]), tf.random.normal([4, 7, 2])
    model(x)
    wanted = step()
    distribute(model)
    model.call.example.inputs = x
    assert step() == wanted
    settings["looks again"] = False
    assert step() == wanted


def test_what_layers_have_added_outlives_a_look_at_the_model(distribute):
    """A further trace, which asks what a model looks up, leaves the losses of the step that is being traced."""

    class Penalized(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return x

    ids = keras.Input((4,), dtype="int32")
    model = keras.Model(ids, Penalized()(keras.layers.Embedding(7, 3)(ids)))
    distribute(model)

    @tf.function(autograph=False)
    def step(x):
        model(x)
        before = list(model.losses)
        [[use]] = model.call.uses_of(model.weights[0].handle)
        assert use.rows == 12 and not use.is_shared and len(before) == 1
        assert [id(loss) for loss in model.losses] == [id(loss) for loss in before]
        return before[0]

    step.get_concrete_function(tf.TensorSpec([6, 4], tf.int32))


def test_a_pass_that_failed_does_not_disturb_other_models(distribute):
    """They ask all distributed models which rows they look up whatever the batch is."""

    class Fails(keras.Model):
        def call(self, x):
            raise ValueError("as_list() is not defined on an unknown TensorShape.")

    model = Fails()
    distribute(model)
    with pytest.raises(ValueError):
        tf.function(model, autograph=False).get_concrete_function(tf.TensorSpec([6, 3]))
    [[use]] = model.call.uses_of(tf.Variable(0.0).handle)
    assert use.rows is None and not use.is_shared


LOGITS = np.array([[30.0, 0.0], [-25.0, 25.0]], np.float32)
CROSSENTROPIES = {
    "softmax": (keras.activations.softmax, keras.losses.sparse_categorical_crossentropy, np.array([1, 0])),
    "sigmoid": (keras.activations.sigmoid, keras.losses.binary_crossentropy, np.array([[0.0, 1.0], [1.0, 0.0]])),
    "softmax of TensorFlow": (tf.nn.softmax, keras.losses.sparse_categorical_crossentropy, np.array([1, 0])),
    "softmax over another axis": (
        lambda x: keras.activations.softmax(x[..., None] * [1.0, 1.5], axis=1),
        lambda y, p: keras.losses.categorical_crossentropy(y, p, axis=1),
        np.array([[[0.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [0.0, 0.0]]]),
    ),
}


@pytest.mark.parametrize(
    "kind, way",
    [
        *((kind, "graph") for kind in CROSSENTROPIES),
        *(("softmax", way) for way in ("eager", "compiled by XLA", "own rows, compiled by XLA")),
        ("softmax over another axis", "compiled by XLA"),
    ],
)
def test_large_logits_have_the_loss_and_gradient_of_one_process(distribute, kind, way):
    """Keras takes a crossentropy of the logits behind a probability, which alone is cut off at 1e-7."""
    activation, crossentropy, y = CROSSENTROPIES[kind]

    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(crossentropy(y, model(x)))
        return loss, tape.gradient(loss, model.trainable_variables[0])

    def run(model, repeats):
        x, wanted = (tf.constant(np.concatenate([each] * repeats)) for each in (LOGITS, y))
        return (step if way == "eager" else tf.function(step, autograph=False))(model, x, wanted)

    def made():
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(2, activation, use_bias=False, kernel_initializer="identity")]
        )
        model.compile(jit_compile="XLA" in way)
        return model

    loss, gradient = run(made(), 1)
    model = made()
    distribute(model)
    with model.call._gradients.of_a_share(tf.constant(0.5)) if "own rows" in way else contextlib.nullcontext():
        found_loss, found_gradient = run(model, 1 if "own rows" in way else 2)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(found_gradient, gradient, rtol=1e-6)
    assert loss > 20


def test_a_model_may_draw_before_keras_has_a_generator():
    """The trace of the step makes one, which has no state yet when the model is tried."""

    class Draws(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x + keras.random.normal(tf.shape(x))

    model, runtime = keras.Sequential([keras.Input((3,)), Draws()]), Mirror()
    gradients, numbers = Gradients(runtime), RandomNumbers(runtime)
    call, before = DistributedCall(model, runtime, gradients, numbers), keras_random.global_seed_generator()
    keras_random.use_generator(None)
    try:
        with call.installed(), gradients.installed(), numbers.installed():
            first, second = (tf.function(model, autograph=False)(tf.ones([4, 3])) for _ in range(2))
        assert np.isfinite(first).all() and np.any(first != second)
    finally:
        keras_random.use_generator(before)


def test_a_layer_that_needs_the_number_of_rows_is_refused_where_it_is_not_known(distribute):
    elastic = keras.layers.RandomElasticTransform(name="elastic", value_range=(0, 1))
    model = keras.Sequential([keras.Input((3, 3, 1)), elastic])
    distribute(model)

    def run(rows, training):
        spec = tf.TensorSpec([rows, 3, 3, 1])
        tf.function(lambda x: model(x, training=training), autograph=False).get_concrete_function(spec)

    run(4, training=True)
    run(None, training=False)
    with pytest.raises(ConfigError, match="may be smaller, the layer elastic .* give a dataset .*drop_remainder=True"):
        run(None, training=True)


@pytest.mark.parametrize("way", ["graph", "eager", "compiled by XLA"])
def test_probabilities_keep_their_logits_on_the_way_into_another_model(distribute, way):
    class Judge(keras.Model):
        def call(self, inputs):
            return keras.losses.sparse_categorical_crossentropy(*inputs)

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            probabilities = classifier(x)
            tape.watch(probabilities)
            loss, size = tf.reduce_mean(judge((y, probabilities))), tf.reduce_sum(double(probabilities))
        return loss, tape.gradient(loss, classifier.trainable_variables[0]), tape.gradient(size, probabilities)

    def run():
        x, y = tf.constant(np.concatenate([LOGITS] * 2)), tf.constant([1, 0] * 2)
        return (step if way == "eager" else tf.function(step, autograph=False))(x, y)

    dense = keras.layers.Dense(2, "softmax", use_bias=False, kernel_initializer="identity")
    classifier, judge = keras.Sequential([keras.Input((2,)), dense]), Judge()
    double = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(2.0)])
    for model in (judge, double):
        model.compile(jit_compile="XLA" in way)
    wanted = run()
    for model in (classifier, judge, double):
        distribute(model)
    for one, other in zip(run(), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert wanted[0] > 20


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_losses_stay_with_the_layers_that_add_them(distribute, run_eagerly):
    """A train_step or compute_loss may give those of each layer a weight of its own."""

    class Adds(keras.layers.Layer):
        def call(self, x):
            square = keras.ops.square(x)
            self.add_loss(keras.ops.mean(square))
            self.add_loss(keras.ops.sum(square))
            self.add_loss(keras.ops.mean(square, axis=-1))  # one value for each row
            self.add_loss(keras.ops.mean(square, axis=-1) / tf.cast(tf.shape(x)[0], x.dtype))
            self.add_loss(keras.ops.mean(square, axis=0))  # one value for each feature
            self.add_loss(keras.ops.transpose(square))  # of each row, in another dim
            return 2 * x

    def losses_of(model, x):
        model(x)
        return [list(layer.losses) for layer in model.layers], list(model.losses)

    model = keras.Sequential([keras.Input((3,)), Adds(), keras.layers.Dense(3), Adds()])
    x = tf.random.stateless_normal([4, 3], [1, 2])
    x = tf.concat([x, x], 0)
    wanted = losses_of(model, x)
    distribute(model)
    found = (losses_of if run_eagerly else tf.function(losses_of, autograph=False))(model, x)
    # Values of rows in another dim than the first are added up: Keras adds them up, too.
    as_told = lambda loss: loss if loss.shape.rank < 2 else tf.reduce_sum(loss)  # noqa: E731
    wanted = keras.tree.map_structure(as_told, wanted)
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)


@pytest.mark.parametrize("rows, known", [(4, True), (4, False), (2, True), (2, False), (3, False)])
def test_a_loss_of_each_row_may_be_squeezed(distribute, rows, known):
    """If the number of rows is unknown, so is its rank; if a worker has one row, it has none."""

    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.squeeze(keras.ops.sum(x, -1, keepdims=True)))
            return x

    model = keras.Sequential([keras.Input((3,)), Adds()])
    distribute(model)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([rows if known else None, 3])])
    def loss(x):
        model(x)
        return tf.reduce_sum(model.losses[0])

    own = rows // 2  # of which the other worker has as many
    np.testing.assert_allclose(loss(tf.ones([rows, 3])), 3.0 * 2 * own)


class Keeping(keras.layers.Layer):
    """Keeps tensors, numbers and arrays of its rows, and of none, as attributes."""

    places = None

    def call(self, x):
        if self.places is None:
            with tf.init_scope():
                self.places = tf.range(3.0)
        self.own, self.several = tf.reduce_mean(x), {"first": x[:1]}
        self.count, self.length = x.shape
        self.array = np.array(x) if tf.executing_eagerly() else None
        self.add_loss(keras.ops.mean(x))  # is tried with other rows
        return x + self.places


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_layers_keep_of_own_rows_is_refused_outside_of_the_call(run_eagerly):
    def step(x, use=None):
        y = model(x)
        return tf.reduce_mean(y) if use is None else use(layer)

    layer, gradients = Keeping(), Gradients(Mirror())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), layer])
    run = step if run_eagerly else lambda x, use=None: tf.function(step, autograph=False)(x, use)
    x = tf.ones([4, 3])
    with DistributedCall(model, Mirror(), gradients, RandomNumbers(Mirror())).installed(), gradients.installed():
        for _ in range(2):
            assert np.isfinite(run(x))  # kept only: harmless
        for use in (
            lambda layer: 2.0 * layer.own,
            lambda layer: tf.reduce_sum(layer.own),
            lambda layer: keras.ops.mean(layer.own),
            lambda layer: tf.ones([]) + layer.own,
            lambda layer: layer.several["first"],
            lambda layer: layer.own.shape,
            lambda layer: tf.ones([]) / layer.count,
            *([lambda layer: 2 * layer.array] if run_eagerly else []),
        ):
            with pytest.raises(
                ConfigError, match="attribute '(own|several|count|array)' may hold the rows of one worker only: return"
            ):
                run(x, use)
        assert run(x, lambda layer: tf.reduce_sum(layer.places)) == layer.length == 3
    assert isinstance(layer.own, tf.Tensor)


@pytest.mark.parametrize("before, number", [(300, 300), (16, 7), (np.ones(2), 7), (tf.ones([2]), 7)])
def test_a_number_of_rows_that_only_the_layer_uses_is_hidden_again_in_each_pass(before, number):
    layer = keras.layers.Identity()
    layer.__class__ = type("OfTheUser", (keras.layers.Identity,), {"__module__": __name__})
    kept = KeptTensors(keras.Sequential([keras.Input((3,)), layer]))
    for count in (before, number):
        with kept.hidden_afterwards(count if isinstance(count, int) else number), kept.visible():
            layer.count = count if isinstance(count, tf.Tensor | np.ndarray) else int(str(count))  # another object
    with pytest.raises(ConfigError, match="its attribute 'count' may hold"):
        _ = layer.count + 1


@dataclasses.dataclass(frozen=True)
class Stats:
    mean: tf.Tensor


LASTING = types.SimpleNamespace()
INSIDE = {  # what makes something of a tensor, and what reads the tensor
    "tuple": (lambda mean: (mean, 2 * mean), lambda kept: kept[0]),
    "list": (lambda mean: [mean], lambda kept: kept[0]),
    "dict": (lambda mean: {"mean": mean}, lambda kept: kept["mean"]),
    "object": (Stats, lambda kept: kept.mean),
    "object that stays": (lambda mean: vars(LASTING).update(mean=mean) or LASTING, lambda kept: kept.mean),
    "function": (lambda mean: lambda: mean, lambda kept: kept()),
    "sparse tensor": (tf.sparse.from_dense, lambda kept: kept.values),
    "ragged tensor": (lambda mean: tf.RaggedTensor.from_tensor(mean[:, tf.newaxis]), lambda kept: kept.values),
}


class KeepingInside(keras.layers.Layer):
    """Keeps the mean of each row inside something else."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def call(self, x):
        self.kept = self.make(tf.reduce_mean(x, -1))
        return x


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("inside", INSIDE)
def test_tensors_that_layers_keep_inside_something_else_are_refused_too(distribute, inside, run_eagerly):
    """Also in the first trace, in which the model is tried after its call: another layer adds a loss."""
    make, use = INSIDE[inside]
    layer = KeepingInside(make)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activity_regularizer="l2"), layer])
    distribute(model)

    def step(x):
        model(x)
        return use(layer.kept)

    for _ in range(2):
        with pytest.raises(ConfigError, match="attribute 'kept' may hold the rows of one worker only"):
            (step if run_eagerly else tf.function(step, autograph=False))(tf.ones([4, 3]))


def test_a_loss_that_keeps_a_tensor_has_the_name_that_compile_gives_it(distribute):
    loss = keras.losses.MeanSquaredError()
    model = keras.Sequential([keras.Input((3,)), KeepingInside(lambda mean: setattr(loss, "mean", mean))])
    model.compile(loss=loss)
    distribute(model)
    with pytest.raises(ConfigError, match="layer sequential.* attribute 'loss' may hold the rows of one worker only"):
        model.compute_loss(y=tf.ones([4, 3]), y_pred=model(tf.ones([4, 3])))


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_a_layer_keeps_is_refused_also_if_the_trial_keeps_nothing(distribute, run_eagerly):
    """The model is tried after its call, as another layer adds a loss."""

    class KeepingOnce(keras.layers.Layer):
        has_kept = False

        def call(self, x):
            self.kept, self.has_kept = None if self.has_kept else 2.0 * x, True
            return x

    layer = KeepingOnce()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activity_regularizer="l2"), layer])
    layer.has_kept = False
    distribute(model)

    def step(x):
        model(x)
        return layer.kept + 1.0

    with pytest.raises(ConfigError, match="attribute 'kept' may hold the rows of one worker only"):
        (step if run_eagerly else tf.function(step, autograph=False))(tf.ones([4, 3]))


@pytest.mark.parametrize("way", ["graph", "eager", "compiled by XLA"])
def test_the_mask_of_an_input_reaches_a_model_without_an_argument_for_it(distribute, way):
    class Decoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.pooled = keras.layers.GlobalAveragePooling1D()

        def call(self, x):
            return self.pooled(x)

    def run():
        step = lambda ids: decoder(encoder(ids))  # noqa: E731
        return (step if way == "eager" else tf.function(step, autograph=False))(ids)

    encoder, decoder = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(5, 2, mask_zero=True)]), Decoder()
    decoder.compile(jit_compile="XLA" in way)
    ids = tf.constant([[1, 2, 0], [3, 0, 0]] * 2)
    wanted = run()
    for model in (encoder, decoder):
        distribute(model)
    np.testing.assert_allclose(run(), wanted, rtol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_rows_that_a_step_looks_up_itself_are_there_once(distribute, run_eagerly):
    """All workers hold them: by the largest output of each row of the batch, or drawn at random."""
    table = tf.Variable(tf.ones([2, 3]))
    model = network()
    distribute(model)

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            best, drawn = tf.argmax(model(x), -1), tf.random.uniform([5], maxval=2, dtype=tf.int32)
            losses = [tf.reduce_sum(tf.gather(table, numbers)) for numbers in (best, drawn)]
        return [tape.gradient(loss, table).values for loss in losses]

    found = (step if run_eagerly else tf.function(step, autograph=False))(tf.ones([4, 3]))
    np.testing.assert_array_equal(found[0], np.ones([4, 3]))
    np.testing.assert_array_equal(found[1], np.ones([5, 3]))


def test_an_eager_step_that_looks_up_more_rows_in_the_table_of_a_call_is_refused(distribute):
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2), keras.layers.Flatten()])
    table = model.layers[0].embeddings
    distribute(model)

    def gradient(more):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([4, 3], tf.int32)))
            loss += tf.reduce_sum(tf.gather(table.value, [1, 2])) if more else 0.0
        return tape.gradient(loss, table)

    assert gradient(False).values.shape == [12, 2]
    with pytest.raises(ConfigError, match="in its call, and a step others outside of it.*without run_eagerly=True"):
        gradient(True)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("inside", ["a branch", "a loop"])
def test_rows_that_a_call_looks_up_inside_a_function_are_its_own(distribute, inside, run_eagerly):
    """The table is read before it."""

    class LooksUp(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(5, 2), initializer="ones")

        def call(self, ids):
            table = keras.ops.cast(self.table, self.compute_dtype)
            look = lambda: tf.gather(table, ids)  # noqa: E731
            if inside == "a branch":
                return tf.cond(tf.reduce_sum(ids) >= 0, look, lambda: 2 * look())
            return tf.map_fn(lambda row: tf.gather(table, row), ids, fn_output_signature=tf.float32)

    model = keras.Sequential([keras.Input((3,), dtype="int32"), LooksUp(), keras.layers.Flatten()])
    table = model.layers[0].table.value

    def gradient(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids))
        found = tape.gradient(loss, table)
        tf.convert_to_tensor(found)  # as an optimizer does
        used_outside.refuse()
        return found

    def run():
        ids = tf.constant([[0, 1, 1], [4, 0, 0]] * 2)
        return (gradient if run_eagerly else tf.function(gradient, autograph=False))(ids)

    wanted = run()
    distribute(model)
    found = run()
    np.testing.assert_array_equal(tf.convert_to_tensor(found), tf.convert_to_tensor(wanted))
    assert isinstance(found, tf.Tensor) or found.values.shape == wanted.values.shape


def test_rows_that_a_step_looks_up_beside_a_compiled_call_are_there_once(distribute):
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2), keras.layers.Flatten()])
    model.compile(jit_compile=True)
    table = model.layers[0].embeddings
    distribute(model)

    @tf.function(autograph=False)
    def gradient(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids, training=True)) + tf.reduce_sum(tf.gather(table.value, [1, 2]))
        return tape.gradient(loss, table)

    np.testing.assert_array_equal(gradient(tf.ones([4, 3], tf.int32)).values, np.ones([12 + 2, 2]))


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_rows_that_a_call_looks_up_by_several_numbers_are_its_own(distribute, run_eagerly):
    class Places(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(5, 2), initializer="ones")

        def call(self, ids):
            return tf.gather_nd(self.table.value, ids[..., tf.newaxis])

    model = keras.Sequential([keras.Input((3,), dtype="int32"), Places(), keras.layers.Flatten()])
    table = model.layers[0].table.value
    distribute(model)

    def gradient(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids))
        return tf.convert_to_tensor(tape.gradient(loss, table))

    ids = tf.constant([[0, 1, 1], [4, 0, 0]] * 2)
    found = (gradient if run_eagerly else tf.function(gradient, autograph=False))(ids)
    np.testing.assert_array_equal(found, np.repeat([[6.0], [4], [0], [0], [2]], 2, 1))


class Remembering(keras.layers.Layer):
    """Makes a tensor anew only where a number says that it was made for something else."""

    made_for = factor = None

    def call(self, x, training=False):
        length = x.shape[1] or 1
        key = (bool(training), length)
        if self.made_for != key:
            self.made_for = key
            with tf.init_scope():
                self.factor = tf.constant(0.5 if training else 1.0) / length
        self.add_loss(keras.ops.mean(x))  # is tried
        return x * self.factor


@pytest.mark.parametrize("way", ["graph", "eager", "compiled by XLA"])
def test_what_a_layer_remembers_beside_a_tensor_stays_true_after_a_trial(distribute, way):
    model = keras.Sequential([keras.Input((None, 1)), Remembering()])
    model.compile(jit_compile="XLA" in way)
    distribute(model)
    run = lambda x, training: model(x, training=training)  # noqa: E731
    run = run if way == "eager" else tf.function(run, autograph=False)
    for training, length in ((True, 1), (False, 1), (True, 2), (True, 1), (False, 4)):
        found = run(tf.ones([4, length, 1]), training)
        np.testing.assert_allclose(found, np.full([4, length, 1], (0.5 if training else 1.0) / length), rtol=1e-6)


class KeepingElsewhere(keras.layers.Layer):
    """Keeps something outside of its attributes, as scripts without classes do."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def call(self, x):
        KEPT["value"] = self.make(x)
        return x


KEPT = {}
ELSEWHERE = {  # what is kept, and whether it holds the rows of one worker
    "rows": (lambda x: 2.0 * x, True),
    "a mean": (tf.reduce_mean, True),
    "the number of rows": (lambda x: tf.shape(x)[0], True),
    "the length of a row": (lambda x: tf.shape(x)[1], False),
    "a constant": (lambda x: tf.range(3.0), False),
    "a sum over workers": (lambda x: rows.total(Mirror(), [tf.reduce_sum(x)])[0], False),
}


@pytest.mark.parametrize(
    "kept, inside",
    [*((kept, "") for kept in ELSEWHERE), ("a mean", "loop"), ("a constant", "branch"), ("a constant", "loop")],
)
def test_a_step_that_uses_what_a_call_has_kept_anywhere_is_refused(distribute, kept, inside):
    make, is_refused = ELSEWHERE[kept]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), KeepingElsewhere(make)])
    distribute(model)

    def loss(x):
        return tf.reduce_sum(model(x)) + tf.cast(tf.reduce_sum(KEPT["value"]), tf.float32)

    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                if inside == "branch":
                    of_x = tf.cond(x[0, 0] > 0, lambda: loss(x), lambda: 0.0)
                elif inside == "loop":
                    of_x = tf.while_loop(lambda _, i: i < 2, lambda sum, i: (sum + loss(x), i + 1), (0.0, 0))[0]
                else:
                    of_x = loss(x)
            gradients = tape.gradient(of_x, [x, *model.trainable_variables])
            penalty = tf.reduce_sum(tf.square(gradients[0]))
        found = gradients if inside else outer.gradient(penalty, model.trainable_variables[0])
        used_outside.refuse()
        return found

    trace = tf.function(step, autograph=False).get_concrete_function
    refused = pytest.raises(ConfigError, match="outside of the call .* may hold the rows of one worker only: return it")
    with refused if is_refused else contextlib.nullcontext():
        trace(tf.TensorSpec([None, 3]))


def test_a_step_may_sum_added_losses_whose_size_is_known_late(distribute):
    """One for each place of sequences of unknown length."""

    class ForEachPlace(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.square(x), axis=(0, 2)))
            return x

    model = keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(3), ForEachPlace()])
    distribute(model)

    @tf.function
    def step(x):
        loss = tf.reduce_mean(model(x, training=True)) + sum(map(tf.reduce_sum, model.losses))
        used_outside.refuse()
        return loss

    step.get_concrete_function(tf.TensorSpec([None, None, 3]))
