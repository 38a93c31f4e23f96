"""Identifies the data of a fit with a few numbers. A fit that resumes with other data would use some samples twice and
others never, for example if a script splits them at random without a seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_arrays
from tfdist.data.checksums import checksum
from tfdist.data.contents import known_length

Identity = dict[str, list]  # name of an argument -> [shape, dtype, checksum] of each array in it, or [length]

_TRAINED_ON = ("x", "y", "sample_weight")
_DATA = (*_TRAINED_ON, "validation_data")


def identity_of(given: Mapping[str, Any]) -> Identity:
    """The identity of arrays, and of datasets whose length TensorFlow knows; other data is left out.

    given: the arguments of `fit`, some of which hold data: arrays, nested in any way, or a dataset.
    """
    data = {name: _rows_as_arrays(given[name]) for name in _DATA if given.get(name) is not None}
    return {name: [_of(leaf) for leaf in keras.tree.flatten(value)] for name, value in data.items()}


def _rows_as_arrays(value: Any) -> Any:
    """Turns lists of texts and numbers, which models with a `fit` of their own accept, into arrays."""
    if isinstance(value, tuple):
        return tuple(_rows_as_arrays(each) for each in value)
    if isinstance(value, dict):
        return {name: _rows_as_arrays(each) for name, each in value.items()}
    rows = isinstance(value, list) and all(isinstance(row, (str, bytes, int, float)) for row in value)
    return np.array(value, object) if rows else value


def what_changed(before: Identity, now: Identity) -> str:
    """The names of the arguments that hold other data than before; "" if there are none."""
    given_once = [name for name in _TRAINED_ON if before and (name in before) != (name in now)]  # {}: not known
    other = (name for name in now if name in before and before[name] != now[name])
    return ", ".join([*given_once, *other])


def _of(leaf: Any) -> list:
    if isinstance(leaf, tf.data.Dataset):
        length = known_length(leaf)
        return [] if length is None else [length]
    if leaf is not None and keras_arrays.are_arrays(leaf):
        array = np.asarray(leaf)
        return [list(array.shape), array.dtype.name, checksum(array)]
    return []
