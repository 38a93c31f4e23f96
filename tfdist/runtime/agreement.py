"""Do all workers hold the same weights? Data parallelism rests on it, and nothing else would tell: a worker that missed
one reduction goes on training, with losses that look right."""

from __future__ import annotations

import zlib

import keras
import numpy as np

from tfdist.control.exit_codes import DivergedError
from tfdist.runtime.base import Runtime
from tfdist.runtime.host import host_view


def check_weights(runtime: Runtime, model: keras.Model, when: str) -> None:
    """Compares a CRC-32 of every weight and moving statistic over all workers. All must call it.

    Moving statistics that are not synchronised differ by nature: make them the same before. Seed generators, which
    differ by intention, are left out (they are not of a floating type).

    Args:
      when: for the sentence, for example "at step 300".
    Raises: DivergedError on all workers, which names the ranks that differ from the chief, and the first variable.
    """
    variables = [variable for variable in model.variables if keras.backend.is_float_dtype(variable.dtype)]
    digests = runtime.all_gather(np.array([zlib.crc32(np.ascontiguousarray(host_view(variable.value)).reshape(-1).view(np.uint8)) for variable in variables], np.uint32))
    ranks, places = np.nonzero(digests != digests[0])
    if ranks.size:
        raise DivergedError(
            f"The weights of rank {', '.join(map(str, np.unique(ranks)))} differ from the chief's {when} ({len(np.unique(places))} of {len(variables)} variables, "
            f"the first is {variables[places.min()].path}): model and gradients must be the same on all workers; look for code that runs on some of them only, then go on from the last snapshot.")
