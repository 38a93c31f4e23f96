"""package.module:function: everything it may return, and everything it may do wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import DataConfig
from tfdist.control.exit_codes import ConfigError, DataError, StartupError
from tfdist.data import input_pipeline
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.sources.load_split import load_split

MODULE = """
import keras, numpy as np, tensorflow as tf
from tfdist.data.sources.split import Split, array_split

x, y = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 4
x_eval, y_eval = -x[:6], np.array([0, 1, 2, 6, 0, 1])

def load_data(): return (x, y), (x_eval, y_eval)
def as_dict(scale=1): return {"train": (x * scale, y), "eval": (x_eval, y_eval)}
def by_split(split): return (x, y) if split == "train" else (x_eval, y_eval)
def by_config(split, config): return x[:config.sequence_length], y[:config.sequence_length]
def anything(**options): return x * options["scale"], y
def weighted(split): return {"a": x, "b": (y, y + 1)}, y, y / 2

class Rows:
    num_classes = 4
    def __init__(self, n=20): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        assert 0 <= i < self.n
        return {"v": x[i], "i": i}, y[i]

class Ragged(Rows):
    def __getitem__(self, i): return np.zeros(1 if i == 3 else 5), 0

class Batches(keras.utils.PyDataset):
    def __len__(self): return 2
    def __getitem__(self, i): return x[:4], y[:4]

class Items(Rows):
    def __init__(self, item): self.item, self.n = item, 400
    def __getitem__(self, i): return self.item(i)

def away(split): raise ConnectionRefusedError("no answer")
def server_away(): raise TimeoutError("nfs")
item_away = lambda split: Items(lambda i: server_away() if i else (1, 1))
dataset_away = lambda split: tf.data.Dataset.from_generator(
    lambda: iter(server_away, 0), output_signature=(tf.TensorSpec((), tf.int32),) * 2)

texts = lambda split: Items(lambda i: ({"text": b"ab\\0\\0", "word": "é\\0"}, i % 2))
text_arrays = lambda split: Items(lambda i: (np.array([b"a\\0", "b"], object), tf.constant(b"a\\0")))
def other(at, first, then): return lambda split: Items(lambda i: then if i == at else first)
fractions = lambda split: Items(lambda i: (i, (0, 0.5, 1.7)[i % 3]))
mixed = lambda split: Items(lambda i: ({"b": i % 2 == 0, "a": "word"}, np.float32(1) if i else 3))
float_late, float_whole = other(301, (1.0, 0), (1.0, 1.5)), other(301, (1.0, 0), (1.0, 2.0))
too_large, negative = other(301, (1, np.int32(1)), (1, 2**40)), other(301, (np.uint8(1), 1), (np.int64(-1), 1))
infinite = other(301, (1, np.float32(1)), (1, 1e300))
many_digits = other(301, (1, np.float64(1)), (1, 2**53 + 1))
fewer_digits = other(301, (1, np.float32(1)), (1, 0.1))
nothing_there, text_late = other(301, (1, 1), (1, None)), other(301, (1, 1), (1, "a"))
weight_missing, other_keys = other(301, (1, 1, 0.5), (1, 1)), other(301, ({"a": 1, "b": 2}, 1), ({"a": 1}, 1))
wrong_shape, no_sample = other(301, (np.zeros(3), 1), (np.zeros(1), 1)), other(301, (1, 1), 7)
nothing_at_0, mixed_text = other(0, (1, 1), (1, None)), lambda split: Items(lambda i: (1, "a" if i % 2 else 1))
def fails(i):
    if i == 301: raise KeyError("label")
    return 1, 1
failing = lambda split: Items(fails)
class Shuffled:
    calls = 0
def unseeded():
    Shuffled.calls += 1
    order = np.random.default_rng().permutation(40)
    return (order[:30], order[:30] % 4), (order[30:], order[30:] % 4)

def rows(split): return Rows()
def weighted_rows(split): return [(np.ones(3) * i, i % 2, 0.5) for i in range(10)]
def ragged(split): return Ragged()
def dataset(split): return tf.data.Dataset.from_tensor_slices((x, y))
def split_itself(split): return array_split("mine", (x, y), num_classes=9)

def only_one(): return x, y
def batches(split): return Batches()
def batched(split): return dataset(split).batch(4)
def triple_dataset(split): return tf.data.Dataset.range(4)
def shuffled_dataset(split): return dataset(split).shuffle(20)
def blocks(): return tf.data.Dataset.from_tensor_slices((np.arange(400), np.arange(400) // 200))
chance = np.random.default_rng()
def noise_x(x, y):
    noise = tf.numpy_function(lambda: chance.normal(), [], tf.float64)
    return tf.cast(x, tf.float64) + tf.reshape(noise, []), y
def split_of(data): return Split("mine", None, data.element_spec, stream=lambda shard, shards: data)
def generated(): return iter([(x[row], 1) for row in np.random.default_rng().permutation(20)])
by_class = lambda split: blocks().shuffle(100, seed=1)
all_mask = lambda split: dataset(split).map(lambda x, y: ({"x": x, "mask": tf.ones(4)}, y)).shuffle(20)
all_weights = lambda split: dataset(split).shuffle(20).map(lambda x, y: (x, y, 1))
shuffled_split = lambda split: split_of(blocks().shuffle(100))
seeded_split = lambda split: Split("mine", None, blocks().element_spec, stream=lambda shard, shards: by_class(split))
generated_anew = lambda split: tf.data.Dataset.from_generator(
    generated, output_signature=(tf.TensorSpec([2]), tf.TensorSpec((), tf.int64)))
shuffled_files = lambda split: tf.data.Dataset.list_files(
    [__file__, np.__file__]).map(lambda path: (path, 1)).concatenate(tf.data.Dataset.from_tensors(("", 1)).repeat(20))
shuffled_noise = lambda split: tf.data.Dataset.zip((dataset(split), dataset(split).shuffle(20))).map(
    lambda own, other: (own[0] + 0.1 * other[0], own[1]))
shuffled_once = lambda split: blocks().shuffle(400, reshuffle_each_iteration=False).map(noise_x)
noise_by_class = lambda split: blocks().map(noise_x)
noise_and_constant = lambda split: blocks().map(lambda x, y: noise_x(x, 1))
no_samples = lambda split: dataset(split).filter(lambda x, y: y < 0)
late = lambda **how: blocks().concatenate(blocks().shuffle(100, **how))
def stream_of(make): return Split("mine", None, blocks().element_spec, stream=lambda shard, shards: make())
late_dataset, late_split = lambda split: late(seed=1), lambda split: split_of(late(seed=1))
def late_source(split):
    shared = late(seed=1)
    return stream_of(lambda: shared.take(700))
late_unseeded = lambda split: stream_of(late)
late_seeded = lambda split: stream_of(lambda: late(seed=1))
late_once = lambda split: split_of(late(seed=1, reshuffle_each_iteration=False))
as_is = lambda *sample: sample
def in_parallel(**how): return tf.data.Dataset.range(4).interleave(lambda i: blocks(), num_parallel_calls=2, **how)
def mapped(**how): return dataset("train").map(as_is, num_parallel_calls=2, **how)
interleaved, interleaved_anyhow = lambda split: in_parallel(), lambda split: in_parallel(deterministic=False)
mapped_anyhow = lambda split: mapped(deterministic=False).map(as_is)
anyhow_inside = lambda split: tf.data.Dataset.range(2).flat_map(lambda i: mapped(deterministic=False))
anyhow_split = lambda split: split_of(in_parallel(deterministic=False))
def noisy_dataset(split): return dataset(split).map(lambda x, y: noise_x(x, y))
def empty_dataset(split): return dataset(split).take(0)
def none(split): return None
def one_array(split): return x
def unequal(split): return x, y[:3]
def strings_in_objects(split): return np.array([object()] * 3), y[:3]
def python_lists(split): return x.tolist(), y.tolist()
def ragged_tensor(split): return tf.ragged.constant([[1.0], [1.0, 2.0]]), y[:2]
def without_y(split): return x, None
def complex_numbers(split): return x + 1j, y
def labels_below_0(split): return x, np.full(len(x), -3)
def labels_above_all(split): return x, np.full(len(x), 10**12)
def no_rows(split): return Rows(0)
def not_pairs(split): return [1, 2, 3]
def no_columns(split): return x[:, :0], y
def broken_length(split): return BrokenLength()
def odd_object(split): return [(x[0], object())]
def pair_list(split): return [x, y]
def heavy(split): return dataset(split).map(lambda x, y: (x, y, "heavy"))
def whole_weights(split): return dataset(split).map(lambda x, y: (x, y, 2))
def other_shape(split):
    spec = tf.TensorSpec([3]), tf.TensorSpec([], tf.int64)
    return tf.data.Dataset.from_generator(lambda: zip(x, y), output_signature=spec)
def sparse(split): return dataset(split).map(lambda x, y: (tf.sparse.from_dense(x), y))
def ragged_tensors(split): return dataset(split).map(lambda x, y: (tf.RaggedTensor.from_tensor([x]), y))
def leaves(split): raise SystemExit(0)
class BrokenLength(list):
    def __len__(self): raise KeyError("length")
def needs(split, folder): return x, y
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "user_data_module.py").write_text(MODULE)
    (tmp_path / "user_broken_module.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("user_data_module", None)


def load(function, split="train", source_args="", **config):
    return load_split(DataConfig(source=f"user_data_module:{function}", source_args=source_args, **config), split)


def values(split, *indices):
    return tf.nest.map_structure(lambda t: t.numpy().tolist(), split.fetch(tf.constant(indices, tf.int64)))


@pytest.mark.parametrize("function", ["load_data", "as_dict", "by_split"])
def test_arrays(function):
    train, held_out = load(function), load(function, "eval")
    assert (train.size, held_out.size) == (20, 6)
    assert values(train, 19, 0) == ([[38, 39], [0, 1]], [3, 0]) and values(held_out, 3) == ([[-6, -7]], [6])
    if function != "by_split":  # then each split is all there is
        assert train.num_classes == held_out.num_classes == 7


def test_arguments():
    assert values(load("as_dict", source_args="scale=10"), 1) == ([[20, 30]], [1])
    assert load("by_config", sequence_length=5).size == 5
    assert values(load("anything", source_args="scale=2"), 1) == ([[4, 6]], [1])


def test_nests_and_weights():
    split = load("weighted")
    assert values(split, 3) == ({"a": [[6, 7]], "b": ([3], [4])}, [3], [1.5])
    assert split.element_spec[2].dtype == tf.float32


def test_random_access_object():
    split = load("rows")
    assert (split.size, split.num_classes) == (20, 4)
    assert values(split, 19, 0, 0) == ({"v": [[38, 39], [0, 1], [0, 1]], "i": [19, 0, 0]}, [3, 0, 0])
    dataset = input_pipeline.train_dataset(
        split, input_pipeline.Reading(seed=0, shuffle=True), plan=BatchPlan(10, 1, 2), replica=1, consumed=0
    )
    assert dataset.element_spec[0]["v"].shape == (5, 2) and dataset.element_spec[2].shape == (5,)
    assert len(next(iter(dataset))[0]["i"]) == 5
    weighted = load("weighted_rows")
    assert values(weighted, 4) == ([[4, 4, 4]], [0], [0.5]) and weighted.element_spec[2].dtype == tf.float32


def test_dataset_is_a_stream():
    split = load("dataset")
    assert split.size is None and len(list(split.stream(0, 1))) == 20 and len(list(split.stream(1, 3))) == 7
    batches = list(
        input_pipeline.train_dataset(
            split, input_pipeline.Reading(seed=0, shuffle=True), plan=BatchPlan(10, 1, 1), replica=0, consumed=0
        ).take(2)
    )
    assert sorted(np.concatenate([x[:, 0] for x, _, _ in batches]).tolist()) == list(range(0, 40, 2))


def test_split():
    assert load("split_itself").num_classes == 9


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("only_one", "does not declare `split` and returned one set of data"),
        ("batches", "is a Keras PyDataset, which yields batches"),
        ("batched", "not batches"),
        ("triple_dataset", "must be (x, y) or (x, y, w)"),
        ("shuffled_dataset", "first samples differ at a second look"),
        ("by_class", "first samples differ at a second look"),
        ("all_mask", "first samples differ at a second look"),
        ("all_weights", "first samples differ at a second look"),
        ("shuffled_split", "first samples differ at a second look"),
        ("generated_anew", "first samples differ at a second look"),
        ("noise_and_constant", "let --augment draw what is random"),
        ("shuffled_files", "list_files"),
        ("shuffled_noise", "reshuffle_each_iteration=False"),
        ("late_dataset", "a tf.data.Dataset that is shuffled anew at each pass"),
        ("late_split", "a Split with a stream that is shuffled anew at each pass"),
        ("late_source", "a Split with a stream that is shuffled anew at each pass"),
        ("late_unseeded", "give it a seed and reshuffle_each_iteration=False"),
        ("interleaved_anyhow", "a tf.data.Dataset with deterministic=False, so that what is ready first comes first"),
        ("mapped_anyhow", "drop deterministic=False"),
        ("anyhow_inside", "drop deterministic=False"),
        ("anyhow_split", "mine is a Split with a stream with deterministic=False"),
        ("no_samples", "no_samples/train is a tf.data.Dataset that yields no sample"),
        ("nothing_at_0", "item 0 of user_data_module:nothing_at_0/train has y = None"),
        ("mixed_text", "have text for y, others numbers"),
        ("empty_dataset", "is an empty tf.data.Dataset"),
        ("none", "is a NoneType: return"),
        ("one_array", "is a ndarray: return"),
        ("unequal", "different lengths [(20,), (3,)]"),
        ("strings_in_objects", "cannot be a tensor"),
        ("python_lists", "x of user_data_module:python_lists/train is a Python list: return an array"),
        ("ragged_tensor", "x of user_data_module:ragged_tensor/train is a RaggedTensor: return an array"),
        ("without_y", "y of user_data_module:without_y/train is None: return an array"),
        ("complex_numbers", "contains complex numbers"),
        ("labels_below_0", "the labels in y go up to -3"),
        ("labels_above_all", "the labels in y go up to 1000000000000"),
        ("no_rows", "is an empty Rows"),
        ("not_pairs", "item 0 of user_data_module:not_pairs/train is a int"),
        ("no_columns", "has samples of shape (0,), which are empty"),
        ("broken_length", "the length of user_data_module:broken_length/train, a BrokenLength, failed"),
        (
            "other_shape",
            "user_data_module:other_shape/train, a tf.data.Dataset, cannot be read: TypeError: `generator`",
        ),
        ("heavy", "whose weights are not numbers"),
        ("sparse", "is a tf.data.Dataset with a SparseTensor: make dense tensors of it, of one shape."),
        ("ragged_tensors", "is a tf.data.Dataset with a RaggedTensor: make dense tensors of it, of one shape."),
        ("pair_list", "user_data_module:pair_list/train is a list of 2 arrays: return a tuple, (x, y) or (x, y, w)."),
        ("odd_object", "item 0 of user_data_module:odd_object/train has y = <object object>, which is neither"),
    ],
)
def test_bad_data(function, message):
    tf.random.set_seed(1)  # as before every call of a source: then what has no seed of its own has one nevertheless
    with pytest.raises(DataError) as error:
        load(function)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("source", "source_args", "message"),
    [
        ("user_data_module:nothing", "", "has no function 'nothing'"),
        ("user_data_module:x", "", "has no function 'x'"),
        ("user_data_modul:load_data", "", "no module 'user_data_modul' on the Python path"),
        ("user_data_module.sub:f", "", "no module 'user_data_module.sub'"),
        ("user_data_module:by_split", "scale=2", "does not take 'scale'; it takes none"),
        ("user_data_module:as_dict", "scal=2", "does not take 'scal'; it takes scale"),
        ("user_data_module:needs", "", "needs a value for 'folder'"),
        ("user_data_module:leaves", "", "ended the program (sys.exit(0))"),
    ],
)
def test_bad_functions(source, source_args, message):
    with pytest.raises(ConfigError) as error:
        load_split(DataConfig(source=source, source_args=source_args), "train")
    assert message in str(error.value)


@pytest.mark.parametrize("function", ["away", "item_away", "dataset_away"])
def test_a_server_that_does_not_answer_may_do_so_again(function):
    with pytest.raises(
        StartupError, match="ConnectionRefusedError: no answer; this|TimeoutError: nfs; this may be temporary"
    ):
        load(function)


def test_a_missing_import_inside_the_users_module_is_not_hidden():
    with pytest.raises(ConfigError, match="failed at .*ModuleNotFoundError: .*a_package_that_is_not_there"):
        load_split(DataConfig(source="user_broken_module:f"), "train")


def test_the_type_holds_all_of_the_items():
    split = load("fractions")
    assert split.element_spec[1].dtype == tf.float64 and values(split, 0, 1, 2, 301) == (
        [0, 1, 2, 301],
        [0, 0.5, 1.7, 0.5],
    )
    split = load("mixed")
    assert values(split, 0, 1) == ({"a": [b"word", b"word"], "b": [True, False]}, [3, 1])
    assert values(load("fewer_digits"), 301) == ([1], [np.float32(0.1)])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("float_late", "has y = 1.5 (float64), which int64, the type of the first items, cannot hold"),
        ("float_whole", "has y = 2. (float64), which int64"),
        ("too_large", "has y = 1099511627776 (int64), which int32"),
        ("many_digits", "has y = 9007199254740993 (int64), which float64"),
        ("negative", "has x = -1 (int64), which uint8"),
        ("infinite", "has y = 1.e+300 (float64), which float32"),
        ("nothing_there", "has y = None, which is neither numbers nor text"),
        ("text_late", "has y = 'a' (str), which int64"),
        ("weight_missing", "is (int, int), item 0 is (int, int, float): give all items the same parts, weights too"),
        ("other_keys", "is ({'a': int}, int), item 0 is ({'a': int, 'b': int}, int)"),
        ("wrong_shape", "has x of shape (1,), item 0 has (3,)"),
        ("no_sample", "is a int: __getitem__ must return (x, y) or (x, y, w)"),
        ("failing", "in fails: KeyError: 'label'"),
    ],
)
def test_an_item_that_does_not_fit_is_named_and_never_truncated(function, words):
    with pytest.raises(DataError) as error:
        load(function).fetch(tf.constant([5, 301], tf.int64))
    sentence = str(error.value)
    assert sentence.startswith(f"--source: item 301 of user_data_module:{function}/train ") and words in sentence
    if function == "failing":
        assert "user_data_module.py:" in sentence


def test_a_function_that_returns_both_splits_is_called_once():
    train, held_out = (
        values(load("unseeded", split), *range(size))[0] for split, size in (("train", 30), ("eval", 10))
    )
    assert sorted(train + held_out) == list(range(40)) and sys.modules["user_data_module"].Shuffled.calls == 1


@pytest.mark.parametrize("function", ["noisy_dataset", "noise_by_class", "shuffled_once", "seeded_split"])
def test_a_stream_may_draw_noise(function):
    assert load(function).size is None


@pytest.mark.parametrize("function", ["late_seeded", "late_once", "interleaved"])
def test_a_stream_may_be_shuffled_or_read_in_parallel_in_one_order(function):
    assert load(function).size is None


def test_text_keeps_zeros_at_its_end():
    split = load("texts")
    assert values(split, 3, 0) == ({"text": [b"ab\0\0", b"ab\0\0"], "word": [b"\xc3\xa9\0", b"\xc3\xa9\0"]}, [1, 0])
    assert split.element_spec[0]["text"] == tf.TensorSpec([], tf.string)
    assert values(load("text_arrays"), 0) == ([[b"a\0", b"b"]], [b"a\0"])


def test_an_item_of_another_shape_is_not_broadcast():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"DataError: .*item 3 .* has x of shape \(1,\), item 0 has \(5,\)"
    ):
        list(input_pipeline.eval_dataset(load("ragged"), batch=5, replica=0, replicas=1)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_python_readers_work_under_op_determinism(tmp_path):
    # In a process of its own, since op determinism cannot be turned off again. It forbids stateful reads in parallel.
    program = """
import tensorflow as tf
tf.config.experimental.enable_op_determinism()
from tfdist.data.batch_plan import BatchPlan
from tfdist.config import DataConfig
from tfdist.data.input_pipeline import Reading, train_dataset
from tfdist.data.sources.load_split import load_split
split = load_split(DataConfig(source="user_data_module:rows"), "train")
reading = Reading(seed=0, shuffle=True, threads=3)
dataset = train_dataset(split, reading, plan=BatchPlan(10, 1, 1), replica=0, consumed=0)
print(sum(int(tf.reduce_sum(x["i"])) for x, _, _ in dataset.take(2)))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    script = tmp_path / "script.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(sum(range(20))), done.stderr


def test_whole_weights_of_a_dataset_are_floats():
    split = load("whole_weights")
    assert split.element_spec[2] == tf.TensorSpec([], tf.float32)
    assert float(next(iter(split.stream(0, 1)))[2]) == 2.0
