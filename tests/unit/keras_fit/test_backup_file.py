"""tfdist.fit's file of an epoch: what callbacks keep comes back, and reading a stranger's executes nothing."""

import os
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.compat import keras_epochs
from tfdist.control import lease
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.data.tuning import untuned
from tfdist.keras_fit import backup_file
from tfdist.keras_fit.epoch_backup import FILE, EpochBackup, _plain_state
from tfdist.keras_fit.temporary_attributes import replaced
from tfdist.runtime.one_device import OneDevice


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def stored(value):
    """The bytes of a file that holds `value`, with a right checksum."""

    def content(folder):
        backup_file.write(folder / FILE, value)
        return (folder / FILE).read_bytes()

    return content


@pytest.mark.parametrize(
    "content",
    [
        lambda folder: pickle.dumps(Evil(str(folder / "executed"))),
        lambda folder: b"",
        stored({"epoch": 1}),
        stored([1]),
        lambda folder: b"tfdist backup 1\n" + b"\xff" * 40,
    ],
)
def test_a_file_of_a_stranger_is_refused_and_executes_nothing(content, tmp_path):
    (tmp_path / FILE).write_bytes(content(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be read"):
        EpochBackup(tmp_path, OneDevice(), [])
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_what_callbacks_keep_comes_back(tmp_path):
    stopping = keras.callbacks.EarlyStopping(monitor="loss", mode="min", min_delta=0.5)
    stopping.monitor_op, stopping.min_delta, stopping.best, stopping.wait = keras.ops.less, -0.5, np.float32(3.5), 2
    stopping.best_weights, stopping.other, stopping.hook = [np.ones([2, 3], "float32")], object(), os.system
    other = keras.callbacks.EarlyStopping(monitor="loss", mode="min", min_delta=0.5)
    other.__dict__.update(backup_file.parse(stored(_plain_state(stopping))(tmp_path)))
    assert other.monitor_op is keras.ops.less and (other.min_delta, other.best, other.wait) == (-0.5, 3.5, 2)
    np.testing.assert_array_equal(other.best_weights[0], np.ones([2, 3]))
    assert not hasattr(other, "other") and not hasattr(other, "hook")


def test_of_two_jobs_on_one_folder_the_second_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "_TO_END_SECONDS", 0.1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")

    def fit(epochs):
        callbacks = [keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)]
        return tfdist.fit(model, x, y, epochs=epochs, callbacks=callbacks, verbose=0).epoch

    with lease.held(tmp_path, "another"), pytest.raises(ConfigError, match=f"{tmp_path} is in use .*another folder"):
        fit(1)
    assert fit(1) == [0] and fit(2) == [0, 1]  # nor does a job stand in its own way
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_no_data_is_read_with_the_tuner():
    """Its end may hold Python's lock for up to a minute (data/tuning.py)."""
    read = []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = keras_epochs.data_changed(lambda dataset: read.append(untuned(dataset)) or read[-1])
    with replaced(keras_epochs.EpochIterator, keras_epochs.DATA, data):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        model.predict(tf.data.Dataset.from_tensors(np.ones((4, 2))), verbose=0)
    assert {dataset.options().autotune.enabled for dataset in read} == {False}
