"""A ring all-reduce over plain TCP, and shared memory between neighbours on one host, for gradients on the CPU.

TensorFlow's own CPU collectives pass every tensor through gRPC, which costs three to four times what the same bytes
cost on a bare socket (scripts/bench_ring.py). Here each worker holds one connection to its right and one to its left
neighbour. Where the left neighbour's array can be read in place (shared_memory.py), a byte over the connection says
that a chunk is ready, and no copy is sent.

The algorithm is the bandwidth-optimal ring (Patarasu & Yuan 2009): each of the n ranks owns one of n chunks;
n - 1 steps pass partial sums around until every rank holds the complete sum of its own chunk, n - 1 more pass the
complete chunks on. Each rank sends and receives 2 (n - 1) / n of the data. A chunk is summed once, by ranks in ring
order, and then copied, so all ranks end with the same bits, whether it was sent or read in place.

Reading in place needs no locks: a chunk changes again only when the sum of which it was a part has come back around the
ring, and so has been read; and an all-reduce ends only when the right neighbour has said that it has read everything.

Two ranks need not take turns: each reads all of the other's array and adds it up itself. It is the same sum, bit for
bit, but each waits for the other once and not four times, which is what counts while both compute.

With `halved`, what is sent is rounded to bfloat16, half the bytes; sums are made in float32, and what is read in place
is not rounded on its way. The complete sums are, so that all ranks have the same bits whichever way they came.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tfdist.control.cluster import Cluster
from tfdist.runtime.ring_connections import Outgoing, Patience, RingConnections
from tfdist.runtime.ring_error import MARK, RingError
from tfdist.runtime.shared_memory import NOT_SHARED, OFFER_BYTES, OthersArrays, SharedArrays

# Site, bucket, bytes: checked, so that ranks can never mix up their gradients; where to read them: serial, descriptor.
_HEADER = struct.Struct("!IIQqq")
_TOKEN, _NOTHING = memoryview(b"."), memoryview(b"")


class _Round(NamedTuple):
    """What an exchange of one array goes by."""

    chunks: list[np.ndarray]  # of the array, one for each rank
    left: Sequence[np.ndarray | None]  # of the left neighbour's, where they are read in place
    read_by_right: int  # the serial number under which the right neighbour reads the array in place; NOT_SHARED
    read_here: int  # that of the left neighbour's


class Ring(RingConnections):
    """The all-reduce over connections to both neighbours.

    Args: see RingConnections, and
      share: arrays made by `empty` may be read in place by a neighbour on this host. The same on all ranks.
    """

    def __init__(
        self,
        cluster: Cluster,
        exchange: Callable[[str], Sequence[str]],
        patience: Patience | None = None,
        share: bool = False,
    ):
        super().__init__(cluster, exchange, patience or Patience())
        self._scratch, self._halves = np.empty(0, np.float32), np.empty(0, ml_dtypes.bfloat16)
        self._shared = SharedArrays()
        self._unread: list[np.ndarray] = []  # arrays that the right neighbour may still be reading
        self._others: OthersArrays | None = None
        self.shares = share and self._share()

    def _share(self) -> bool:
        """Finds out whether the left neighbour's arrays can be read here, and tells whether the right one can read
        ours.
        """
        offer, readable = bytearray(OFFER_BYTES), bytearray(1)
        self._pass_on(memoryview(self._shared.offer()), memoryview(offer))
        self._others = OthersArrays(bytes(offer))
        self._pass_on(memoryview(bytes([self._others.readable])), memoryview(readable), backwards=True)
        self._shared.withdraw()
        return bool(readable[0])

    def empty(self, length: int) -> np.ndarray:
        """A zeroed float32 [length], on a page boundary, that the right neighbour can read in place if that is
        possible.
        """
        return (
            self._shared.empty(length)
            if self.shares
            else np.frombuffer(mmap.mmap(-1, max(4 * length, 4)), np.float32, length)
        )

    def all_reduce(
        self,
        array: np.ndarray,
        site: int = 0,
        bucket: int = 0,
        halved: bool = False,
        spare: Callable[[int], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Sums a contiguous float32 [k] over all ranks. Returns where the sum is: in `array` itself, or in another.

        spare: length -> an array that `empty` has made, for the sum. With it, `array` is given away: it must not change
        as long as this object refers to it. `site`, `bucket`, `halved`, and whether there is a `spare`, must agree on
        all ranks.
        """
        if self.size == 2 and spare and not halved:
            return self._sum_of_two(array, site, bucket, spare)
        now = self._meet_with(array, site, bucket)
        longest = max(chunk.size for chunk in now.chunks)
        scratch = self._scratch_of(longest)
        if halved and self._halves.size < longest:
            self._halves = np.empty(longest, ml_dtypes.bfloat16)
        for step in range(self.size - 1):
            sent, index = (self.rank - step) % self.size, (self.rank - step - 1) % self.size
            chunk = now.chunks[index]
            received = self._next(now, sent, index, scratch[: chunk.size], halved, is_ready=step == 0)
            np.add(chunk, received, out=chunk)
        if halved:
            complete = now.chunks[(self.rank + 1) % self.size]
            complete[:] = complete.astype(ml_dtypes.bfloat16)
        self._hand_around(now, self.rank + 1, halved)
        self._finish(now)
        return array

    def _sum_of_two(self, array: np.ndarray, site: int, bucket: int, spare: Callable[[int], np.ndarray]) -> np.ndarray:
        self._wait_until_read()
        serial, descriptor = self._shared.where(array)
        header = memoryview(_HEADER.pack(site, bucket, array.nbytes, serial, descriptor))
        outgoing = Outgoing(header, _NOTHING if serial else _bytes(array))
        their_serial, their_descriptor = self._met(outgoing, (site, bucket, array.nbytes))
        if their_serial:
            theirs = self._left_array(their_serial, their_descriptor, array.size)
        else:
            theirs = self._scratch_of(array.size)
            self._pass_on(outgoing, _bytes(theirs))
        self._pass_on(outgoing, _NOTHING)
        # In one order on both ranks: of two NaNs the sum is the first.
        first, second = (array, theirs) if self.rank == 0 else (theirs, array)
        total = np.add(first, second, out=spare(array.size) if serial else array)
        if their_serial:
            self._pass_on(_TOKEN, _NOTHING, backwards=True)
        if serial:
            self._unread.append(array)
        return total

    def _wait_until_read(self) -> None:
        """Before anything else comes from the right neighbour: its word that it has read what was left to it."""
        while self._unread:
            self._pass_on(_NOTHING, memoryview(bytearray(1)), backwards=True)
            self._shared.has_been_read(self._shared.where(self._unread.pop(0))[0])

    def _scratch_of(self, length: int) -> np.ndarray:
        if self._scratch.size < length:
            self._scratch = np.empty(length, np.float32)
        return self._scratch[:length]

    def gather(self, array: np.ndarray, site: int = 0, bucket: int = 0) -> None:
        """Of a contiguous float32 [size * k], in which part `rank` is this rank's, fills in the others', bit for
        bit.
        """
        now = self._meet_with(array, site, bucket)
        self._hand_around(now, self.rank, is_ready=True)
        self._finish(now)

    def _meet_with(self, array: np.ndarray, site: int, bucket: int) -> _Round:
        """Makes sure that all ranks are about to exchange the same array."""
        cuts = [index * array.size // self.size for index in range(self.size + 1)]
        chunks = [array[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
        self._wait_until_read()
        serial, descriptor = self._shared.where(array)
        header = memoryview(_HEADER.pack(site, bucket, array.nbytes, serial, descriptor))
        outgoing = Outgoing(header)
        their_serial, their_descriptor = self._met(outgoing, (site, bucket, array.nbytes))
        self._pass_on(outgoing, _NOTHING)
        left: Sequence[np.ndarray | None] = [None] * self.size
        if their_serial != NOT_SHARED:
            whole = self._left_array(their_serial, their_descriptor, array.size)
            left = [whole[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
        return _Round(chunks, left, serial, their_serial)

    def _met(self, outgoing: Outgoing, what: tuple[int, int, int]) -> tuple[int, int]:
        """The serial number and the descriptor that the left neighbour says. Some of `outgoing` may not be sent yet."""
        theirs = bytearray(_HEADER.size)
        self._pass_on(outgoing, memoryview(theirs), all_sent=False)
        *their_what, serial, descriptor = _HEADER.unpack(theirs)
        if tuple(their_what) != what:
            raise RingError(
                f"{MARK}ConfigError: Rank {self.rank} reduces {what}, its neighbour"
                f" {tuple(their_what)} (site, bucket, bytes): the workers do not run the same program on data of the"
                " same shapes and types."
            )
        return serial, descriptor

    def _hand_around(self, now: _Round, own: int, halved: bool = False, is_ready: bool = False) -> None:
        """Passes complete chunks on until every rank has all.

        own: the number of the one that this rank has. is_ready: it was when the ranks met.
        """
        for step in range(self.size - 1):
            sent, index = (own - step) % self.size, (own - 1 - step) % self.size
            received = self._next(now, sent, index, now.chunks[index], halved, is_ready and step == 0)
            if received is not now.chunks[index]:
                np.copyto(now.chunks[index], received)

    def _finish(self, now: _Round) -> None:
        """Returns when the right neighbour has read everything that it reads in place; tells the left one the same."""
        answer = memoryview(bytearray(1)) if now.read_by_right else _NOTHING
        self._pass_on(_TOKEN if now.read_here else _NOTHING, answer, backwards=True)
        self._shared.has_been_read(now.read_by_right)

    def _left_array(self, serial: int, descriptor: int, length: int) -> np.ndarray:
        try:
            if self._others is None:
                raise OSError("this worker does not read in place")
            return self._others.get(serial, descriptor, length)
        except OSError as error:
            raise RingError(
                f"{MARK}lost contact with rank {(self.rank - 1) % self.size} (its memory cannot be read: {error})."
            ) from None

    def _next(self, now: _Round, sent: int, index: int, into: np.ndarray, halved: bool, is_ready: bool) -> np.ndarray:
        """Passes chunk `sent` on.

        Returns the left neighbour's chunk `index`: its own array, read in place, or what was received `into`. is_ready:
        that they have met says already that chunks can be read in place.
        """
        mine, theirs = now.chunks[sent], now.left[index]
        if halved and not now.read_by_right:
            mine = mine.astype(ml_dtypes.bfloat16)
        token = _NOTHING if is_ready else _TOKEN
        outgoing = token if now.read_by_right else _bytes(mine)
        if theirs is not None:
            self._pass_on(outgoing, memoryview(bytearray(len(token))))
            return theirs
        received = self._halves[: into.size] if halved else into
        self._pass_on(outgoing, _bytes(received))
        if halved:
            into[:] = received
        return into


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data if array.size else _NOTHING
