"""Model, objective and data that do not fit each other are told before the first step; those that do pass without a
word.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import ModelConfig
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.sources.split import Split, array_split
from tfdist.training import model_data_checks

X = np.zeros([60, 8], np.float32)


def model(outputs, activation=None, tail=()):
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(outputs, activation=activation), *tail])


def split(y, name="mine:data/train", x=X, classes=None):
    return array_split(name, (x, np.asarray(y)), num_classes=classes)


def checked(made, train, held_out=None, objective="auto", global_batch=10, accumulation=1, replicas=1):
    return model_data_checks.check(
        ModelConfig(model="mine:model", objective=objective),
        made,
        train,
        held_out,
        BatchPlan(global_batch, accumulation, replicas),
    )


def changed(y, at, value):
    y = np.array(y)
    y[at] = value
    return y


CLASSES = np.arange(60) % 4


@pytest.mark.parametrize(
    ("outputs", "train", "held_out", "error", "words"),
    [
        (
            4,
            changed(CLASSES, 7, -1),
            None,
            DataError,
            r"Sample 7 of mine:data/train has the label -1, but --model=mine:model has outputs for the classes 0 to 3",
        ),
        (4, CLASSES, changed(CLASSES, 9, 4), DataError, r"Sample 9 of mine:data/eval has the label 4"),
        (2, CLASSES, None, ConfigError, r"--model=mine:model has 2 outputs, but mine:data/train has 4 classes, 0 to 3"),
        (
            4,
            np.eye(4, dtype=np.int32)[CLASSES],
            None,
            ConfigError,
            r"returns \[4\] for a sample, but y of mine:data/train is int32 \[4\]: classification .*not one-hot"
            r" vectors: make numbers of them, y\.argmax\(-1\)\.$",
        ),
        (4, CLASSES[:, None], None, ConfigError, r"is int64 \[1\]: .*: drop the last dim of y, y\[\.\.\., 0\]\.$"),
        (
            4,
            np.eye(4, dtype=np.float32)[CLASSES],
            None,
            ConfigError,
            r"^--objective=auto takes floats for values, but y of mine:data/train, float32 \[4\], looks like one-hot"
            r" vectors of 4 classes: make numbers of them, y.argmax\(-1\), or give --objective=regression",
        ),
        (
            4,
            CLASSES / 4,
            None,
            ConfigError,
            r"returns \[4\] for a sample, but y of mine:data/train is float64 \[\].*--model_args=num_outputs=1",
        ),
    ],
)
def test_what_cannot_go_well(outputs, train, held_out, error, words):
    with pytest.raises(error, match=words):
        checked(
            model(outputs), split(train, classes=4), held_out if held_out is None else split(held_out, "mine:data/eval")
        )


def test_one_hot_vectors_in_a_stream_are_seen_and_values_are_not_taken_for_them():
    def stream(y):
        data = tf.data.Dataset.from_tensor_slices((X, y.astype(np.float32)))
        return Split("mine:data/train", None, data.element_spec, stream=lambda *_: data)

    hot = np.eye(4)[CLASSES]
    with pytest.raises(ConfigError, match="looks like one-hot vectors of 4 classes"):
        checked(model(4), stream(hot))
    assert checked(model(4), stream(hot), objective="regression") == []
    assert checked(model(4), stream(changed(hot, 3, 0.5))) == checked(model(1), split(np.eye(1)[CLASSES * 0])) == []


def test_what_can():
    assert checked(model(4), split(CLASSES, classes=4), split(CLASSES, "mine:data/eval")) == []
    assert checked(model(9), split(CLASSES, classes=4)) == []
    assert checked(model(4), split(np.ones([60, 4]))) == checked(model(4), split(np.ones([60, 2, 2]))) == []
    assert (
        checked(model(1), split(changed(CLASSES, 7, -1)), objective="regression") == []
    )  # whole numbers, but no classes
    assert checked(model(2), split(changed(CLASSES, 7, -1), classes=4), objective="mine:objective") == []
    tokens = keras.Sequential([keras.Input([8]), keras.layers.Embedding(9, 5)])
    assert checked(tokens, split(np.zeros([60, 8], np.int32), classes=5)) == []


class Subclass(keras.Model):
    def __init__(self, activation):
        super().__init__()
        self.last = keras.layers.Dense(4, activation=activation)

    def call(self, x):
        return keras.ops.reshape(self.last(x), (-1, 4))


class AroundLayers(keras.Model):
    """Of which its graph of layers does not tell all."""

    def call(self, x):
        return keras.ops.softmax(super().call(x))


def around_layers():
    x = keras.Input([8])
    return AroundLayers(x, keras.layers.Dense(4)(x))


def used_twice():
    layer = keras.layers.Dense(8, activation="softmax")
    x = keras.Input([8])
    return keras.Model(x, keras.layers.Activation("linear", dtype="float32")(layer(layer(x))))


def built(made):
    made.build((None, 8))
    return made


@pytest.mark.parametrize(
    ("made", "warned"),
    [
        (lambda: model(4, "softmax"), True),
        (lambda: model(4, None, [keras.layers.Softmax()]), True),
        (lambda: model(4, "softmax", [keras.layers.Activation("linear", dtype="float32")]), True),
        (lambda: built(Subclass("softmax")), True),
        (used_twice, True),
        (around_layers, True),
        (lambda: model(4), False),
        (lambda: model(4, "sigmoid"), False),
        (lambda: built(Subclass(None)), False),
        (lambda: model(6, "softmax", [keras.layers.Dense(4)]), False),
    ],
)
def test_softmax_where_logits_are_expected(made, warned):
    found = checked(made(), split(CLASSES, classes=4))
    assert [
        sentence.startswith("--model=mine:model ends in a softmax, but the loss takes logits") for sentence in found
    ] == [True] * warned
    assert checked(made(), split(CLASSES, classes=4), objective="mine:objective") == []


def test_the_model_is_left_as_it_was():
    looked_at = model(4, "softmax")
    checked(looked_at, split(CLASSES, classes=4))
    assert looked_at.layers[-1].output is looked_at.outputs[0]


def test_a_batch_larger_than_the_data():
    (sentence,) = checked(model(4), split(CLASSES, classes=4), global_batch=61)
    assert (
        sentence
        == "--global_batch=61 is more than the 60 samples of mine:data/train: each batch holds samples several times;"
        " lower it to at most 60."
    )
    assert checked(model(4), split(CLASSES, classes=4), global_batch=60) == []


def nested():
    inputs = {"part": {"a": keras.Input([8], name="a")}}
    return keras.Model(inputs, keras.layers.Dense(4)(inputs["part"]["a"]))


def two_inputs():
    a, b = keras.Input([8], name="a"), keras.Input([8], name="b")
    return keras.Model([a, b], keras.layers.Dense(4)(a + b))


def with_outputs(make):
    x = keras.Input([8])
    return keras.Model(x, make(keras.layers.Dense(4)(x)))


@pytest.mark.parametrize(
    ("made", "x", "words"),
    [
        (lambda: model(4), X[:, :6], r"takes samples of float32 \[8\], but x of mine:data/train is float32 \[6\]"),
        (lambda: model(4), np.full([60, 8], "a"), r"takes samples of float32 \[8\], but x of .* is string \[8\]"),
        (two_inputs, X, r"has the inputs a, b, but x of mine:data/train has 0: there is no a"),
        (two_inputs, {"a": X, "c": X}, r"has the inputs a, b, but x of mine:data/train has a, c: there is no b"),
        (nested, {"part": {"b": X}}, r"has the inputs part.a, but x of mine:data/train has part.b: there is no part.a"),
        (lambda: with_outputs(lambda y: [y, y]), X, r"returns a list of 2, but tfdist's losses take one tensor"),
        (lambda: with_outputs(lambda y: {"out": y}), X, r"returns a dict of 1, but tfdist's losses"),
    ],
)
def test_a_model_for_other_data(made, x, words):
    with pytest.raises(ConfigError, match=words):
        checked(made(), split(CLASSES, x=x, classes=4))


def test_a_model_for_such_data():
    assert (
        checked(two_inputs(), split(CLASSES, x={"a": X, "b": X}))
        == checked(two_inputs(), split(CLASSES, x=(X, X)))
        == []
    )
    assert checked(model(4), split(CLASSES, x=X[:, :, None])) == []  # Keras drops a last dim of 1
    assert checked(with_outputs(lambda y: [y]), split(CLASSES)) == []  # and takes what is alone out of its list
    assert checked(nested(), split(CLASSES, x={"part": {"a": X}})) == []
    free = keras.Sequential([keras.Input([None, 1]), keras.layers.GlobalMaxPool1D(), keras.layers.Dense(4)])
    assert checked(free, split(CLASSES, x=X[:, :, None]), split(CLASSES, x=X[:, :5, None])) == []


def test_samples_of_the_evaluation_of_another_shape():
    with pytest.raises(ConfigError, match=r"but x of mine:data/eval is float32 \[4\]"):
        checked(model(4), split(CLASSES), split(CLASSES, "mine:data/eval", X[:, :4]))


def test_batches_that_an_augmentation_has_changed():
    def after(x, y):
        return model_data_checks.check(
            ModelConfig(model="mine:model"),
            made,
            split(CLASSES),
            None,
            BatchPlan(10, 1, 1),
            (x, y, tf.TensorSpec([10])),
        )

    made, y = model(4), tf.TensorSpec([10], tf.int32)
    assert after(tf.TensorSpec([10, 8]), y) == []
    with pytest.raises(ConfigError, match=r"but x of mine:data/train is float32 \[3\]"):
        after(tf.TensorSpec([10, 3]), y)
    with pytest.raises(ConfigError, match=r"but y of mine:data/train is int32 \[1\]: classification"):
        after(tf.TensorSpec([10, 8]), tf.TensorSpec([10, 1], tf.int32))
    made = keras.Sequential([keras.Input([8], batch_size=5), keras.layers.Dense(4)])
    with pytest.raises(ConfigError, match="takes batches of 5 only, but here are 10"):
        after(tf.TensorSpec([10, 8]), y)


def test_classes_are_whole_numbers():
    with pytest.raises(ConfigError, match="--objective=classification takes class numbers, but y of .* is float64"):
        checked(model(4), split(CLASSES / 4), objective="classification")


@pytest.mark.parametrize(
    ("objective", "y", "told"),
    [
        ("regression", np.zeros([60, 4], np.float32), True),
        ("auto", np.zeros([60, 4], np.float32), True),
        ("mine:f", CLASSES, True),
        ("classification", CLASSES, False),
        ("auto", CLASSES, False),
    ],
)
def test_smoothing_of_labels_that_are_no_classes(objective, y, told):
    config = ModelConfig(model="mine:model", objective=objective, label_smoothing=0.1)
    warnings = model_data_checks.check(config, model(4), split(y), None, BatchPlan(10, 1, 1))
    sentence = f"--label_smoothing=0.1 has no effect, since --objective={objective} does not use it here"
    assert warnings == [f"{sentence}: drop it."] * told


def test_batch_normalization_in_micro_batches():
    made = keras.Sequential([keras.Input([8]), keras.layers.BatchNormalization(), keras.layers.Dense(4)])
    assert checked(made, split(CLASSES)) == checked(model(4), split(CLASSES), accumulation=5) == []
    [warning] = checked(made, split(CLASSES), accumulation=5)
    assert "moments over the 2 rows of a micro-batch, not over all 10, so that --accumulation=5 trains" in warning
    [warning] = checked(made, split(CLASSES), global_batch=14, accumulation=2, replicas=2)
    assert "moments over the 7 rows of a micro-batch, not over all 14" in warning
    made.layers[0].trainable = False
    assert checked(made, split(CLASSES), accumulation=5) == []
