"""A split over the user's own object with __len__ and __getitem__, which is asked for one sample at a time.

Samples become columns of one shape and dtype. The shape is that of item 0. The dtype is the common one of the items
that are checked first (NumPy's promotion: labels 0 and 0.5 make float64). Items read later must fit it without loss:
only a float may lose digits; nothing is truncated, nothing wraps around.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import DataError, TfdistError
from tfdist.control.passing_errors import reading_failed
from tfdist.control.user_errors import failure
from tfdist.data.checksums import sampled_rows
from tfdist.data.sources.split import Sample, Split, places

_ORDER = "biufcSUO"  # dtype kinds in order: bool, whole numbers, floats, complex numbers, text


def object_split(name: str, data: Any) -> Split:
    """Makes a split with random access through data[i]. Raises DataError if items do not fit each other."""
    try:
        size = len(data)
    except Exception as error:  # whatever the user's code raises, or Python raises for its return value
        words = f"--source: the length of {name}, a {type(data).__name__}, {failure(error)}"
        raise reading_failed(words, error) from error
    if not size:
        raise DataError(f"--source: {name} is an empty {type(data).__name__}.")
    items = _Items(name, data)
    spec, flat_spec = items.spec, tf.nest.flatten(items.spec)

    def fetch(indices: tf.Tensor) -> Sample:
        # stateful=False: otherwise op determinism forbids reading in parallel.
        columns = tf.numpy_function(items.rows, [indices], [s.dtype for s in flat_spec], stateful=False)
        for column, s in zip(columns, flat_spec, strict=True):
            column.set_shape([*indices.shape, *s.shape])
        return tf.nest.pack_sequence_as(spec, columns)

    return Split(name, size, spec, fetch, getattr(data, "num_classes", None))


class _Items:
    """The items of an object, as rows of columns. spec: that of one item."""

    def __init__(self, name: str, data: Any):
        self.name, self.data = name, data
        self.structure = self._item(0)
        samples = [self._parts(int(index)) for index in sampled_rows(len(data))]
        self.places = [str(place) for place in places(self.structure)]
        self.shapes = [part.shape for part in samples[0]]
        specs = []
        for column, (place, parts) in enumerate(zip(self.places, zip(*samples, strict=True), strict=True)):
            weight = len(self.structure) == 3 and place.startswith("w")
            dtype = np.dtype(np.float32) if weight else self._common_type(parts, place)
            specs.append(tf.TensorSpec(self.shapes[column], tf.as_dtype(dtype)))
        self.dtypes = [np.dtype(spec.dtype.as_numpy_dtype) for spec in specs]
        self.spec = tf.nest.pack_sequence_as(self.structure, specs)

    def rows(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Returns the samples at these indices, one column for each part: [n, *shape]."""
        columns = [
            np.empty([len(indices), *shape], dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        for row, index in enumerate(indices):
            for number, part in enumerate(self._parts(int(index))):
                if part.shape != self.shapes[number]:  # the assignment below would broadcast it
                    raise DataError(
                        f"--source: item {index} of {self.name} has {self.places[number]} of shape {part.shape}, item 0"
                        f" has {self.shapes[number]}: give all one shape."
                    )
                if part.dtype != self.dtypes[number] and not _fits(part, self.dtypes[number]):
                    raise DataError(
                        f"--source: item {index} of {self.name} has {self.places[number]} = {_said(part)}"
                        f" ({_type_name(part)}), which {self.dtypes[number]}, the type of the first items, cannot hold:"
                        " give all items one type."
                    )
                columns[number][row] = part[()]
        return columns

    def _item(self, index: int) -> tuple:
        try:
            item = self.data[index]
        except (TfdistError, MemoryError):
            raise
        except Exception as error:  # whatever the user's code raises
            raise reading_failed(f"--source: item {index} of {self.name} {failure(error)}", error) from error
        if not isinstance(item, tuple) or len(item) not in (2, 3):
            raise DataError(
                f"--source: item {index} of {self.name} is a {type(item).__name__}: __getitem__ must return (x, y) or"
                " (x, y, w)."
            )
        return item

    def _parts(self, index: int) -> list[np.ndarray]:
        """Returns the tensors of an item as a flat list. Raises DataError if its structure is not that of item 0."""
        item = self._item(index)
        try:
            tf.nest.assert_same_structure(self.structure, item)
            parts = [_as_array(value) for value in tf.nest.flatten(item)]
        except (ValueError, TypeError):  # another structure, or a list whose parts differ in length
            raise DataError(
                f"--source: item {index} of {self.name} is {_form(item)}, item 0 is {_form(self.structure)}: give all"
                " items the same parts, weights too."
            ) from None
        for part, place in zip(parts, places(item), strict=True):
            if part.dtype.kind not in _ORDER or (
                part.dtype.kind == "O" and not all(isinstance(value, str | bytes) for value in part.ravel())
            ):
                raise DataError(
                    f"--source: item {index} of {self.name} has {place} = {_said(part)}, which is neither numbers nor"
                    " text."
                )
        return parts

    def _common_type(self, parts: Sequence[np.ndarray], place: str) -> np.dtype:
        if any(part.dtype.kind in "SUO" for part in parts):
            if not all(part.dtype.kind in "SUO" for part in parts):
                raise DataError(
                    f"--source: some items of {self.name} have text for {place}, others numbers: give all one type."
                )
            return np.dtype(object)
        return np.result_type(*(part.dtype for part in parts))


def _as_array(value: Any) -> np.ndarray:
    # NumPy's own choice for text, an array of dtype S or U, would drop zeros at the end.
    return np.asarray(value, object) if isinstance(value, str | bytes) else np.asarray(value)


def _type_name(part: np.ndarray) -> str:
    return str(part.dtype) if part.ndim or part.dtype != object else type(part[()]).__name__


def _fits(part: np.ndarray, dtype: np.dtype) -> bool:
    """Whether `dtype` holds the values of `part` exactly, or as a float with fewer digits."""
    text = (part.dtype.kind in "SUO", dtype.kind in "SUO")
    if any(text):
        return all(text)
    if part.dtype.kind == "f" and dtype.kind == "f":
        with np.errstate(over="ignore"):
            return bool((np.isfinite(part) == np.isfinite(part.astype(dtype))).all())
    if _ORDER.index(part.dtype.kind.replace("u", "i")) > _ORDER.index(dtype.kind.replace("u", "i")):
        return False
    held = part.astype(dtype)
    return bool(((held == part) & (held.astype(part.dtype) == part)).all())  # NumPy compares as float64, if need be


def _form(item: tuple) -> str:
    """Describes an item as (x, y) and the like, with the keys and types of the parts."""

    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {shown(part)}" for key, part in value.items()) + "}"
        if isinstance(value, tuple | list):
            return f"{type(value).__name__} of {len(value)}"
        return type(value).__name__

    return f"({', '.join(map(shown, item))})"


def _said(part: np.ndarray) -> str:
    text = np.array2string(part, threshold=6, edgeitems=2).replace("\n", " ")
    return re.sub(" at 0x[0-9a-f]+", "", text)[:80]
