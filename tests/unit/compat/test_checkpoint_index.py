"""tfdist/compat/checkpoint_index.py against what TensorFlow writes: where an array lies, and under which checksum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat.checkpoint_index import CheckpointIndex, overlap


def spec(shape, box) -> str:
    """A dim of which all is meant, as TensorFlow's partitioned variables say it."""
    extents = ["-" if extent == (0, size) else "{},{}".format(*extent) for extent, size in zip(box, shape, strict=True)]
    return f"{' '.join(map(str, shape))} {':'.join(extents)}"


def grid(shape, chance):
    """Boxes that make up an array, cut at random places."""
    cuts = [sorted({0, size, *chance.integers(0, size, 2).tolist()}) for size in shape]
    return list(itertools.product(*([(a, b - a) for a, b in itertools.pairwise(places)] for places in cuts)))


def write(prefix: str, arrays: dict[str, np.ndarray], boxes: dict[str, list]) -> None:
    names, specs, tensors = [], [], []
    for name, array in arrays.items():
        for box in boxes.get(name, [None]):
            names.append(name)
            specs.append(spec(array.shape, box) if box else "")
            tensors.append(array[tuple(slice(a, a + n) for a, n in box)] if box else array)
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=tensors)


@pytest.mark.parametrize("seed", range(8))
def test_every_slice_is_found_where_tensorflow_has_written_it(tmp_path, seed):
    """Several files, merged; starts and lengths of one byte and of three; names with odd characters."""
    chance = np.random.default_rng(seed)
    shapes = [(), (7,), (3, 4), (200, 9), (2, 3, 70), (20_000,), (3_000_000, 1)]
    arrays = {
        f"a\u00fc{number}/x": chance.integers(0, 99, shape).astype(np.int8) for number, shape in enumerate(shapes)
    }
    arrays |= {f"many/{number:04d}": np.full(3, number, np.float32) for number in range(300)}  # several blocks
    boxes = {name: grid(array.shape, chance) for name, array in arrays.items() if array.ndim and "many" not in name}
    parts = []
    for part in range(3):
        mine = {
            name: array for number, (name, array) in enumerate(arrays.items()) if name in boxes or number % 3 == part
        }
        own = {name: boxes[name][part::3] for name in mine if name in boxes}
        mine = {name: array for name, array in mine.items() if own.get(name, True)}
        parts.append(f"{tmp_path}/part-{part}")
        write(parts[-1], mine, own)
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=parts, destination_prefix=f"{tmp_path}/whole", delete_old_dirs=False
    )
    index = CheckpointIndex((tmp_path / "whole.index").read_bytes())
    files = [(tmp_path / f"whole.data-{number:05d}-of-{index.files:05d}").read_bytes() for number in range(3)]
    assert index.files == 3
    for name, array in arrays.items():
        assert index.shape(name) == array.shape
        found = np.full(array.shape, -1, array.dtype)
        stored = index.stored(name)
        for each in stored:
            content = files[each.file][each.offset : each.offset + each.size]
            assert each.is_intact([content[:1], content[1:]])
            assert not each.is_intact([content[:-1] + bytes([content[-1] ^ 1])]) and not each.is_intact([content[:-1]])
            values = np.frombuffer(content, array.dtype).reshape([length for _, length in each.box])
            found[tuple(slice(start, start + length) for start, length in each.box)] = values
        assert np.array_equal(found, array), name
        assert sum(math.prod(length for _, length in each.box) for each in stored) == array.size
    with pytest.raises(KeyError):
        index.stored("nothing")


def test_what_is_no_index_is_refused(tmp_path):
    write(f"{tmp_path}/a", {"x": np.zeros(3, np.float32)}, {})
    content = (tmp_path / "a.index").read_bytes()
    for broken in (b"", b"x" * 100, content[:-1], content[1:], bytes(len(content) - 48) + content[-48:]):
        with pytest.raises(ValueError, match=r"it .*(index|truncated)"):
            CheckpointIndex(broken)


def test_boxes_overlap_if_they_share_an_element():
    assert overlap(((0, 3), (2, 2)), ((2, 1), (3, 9)))
    assert not overlap(((0, 3), (2, 2)), ((2, 1), (4, 9)))
    assert not overlap(((0, 3),), ((3, 1),)) and overlap((), ())
