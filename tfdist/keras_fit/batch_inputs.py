"""Finds the inputs of a model that hold the rows of a batch; others are tables beside it that every worker needs whole.

A first dim says it if it is not the batch's. Where it could be the batch's, as a table may have just as many rows as a
batch, the model is asked: it is traced with one more row in that input alone. If it refuses, or returns one more row,
the input belongs to the batch; if it returns as many rows as before, it does not. Layers whose output has rows that
tracing does not know, as TextVectorization's, refuse only when they run, so then it is run, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_ASKED_WITH = 4  # rows of each input, where tracing knows of none
Rows = int | None  # of an input; None: not known while tracing, as in a batch of a dataset that may be smaller
Returned = tuple[Rows, ...] | None  # of all outputs; None: inputs of such dims do not fit together


def of_the_batch(
    dims: Sequence[Rows],
    returned: Callable[[Sequence[Rows]], Returned],
    runs: Callable[[Sequence[int]], bool] = lambda dims: True,
) -> list[bool]:
    """Whether each input holds rows of the batch.

    Args:
      dims: first dims of the inputs.
      returned: first dims of the inputs -> first dims of the outputs; each output may have inputs of its own.
      runs: first dims -> whether the model can be run on such inputs.
    """
    if len(dims) < 2:
        return [True] * len(dims)
    known = [dim for dim in dims if dim is not None]
    if not known:  # as if all had been of some length
        dims = known = [_ASKED_WITH] * len(dims)
    if len(known) < len(dims):
        return _beside_unknown(dims, returned)
    found = returned(known)
    rows = found[0] if found and found[0] in known else known[0]
    tells = found is not None and None not in found
    return _beside_known(known, rows, lambda dims: tells and returned(dims) == found and runs(dims))


def _beside_unknown(dims: Sequence[Rows], returned: Callable[[Sequence[Rows]], Returned]) -> list[bool]:
    """For each input whether its rows are the batch's: yes if its length is unknown; if it is known, yes if the model
    runs with no other number of rows."""
    other = max(dim for dim in dims if dim is not None) + 1
    return [
        dim is None or returned([dims[place] if place == this else other for place in range(len(dims))]) is None
        for this, dim in enumerate(dims)
    ]


def _beside_known(dims: Sequence[int], rows: Rows, returns_as_many: Callable[[Sequence[int]], bool]) -> list[bool]:
    candidates = [dim == rows for dim in dims]
    if sum(candidates) == 1:
        return candidates
    batch = [
        candidate and not returns_as_many([dim + (place == this) for place, dim in enumerate(dims)])
        for this, candidate in enumerate(candidates)
    ]
    return batch if any(batch) else candidates
