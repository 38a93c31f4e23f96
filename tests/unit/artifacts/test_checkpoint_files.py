"""The files of a checkpoint, byte for byte as TensorFlow's own SaveV2 writes them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.compat.test_checkpoint_index import grid, spec
from tfdist.artifacts.checkpoint_files import Entry, write_files


def by_tensorflow(prefix: str, entries: list[Entry]) -> None:
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[entry.name for entry in entries],
            shape_and_slices=[_spec(entry) for entry in entries],
            tensors=[entry.array for entry in entries],
        )


def _spec(entry: Entry) -> str:
    if entry.box is None:
        return ""
    return f"{' '.join(map(str, entry.shape))} {':'.join(f'{start},{length}' for start, length in entry.box)}"


def must_be_the_same(tmp_path: Path, entries: list[Entry]) -> None:
    by_tensorflow(f"{tmp_path}/theirs", entries)
    for direct in (True, False):
        written = write_files(f"{tmp_path}/ours", entries, direct)
        for suffix in ("index", "data-00000-of-00001"):
            assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes(), suffix
        assert written["ours.data-00000-of-00001"]["bytes"] == (tmp_path / "theirs.data-00000-of-00001").stat().st_size


def arrays_of_all_kinds(chance: np.random.Generator) -> dict[str, np.ndarray]:
    numbers = chance.normal(size=(5, 7))
    kinds = ["float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
    found = {f"kinds/{kind}": (numbers * 9).astype(kind) for kind in kinds}
    found |= {
        "kinds/bfloat16": numbers.astype(ml_dtypes.bfloat16),
        "kinds/float8": numbers.astype(ml_dtypes.float8_e4m3fn),
        "kinds/bool": numbers > 0,
        "kinds/complex64": (numbers + 1j).astype("complex64"),
        "kinds/complex128": numbers + 1j,
        "scalar": np.array(-0.0, "float32"),
        "empty": np.zeros((0, 3), "float32"),
        "strided": numbers[::2, ::3],
        "turned": numbers.T,
        "texts/bytes": np.array([[b"one", b"", b"\0\xff" * 300]], object),
        "texts/none": np.zeros((0,), object),
        "texts/str": np.array("\u00fc", object),
        "odd \u00fc/\x01\xff": numbers,
        "big-endian": numbers.astype(">f4"),
    }
    return found


@pytest.mark.parametrize("seed", range(3))
def test_arrays_of_all_kinds(tmp_path, seed):
    chance = np.random.default_rng(seed)
    found = list(arrays_of_all_kinds(chance).items())
    chance.shuffle(found)
    must_be_the_same(tmp_path, [Entry(name, array) for name, array in found])


def test_more_names_than_a_block_of_the_index_holds(tmp_path):
    """And names that share much, little and nothing with their neighbours."""
    chance = np.random.default_rng(1)
    names = {f"model/{number:04d}/" + "x" * int(chance.integers(0, 120)) for number in range(6000)}
    names |= {"".join(map(chr, chance.integers(33, 127, 12))) for _ in range(3000)}
    must_be_the_same(tmp_path, [Entry(name, np.array(len(name))) for name in sorted(names)])


def test_arrays_larger_than_the_memory_they_pass_through(tmp_path):
    """Of which the last bytes are no whole block of the disk, and those that are."""
    chance = np.random.default_rng(2)
    sizes = [3, 1 << 20, 4 << 20, (9 << 20) + 1, 4096 - 4]
    must_be_the_same(tmp_path, [Entry(f"a{size}", chance.integers(0, 99, size, np.uint8)) for size in sizes])
    must_be_the_same(tmp_path, [Entry("one", np.zeros(8 << 20, np.uint8))])


@pytest.mark.parametrize("seed", range(4))
def test_boxes_of_arrays(tmp_path, seed):
    chance = np.random.default_rng(seed)
    entries = []
    for number, shape in enumerate([(7,), (3, 4), (200, 9), (2, 3, 70), (20_000,), (300_000, 1)]):
        array = chance.integers(0, 99, shape).astype(np.int16)
        boxes = [box for box in grid(shape, chance) if spec(shape, box)][:: 1 + seed]
        for box in boxes:
            content = array[tuple(slice(start, start + length) for start, length in box)]
            entries.append(Entry(f"{number}/x", content, shape, box))
    entries.append(Entry("whole", np.arange(4)))
    must_be_the_same(tmp_path, entries)


def test_objects_that_are_no_texts_are_refused(tmp_path):
    with pytest.raises(TypeError, match="contains a int"):
        write_files(f"{tmp_path}/ours", [Entry("x", np.array([1, 2], object))], True)
