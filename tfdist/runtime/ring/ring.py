"""All-reduce over plain TCP, and shared memory between ranks on one host, for gradients on the CPU.

TensorFlow's own CPU collectives pass every tensor through gRPC, which takes three to four times as long as the same
bytes over a bare socket (scripts/bench_ring.py). Here each worker has connections to some others (ring_connections.py).
There are four ways. All add up each chunk of an array in ring order, and so give the same bits:

    ring         large arrays between hosts: the bandwidth-optimal way (Patarasu & Yuan 2009). Each of the n ranks
                 owns one of n chunks; n - 1 steps pass partial sums around until every rank holds the complete sum of
                 its own chunk, n - 1 more pass the complete chunks on: 2 (n - 1) waits, 2 (n - 1) / n of the bytes.
    by doubling  small arrays between hosts: all arrays are gathered, and each rank adds them up: log2(n) waits, but
                 n - 1 times the bytes. all_reduce_choice.py decides up to which size.
    in place     all ranks on one host: each sums its own chunk of everyone's arrays, where they are, and then copies
                 the others' sums: two times log2(n) waits, and nothing is sent.
    of two       each reads the other's whole array and adds it up itself: each waits for the other once.

In a ring, if the left neighbor's array can be read in place, one byte over the connection announces that a chunk is
ready, and no copy is sent. That needs no locks: a chunk changes again only when the sum that includes it has come back
around the ring, so it has been read; and an all-reduce ends only when the right neighbor has reported that it has read
everything. If all ranks read in place, an array that is given away is free when all have come to the next meeting.

With `halved`, data is sent rounded to bfloat16, half the bytes; sums are computed in float32 (in a ring), and data that
is read in place is not rounded on its way. The complete sums are rounded, so that all ranks have the same bits
whichever way they came.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tfdist.runtime.all_reduce_choice import GradientPath
from tfdist.runtime.ring.array_meeting import ArrayMeeting, bucket_name, other_program
from tfdist.runtime.ring.ring_connections import TOKEN, Outgoing
from tfdist.runtime.ring.shared_memory import NOT_SHARED

# Site, bucket, bytes: checked, so that ranks never mix up their gradients; where to read them: serial, descriptor.
_HEADER = struct.Struct("!IIQqq")
_NOTHING = memoryview(b"")


class _Round(NamedTuple):
    """The arrays in one exchange."""

    chunks: list[np.ndarray]  # of the array, one for each rank
    left: Sequence[np.ndarray | None]  # the left neighbor's chunks, where they are read in place
    read_by_right: int  # serial number under which the right neighbor reads the array in place, or NOT_SHARED
    read_here: int  # the same for the left neighbor's array, read here


class Ring(ArrayMeeting):
    """The all-reduce of all ranks. See ArrayMeeting."""

    _scratch, _halves = np.empty(0, np.float32), np.empty(0, ml_dtypes.bfloat16)  # replaced by longer ones as needed

    def gradient_path(self) -> GradientPath:
        """How sums travel, in words."""
        if self.all_read:
            return GradientPath("are read in place")
        if not self.link:
            return GradientPath("go over TCP")
        way = f"go over TCP, up to {self.link.doubled_bytes >> 10} KiB by doubling, else in a ring"
        return GradientPath(f"{way}{', in place where neighbors share a host' if self.shares else ''}", self.link)

    def all_reduce(
        self,
        array: np.ndarray,
        site: int = 0,
        bucket: int = 0,
        halved: bool = False,
        spare: Callable[[int], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Sums a contiguous float32 [k] over all ranks. Returns the array with the sum: `array` itself, or another one.

        spare: length -> an array made by `empty`, for the sum. With it, `array` is given away: it must not change as
        long as this object refers to it. `site`, `bucket`, `halved`, and whether there is a `spare`, must agree on all
        ranks.
        """
        if self.size == 2 and spare and not halved:
            return self._sum_of_two(array, site, bucket, spare)
        if self.link and array.nbytes <= self.link.doubled_bytes and not halved:
            return self._sum_by_doubling(array, site, bucket)
        if arrays := None if halved else self._arrays_of_all(array, site, bucket):
            return self._sum_in_place(arrays, is_given=spare is not None)
        now = self._meet_with(array, site, bucket)
        longest = max(chunk.size for chunk in now.chunks)
        scratch = self._scratch_of(longest)
        if halved and self._halves.size < longest:
            self._halves = np.empty(longest, ml_dtypes.bfloat16)
        for step in range(self.size - 1):
            sent, index = (self.rank - step) % self.size, (self.rank - step - 1) % self.size
            chunk = now.chunks[index]
            received = self._next(now, sent, index, scratch[: chunk.size], halved, is_ready=step == 0)
            _add(chunk, received, out=chunk)
        if halved:
            complete = now.chunks[(self.rank + 1) % self.size]
            complete[:] = complete.astype(ml_dtypes.bfloat16)
        self._hand_around(now, self.rank + 1, halved)
        self._finish(now)
        return array

    def _sum_by_doubling(self, array: np.ndarray, site: int, bucket: int) -> np.ndarray:
        blocks = self.all_gather(array.tobytes(), bucket_name(site, bucket))
        self._must_be_alike([len(block) for block in blocks], site, bucket)
        arrays = [np.frombuffer(block, np.float32) for block in blocks]
        for index, (start, stop) in enumerate(self._cuts(array.size)):
            self._add_up([each[start:stop] for each in arrays], index, out=array[start:stop])
        return array

    def _sum_in_place(self, arrays: list[np.ndarray], is_given: bool) -> np.ndarray:
        array, cuts = arrays[self.rank], self._cuts(arrays[0].size)
        own_chunk = (self.rank + 1) % self.size  # the chunk whose complete sum would be here in a ring, too
        start, stop = cuts[own_chunk]
        total = self._scratch_of(stop - start)
        self._add_up([each[start:stop] for each in arrays], own_chunk, out=total)
        np.copyto(array[start:stop], total)
        self._all_come()
        for index, (start, stop) in enumerate(cuts):
            if index != own_chunk:
                np.copyto(array[start:stop], arrays[index - 1][start:stop])
        self._unread.append(array)
        if not is_given:
            self._wait_until_read()
        return array

    def _add_up(self, chunks: list[np.ndarray], index: int, out: np.ndarray) -> None:
        """Sums chunk number `index` of all ranks into `out`, in ring order."""
        np.copyto(out, chunks[index])
        for step in range(1, self.size):
            _add(chunks[(index + step) % self.size], out, out=out)

    def _cuts(self, length: int) -> list[tuple[int, int]]:
        """The start and end of each rank's chunk."""
        cuts = [index * length // self.size for index in range(self.size + 1)]
        return list(zip(cuts, cuts[1:], strict=False))

    def _sum_of_two(self, array: np.ndarray, site: int, bucket: int, spare: Callable[[int], np.ndarray]) -> np.ndarray:
        self._wait_until_read()
        serial, descriptor = self._shared.where(array)
        header = memoryview(_HEADER.pack(site, bucket, array.nbytes, serial, descriptor))
        outgoing = Outgoing(header, _NOTHING if serial else _bytes(array))
        their_serial, their_descriptor = self._met(outgoing, (site, bucket, array.nbytes))
        if their_serial:
            theirs = self._array_of(1 - self.rank, their_serial, their_descriptor, array.size)
        else:
            theirs = self._scratch_of(array.size)
            self._pass_on(outgoing, _bytes(theirs))
        self._pass_on(outgoing, _NOTHING)
        # In the same order on both ranks: the sum of two NaNs is the first one.
        first, second = (array, theirs) if self.rank == 0 else (theirs, array)
        total = _add(first, second, out=spare(array.size) if serial else array)
        if their_serial:
            self._pass_on(TOKEN, _NOTHING, backwards=True)
        if serial:
            self._unread.append(array)
        return total

    def _wait_until_read(self) -> None:
        """Waits, before anything else, until the other ranks report that they have read the arrays left to them."""
        if self._unread and self.size > 2:
            self._all_come()
        else:
            for _ in self._unread:
                self._pass_on(_NOTHING, memoryview(bytearray(1)), backwards=True)
        self._all_is_read()

    def _scratch_of(self, length: int) -> np.ndarray:
        if self._scratch.size < length:
            self._scratch = np.empty(length, np.float32)
        return self._scratch[:length]

    def gather(self, array: np.ndarray, site: int = 0, bucket: int = 0) -> None:
        """Fills in the other ranks' parts of a contiguous float32 [size * k], bit for bit; part `rank` is this
        rank's."""
        if arrays := self._arrays_of_all(array, site, bucket):
            parts = [each.reshape(self.size, -1) for each in arrays]
            for rank, part in enumerate(parts):
                if rank != self.rank:
                    np.copyto(parts[self.rank][rank], part[rank])
            self._unread.append(array)
            self._wait_until_read()
            return
        now = self._meet_with(array, site, bucket)
        self._hand_around(now, self.rank, is_ready=True)
        self._finish(now)

    def _meet_with(self, array: np.ndarray, site: int, bucket: int) -> _Round:
        """Ensures that all ranks are about to exchange the same array."""
        cuts = self._cuts(array.size)
        chunks = [array[start:stop] for start, stop in cuts]
        self._wait_until_read()
        serial, descriptor = self._shared.where(array)
        header = memoryview(_HEADER.pack(site, bucket, array.nbytes, serial, descriptor))
        outgoing = Outgoing(header)
        their_serial, their_descriptor = self._met(outgoing, (site, bucket, array.nbytes))
        self._pass_on(outgoing, _NOTHING)
        left: Sequence[np.ndarray | None] = [None] * self.size
        if their_serial != NOT_SHARED:
            whole = self._array_of((self.rank - 1) % self.size, their_serial, their_descriptor, array.size)
            left = [whole[start:stop] for start, stop in cuts]
        return _Round(chunks, left, serial, their_serial)

    def _met(self, outgoing: Outgoing, mine: tuple[int, int, int]) -> tuple[int, int]:
        """Returns the left neighbor's serial number and descriptor. A part of `outgoing` may still be unsent."""
        theirs = bytearray(_HEADER.size)
        self._pass_on(outgoing, memoryview(theirs), all_sent=False)
        *their_what, serial, descriptor = _HEADER.unpack(theirs)
        if tuple(their_what) != mine:
            raise other_program(self.rank, mine, (self.rank - 1) % self.size, tuple(their_what))
        return serial, descriptor

    def _hand_around(self, now: _Round, own_chunk: int, halved: bool = False, is_ready: bool = False) -> None:
        """Passes complete chunks on until every rank has all of them.

        own_chunk: the number of the chunk that this rank has. is_ready: whether it was complete when the ranks met.
        """
        for step in range(self.size - 1):
            sent, index = (own_chunk - step) % self.size, (own_chunk - 1 - step) % self.size
            received = self._next(now, sent, index, now.chunks[index], halved, is_ready and step == 0)
            if received is not now.chunks[index]:
                np.copyto(now.chunks[index], received)

    def _finish(self, now: _Round) -> None:
        """Returns when the right neighbor has read all that it reads in place; tells the left neighbor the same."""
        answer = memoryview(bytearray(1)) if now.read_by_right else _NOTHING
        self._pass_on(TOKEN if now.read_here else _NOTHING, answer, backwards=True)
        self._shared.has_been_read(now.read_by_right, [(self.rank + 1) % self.size])

    def _next(self, now: _Round, sent: int, index: int, into: np.ndarray, halved: bool, is_ready: bool) -> np.ndarray:
        """Passes chunk `sent` on.

        Returns the left neighbor's chunk `index`: its array, read in place, or the data received `into`. is_ready: the
        meeting of the ranks has already announced that chunks can be read in place.
        """
        mine, theirs = now.chunks[sent], now.left[index]
        if halved and not now.read_by_right:
            mine = mine.astype(ml_dtypes.bfloat16)
        token = _NOTHING if is_ready else TOKEN
        outgoing = token if now.read_by_right else _bytes(mine)
        if theirs is not None:
            self._pass_on(outgoing, memoryview(bytearray(len(token))))
            return theirs
        received = self._halves[: into.size] if halved else into
        self._pass_on(outgoing, _bytes(received))
        if halved:
            into[:] = received
        return into


@np.errstate(over="ignore", invalid="ignore")  # an overflow is found in the sum, and no news with float16
def _add(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> np.ndarray:
    return np.add(first, second, out=out)


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data if array.size else _NOTHING
