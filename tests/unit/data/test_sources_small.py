"""The sources that need no files: digits, synthetic; and the registry."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import Config, DataConfig
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data import input_pipeline
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.sources.load_split import SOURCES, load_split
from tfdist.data.sources.source_facts import DIGITS_TO_TRAIN
from tfdist.data.sources.split import Split, array_split
from tfdist.planner.shapes import Sample, sample_of


def fetch(split: Split, *indices: int) -> list[np.ndarray]:
    return [part.numpy() for part in split.fetch(tf.constant(indices, tf.int64))]


def test_digits_are_split_once_and_for_all():
    train, held_out = (load_split(DataConfig(source="digits"), name) for name in ("train", "eval"))
    assert (train.size, held_out.size, train.num_classes) == (1442, 355, 10)
    (x, y), (x_eval, y_eval) = fetch(train, *range(1442)), fetch(held_out, *range(355))
    assert x.shape == (1442, 8, 8, 1) and x.dtype == np.float32 and y.dtype == np.int32 and (x.min(), x.max()) == (0, 1)
    assert not {image.tobytes() for image in x} & {image.tobytes() for image in x_eval}  # nothing leaks
    assert np.ptp(np.bincount(y_eval)) <= 3 and np.ptp(np.bincount(y)) <= 10  # stratified
    assert [tuple(s.shape) for s in train.element_spec] == [(8, 8, 1), ()]


def test_synthetic_images_are_a_function_of_the_index():
    config = DataConfig(source="synthetic", source_args="shape=(5,4,3),classes=7,samples=1000,eval_samples=10")
    split = load_split(config, "train")
    assert (split.size, split.num_classes, load_split(config, "eval").size) == (1000, 7, 10)
    x, y = fetch(split, *range(200))
    x_again, y_again = fetch(load_split(config, "train"), 199, 3)
    assert x.shape == (200, 5, 4, 3) and set(y) == set(range(7))
    np.testing.assert_array_equal(x[[199, 3]], x_again)
    np.testing.assert_array_equal(y[[199, 3]], y_again)
    assert len({image.tobytes() for image in x}) == 200
    assert not {i.tobytes() for i in x} & {i.tobytes() for i in fetch(load_split(config, "eval"), *range(10))[0]}
    assert np.corrcoef(x.mean((1, 2, 3)), y)[0, 1] > 0.8  # the class can be learnt


def test_synthetic_tokens():
    split = load_split(DataConfig(source="synthetic", source_args="task=text,vocab=50", sequence_length=16), "train")
    x, y = fetch(split, *range(100))
    assert x.shape == y.shape == (100, 16) and x.dtype == np.int32 and split.num_classes == 50
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    assert set(x.ravel()) == set(range(50)) and len(np.unique(x, axis=0)) == 100


def test_fixed_synthetic_repeats_one_batch():
    split = load_split(DataConfig(source="synthetic", source_args="shape=(3,),classes=2,fixed=True"), "train")
    dataset = input_pipeline.train_dataset(
        split, input_pipeline.Reading(seed=0, shuffle=True), plan=BatchPlan(4, 1, 1), replica=0, consumed=0
    )
    a, b = (x for x, _, _ in dataset.take(2).as_numpy_iterator())
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("source", "source_args", "message"),
    [
        ("digit", "", "--source=digit is unknown: use digits, synthetic"),
        ("digits", "size=3", "has no option 'size'; it has none"),
        ("synthetic", "shapes=(3,)", "has no option 'shapes'; it has task, shape"),
        ("synthetic", "shape=3", "shape=3 must be a tuple"),
        ("synthetic", "shape=(0,)", "must be a tuple of positive integers"),
        ("synthetic", "task=audio", "must be image or text"),
        ("synthetic", "classes=many", "classes='many' must be of type int"),
        ("synthetic", "samples=-1", "samples=-1 must not be negative"),
        ("synthetic", "classes=0", "classes=0 must be from 1"),
    ],
)
def test_bad_options(source, source_args, message):
    with pytest.raises(ConfigError) as error:
        load_split(DataConfig(source=source, source_args=source_args), "train")
    assert message in str(error.value)


def test_a_split_without_samples():
    with pytest.raises(DataError, match="no samples"):
        load_split(DataConfig(source="synthetic", source_args="samples=0"), "train")


def test_arrays_must_have_one_length():
    with pytest.raises(DataError, match="different lengths"):
        array_split("odd", (np.zeros(3), np.zeros(4)))


def test_every_registered_source_can_be_imported():
    for target in SOURCES.values():
        module, function = target.split(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function))


@pytest.mark.parametrize(
    ("source", "options"), [("digits", ""), ("text", ""), ("synthetic", ""), ("synthetic", "task=text,samples=9")]
)
def test_what_is_known_of_a_source_before_it_is_opened(source, options):
    """As the planner knows it."""
    config = Config().replace(source=source, source_args=options, sequence_length=32)
    split = load_split(config.data, "train")
    x, y, *_ = split.element_spec
    assert sample_of(config) == Sample(tuple(x.shape), split.num_classes, is_text=x.shape == y.shape)
    if source == "digits":
        assert split.size == DIGITS_TO_TRAIN


def test_a_file_that_a_source_of_the_package_does_not_find_is_told(monkeypatch):
    """A source that looks for nothing itself: not as an error of tfdist's own, after which a job would start again."""

    def load(config, split):
        return array_split("missing", *np.load("nowhere.npz"))

    monkeypatch.setitem(SOURCES, "missing", load)
    with pytest.raises(DataError, match=r"--source=missing cannot be read .*nowhere.npz.*check --data_dir"):
        load_split(DataConfig(source="missing"), "train")
