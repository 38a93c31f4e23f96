"""tfdist.fit's file of an epoch: what callbacks keep comes back, and reading a stranger's executes nothing."""

import collections
import datetime
import enum
import io
import itertools
import logging
import os
import pathlib
import pickle
import random
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.unit.control.test_own_files import let_own
from tfdist.artifacts import backup_checks, backup_file, callback_state
from tfdist.compat import keras_epochs
from tfdist.control import lease
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.control.lease_owner import Patience
from tfdist.data.tuning import untuned
from tfdist.keras_fit.backup_place import FILE
from tfdist.keras_fit.epoch_backup import EpochBackup, held
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
    other.__dict__.update(backup_file.parse(stored(callback_state.state_of(stopping))(tmp_path)))
    assert other.monitor_op is keras.ops.less and (other.min_delta, other.best, other.wait) == (-0.5, 3.5, 2)
    np.testing.assert_array_equal(other.best_weights[0], np.ones([2, 3]))
    assert not hasattr(other, "other") and not hasattr(other, "hook")


class Best(NamedTuple):
    value: float = 0.0
    at: tuple[int, ...] = ()


class Remembering(keras.callbacks.Callback):
    """State of other kinds than numbers."""

    def __init__(self):
        super().__init__()
        self.last, self.seen, self.best = collections.deque([0], maxlen=3), {0}, Best()
        self.signs, self.by_sign = collections.Counter(), collections.defaultdict(lambda: [0.0])
        self.rows = {"seen": self.seen}
        self.python, self.old, self.new = random.Random(1), np.random.RandomState(1), np.random.default_rng(1)
        self.of_keras, self.of_tensorflow = keras.random.SeedGenerator(1), tf.random.Generator.from_seed(1)

    def draw(self):
        drawn = [self.python.gauss(0, 1), self.old.normal(), self.new.normal()]
        drawn += [float(keras.random.normal([], seed=self.of_keras)), float(self.of_tensorflow.normal([]))]
        self.last.append(drawn[0])
        self.seen.add(drawn[1])
        sign = "+" if drawn[0] > 0 else "-"
        self.signs[sign] += 1
        self.by_sign[sign].append(drawn[0])
        if drawn[1] > self.best.value:
            self.best = self.best._replace(value=drawn[1], at=(*self.best.at, len(self.seen)))
        return [*drawn, list(self.last), set(self.seen), dict(self.signs), dict(self.by_sign), self.best]


def test_containers_and_generators_of_a_callback_come_back(tmp_path):
    undisturbed, other = Remembering(), Remembering()
    for _ in range(4):
        undisturbed.draw()
    gone_on_with([undisturbed], [other], tmp_path)
    assert [other.draw() for _ in range(3)] == [undisturbed.draw() for _ in range(3)] and other.last.maxlen == 3


def gone_on_with(before, after, folder, first=()):
    """Gives the callbacks `after` what those before have come to, by a file. first: their facts at the start."""
    names, states, without = callback_state.names_of(before), list(map(callback_state.state_of, before)), {}
    shared = callback_state.shared_in(before)
    if first:
        states = list(map(callback_state.changed, states, callback_state.facts_of(before, states, shared), first))
        without = dict(zip(names, callback_state.deleted(before, first), strict=True))
    told = [dict(zip(names, states, strict=True)), shared, without]
    read = backup_file.parse(stored(told)(folder))
    callback_state.restore(after, *read)


def left_out(callback):
    return callback_state.not_held(callback, callback_state.state_of(callback))


def test_what_of_a_callback_no_backup_holds_is_known():
    callback = Remembering()
    callback.variables, callback.names = [tf.Variable(1.0)], np.array(["a"])
    callback.layers, callback.functions = [keras.layers.Dense(1)], {"print": print}
    callback.scores, callback.file = keras.metrics.Mean(), io.StringIO()
    assert left_out(callback) == ["variables", "names", "scores"]
    callback.day, callback.meter, callback.left = datetime.date(2026, 1, 1), Meter(), itertools.count()
    callback.masked, callback.meters = np.ma.array([1.0, 2.0], mask=[0, 1]), [Meter()]
    callback.folder, callback.logger, callback.loss = pathlib.Path("."), logging.getLogger("a"), keras.losses.Huber()
    assert left_out(callback)[3:] == ["day", "meter", "left", "masked", "meters"]
    assert not left_out(keras.callbacks.ReduceLROnPlateau())


class Meter:
    """State of a class of the user's own."""

    def __init__(self):
        self.count = 0


class Noting(keras.callbacks.Callback):
    """Into a list and an array that others hold, too; other attributes change their type."""

    def __init__(self, notes, counts, factor=1):
        super().__init__()
        self.notes, self.counts, self.factor = notes, counts, factor
        self.first, self.rest, self.scale = None, [], keras.Variable(1.0, trainable=False)
        self.itself = [0]
        self.itself.append(self.itself)

    def note(self):
        self.notes.append(self.factor * len(self.notes))
        self.counts += 1
        self.first, self.rest, self.scale = [1], None, None


class Other(Noting):
    pass


def test_what_callbacks_share_stays_shared_and_each_finds_its_own_state(tmp_path):
    notes, counts = [1.0], np.zeros(2)
    before = [Noting(notes, counts), Noting(notes, counts, 2), Other(notes, counts, 3)]
    for callback in before:
        callback.note()
    notes, counts = [1.0], np.zeros(2)
    after = [Other(notes, counts), keras.callbacks.Callback(), Noting(notes, counts), Noting(notes, counts)]
    assert callback_state.names_of(after) == ["Other 0", "Callback 0", "Noting 0", "Noting 1"]
    gone_on_with(before, after, tmp_path)
    assert notes == [1.0, 1, 4, 9] and counts.tolist() == [3, 3]
    for callback, factor in ((after[0], 3), (after[2], 1), (after[3], 2)):
        assert callback.notes is notes and callback.counts is counts and callback.factor == factor
        assert (callback.first, callback.rest, callback.scale) == ([1], None, None)
    assert left_out(after[0]) == ["itself"]


class Table(keras.callbacks.Callback):
    """What holds what changes while it trains."""

    __slots__ = ("count",)
    of_class: list[int] = []

    def __init__(self):
        super().__init__()
        self.count, self.window, self.kinds = 0, None, None
        self.rows = []
        self.log = {"rows": self.rows, "last": []}
        self.best = self.now = np.zeros(2)  # one at first, two later
        self.first = self.second = [0]  # the first is not touched
        self.pair, self.one, self.other = [[1], [2]], [3], [4]  # three at first, two later
        self.weights, self.given = None, [1.0]
        self.lines = [[]]
        self.line = self.lines[-1]  # of another line later, empty as this one
        self.left = self.right = {}  # two later, both empty
        self.gone, self.tensor, self.epochs = True, tf.constant(1.0), None

    def train(self):
        self.count += 1
        self.rows.append([self.count])
        self.log["last"] = self.rows[-1]
        self.now = self.now + self.count
        if self.count == 1:
            self.best, self.second = self.now.copy(), [1]
            self.window, self.kinds = collections.deque([0], maxlen=2), {0}
            self.other = self.pair[0] = self.one
            self.weights = self.given  # which has not changed yet
        if self.count > 3:
            self.given.append(self.count)
        if self.count == 1:
            self.left = {}
            del self.gone
        self.line.append(self.count)
        if self.count % 2:
            self.lines.append([])
            self.line = self.lines[-1]
        if self.count == 4:
            self.left["here"] = 4
        self.of_class.append(self.count)
        self.tensor, self.epochs = self.tensor * 0.5, range(self.count)
        self.best += 1
        self.log["last"].append(len(self.rows))
        self.one.append(self.count)
        self.second.append(self.first[-1])
        self.window.append(self.count)
        self.kinds.add(self.count)

    def told(self):
        names = "count window kinds rows log pair one other first second weights lines line left right of_class epochs"
        told = [getattr(self, name) for name in names.split()] + [self.best.tolist(), self.now.tolist()]
        return [*told, float(self.tensor), hasattr(self, "gone")]


@pytest.mark.parametrize("trained", (1, 2, 3))
def test_objects_within_containers_are_as_many_as_they_were(tmp_path, trained):
    undisturbed, other = type("Table", (Table,), {"of_class": []})(), type("Table", (Table,), {"of_class": []})()
    shared = callback_state.shared_in([undisturbed])
    first = callback_state.facts_of([undisturbed], [callback_state.state_of(undisturbed)], shared)
    for _ in range(trained):
        undisturbed.train()
    rows = other.rows
    gone_on_with([undisturbed], [other], tmp_path, first)
    for _ in range(2):
        undisturbed.train()
        other.train()
        assert other.told() == undisturbed.told()
        assert "of_class" not in other.__dict__  # but in the class still
    assert other.log["rows"] is other.rows is rows and other.log["last"] is rows[-1]
    assert other.pair[0] is other.one is other.other and other.first is not other.second


class Named(NamedTuple):
    at: int


class Mode(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    WARM = "warm"
    MAIN = "main"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


class State(enum.Enum):
    IDLE = 0


class Parts(enum.IntFlag):
    FIRST = 1
    SECOND = 2


def test_what_would_come_back_as_another_type_is_not_held():
    callback = Remembering()
    callback.records, callback.by_name = [Named(1)], {"a": collections.defaultdict(lambda: 0)}
    callback.modes, callback.by_mode, callback.state = [Mode.MAIN], {Mode.MAIN: 1}, State.IDLE
    callback.texts, callback.flags = {Mode.MAIN: ""}, {State.IDLE: False}
    callback.by_layer, callback.same = {State.IDLE: keras.layers.Dense(1)}, {"a": ["b"]}
    assert left_out(callback) == ["records", "by_name", "modes", "by_mode", "state", "texts", "flags"]


def test_a_member_of_an_enum_comes_back_as_the_same_one(tmp_path):
    before, after = keras.callbacks.Callback(), keras.callbacks.Callback()
    before.mode, before.level, before.later, before.gone = Mode.MAIN, Level.HIGH, Mode.MAIN, None
    after.mode, after.level, after.later, after.gone = Mode.WARM, Level.LOW, None, Mode.WARM
    before.parts, after.parts, before.other, after.other = ~Parts(0), Parts.FIRST, 7, Level.LOW
    gone_on_with([before], [after], tmp_path)
    assert after.mode is Mode.MAIN and after.level is Level.HIGH
    assert after.parts is Parts.FIRST | Parts.SECOND and after.other == 7  # no member
    assert after.later == Mode.MAIN and after.gone is None  # where nothing tells the class, an equal value


class Outputs(keras.metrics.Metric):
    """Keeps all outputs of an epoch, in a variable whose shape is not fixed, and strings."""

    def __init__(self):
        super().__init__()
        self.seen = tf.Variable(tf.zeros([0]), shape=[None], trainable=False)
        self.words = [tf.Variable(b"one\0", trainable=False), tf.Variable([b"two", b""], trainable=False)]

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign(tf.concat([self.seen, y_pred[:, 0]], 0))

    def result(self):
        return tf.shape(self.seen)[0]

    def reset_state(self):
        self.seen.assign([])


def fitted_in_turn(folder, epochs, end_at=-1, others=(), **options):
    """The epochs of a fit of a new model, or until it is ended before one of them."""

    def end(epoch, logs=None):
        if epoch == end_at:
            raise Ended

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Outputs()], run_eagerly=True)
    backup = keras.callbacks.BackupAndRestore(folder, **options)
    callbacks = [*others, keras.callbacks.LambdaCallback(on_epoch_begin=end), backup]
    data = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    history = tfdist.fit(model, *data, epochs=epochs, verbose=0, callbacks=callbacks)
    assert {*history.history.get("outputs", ())} <= {4}
    return history.epoch


def test_a_backup_of_a_later_fit_of_the_program_is_not_taken(tmp_path):
    assert fitted_in_turn(tmp_path, 2) == [0, 1]
    with pytest.raises(Ended):
        fitted_in_turn(tmp_path, 4, end_at=3)
    assert fitted_in_turn(tmp_path, 4) == [0, 1, 2, 3]  # the second again, in the same process
    with pytest.raises(Ended):
        fitted_in_turn(tmp_path, 4, end_at=3)
    backup_checks._ended.clear()  # as in a new process
    with pytest.raises(CheckpointError, match="fit number 3 of a program with this folder, but this is number 1"):
        fitted_in_turn(tmp_path, 2)


def test_backups_that_are_kept_are_gone_on_from(tmp_path):
    for epochs in (1, 2):
        assert fitted_in_turn(tmp_path, epochs, delete_checkpoint=False) == [0, 1][:epochs]
    with pytest.raises(Ended):
        fitted_in_turn(tmp_path, 4, end_at=3, delete_checkpoint=False)
    backup_checks._ended.clear()  # as in a new process
    for epochs, trained in ((1, [0, 1, 2]), (4, [0, 1, 2, 3])):
        assert fitted_in_turn(tmp_path, epochs, delete_checkpoint=False) == trained


def test_generators_go_on_where_a_fit_that_was_stopped_had_left_them(tmp_path):
    """A later fit of the program may draw from them."""

    def draw(epoch, logs=None):
        np.random.random()
        random.random()
        stopping.model.stop_training = epoch == 1

    stopping, found = keras.callbacks.LambdaCallback(on_epoch_end=draw), []
    for _ in range(2):  # the second has no epoch left
        keras.utils.set_random_seed(1)
        assert fitted_in_turn(tmp_path, 4, others=[stopping], delete_checkpoint=False) == [0, 1]
        found.append((np.random.random(), random.random()))
        backup_checks._ended.clear()  # as in a new process
    assert found[0] == found[1]


def test_a_resumed_fit_that_fails_leaves_no_epoch_at_which_later_ones_begin(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    data = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")

    def end(at):
        def note(epoch, logs=None):
            if epoch == at:
                raise Ended

        return [keras.callbacks.LambdaCallback(on_epoch_begin=note), keras.callbacks.BackupAndRestore(tmp_path)]

    for at in (2, 3):  # begun at 0, and at 2
        with pytest.raises(Ended):
            tfdist.fit(model, *data, epochs=4, verbose=0, callbacks=end(at))
        assert model.fit(*data, epochs=2, verbose=0).epoch == [0, 1]
    with pytest.raises(Ended):
        tfdist.fit(model, *data, epochs=4, verbose=0, callbacks=end(3))  # before its first epoch has begun
    assert tfdist.fit(model, *data, epochs=2, verbose=0).epoch == [0, 1]


def test_a_second_backup_is_refused(tmp_path):
    """Nothing would ever be written to it."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    two = [keras.callbacks.BackupAndRestore(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="keeps one backup, but .* BackupAndRestore for .*/a, .*/b: give it once"):
        tfdist.fit(model, np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=two)
    assert not list(tmp_path.iterdir())


class OwnHistory(keras.callbacks.History):
    """With an attribute of its own."""

    def __init__(self):
        super().__init__()
        self.count = 0


@pytest.mark.parametrize("kind", [keras.callbacks.History, OwnHistory])
def test_a_history_among_the_callbacks_has_each_epoch_once(tmp_path, kind):
    with pytest.raises(Ended):
        fitted_in_turn(tmp_path, 3, end_at=2, others=[kind()])
    history = kind()
    assert fitted_in_turn(tmp_path, 3, others=[history]) == history.epoch == [0, 1, 2]
    assert len(history.history["loss"]) == 3


def test_other_callbacks_find_the_history_of_a_resumed_fit(tmp_path):
    """A schedule may decide by it, or what is done when training ends."""

    def noting(seen):
        def note(*_, logs=None):
            seen.append(len(callback.model.history.history.get("loss", [])))

        callback = keras.callbacks.LambdaCallback(on_epoch_begin=note, on_train_end=note)
        return callback

    seen = []
    with pytest.raises(Ended):
        fitted_in_turn(tmp_path, 3, end_at=2, others=[noting(seen)])
    fitted_in_turn(tmp_path, 3, others=[noting(seen)], delete_checkpoint=False)
    fitted_in_turn(tmp_path, 3, others=[noting(seen)])  # which has no epoch left
    assert seen == [0, 1, 2, 2, 3, 3]


class Warming(keras.callbacks.Callback):
    """State under a private name, in a variable, and a setting."""

    def __init__(self, beta, most=5):
        super().__init__()
        self._count, self.beta, self._most = 0, beta, most

    def on_epoch_begin(self, epoch, logs=None):
        self._count += 1
        self.beta.assign(0.1 * self._count)
        self.model.optimizer.learning_rate = 0.05 * min(self._count, self._most)


class Ended(Exception):
    pass


def trained(folder, epochs, most=5, end_at=-1):
    """The weights of a fit over four epochs, or until it is ended before one of them."""
    keras.utils.set_random_seed(3)
    beta = keras.Variable(0.0, trainable=False)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    model.compile(optimizer, lambda y, p: (y - p) ** 2 + beta * p**2)

    def end(epoch, logs=None):
        if epoch == end_at:
            raise Ended

    x = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")
    callbacks = [
        Warming(beta, most),
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.LambdaCallback(on_epoch_begin=end),
        keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False),
    ]
    tfdist.fit(model, x, x[:, :1], epochs=epochs, batch_size=8, callbacks=callbacks, verbose=0)
    return model.get_weights()


@pytest.mark.slow
def test_state_of_callbacks_under_private_names_and_in_variables_comes_back(tmp_path):
    whole = trained(tmp_path / "whole", 4)
    with pytest.raises(Ended):
        trained(tmp_path / "ended", 4, end_at=2)
    for one, other in zip(whole, trained(tmp_path / "ended", 4), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_setting_of_a_callback_that_is_changed_counts(tmp_path):
    with pytest.raises(Ended):
        trained(tmp_path / "ended", 4, most=5, end_at=2)
    with pytest.raises(Ended):
        trained(tmp_path / "other", 4, most=1, end_at=2)
    (tmp_path / "other" / FILE).write_bytes((tmp_path / "ended" / FILE).read_bytes())
    changed, kept = trained(tmp_path / "other", 4, most=1), trained(tmp_path / "ended", 4)
    assert not all(np.array_equal(one, other) for one, other in zip(changed, kept, strict=True))


def test_what_callbacks_draw_goes_on_where_data_are_read_again(tmp_path):
    def drawn_in(folder, end_at=-1):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        found = {}

        def draw(epoch, logs=None):
            if epoch == end_at:
                raise Ended
            found[epoch] = np.random.random(), random.random()

        data = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones((4, 1)))).repeat()
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=draw), keras.callbacks.BackupAndRestore(folder)]
        tfdist.fit(model, data, epochs=4, steps_per_epoch=1, verbose=0, callbacks=callbacks)
        return found

    expected = drawn_in(tmp_path / "undisturbed")
    with pytest.raises(Ended):
        drawn_in(tmp_path / "killed", end_at=2)
    assert drawn_in(tmp_path / "killed") == {epoch: expected[epoch] for epoch in (2, 3)}


def test_of_two_jobs_on_one_folder_the_second_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "_PATIENCE", Patience(dead=20.0, damaged=2.0, to_end=0.1))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")

    def fit(epochs):
        callbacks = [keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)]
        return tfdist.fit(model, x, y, epochs=epochs, callbacks=callbacks, verbose=0).epoch

    with lease.held(tmp_path, "another"), pytest.raises(ConfigError, match=f"{tmp_path} is in use .*another folder"):
        fit(1)
    assert fit(1) == [0] and fit(2) == [0, 1]  # nor does a job stand in its own way
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    """He could put weights of his own there, which were restored without a word."""
    let_own(monkeypatch, tmp_path)
    with (
        pytest.raises(
            ConfigError, match=f"^BackupAndRestore's folder {tmp_path} cannot be used .it belongs to another"
        ),
        held([keras.callbacks.BackupAndRestore(tmp_path)], OneDevice()),
    ):
        pass


def test_no_data_is_read_with_the_tuner():
    """Its end may hold Python's lock for up to a minute (data/tuning.py)."""
    read = []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    with keras_epochs.data_changed(lambda dataset: read.append(untuned(dataset)) or read[-1]):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        model.predict(tf.data.Dataset.from_tensors(np.ones((4, 2))), verbose=0)
    assert {dataset.options().autotune.enabled for dataset in read} == {False}


def test_one_worker_reads_without_the_tuner_too(monkeypatch):
    read = []
    monkeypatch.setattr("tfdist.keras_fit.api.untuned", lambda dataset: read.append(untuned(dataset)) or read[-1])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = np.ones((4, 2)), np.ones((4, 1))
    tfdist.fit(model, x, y, validation_data=tf.data.Dataset.from_tensors((x, y)), verbose=0)
    of_fit = len(read)
    tfdist.predict(model, x, verbose=0)
    assert 2 <= of_fit < len(read) and {dataset.options().autotune.enabled for dataset in read} == {False}
