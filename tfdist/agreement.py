"""What all workers must agree on, and how they find out: collectives on small host values."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.artifacts import state
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.base import Runtime


def must_agree(runtime: Runtime, what: str, identity: str, fix: str) -> None:
    """Raises ConfigError on all workers unless `identity` (of the same length everywhere) is the same on all."""
    found = [row.tobytes().decode() for row in runtime.all_gather(np.frombuffer(identity.encode(), np.uint8))]
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ConfigError(f"Rank {rank} has {what} {other}, rank 0 has {found[0]}: {fix}.")


def check_weights_agree(runtime: Runtime, variables: Mapping[str, Any]) -> None:
    """All ranks must hold the same bits in the model's variables; a difference would never go away. Raises ConfigError."""
    checksum = 0
    for array in state.to_host({key: variables[key] for key in variables if key.startswith("model/")}).values():
        checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
    checksums = runtime.all_gather(np.array([checksum], np.uint32))[:, 0]
    different = [str(rank) for rank, other in enumerate(checksums) if other != checksums[0]]
    if different:
        raise ConfigError(f"The weights of rank {', '.join(different)} differ from the chief's at the start: the model must be built in the same way on all workers (no per-worker randomness, the same package versions).")


def broadcast_json(runtime: Runtime, value: Any) -> Any:
    """The chief's value, on every worker."""
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(runtime.all_gather(np.array([data.size], np.int64))[0, 0])
    (data,) = runtime.broadcast([data if runtime.rank == 0 else np.zeros(length, np.uint8)])
    return json.loads(data.tobytes())
