"""The backup of a tfdist.fit in an object store: against a real server."""

import errno

import keras
import numpy as np
import pytest

import tfdist
from tests.stores.s3_server import BUCKET
from tfdist.artifacts import backup_file
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit.backup_content import BackupContent
from tfdist.keras_fit.backup_place import backup_place

URL = f"s3://{BUCKET}/backups/one"


def epoch_of(place):
    data = place.read()
    return BackupContent.from_bytes(data).epoch if data else None


def content(epoch, size=0):
    return BackupContent(
        variables=[np.full(size, epoch, "float32")],
        epoch=epoch,
        stopped=False,
        history={},
        epochs=[],
        callbacks=[],
        order=None,
        ends={},
        generators={},
    )


def test_the_newest_that_is_whole_is_read(s3):
    place = backup_place(URL)
    assert epoch_of(place) is None
    for epoch in (1, 2, 3):
        place.write(content(epoch, size=1000))
        assert epoch_of(place) == epoch
    assert len(s3.names("backups/one")) == 2
    odd = "backups/one/tfdist-backup-odd"
    s3.change(odd, s3.content(odd)[:-7])  # cut while it was sent
    assert epoch_of(place) == 2
    s3.change("backups/one/tfdist-backup-even", b"damaged")
    with pytest.raises(ValueError, match="tfdist-backup-"):
        epoch_of(place)
    place.remove()
    assert epoch_of(place) is None and not s3.names("backups/one")


def test_a_store_that_is_away_does_not_end_training(s3, monkeypatch, capsys):
    place = backup_place(URL)
    place.write(content(1))
    monkeypatch.setattr(place._objects, "patience", 0.3)
    with monkeypatch.context() as away:
        away.setattr(place._objects._system, "pipe_file", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no")))
        place.write(content(2))
    assert "THE BACKUP OF EPOCH 2 WAS NOT SENT" in capsys.readouterr().err and epoch_of(place) == 1
    place.write(content(2))
    assert epoch_of(place) == 2


def test_what_a_finished_fit_could_not_remove_is_not_gone_on_from_by_the_next(s3, monkeypatch, capsys):
    """The next fit of the program trained nothing, since all its epochs were done."""
    place = backup_place(URL)
    for epoch in (1, 2):
        place.write(content(epoch))
    monkeypatch.setattr(place._objects, "patience", 0.0)
    with monkeypatch.context() as away:
        away.setattr(place._objects._system, "rm_file", lambda *_: (_ for _ in ()).throw(ConnectionError("no")))
        place.remove()
        assert "THE BACKUP WAS NOT REMOVED: s3://" in capsys.readouterr().err and len(s3.names("backups/one")) == 2
        with pytest.raises(OSError, match="removing"):
            place.read()
    later = backup_place(URL)
    assert epoch_of(later) is None and not s3.names("backups/one")
    later.write(content(1))
    assert epoch_of(later) == 1


def test_a_full_disk_does_not_end_training(s3, monkeypatch, capsys):
    """The backup is written on this machine's disk first."""
    place = backup_place(URL)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(backup_file, "write", full)
    place.write(content(1))
    assert "THE BACKUP OF EPOCH 1 WAS NOT SENT: [Errno 28] No space left" in capsys.readouterr().err


class Killed(Exception):
    pass


class KilledAfter(keras.callbacks.Callback):
    def __init__(self, epochs):
        super().__init__()
        self.epochs = epochs

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epochs:
            raise Killed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_fit_goes_on_from_a_store(s3):
    def run(callbacks):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.3), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
        history = tfdist.fit(model, x, x[:, :3].argmax(1), batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
        return history.history, [np.asarray(variable) for variable in model.variables]

    undisturbed = run([])
    with pytest.raises(Killed):
        run([keras.callbacks.BackupAndRestore(URL), KilledAfter(3)])
    assert s3.content("backups/one/lease.json") is None and len(s3.names("backups/one")) == 2
    resumed = run([keras.callbacks.BackupAndRestore(URL)])
    assert resumed[0] == undisturbed[0]
    assert all((one == other).all() for one, other in zip(resumed[1], undisturbed[1], strict=True))
    assert not s3.names("backups/one"), "Keras' delete_checkpoint"


@pytest.mark.parametrize("url, words", [("s3:/x/y", "s3://x/y"), ("s4://x/y", "s4://"), ("s3://x", "names no place")])
def test_urls_that_name_no_place(url, words):
    with pytest.raises(ConfigError, match="BackupAndRestore's backup_dir") as error:
        backup_place(url)
    assert words in str(error.value)
