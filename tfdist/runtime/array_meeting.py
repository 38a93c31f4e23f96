"""Lets ranks meet with an array each, and read each other's where they are on one host."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.control.cluster import Cluster
from tfdist.runtime.all_reduce_choice import measured
from tfdist.runtime.ring_connections import Patience, RingConnections
from tfdist.runtime.ring_error import MARK, RingError
from tfdist.runtime.shared_memory import NOT_SHARED, OthersArrays, SharedArrays

_PLACE = struct.Struct("!Qqq")  # bytes of an array; where to read it: serial, descriptor


class ArrayMeeting(RingConnections):
    """Exchanges arrays between ranks. Args: see RingConnections, and
      share: arrays made by `empty` may be read in place by other ranks on this host. The same on all ranks.

    Attributes: shares, whether the right neighbour reads them in place; all_read, whether every rank can read the
    shares of every other (an array may still be announced as not shared); link, what was measured between three ranks
    and more if not.
    """

    def __init__(
        self,
        cluster: Cluster,
        exchange: Callable[[str], Sequence[str]],
        patience: Patience | None = None,
        share: bool = False,
    ):
        super().__init__(cluster, exchange, patience or Patience())
        self._shared = SharedArrays()
        self._others: dict[int, OthersArrays] = {}
        self._unread: list[np.ndarray] = []  # arrays that other ranks may still be reading
        self.shares = self.all_read = False
        if share:
            self._share()
        self.link = None if self.size < 3 or self.all_read else measured(self)

    def _share(self) -> None:
        """Finds out whose arrays can be read here, and who can read ours."""
        offers = self.all_gather(self._shared.offer(), "offer")
        readable = bytearray(self.size)
        for rank, offer in enumerate(offers):
            if rank != self.rank or self.size == 1:
                self._others[rank] = OthersArrays(bytes(offer))
                readable[rank] = self._others[rank].readable
        by_rank = self.all_gather(bytes(readable), "readable")
        self._shared.withdraw()
        self._shared.readers = frozenset(rank for rank, of_rank in enumerate(by_rank) if of_rank[self.rank])
        self.shares = (self.rank + 1) % self.size in self._shared.readers
        self.all_read = self.size > 1 and all(sum(of_rank) == self.size - 1 for of_rank in by_rank)

    def empty(self, length: int) -> np.ndarray:
        """A zeroed float32 [length], on a page boundary, that others can read in place if that is possible."""
        return (
            self._shared.empty(length)
            if self._shared.readers
            else np.frombuffer(mmap.mmap(-1, max(4 * length, 4)), np.float32, length)
        )

    def _arrays_of_all(self, array: np.ndarray, site: int, bucket: int) -> list[np.ndarray] | None:
        """The arrays of all ranks, read in place, when all have come, with three ranks or more; None on all ranks if
        that cannot be for one of them. What all have read before is free again."""
        if self.size < 3 or not self.all_read:
            return None
        mine = self._shared.where(array)
        packed = self.all_gather(_PLACE.pack(array.nbytes, *mine), bucket_name(site, bucket))
        self._all_is_read()
        places = [_PLACE.unpack(place) for place in packed]
        self._must_be_alike([size for size, _, _ in places], site, bucket)
        if NOT_SHARED in [serial for _, serial, _ in places]:
            return None
        return [
            array if rank == self.rank else self._array_of(rank, serial, descriptor, array.size)
            for rank, (_, serial, descriptor) in enumerate(places)
        ]

    def _all_is_read(self) -> None:
        """Frees what all ranks have read: all have come to something after it."""
        while self._unread:
            self._shared.has_been_read(self._shared.where(self._unread.pop(0))[0], self._shared.readers)

    def _must_be_alike(self, sizes: Sequence[int], site: int, bucket: int) -> None:
        """Raises RingError if a rank's array has other bytes than this one's."""
        for rank, size in enumerate(sizes):
            if size != sizes[self.rank]:
                raise other_program(self.rank, (site, bucket, sizes[self.rank]), rank, (site, bucket, size))

    def _array_of(self, rank: int, serial: int, descriptor: int, length: int) -> np.ndarray:
        try:
            if rank not in self._others:
                raise OSError("this worker does not read in place")
            return self._others[rank].get(serial, descriptor, length)
        except OSError as error:
            raise RingError(f"{MARK}lost contact with rank {rank} (its memory cannot be read: {error}).") from None


def bucket_name(site: int, bucket: int) -> str:
    """The name under which ranks gather when they meet with a bucket."""
    return f"{site:x}/{bucket:x}"


def other_program(rank: int, mine: tuple, other: int, theirs: tuple) -> RingError:
    """The error that says that ranks reduce different things. mine, theirs: site, bucket and bytes."""
    return RingError(
        f"{MARK}ConfigError: Rank {rank} reduces {mine}, rank {other} {theirs} (site, bucket, bytes): the workers do"
        " not run the same program on data of the same shapes and types."
    )
