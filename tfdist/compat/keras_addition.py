"""Corrects Keras' addition of one number per row to rows."""

from __future__ import annotations

from typing import Any

from keras.src import backend


def add_rows_to_rows() -> None:
    """Makes [B, D] + [B, 1] give the same result for a known B as for an unknown B.

    Keras 3.15 takes [B, 1] for a bias if B = D (or, for [B, T, D] + [B, 1, 1], if B is T or D). It then adds number d
    to channel d, and so mixes rows: with 16 channels, in batches of 16 rows and in no others. `keras.Model.fit` does
    not know the number of rows, but a step of tfdist does. Changes the whole process, once. Relies on the backend's
    `add`, with which all of Keras adds.
    """
    if not hasattr(backend.numpy.add, "of_rows"):
        backend.numpy.add = _of_rows(backend.numpy.add)


def _of_rows(add: Any) -> Any:
    def added(x1: Any, x2: Any) -> Any:
        if any(getattr(getattr(each, "shape", None), "rank", 0) is None for each in (x1, x2)):
            return add(x1, x2)
        other, (rows, *rest) = tuple(getattr(x1, "shape", ())), tuple(getattr(x2, "shape", ())) or (None,)
        is_of_rows = len(rest) + 1 == len(other) and rest and rows not in (None, 1) and set(rest) == {1}
        return add(x2, x1) if is_of_rows else add(x1, x2)  # Keras takes only the second operand for a bias

    added.of_rows = True
    return added
