"""Exports load without tfdist (that, in a process of its own: tests/e2e) and replace earlier ones whole."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.artifacts.backup import BackupAndRestore
from tfdist.artifacts.export import check_exportable, export_model, load_export
from tfdist.artifacts.run_folder import run_folder
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.config import Config
from tfdist.control.exit_codes import CheckpointError, ConfigError


def test_export(tmp_path):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    for _ in range(2):  # the second replaces the first
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
        paths = export_model(model, tmp_path / "export", ("keras", "saved_model"))
    assert (
        sorted(path.name for path in paths)
        == sorted(path.name for path in (tmp_path / "export").iterdir())
        == ["model.keras", "saved_model"]
    )
    np.testing.assert_allclose(keras.models.load_model(paths[0])(x), model(x), atol=1e-6)
    loaded = tf.saved_model.load(str(paths[1]))
    np.testing.assert_allclose(loaded.serve(x), model(x), atol=1e-6)


def test_a_stranger_s_file_executes_nothing(tmp_path):
    """A lambda's code is in the file; loading it would be running it."""
    path, mark = tmp_path / "model.keras", str(tmp_path / "executed")
    inputs = keras.Input((4,))
    keras.Model(inputs, keras.layers.Lambda(lambda x, mark=mark: (os.mkdir(mark), x)[1])(inputs)).save(path)
    if os.path.exists(mark):
        os.rmdir(mark)
    with pytest.raises(CheckpointError, match="contains Python code"):
        load_export(str(path))
    assert not os.path.exists(mark)
    for content in (b"", b"PK\x03\x04 no archive", b"\x80\x04\x95"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            load_export(str(path))


def test_a_backup_s_folder_is_for_its_user_alone(tmp_path):
    BackupAndRestore(str(tmp_path / "shm" / "mine")).store.write(1, {"train/step": np.array(1)}, {})
    assert (tmp_path / "shm" / "mine").stat().st_mode & 0o777 == 0o700


def test_what_a_run_makes_others_cannot_write(tmp_path):
    before = os.umask(0)
    try:
        folder = run_folder(Config().replace(run_dir=str(tmp_path / "run")))
        SnapshotFolder(str(folder / "checkpoints")).write(1, {"train/step": np.array(1)}, {})
        assert not [path for path in folder.rglob("*") if path.stat().st_mode & 0o002]
    finally:
        os.umask(before)


class Scaled(keras.layers.Layer):
    """As many write them: without get_config."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def call(self, x):
        return self.scale * x


class TupleKeys(keras.layers.Layer):
    """With a configuration that no JSON can hold."""

    def call(self, x):
        return x

    def get_config(self):
        return {**super().get_config(), "table": {(1, 2): 3}}


def test_what_cannot_be_exported_is_told_before():
    inputs = keras.Input((4,))
    own = keras.Model(inputs, Scaled(tf.constant(2.0))(inputs))
    check_exportable(own, ("saved_model",))
    with pytest.raises(
        ConfigError, match=r"^--export=keras cannot write the model \(Object Scaled was .*get_config.*\)"
    ):
        check_exportable(own, ("keras", "saved_model"))
    with pytest.raises(ConfigError, match=r"^--export=keras cannot write the model \(keys must be str"):
        check_exportable(keras.Model(inputs, TupleKeys()(inputs)), ("keras",))
    check_exportable(keras.Model(inputs, Scaled(2.0)(inputs)), ("keras",))


def test_a_saved_model_is_no_keras_file(tmp_path):
    with pytest.raises(CheckpointError, match="is a folder .*: give the model.keras that --export=keras writes"):
        load_export(str(tmp_path))
