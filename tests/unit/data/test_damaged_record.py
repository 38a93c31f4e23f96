"""The file of a damaged record is named where TensorFlow's error names none: in streams."""

import os

import pytest
import tensorflow as tf

from tests.unit.data.test_source_tfrecord import SPEC, examples, load, write
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import DataError
from tfdist.runtime import damaged_record
from tfdist.runtime.errors import explain


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A file with records of other lengths comes first: its records begin elsewhere."""
    monkeypatch.setattr(damaged_record, "_read", {})  # without the files of other tests
    write(tmp_path / "train-0.tfrecord", [{**each, "more": 7} for each in examples(0, 12)])
    write(tmp_path / "train-1.tfrecord", [])
    write(tmp_path / "train-2.tfrecord", examples(12, 30))
    return tmp_path


def failure_of(folder):
    with pytest.raises(tf.errors.DataLossError) as raised:
        list(load(folder, source_args=f"{SPEC},stream=True").stream(0, 1))
    found = explain(raised.value, Cluster())
    assert isinstance(found, DataError)
    return str(found)


@pytest.mark.parametrize("byte", [1, 9, 20, -2, "cut"])
def test_the_damaged_file_of_a_stream_is_named(folder, byte):
    path = folder / "train-2.tfrecord"
    records = [bytes(each.numpy()) for each in tf.data.TFRecordDataset(str(path))]
    begin = sum(len(each) + 16 for each in records[:5])
    data = bytearray(path.read_bytes())
    if byte == "cut":
        del data[begin + 20 :]
    else:
        data[(begin if byte >= 0 else begin + len(records[5]) + 16) + byte] ^= 4
    path.write_bytes(data)
    sentence = failure_of(folder)
    assert sentence.startswith("A record of the data cannot be read: ")
    assert sentence.endswith(f". {path} is damaged: the record at byte {begin} is incomplete; restore the file.")


@pytest.mark.parametrize("left", [1, 11])
def test_a_file_that_ends_in_the_header_of_a_record(folder, left):
    """Which TensorFlow takes for its end."""
    path = folder / "train-2.tfrecord"
    sizes = [len(each.numpy()) + 16 for each in tf.data.TFRecordDataset(str(path))]
    begin = sum(sizes[:17])
    path.write_bytes(path.read_bytes()[: begin + left])
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        list(load(folder, source_args=f"{SPEC},stream=True").stream(0, 1))
    found = explain(raised.value, Cluster())
    assert isinstance(found, DataError)
    assert str(found).startswith(
        f"{path} has {begin + left:,} bytes, but its records end at byte {begin:,}: it was truncated within a record,"
    )


def test_a_file_that_grows_while_it_is_read(folder):
    path = folder / "train-2.tfrecord"
    stream, before = load(folder, source_args=f"{SPEC},stream=True").stream(0, 1), path.stat().st_size
    assert len(list(stream)) == 30
    write(path, examples(12, 30) + examples(0, 1))
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        list(stream)
    now = path.stat().st_size
    assert f"{path} has {before:,} bytes, but its records end at byte {now:,}: it was truncated within" in str(
        explain(raised.value, Cluster())
    )


def test_a_file_that_is_not_found_is_not_named(folder, monkeypatch):
    path = folder / "train-2.tfrecord"
    data = bytearray(path.read_bytes())
    data[20] ^= 4
    path.write_bytes(data)
    with monkeypatch.context() as patch:
        patch.setattr(damaged_record, "_MOST_SECONDS", -1.0)
        assert failure_of(folder) == "A record of the data cannot be read: corrupted record at 12"
    message = "corrupted record at 12"
    assert str(path) in damaged_record.damaged_file(message)
    os.remove(path)
    assert damaged_record.damaged_file(message) == "" == damaged_record.damaged_file("a checkpoint is damaged")
