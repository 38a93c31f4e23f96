"""The pieces of tfdist.fit that need no second worker."""

import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.keras_fit import api, backup, own_rows
from tfdist.keras_fit.batches import digest
from tfdist.keras_fit.rows import Part
from tfdist.runtime.one_device import OneDevice


class Rank:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_are_contiguous_and_complete(n, size, dynamic):
    def rows(x):
        parts = [Part(Rank(rank, size), {"a": x, "scalar": tf.constant(3.0)}) for rank in range(size)]
        taken = [part.take({"a": x, "scalar": tf.constant(3.0), "none": None})["a"] for part in parts]
        return [tf.shape(own)[0] for own in taken], tf.concat([part.trim(own) for part, own in zip(parts, taken, strict=True)], 0)

    x = tf.range(n)
    if dynamic:
        rows = tf.function(rows, input_signature=[tf.TensorSpec([None], tf.int32)])
    computed, joined = rows(x)
    assert joined.numpy().tolist() == list(range(n))
    assert min(int(count) for count in computed) >= 1


def test_digests_tell_batches_apart():
    x = tf.reshape(tf.range(12.0), [4, 3])
    base = digest((x, tf.range(4)))
    assert base == digest((tf.identity(x), tf.range(4), None))
    for other in ((x, tf.range(4)[::-1]), (x[::-1], tf.range(4)), (tf.cast(x, tf.float64), tf.range(4)), (x[:3], tf.range(3)), (tf.reshape(x, [4, 3, 1]), tf.range(4))):
        assert digest(other) != base
    assert digest((tf.constant(["a", "b"]),)) != digest((tf.constant(["a", "c"]),))
    with pytest.raises(ConfigError, match="RaggedTensor"):
        digest((tf.ragged.constant([[1], [2, 3]]),))


@pytest.mark.parametrize("steps, cardinality", [(None, True), (None, False), (4, True)])
def test_skipped_epochs_are_those_that_keras_would_have_seen(steps, cardinality):
    """Against Keras itself, with a validation dataset that shares the shuffle."""
    def datasets():
        x = np.arange(10, dtype="float32").reshape(10, 1)
        dataset = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(10, seed=5).batch(4)
        if not cardinality:
            dataset = dataset.filter(lambda *_: True)
        return (dataset.repeat() if steps else dataset), dataset.take(1)

    class Sums(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(round(float(logs["mean_squared_error"]), 4))

        def on_test_batch_end(self, batch, logs=None):
            seen.append(-round(float(logs["mean_squared_error"]), 4))

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mean_squared_error"])

    def run(train, validation, first):
        seen.clear()
        model.fit(train, validation_data=validation, initial_epoch=first, epochs=5, steps_per_epoch=steps, validation_freq=2, verbose=0, callbacks=[Sums()])
        return list(seen)

    seen: list[float] = []
    train, validation = datasets()
    whole = run(train, validation, 0)
    train, validation = datasets()
    rest = run(backup.skip(train, validation, 0, 3, steps, 2), validation, 3)
    assert rest == whole[-len(rest):] and len(rest) >= 6


def test_backup_of_another_model_is_refused(tmp_path):
    def fit(units, epochs):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
        model.compile("sgd", "mse")
        given = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        return model.fit(np.zeros([4, 2]), np.zeros([4, units]), epochs=epochs, verbose=0, callbacks=backup.replace([given], OneDevice())).history

    assert len(fit(2, 2)["loss"]) == 2
    assert len(fit(2, 3)["loss"]) == 3  # two of them from the file
    with pytest.raises(CheckpointError, match="another model"):
        fit(3, 4)
    (tmp_path / backup.FILE).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="cannot be read"):
        fit(2, 4)


def test_own_rows_only_where_sums_are_right(monkeypatch):
    monkeypatch.setattr(own_rows, "LARGEST", -1)

    class Largest(keras.metrics.Metric):
        """Its state is no sum."""

        def update_state(self, y_true, y_pred, sample_weight=None):
            pass

        def result(self):
            return 0.0

    def suits(model=None, loss="mse", metrics=()):
        model = model or keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile("sgd", loss, metrics=list(metrics))
        y = tf.zeros([4, *model.output_shape[1:]]) if model.outputs is None or len(model.outputs) == 1 else [tf.zeros([4, 2])] * 2
        batch = (tf.zeros([4, *model.input_shape[1:]]), y)
        model._symbolic_build(data_batch=batch)
        return own_rows.suits(model, batch)

    class Own(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    two = keras.Input((2,))
    losses, metrics = keras.losses, keras.metrics
    assert suits() and suits(metrics=["mae", "accuracy", metrics.AUC(), metrics.R2Score(), metrics.OneHotMeanIoU(2)])
    for loss in ("binary_crossentropy", losses.CosineSimilarity(), losses.huber, losses.CategoricalFocalCrossentropy(), losses.MeanSquaredError(reduction="mean")):
        assert suits(loss=loss), loss
    for loss in (losses.MeanSquaredError(reduction="sum"), losses.MeanSquaredError(reduction="mean_with_sample_weight"), losses.SparseCategoricalCrossentropy(ignore_class=1),
                 losses.Dice(), "tversky", losses.Circle(), "hinge", losses.CosineSimilarity(axis=0), lambda y_true, y_pred: keras.ops.mean(y_true - y_pred, -1)):
        assert not suits(loss=loss), loss
    for metric in (lambda y_true, y_pred: keras.ops.mean(y_pred), metrics.MeanMetricWrapper(losses.dice), metrics.CosineSimilarity(axis=0), losses.dice,
                   metrics.OneHotMeanIoU(2, axis=0), metrics.PearsonCorrelation()):
        assert not suits(metrics=[metric]), metric
    assert not suits(Own([keras.Input((2,)), keras.layers.Dense(2)]))
    assert not suits(metrics=[Largest()])
    assert not suits(keras.Model(two, [keras.layers.Dense(2)(two), keras.layers.Dense(2)(two)]), loss=["mse", "mse"])
    assert not suits(keras.Sequential([keras.Input((3, 2)), keras.layers.Masking(), keras.layers.Dense(2)]))
    monkeypatch.setattr(own_rows, "LARGEST", 1 << 20)
    assert not suits()


def test_one_process_is_keras(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(api, "_runtime", None)
    x = np.ones([8, 2], "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert len(tfdist.fit(model, x, x[:, :1], epochs=2, verbose=0).history["loss"]) == 2
    assert tfdist.predict(model, x, verbose=0).shape == (8, 1) and tfdist.is_chief()
    assert tfdist.evaluate(model, x, x[:, :1], verbose=0) >= 0
    importlib.import_module("tfdist.evaluate")  # the command, which has the same name
    assert tfdist.evaluate(model, x, x[:, :1], verbose=0) >= 0
    with pytest.raises(ConfigError, match="too late"):
        tfdist.init(startup_timeout=3)
    with pytest.raises(ConfigError, match="keras.Model, not ndarray"):
        tfdist.fit(x, x)
