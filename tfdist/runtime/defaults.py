"""Defaults for most runtimes: the protocol's capabilities, and broadcasts of objects by broadcasts of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.control.exit_codes import ConfigError, PeerLostError
from tfdist.control.terminal import printable

if TYPE_CHECKING:
    from tfdist.runtime.all_reduce_choice import GradientPath
    from tfdist.runtime.mesh import Mesh
    from tfdist.runtime.operations import Collective


class RuntimeDefaults:
    """A base class for runtimes; see runtime/base.py. Each runtime implements the rest of the protocol itself."""

    rank: int
    all_gather: Callable[[np.ndarray], np.ndarray]
    broadcast: Callable[[list[np.ndarray]], list[np.ndarray]]
    counts_samples = True
    mesh: Mesh | None = None
    holds_whole_model = True
    compiles_updates = True
    sums_slices = True
    compute_workers = 1

    def batch_devices(self) -> Sequence[str]:
        return ()

    def order_tokens(self) -> Sequence[Any]:
        return ()

    def collectives(self) -> dict[str, Collective]:
        return {}

    def broadcast_object(self, value: Any, name: str = "broadcast") -> Any:
        from tfdist.runtime.encoding import Malformed, decode, encode  # imports TensorFlow

        problem, data = None, b""
        if self.rank == 0:
            try:
                data = encode([value])
            except ConfigError as error:  # all must learn of it: they would wait
                problem, data = error, encode(str(error))
        try:
            found = decode(self._broadcast_bytes(data, name))
        except Malformed as error:
            raise PeerLostError(
                f"The value of {name} that rank 0 sent cannot be read ({printable(str(error))}): give all workers the"
                " same version of tfdist."
            ) from None
        if isinstance(found, str):
            raise problem or ConfigError(printable(found))
        return found[0]

    def _broadcast_bytes(self, data: bytes, name: str) -> bytes | memoryview:
        """Returns the chief's bytes, whose length the other workers do not know."""
        length = int(self.all_gather(np.array([len(data)], np.int64))[0, 0])
        mine = np.frombuffer(data, np.uint8) if self.rank == 0 else np.zeros(length, np.uint8)
        return self.broadcast([mine])[0].tobytes()

    def waiting_for(self) -> int | None:
        return None

    def reduction_s(self) -> tuple[float, float] | None:
        return None

    def gradient_path(self) -> GradientPath | None:
        return None
