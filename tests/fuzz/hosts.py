"""Workers as on two hosts: the last one is alone on the second. It can't read the others' memory, nor they its memory.

Sums take the ring's way, which passes on what can be read in place, however small they are.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.control.cluster import Cluster
from tfdist.runtime.all_reduce_choice import Link
from tfdist.runtime.ring import array_meeting
from tfdist.runtime.ring.shared_memory import OthersArrays, SharedArrays

_OFFER = struct.Struct("!QQ16s")  # see shared_memory.py
_ELSEWHERE = 2**22 + 1  # no process has this number


@contextlib.contextmanager
def two(cluster: Cluster) -> Iterator[None]:
    """Context manager in which the workers connect."""
    host = bytes([cluster.rank == cluster.size - 1])

    class Shared(SharedArrays):
        def __init__(self) -> None:
            super().__init__()
            self._token = host + self._token[1:]

    class Others(OthersArrays):
        def __init__(self, offer: bytes):
            pid, descriptor, token = _OFFER.unpack(offer)
            super().__init__(_OFFER.pack(pid if token[:1] == host else _ELSEWHERE, descriptor, token))

    with (
        attribute_replaced(array_meeting, "SharedArrays", Shared),
        attribute_replaced(array_meeting, "OthersArrays", Others),
        attribute_replaced(array_meeting, "measured", lambda ring: Link(0.0, 1.0, ring.size)),
    ):
        yield
