"""tfdist.fit's file of an epoch: what callbacks keep comes back, and reading a stranger's executes nothing."""

import os
import pickle

import keras
import numpy as np
import pytest

from tfdist.control.exit_codes import CheckpointError
from tfdist.keras_fit.backup import FILE, EpochBackup, _plain_state, _restore_plain_state
from tfdist.runtime.encoding import decode, encode
from tfdist.runtime.one_device import OneDevice


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def runtime():
    made = OneDevice.__new__(OneDevice)
    made.rank, made.size = 0, 1
    return made


@pytest.mark.parametrize("content", [lambda folder: pickle.dumps(Evil(str(folder / "executed"))), lambda folder: b"", lambda folder: encode({"epoch": 1}), lambda folder: encode([1]), lambda folder: b"TFD1" + b"\xff" * 40])
def test_a_file_of_a_stranger_is_refused_and_executes_nothing(content, tmp_path):
    (tmp_path / FILE).write_bytes(content(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be read"):
        EpochBackup(tmp_path, runtime(), [])
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_what_callbacks_keep_comes_back():
    stopping = keras.callbacks.EarlyStopping(monitor="loss", mode="min", min_delta=0.5)
    stopping.monitor_op, stopping.min_delta, stopping.best, stopping.wait = keras.ops.less, -0.5, np.float32(3.5), 2
    stopping.best_weights, stopping.other, stopping.hook = [np.ones([2, 3], "float32")], object(), os.system
    other = keras.callbacks.EarlyStopping(monitor="loss", mode="min", min_delta=0.5)
    _restore_plain_state(other, decode(encode(_plain_state(stopping))))
    assert other.monitor_op is keras.ops.less and (other.min_delta, other.best, other.wait) == (-0.5, 3.5, 2)
    np.testing.assert_array_equal(other.best_weights[0], np.ones([2, 3]))
    assert not hasattr(other, "other") and not hasattr(other, "hook")
