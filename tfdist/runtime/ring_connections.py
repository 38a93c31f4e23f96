"""A worker's connections to its neighbours in a ring of all workers, and what is gathered over them: bytes of any
length.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tfdist.control import wire
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError
from tfdist.control.packet_filter import bind_address
from tfdist.control.preflight import bind_shared
from tfdist.control.reception import Reception
from tfdist.runtime.ring_error import MARK, RingError

# What a gathered block is, its stamp, its bytes: the first two must agree on all ranks.
_BLOCK = struct.Struct("!12sIQ")
_LOOKS = 4  # at a neighbour that is silent, in the time after which it counts as dead
_SEND_BYTES = 1 << 20
_LARGEST_BLOCK = 1 << 36
_MEETING_SECONDS, _ATTEMPT_SECONDS = 60.0, 20.0
_GOODBYE = "end"  # in the place of what is gathered


@dataclass(frozen=True)
class Patience:
    """How long a silent neighbour is waited for.

    `timeout`: seconds after which one that sends nothing is an error; 0: never. `is_alive`: asked about its rank
    whenever it has been silent for `ask_after` seconds. A process that has ended closes its connections, but one that
    is stopped, or whose machine is gone, does not.
    """

    timeout: float = 0.0
    is_alive: Callable[[int], bool] = lambda rank: True
    ask_after: float = 10.0


class Outgoing:
    """Pieces that are sent one after the other, over several calls of `_pass_on` if need be."""

    def __init__(self, *pieces: memoryview):
        self._pieces = [piece for piece in pieces if len(piece)]

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def send(self, connection: socket.socket) -> None:
        """As much as fits. Raises BlockingIOError if that is nothing."""
        rest = self._pieces[0][connection.send(self._pieces[0][:_SEND_BYTES]) :]
        self._pieces[:1] = [rest] if len(rest) else []


class RingConnections:
    """Connections to both neighbours.

    Args:
      cluster: this worker's place among the others, and the secret by which they know each other.
      exchange: hands this worker's endpoint to all and returns all endpoints in rank order (a collective).
    """

    def __init__(self, cluster: Cluster, exchange: Callable[[str], Sequence[str]], patience: Patience):
        self.rank, self.size, self.patience = cluster.rank, cluster.size, patience
        self.waiting_for: int | None = None  # the rank whose bytes are waited for at the moment
        with bind_shared(0, bind_address(cluster.address, cluster.peers)) as listener:
            listener.listen(128)
            endpoints = exchange(wire.endpoint(cluster.address.rpartition(":")[0], listener))
            self.right, self.left = _meet_neighbours(cluster, listener, endpoints)
        for connection in (self.right, self.left):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def all_gather(self, data: bytes, name: str, stamp: int = 0) -> list[bytes | bytearray]:
        """Every rank's bytes, in rank order; their lengths may differ.

        Args: name, what is gathered (12 ASCII characters at most), and stamp (32 bits), must agree on all ranks: so a
        rank that is elsewhere in the program, or holds other samples, is noticed at once.
        """
        blocks: list[bytes | bytearray] = [b""] * self.size
        blocks[self.rank] = data
        for step in range(self.size - 1):
            mine = blocks[(self.rank - step) % self.size]
            header, theirs = _BLOCK.pack(name.encode(), stamp, len(mine)), bytearray(_BLOCK.size)
            outgoing = Outgoing(memoryview(header), memoryview(mine))
            self._pass_on(outgoing, memoryview(theirs), all_sent=False)
            received = bytearray(self._length_of(theirs, name))
            self._pass_on(outgoing, memoryview(received))
            self._compare(theirs, name, stamp)  # now that nothing of the block is on its way any more
            blocks[(self.rank - step - 1) % self.size] = received
        return blocks

    def _length_of(self, header: bytes | bytearray, name: str) -> int:
        """Of the left neighbour's next block. Raises RingError if there is none."""
        *_, length = _BLOCK.unpack(header)
        if _name_of(header) == _GOODBYE:
            raise RingError(self.farewell_of_left(name))
        if length > _LARGEST_BLOCK:
            raise RingError(
                f"{MARK}rank {(self.rank - 1) % self.size} announces {length} bytes of {name}, which cannot be: the"
                " workers do not run the same program."
            )
        return length

    def _compare(self, header: bytes | bytearray, name: str, stamp: int) -> None:
        """Raises RingError if the left neighbour's block is not of what this rank gathers."""
        _, their_stamp, _ = _BLOCK.unpack(header)
        other, their_name = (self.rank - 1) % self.size, _name_of(header)
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

    def say_goodbye(self) -> None:
        """Leaves word for the right neighbour that nothing will come any more; never waits."""
        with contextlib.suppress(OSError):
            self.right.send(_BLOCK.pack(_GOODBYE.encode(), 0, 0))

    def has_left(self) -> bool:
        """Whether the left neighbour's goodbye is what it has sent next."""
        with contextlib.suppress(OSError):
            header = self.left.recv(_BLOCK.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return len(header) == _BLOCK.size and _name_of(header) == _GOODBYE
        return False

    def farewell_of_left(self, at: str = "a step") -> str:
        """What it means that the left neighbour has left while this rank is `at` something: text of a RingError."""
        return (
            f"{MARK}ConfigError: Rank {(self.rank - 1) % self.size} has come to the end of its script, while rank"
            f" {self.rank} is at {at!r}: all workers must make the same calls of tfdist, also evaluate and predict, not"
            " the chief alone."
        )

    def _pass_on(
        self, outgoing: memoryview | Outgoing, incoming: memoryview, backwards: bool = False, all_sent: bool = True
    ) -> None:
        """Sends to the right and receives from the left at the same time: neither may wait for the other.

        backwards: to the left and from the right. Without all_sent it returns when all is received; the rest of
        `outgoing` is for the next call.
        """
        received = 0
        out = outgoing if isinstance(outgoing, Outgoing) else Outgoing(outgoing)
        to, source = (self.left, self.right) if backwards else (self.right, self.left)
        to_rank, source_rank = (
            (self.rank + (-1 if backwards else 1)) % self.size,
            (self.rank - (-1 if backwards else 1)) % self.size,
        )
        poll = select.poll()
        while (out and all_sent) or received < len(incoming):
            progress = False
            try:
                if out:
                    out.send(to)
                    progress = True
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
                    (to, select.POLLOUT, bool(out)),
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
        timeout, ask_after = self.patience.timeout, self.patience.ask_after
        # Looked at more than once in that time, or a neighbour that is silent since a moment after the last look, or
        # whose last pulse came late, would be found out after twice as long.
        look = 1000 * min(ask_after / _LOOKS, timeout or ask_after)
        while not poll.poll(look):
            if timeout and time.monotonic() - start >= timeout:
                raise RingError(f"{MARK}rank {silent} was silent for {timeout:g} s (--collective_timeout).")
            if not self.patience.is_alive(silent):
                raise RingError(
                    f"{MARK}rank {silent} does not answer any more: it is stopped, or its machine or network is gone."
                )
        self.waiting_for = None

    def close(self) -> None:
        self.right.close()
        self.left.close()


def _name_of(header: bytes | bytearray) -> str:
    return _BLOCK.unpack(header)[0].rstrip(bytes(1)).decode(errors="replace")


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
