"""The tfds source, on data sets prepared here, in every format: the same samples by every road, and what can be
wrong.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import DataConfig
from tfdist.control.exit_codes import ConfigError, DataError, UnsupportedError
from tfdist.data import augment, input_pipeline
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.sources.load_split import load_split

tfds = pytest.importorskip("tensorflow_datasets")

IMAGES = np.random.default_rng(0).integers(0, 256, [40, 6, 6, 3], np.uint8)


class TinyImages(tfds.core.GeneratorBasedBuilder):
    """30 training and 10 test images of one size."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(6, 6, 3), encoding_format="png"),
                    "label": tfds.features.ClassLabel(num_classes=4),
                    "id": np.int64,
                    "point": tfds.features.Tensor(shape=(2,), dtype=np.float32),
                    "name": tfds.features.Text(),
                }
            ),
            supervised_keys=("image", "label"),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0, 30), "test": self._generate_examples(30, 40)}

    def _generate_examples(self, start, stop):
        for i in range(start, stop):
            yield i, {"image": IMAGES[i], "label": i % 4, "id": i, "point": np.float32([i, -i]), "name": str(i)}


class TinyPhotos(tfds.core.GeneratorBasedBuilder):
    """8 JPEG images of different sizes, in one split."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(num_classes=8)}
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(8):
            yield i, {"image": np.full([30 + i, 40 - i, 3], 20 * i, np.uint8), "label": i}


@pytest.fixture(scope="module", params=["array_record", "tfrecord", "parquet"])
def prepared(request, tmp_path_factory):
    """(format, data_dir)"""
    if request.param == "array_record":
        pytest.importorskip("array_record")
    folder = tmp_path_factory.mktemp(request.param)
    for builder in (TinyImages, TinyPhotos):
        builder(data_dir=folder).download_and_prepare(file_format=request.param)
    return request.param, folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared once, for what does not depend on the format."""
    found = tmp_path_factory.mktemp("tfrecord")
    for builder in (TinyImages, TinyPhotos):
        builder(data_dir=found).download_and_prepare(file_format="tfrecord")
    return found


def load(data_dir, split="train", source_args="name=tiny_images"):
    return load_split(DataConfig(source="tfds", data_dir=str(data_dir), source_args=source_args), split)


def rows(split) -> tuple[np.ndarray, np.ndarray]:
    """All samples, in order."""
    dataset = input_pipeline.eval_dataset(split, batch=7, replica=0, replicas=1)[0]
    x, y, w, _ = (np.concatenate(parts) for parts in zip(*dataset.as_numpy_iterator(), strict=True))
    return x[w == 1], y[w == 1]


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["", ",memory_mb=0"])
def test_samples_are_the_same_by_every_road(prepared, memory):
    kind, data_dir = prepared
    for split, start, stop in [("train", 0, 30), ("eval", 30, 40)]:
        found = load(data_dir, split, "name=tiny_images" + memory)
        assert found.size == (None if kind == "parquet" and memory else stop - start)
        assert found.num_classes == 4 and [(s.shape.as_list(), s.dtype) for s in found.element_spec] == [
            ([6, 6, 3], tf.float32),
            ([], tf.int32),
        ]
        x, y = rows(found)
        np.testing.assert_array_equal(x, IMAGES[start:stop] / np.float32(255))
        np.testing.assert_array_equal(y, np.arange(start, stop) % 4)


@pytest.mark.slow
def test_random_order_through_the_pipeline(prepared):
    kind, data_dir = prepared
    split = load(data_dir, source_args="name=tiny_images,memory_mb=0,x=id")
    batches = [
        list(
            input_pipeline.train_dataset(
                split, input_pipeline.Reading(seed=0, shuffle=True), plan=BatchPlan(10, 1, 3), replica=r, consumed=0
            )
            .take(3)
            .as_numpy_iterator()
        )
        for r in range(3)
    ]
    ids = [x for parts in batches for x, y, _ in parts]
    assert sorted(np.concatenate(ids).tolist()) == list(range(30))
    assert all((x % 4 == y).all() for parts in batches for x, y, _ in parts)


@pytest.mark.slow
def test_part_of_a_split(prepared):
    _, data_dir = prepared
    for memory in ("", ",memory_mb=0"):
        args = "name=tiny_images,x=id,y=point,train=train[:40%]+train[90%:],eval=train[40%:50%]" + memory
        x, y = rows(load(data_dir, "train", args))
        assert x.tolist() == [*range(12), *range(27, 30)] and y[:, 1].tolist() == (-x).tolist()
        assert rows(load(data_dir, "eval", args))[0].tolist() == [12, 13, 14]


@pytest.mark.slow
def test_images_of_varying_size(prepared):
    kind, data_dir = prepared
    args = "name=tiny_photos,image_size=16,train=train[:6],eval=train[6:]"
    split = load(data_dir, "train", args)
    x, y = rows(split)
    assert x.shape == (6, 16, 16, 3) and x.dtype == np.float32
    np.testing.assert_allclose(x[:, 8, 8, 0], y * 20 / 255, atol=0.01)
    if kind == "parquet":
        assert split.size is None
        return
    dataset = input_pipeline.train_dataset(
        split,
        input_pipeline.Reading(seed=0, shuffle=True, augment=augment.load_augmentation("random_resized_crop")),
        plan=BatchPlan(6, 1, 1),
        replica=0,
        consumed=0,
    )
    for x, y, _ in dataset.take(2).as_numpy_iterator():
        assert x.shape == (6, 16, 16, 3)
        np.testing.assert_allclose(x.mean((1, 2, 3)), y * 20 / 255, atol=0.01)


def test_a_prepared_folder_without_its_builder(folder):
    x, _ = rows(load(folder / "tiny_images" / "1.0.0", source_args=""))
    np.testing.assert_array_equal(x, IMAGES[:30] / np.float32(255))


@pytest.mark.parametrize(
    ("source_args", "error", "message"),
    [
        ("", DataError, "has no dataset_info.json"),
        ("name=no_such_thing", DataError, "found no data set 'no_such_thing'"),
        ("name=mnist", DataError, "run `tfds build mnist --data_dir="),
        ("name=tiny_images,eval=train[20:]", DataError, "share samples"),
        ("name=tiny_images,train=validation", DataError, "has no split 'validation' for train; it has test, train"),
        ("name=tiny_photos,image_size=8", DataError, "has no split 'validation or test' for eval"),
        ("name=tiny_images,x=picture", DataError, "has no feature 'picture' for x"),
        ("name=tiny_images,x=id,image_size=8", DataError, "image_size=8 is for images"),
        ("name=tiny_photos,eval=train[:1],train=train[1:]", DataError, "set image_size=N"),
        ("name=tiny_images,x=name", DataError, "has no numbers of one shape in 'name'"),
        ("nam=mnist", ConfigError, "has no option 'nam'"),
    ],
)
def test_bad_options(folder, source_args, error, message):
    with pytest.raises(error) as raised:
        load(folder, source_args=source_args)
    assert message in str(raised.value)


def test_nothing_named():
    with pytest.raises(DataError, match="needs a data set"):
        load("", source_args="")


def test_missing_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UnsupportedError, match="pip install tensorflow-datasets"):
        load(folder)
