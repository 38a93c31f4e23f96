"""Do all workers hold the same weights? Data parallelism rests on it, and nothing else would tell: a worker that missed
one reduction goes on training, with losses that look right."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from tfdist.control.exit_codes import DivergedError
from tfdist.runtime.base import Runtime


def check_weights(runtime: Runtime, weights: Mapping[str, np.ndarray], when: str) -> None:
    """Compares a CRC-32 of every array over all workers; all must call it with the same names.

    Args:
      weights: name -> this worker's value. Only digests travel, 4 bytes each.
      when: for the sentence, for example "at step 300".
    Raises: DivergedError on all workers, which names the ranks that differ from the chief, and the first array.
    """
    names = sorted(weights)
    digests = runtime.all_gather(np.array([zlib.crc32(np.ascontiguousarray(weights[name]).tobytes()) for name in names], np.uint32))
    ranks, arrays = np.nonzero(digests != digests[0])
    if ranks.size:
        different = ", ".join(map(str, np.unique(ranks)))
        raise DivergedError(
            f"The weights of rank {different} differ from the chief's {when} ({len(np.unique(arrays))} of {len(names)} arrays, first {names[arrays.min()]}): "
            "gradients were not the same on all workers; look for code that runs on some of them only, then go on from the last snapshot.")
