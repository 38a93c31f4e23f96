"""The tfrecord source and the index below it: random access, damaged files, feature specifications, streams."""

from __future__ import annotations

import errno
import re
import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import DataConfig
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data import augment, contents, flaws, input_pipeline
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.reading import Reading
from tfdist.data.sources import records
from tfdist.data.sources.load_split import load_split
from tfdist.runtime.errors import explain

IMAGES = np.random.default_rng(0).integers(0, 256, [30, 4, 3, 1], np.uint8)
IMAGES[0, -1, -1] = 0  # a record that ends in zero bytes
SPEC = "x=image:uint8[4,3,1],y=label:int32,classes=10"


def feature(value) -> tf.train.Feature:
    if isinstance(value, bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=array.ravel()))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=array.ravel()))


def write(path, examples, options=None) -> None:
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for example in examples:
            features = {key: feature(value) for key, value in example.items()}
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def examples(start: int, stop: int) -> list[dict]:
    return [{"image": IMAGES[i].tobytes(), "label": i % 10, "id": i} for i in range(start, stop)]


@pytest.fixture
def folder(tmp_path):
    """30 training records in files of 12, 0 and 18; 5 for evaluation."""
    for name, start, stop in [("train-0", 0, 12), ("train-1", 12, 12), ("train-2", 12, 30), ("test-0", 0, 5)]:
        write(tmp_path / f"{name}.tfrecord", examples(start, stop))
    return tmp_path


def load(folder, split="train", source_args=SPEC):
    return load_split(DataConfig(source="tfrecord", data_dir=str(folder), source_args=source_args), split)


def test_records_are_read_at_random(folder):
    split = load(folder)
    assert (split.size, split.num_classes, load(folder, "eval").size) == (30, 10, 5)
    for indices in ([0], [29, 0, 11, 12, 12], list(range(29, -1, -1))):
        x, y = split.fetch(tf.constant(indices, tf.int64))
        np.testing.assert_array_equal(x, IMAGES[indices].astype(np.float32) / np.float32(255))
        np.testing.assert_array_equal(y, np.array(indices) % 10)
    assert x.dtype == tf.float32 and y.dtype == tf.int32


def test_through_the_pipeline_every_record_comes_once(folder):
    split = load(folder)
    batches = [
        list(
            input_pipeline.train_dataset(
                split,
                input_pipeline.Reading(seed=0, shuffle=True),
                plan=BatchPlan(10, 1, 3),
                replica=r,
                consumed=10**6 * 30,
            )
            .take(3)
            .as_numpy_iterator()
        )
        for r in range(3)
    ]
    images = np.concatenate([batches[r][s][0] for s in range(3) for r in range(3)])
    assert {i.tobytes() for i in images} == {i.tobytes() for i in IMAGES.astype(np.float32) / np.float32(255)}


def test_kinds_of_features(tmp_path):
    ids, tokens, values = (
        np.arange(6).reshape(2, 3),
        np.arange(8, dtype=np.int64).reshape(2, 4),
        np.float16([[1.5, -2], [0, 9]]),
    )
    rows = [
        {
            "ids": ids[i],
            "raw": values[i].tobytes(),
            "tokens": tokens[i],
            "f": np.float32(i + 0.5),
            "raw64": tokens[i].tobytes(),
        }
        for i in range(2)
    ]
    write(tmp_path / "train", rows)
    for x, y, expected in [
        ("ids:int64[3]", "f:float32", (ids, [0.5, 1.5])),
        ("raw:float16[2]", "tokens:int32[2,2]", (values, tokens.reshape(2, 2, 2))),
        ("raw64:raw_int64[4]", "f:float32", (tokens, [0.5, 1.5])),
    ]:
        split = load(tmp_path, source_args=f"x={x},y={y},classes=10")
        found = split.fetch(tf.constant([0, 1], tf.int64))
        for value, target, spec in zip(found, expected, split.element_spec, strict=True):
            np.testing.assert_array_equal(value, target)
            assert value.dtype == spec.dtype and value.shape[1:] == spec.shape


def test_encoded_images(tmp_path):
    ramp = np.broadcast_to(np.linspace(0, 255, 40).astype(np.uint8)[None, :, None], [20, 40, 3])
    rows = [
        {"image": tf.io.encode_jpeg(ramp).numpy(), "label": 0},
        {"image": tf.io.encode_png(ramp[:, ::-1]).numpy(), "label": 1},
    ]
    write(tmp_path / "train", rows)
    split = load(tmp_path, source_args="x=image:image[16,16,3],y=label:int32,classes=2")
    x, _ = split.fetch(tf.constant([0, 1], tf.int64))
    assert x.shape == (2, 16, 16, 3) and x.dtype == tf.float32
    # The central 18 of 40 columns: about 0.29 to 0.71, and the other way round in the PNG.
    np.testing.assert_allclose(x.numpy()[0, 8, [0, -1], 0], [0.29, 0.71], atol=0.03)
    np.testing.assert_allclose(x.numpy()[1, 8, [0, -1], 0], [0.71, 0.29], atol=0.03)
    cropped = input_pipeline.train_dataset(
        split,
        input_pipeline.Reading(seed=0, shuffle=False, augment=augment.load_augmentation("random_resized_crop")),
        plan=BatchPlan(2, 1, 1),
        replica=0,
        consumed=0,
    )
    seen = np.concatenate([x for x, _, _ in cropped.take(30).as_numpy_iterator()])
    assert seen.shape == (60, 16, 16, 3) and len({i.tobytes() for i in seen}) > 50
    direction = np.sign(seen[:, 8, -1, 0] - seen[:, 8, 0, 0])
    assert 10 < (direction > 0).sum() < 50  # mirrored half of the time
    assert seen.min() >= 0 and seen.max() <= 1 and seen[:, :, :, 0].min() < 0.1  # reaches beyond the centre
    assert load(tmp_path, source_args="x=image:image[16,16,3],y=image:image[8,8,3]").fetch_cropped is None


@pytest.mark.parametrize("threads", [4])
def test_reading_from_several_threads(tmp_path, threads):
    rng = np.random.default_rng(0)
    rows = [rng.bytes(int(n)) for n in rng.integers(0, 3000, 500)]
    with tf.io.TFRecordWriter(str(tmp_path / "x")) as writer:
        for row in rows:
            writer.write(row)
    files, wrong = records.RecordFiles([str(tmp_path / "x")]), []

    def check(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(500)
        wrong.extend(i for i, data in zip(order, files.read(order), strict=True) if data != rows[i])

    workers = [threading.Thread(target=check, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong and len(files) == 500


def damaged(path, change) -> str:
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))
    return str(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:-1], "truncated"),
        (lambda d: d[:5], "truncated"),
        (lambda d: d + b"\0" * 8, "truncated"),
        (lambda d: b"x" + d, "is not a TFRecord file"),
        (lambda d: bytes([d[0] ^ 1]) + d[1:], "damaged at byte 0"),
        (lambda d: b"just some text, more than 16 bytes of it", "is not a TFRecord file"),
    ],
)
def test_damaged_framing(folder, change, message):
    damaged(folder / "train-0.tfrecord", change)
    with pytest.raises(DataError) as error:
        load(folder)
    assert message in str(error.value) and "train-0.tfrecord" in str(error.value)


def test_damaged_data_is_found_when_read(folder):
    split = load(folder)
    path = folder / "train-0.tfrecord"
    damaged(path, lambda d: d[:20] + bytes([d[20] ^ 1]) + d[21:])
    split.fetch(tf.constant([5], tf.int64))  # another record
    with pytest.raises(DataError, match="byte 0 has a wrong checksum"):
        split.fetch(tf.constant([0], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="DataError: .*byte 0 has a wrong checksum"):
        list(input_pipeline.eval_dataset(split, batch=5, replica=0, replicas=1)[0])


@pytest.mark.parametrize("left", [4, 30])
def test_a_file_that_is_cut_short_while_it_is_read(folder, left):
    split = load(folder)
    damaged(folder / "train-0.tfrecord", lambda d: d[:left])
    with pytest.raises(DataError, match="train-0.tfrecord ends within a record at byte 0: it was truncated"):
        split.fetch(tf.constant([0], tf.int64))


def test_slow_index_is_kept_beside_the_files_until_they_change(folder, monkeypatch):
    monkeypatch.setattr(records, "SLOW_INDEX_SECONDS", 0.0)
    load(folder)
    kept = list(folder.glob(".tfdist-index-*"))
    assert len(kept) == 1
    monkeypatch.setattr(records, "_scan", None)  # the index must come from the file now
    assert load(folder).size == 30
    monkeypatch.undo()
    write(folder / "train-1.tfrecord", examples(0, 4))
    assert load(folder).size == 34
    for file in folder.glob(".tfdist-index-*"):
        file.write_bytes(b"broken")
    assert load(folder).size == 34


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "by_file"), [(1, False), (2, False), (2, True), (3, False)])
def test_stream_takes_every_record_once(folder, replicas, by_file):
    count = 24 if by_file else 30  # by file, they must hold equally many
    write(folder / "train-2.tfrecord", examples(12, count))
    split = load(folder, source_args=f"{SPEC},stream=True,by_file={by_file}")
    assert split.size is None and split.stream_shards == (2 if by_file else 1)  # the empty file does not count
    plan = BatchPlan(6, 1, replicas)
    steps = 4 if by_file else 5  # by file, two replicas read one of two files of 12 each; else all read all
    parts = [
        [
            x
            for x, _, _ in (
                input_pipeline.train_dataset(
                    split, input_pipeline.Reading(seed=0, shuffle=False), plan=plan, replica=r, consumed=0
                )
                .take(steps)
                .as_numpy_iterator()
            )
        ]
        for r in range(replicas)
    ]
    if by_file:
        assert unique(parts[0]) == unique([IMAGES[:12] / np.float32(255)]) and unique(parts[1]) == unique(
            [IMAGES[12:count] / np.float32(255)]
        )
    assert sum(len(x) for part in parts for x in part) == count
    assert unique([x for part in parts for x in part]) == unique([IMAGES[:count] / np.float32(255)])
    shards = [[x[None] for x, _ in split.stream(r, replicas).as_numpy_iterator()] for r in range(replicas)]
    assert sum(map(len, shards)) == count and len(unique(sum(shards, []))) == count


@pytest.mark.parametrize(
    ("last", "words"),
    [(20, "read 12 of them, but one reads only 8"), (29, "read 12 of them, but one reads 17 or more")],
)
def test_files_that_hold_more_or_fewer_records_than_the_first_are_refused_by_file(folder, last, words):
    """After the last record that the others have, too, the samples of the shorter one would come more often."""
    write(folder / "train-2.tfrecord", examples(12, last))
    split = load(folder, source_args=SPEC + ",stream=True,by_file=True")
    assert len(list(split.stream(0, 2))) == 12
    reading = input_pipeline.Reading(seed=0, shuffle=True)
    with pytest.raises(tf.errors.OpError) as raised:
        for _ in input_pipeline.train_dataset(split, reading, plan=BatchPlan(2, 1, 2), replica=1, consumed=0).take(50):
            pass
    found = explain(raised.value, Cluster())
    assert isinstance(found, DataError) and re.search(words, str(found)) and "drop by_file=True" in str(found)


def test_the_sample_of_a_stream_that_is_not_finite_is_named(tmp_path):
    values = np.ones([40, 3], np.float32)
    values[7, 1] = np.nan
    write(tmp_path / "train", [{"x": value, "y": 0} for value in values])
    found = load(tmp_path, source_args="x=x:float32[3],y=y:int32,classes=2,stream=True")
    reading = Reading(seed=0, shuffle=False, cut=1)
    sentence = "The sample at position 7 of tfrecord/train has NaN in x at [1]."
    assert flaws.find_trained(found, BatchPlan(10, 1, 1), reading, first=0, count=20) == sentence
    assert flaws.find_trained(found, BatchPlan(10, 1, 1), reading, first=8, count=20) == ""


def test_an_index_that_cannot_be_written_leaves_nothing_behind(folder, monkeypatch):
    monkeypatch.setattr(records, "SLOW_INDEX_SECONDS", -1.0)

    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records.np, "savez", full)
    before = sorted(folder.iterdir())
    assert load(folder).size == 30 and sorted(folder.iterdir()) == before


def test_what_a_stream_holds_is_told_by_the_first_bytes_of_its_files(folder):
    """Two files of one size that changed places: names and sizes are the same."""
    write(folder / "train-2.tfrecord", examples(12, 24))
    split = load(folder, source_args=SPEC + ",stream=True")
    before = contents.identity(split)
    assert contents.changed(split, before, contents.identity(split)) == ""
    write(folder / "train-0.tfrecord", examples(12, 24))
    write(folder / "train-2.tfrecord", examples(0, 12))
    assert "other samples" in contents.changed(split, before, contents.identity(split))


def unique(batches) -> set[bytes]:
    return {image.tobytes() for batch in batches for image in batch}


def test_compressed_stream(tmp_path):
    write(tmp_path / "train.gz", examples(0, 7), tf.io.TFRecordOptions(compression_type="GZIP"))
    split = load(tmp_path, source_args=SPEC + ",stream=True,compression=GZIP")
    assert len(list(split.stream(0, 1))) == 7
    with pytest.raises(DataError, match="compression=GZIP"):
        load(tmp_path)
    with pytest.raises(DataError, match="train.gz is not a TFRecord file.*compression=GZIP"):
        load(tmp_path, source_args=SPEC + ",stream=True")


@pytest.mark.parametrize("name", ["d[1]", "d?", "d*", "d\\1", "d[!x]"])
def test_a_folder_is_no_pattern(tmp_path, name):
    """Beside it lies one that its name would match."""
    for each, count in ((name, 7), ("d1", 11)):
        (tmp_path / each / "more").mkdir(parents=True)
        write(tmp_path / each / "a-train", examples(0, count))
        write(tmp_path / each / "more" / "a-train", examples(0, count + 1))
    assert load(tmp_path / name).size == 7
    assert load(tmp_path / name, source_args=SPEC + ",train=mor?/*").size == 8


def test_folders_that_match_are_no_files(folder):
    (folder / "train").mkdir()
    write(folder / "train" / "x-0", examples(0, 3))
    assert load(folder).size == 30 and load(folder, source_args=SPEC + ",train=train/*").size == 3
    with pytest.raises(DataError, match="no file train for train: .*train=FOLDER/PATTERN"):
        load(folder, source_args=SPEC + ",train=train")


@pytest.mark.parametrize("options", ["", ",stream=True"])
def test_hidden_files_alone_are_no_files(folder, options):
    """As copying tools leave them while they write."""
    write(folder / ".part-0", examples(0, 3))
    with pytest.raises(DataError, match=r"no file \.part\* for train: check the folder, or set --source_args=train="):
        load(folder, source_args=f"{SPEC},train=.part*{options}")
    (folder / "test-0.tfrecord").rename(folder / ".eval-0")
    write(folder / "validation-0", examples(0, 4))
    assert load(folder, split="eval", source_args=SPEC).size == 4  # another pattern finds what is not hidden


@pytest.mark.parametrize(
    ("source_args", "error", "message"),
    [
        ("y=label:int32", ConfigError, "x='' must be FEATURE:KIND"),
        ("x=image:unit8,y=label:int32", ConfigError, "with KIND one of"),
        ("x=image:image,y=label:int32,classes=2", ConfigError, "an image needs its size"),
        ("x=image:uint8[4,3,1],y=label:int32", ConfigError, "add classes=N"),
        (SPEC + ",compression=GZIP", ConfigError, "together with stream=True"),
        (SPEC + ",by_file=True", ConfigError, "by_file=True is for files that are read from front to back: add stream"),
        (SPEC + ",files=x", ConfigError, "has no option 'files'"),
        (SPEC + ",train=nothing*", DataError, "has no file nothing*"),
        (SPEC + ",train=t*", DataError, "belongs to both splits"),
        (SPEC + ",train=train-1*", DataError, "contain no record"),
        (
            "x=image:uint8[5,5,1],y=label:int32,classes=10",
            DataError,
            "(id:int64_list, image:bytes_list, label:int64_list) does not fit",
        ),
        ("x=picture:uint8[4,3,1],y=label:int32,classes=10", DataError, "does not fit"),
        ("x=image:float32[12],y=label:int32,classes=10", DataError, "does not fit"),
    ],
)
def test_bad_options(folder, source_args, error, message):
    with pytest.raises(error) as raised:
        load(folder, source_args=source_args)
    assert message in str(raised.value)


def test_records_longer_by_a_whole_factor_do_not_become_more_rows(folder):
    with pytest.raises(DataError, match="does not fit"):
        load(folder, source_args="x=image:uint8[2,3,1],y=label:int32,classes=10")
