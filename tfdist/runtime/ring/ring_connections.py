"""A worker's connections to others in a ring of all workers, and gathers of bytes of any length over them.

Each worker has connections to the ranks 1, 2, 4, ... places to its right and to its left. A ring passes large data on
over the connections at distance 1. A gather by doubling needs all of them: with every exchange a rank knows twice as
many ranks' bytes, so that all know everything after log2(n) waits instead of n - 1, and no byte is sent more often
(Bruck et al. 1997, "Efficient algorithms for all-to-all communications", the concatenation).
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tfdist.control import wire
from tfdist.control.cluster import Cluster
from tfdist.control.packet_filter import bind_address
from tfdist.control.preflight import bind_shared
from tfdist.runtime.ring import ring_meeting
from tfdist.runtime.ring.ring_error import MARK, RingError, held_differently, unanswered

# Name of the gathered block, its stamp, its number of bytes: the first two must agree on all ranks.
_BLOCK = struct.Struct("!12sIQ")
_LOOKS = 4  # checks of a silent neighbor within the time after which it counts as dead
_SEND_BYTES = 1 << 20
_LARGEST_BLOCK = 1 << 36
TOKEN = memoryview(b".")
_GOODBYE = "end"  # sent as the name of a block


@dataclass(frozen=True)
class Patience:
    """How long to wait for a silent neighbor.

    `timeout`: seconds without data after which it is an error; 0: never. `is_alive`: asked about a silent neighbor's
    rank, several times within `ask_after` seconds. A process that has ended closes its connections, but one that is
    stopped, or whose machine is gone, does not.
    """

    timeout: float = 0.0
    is_alive: Callable[[int], bool] = lambda rank: True
    ask_after: float = 10.0


class Outgoing:
    """Pieces that are sent one after another, over several calls of `_pass_on` if needed."""

    def __init__(self, *pieces: memoryview):
        self._pieces = [piece for piece in pieces if len(piece)]

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def send(self, connection: socket.socket) -> None:
        """Sends as much as fits. Raises BlockingIOError if nothing fits."""
        rest = self._pieces[0][connection.send(self._pieces[0][:_SEND_BYTES]) :]
        self._pieces[:1] = [rest] if len(rest) else []


class RingConnections:
    """Connections to the ranks at distances 1, 2, 4, ...

    Attributes: rights, lefts, distance -> connection; waiting_for, the rank whose bytes are waited for at the moment.
    Args:
      cluster: this worker's place among the others, and the secret by which they recognize each other.
      exchange: sends this worker's endpoint to all and returns all endpoints in rank order (a collective call).
    """

    def __init__(self, cluster: Cluster, exchange: Callable[[str], Sequence[str]], patience: Patience):
        self.rank, self.size, self.patience = cluster.rank, cluster.size, patience
        self.distances = [1, *(1 << power for power in range(1, (cluster.size - 1).bit_length()))]
        self.waiting_for: int | None = None
        with bind_shared(0, bind_address(cluster.address, cluster.peers)) as listener:
            listener.listen(128)
            endpoints = exchange(wire.endpoint(cluster.address.rpartition(":")[0], listener))
            self.rights, self.lefts = ring_meeting.meet(cluster, listener, endpoints, self.distances)
        for connection in (*self.rights.values(), *self.lefts.values()):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    @property
    def right(self) -> socket.socket:
        """The connection to the right neighbor."""
        return self.rights[1]

    @property
    def left(self) -> socket.socket:
        """The connection to the left neighbor."""
        return self.lefts[1]

    def all_gather(self, data: bytes, name: str, stamp: int = 0) -> list[bytes | memoryview]:
        """Returns every rank's bytes, in rank order; their lengths may differ.

        Args: name, of the gathered data (12 ASCII characters at most), and stamp (32 bits), must agree on all ranks: so
        all ranks notice at once if a rank is elsewhere in the program, or holds other samples.
        """
        blocks: list[bytes | memoryview] = [data]  # of this rank, of the previous rank, ...
        headers = [_BLOCK.pack(name.encode(), stamp, len(data))]
        for distance in self.distances if self.size > 1 else ():
            count = min(len(blocks), self.size - len(blocks))
            theirs = bytearray(_BLOCK.size * count)
            outgoing = Outgoing(memoryview(b"".join(headers[:count])), *map(memoryview, blocks[:count]))
            self._pass_on(outgoing, memoryview(theirs), all_sent=False, distance=distance)
            found = [bytes(theirs[start : start + _BLOCK.size]) for start in range(0, len(theirs), _BLOCK.size)]
            lengths = [self._length_of(header, name, distance) for header in found]
            received = np.empty(sum(lengths), np.uint8).data  # not zeroed first, unlike a bytearray
            self._pass_on(outgoing, received, distance=distance)
            ends = list(itertools.accumulate(lengths))
            headers += found
            blocks += [received[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        for distance, header in enumerate(headers):  # only now that nothing is on its way any more
            self._compare(header, name, stamp, (self.rank - distance) % self.size)
        return [blocks[(self.rank - rank) % self.size] for rank in range(self.size)]

    def _all_come(self) -> None:
        """Returns when all ranks have called it, after log2(n) waits."""
        for distance in self.distances:
            self._pass_on(TOKEN, memoryview(bytearray(1)), distance=distance)

    def _length_of(self, header: bytes, name: str, distance: int) -> int:
        """The length of a block that comes from `distance` to the left. Raises RingError if no valid block comes."""
        *_, length = _BLOCK.unpack(header)
        if _name_of(header) == _GOODBYE:
            raise RingError(self.farewell_of_left(name, distance))
        if length > _LARGEST_BLOCK:
            raise RingError(
                f"{MARK}rank {(self.rank - distance) % self.size} announces {length} bytes of {name}, which is"
                " impossible: the workers do not run the same program."
            )
        return length

    def _compare(self, header: bytes, name: str, stamp: int, other: int) -> None:
        """Raises RingError if another rank's block has another name or stamp than this rank's."""
        _, their_stamp, _ = _BLOCK.unpack(header)
        their_name = _name_of(header)
        if their_name != name:
            raise RingError(
                f"{MARK}ConfigError: Rank {self.rank} is at {name!r}, rank {other} at {their_name!r}: the workers"
                " do not run the same program, or their data does not end at the same batch."
            )
        if their_stamp != stamp:
            raise held_differently(self.rank, other, name)

    def say_goodbye(self) -> None:
        """Tells the ranks to the right that nothing more will come; never waits."""
        for connection in self.rights.values():
            with contextlib.suppress(OSError):
                connection.send(_BLOCK.pack(_GOODBYE.encode(), 0, 0))

    def has_left(self) -> bool:
        """Whether the next message from the left neighbor is its goodbye."""
        with contextlib.suppress(OSError):
            header = self.left.recv(_BLOCK.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return len(header) == _BLOCK.size and _name_of(header) == _GOODBYE
        return False

    def farewell_of_left(self, at: str = "a step", distance: int = 1) -> str:
        """The text of a RingError: the rank at `distance` to the left has left while this one is `at` something."""
        return (
            f"{MARK}ConfigError: Rank {(self.rank - distance) % self.size} has reached the end of its script, while"
            f" rank {self.rank} is at {at!r}: all workers must make the same calls of tfdist, including evaluate and"
            " predict, not only the chief."
        )

    def _pass_on(
        self,
        outgoing: memoryview | Outgoing,
        incoming: memoryview,
        backwards: bool = False,
        all_sent: bool = True,
        distance: int = 1,
    ) -> None:
        """Sends to the right and receives from the left, each over `distance`, at the same time: neither may wait for
        the other.

        backwards: sends to the left and receives from the right. Without all_sent it returns once everything is
        received; the rest of `outgoing` is left for the next call.
        """
        received = 0
        out = outgoing if isinstance(outgoing, Outgoing) else Outgoing(outgoing)
        to, source = self.rights[distance], self.lefts[distance]
        to_rank, source_rank = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        if backwards:
            to, source, to_rank, source_rank = source, to, source_rank, to_rank
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
        # More than one check in that time: otherwise a neighbor that fell silent just after the last check, or whose
        # last heartbeat came late, would be noticed only after twice as long.
        look = 1000 * min(ask_after / _LOOKS, timeout or ask_after)
        while not poll.poll(look):
            if timeout and time.monotonic() - start >= timeout:
                raise RingError(f"{MARK}rank {silent} was silent for {timeout:g} s (--collective_timeout).")
            if not self.patience.is_alive(silent):
                raise RingError(unanswered(silent))
        self.waiting_for = None

    def close(self) -> None:
        for connection in (*self.rights.values(), *self.lefts.values()):
            connection.close()


def _name_of(header: bytes | bytearray) -> str:
    return _BLOCK.unpack(header)[0].rstrip(bytes(1)).decode(errors="replace")
