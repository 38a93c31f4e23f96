"""Keras' own test ideas for BackupAndRestore, written for ours, with plain `model.fit`: after every kind of
interruption the run ends where an undisturbed one does, bit for bit, and no step is done twice or left out."""

import contextlib
import os
import random
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.unit.control.test_own_files import let_own
from tfdist.artifacts import backup_checks, state
from tfdist.artifacts.backup import BackupAndRestore
from tfdist.artifacts.data_order import NoOrder
from tfdist.artifacts.optimizer_backup import OptimizerBackup
from tfdist.control.exit_codes import CheckpointError, ConfigError

EPOCHS, BATCHES = 3, 5


class Killed(Exception):
    pass


class Counter(keras.callbacks.Callback):
    """Counts the updates that are really made, and interrupts after one of them, when all callbacks have seen it."""

    def __init__(self, total, die_after=None, at_epoch_end=None):
        super().__init__()
        self.count, self.die_after, self.at_epoch_end = total.append, die_after, at_epoch_end  # no state to restore

    def on_train_batch_end(self, batch, logs=None):
        iterations = int(self.model.optimizer.iterations.numpy())
        self.count(iterations)

    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == self.die_after:
            raise Killed

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.at_epoch_end:
            raise Killed


def new_model(steps_per_execution=1):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.3), keras.layers.Dense(3)])
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


class AsNew:
    """A model whose variables begin each fit as those of a new one, so that it is traced once for a whole test."""

    def __init__(self, model):
        self.model = model
        model.optimizer.build(model.trainable_variables)
        self._first = [(each, np.asarray(each)) for each in (*model.variables, *model.optimizer.variables)]

    def begin(self):
        keras.utils.set_random_seed(0)
        for variable, value in self._first:
            variable.assign(value)
        return self.model


def fit(callbacks, model=None):
    """Trains a new model, or the given one; returns the state in which it ends, and the history."""
    model = new_model() if model is None else model.begin() if isinstance(model, AsNew) else model
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(BATCHES * 8, 4)).astype("float32"), rng.integers(0, 3, BATCHES * 8)
    history = model.fit(x, y, batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    return state_of(model), history.history


def state_of(model):
    return [np.asarray(variable) for variable in [*model.variables, *model.optimizer.variables]]


@pytest.fixture(scope="module")
def undisturbed():
    return fit([])


def same(state, expected):
    return all(a.tobytes() == b.tobytes() for a, b in zip(state, expected, strict=True))


@pytest.mark.parametrize(
    "save_freq, deaths",
    [
        ("epoch", [{"at_epoch_end": 0}]),
        (1, [{"at_epoch_end": 1}]),
        (1, [{"die_after": 2}, {"die_after": 9}]),
        (2, [{"die_after": 4}, {"die_after": 12}]),
    ],
)
@pytest.mark.slow
def test_interrupted_and_resumed(save_freq, deaths, undisturbed, tmp_path):
    done = []
    left = tmp_path / ".writing-step-00000001-abc"  # by a process that was killed
    for death in deaths:
        left.mkdir(exist_ok=True)
        with pytest.raises(Killed):
            # Ours comes first in the list, so that it has saved when the other one interrupts.
            fit([BackupAndRestore(tmp_path, save_freq=save_freq), Counter(done, **death)])
    state, history = fit([BackupAndRestore(tmp_path, save_freq=save_freq), Counter(done)])
    assert same(state, undisturbed[0])
    every = list(range(1, EPOCHS * BATCHES + 1))
    if save_freq == 1 and "die_after" in deaths[0]:
        assert done == every  # none twice; batches are passed over, and callbacks do not see them
    assert sorted(set(done)) == every  # none left out
    assert (
        history["loss"][-1] == undisturbed[1]["loss"][-1] and history["accuracy"][-1] == undisturbed[1]["accuracy"][-1]
    )
    assert os.listdir(tmp_path) == []  # deleted at the end


@pytest.mark.slow
def test_other_steps_per_execution(tmp_path):
    one, three = AsNew(new_model()), AsNew(new_model(steps_per_execution=3))
    expected, _ = fit([], three)
    with pytest.raises(Killed):
        fit([BackupAndRestore(tmp_path, save_freq=1), Counter([], die_after=8)], one)
    with pytest.raises(CheckpointError, match=r"after 3 batches .* compile\(steps_per_execution=2\): resume with"):
        fit([BackupAndRestore(tmp_path, save_freq=1)], new_model(steps_per_execution=2))
    state, _ = fit([BackupAndRestore(tmp_path, save_freq=1)], three)
    assert same(state, expected)
    with pytest.raises(Killed):  # after 3 and 2 batches
        fit([BackupAndRestore(tmp_path, save_freq=1), Counter([], die_after=5)], three)
    state, _ = fit([BackupAndRestore(tmp_path, save_freq=1)], one)
    assert same(state, expected)


@pytest.mark.slow
def test_a_damaged_backup_gives_way_to_the_one_before(undisturbed, tmp_path):
    model = AsNew(new_model())
    with pytest.raises(Killed):
        fit([BackupAndRestore(tmp_path, save_freq=2, double_checkpoint=True), Counter([], die_after=8)], model)
    newest = tmp_path / "step-00000008"
    assert newest.exists() and (tmp_path / "step-00000006").exists()
    next(newest.glob("*.data-*")).write_bytes(b"damaged")
    state, _ = fit([BackupAndRestore(tmp_path, save_freq=2, double_checkpoint=True)], model)
    assert same(state, undisturbed[0])


@pytest.mark.slow
def test_where_only_damaged_backups_are_nothing_begins_anew(tmp_path):
    """The damaged one would count as the newest, so that each new one, of an earlier step, would be removed at once."""
    with pytest.raises(Killed):
        unseeded_fit(IN_ORDER["arrays"], tmp_path, 4, Counter([], die_after=5))
    before = sorted(tmp_path.iterdir())
    (data,) = tmp_path.glob("step-00000004/*.data-*")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=f"^No backup in {tmp_path} is valid .*step-00000004.*: remove {tmp_path} to start"
    ):
        unseeded_fit(IN_ORDER["arrays"], tmp_path, 4)
    assert sorted(tmp_path.iterdir()) == before


def test_kept_when_asked_and_written_by_the_chief_alone(tmp_path):
    kept = BackupAndRestore(tmp_path / "kept", delete_checkpoint=False)
    unseeded_fit(IN_ORDER["arrays"], tmp_path / "deleted", 1, kept, BackupAndRestore(tmp_path / "other", writes=False))
    assert kept.store.steps() == [6]
    assert not (tmp_path / "other").exists()


def test_a_backup_that_cannot_be_written_is_told_and_does_not_count(tmp_path, monkeypatch, capfd):
    counted = []
    monkeypatch.setattr("tfdist.control.backup_count.count_one", lambda: counted.append(1))
    backup = BackupAndRestore(tmp_path / "full")
    monkeypatch.setattr(backup.store, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(ROWS, ROWS, batch_size=4, epochs=3, verbose=0, callbacks=[backup])
    assert counted == [] and capfd.readouterr().err.count("SNAPSHOT NOT WRITTEN") == 3


@pytest.mark.slow
def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    """He could put weights of his own there, which were restored without a word."""
    (tmp_path / ".writing-1").mkdir()  # what a killed process leaves
    let_own(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=f"^The folder {tmp_path} cannot be used .it belongs to another user.: name"):
        unseeded_fit(IN_ORDER["arrays"], tmp_path, "epoch")
    assert (tmp_path / ".writing-1").exists()


def test_another_model_is_refused(tmp_path):
    with pytest.raises(Killed):
        unseeded_fit(IN_ORDER["arrays"], tmp_path, "epoch", Counter([], die_after=3))
    with pytest.raises(CheckpointError, match="does not fit"):
        unseeded_fit(IN_ORDER["arrays"], tmp_path, "epoch", units=2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"backup_dir": ""},
        {"backup_dir": "x", "save_freq": 0},
        {"backup_dir": "x", "save_freq": True},
        {"backup_dir": "x", "save_freq": "batch"},
    ],
)
def test_wrong_arguments(arguments):
    with pytest.raises(ConfigError, match="BackupAndRestore"):
        BackupAndRestore(**arguments)
    assert issubclass(ConfigError, ValueError)  # as Keras raises


class Rates(keras.callbacks.Callback):
    """Keeps every loss, and sets the learning rate by what it has seen. `pending` is often what it is at first."""

    def __init__(self):
        super().__init__()
        self.losses, self.seen, self.begun, self.pending = [], 0, 0, []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun += 1

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        self.seen += self.begun
        self.pending = [] if len(self.pending) == 2 else [*self.pending, self.seen]
        self.losses.append(len(self.pending))
        self.model.optimizer.learning_rate = 0.2 / (1 + 0.1 * self.seen)


def model_that_stops():
    """A model whose fits early stopping ends."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return AsNew(model)


def stopping_fit(model, folder, callbacks, save_freq, first=True):
    """A fit that early stopping ends, with the best weights in a file."""
    folder.mkdir(exist_ok=True)
    model = model.begin()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 4)).astype("float32"), rng.integers(0, 2, 80)
    rates, stopping = Rates(), keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)
    best = keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", save_best_only=True, save_weights_only=True)
    backup = [BackupAndRestore(folder / "backup", save_freq=save_freq)] if save_freq else []
    others = [rates, stopping, best, *callbacks]
    order = [*backup, *others] if first else [*others, *backup]
    history = model.fit(x, y, batch_size=8, epochs=12, validation_split=0.3, verbose=0, callbacks=order)
    model.load_weights(folder / "best.weights.h5")
    return history.epoch, history.history, rates.losses, model.get_weights()


@pytest.mark.parametrize("first", [True, False])
def test_other_callbacks_and_the_history_continue(tmp_path, first):
    """Early stopping, the best model, a rate that a callback sets, and its lists: wherever the backup stands."""
    model = model_that_stops()
    epochs, history, losses, weights = stopping_fit(model, tmp_path / "alone", [], None)
    assert len(epochs) < 12, "it should stop early"
    for save_freq in ("epoch", 1, 3):
        folder = tmp_path / f"killed-{save_freq}"
        # For backups of epochs alone: in the second one and the last.
        for after in (*([] if save_freq == "epoch" else [4]), 9, 7 * len(epochs) - 3):
            with pytest.raises(Killed):
                stopping_fit(model, folder, [Counter([], die_after=after)], save_freq, first)
        found = stopping_fit(model, folder, [], save_freq, first)
        assert found[:3] == (epochs, history, losses), save_freq
        assert all((a == b).all() for a, b in zip(weights, found[3], strict=True)), save_freq


def test_a_fit_that_had_stopped_is_not_trained_on(tmp_path):
    """Killed after the backup of the epoch in which early stopping has stopped it."""

    class AtTheEnd(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            raise Killed

    model = model_that_stops()
    expected = stopping_fit(model, tmp_path, [], None)
    with pytest.raises(Killed):
        stopping_fit(model, tmp_path, [AtTheEnd()], "epoch")
    found = stopping_fit(model, tmp_path, [], "epoch")
    assert found[:3] == expected[:3]
    assert not list((tmp_path / "backup").glob("*step*")), "it is removed at the end"


class StopsAt(keras.callbacks.Callback):
    """Stops the fit after so many batches."""

    def __init__(self, count):
        super().__init__()
        self.count, self.seen = count, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        self.model.stop_training = self.seen >= self.count


@pytest.mark.parametrize("save_freq", [1, 3])
def test_callbacks_see_no_batch_that_is_skipped(tmp_path, save_freq):
    """They would stop the fit, or write files of weights, at batches that are not trained on again."""
    one = AsNew(new_model())

    def files(name, die_after=None, backup=True):
        (tmp_path / name).mkdir(exist_ok=True)
        written = keras.callbacks.ModelCheckpoint(
            tmp_path / name / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3
        )
        kept = [BackupAndRestore(tmp_path / f"{name}-backup", save_freq=save_freq)] if backup else []
        rows = keras.callbacks.CSVLogger(tmp_path / name / "rows.csv", append=True)
        state, history = fit([*kept, StopsAt(13), written, rows, Counter([], die_after=die_after)], one)
        rows = (tmp_path / name / "rows.csv").read_text()
        return sorted(os.listdir(tmp_path / name)), rows, history, state

    expected = files("alone", backup=False)
    for die_after in (4, 7, 9, 12):
        with pytest.raises(Killed):
            files("killed", die_after)
    found = files("killed")
    assert found[0] == expected[0] and found[2] == expected[2]
    assert all((a == b).all() for a, b in zip(expected[3], found[3], strict=True))
    if save_freq == 1:  # else the end of an epoch may be repeated
        assert found[1] == expected[1]


@pytest.mark.parametrize(
    "steps_per_execution, save_freq, deaths",
    [
        (2, 1, [{"at_epoch_end": 0}, {"die_after": 5}, {"die_after": 9}]),
        (2, 2, [{"at_epoch_end": 0}, {"die_after": 5}, {"die_after": 9}]),
        (5, 5, [{"die_after": 10}]),
    ],
)
def test_the_last_execution_of_an_epoch_may_have_fewer_batches(tmp_path, steps_per_execution, save_freq, deaths):
    model = AsNew(new_model(steps_per_execution))
    expected, history = fit([], model)
    for number, death in enumerate(deaths):
        folder = tmp_path / str(number)
        with pytest.raises(Killed):
            fit([BackupAndRestore(folder, save_freq=save_freq), Counter([], **death)], model)
        resumed = model if number else new_model(steps_per_execution)  # not traced yet, as in a new process
        found, again = fit([BackupAndRestore(folder, save_freq=save_freq)], resumed)
        assert same(found, expected) and again == history, death


def test_two_backups_of_one_fit(undisturbed, tmp_path):
    model, places = AsNew(new_model()), [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(Killed):
        fit([*(BackupAndRestore(place, save_freq=1) for place in places), Counter([], die_after=8)], model)
    found, again = fit([BackupAndRestore(place, save_freq=1) for place in places], model)
    assert same(found, undisturbed[0]) and again == undisturbed[1]
    assert not any(list(place.glob("step*")) for place in places), "both are removed at the end"


def test_callbacks_that_an_earlier_fit_has_used(undisturbed, tmp_path):
    """As in a notebook: a fit fails, and the next one gets the same objects."""
    model, counter = AsNew(new_model()), Counter([], die_after=7)
    callbacks = [BackupAndRestore(tmp_path, save_freq=2), counter]
    with pytest.raises(Killed):
        fit(callbacks, model)
    counter.die_after = None
    found, again = fit(callbacks, model)
    assert same(found, undisturbed[0]) and again == undisturbed[1]


def test_an_epoch_that_was_resumed_does_not_begin_the_next_fit(tmp_path):
    with pytest.raises(Killed):
        unseeded_fit(IN_ORDER["arrays"], tmp_path, 1, Counter([], die_after=4))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    two_epochs(model, tmp_path)
    assert int(model.optimizer.iterations) == 6
    assert model.fit(ROWS, ROWS, epochs=3, verbose=0).epoch == [0, 1, 2]


def test_log_values_that_no_backup_holds_are_left_out(tmp_path):
    class Odd(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["odd"] = object()

    unseeded_fit(IN_ORDER["arrays"], tmp_path, "epoch", Odd())


def test_a_list_of_keras_is_used_again(tmp_path):
    """With what the backup of a fit that has failed has put into it."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    x = np.arange(64, dtype="float32").reshape(16, 4) / 64
    counter = Counter([], die_after=3)
    backup = BackupAndRestore(tmp_path, save_freq=2)
    callbacks = keras.callbacks.CallbackList(
        [backup, counter], add_history=True, model=model, epochs=3, steps=4, verbose=0
    )
    with pytest.raises(Killed):
        model.fit(x, x[:, :3], batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    counter.die_after = None
    model.fit(x, x[:, :3], batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.iterations) == 12
    assert callbacks.callbacks[:2] == [backup, counter] and len(callbacks.callbacks) == 3


class Pages(keras.utils.PyDataset):
    """Keras shuffles them, if they are finite, with Python's random numbers."""

    def __init__(self, count=3):
        super().__init__()
        self.count = count

    @property
    def num_batches(self):
        return self.count

    def __getitem__(self, index):
        return np.ones((4, 1)), np.ones((4, 1))


ROWS = np.arange(12, dtype="float32").reshape(12, 1)
SHUFFLED = tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).shuffle(12)
WITHOUT_SEED = {
    "arrays": {"x": ROWS, "y": ROWS, "batch_size": 4},
    "dataset": {"x": SHUFFLED.batch(4)},
    "dataset of unknown length": {"x": SHUFFLED.filter(lambda x, y: True).batch(4)},
    "pages": {"x": Pages()},
}
IN_ORDER = {
    "arrays": {**WITHOUT_SEED["arrays"], "shuffle": False},
    "dataset": {"x": tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).shuffle(12, seed=1).batch(4)},
    "pages": {"x": Pages(), "shuffle": False},
    "endless pages": {"x": Pages(None), "steps_per_epoch": 3},
}


def unseeded_fit(given, folder, save_freq, *others, units=1):
    """In a process where nobody has set a seed."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse", run_eagerly=True)
    callbacks = [BackupAndRestore(folder, save_freq=save_freq), *others]
    return model.fit(**given, epochs=2, verbose=0, callbacks=callbacks).epoch


@pytest.mark.parametrize("name", WITHOUT_SEED)
def test_within_an_epoch_whose_order_cannot_be_found_again_nothing_is_saved(name, tmp_path, monkeypatch):
    """A resumed fit would draw another order: samples would come twice, or never."""
    monkeypatch.setattr(context.context(), "_seed", None)
    with pytest.raises(ConfigError, match=r"save_freq=2\).* without a seed.*set_random_seed\(1\).*save_freq=\"epoch\""):
        unseeded_fit(WITHOUT_SEED[name], tmp_path, 2)
    for save_freq in ("epoch",) if "unknown" in name else ("epoch", 3, 6):  # these end with an epoch of three batches
        assert unseeded_fit(WITHOUT_SEED[name], tmp_path, save_freq) == [0, 1]


def read_in_parallel(deterministic, option=None):
    options = tf.data.Options()
    if option is not None:
        options.deterministic = option
    rows = tf.data.Dataset.range(2).interleave(
        lambda _: tf.data.Dataset.from_tensor_slices((ROWS, ROWS)), num_parallel_calls=2, deterministic=deterministic
    )
    return {"x": rows.take(12).batch(4).with_options(options)}


def test_within_an_epoch_of_data_in_any_order_nothing_is_saved(tmp_path):
    """What is ready first comes first."""
    for given in (read_in_parallel(False), read_in_parallel(None, option=False)):
        with pytest.raises(ConfigError, match=r'save_freq=2\).* deterministic=False.*: drop that .*save_freq="epoch"'):
            unseeded_fit(given, tmp_path, 2)
        assert unseeded_fit(given, tmp_path, "epoch") == [0, 1]
    for number, given in enumerate((read_in_parallel(None), read_in_parallel(True))):
        assert unseeded_fit(given, tmp_path / str(number), 2) == [0, 1]
    with pytest.raises(CheckpointError, match=r"after 2 batches.*the data come anyhow.* again: remove the backup"):
        backup_checks.refuse_another_order("a", NoOrder("come anyhow", "sort them"), 2)


@pytest.mark.parametrize("name", IN_ORDER)
def test_an_order_that_is_known_needs_no_seed(name, tmp_path, monkeypatch):
    monkeypatch.setattr(context.context(), "_seed", None)
    assert unseeded_fit(IN_ORDER[name], tmp_path, 2) == [0, 1]


def test_a_backup_within_an_epoch_without_a_seed_is_not_taken(tmp_path, monkeypatch):
    """Earlier versions wrote such backups."""
    monkeypatch.setattr(context.context(), "_seed", None)
    given = WITHOUT_SEED["dataset"]
    with monkeypatch.context() as earlier, pytest.raises(Killed):
        earlier.setattr(backup_checks, "no_order", lambda _: None)
        unseeded_fit(given, tmp_path, 2, Counter([], die_after=2))
    for save_freq in (2, "epoch"):
        with pytest.raises(CheckpointError, match=r"after 2 batches .* without a seed.*: set the seed .*, or remove"):
            unseeded_fit(given, tmp_path, save_freq)


@pytest.mark.parametrize("name", ["arrays", "dataset", "pages"])
def test_a_backup_within_an_epoch_is_not_taken_with_another_seed(name, tmp_path):
    """As image_dataset_from_directory draws one for each process."""

    def given(seed):
        keras.utils.set_random_seed(seed)
        if name == "dataset":
            return {"x": tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).shuffle(12, seed=seed).batch(4)}
        return WITHOUT_SEED[name]

    with pytest.raises(Killed):
        unseeded_fit(given(1), tmp_path, 2, Counter([], die_after=2))
    with pytest.raises(CheckpointError, match=r"after 2 batches .* with another seed.*: set the seed .*, or remove"):
        unseeded_fit(given(2), tmp_path, 2)
    assert unseeded_fit(given(1), tmp_path, 2) == [0, 1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITHOUT_SEED)
def test_the_rest_of_a_pass_in_another_order_is_told(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(context.context(), "_seed", None)
    for steps, is_told in ((2, True), (3, "unknown" in name)):
        given = {**WITHOUT_SEED[name], "steps_per_epoch": steps}
        with pytest.raises(Killed):
            unseeded_fit(given, tmp_path, "epoch", Counter([], die_after=steps))
        capsys.readouterr()
        assert unseeded_fit(given, tmp_path, "epoch") == [0, 1]
        assert ("without a seed: the rest of the interrupted pass" in capsys.readouterr().err) == is_told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["arrays", "dataset", "repeated", "pages"])
def test_a_backup_within_a_pass_is_taken_with_a_word_if_the_seed_is_another_one(name, tmp_path, capsys):
    def given(seed, steps):
        keras.utils.set_random_seed(seed)
        dataset = tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).shuffle(12, seed=seed).batch(4)
        made = {"dataset": {"x": dataset}, "repeated": {"x": dataset.repeat()}}
        return {**WITHOUT_SEED, **made}[name] | {"steps_per_epoch": steps}

    with pytest.raises(Killed):
        unseeded_fit(given(1, 2), tmp_path, "epoch", Counter([], die_after=2))
    told = "the data are shuffled with another seed"
    capsys.readouterr()
    assert unseeded_fit(given(2, 2), tmp_path, "epoch") == [0, 1] and told in capsys.readouterr().err
    for killed, other, steps in ((2, 1, 2), (3, 2, 3)):  # a whole pass may come in any order
        with pytest.raises(Killed):
            unseeded_fit(given(1, steps), tmp_path, "epoch", Counter([], die_after=killed))
        assert unseeded_fit(given(other, steps), tmp_path, "epoch") == [0, 1]
        assert told not in capsys.readouterr().err


def shuffled_anew(**options):
    return {"x": tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).shuffle(12, seed=1, **options).batch(4)}


@pytest.mark.parametrize("die_after", [0, 2])
def test_a_dataset_of_an_interrupted_fit_is_not_read_again_where_its_order_counts(die_after, tmp_path):
    """As in a notebook, where only the fit is run again: each iterator of one dataset draws the next order."""
    given = shuffled_anew()
    with pytest.raises(Killed):
        unseeded_fit(given, tmp_path, 1, Counter([], die_after=die_after))
    for save_freq in (1, "epoch") if die_after else (1,):
        with pytest.raises(ConfigError, match=rf"backup in {tmp_path} was interrupted, .*: make the dataset anew"):
            unseeded_fit(given, tmp_path, save_freq)
    done = []
    assert unseeded_fit(shuffled_anew(), tmp_path, 1, Counter(done)) == [0, 1]
    assert done == list(range(die_after + 1, 7))


def test_a_dataset_may_be_read_again_where_its_order_is_the_same_or_does_not_count(tmp_path):
    steady, anew = shuffled_anew(reshuffle_each_iteration=False), shuffled_anew()
    with pytest.raises(Killed):
        unseeded_fit(steady, tmp_path, 1, Counter([], die_after=2))
    assert unseeded_fit(steady, tmp_path, 1) == [0, 1]
    with pytest.raises(Killed):
        unseeded_fit(anew, tmp_path, "epoch", Counter([], die_after=3))
    assert unseeded_fit(anew, tmp_path, "epoch") == [0, 1]
    whole = shuffled_anew()
    for _ in range(2):  # a program does the same in each process
        assert unseeded_fit(whole, tmp_path, 1) == [0, 1]
    with pytest.raises(Killed):  # as a trial of a search that fails in each process
        unseeded_fit(whole, tmp_path / "one", 1, Counter([], die_after=2))
    assert unseeded_fit(whole, tmp_path / "other", 1) == [0, 1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "rows, execution, given, save_freq",
    [
        (40, 4, {}, 20),  # Keras counts 12 of the 10 batches
        (12, 1, {"steps_per_epoch": 4}, 4),  # the data end after 3
    ],
)
def test_without_a_seed_nothing_is_saved_within_an_epoch(rows, execution, given, save_freq, tmp_path, monkeypatch):
    monkeypatch.setattr(context.context(), "_seed", None)
    saved = []

    class Recorded(BackupAndRestore):
        def _save(self, epoch, batch):
            saved.append((epoch, batch))
            super()._save(epoch, batch)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=execution, jit_compile=False)
    x = np.ones((rows, 1), "float32")
    model.fit(x, x, batch_size=4, epochs=4, verbose=0, callbacks=[Recorded(tmp_path, save_freq=save_freq)], **given)
    assert saved == [(2, 0), (4, 0)]


class Draws(keras.callbacks.Callback):
    """Draws numbers with the process's own generators, also when training and epochs begin."""

    def __init__(self, drawn):
        super().__init__()
        self.note = drawn.__setitem__  # no state to restore
        self.epoch = 0

    def on_train_begin(self, logs=None):
        np.random.random(), random.random()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        np.random.random(), random.random()

    def on_train_batch_end(self, batch, logs=None):
        self.note((self.epoch, batch), (np.random.random(), random.random()))


READ_AGAIN = {"x": tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).batch(4).repeat(), "steps_per_epoch": 3}


@pytest.mark.parametrize("given", [IN_ORDER["arrays"], READ_AGAIN], ids=["arrays", "read again"])
def test_what_callbacks_draw_goes_on(given, tmp_path):
    def drawn_in(folder, save_freq, *others):
        keras.utils.set_random_seed(1)
        drawn = {}
        unseeded_fit(given, folder, save_freq, Draws(drawn), *others)
        return drawn

    expected = drawn_in(tmp_path / "undisturbed", "epoch")
    for save_freq, killed in (("epoch", 4), (1, 5), (1, 2)):
        with pytest.raises(Killed):
            drawn_in(tmp_path / "killed", save_freq, Counter([], die_after=killed))
        found = drawn_in(tmp_path / "killed", save_freq)
        assert found and found == {place: expected[place] for place in found}, (save_freq, killed)


class DrawnPages(Pages):
    def __getitem__(self, index):
        return np.random.random((4, 1)), np.ones((4, 1))


@pytest.mark.parametrize("given", [{"x": DrawnPages()}, {"x": DrawnPages(None), "steps_per_epoch": 3}])
def test_data_that_draw_go_on(given, tmp_path):
    def losses(folder, *others):
        keras.utils.set_random_seed(1)
        history = []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: history.append(logs["loss"]))
        unseeded_fit({**given, "shuffle": False}, folder, 1, note, *others)
        return history

    expected = losses(tmp_path / "undisturbed")
    for killed in (2, 5):
        with pytest.raises(Killed):
            losses(tmp_path / "killed", Counter([], die_after=killed))
        assert losses(tmp_path / "killed") == expected[killed:]


class NumberedPages(Pages):
    def __init__(self, workers):
        super().__init__(6)
        self.workers = workers

    def __getitem__(self, index):
        return np.full((4, 1), index, "float32"), np.ones((4, 1))


@pytest.mark.parametrize("workers, save_freq, trained_again", [(1, 2, 0), (2, 2, 0), (1, "epoch", 4), (2, "epoch", 4)])
def test_batches_that_keras_shuffles_come_once_beside_callbacks_that_draw(workers, save_freq, trained_again, tmp_path):
    """Keras draws their order with Python's random numbers, as the callback does. What NumPy's draw goes on."""
    seen = []

    class Model(keras.Sequential):
        def train_step(self, data):
            seen.append(int(data[0][0, 0]))
            return super().train_step(data)

    def drawn_in(folder, *others):
        keras.utils.set_random_seed(1)
        model, drawn = Model([keras.Input((1,)), keras.layers.Dense(1)]), {}
        model.compile("sgd", "mse", run_eagerly=True)
        callbacks = [BackupAndRestore(folder, save_freq=save_freq), Draws(drawn), *others]
        model.fit(NumberedPages(workers), epochs=2, verbose=0, callbacks=callbacks)
        return {place: of_numpy for place, (of_numpy, _) in drawn.items()}

    expected = drawn_in(tmp_path / "undisturbed")
    undisturbed, seen[:] = list(seen), []
    with pytest.raises(Killed):
        drawn_in(tmp_path / "killed", Counter([], die_after=10))
    drawn = drawn_in(tmp_path / "killed")
    assert len(drawn) == 2 + trained_again and drawn == {place: expected[place] for place in drawn}
    assert seen == [*undisturbed[:10], *undisturbed[10 - trained_again :]]


class ReorderedPages(NumberedPages):
    """Reorders its rows in on_epoch_end, in the form of Keras' guides, or in on_epoch_begin."""

    def __init__(self, random, at="on_epoch_end"):
        super().__init__(1)
        self.order = np.arange(6)
        setattr(self, at, lambda: random.shuffle(self.order))

    def __getitem__(self, index):
        return super().__getitem__(self.order[index])


class CountsRows(keras.Sequential):
    """Only notes which rows it gets."""

    def train_step(self, data):
        self.seen.append(int(data[0][0, 0]))
        self.optimizer.iterations.assign_add(1)
        return {"loss": 0.0}


def rows_of(data, folder, save_freq, killed=None, steps=None):
    """The rows of three epochs, beside a callback that draws in each from the generators with which data reorder."""
    model = CountsRows([keras.Input((1,)), keras.layers.Dense(1)])
    model.seen = []
    model.compile("sgd", run_eagerly=True)
    draws = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: (np.random.random(), random.random()))
    callbacks = [BackupAndRestore(folder, save_freq=save_freq), draws, Counter([], die_after=killed)]
    with contextlib.suppress(Killed):
        model.fit(data, epochs=3, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=callbacks)
    return model.seen


@pytest.mark.parametrize(
    "random_numbers, at, save_freq, steps",
    [
        (np.random, "on_epoch_end", 2, None),
        (random, "on_epoch_end", "epoch", None),
        (np.random, "on_epoch_begin", 2, 6),
        (None, "on_epoch_end", 2, None),
    ],
)
def test_rows_reordered_by_a_generator_from_which_a_callback_draws(
    random_numbers, at, save_freq, steps, tmp_path, capsys
):
    """The callback is not called when earlier epochs are read again; the second time by a fit that has resumed."""

    def rows(folder, killed=None):
        keras.utils.set_random_seed(1)
        data = ReorderedPages(random_numbers or np.random.default_rng(1), at)
        return rows_of(data, folder, save_freq, killed, steps)

    expected = rows(tmp_path / "undisturbed")
    assert rows(tmp_path / "killed", 9) == expected[:9]
    begun = 6 if save_freq == "epoch" else 8
    assert rows(tmp_path / "killed", 15) == expected[begun:15]
    assert rows(tmp_path / "killed") == expected[12 if save_freq == "epoch" else 14 :]
    assert "another order" not in capsys.readouterr().err


def test_a_first_order_of_rows_without_a_seed_is_said(tmp_path, capsys):
    """Keras lets the data draw it before it calls callbacks."""
    for seed, killed in ((1, 15), (2, None)):
        keras.utils.set_random_seed(seed)
        rows_of(ReorderedPages(np.random), tmp_path, 2, killed)
    assert "draw in on_epoch_end from NumPy's global generator, which began in another" in capsys.readouterr().err


class First(keras.callbacks.Callback):
    """Keeps the first loss: what a best value is that no later epoch reaches."""

    def __init__(self):
        super().__init__()
        self.best = None

    def on_epoch_end(self, epoch, logs=None):
        self.best = self.best or logs["loss"]


def killed_with(first, folders, after):
    """A fit with a backup in each folder, which ends after so many steps."""
    with pytest.raises(Killed):
        others = [BackupAndRestore(each, save_freq=1) for each in folders[1:]]
        unseeded_fit(IN_ORDER["arrays"], folders[0], 1, *others, first, Counter([], die_after=after))


def test_a_best_value_is_in_the_backups_of_a_fit_that_gets_the_same_callbacks(tmp_path):
    """As in a notebook: the cell is interrupted and run again, then the process ends."""
    first, second = First(), First()
    killed_with(first, [tmp_path], 4)
    expected = first.best
    killed_with(first, [tmp_path], 5)
    unseeded_fit(IN_ORDER["arrays"], tmp_path, 1, second)
    assert second.best == first.best == expected


def test_the_backup_that_is_not_restored_goes_on_as_well(tmp_path):
    """With new files, and with what the other one has restored."""
    folders, first, second = [tmp_path / "one", tmp_path / "two"], First(), First()
    killed_with(first, folders, 4)
    killed_with(First(), folders, 5)
    newest = [BackupAndRestore(each).store.steps() for each in folders]
    assert all(len(steps) == 1 and steps[0] > 4 for steps in newest), newest
    shutil.rmtree(folders[0])
    unseeded_fit(IN_ORDER["arrays"], folders[1], 1, second)
    assert second.best == first.best


def test_a_backup_that_does_not_say_where_the_data_ended_is_refused(tmp_path):
    """As 0.1.0 wrote them; it was a KeyError."""
    backup = BackupAndRestore(str(tmp_path))
    backup.store.write(4, {"model/0000": np.zeros(1)}, {"epoch": 1, "batch": 0, "generators": state.generator_states()})
    with pytest.raises(CheckpointError, match=f'lacks "ends".*: remove {tmp_path} to start'):
        backup._backups.newest()


@pytest.mark.parametrize("damaged", [(0,), (1,), (0, 1)])
def test_a_fit_is_resumed_from_the_backup_that_is_not_damaged(tmp_path, damaged, capfd):
    folders = [tmp_path / "one", tmp_path / "two"]
    killed_with(First(), folders, 4)
    for place in damaged:
        next(folders[place].glob("step-00000004/*.data-*")).write_bytes(b"damaged")
    done = []
    others = [BackupAndRestore(folders[1], save_freq=1), Counter(done)]
    if len(damaged) == 2:
        both = " and ".join(map(str, folders))
        with pytest.raises(
            CheckpointError, match=f"No backup in {both} is valid .*one/.*two/.*: remove {both} to start"
        ):
            unseeded_fit(IN_ORDER["arrays"], folders[0], 1, *others)
        return
    assert unseeded_fit(IN_ORDER["arrays"], folders[0], 1, *others) == [0, 1] and done == [5, 6]
    assert "skipped a backup: " in capfd.readouterr().err


class Ever(keras.metrics.AUC):
    """Counts batches over all epochs. (AUC has a `_built`, but makes its variables in its constructor.)"""

    def __init__(self, **options):
        super().__init__(num_thresholds=3, **options)
        self.seen = self.add_variable((), "zeros", name="seen")

    def update_state(self, y, y_pred, sample_weight=None):
        super().update_state(y, keras.ops.sigmoid(y_pred), sample_weight)
        self.seen.assign_add(1.0)

    def result(self):
        return self.seen + 0.0


def test_a_backup_within_an_epoch_is_not_taken_with_other_metrics(tmp_path):
    """Their variables may have the same shapes. Metrics that Keras has numbered are the same."""

    def trained(metrics, *others):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("sgd", "mse", metrics=metrics, run_eagerly=True)
        two_epochs(model, tmp_path, *others, y=ROWS > 5)

    with pytest.raises(Killed):
        trained([keras.metrics.AUC(name="auc_3"), "accuracy"], Counter([], die_after=2))
    auc = keras.metrics.AUC(name="auc_4")
    for other in ([auc, "mae"], [auc], [auc, "accuracy", "mae"], [keras.metrics.AUC(3, name="auc"), "accuracy"]):
        with pytest.raises(
            CheckpointError, match=rf"^{tmp_path} was saved after 2 batches .*metrics .*accuracy.* now .*: compile"
        ):
            trained(other)
    trained([auc, "accuracy"])


class Slow(keras.optimizers.SGD):
    """Holds variables that Keras does not know of, made with the others."""

    def build(self, variables):
        super().build(variables)
        self.slow = [tf.Variable(tf.zeros(variable.shape)) for variable in variables]

    def update_step(self, gradient, variable, learning_rate):
        slow = self.slow[self._get_variable_index(variable)]
        slow.assign(0.9 * slow + gradient)
        super().update_step(slow, variable, learning_rate)


def test_variables_of_a_users_own_metric_and_optimizer_go_on(tmp_path):
    def trained(folder, *others):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(Slow(0.001, momentum=0.9), "mse", metrics=[Ever(name="ever")], run_eagerly=True)
        callbacks = [BackupAndRestore(folder), *others]
        history = model.fit(ROWS, ROWS > 5, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
        slots = [*model.optimizer.variables, *model.optimizer.slow]
        return history.history, [np.asarray(variable) for variable in (*model.weights, *slots)]

    history, expected = trained(tmp_path / "undisturbed")
    assert history["ever"] == [3, 6, 9]
    with pytest.raises(Killed):
        trained(tmp_path / "killed", Counter([], at_epoch_end=2))
    resumed, found = trained(tmp_path / "killed")
    assert resumed["ever"] == history["ever"]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Around(keras.optimizers.Optimizer):
    """A user's optimizer around one of Keras', whose slots it does not tell."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.1)
        self.base = inner

    def build(self, variables):
        self.base.build(variables)
        super().build(variables)

    def apply(self, gradients, variables=None):
        self.base.apply(gradients, variables)
        self.iterations.assign_add(1)


class Two(keras.Model):
    """Two layers, as the two models of a GAN, each with an optimizer that the model keeps beside the compiled one."""

    def __init__(self, are_built=True):
        super().__init__()
        self.layers_, self.optimizers = [keras.layers.Dense(1), keras.layers.Dense(1)], {}
        self.built = True
        for number, layer in enumerate(self.layers_):
            layer.build((None, 1))
            self.optimizers[str(number)] = keras.optimizers.Adam(0.1)
            if are_built:
                self.optimizers[str(number)].build(layer.trainable_variables)

    def train_step(self, data):
        for number, layer in enumerate(self.layers_):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((layer(data[0]) - data[1]) ** 2)
            gradients = tape.gradient(loss, layer.trainable_variables)
            self.optimizers[str(number)].apply(gradients, layer.trainable_variables)
        return {"loss": loss}


def around():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(Around(keras.optimizers.Adam(0.1)), "mse", run_eagerly=True)
    return model


def two(are_built=True):
    model = Two(are_built)
    model.compile(run_eagerly=True)
    return model


@pytest.mark.parametrize("make", [around, two])
def test_optimizers_beside_and_inside_the_compiled_one_go_on(make, tmp_path):
    def trained(folder, *others):
        keras.utils.set_random_seed(0)
        model, callbacks = make(), [BackupAndRestore(folder, save_freq=1), *others]
        model.fit(ROWS, ROWS, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights()

    class AtTheSecondEpoch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise Killed

    expected = trained(tmp_path / "undisturbed")
    with pytest.raises(Killed):
        trained(tmp_path / "killed", AtTheSecondEpoch())
    for ours, theirs in zip(trained(tmp_path / "killed"), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_optimizer_that_no_resumed_fit_could_restore_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"made after fit had begun .*optimizer by its build\(variables\)"):
        two(are_built=False).fit(ROWS, ROWS, verbose=0, callbacks=[BackupAndRestore(tmp_path)])


class Interrupted(Exception):
    pass


class Interrupts(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        raise Interrupted


def interrupted_while_reading():
    for _ in range(2):
        yield ROWS[:4], ROWS[:4], None
    raise Interrupted


def test_a_resumed_fit_that_fails_leaves_nothing_behind(tmp_path):
    """As in a notebook: later fits of the model, without a backup, train all their epochs and batches."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)

    def trained(given, *callbacks, epochs=2):
        before = int(model.optimizer.iterations)
        model.fit(**given, epochs=epochs, verbose=0, callbacks=list(callbacks))
        return int(model.optimizer.iterations) - before

    given = IN_ORDER["arrays"]
    with pytest.raises(Killed):
        trained(given, BackupAndRestore(tmp_path, save_freq=1), Counter([], die_after=5))
    for place in (0, 1):
        with pytest.raises(Interrupted):
            trained(given, *[BackupAndRestore(tmp_path, save_freq=1), Interrupts()][:: 1 - 2 * place])
        assert trained(given) == 6
    with pytest.raises(Exception, match="Interrupted"):
        trained({"x": interrupted_while_reading(), "steps_per_epoch": 3}, BackupAndRestore(tmp_path, save_freq=1))
    assert trained(given) == 6


def weighted_by_nothing():
    while True:
        yield ROWS[:4], ROWS[:4], None


def test_an_epoch_of_batches_without_weights_is_resumed(tmp_path):
    """Keras' iterators have a placeholder in place of None."""
    given = {"x": weighted_by_nothing(), "steps_per_epoch": 3}
    with pytest.raises(Killed):
        unseeded_fit(given, tmp_path, 1, Counter([], die_after=5))
    done = []
    assert unseeded_fit({**given, "x": weighted_by_nothing()}, tmp_path, 1, Counter(done)) == [0, 1]
    assert done == [6]


class InParts(keras.optimizers.Optimizer):
    """Updates the layers by optimizers of their own, each of which is built in the first step, for its part."""

    def __init__(self):
        super().__init__(learning_rate=0.1)
        self.first, self.second = keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.01)

    def apply(self, gradients, variables=None):
        self.first.apply(gradients[:2], variables[:2])
        self.second.apply(gradients[2:], variables[2:])
        self.iterations.assign_add(1)


def in_parts():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(InParts(), "mse")
    return model


def with_a_loaded_base(is_compiled=True):
    base = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
    if is_compiled:
        base.compile("adam", "mse")
        base.optimizer.build(base.trainable_variables)
    model = keras.Sequential([keras.Input((1,)), base, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


class AtTheSecondEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise Killed


def two_epochs(model, folder, *others, y=ROWS):
    callbacks = [BackupAndRestore(folder, save_freq=1), *others]
    model.fit(ROWS, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()


def seeded(make):
    keras.utils.set_random_seed(0)
    return make()


def watching():
    """Gives its optimizer TensorFlow's variables."""

    class Own(keras.Model):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=data[1], y_pred=self(data[0]))
            watched = tape.watched_variables()
            self.optimizer.apply_gradients(zip(tape.gradient(loss, watched), watched, strict=True))
            return {"loss": loss}

    inputs = keras.Input((1,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    model.compile("adam", "mse", run_eagerly=True)
    return model


def around_without_super():
    class Around(keras.optimizers.Optimizer):
        def __init__(self):
            super().__init__(0.1)
            self.inner = keras.optimizers.Adam(0.1)

        def build(self, variables):
            self.inner.build(variables)
            self.built = True

        def apply(self, gradients, variables=None):
            if not self.built:
                self.build(variables)
            self.inner.apply(gradients, variables)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(Around(), "mse", run_eagerly=True)
    return model


@pytest.mark.parametrize("make", [in_parts, with_a_loaded_base, watching, around_without_super])
def test_optimizers_go_on_that_the_first_step_builds_or_no_step_uses(make, tmp_path):
    """In a new process, and in the same."""
    expected, killed = two_epochs(seeded(make), tmp_path / "undisturbed"), seeded(make)
    with pytest.raises(Killed):
        two_epochs(killed, tmp_path / "killed", AtTheSecondEpoch())
    shutil.copytree(tmp_path / "killed", tmp_path / "again")
    for model, folder in ((seeded(make), tmp_path / "killed"), (killed, tmp_path / "again")):
        for ours, theirs in zip(two_epochs(model, folder), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_backup_lacks_only_the_other_optimizers_that_are_not_used(tmp_path):
    """Also after a resume, which restores what it had used before."""

    class UsesIt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.layers[0].optimizer.iterations.assign_add(1)

    def others(callback):
        newest, _ = callback.store.newest_valid()
        return [key for key in callback.store.read(newest) if "/other/" in key]

    model, backup = with_a_loaded_base(), BackupAndRestore(tmp_path, save_freq=1)
    for users, used in (((), False), ((UsesIt(),), True), ((), True)):
        with pytest.raises(Killed):
            two_epochs(model, tmp_path, *users, Counter([], die_after=int(model.optimizer.iterations) + 1))
        assert bool(others(backup)) == used


def test_a_backup_of_a_version_that_saved_the_compiled_optimizer_only(tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as earlier, pytest.raises(Killed):
        earlier.setattr(OptimizerBackup, "fields", lambda _: {})
        two_epochs(with_a_loaded_base(), tmp_path, AtTheSecondEpoch())
    two_epochs(with_a_loaded_base(), tmp_path)
    assert "saved the compiled optimizer only: the other optimizers of Sequential (1) keep" in capfd.readouterr().err


def test_a_layer_may_be_unfrozen_before_a_resume(tmp_path):
    """As in the second phase of fine-tuning."""

    def made(trainable):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, trainable=trainable), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    with pytest.raises(Killed):
        two_epochs(made(False), tmp_path, AtTheSecondEpoch())
    two_epochs(made(True), tmp_path)


@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
def test_an_optimizer_that_is_built_for_variables_beside_the_model_is_refused(kind, tmp_path):
    beside = kind(1.0)

    class Own(keras.Model):
        def train_step(self, data):
            self.optimizer.apply(
                [keras.ops.zeros(one.shape) for one in (beside, *self.weights)], [beside, *self.weights]
            )
            return {"loss": 0.0}

    inputs = keras.Input((1,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", run_eagerly=True)
    with pytest.raises(
        ConfigError, match=r"SGD was built after fit had begun, .*\([vV]ariable.*kernel.*build\(variables\)"
    ):
        two_epochs(model, tmp_path)


def test_what_cannot_be_restored_is_refused_after_the_first_batch(tmp_path):
    seen = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    with pytest.raises(ConfigError, match="made after fit had begun"):
        two(are_built=False).fit(ROWS, ROWS, batch_size=4, verbose=0, callbacks=[Sees(), BackupAndRestore(tmp_path)])
    assert seen == [0]
