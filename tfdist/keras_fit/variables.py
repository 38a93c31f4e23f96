"""What keeps the workers' variables the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import google_crc32c
import keras
import numpy as np

from tfdist.runtime import first_values
from tfdist.runtime.base import PeerRuntime


def take_the_chiefs(runtime: PeerRuntime, variables: Sequence[keras.Variable]) -> None:
    """Every worker gets the chief's bits, those of seed generators too.

    Raises ConfigError if the workers' shapes differ.
    """
    first_values.take_the_chiefs(runtime, [variable.value for variable in variables])


def reconcile(runtime: PeerRuntime, model: keras.Model) -> None:
    """Compares the weights; if they drifted apart (a layer that keeps statistics of its batch), all take the
    chief's.
    """
    weights = [variable for variable in model.variables if not _is_seed(variable)]
    checksum = 0
    for weight in weights:
        checksum = google_crc32c.extend(checksum, np.ascontiguousarray(weight.value).reshape(-1).view(np.uint8))
    checksums = runtime.all_gather(np.array([checksum], np.uint32))
    if (checksums != checksums[0]).any():
        take_the_chiefs(runtime, weights)
        if runtime.rank == 0:
            print("tfdist: the workers' weights had drifted apart; all took the chief's.", file=sys.stderr, flush=True)


def _is_seed(variable: keras.Variable) -> bool:
    return variable.path.endswith("seed_generator_state")
