"""Finds the inputs of a model that hold the rows of a batch; other inputs are tables that every worker needs whole.

An input whose first dim differs from the batch's is a table. If the first dim is equal, it may still be a table with
just as many rows as the batch. So the model is traced with one more row in that input alone. If it refuses, or returns
one more row, the input belongs to the batch; if it returns as many rows as before, it does not. Layers whose number of
output rows is unknown during tracing, such as TextVectorization, refuse only when they run, so in that case the model
is run, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

_ASKED_WITH = 4  # rows of each input, if none are known during tracing
Rows = int | None  # of an input; None: unknown while tracing, as with datasets whose last batch may be smaller
Returned = tuple[Rows, ...] | None  # of all outputs; None: inputs of such dims do not fit together


def of_the_batch(
    dims: Sequence[Rows],
    returned: Callable[[Sequence[Rows]], Returned],
    runs: Callable[[Sequence[int]], bool] = lambda dims: True,
) -> list[bool]:
    """Whether each input holds rows of the batch.

    Args:
      dims: first dims of the inputs.
      returned: first dims of the inputs -> first dims of the outputs; each output may depend on some inputs only.
      runs: first dims -> whether the model can be run on such inputs.
    """
    if len(dims) < 2:
        return [True] * len(dims)
    known = [dim for dim in dims if dim is not None]
    if not known:  # ask as if all had this length
        dims = known = [_ASKED_WITH] * len(dims)
    if len(known) < len(dims):
        return _beside_unknown(dims, returned)
    found = returned(known)
    rows = found[0] if found and found[0] in known else known[0]
    tells = found is not None and None not in found
    return _beside_known(known, rows, lambda dims: tells and returned(dims) == found and runs(dims))


def _beside_unknown(dims: Sequence[Rows], returned: Callable[[Sequence[Rows]], Returned]) -> list[bool]:
    """Whether each input's rows are the batch's: yes if its length is unknown; if it is known, yes if the model runs
    with no other number of rows."""
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


def with_other_rows(
    specs: Sequence[tf.TensorSpec], cut: Sequence[bool], rows: int, unknown: Rows = _ASKED_WITH
) -> list[tf.TensorSpec]:
    """Specs with so many rows where the rows are the batch's. cut: for each tensor with rows, whether they are.
    unknown: what other unknown dims become."""
    flags, found = iter(cut), []
    for spec in specs:
        dims = [dim or unknown for dim in spec.shape]
        if dims and next(flags):
            dims[0] = rows
        found.append(tf.TensorSpec(dims, spec.dtype))
    return found
