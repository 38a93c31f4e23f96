"""Keras' addition, of a number for each row to rows."""

from __future__ import annotations

from typing import Any

from keras.src import backend


def add_rows_to_rows() -> None:
    """Makes [B, D] + [B, 1] for a known B what it is for an unknown one. Keras 3.15 takes [B, 1] for a bias if B = D
    (or for [B, T, D] + [B, 1, 1] if B is T or D), adds number d to channel d, and so mixes rows: of a batch of 16 rows
    with 16 channels, and of no other. `keras.Model.fit` does not know how many rows come, but a step of tfdist does.

    For the whole process, once. Relies on the backend's `add`, by which all of Keras adds.
    """
    if not hasattr(backend.numpy.add, "of_rows"):
        backend.numpy.add = _of_rows(backend.numpy.add)


def _of_rows(add: Any) -> Any:
    def added(x1: Any, x2: Any) -> Any:
        if any(getattr(getattr(each, "shape", None), "rank", 0) is None for each in (x1, x2)):
            return add(x1, x2)
        other, (rows, *rest) = tuple(getattr(x1, "shape", ())), tuple(getattr(x2, "shape", ())) or (None,)
        is_of_rows = len(rest) + 1 == len(other) and rest and rows not in (None, 1) and set(rest) == {1}
        return add(x2, x1) if is_of_rows else add(x1, x2)  # what looks like a bias comes second there

    added.of_rows = True
    return added
