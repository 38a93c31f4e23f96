"""Lets ranks exchange arrays, and read each other's arrays in place where they are on one host."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.control.cluster import Cluster
from tfdist.runtime.all_reduce_choice import measured
from tfdist.runtime.ring.ring_connections import Patience, RingConnections
from tfdist.runtime.ring.ring_error import MARK, RingError
from tfdist.runtime.ring.shared_memory import NOT_SHARED, OthersArrays, SharedArrays

_PLACE = struct.Struct("!Qqq")  # bytes of an array; where to read it: serial number, descriptor


class ArrayMeeting(RingConnections):
    """Exchanges arrays between ranks. Args: see RingConnections, and
      share: arrays made by `empty` may be read in place by other ranks on this host. The same on all ranks.

    Attributes: shares, whether the right neighbor reads them in place; all_read, whether every rank can read the shares
    of every other (an array may still be announced as not shared); link, the measurement of the link, if there are
    three ranks or more and all_read is false.
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
        """Finds out whose arrays this rank can read, and who can read its arrays."""
        offers = self.all_gather(self._shared.offer(), "offer")
        readable = bytearray(self.size)
        for rank, offer in enumerate(offers):
            others = OthersArrays(bytes(offer)) if rank != self.rank or self.size == 1 else None
            if others and others.readable:
                self._others[rank] = others
                readable[rank] = True
        by_rank = self.all_gather(bytes(readable), "readable")
        self._shared.withdraw()
        self._shared.readers = frozenset(rank for rank, of_rank in enumerate(by_rank) if of_rank[self.rank])
        self.shares = (self.rank + 1) % self.size in self._shared.readers
        self.all_read = self.size > 1 and all(sum(of_rank) == self.size - 1 for of_rank in by_rank)
        if not self.all_read:  # then only the right neighbor is told of an array, and could not read it on another host
            self._shared.readers &= {(self.rank + 1) % self.size}

    def empty(self, length: int) -> np.ndarray:
        """A zeroed float32 [length], on a page boundary, which other ranks can read in place if possible."""
        return (
            self._shared.empty(length)
            if self._shared.readers
            else np.frombuffer(mmap.mmap(-1, max(4 * length, 4)), np.float32, length)
        )

    def _arrays_of_all(self, array: np.ndarray, site: int, bucket: int) -> list[np.ndarray] | None:
        """Returns the arrays of all ranks, read in place, once all have come; for three ranks or more. Returns None on
        all ranks if that is impossible for one of them. Arrays that all ranks have read become free again."""
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
        """Frees the arrays that all ranks have read: all ranks have reached a later exchange."""
        while self._unread:
            self._shared.has_been_read(self._shared.where(self._unread.pop(0))[0], self._shared.readers)

    def _must_be_alike(self, sizes: Sequence[int], site: int, bucket: int) -> None:
        """Raises RingError if a rank's array has another number of bytes than this rank's."""
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
    """The name under which ranks gather when they meet for a bucket: in base 36, so that 12 characters hold 32 bits of
    a site and 1.6 million buckets."""
    return f"{np.base_repr(site, 36)}/{np.base_repr(bucket, 36)}"


def other_program(rank: int, mine: tuple, other: int, theirs: tuple) -> RingError:
    """The error for ranks that reduce different things. mine, theirs: site (with a checksum of its shapes), bucket and
    bytes."""
    return RingError(
        f"{MARK}ConfigError: Rank {rank} reduces {mine}, rank {other} {theirs} (site, bucket, bytes): the workers do"
        " not run the same program on data of the same shapes and types."
    )
