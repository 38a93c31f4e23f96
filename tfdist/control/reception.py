"""The accepting side of wire.py's handshake, for many connections in parallel."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from tfdist.control import wire
from tfdist.control.terminal import say

_PATIENCE = 5.0  # seconds for a stranger to prove that it belongs to the job
_MOST_STRANGERS = 512  # at a time; beyond that the oldest is dropped
_ACCEPT_AT_ONCE = 32
_MOST_NOTES = 3  # lines about rejected connections
_FIXED_BYTES = wire.HELLO_BYTES + wire.PROOF_BYTES + wire.LENGTH.size  # before the message


@dataclass(frozen=True)
class Arrival:
    """A connection whose other side has proved that it belongs to the job. The socket is non-blocking."""

    rank: int
    connection: socket.socket
    message: bytes


@dataclass(eq=False)
class _Stranger:
    """A connection that has not proved anything yet."""

    connection: socket.socket
    host: str
    until: float  # monotonic
    data: bytes = b""
    mine: bytes = b""  # our hello: set once the stranger's has arrived
    rank: int = -1  # the rank it claims: set together with `mine`
    length: int = -1  # of the message: set once the proof has arrived

    @property
    def theirs(self) -> bytes:
        """The bytes of the stranger's hello."""
        return self.data[: wire.HELLO_BYTES]


class Reception:
    """Accepts the connections of a listening socket, many in parallel, so that none can hold up the others.

    Args: rank: of this process. admits: returns whether a process that belongs to the job is admitted as this rank.
    """

    def __init__(self, listener: socket.socket, key: wire.SharedKey, rank: int, admits: Callable[[int], bool]):
        self._listener, self._key, self._rank, self._admits = listener, key, rank, admits
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self.notes: dict[str, None] = {}  # sentences about rejected connections, in order
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Reception:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def poll(self, timeout: float) -> list[Arrival]:
        """Returns newly admitted connections; waits up to `timeout` seconds for any activity."""
        arrivals = []
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif (stranger := key.data) in self._strangers and (arrival := self._read(stranger)):
                arrivals.append(arrival)
        now = time.monotonic()
        for stranger in [stranger for stranger in self._strangers if stranger.until < now]:
            self._drop(stranger)
        return arrivals

    def close(self) -> None:
        """Closes all connections that have not proved anything yet. The listening socket stays open."""
        for stranger in list(self._strangers):
            self._drop(stranger)
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the other side is gone again, or too many files are open
                time.sleep(0.01)
                return
            connection.setblocking(False)
            if len(self._strangers) >= _MOST_STRANGERS:
                self._drop(next(iter(self._strangers)))
            stranger = _Stranger(connection, address[0], time.monotonic() + _PATIENCE)
            self._strangers[stranger] = None
            self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _drop(self, stranger: _Stranger, note: str = "") -> None:
        self._forget(stranger)
        stranger.connection.close()
        if note and note not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes[note] = None
            say(note)

    def _wanted(self, stranger: _Stranger) -> int:
        """Returns how many bytes in all the stranger may have sent by now."""
        return (_FIXED_BYTES if stranger.mine else wire.HELLO_BYTES) + max(stranger.length, 0)

    def _read(self, stranger: _Stranger) -> Arrival | None:
        try:
            while (missing := self._wanted(stranger) - len(stranger.data)) > 0:
                part = stranger.connection.recv(missing)
                if not part:
                    raise ConnectionError("closed")
                stranger.data += part
                if len(part) == missing and (problem := self._judge(stranger)) is not None:
                    self._drop(stranger, problem)
                    return None
            return self._admit(stranger)
        except BlockingIOError:
            return None
        except OSError:
            self._drop(stranger)
            return None

    def _judge(self, stranger: _Stranger) -> str | None:
        """Checks a complete part of the handshake.

        Returns None if it is valid; else the stranger must be dropped, with the returned note unless that is empty.
        """
        if not stranger.mine:
            hello = wire.Hello.read(stranger.theirs)
            if hello is None:
                return ""
            stranger.rank, stranger.mine = hello.rank, self._key.hello(self._rank)
            stranger.connection.send(stranger.mine + self._key.proof_of_accepting(stranger.theirs, stranger.mine))
            if mismatch := self._key.token_mismatch(hello.token):
                return f"a process at {stranger.host} that claims to be rank {stranger.rank} {mismatch}"
        elif stranger.length < 0:
            proof, length = (
                stranger.data[wire.HELLO_BYTES : _FIXED_BYTES - wire.LENGTH.size],
                stranger.data[-wire.LENGTH.size :],
            )
            if not hmac.compare_digest(proof, self._key.proof_of_connecting(stranger.theirs, stranger.mine)):
                return f"a process at {stranger.host} that claims to be rank {stranger.rank} {wire.OTHER_TOKEN}"
            (stranger.length,) = wire.LENGTH.unpack(length)
            if stranger.length > wire.LARGEST_MESSAGE or not self._admits(stranger.rank):
                return (
                    f"a worker at {stranger.host} claims to be rank {stranger.rank}, which is impossible: give each"
                    " worker its own place in the same cluster."
                )
        return None

    def _admit(self, stranger: _Stranger) -> Arrival:
        stranger.connection.send(wire.ADMITTED)
        self._forget(stranger)
        return Arrival(stranger.rank, stranger.connection, stranger.data[_FIXED_BYTES:])

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger]
