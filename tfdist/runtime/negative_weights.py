"""Refuses negative weights of samples where samples are read, because a mean with such weights is no mean. TensorFlow
stops, and runtime/errors.py says why."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import DataError

_MARK = "tfdist: a negative weight"
_FOUND = re.compile(rf"\[{_MARK}\] \[(.*?)\] \[(\d+)\] \[(-[^\]]+)\]")


def refused(w: Any, name: str, numbers: tf.Tensor) -> Any:
    """Returns the same weights, checked: their use fails if one is negative. numbers: [n], of a split's samples."""

    def checked(part: tf.Tensor) -> tf.Tensor:
        if not (part.dtype.is_floating or part.dtype.is_integer):
            return part
        lowest = tf.reduce_min(part, tf.range(1, tf.rank(part)))  # per sample
        below = lowest < 0
        at = tf.argmax(tf.cast(below, tf.int32))
        found = [_MARK, name, tf.gather(numbers, at), tf.gather(lowest, at)]
        with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(below), found)]):
            return tf.identity(part)

    return tf.nest.map_structure(checked, w)


def refuse(w: Any, name: str) -> None:
    """Raises DataError if any of a split's weights, arrays with one row per sample, is negative."""
    for part in tf.nest.flatten(w):
        if (below := np.argwhere(np.asarray(part) < 0)).size:
            at = tuple(below[0])
            raise DataError(_sentence(name, at[0], np.asarray(part)[at]))


def sentence_of(text: str) -> str:
    """The sentence about a negative weight in the text of TensorFlow's error; "" if it is about something else."""
    found = _FOUND.search(text)
    return _sentence(*found.groups()) if found else ""


def _sentence(name: str, number: Any, value: Any) -> str:
    return (
        f"--source: sample {number} of {name} has the weight {float(value):.6g}, but losses are means with weights of"
        " at least 0: pass an advantage in y, and multiply the losses by it in your own --objective."
    )
