"""What keeps the workers' variables the same."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence

import keras
import numpy as np

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.base import PeerRuntime


def take_the_chiefs(runtime: PeerRuntime, variables: Sequence[keras.Variable]) -> None:
    """Every worker gets the chief's bits, those of seed generators too.

    Raises ConfigError if the workers' shapes differ.
    """
    shapes = [(tuple(variable.shape), str(variable.dtype)) for variable in variables]
    counts = runtime.all_gather(np.array([len(shapes), zlib.crc32(repr(shapes).encode())], np.int64))
    if (counts != counts[0]).any():
        raise ConfigError(
            f"The model and optimizer have {' and '.join(str(count) for count in counts[:, 0])} variables on the"
            " workers, of shapes that differ: build the same model on all of them."
        )
    received = runtime.broadcast([np.asarray(variable.value) for variable in variables])
    if runtime.rank:
        for variable, value in zip(variables, received, strict=True):
            variable.assign(value)


def reconcile(runtime: PeerRuntime, model: keras.Model) -> None:
    """Compares the weights; if they drifted apart (a layer that keeps statistics of its batch), all take the
    chief's.
    """
    weights = [variable for variable in model.variables if not _is_seed(variable)]
    checksum = 0
    for weight in weights:
        checksum = zlib.crc32(np.ascontiguousarray(weight.value).tobytes(), checksum)
    checksums = runtime.all_gather(np.array([checksum], np.uint32))
    if (checksums != checksums[0]).any():
        take_the_chiefs(runtime, weights)
        if runtime.rank == 0:
            print("tfdist: the workers' weights had drifted apart; all took the chief's.", file=sys.stderr, flush=True)


def _is_seed(variable: keras.Variable) -> bool:
    return variable.path.endswith("seed_generator_state")
