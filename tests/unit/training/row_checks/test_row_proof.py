"""That rows are apart, proved from a model's graph: never of what mixes them, and of what models are made of."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.unit.training.row_checks.row_programs import TOKENS, WIDTH, Program
from tests.unit.training.row_checks.test_row_mixing import APART, MIXING, Own, X, model_of
from tfdist.models.transformer import transformer
from tfdist.models.vit import vit
from tfdist.training.row_checks import row_mixing, row_traces
from tfdist.training.row_checks.added_losses import take_rows
from tfdist.training.row_checks.random_mixing import Draws
from tfdist.training.row_checks.row_proof import Proof, Proofs

PROGRAMS, ALWAYS_RUN = 100, 30

NOTHING = Draws(some=False, in_loops=False)


def proof_of(model, x=X, training=False) -> Proof:
    return Proofs(model).of(x, take_rows, training)


@pytest.mark.parametrize("name", MIXING)
def test_of_what_mixes_rows_there_is_no_proof(name):
    proofs = Proofs(model_of(layers.Dense(8), Own(MIXING[name])))
    for training in (False, True):
        does = {"in training": training, "in inference": not training, "number of rows, in training": training}
        assert proofs.of(X, take_rows, training).apart is not does.get(name, True)


HIDDEN = tf.Variable(tf.zeros(5))


def stashed(x, training, seeds):
    HIDDEN.assign(tf.reduce_mean(x, 0))
    return x - HIDDEN.read_value()


class Counting(layers.Layer):
    """Mixes rows from its third call on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, x):
        self.calls += 1
        return x - ops.mean(x, axis=0) if self.calls > 2 else x


def outside(x, *_):
    with tf.init_scope():
        made = tf.fill([200], 1 / x.shape[0])
    return x * tf.reduce_mean(made)


HIDING = {
    "seed": lambda x, *_: x + keras.random.normal(ops.shape(x), seed=7),
    "stateless": lambda x, *_: x + tf.random.stateless_normal(tf.shape(x), [1, 2]),
    "dropped by seed": lambda x, *_: keras.random.dropout(x, 0.5, seed=7),
    "wiring": lambda x, *_: [tf.tanh(x), tf.nn.relu(x)][x.shape[0] > 3],
    "order": lambda x, *_: tf.tanh(x) - x if x.shape[0] > 3 else x - tf.tanh(x),
    "which part": lambda x, *_: tf.split(x, 5, 1)[x.shape[0] % 5],
    "where a slice begins": lambda x, *_: x[:, x.shape[0] % 2 : x.shape[0] % 2 + 3],
    "where a part begins": lambda x, *_: tf.slice(x, [0, x.shape[0] % 2], [-1, 3]),
    "which column": lambda x, *_: x[:, x.shape[0] % 5, None],
    "few": lambda x, *_: x / min(x.shape[0], 3),
    "fewer": lambda x, *_: x - ops.mean(x, axis=0) if x.shape[0] == 4 else x,
    "made outside": outside,
    "sign of zero": lambda x, *_: (
        x + tf.atan2(np.where(np.arange(x.shape[0]) == 0, 0.0, -0.0)[:, None].astype("f"), -1.0)
    ),
    "staged": lambda x, *_: tf.ensure_shape(tf.raw_ops.Unstage(dtypes=[tf.float32], shared_name="x")[0], x.shape),
    "py_function": lambda x, *_: tf.py_function(lambda x: x - tf.reduce_mean(x, 0), [x], tf.float32),
    "function": lambda x, *_: tf.function(lambda x: x - tf.reduce_mean(x, 0))(x),
    "function of a function": lambda x, *_: tf.function(
        lambda x: 2 * tf.function(lambda x: x - tf.reduce_mean(x, 0))(x)
    )(x),
    "captured by a function": lambda x, *_: (lambda mean: tf.function(lambda x: x - mean)(x))(tf.reduce_mean(x, 0)),
    "function of the number": lambda x, *_: tf.function(lambda x: x / x.shape[0])(x),
    "cond": lambda x, *_: tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: 2 * x),
    "mixup": lambda x, *_: 0.7 * x + 0.3 * tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0]))),
    "attribute": lambda x, *_: tf.nn.leaky_relu(x, 1 / x.shape[0]),
    "tiled": lambda x, *_: x + tf.tile(tf.range(5.0), [x.shape[0]])[: 5 * x.shape[0] : 5, None],
    "histogram": lambda x, *_: x * tf.cast(tf.histogram_fixed_width(x, [0.0, 1.0])[0], tf.float32),
    "top": lambda x, *_: x * tf.cast(x >= tf.math.top_k(tf.transpose(x), 1)[0][:, 0], tf.float32),
    "reshaped": lambda x, *_: tf.reshape(tf.nn.softmax(tf.reshape(x, [-1, 2 * 5 // 2 * x.shape[0]])), [-1, 5]),
    "sorted": lambda x, *_: ops.sort(x, axis=0),
    "einsum": lambda x, *_: ops.einsum("bi,cj->bi", x, x),
    "padded": lambda x, *_: tf.pad(x, [[0, 0], [1, 0]], constant_values=1 / x.shape[0])[:, :5],
    "not hot": lambda x, *_: tf.one_hot(tf.cast(x[:, 0], tf.int32), 5, 1.0, 1 / x.shape[0]),
    "shape": lambda x, *_: x / tf.cast(tf.raw_ops.Shape(input=x)[0], tf.float32),
    "stashed": stashed,
    "sum of ones": lambda x, *_: x * ops.sum(ops.ones_like(x), axis=0),
    "mean of zeros": lambda x, *_: x + ops.mean(ops.zeros_like(x), axis=0) * ops.mean(x, axis=0),
    "almost zero": lambda x, *_: x + 1e-30 * ops.mean(x, axis=0),
    "zeros and others": lambda x, *_: x + np.array([0, 0, 0, 0, 1], "f") * ops.mean(x, axis=0),
}


@pytest.mark.parametrize("name", HIDING)
def test_nor_of_what_hides_it(name):
    class Hiding(Own):
        def compute_output_spec(self, x, training=False):
            return keras.KerasTensor(x.shape, x.dtype)

    model = model_of(Hiding(HIDING[name]))
    assert not any(Proofs(model, many).of(X, take_rows, False).apart for many in (1, 23))


def test_nor_of_what_begins_after_some_calls():
    assert not proof_of(model_of(Counting())).apart


def grouped(x):
    return layers.GroupQueryAttention(4, 4, 2)(x, x, use_causal_mask=True)


def with_class_token(x):
    """As vision transformers do."""
    token = Own(lambda x, *_: ops.concatenate([ops.broadcast_to(ops.ones((1, 1, 8)), (ops.shape(x)[0], 1, 8)), x], 1))
    return layers.MultiHeadAttention(2, 4, dropout=0.1)(token(x), token(x))[:, 0]


MODELS = {  # inputs -> outputs, the shape of a row
    "attention": (lambda x: layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True), (5, 8)),
    "grouped attention": (grouped, (5, 8)),
    "class token": (with_class_token, (5, 8)),
    "plain attention": (lambda x: layers.Attention()([x, x]), (5, 8)),
    "normalized": (lambda x: layers.BatchNormalization()(layers.LayerNormalization()(x)), (5, 8)),
    "convolution": (lambda x: layers.Conv2D(3, 3, strides=2, padding="same")(x), (8, 8, 3)),
    "grouped convolution": (lambda x: layers.Conv2D(6, 3, groups=3)(x), (8, 8, 3)),
    "transposed": (lambda x: layers.Conv2DTranspose(3, 3, strides=2)(layers.DepthwiseConv2D(3)(x)), (8, 8, 3)),
    "resized": (lambda x: layers.UpSampling2D(interpolation="bilinear")(layers.MaxPooling2D()(x)), (8, 8, 3)),
    "groups": (lambda x: layers.Dense(3)(layers.Flatten()(layers.GroupNormalization(3)(x))), (8, 8, 3)),
    "time distributed": (lambda x: layers.TimeDistributed(layers.Dense(3))(layers.RMSNormalization()(x)), (5, 8)),
    "einsum": (lambda x: layers.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d")(x), (5, 8)),
    "separable": (lambda x: layers.Softmax()(layers.SeparableConv1D(3, 3)(x)), (5, 8)),
}
OF_TOKENS = {
    "positions": (lambda x: layers.Embedding(7, 3)(x) + layers.Embedding(5, 3)(ops.arange(5)), (5,)),
    "masked mean": (lambda x: layers.GlobalAveragePooling1D()(layers.Embedding(7, 3, mask_zero=True)(x)), (5,)),
}


@pytest.mark.parametrize("name", [*MODELS, *OF_TOKENS])
def test_of_what_models_are_made_of_there_is_one(name):
    made, shape = {**MODELS, **OF_TOKENS}[name]
    values = np.random.default_rng(0).normal(size=(6, *shape)).astype("float32")
    x = (np.abs(values) * 3).astype("int32") % 5 if name in OF_TOKENS else values
    inputs = layers.Input(shape, dtype=str(x.dtype))
    own = Own(lambda x, *_: ops.silu(x) + ops.gelu(ops.clip(x, -1, 1)))
    proofs = Proofs(keras.Model(inputs, own(made(inputs))))
    for training in (False, True):
        assert proofs.of(x, take_rows, training) == Proof(True, True)


@pytest.mark.parametrize("name", sorted(set(APART) - {"noise of its own", "dropout", "dropout in inference"}))
def test_and_the_model_is_not_run_then(name, monkeypatch):
    model = model_of(layers.Dense(8), Own(APART[name]))
    monkeypatch.setattr(row_mixing, "Probe", None)
    assert not row_mixing.mixes(model, X)


def test_what_an_own_layer_adds():
    def adding(layer, x):
        layer.add_loss(ops.mean(x))
        return x

    own = Own(lambda x, *_: adding(own, x))
    assert proof_of(model_of(own), training=True) == Proof(True, False)
    assert proof_of(model_of(Own(MIXING["centered"])), training=True) == Proof(False, True, NOTHING)


def test_a_model_that_is_not_built_yet_stays_so():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = Model()
    assert proof_of(model) == Proof(False, False) and not model.variables
    model(X)
    assert proof_of(model).apart


def test_layers_remember_nothing_of_a_trace():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.variable, self.made = tf.Variable(1.0), {}

        def call(self, x):
            self.last = x
            if "positions" not in self.made:
                self.made["positions"] = tf.range(5.0)
            with tf.init_scope():
                self.variable.assign_add(1.0)
            return x + self.made["positions"]

    model = Model()
    model.build((None, 5))
    model.made.clear()
    before = float(model.variable)
    assert proof_of(model).apart and float(model.variable) == before
    assert not hasattr(model, "last") or hasattr(model.last, "numpy")
    assert not model.made and np.isfinite(model(X)).all()


class OfOneLayer(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x, training=False):
        return self.layer(x)


def mixes_when_run(model, random) -> bool | None:
    """None: its outputs have no rows, or it does not run."""
    run = tf.function(lambda x: model(x), autograph=False)

    def outputs(x):
        return run(tf.constant(x, tf.float32)).numpy().astype(np.float64)

    def differ(one, other):
        with np.errstate(all="ignore"):
            finite = np.isfinite(one) & np.isfinite(other)
            largest = np.max(np.abs(np.where(finite, one, 0)), initial=1e-9)
            return bool(np.any(np.abs(np.where(finite, one - other, 0)) > 1e-4 * largest))

    rows = random.normal(size=(4, TOKENS, WIDTH))
    try:
        together, moved = outputs(rows), outputs(rows[[3, 1, 0]])
        if together.shape[:1] != (4,) or moved.shape[:1] != (3,):
            return None
        if together.shape[1:] != moved.shape[1:]:
            return True
        for place in (0, 3):
            others = 3 * random.normal(size=rows.shape)
            others[place] = rows[place]
            if differ(together[place], outputs(others)[place]):
                return True
        return differ(together[[3, 1, 0]], moved)
    except tf.errors.OpError:
        return None


def test_random_operations_are_never_said_to_keep_rows_apart_that_they_mix():
    proved, mixed = 0, 0
    for seed in range(PROGRAMS):
        keras.utils.set_random_seed(seed)
        random = np.random.default_rng(seed)
        model = OfOneLayer(Program(seed, 2 + seed % 7))
        model.layer.build(None)
        model.built = True
        apart = proof_of(model, random.normal(size=(6, TOKENS, WIDTH)).astype("float32")).apart
        # Of what is not proved it only says that the programs are of use: enough of them mix rows.
        mixes = mixes_when_run(model, random) if apart or seed < ALWAYS_RUN else None
        assert not (apart and mixes), seed
        proved, mixed = proved + (apart and mixes is False), mixed + bool(mixes)
    assert proved > PROGRAMS / 20 and mixed > ALWAYS_RUN / 20


class Fewer(keras.Operation):
    """Not a layer, but the user's own all the same."""

    def call(self, x):
        return x - ops.mean(x, axis=0) if x.shape[0] == 4 else x

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def in_a_graph(x):
    return ops.gelu(layers.Dropout(0.5)(layers.Dense(5)(x)) + ops.tanh(x))


@pytest.mark.parametrize("operation, traces", [(in_a_graph, 3), (Fewer(), 8), (Own(lambda x, *_: x), 8)])
def test_what_is_of_keras_is_traced_for_training_and_inference_at_once(operation, traces, monkeypatch):
    made = []
    plain = row_traces.stateless_call
    monkeypatch.setattr(row_traces, "stateless_call", lambda *args: made.append(args) or plain(*args))
    inputs = keras.Input((5,))
    proofs = Proofs(keras.Model(inputs, operation(inputs)), 16)
    apart = [proofs.of(X, take_rows, training).apart for training in (False, True)]
    assert apart == [not isinstance(operation, Fewer)] * 2 and len(made) == traces


def a_transformer(**options):
    return transformer(x_spec=tf.TensorSpec([128], tf.int32), num_outputs=9, layers=1, width=8, heads=2, **options)


def a_vit(**options):
    return vit(x_spec=tf.TensorSpec([32, 32, 3], tf.float32), num_outputs=9, layers=1, width=8, heads=2, **options)


BUILT_IN = {
    "transformer": a_transformer,
    "dropout": functools.partial(a_transformer, dropout=0.1),
    "untied": functools.partial(a_transformer, tied=False),
    "experts": functools.partial(a_transformer, experts=4),
    "vit": functools.partial(a_vit, pool="mean"),
    "class token": functools.partial(a_vit, pool="class"),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_our_own_models_are_proved(name):
    """At 128 tokens zeros of few rows are constants of TensorFlow's, and those of more are not."""
    model = BUILT_IN[name]()
    shape, dtype = model.input_shape[1:], model.input.dtype
    x = np.random.default_rng(0).integers(0, 9, (4, *shape)).astype(dtype)
    proofs = Proofs(model, 16, 8)
    assert all(proofs.of(x, take_rows, training).apart for training in (False, True))
    assert proofs.of(x, take_rows, True).adds_nothing == (name != "experts")
