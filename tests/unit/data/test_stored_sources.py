"""Sources whose --data_dir is in an object store: the same samples, in the same order, as from a folder."""

from __future__ import annotations

import os
import random
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests.stores.faulty_proxy import FAULTS
from tests.stores.s3_server import BUCKET
from tests.unit.data.test_source_tfrecord import IMAGES, SPEC, examples, write
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data.sources import stored_records
from tfdist.data.sources.load_split import data_here, load_split
from tfdist.data.sources.split import Split
from tfdist.runtime.errors import explain
from tfdist.storage import data_cache

URL = f"s3://{BUCKET}/data"


@pytest.fixture(autouse=True)
def as_a_new_process(s3):
    data_cache.data_cache.cache_clear()


def upload(s3, folder) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            s3.change(f"data/{path.relative_to(folder)}", path.read_bytes())


@pytest.fixture
def records(s3, tmp_path):
    """30 training records in as many files; 5 for evaluation. Returns the folder."""
    folder = tmp_path / "records"
    folder.mkdir()
    for number in range(30):
        write(folder / f"train-{number:02d}.tfrecord", examples(number, number + 1))
    write(folder / "test-0.tfrecord", examples(0, 5))
    upload(s3, folder)
    return folder


def config(tmp_path, where=URL, **values) -> Config:
    return Config().replace(data_dir=str(where), cache_dir=str(tmp_path / "cache"), **values)


def split_of(config: Config, name: str = "train") -> Split:
    return load_split(data_here(config), name)


@pytest.mark.slow
def test_records_at_random(records, tmp_path):
    there, here = (split_of(config(tmp_path, where, source="tfrecord", source_args=SPEC)) for where in (URL, records))
    assert there.size == here.size == 30 and there.contents() == here.contents()
    x, y = there.fetch(tf.constant([29, 0, 11, 12, 12], tf.int64))
    np.testing.assert_array_equal(x, IMAGES[[29, 0, 11, 12, 12]].astype(np.float32) / np.float32(255))
    assert y.numpy().tolist() == [9, 0, 1, 2, 2]


def copied(tmp_path) -> list[str]:
    """Names of the objects of which there are copies."""
    return [path.name for path in (tmp_path / "cache").rglob("objects/**/*") if path.is_file()]


def in_ranges(tmp_path, **values) -> Split:
    return split_of(config(tmp_path, source="tfrecord", cache_data=False, **{"source_args": SPEC, **values}))


def test_records_at_random_without_copies(s3, tmp_path, through_proxy, monkeypatch):
    """Few ranges for what lies close together; the index is made once; one file has no record."""
    monkeypatch.setattr(stored_records, "_INDEX_BYTES", 2000)
    folder = tmp_path / "records"
    folder.mkdir()
    write(folder / "train-0.tfrecord", examples(0, 20))
    write(folder / "train-1.tfrecord", [])
    write(folder / "train-2.tfrecord", examples(20, 30))
    write(folder / "test-0.tfrecord", examples(0, 5))
    upload(s3, folder)
    here = split_of(config(tmp_path, folder, source="tfrecord", source_args=SPEC))
    asked = []

    def draw(method: str, path: str) -> str:
        asked.extend([path] if method == "GET" and "train-" in path else [])
        return ""

    with through_proxy(draw):
        there = in_ranges(tmp_path)
        assert there.size == here.size == 30 and there.contents() == here.contents()
        rows = tf.constant([29, 0, 1, 2, 2, 15, 21], tf.int64)
        for gap, ranges in ((stored_records._GAP_BYTES, 2), (500, 4)):
            monkeypatch.setattr(stored_records, "_GAP_BYTES", gap)
            asked.clear()
            for ours, theirs in zip(there.fetch(rows), here.fetch(rows), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            assert len(asked) == ranges, asked
        data_cache.data_cache.cache_clear()
        asked.clear()
        assert in_ranges(tmp_path).size == 30 and len(asked) == 1, "the first record, which is tried"
    assert not copied(tmp_path)


@pytest.mark.parametrize("change", ["changed", "gone", "damaged"])
def test_what_is_no_longer_as_it_was_is_named_without_copies(s3, records, tmp_path, change):
    if change == "damaged":
        whole = (records / "train-07.tfrecord").read_bytes()
        s3.change("data/train-07.tfrecord", whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:])
    split = in_ranges(tmp_path)
    if change == "gone":
        s3.remove("data/train-07.tfrecord")
    elif change == "changed":  # to what would be read as well
        s3.change("data/train-07.tfrecord", (records / "train-08.tfrecord").read_bytes())
    split.fetch(tf.constant([6, 8], tf.int64))
    with pytest.raises(tf.errors.OpError) as failure:
        list(tf.data.Dataset.from_tensors(tf.constant([7], tf.int64)).map(split.fetch))
    found = explain(failure.value, Cluster())
    how = {
        "changed": "has been changed",
        "gone": "no longer exists",
        "damaged": "is damaged: the record at byte 0",
    }
    assert isinstance(found, DataError)
    assert str(found).startswith(f"--data_dir={URL}: train-07.tfrecord {how[change]}"), found


def test_a_copy_that_is_damaged_is_named_with_its_object(records, tmp_path):
    split = split_of(config(tmp_path, source="tfrecord", source_args=SPEC))
    copy = next((tmp_path / "cache").rglob("objects/train-07.tfrecord"))
    data = copy.read_bytes()
    copy.write_bytes(data[:-6] + bytes([data[-6] ^ 1]) + data[-5:])
    with pytest.raises(tf.errors.OpError) as failure:
        list(tf.data.Dataset.from_tensors(tf.constant([7], tf.int64)).map(split.fetch))
    found = str(explain(failure.value, Cluster()))
    assert found.startswith(f"--data_dir={URL}: train-07.tfrecord, or its copy {copy} ") and "is damaged" in found


def test_an_object_that_was_cut_short_is_named_with_its_copy(records, s3, tmp_path):
    s3.change("data/train-07.tfrecord", (records / "train-07.tfrecord").read_bytes()[:-10])
    with pytest.raises(DataError, match="ends within a record") as found:
        split_of(config(tmp_path, source="tfrecord", source_args=SPEC))
    assert str(found.value).startswith(f"--data_dir={URL}: train-07.tfrecord, or its copy")


def test_of_many_faults_none_gives_another_record_without_copies(records, tmp_path, through_proxy):
    chance = random.Random(1)
    rows = [chance.randrange(30) for _ in range(40)]

    def draw(method: str, path: str) -> str:
        return chance.choice(FAULTS) if "/train-" in path and chance.random() < 0.3 else ""

    with through_proxy(draw) as proxy:
        x, y = in_ranges(tmp_path).fetch(tf.constant(rows, tf.int64))
        assert sum(proxy.done.values()) > 10
    np.testing.assert_array_equal(x, IMAGES[rows].astype(np.float32) / np.float32(255))
    assert y.numpy().tolist() == [row % 10 for row in rows]


def test_what_needs_whole_files_says_so(s3, records, tmp_path):
    with pytest.raises(ConfigError, match="--nocache_data: stream=True reads whole files: drop it, or"):
        in_ranges(tmp_path, source_args=f"{SPEC},stream=True")
    with pytest.raises(ConfigError, match="--nocache_data: --source=text reads whole files"):
        split_of(config(tmp_path, source="text", cache_data=False))


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "files"), [(1, 0), (3, 0), (1, 16)])
def test_records_from_front_to_back(records, tmp_path, shards, files):
    """files: that the cache may hold; it must hold those that are read and those that are brought meanwhile."""
    size = (records / "train-00.tfrecord").stat().st_size
    limit = files * size
    flags = {"source": "tfrecord", "source_args": f"{SPEC},stream=True", "cache_gb": limit / 1e9}
    there, here = (split_of(config(tmp_path, where, **flags)) for where in (URL, records))
    for shard in range(shards):
        ours, theirs = ([tuple(map(bytes, each)) for each in _samples(split, shard, shards)] for split in (there, here))
        assert ours == theirs and len(ours) == len(range(shard, 30, shards)) * 2, "in two passes"
    cached = tmp_path / "cache" / "data"
    taken = sum(path.stat().st_size for path in cached.rglob("*.tfrecord"))
    assert taken == 30 * size if not limit else taken <= limit, (taken / size, files)


def _samples(split: Split, shard: int, shards: int):
    for x, y in split.stream(shard, shards).repeat(2).as_numpy_iterator():
        yield x.tobytes(), y.tobytes()


@pytest.mark.slow
def test_an_object_that_is_gone_ends_reading_with_a_sentence(s3, records, tmp_path):
    split = split_of(config(tmp_path, source="tfrecord", source_args=f"{SPEC},stream=True"))
    s3.remove("data/train-29.tfrecord")
    with pytest.raises(tf.errors.OpError) as failure:
        list(split.stream(0, 1))
    found = explain(failure.value, Cluster())
    assert isinstance(found, DataError)
    assert str(found).startswith(f"--data_dir={URL}: train-29.tfrecord no longer exists")


def test_a_split_without_files_is_told_with_the_url(records, tmp_path):
    with pytest.raises(DataError, match=f"--data_dir={URL} has no file nothing-. for train"):
        split_of(config(tmp_path, source="tfrecord", source_args=f"{SPEC},train=nothing-?"))


def test_text(s3, tmp_path):
    folder = tmp_path / "text"
    (folder / "inner").mkdir(parents=True)
    for number in range(20):
        (folder / ("inner" if number % 2 else ".") / f"{number}.txt").write_text(f"file {number}\n" * 100)
    (folder / "skipped.bin").write_bytes(b"x")
    upload(s3, folder)
    there, here = (split_of(config(tmp_path, where, source="text", sequence_length=16)) for where in (URL, folder))
    assert there.info["digest"] == here.info["digest"] and there.size == here.size
    assert not list((tmp_path / "cache").rglob("*.bin"))
    s3.empty()
    data_cache.data_cache.cache_clear()
    with pytest.raises(DataError, match=f"--data_dir={URL} contains no readable text"):
        split_of(config(tmp_path, source="text", sequence_length=17))


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_prepared_data_sets(s3, tmp_path, kind):
    pytest.importorskip(kind if kind == "array_record" else "tensorflow_datasets")
    from tests.unit.data.test_source_tfds import TinyImages

    folder = tmp_path / "sets"
    TinyImages(data_dir=folder).download_and_prepare(file_format=kind)
    upload(s3, folder)
    there, here = (
        split_of(config(tmp_path, where, source="tfds", source_args="name=tiny_images,memory_mb=0"))
        for where in (URL, folder)
    )
    assert there.size == here.size
    everything = tf.range(there.length, dtype=tf.int64)
    for ours, theirs in zip(there.fetch(everything), here.fetch(everything), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    fetched = {os.path.basename(path) for path in (tmp_path / "cache").rglob("*-of-*")}
    assert fetched and all("-train." in name for name in fetched), "what is not read is not fetched"
    shutil.rmtree(tmp_path / "cache")
    data_cache.data_cache.cache_clear()
    values = {"source": "tfds", "source_args": "name=tiny_images,memory_mb=0", "cache_data": False}
    if kind == "array_record":
        with pytest.raises(ConfigError, match="--nocache_data: tiny_images, stored as array_record, reads whole files"):
            split_of(config(tmp_path, **values))
    else:
        there = split_of(config(tmp_path, **values))
        for ours, theirs in zip(there.fetch(everything), here.fetch(everything), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert not [name for name in copied(tmp_path) if "-of-" in name]
    with pytest.raises(ConfigError, match="download=True, but --data_dir=s3://.*tfds build"):
        split_of(config(tmp_path, source="tfds", source_args="name=tiny_images,download=True"))
