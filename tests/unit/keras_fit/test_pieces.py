"""The pieces of tfdist.fit that need no second worker."""

import collections
import contextlib
import enum
import hashlib
import importlib
import pickle
import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.artifacts import backup_file
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import CheckpointError, ConfigError, DataError
from tfdist.keras_fit import backup_place, epoch_backup, joining, own_rows
from tfdist.keras_fit.batches import END, Batches, digest
from tfdist.keras_fit.data_identity import identity_of, what_changed
from tfdist.keras_fit.loops import Loop
from tfdist.keras_fit.model import every_row_checked
from tfdist.keras_fit.refusals import refuse_lists, refuse_no_rows, refuse_unsupported
from tfdist.keras_fit.rows import OwnRows
from tfdist.keras_fit.step_function import Replacements, StepFunction
from tfdist.runtime.one_device import OneDevice
from tfdist.runtime.peers import ALIKE, Peers


class Rank:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_are_contiguous_and_complete(n, size, dynamic):
    def rows(x):
        parts = [OwnRows(Rank(rank, size), {"a": x, "scalar": tf.constant(3.0)}) for rank in range(size)]
        taken = [part.take({"a": x, "scalar": tf.constant(3.0), "none": None})["a"] for part in parts]
        return [tf.shape(own)[0] for own in taken], tf.concat(
            [part.trim(own) for part, own in zip(parts, taken, strict=True)], 0
        )

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
    black = np.zeros([5, 40, 40])
    black[2, 20, 20] = 1
    assert digest((black,)) != digest((np.zeros([5, 40, 40]),)) and digest((x, tf.constant([0, 1, 7, 3]))) != base
    for odd in (
        np.array([np.nan]),
        np.zeros([0, 3]),
        np.array([True, False]),
        np.float32(3),
        tf.constant([1.5], tf.bfloat16),
        np.array([b"a"], object),
    ):
        assert digest((odd,)) == digest((tf.constant(odd),)) != digest((np.ones(9),))
    assert digest({"a": x, "b": x + 1}) == digest({"b": x + 1, "a": x}) != digest({"a": x + 1, "b": x})
    for other in (
        (x, tf.range(4)[::-1]),
        (x[::-1], tf.range(4)),
        (tf.cast(x, tf.float64), tf.range(4)),
        (x[:3], tf.range(3)),
        (tf.reshape(x, [4, 3, 1]), tf.range(4)),
    ):
        assert digest(other) != base
    assert digest((tf.constant(["a", "b"]),)) != digest((tf.constant(["a", "c"]),))
    with pytest.raises(ConfigError, match="RaggedTensor"):
        digest((tf.ragged.constant([[1], [2, 3]]),))


def test_a_backup_without_some_of_the_optimizers_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.other = keras.optimizers.Adam()
    with pytest.raises(ConfigError, match="Sequential has others beside it, which would start from the beginning"):
        tfdist.fit(model, np.ones([4, 2]), np.ones(4), callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])


def test_backup_of_another_model_is_refused(tmp_path):
    def fit(units, epochs):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
        model.compile("sgd", "mse")
        given = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        return model.fit(
            np.zeros([4, 2]),
            np.zeros([4, units]),
            epochs=epochs,
            verbose=0,
            callbacks=epoch_backup.replace([given], OneDevice()),
        ).history

    assert len(fit(2, 2)["loss"]) == 2
    assert len(fit(2, 3)["loss"]) == 3  # two of them from the file
    with pytest.raises(CheckpointError, match="another model"):
        fit(3, 4)
    whole = (tmp_path / backup_place.FILE).read_bytes()
    assert (tmp_path / backup_place.FILE).stat().st_mode & 0o777 == 0o600
    for damaged in (b"damaged", whole[:-1], whole[:200] + b"?" + whole[201:], whole + b"?", b""):
        (tmp_path / backup_place.FILE).write_bytes(damaged)
        if damaged:
            with pytest.raises(CheckpointError, match="cannot be read"):
                fit(2, 4)


def test_a_backup_file_gives_back_what_was_written_and_executes_nothing(tmp_path):
    executed = []

    class Bomb:
        def __reduce__(self):
            return executed.append, (1,)

    value = {
        "list": [1, 2.5, None, True, float("inf")],
        "tuple": (np.float32(0.1), "text"),
        3: np.arange(6).reshape(2, 3),
        "comparison": keras.ops.less,
        "small": np.zeros([2, 0], "float16"),
        "bfloat16": tf.constant([1.5, 2.5], tf.bfloat16).numpy(),
        "scalar": np.array(7),
        "bytes": b"\x00\xff",
        "complex": [1 - 2j, np.complex64(3j)],
        "counts": collections.Counter("abba"),
        "ordered": collections.OrderedDict([(2, {1, 2}), (1, frozenset([(1, 2)]))]),
        "lists": collections.defaultdict(list, {"x": [1], "y": [collections.deque([1, 2], 2)]}),
    }
    assert backup_file.is_storable(value)
    backup_file.write(tmp_path / "file", value)
    data = (tmp_path / "file").read_bytes()
    found = backup_file.parse(data)
    assert list(map(repr, found.values())) == list(map(repr, value.values())) and list(found) == list(value)
    assert all(
        found[key].dtype == value[key].dtype and found[key].shape == value[key].shape
        for key in (3, "small", "bfloat16", "scalar")
    )
    backup_file.write(tmp_path / "other order", np.arange(3, dtype=">f4"))
    assert backup_file.parse((tmp_path / "other order").read_bytes()).tolist() == [0, 1, 2]
    records = np.zeros(2, [("epoch", "i4"), ("value", "f4")])
    others = (Bomb(), len, np.array(["a"]), {"a": [Bomb()]}, records, records[0], np.zeros(2, np.longdouble))
    red = enum.IntEnum("Color", "RED").RED
    for other in (*others, red, (red,), {red: 1}, type("Meters", (float,), {})(1.0)):
        assert not backup_file.is_storable(other)
    for foreign in (pickle.dumps(Bomb()), b"", data[:40], data.replace(b"less", b"exec")):
        with pytest.raises(ValueError):
            backup_file.parse(foreign)
    rng = np.random.default_rng(0)
    for _ in range(300):  # with a right checksum, too
        body = bytearray(data[48:])
        for position in rng.integers(0, min(len(body), 500), 3):
            body[position] = rng.integers(256)
        with contextlib.suppress(ValueError):
            backup_file.parse(data[:16] + hashlib.sha256(body).digest() + body)
    assert not executed


@pytest.mark.slow
def test_own_rows_only_where_sums_are_right(monkeypatch):
    monkeypatch.setattr(own_rows, "LARGEST", -1)

    class Largest(keras.metrics.Metric):
        """Its state is no sum."""

        def update_state(self, y_true, y_pred, sample_weight=None):
            pass

        def result(self):
            return 0.0

    def suits(model=None, loss="mse", metrics=(), y=None):
        model = model or keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile("sgd", loss, metrics=list(metrics))
        if y is None:
            y = (
                tf.zeros([4, *model.output_shape[1:]])
                if model.outputs is None or len(model.outputs) == 1
                else [tf.zeros([4, 2])] * 2
            )
        batch = (tf.zeros([4, *model.input_shape[1:]]), y)
        model._symbolic_build(data_batch=batch)
        return own_rows.suits(model, batch)

    class Own(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class Inner(keras.Model):
        """Keras leaves its metric out of those of the model around it."""

        def __init__(self):
            super().__init__()
            self.usage = keras.metrics.Mean()

        def call(self, x):
            self.usage.update_state(x)
            return x

    two = keras.Input((2,))
    losses, metrics = keras.losses, keras.metrics
    assert suits() and suits(metrics=["mae", "accuracy", metrics.AUC(), metrics.R2Score(), metrics.OneHotMeanIoU(2)])
    assert suits(metrics=[metrics.F1Score("micro"), metrics.FBetaScore()])
    for loss in (
        "binary_crossentropy",
        losses.CosineSimilarity(),
        losses.huber,
        losses.CategoricalFocalCrossentropy(),
        losses.MeanSquaredError(reduction="mean"),
    ):
        assert suits(loss=loss), loss
    for loss in (
        losses.MeanSquaredError(reduction="sum"),
        losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        losses.Dice(),
        "dice",
        "tversky",
        losses.Tversky(0.3, 0.7),
        "hinge",
        "squared_hinge",
        losses.CosineSimilarity(axis=0),
        lambda y_true, y_pred: keras.ops.mean(y_true - y_pred, -1),
    ):
        assert not suits(loss=loss), loss
    assert not suits(loss=losses.Circle(gamma=2.0), y=tf.zeros([4]))
    assert not suits(loss=losses.SparseCategoricalCrossentropy(ignore_class=1), y=tf.zeros([4]))
    for metric in (
        lambda y_true, y_pred: keras.ops.mean(y_pred),
        metrics.MeanMetricWrapper(losses.dice),
        metrics.MeanMetricWrapper(lambda y_true, y_pred: keras.ops.mean(y_true - y_pred, -1)),
        metrics.CosineSimilarity(axis=0),
        losses.dice,
        metrics.OneHotMeanIoU(2, axis=0),
        metrics.PearsonCorrelation(),
    ):
        assert not suits(metrics=[metric]), metric
    assert not suits(Own([keras.Input((2,)), keras.layers.Dense(2)]))
    assert not suits(metrics=[Largest()])
    assert not suits(keras.Sequential([two, Inner(), keras.layers.Dense(2)]))
    assert not suits(keras.Model(two, [keras.layers.Dense(2)(two), keras.layers.Dense(2)(two)]), loss=["mse", "mse"])
    assert not suits(keras.Sequential([keras.Input((3, 2)), keras.layers.Masking(), keras.layers.Dense(2)]))
    monkeypatch.setattr(own_rows, "LARGEST", 1 << 20)
    assert not suits()


def test_models_that_cannot_be_spread():
    class Trainer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def train_step(self, data):
            return {"loss": keras.ops.mean(self.inner(data))}

    with pytest.raises(ConfigError, match=r"Trainer has no call\(\), and no keras.Model inside it"):
        refuse_unsupported(Trainer())
    trainer = Trainer()
    trainer.inner = keras.Sequential([trainer.inner])
    refuse_unsupported(trainer)
    with pytest.raises(ConfigError, match="is stateful"):
        refuse_unsupported(keras.Sequential([keras.Input((3, 2), batch_size=4), keras.layers.LSTM(2, stateful=True)]))
    refuse_unsupported(keras.Sequential([keras.Input((3, 2)), keras.layers.LSTM(2)]))


def test_one_process_is_keras(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(joining, "_runtime", None)
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


class LooksUpSome(keras.Model):
    """How many rows of its table, only a run tells."""

    def __init__(self):
        super().__init__()
        self.table, self.last = keras.layers.Embedding(30, 4), keras.layers.Dense(1)

    def call(self, x):
        places = tf.where(x > 2)
        return self.last(
            tf.math.unsorted_segment_sum(self.table(tf.gather_nd(x, places)), places[:, 0], tf.shape(x)[0])
        )


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [True, False])
def test_one_process_updates_rows_as_keras(monkeypatch, jit_compile):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(joining, "_runtime", None)
    x = np.random.default_rng(0).integers(0, 9, (20, 6))

    def weights(fit):
        keras.utils.set_random_seed(0)
        model = LooksUpSome()
        model(x)
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=jit_compile)
        fit(model, x, np.ones([20, 1], "float32"), batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    for one, other in zip(weights(tfdist.fit), weights(keras.Model.fit), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_copies_the_weights_copies_them_before_the_first_step(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(joining, "_runtime", None)
    x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    before = model.get_weights()[0]
    model.compile(keras.optimizers.ScheduleFreeAdamW(1e-4), "mse")
    tfdist.fit(model, x, x[:, :1], batch_size=8, verbose=0)
    (averaged,) = [variable for variable in model.optimizer.variables if "momentum" in variable.path]
    np.testing.assert_allclose(averaged.numpy(), before, atol=1e-3)  # in plain Keras it begins at 0


def test_a_model_that_is_not_compiled_is_refused():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ConfigError, match=r"not compiled: call model.compile\(...\) before tfdist.fit"):
        tfdist.fit(model, np.zeros((4, 3)), np.zeros(4))


def test_data_without_a_batch_are_refused_and_data_that_have_come_to_their_end_are_not():
    with pytest.raises(
        DataError, match="^The data do not contain a single batch: give x, or the dataset, at least one sample"
    ):
        Batches(Two(), "fit").next(iter([]))
    batches, rows = Batches(Two(), "fit"), iter([np.ones([2, 3])])
    assert batches.next(rows).shape == (2, 3) and batches.next(rows) is END


def test_a_loop_goes_on_after_one_in_its_callbacks():
    """`tfdist.evaluate` after a batch, of data whose length is unknown: what comes next may be their end."""
    model, two, batches = keras.Sequential([keras.layers.Dense(1)]), Two(), iter([np.ones([2, 3])])
    model.compile(run_eagerly=True)
    model.test_step = lambda batch: {}
    others: Any = types.SimpleNamespace(example=types.SimpleNamespace(), in_lockstep=contextlib.nullcontext)
    replacements: Any = Replacements(model, two, others, others, others)
    function = StepFunction(Loop.TEST, replacements, lambda batch: None)
    with function.installed():
        model.test_function(batches)
        with function.installed():
            pass
        with pytest.raises(StopIteration):
            model.test_function(batches)
    assert two.met_at == ["evaluate"]


class Two:
    rank = 0

    def __init__(self):
        self.met_at = []

    def all_gather(self, row):
        return np.stack([row, row])

    def broadcast_object(self, value, name):
        self.met_at.append(name)


def test_workers_tell_each_other_which_loop_they_begin():
    """Each time: the chief alone may predict in a callback of a later epoch."""
    two = Two()
    batches = Batches(two, "predict")
    for _ in range(2):
        batches.begin()
        for _ in range(3):
            batches.agree(np.ones([2, 3]))
    assert two.met_at == ["predict", "predict"]


@pytest.mark.parametrize(
    "said, more",
    [
        ("Rank 0 is at 'predict', rank 1 at 'batches'.", " All workers .* in a callback, not only the chief."),
        (ALIKE, ""),
    ],
)
def test_a_worker_that_is_elsewhere_hears_that_all_make_the_same_calls(monkeypatch, said, more):
    class Control:
        def gather_for_user(self, data, name):
            raise ConfigError(said)

    monkeypatch.setattr("tfdist.runtime.batch_norm.synchronize_with", lambda runtime: None)
    with pytest.raises(ConfigError, match=f"^{said}{more}$") as caught:
        Peers(Cluster(), Control()).broadcast_object(None, "predict")
    assert str(caught.value).lower().count(ALIKE) == 1


def test_rows_in_python_lists_are_refused_and_lists_of_arrays_are_not():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rows, array = [[1.0, 2.0], [3.0, 4.0]], np.ones([2, 2])
    for call, words in (
        (
            lambda: tfdist.fit(model, rows, [0.0, 1.0]),
            r"tfdist.fit: x has its rows in a Python list, .*numpy.array\(x",
        ),
        (
            lambda: tfdist.fit(model, array, [0.0, 1.0]),
            r"tfdist.fit: y has its rows .*give an array, numpy.array\(y\)\.$",
        ),
        (
            lambda: tfdist.fit(model, array, array, validation_data=(rows, [0, 1])),
            r"validation_data .*numpy.array\(x\), ",
        ),
        (lambda: tfdist.evaluate(model, array, ("a", "b")), r"tfdist.evaluate: y has its rows in a Python tuple"),
        (lambda: tfdist.predict(model, rows), r"tfdist.predict: x has its rows"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
    refuse_lists("fit", x=[array, array], y=(array,), sample_weight=None, validation_data=(array, array), more=[])


def test_a_model_with_a_fit_of_its_own_may_be_given_lists_of_texts():
    """As those of KerasHub, which make a dataset of them."""

    class OfTexts(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def fit(self, x, y, **arguments):
            return super().fit(np.array([[float(len(text))] for text in x]), np.array(y), **arguments)

    model = OfTexts()
    model.compile("sgd", "mse")
    found = tfdist.fit(model, ["a", "bb", "ccc"], [1.0, 2.0, 3.0], verbose=0)
    assert np.isfinite(found.history["loss"][0])
    with pytest.raises(ConfigError, match=r"tfdist.evaluate: x has its rows in a Python list"):
        tfdist.evaluate(model, ["a"], np.ones([1]))


def test_texts_in_lists_are_known_again():
    texts = {"x": ["a", "bb"], "y": [1, 2], "validation_data": (["c"], [0.5])}
    known = identity_of(texts)
    assert not what_changed(known, identity_of(texts)) and [len(leaves) for leaves in known.values()] == [1, 1, 2]
    for name, other in (("x", ["ab", "b"]), ("y", [2, 1]), ("validation_data", (["d"], [0.5]))):
        assert what_changed(known, identity_of(texts | {name: other})) == name
    for name in ("y", "sample_weight"):  # given before, or now, alone
        more = identity_of({"x": ["a", "bb"], name: [1, 2]})
        less = identity_of({"x": ["a", "bb"]})
        assert what_changed(more, less) == what_changed(less, more) == name
    assert not what_changed({}, known), "earlier versions did not write them"
    asked = identity_of({"x": {"prompts": ["a", "bb"]}})
    assert what_changed(asked, identity_of({"x": {"prompts": ["a", "bc"]}})) == "x" and len(asked["x"]) == 1


class Frame:
    """An array of another library (pandas, JAX, torch), as Keras knows it."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values


@pytest.mark.parametrize("make", [Frame, tf.Variable, "pandas"])
def test_arrays_of_any_kind_are_known_again(make):
    make = pytest.importorskip("pandas").DataFrame if make == "pandas" else make
    given, rows = {"x": make([[1.0], [2.0]]), "validation_data": (make([[3]]), None)}, make([[1.0], [4.0]])
    known = identity_of(given)
    assert not what_changed(known, identity_of(given)) and known["validation_data"][1] == []
    assert what_changed(known, identity_of(given | {"x": rows})) == "x"
    assert what_changed(known, identity_of(given | {"validation_data": (make([[5]]), None)})) == "validation_data"
    numbers = tf.data.Dataset.range(4)
    assert what_changed(identity_of({"x": numbers.filter(lambda x: x < 4)}), identity_of({"x": numbers})) == "x"


def test_what_is_compared_is_spread_over_all_rows_and_inputs():
    inputs = {"a": tf.range(4000 * 8), "b": tf.range(8 * 4096), "few": tf.range(24)}
    shaped = {"a": [4000, 8], "b": [8, 4096], "few": [8, 3]}
    for name, numbers in inputs.items():
        part = OwnRows(OneDevice(), tf.reshape(numbers, shaped[name]))
        (sample,) = [each.numpy() for each in part.sample]
        rows, columns = np.unravel_index(sample, shaped[name])
        assert min(512, numbers.shape[0]) <= len(sample) <= 2048
        assert len(set(rows)) >= min(1000, shaped[name][0]), name
        assert set(columns) == set(range(shaped[name][1])) or shaped[name][1] > 1024
        assert np.diff(np.sort(columns)).max() <= 8
    assert len(OwnRows(OneDevice(), [tf.zeros([8, 2]), tf.ones([8, 5])]).sample) == 2


@pytest.mark.parametrize("first", [True, False])
def test_an_overflow_in_a_row_that_was_looked_up_twice_leaves_the_step_out(first):
    table = keras.Variable(np.zeros([3, 2], "float32"))
    values = [[np.inf, 1], [1, 1]] if first else [[1, 1], [np.inf, 1]]
    gradient = tf.IndexedSlices(tf.constant(values), tf.constant([1, 1]), tf.constant([3, 2]))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)
    with every_row_checked(optimizer):
        optimizer.apply([gradient], [table])
        assert float(optimizer.dynamic_scale) == 2 and not np.any(table.numpy())
        fine = tf.IndexedSlices(tf.ones([2, 2]), gradient.indices, gradient.dense_shape)
        optimizer.apply([fine], [table])
    assert float(optimizer.dynamic_scale) == 2 and np.any(table.numpy())
    assert "check_finite" not in vars(optimizer)


def test_predictions_of_no_rows_are_refused():
    """Keras' own predict fails with an error of its own code."""
    refuse_no_rows("predict", {"a": np.zeros((1, 0)), "b": 3.0})
    with pytest.raises(ConfigError, match="tfdist.predict was given arrays without a row"):
        refuse_no_rows("predict", {"a": np.zeros((0, 4))})
