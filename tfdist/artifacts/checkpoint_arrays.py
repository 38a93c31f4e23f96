"""Reads slices ("boxes") of arrays in a TensorFlow checkpoint, whatever slices they were saved in.

TensorFlow itself can cut one box out of others, except for float16 and for unsigned integers of more than 8 bits
("Dtype half not supported", tensorflow/core/util/tensor_slice_util.h). For these it reads only boxes exactly as saved,
and this module assembles the requested boxes from them. A box is ((start, length) for each dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdist.compat.checkpoint_index import Box, CheckpointIndex, is_whole, overlap

ONLY_AS_SAVED = ("float16", "uint16", "uint32", "uint64")


def spec(shape: Sequence[int], box: Box) -> str:
    """Formats a box of an array of `shape` for RestoreV2; "" for the whole."""
    if is_whole(box, shape):
        return ""
    return f"{' '.join(map(str, shape))} {':'.join(f'{start},{length}' for start, length in box)}"


def read_boxes(prefix: str, name: str, shape: Sequence[int], boxes: Sequence[Box], dtype: tf.DType) -> list[np.ndarray]:
    """Reads boxes of one array of the checkpoint `prefix`. Raises tf.errors.OpError, ValueError."""
    if dtype.name not in ONLY_AS_SAVED:
        return _read(prefix, name, shape, boxes, dtype)
    stored = [each.box for each in CheckpointIndex(Path(f"{prefix}.index").read_bytes()).stored(name)]
    needed = [each for each in stored if any(overlap(each, box) for box in boxes)]
    contents = list(zip(needed, _read(prefix, name, shape, needed, dtype), strict=True))
    found = []
    for box in boxes:
        whole = np.empty([length for _, length in box], dtype.as_numpy_dtype)
        for place, content in contents:
            if overlap(place, box):
                whole[_inside(place, box)] = content[_inside(box, place)]
        found.append(whole)
    return found


def _read(prefix: str, name: str, shape: Sequence[int], boxes: Sequence[Box], dtype: tf.DType) -> list[np.ndarray]:
    if not boxes:
        return []
    with tf.device("CPU:0"):
        found = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[name] * len(boxes),
            shape_and_slices=[spec(shape, box) for box in boxes],
            dtypes=[dtype] * len(boxes),
        )
    return [tensor.numpy() for tensor in found]


def _inside(first: Box, second: Box) -> tuple[slice, ...]:
    """The intersection of two boxes, as slices of the second."""
    return tuple(slice(max(a - b, 0), min(a + n - b, m)) for (a, n), (b, m) in zip(first, second, strict=True))
