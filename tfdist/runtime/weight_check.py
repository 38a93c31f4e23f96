"""Checks that all replicas hold the same weights. Data parallelism depends on it, and nothing else would show a
difference: a worker that missed one reduction continues to train, with losses that look right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from tfdist.compat.keras_random import is_seed_state
from tfdist.control.exit_codes import DivergedError
from tfdist.runtime.base import Runtime
from tfdist.runtime.host import host_view

_ABSENT = -1


@dataclass(frozen=True)
class Held:
    """The value of one variable for which `is_compared` is true, as this worker holds it.

    `piece`: all holders of the same piece must hold the same bits.
    """

    name: str
    variable: tf.Variable | None  # None: not held here
    piece: int = 0


def is_compared(variable: Any) -> bool:
    """Whether a variable of a model must be the same on all workers. The states of seed generators differ
    intentionally."""
    return tf.as_dtype(variable.dtype) != tf.string and not is_seed_state(variable)


def check_weights(runtime: Runtime, held: Sequence[Held], when: str) -> None:
    """Compares a CRC-32C of every weight and state over all workers, and over each worker's replicas. All must call it.

    Moving statistics that are not synchronized differ naturally: make them the same first.

    Args:
      held: the same variables in the same order on all workers.
      when: for the message, for example "at step 300".
    Raises: DivergedError on all workers. It names who differs from the first holder of the same piece, and the first
    such variable.
    """
    checksums = np.full((runtime.local_replicas, len(held), 2), _ABSENT, np.int64)
    for place, each in enumerate(held):
        for replica, copy in enumerate(runtime.local(each.variable) if each.variable is not None else ()):
            content = np.ascontiguousarray(host_view(copy)).reshape(-1).view(np.uint8)
            checksums[replica, place] = each.piece, google_crc32c.extend(0, content)  # three times as fast as zlib's
    found = runtime.all_gather(checksums).reshape(-1, len(held), 2)  # for every replica or, on a mesh, every rank
    different: dict[int, set[int]] = {}  # place of a variable -> who differs
    for place in range(len(held)):
        first: dict[int, int] = {}
        for who, (piece, digest) in enumerate(found[:, place].tolist()):
            if piece != _ABSENT and first.setdefault(piece, digest) != digest:
                different.setdefault(place, set()).add(who)
    if different:
        kind, named = "rank" if runtime.local_replicas == 1 else "replica", held[min(different)]
        variable: Any = named.variable
        counts = variable is not None and not tf.as_dtype(variable.dtype).is_floating
        fix = " count what is the same on all of them, such as steps, not rows;" if counts else ""
        raise DivergedError(
            f"The weights of {kind} {', '.join(map(str, sorted(set.union(*different.values()))))} differ from"
            f" {_reference(runtime, found[:, min(different), 0])} {when} ({len(different)} of {len(held)} variables,"
            f" the first is {named.name}): model and gradients must be the same on all workers, and so must the state"
            f" that layers keep of their batch;{fix} look for code that runs on some of them only, then resume from the"
            " last snapshot."
        )


def _reference(runtime: Runtime, pieces: np.ndarray) -> str:
    if runtime.local_replicas > 1:
        return "those of the first"
    return "the chief's" if (pieces == pieces[0]).all() else "those of the first rank that has the same"
