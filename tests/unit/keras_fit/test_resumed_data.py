"""A fit that is killed between epochs and started again is, bit for bit, the fit that was not: for every kind of data.

Against plain Keras in the same process: the batches that each callback sees, the history, the weights."""

import contextlib
import functools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from tensorflow.python.eager import context

import tfdist
from tests.fuzz import keras_settings
from tfdist.artifacts.backup import BackupAndRestore
from tfdist.artifacts.data_order import reads_all_rows
from tfdist.artifacts.data_position import _are_independent
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.keras_fit import epoch_backup
from tfdist.keras_fit.arrays import shuffle_alike
from tfdist.runtime.one_device import OneDevice

EPOCHS, ROWS = 4, 11


class Killed(Exception):
    pass


class KilledAfter(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.last = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.last:
            raise Killed


class Pages(keras.utils.PyDataset):
    """With state of its own; where nothing reads ahead over the end of an epoch, state of the process and of the epoch,
    too. It draws at the ends of epochs from a generator from which a callback draws.
    """

    def __init__(self, length=4, ahead=False):
        super().__init__()
        self.length, self.ahead, self.rng, self.epochs = length, ahead, np.random.default_rng(3), 0

    @property
    def num_batches(self):
        return self.length

    def __getitem__(self, index):
        x = np.full([3, 1], index + self.rng.normal() + (0 if self.ahead else np.random.normal() + 10 * self.epochs))
        return x, x

    def on_epoch_end(self):
        self.epochs += np.random.normal()


def rows():
    return np.arange(ROWS, dtype="float32").reshape(ROWS, 1)


def source(batch=4, shuffled=True):
    """TensorFlow adds no prefetching of its own: under plain Keras, an iterator that reads ahead draws the seed of its
    next pass in a race with the iterators of validation, whose seeds come from the same generator.
    """
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    dataset = tf.data.Dataset.from_tensor_slices((rows(), rows())).with_options(options)
    return (dataset.shuffle(ROWS, seed=5) if shuffled else dataset).batch(batch)


def generator():
    rng = np.random.default_rng(5)
    for _ in range(60):
        x = rng.normal(size=(3, 1))
        yield x, x


def noisy(dataset):
    return dataset.map(lambda x, y: (x + tf.random.normal([1]), y))


def with_a_variable(dataset):
    counter = tf.Variable(0.0)
    return dataset.map(lambda x, y: (x + counter.assign_add(1.0), y))


def shared(**options):
    dataset = source()
    return {"x": dataset, "validation_data": dataset.take(1), **options}


# name -> (arguments of fit, as they are made anew in every run; whether past epochs must be read again)
CASES = {
    "dataset": (lambda: {"x": source()}, False),
    "dataset, steps": (lambda: {"x": source(), "steps_per_epoch": 2}, False),
    "dataset, more steps than a pass": (lambda: {"x": source(), "steps_per_epoch": 4}, False),
    "unknown length": (lambda: {"x": source().filter(lambda *_: True)}, False),
    "unknown length, steps": (lambda: {"x": source().filter(lambda *_: True), "steps_per_epoch": 2}, False),
    "repeated": (lambda: {"x": source().repeat(), "steps_per_epoch": 2}, True),
    "repeated before batches": (lambda: {"x": source(1).unbatch().repeat(3).batch(4), "steps_per_epoch": 5}, True),
    "repeated, whole": (lambda: {"x": source().repeat(2)}, True),
    "cached": (lambda: {"x": source().cache()}, True),
    "noise": (lambda: {"x": noisy(source()), "steps_per_epoch": 2}, False),
    "a variable": (lambda: {"x": with_a_variable(source())}, True),
    "class weights": (
        lambda: {
            "x": source(),
            "steps_per_epoch": 2,
            "class_weight": {number: 1 + number % 2 for number in range(ROWS)},
        },
        False,
    ),
    "arrays": (lambda: {"x": rows(), "y": rows(), "batch_size": 4}, False),
    "arrays, steps": (lambda: {"x": rows(), "y": rows(), "batch_size": 4, "steps_per_epoch": 2}, False),
    "arrays, steps alone, split": (
        lambda: {"x": rows(), "y": rows(), "steps_per_epoch": 2, "validation_split": 0.3},
        False,
    ),
    "arrays in batches": (
        lambda: {"x": rows(), "y": rows(), "batch_size": 4, "steps_per_epoch": 2, "shuffle": "batch"},
        False,
    ),
    "pages": (lambda: {"x": Pages()}, True),
    "pages, steps": (lambda: {"x": Pages(ahead=True), "steps_per_epoch": 3, "shuffle": False}, True),
    "endless pages": (lambda: {"x": Pages(None, ahead=True), "steps_per_epoch": 3}, True),
    "generator": (lambda: {"x": generator(), "steps_per_epoch": 3}, True),
    "generator for validation": (lambda: {"x": source(), "validation_data": generator(), "validation_steps": 2}, True),
    "shared shuffle": (lambda: shared(validation_freq=2), False),
    "shared shuffle, steps": (lambda: shared(steps_per_epoch=2), False),
    "validated in steps": (
        lambda: {
            "x": source().repeat(),
            "steps_per_epoch": 2,
            "validation_data": source(shuffled=False).repeat(),
            "validation_steps": 2,
        },
        True,
    ),
    "unknown validation": (lambda: shared(validation_data=source().filter(lambda *_: True)), False),
}
QUICK = ("dataset, steps", "unknown length, steps", "repeated", "arrays, steps", "pages", "shared shuffle")
RUNS = [pytest.param(name, {}, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES] + [
    pytest.param(*run, marks=[pytest.mark.slow])
    for run in [
        (name, {"steps_per_execution": 2}) for name in ("dataset", "unknown length", "arrays, steps", "repeated")
    ]
    + [(name, {"initial_epoch": 1}) for name in ("dataset, steps", "pages")]
]


def set_seed(number):
    """keras.utils.set_random_seed, which also makes TensorFlow forget its compiled kernels: half of the time of a fit
    here, where no kernel holds a state of draws.
    """
    keras_settings.seed(number)
    context.context()._seed, context.context()._rng = number, random.Random(number)


def run(arguments, callbacks, seed=7, steps_per_execution=1, initial_epoch=0):
    keras_settings.forget_names()
    if seed is not None:
        set_seed(seed)
    eagerly = steps_per_execution == 1  # quick; few operations in a step
    layer = keras.layers.Dense(1, use_bias=not eagerly, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.5),
        "mse",
        metrics=["mae"],
        steps_per_execution=steps_per_execution,
        jit_compile=False,
        run_eagerly=eagerly,
    )
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["mae"]),
        on_epoch_end=lambda epoch, logs: np.random.normal(),
    )
    history = model.fit(
        epochs=EPOCHS, initial_epoch=initial_epoch, verbose=0, callbacks=[watch, *callbacks], **arguments()
    )
    return {"history": history.history, "weights": [weight.tolist() for weight in model.get_weights()], "seen": seen}


@functools.cache
def undisturbed_run(name, **options):
    return run(CASES[name][0], [], **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, options", RUNS)
def test_killed_between_epochs(name, options, tmp_path, capsys):
    arguments, reads = CASES[name]
    undisturbed = undisturbed_run(name, **options)

    def backup_here():
        return epoch_backup.replace([keras.callbacks.BackupAndRestore(tmp_path)], OneDevice())

    for epoch in (1, 3) if name.endswith("steps") else (3,):
        with pytest.raises(Killed):
            run(arguments, [KilledAfter(epoch), *backup_here()], **options)
    capsys.readouterr()
    resumed = run(arguments, backup_here(), **options)
    seen = resumed.pop("seen")
    assert seen and seen == undisturbed["seen"][-len(seen) :]
    assert resumed == {key: undisturbed[key] for key in resumed}
    assert ("read again" in capsys.readouterr().err) == reads


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name, save_freq",
    [
        ("repeated", 3),
        ("dataset, steps", "epoch"),
        ("dataset, steps", 3),
        ("arrays, steps", 3),
        ("pages", "epoch"),
        ("dataset", "epoch"),
    ],
)
def test_the_callback_for_plain_keras(name, save_freq, tmp_path):
    arguments, undisturbed = CASES[name][0], undisturbed_run(name)
    with pytest.raises(Killed):
        run(arguments, [BackupAndRestore(tmp_path, save_freq=save_freq), KilledAfter(3)])
    resumed = run(arguments, [BackupAndRestore(tmp_path, save_freq=save_freq)])
    assert resumed["weights"] == undisturbed["weights"]
    assert resumed["history"]["loss"][-1] == undisturbed["history"]["loss"][-1]


@pytest.mark.filterwarnings("ignore")
def test_without_a_seed(tmp_path, capsys, monkeypatch):
    """Arrays come in the order of the run before, whose seed is kept; for a dataset it cannot be had, and that is
    said.
    """

    def order(kept):
        arguments = {
            "shuffle": True,
            "sample_weight": None,
            "class_weight": None,
            "validation_split": 0.0,
            "validation_data": None,
            "batch_size": None,
            "validation_batch_size": None,
            "steps_per_epoch": 3,
        }
        x, _ = shuffle_alike(OneDevice(), rows(), rows(), arguments, kept)
        return [batch[0].numpy().ravel().tolist() for batch in x]

    monkeypatch.setattr(context.context(), "_seed", None)
    first, second = (epoch_backup.EpochBackup(tmp_path, OneDevice(), []) for _ in range(2))
    expected = order(first)
    second.order = first.order
    assert order(second) == expected and list(map(len, expected)) == [4, 4, 3]  # as Keras takes steps_per_epoch alone

    def dataset():
        return {"x": tf.data.Dataset.from_tensor_slices((rows(), rows())).shuffle(ROWS).batch(4), "steps_per_epoch": 2}

    with pytest.raises(Killed):
        run(
            dataset,
            [KilledAfter(3), *epoch_backup.replace([keras.callbacks.BackupAndRestore(tmp_path)], OneDevice())],
            seed=None,
        )
    run(dataset, epoch_backup.replace([keras.callbacks.BackupAndRestore(tmp_path)], OneDevice()), seed=None)
    assert "shuffled without a seed" in capsys.readouterr().err


def fit_of_a_dataset(dataset, folder, *others):
    """Three batches in epochs of two: the third epoch begins with a pass, the second and the fourth in one."""
    backup = epoch_backup.replace([keras.callbacks.BackupAndRestore(folder)], OneDevice())
    return run(lambda: {"x": dataset, "steps_per_epoch": 2}, [*others, *backup])["seen"]


@pytest.mark.filterwarnings("ignore")
def test_the_rest_of_a_pass_in_another_order_is_told(tmp_path, capsys):
    for last, said in ((2, False), (3, True)):
        with pytest.raises(Killed):
            fit_of_a_dataset(source(shuffled=False).shuffle(3, seed=1), tmp_path, KilledAfter(last))
        capsys.readouterr()
        fit_of_a_dataset(source(shuffled=False).shuffle(3, seed=2), tmp_path)
        assert ("shuffled with another seed (the seeds were" in capsys.readouterr().err) == said


@pytest.mark.filterwarnings("ignore")
def test_a_dataset_that_an_interrupted_fit_has_read_is_made_anew(tmp_path):
    dataset = source()
    expected = fit_of_a_dataset(source(), tmp_path)
    with pytest.raises(Killed):
        fit_of_a_dataset(dataset, tmp_path, KilledAfter(3))
    with pytest.raises(ConfigError, match="was interrupted, .*: make the dataset anew"):
        fit_of_a_dataset(dataset, tmp_path)
    seen = fit_of_a_dataset(source(), tmp_path)
    assert seen and seen == expected[-len(seen) :]


def backups(folder):
    return [epoch_backup.replace([keras.callbacks.BackupAndRestore(folder)], OneDevice()), [BackupAndRestore(folder)]]


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_train_batch_end", "on_epoch_end"])
def test_a_callback_that_reads_the_shuffled_dataset_of_its_fit_is_refused(tmp_path, hook):
    """A resumed fit would not make its iterators, which take orders from the seed."""

    class Peeks(keras.callbacks.Callback):
        pass

    reads = {
        "on_epoch_begin": lambda dataset: next(iter(dataset.unbatch().take(1))),
        "on_train_batch_end": lambda dataset: list(dataset.as_numpy_iterator()),
        "on_epoch_end": lambda dataset: peeks.model.evaluate(dataset, verbose=0),
    }
    for backup in backups(tmp_path):
        dataset, peeks = source(), Peeks()
        setattr(Peeks, hook, lambda self, number, logs=None, dataset=dataset: reads[hook](dataset))
        with pytest.raises(ConfigError, match=f"shuffled with a seed, and Peeks.{hook} reads it, too: .* of its own"):
            run(lambda dataset=dataset: {"x": dataset}, [peeks, *backup])
    run(lambda: {"x": dataset}, [peeks])  # nothing is to be resumed


def test_a_callback_may_not_read_a_shuffled_validation_that_ends_before_its_data(tmp_path):
    for backup in backups(tmp_path):
        for steps in (None, 1, "as many as are taken"):
            dataset = source() if steps in (None, 1) else source().take(2)
            shows = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda number, logs=None, dataset=dataset: next(iter(dataset))
            )
            refused = pytest.raises(ConfigError, match="LambdaCallback.on_epoch_end reads it, too: .*shuffle=False")
            with refused if steps else contextlib.nullcontext():
                run(
                    lambda dataset=dataset, steps=steps: {
                        "x": source(),
                        "validation_data": dataset,
                        "validation_steps": steps if steps == 1 else None,
                    },
                    [shows, *backup],
                )


def test_which_validations_read_all_rows():
    read = tf.data.Dataset.range(9).shuffle(9, seed=1)
    for whole in (
        read.batch(2),
        read.map(lambda x: (x, None)).batch(2).cache().prefetch(1),
        read.batch(3).unbatch(),
        read.interleave(tf.data.Dataset.from_tensors).batch(2),
        tf.data.Dataset.range(9).take(2).batch(2, drop_remainder=True),
    ):
        assert reads_all_rows(whole)
    for part in (
        read.take(2),
        read.take(2).shuffle(2, seed=1).batch(2),
        read.batch(2, drop_remainder=True),
        read.skip(1),
    ):
        assert not reads_all_rows(part)


def test_validations_that_a_callback_has_ended_are_stepped_over(tmp_path):
    """Nobody knows where their data end."""

    class Ends(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = True

    def fit(*callbacks):
        data = {"x": source(), "validation_data": source().filter(lambda *_: True)}
        return run(lambda: data, [Ends(), *callbacks])["seen"]

    expected = fit()
    for backup in backups(tmp_path):
        with pytest.raises(Killed):
            fit(KilledAfter(2), *backup)
        seen = fit(*backup)
        assert seen and seen == expected[-len(seen) :]


def test_a_fit_in_a_callback_of_a_fit_may_not_read_the_data_of_the_other(tmp_path):
    """Its own beginning comes in no resumed fit."""
    for backup in backups(tmp_path):
        dataset = source()
        inner = keras.callbacks.LambdaCallback(on_train_begin=lambda logs=None, dataset=dataset: next(iter(dataset)))
        outer = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda number, logs=None, inner=inner: run(lambda: {"x": source()}, [inner])
        )
        with pytest.raises(ConfigError, match="LambdaCallback.on_epoch_end reads it, too"):
            run(lambda dataset=dataset: {"x": dataset}, [outer, *backup])


def test_a_callback_may_read_what_takes_no_order_from_the_seed_of_its_fit(tmp_path):
    def reading(dataset):
        def read(*_, logs=None):
            next(iter(dataset))

        return read

    for backup in backups(tmp_path):
        dataset = source()
        again = reading(dataset)  # in a resumed fit
        other = keras.callbacks.LambdaCallback(on_epoch_end=reading(source()), on_train_begin=again, on_train_end=again)
        in_order = keras.callbacks.LambdaCallback(on_epoch_end=reading(source(shuffled=False)))
        run(lambda dataset=dataset: {"x": dataset, "validation_data": dataset.take(1)}, [other, in_order, *backup])


@pytest.mark.parametrize("stops", ["on_epoch_end", "on_train_batch_end"])
def test_a_later_fit_finds_the_data_where_one_that_was_stopped_has_left_them(tmp_path, stops):
    def program():
        def stop(number, logs=None):
            stopping.model.stop_training = number == 1

        stopping, dataset = keras.callbacks.LambdaCallback(**{stops: stop}), source()
        kept = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        run(lambda: {"x": dataset}, [stopping, *epoch_backup.replace([kept], OneDevice())])
        return [x.ravel().tolist() for x, _ in dataset.as_numpy_iterator()]

    assert program() == program()  # the second has no epoch left


def test_what_is_known_of_datasets():
    files = tf.data.Dataset.from_tensor_slices(["a", "b"])
    for dataset, known in (
        (source().prefetch(2), True),
        (noisy(source()), True),
        (source().repeat(), False),
        (with_a_variable(source()), False),
        (source().cache(), False),
        (
            tf.data.TFRecordDataset(["a"])
            .map(lambda record: tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature([], tf.float32)}))
            .batch(2),
            True,
        ),
        (files.interleave(tf.data.TFRecordDataset, num_parallel_calls=2).shuffle(9, seed=1).batch(3), True),
        (files.flat_map(lambda name: tf.data.Dataset.range(5).shuffle(5)), False),
        (tf.data.Dataset.zip((source(), source())), True),
        (
            tf.data.Dataset.from_generator(generator, output_signature=(tf.TensorSpec([3, 1]), tf.TensorSpec([3, 1]))),
            False,
        ),
        (source().map(lambda x, y: (tf.numpy_function(lambda value: value, [x], tf.float32), y)), False),
    ):
        assert _are_independent(TFDatasetAdapter(dataset)) == known, dataset


@pytest.mark.parametrize("kind", [keras.callbacks.BackupAndRestore, BackupAndRestore])
def test_a_backup_every_few_batches_is_told_to_be_one_of_epochs(tmp_path, capsys, kind):
    for often, said in ((5, "(save_freq=5 is ignored: a killed run resumes from the last epoch)"), ("epoch", "")):
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        tfdist.fit(model, np.ones([8, 4]), np.ones([8, 1]), verbose=0, callbacks=[kind(str(tmp_path), often)])
        told = capsys.readouterr().err
        assert "BackupAndRestore is replaced by the one of tfdist.fit" in told and ("save_freq" in told) == bool(said)
        assert said in told


def with_validation(seed):
    """A split into training and validation rows, as a script that has no seed makes it anew at each start."""
    order = np.random.default_rng(seed).permutation(ROWS)
    x = rows()[order]
    return {"x": x[:8], "y": x[:8], "validation_data": (x[8:], x[8:])}


DATA = {
    "split": (with_validation(1), with_validation(2), "x, y, validation_data"),
    "shape": ({"x": rows(), "y": rows()}, {"x": rows()[:9], "y": rows()[:9]}, "x, y"),
    "type": ({"x": rows(), "y": rows()}, {"x": rows(), "y": rows().astype("float64")}, "y"),
    "weights": (
        {"x": rows(), "y": rows(), "sample_weight": np.ones(ROWS)},
        {"x": rows(), "y": rows(), "sample_weight": np.arange(ROWS)},
        "sample_weight",
    ),
    "weights added": ({"x": rows(), "y": rows()}, {"x": rows(), "y": rows(), "sample_weight": rows()}, "sample_weight"),
    "length": (
        {"x": tf.data.Dataset.from_tensor_slices((rows(), rows())).batch(3)},
        {"x": tf.data.Dataset.from_tensor_slices((rows(), rows())).batch(4)},
        "x",
    ),
    "of a dictionary": (
        {"x": {"a": rows()}, "y": tf.constant(rows())},
        {"x": {"a": rows() + 1}, "y": tf.constant(rows())},
        "x",
    ),
    "the same": (with_validation(1), with_validation(1), ""),
    "not looked at": ({"x": Pages()}, {"x": Pages(5)}, ""),
}


@pytest.mark.parametrize("name", DATA)
def test_a_fit_that_resumes_with_other_data_is_refused(tmp_path, name):
    before, now, changed = DATA[name]

    def fit(given, *callbacks):
        keras_settings.seed(3)
        inputs = {"a": keras.Input([1])} if isinstance(given["x"], dict) else keras.Input([1])
        model = keras.Model(inputs, keras.layers.Dense(1)(*keras.tree.flatten(inputs)))
        model.compile("sgd", "mse", run_eagerly=True)
        backup = keras.callbacks.BackupAndRestore(str(tmp_path))
        return tfdist.fit(model, **given, epochs=EPOCHS, verbose=0, callbacks=[*callbacks, backup])

    with pytest.raises(Killed):
        fit(before, KilledAfter(2))
    if changed:
        with pytest.raises(
            CheckpointError, match=rf"The data have changed since .* was written \({changed}\): restore"
        ):
            fit(now)
    assert len(fit(before if changed else now).history["loss"]) == EPOCHS
