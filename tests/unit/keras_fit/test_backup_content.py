"""What the backup of a tfdist.fit holds: the entries of its file, of this and of earlier versions."""

import keras
import numpy as np
import pytest

import tfdist
from tests.unit.keras_fit.test_resumed_data import Killed, KilledAfter
from tfdist.artifacts import backup_file
from tfdist.keras_fit.backup_content import BackupContent
from tfdist.keras_fit.backup_place import FILE

NEWER = (
    "drawn_without_one",
    "data",
    "fit",
    "deleted",
    "callback_names",
    "shared",
    "attributes",
    "shuffled_by",
    "data_calls",
)
ENTRIES = {
    "variables": [np.ones(3, "float32")],
    "drawn_without_one": np.array([1, 2], "uint32"),
    "epoch": 2,
    "data": {"x": [[3, 4]]},
    "fit": 2,
    "stopped": False,
    "history": {"loss": [2.0, 1.0]},
    "epochs": [0, 1],
    "callbacks": [{"wait": 1}],
    "deleted": [["best"]],
    "callback_names": ["EarlyStopping 0"],
    "shared": [[("EarlyStopping 0", "best")]],
    "attributes": {"0": {"beta": 0.5}},
    "order": 7,
    "shuffled_by": [[7, 5]],
    "ends": {"training": None, "validation": None},
    "generators": {"python": [], "numpy": []},
    "data_calls": {"before": [{}, {"numpy": [np.ones(3, "uint32")]}], "first": {"numpy": 3}},
}
OLD = {name: value for name, value in ENTRIES.items() if name not in NEWER}


def test_the_file_keeps_its_entries_and_their_order(tmp_path):
    content = BackupContent.from_dict(ENTRIES)
    assert list(content.to_dict().items()) == list(ENTRIES.items())
    backup_file.write(tmp_path / "dict", ENTRIES)
    backup_file.write(tmp_path / "content", content.to_dict())
    data = (tmp_path / "content").read_bytes()
    assert data == (tmp_path / "dict").read_bytes()
    assert repr(BackupContent.from_bytes(data)) == repr(content)


def test_a_file_of_an_earlier_version_is_read():
    content = BackupContent.from_dict(OLD)
    assert {name: getattr(content, name) for name in OLD} == OLD
    assert (content.drawn_without_one, content.data, content.fit) == (None, {}, 1)
    assert content.shuffled_by is None and content.data_calls is None
    assert not content.deleted and not content.callback_names and not content.shared and not content.attributes


def test_a_fit_goes_on_from_a_file_of_an_earlier_version(tmp_path):
    def weights(callbacks):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("adam", "mse")
        stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=2)
        x = np.arange(32, dtype="float32").reshape(8, 4) / 32
        tfdist.fit(model, x, x[:, :3], batch_size=4, epochs=3, verbose=0, callbacks=[stopping, *callbacks])
        return model.get_weights()

    expected = weights([])
    with pytest.raises(Killed):
        weights([keras.callbacks.BackupAndRestore(tmp_path), KilledAfter(2)])
    entries = backup_file.parse((tmp_path / FILE).read_bytes())
    assert set(entries) == set(ENTRIES)
    backup_file.write(tmp_path / FILE, {name: value for name, value in entries.items() if name not in NEWER})
    resumed = weights([keras.callbacks.BackupAndRestore(tmp_path)])
    assert all((a == b).all() for a, b in zip(expected, resumed, strict=True))


@pytest.mark.parametrize(
    "entries",
    [
        *({name: value for name, value in OLD.items() if name != missing} for missing in OLD),
        *(OLD | {name: "no such kind"} for name in OLD if name not in ("ends", "generators")),
        [OLD],
        None,
        keras.ops.ones(3),
    ],
)
def test_what_is_no_backup_is_refused(entries):
    with pytest.raises(ValueError, match="it has unexpected contents"):
        BackupContent.from_dict(entries)


def test_what_a_later_version_adds_is_left_out():
    assert BackupContent.from_dict(ENTRIES | {"later": 1}).to_dict() == ENTRIES
