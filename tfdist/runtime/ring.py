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

With `small`, what is sent is rounded to bfloat16, half the bytes; sums are made in float32, and what is read in place
is not rounded on its way. The complete sums are, so that all ranks have the same bits whichever way they came.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

from tfdist.control import wire
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError
from tfdist.control.packet_filter import bind_address
from tfdist.control.preflight import bind_shared
from tfdist.control.reception import Reception
from tfdist.runtime.ring_error import MARK, RingError
from tfdist.runtime.shared_memory import NOT_SHARED, OFFER_BYTES, OthersArrays, SharedArrays

_HEADER = struct.Struct(
    "!IIQqq"
)  # site, bucket, bytes: checked, so that ranks can never mix up their gradients; where to read them
_WHERE = 2  # of these, the last
_BLOCK = struct.Struct(
    "!12sIQ"
)  # what a gathered block is, its stamp, its bytes: the first two must agree on all ranks
_SEND_BYTES = 1 << 20
_LARGEST_BLOCK = 1 << 36
_MEETING_SECONDS, _ATTEMPT_SECONDS = 60.0, 20.0
_LOOKS = 4  # at a neighbour that is silent, in the time after which it counts as dead
_GOODBYE = "end"  # in the place of what is gathered
_TOKEN, _NOTHING = memoryview(b"."), memoryview(b"")


class Ring:
    """Connections to both neighbours, and the all-reduce over them.

    Args:
      cluster: this worker's place among the others, and the secret by which they know each other.
      exchange: hands this worker's endpoint to all and returns all endpoints in rank order (a collective).
      timeout: seconds after which a neighbour that sends nothing is an error; 0: never.
      is_alive: asked about a neighbour's rank whenever that has been silent for `patience` seconds. A process that has
        ended closes its connections, but one that is stopped, or whose machine is gone, does not.
      share: arrays made by `empty` may be read in place by a neighbour on this host. The same on all ranks.
    """

    def __init__(
        self,
        cluster: Cluster,
        exchange: Callable[[str], Sequence[str]],
        timeout: float = 0.0,
        is_alive: Callable[[int], bool] = lambda rank: True,
        patience: float = 10.0,
        share: bool = False,
    ):
        self.rank, self.size, self.timeout, self.is_alive, self.patience = (
            cluster.rank,
            cluster.size,
            timeout,
            is_alive,
            patience,
        )
        with bind_shared(0, bind_address(cluster.address, cluster.peers)) as listener:
            listener.listen(128)
            endpoints = exchange(wire.endpoint(cluster.address.rpartition(":")[0], listener))
            self.right, self.left = _meet_neighbours(cluster, listener, endpoints)
        for connection in (self.right, self.left):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        self._scratch, self._small = np.empty(0, np.float32), np.empty(0, ml_dtypes.bfloat16)
        self.waiting_for: int | None = None  # the rank whose bytes are waited for at the moment
        self._shared = SharedArrays()
        self._others: OthersArrays | None = None
        self.shares = share and self._meet()

    def _meet(self) -> bool:
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

    def all_reduce(self, array: np.ndarray, site: int = 0, bucket: int = 0, small: bool = False) -> None:
        """Sums a contiguous float32 [k] over all ranks, in place.

        `site`, `bucket` and `small` must agree on all ranks.
        """
        chunks, left, serial, theirs = self._meet_with(array, site, bucket)
        longest = max(chunk.size for chunk in chunks)
        if self._scratch.size < longest:
            self._scratch = np.empty(longest, np.float32)
        if small and self._small.size < longest:
            self._small = np.empty(longest, ml_dtypes.bfloat16)
        for step in range(self.size - 1):
            index = (self.rank - step - 1) % self.size
            np.add(
                chunks[index],
                self._next(
                    serial,
                    chunks[(self.rank - step) % self.size],
                    left[index],
                    self._scratch[: chunks[index].size],
                    small,
                ),
                out=chunks[index],
            )
        if small:
            complete = chunks[(self.rank + 1) % self.size]
            complete[:] = complete.astype(ml_dtypes.bfloat16)
        self._hand_around(chunks, left, serial, self.rank + 1, small)
        self._part_from(serial, theirs)

    def gather(self, array: np.ndarray, site: int = 0, bucket: int = 0) -> None:
        """Of a contiguous float32 [size * k], in which part `rank` is this rank's, fills in the others', bit for
        bit.
        """
        chunks, left, serial, theirs = self._meet_with(array, site, bucket)
        self._hand_around(chunks, left, serial, self.rank)
        self._part_from(serial, theirs)

    def _meet_with(self, array: np.ndarray, site: int, bucket: int) -> tuple[list, list, int, int]:
        """(the array's chunks, those of the left neighbour's that are read in place, which array is read by the right,
        by us).
        """
        cuts = [index * array.size // self.size for index in range(self.size + 1)]
        chunks = [array[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
        serial, descriptor = self._shared.where(array)
        header = _HEADER.pack(site, bucket, array.nbytes, serial, descriptor)
        theirs = bytearray(_HEADER.size)
        self._pass_on(memoryview(header), memoryview(theirs))
        *what, their_serial, their_descriptor = _HEADER.unpack(theirs)
        if tuple(what) != (site, bucket, array.nbytes):
            raise RingError(
                f"{MARK}rank {self.rank} reduces {(site, bucket, array.nbytes)}, its neighbour {tuple(what)} (site,"
                " bucket, bytes): the workers do not run the same program."
            )
        left = (
            [None] * self.size
            if their_serial == NOT_SHARED
            else self._left_chunks(their_serial, their_descriptor, cuts)
        )
        return chunks, left, serial, their_serial

    def _hand_around(self, chunks: list, left: list, serial: int, own: int, small: bool = False) -> None:
        """Passes complete chunks on until every rank has all; `own`: the number of the one that this rank has."""
        for step in range(self.size - 1):
            index = (own - 1 - step) % self.size
            received = self._next(serial, chunks[(own - step) % self.size], left[index], chunks[index], small)
            if received is not chunks[index]:
                np.copyto(chunks[index], received)

    def _part_from(self, serial: int, theirs: int) -> None:
        """Returns when the right neighbour has read everything that it reads in place; tells the left one the same."""
        self._pass_on(_TOKEN if theirs else _NOTHING, memoryview(bytearray(1)) if serial else _NOTHING, backwards=True)
        self._shared.has_been_read(serial)

    def _left_chunks(self, serial: int, descriptor: int, cuts: Sequence[int]) -> list[np.ndarray]:
        try:
            theirs = self._others.get(serial, descriptor, cuts[-1])
        except OSError as error:
            raise RingError(
                f"{MARK}lost contact with rank {(self.rank - 1) % self.size} (its memory cannot be read: {error})."
            ) from None
        return [theirs[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]

    def _next(
        self, serial: int, mine: np.ndarray, theirs: np.ndarray | None, into: np.ndarray, small: bool
    ) -> np.ndarray:
        """Passes chunk `mine` on.

        Returns the left neighbour's next chunk: `theirs`, read in place, or received `into`.
        """
        if not serial and small:
            mine = mine.astype(ml_dtypes.bfloat16)
        received = self._small[: into.size] if small else into
        self._pass_on(
            _TOKEN if serial else _bytes(mine), _bytes(received) if theirs is None else memoryview(bytearray(1))
        )
        if theirs is None and small:
            into[:] = received
        return into if theirs is None else theirs

    def all_gather(self, data: bytes, name: str, stamp: int = 0) -> list[bytes]:
        """Every rank's bytes, in rank order; their lengths may differ.

        Args: name, what is gathered (12 ASCII characters at most), and stamp (32 bits), must agree on all ranks: so a
        rank that is elsewhere in the program, or holds other samples, is noticed at once.
        """
        blocks: list[bytes] = [b""] * self.size
        blocks[self.rank] = data
        for step in range(self.size - 1):
            mine = blocks[(self.rank - step) % self.size]
            header, theirs = _BLOCK.pack(name.encode(), stamp, len(mine)), bytearray(_BLOCK.size)
            self._pass_on(memoryview(header), memoryview(theirs))
            their_name, their_stamp, length = _BLOCK.unpack(theirs)
            other = (self.rank - 1) % self.size
            their_name = their_name.rstrip(bytes(1)).decode(errors="replace")
            if their_name == _GOODBYE:
                raise RingError(
                    f"{MARK}ConfigError: Rank {other} has come to the end of its script, while rank {self.rank} is at"
                    f" {name!r}: all workers must make the same calls of tfdist, also evaluate and predict, not the"
                    " chief alone."
                )
            if their_name != name:
                raise RingError(
                    f"{MARK}ConfigError: Rank {self.rank} is at {name!r}, rank {other} at {their_name!r}: the workers"
                    " do not run the same program, or their data does not end at the same batch."
                )
            if their_stamp != stamp:
                raise RingError(
                    f"{MARK}DataError: Rank {self.rank} and rank {other} hold different {name}: the data must come in"
                    " the same order on all workers; seed what shuffles it."
                )
            if length > _LARGEST_BLOCK:
                raise RingError(
                    f"{MARK}rank {other} announces {length} bytes of {name}, which cannot be: the workers do not run"
                    " the same program."
                )
            received = bytearray(length)
            self._pass_on(memoryview(mine), memoryview(received))
            blocks[(self.rank - step - 1) % self.size] = received
        return blocks

    def say_goodbye(self) -> None:
        """Leaves word for the right neighbour that nothing will come any more; never waits."""
        with contextlib.suppress(OSError):
            self.right.send(_BLOCK.pack(_GOODBYE.encode(), 0, 0))

    def _pass_on(self, outgoing: memoryview, incoming: memoryview, backwards: bool = False) -> None:
        """Sends to the right and receives from the left at the same time: neither may wait for the other.

        backwards: to the left and from the right.
        """
        sent = received = 0
        to, source = (self.left, self.right) if backwards else (self.right, self.left)
        to_rank, source_rank = (
            (self.rank + (-1 if backwards else 1)) % self.size,
            (self.rank - (-1 if backwards else 1)) % self.size,
        )
        poll = select.poll()
        while sent < len(outgoing) or received < len(incoming):
            progress = False
            try:
                if sent < len(outgoing):
                    sent, progress = sent + to.send(outgoing[sent : sent + _SEND_BYTES]), True
            except BlockingIOError:
                pass
            except OSError as error:
                raise RingError(f"{MARK}lost contact with rank {to_rank} ({error}).") from None
            try:
                if received < len(incoming):
                    count = source.recv_into(incoming[received : received + _SEND_BYTES])
                    if count == 0:
                        raise RingError(f"{MARK}lost contact with rank {source_rank} (it closed the connection).")
                    received, progress = received + count, True
            except BlockingIOError:
                pass
            except OSError as error:
                raise RingError(f"{MARK}lost contact with rank {source_rank} ({error}).") from None
            if not progress:
                receiving = received < len(incoming)
                for connection, events, wanted in (
                    (to, select.POLLOUT, sent < len(outgoing)),
                    (source, select.POLLIN, receiving),
                ):
                    if wanted:
                        poll.register(connection, events)
                    else:
                        with contextlib.suppress(KeyError):
                            poll.unregister(connection)
                self._wait(poll, source_rank if receiving else to_rank)

    def _wait(self, poll: select.poll, silent: int) -> None:
        start = time.monotonic()
        self.waiting_for = silent
        # Looked at more than once in that time, or a neighbour that is silent since a moment after the last look, or
        # whose last pulse came late, would be found out after twice as long.
        look = 1000 * min(self.patience / _LOOKS, self.timeout or self.patience)
        while not poll.poll(look):
            if self.timeout and time.monotonic() - start >= self.timeout:
                raise RingError(f"{MARK}rank {silent} was silent for {self.timeout:g} s (--collective_timeout).")
            if not self.is_alive(silent):
                raise RingError(
                    f"{MARK}rank {silent} does not answer any more: it is stopped, or its machine or network is gone."
                )
        self.waiting_for = None

    def close(self) -> None:
        self.right.close()
        self.left.close()


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.view(np.uint8)) if array.size else _NOTHING


def _meet_neighbours(
    cluster: Cluster, listener: socket.socket, endpoints: Sequence[str]
) -> tuple[socket.socket, socket.socket]:
    """Connections to the right and from the left.

    Both at the same time, since each side waits for the other's proof.
    """
    lock = wire.Lock.of(cluster.secret, "ring", *endpoints)
    rank, right, left = cluster.rank, (cluster.rank + 1) % cluster.size, (cluster.rank - 1) % cluster.size
    deadline, given_up = time.monotonic() + _MEETING_SECONDS, threading.Event()
    with ThreadPoolExecutor(1, "tfdist-ring-accept") as pool:
        accepting = pool.submit(
            _accept, listener, lock, rank, left, lambda: time.monotonic() > deadline or given_up.is_set()
        )
        try:
            connection = _connect(endpoints[right], lock, rank, right, deadline)
        except wire.Mismatch as mismatch:
            given_up.set()
            raise ClusterError(f"{cluster.name(right)} {mismatch}") from None
        except BaseException:
            given_up.set()
            raise
        try:
            return connection, accepting.result()
        except BaseException:
            connection.close()
            raise


def _connect(endpoint: str, lock: wire.Lock, rank: int, expected: int, deadline: float) -> socket.socket:
    while True:
        try:
            return wire.connect(endpoint, lock, rank, expected, min(deadline, time.monotonic() + _ATTEMPT_SECONDS))
        except OSError as error:
            if time.monotonic() > deadline:
                raise RingError(
                    f"{MARK}{endpoint.partition('/')[0]} cannot be reached ({error}): open the ephemeral ports between"
                    " workers, or use --communication=ring."
                ) from None
            time.sleep(0.05)


def _accept(
    listener: socket.socket, lock: wire.Lock, rank: int, expected: int, is_over: Callable[[], bool]
) -> socket.socket:
    with Reception(listener, lock, rank, lambda other: other == expected) as reception:
        while not is_over():
            for arrival in reception.poll(0.1):
                return arrival.connection
    notes = "".join(f" Turned away: {note}" for note in reception.notes)
    raise RingError(
        f"{MARK}rank {expected} did not connect within {_MEETING_SECONDS:g} s: open the ephemeral ports between"
        f" workers, or use --communication=ring.{notes}"
    )
