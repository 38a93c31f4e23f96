"""Plain attributes of a model that a callback changes: a resumed fit continues with them."""

import enum

import keras
import numpy as np
import pytest

import tfdist
from tests.unit.keras_fit.test_resumed_data import Killed, KilledAfter
from tfdist.artifacts import backup_file, plain_attributes

X = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)


class Annealed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.beta = 0.0

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mean = keras.ops.mean(keras.ops.square(y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight, training) + self.beta * mean


class Shifted(keras.losses.Loss):
    shift = 0.0

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_pred - y_true - self.shift), -1)


class Anneal(keras.callbacks.Callback):
    """Changes what the model, a layer and a loss hold."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.beta += 0.5
        self.model.dense.scale = np.float32(epoch)
        self.model.loss.shift = 0.1 * epoch


def fitted(callbacks, eagerly=True):
    keras.utils.set_random_seed(1)
    model = Annealed()
    model(X[:1])
    model.compile("adam", Shifted(), run_eagerly=eagerly)
    history = tfdist.fit(model, X, X[:, :3], batch_size=8, epochs=5, verbose=0, callbacks=[Anneal(), *callbacks])
    return history.history["loss"], model


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_resumed_fit_continues_with_what_a_callback_has_changed(tmp_path, epoch):
    expected, model = fitted([])
    with pytest.raises(Killed):
        fitted([keras.callbacks.BackupAndRestore(tmp_path), KilledAfter(epoch)])
    resumed, again = fitted([keras.callbacks.BackupAndRestore(tmp_path)])
    assert resumed == expected
    assert all((a == b).all() for a, b in zip(model.get_weights(), again.get_weights(), strict=True))
    assert (again.beta, again.dense.scale, again.loss.shift) == (2.5, 4.0, 0.4)


def test_a_compiled_step_that_does_not_see_the_change_is_told_of_once(tmp_path, capsys):
    fitted([keras.callbacks.BackupAndRestore(tmp_path)], eagerly=False)
    told = [line for line in capsys.readouterr().err.splitlines() if "changed during the fit" in line]
    assert len(told) == 1 and "Annealed.beta, Dense.scale, Shifted.shift" in told[0], told
    fitted([keras.callbacks.BackupAndRestore(tmp_path)])
    assert "changed during" not in capsys.readouterr().err


def test_what_keras_loop_sets_does_not_count():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.2)])
    model.compile("sgd", "mse", metrics=["mae"])
    first = plain_attributes.values_of(model)
    model.fit(X, X[:, :3], verbose=0, validation_split=0.5, callbacks=[keras.callbacks.TerminateOnNaN()])
    model.stop_training = True
    assert plain_attributes.changed(plain_attributes.values_of(model), first) == {}
    model.layers[1].rate = 0.3
    changed = plain_attributes.changed(plain_attributes.values_of(model), first)
    assert plain_attributes.names(model, changed) == ["Dropout.rate"]
    model.layers[1].rate = 0.5
    plain_attributes.restore(model, {**changed, "99": {"rate": 1.0}})
    assert model.layers[1].rate == 0.3


class Mode(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    WARM = "warm"
    MAIN = "main"


def test_a_member_of_an_enum_comes_back_as_the_same_one():
    model = keras.Sequential()
    model.mode = Mode.WARM
    first = plain_attributes.values_of(model)
    model.mode = Mode.MAIN
    changed = backup_file.parse(
        backup_file.to_bytes(plain_attributes.changed(plain_attributes.values_of(model), first))
    )
    model.mode = Mode.WARM
    plain_attributes.restore(model, changed)
    assert model.mode is Mode.MAIN
