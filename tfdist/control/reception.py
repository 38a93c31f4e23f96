"""The accepting side of wire.py's handshake, for many connections side by side."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from tfdist.control import wire
from tfdist.control.terminal import say

_PATIENCE = 5.0  # seconds for a stranger to prove that it is none
_MOST_STRANGERS = 512  # at a time; the oldest makes room
_ACCEPT_AT_ONCE = 32
_MOST_NOTES = 3  # lines about those who were turned away
_FIXED_BYTES = wire.HELLO_BYTES + wire.PROOF_BYTES + wire.LENGTH.size  # what comes before a message


@dataclass(frozen=True)
class Arrival:
    """Somebody who has proved to be of the job. The connection does not block."""

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
    mine: bytes = b""  # my hello: set once theirs is there
    rank: int = -1  # as it says: set with `mine`
    length: int = -1  # of the message: set once the proof is there

    @property
    def theirs(self) -> bytes:
        """The bytes of its hello."""
        return self.data[: wire.HELLO_BYTES]


class Reception:
    """Takes the connections of a listening socket, many side by side, so that nobody can hold up the others.

    Args: rank, of this process; admits, whether somebody who has proved to be of the job may come in as a rank.
    """

    def __init__(self, listener: socket.socket, key: wire.SharedKey, rank: int, admits: Callable[[int], bool]):
        self._listener, self._key, self._rank, self._admits = listener, key, rank, admits
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self.notes: dict[str, None] = {}  # sentences about those who were turned away, in order
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Reception:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def poll(self, timeout: float) -> list[Arrival]:
        """The new arrivals that have proved themselves; waits up to `timeout` seconds for news of any kind."""
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
        """Turns away those who have not proved themselves. The listening socket stays open."""
        for stranger in list(self._strangers):
            self._drop(stranger)
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it is gone again; or there are too many open files
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
        """Bytes that it may have sent by now in all."""
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
        """Looks at a piece that is complete.

        None: all is well; else it is to be dropped, with this note if there is one.
        """
        if not stranger.mine:
            hello = wire.Hello.read(stranger.theirs)
            if hello is None:
                return ""
            stranger.rank, stranger.mine = hello.rank, self._key.hello(self._rank)
            stranger.connection.send(stranger.mine + self._key.proof_of_accepting(stranger.theirs, stranger.mine))
            if mismatch := self._key.token_mismatch(hello.token):
                return f"somebody at {stranger.host} who says to be rank {stranger.rank} {mismatch}"
        elif stranger.length < 0:
            proof, length = (
                stranger.data[wire.HELLO_BYTES : _FIXED_BYTES - wire.LENGTH.size],
                stranger.data[-wire.LENGTH.size :],
            )
            if not hmac.compare_digest(proof, self._key.proof_of_connecting(stranger.theirs, stranger.mine)):
                return f"somebody at {stranger.host} who says to be rank {stranger.rank} {wire.OTHER_TOKEN}"
            (stranger.length,) = wire.LENGTH.unpack(length)
            if stranger.length > wire.LARGEST_MESSAGE or not self._admits(stranger.rank):
                return (
                    f"a worker at {stranger.host} says to be rank {stranger.rank}, which cannot be: give each worker"
                    " its own place in the same cluster."
                )
        return None

    def _admit(self, stranger: _Stranger) -> Arrival:
        stranger.connection.send(wire.ADMITTED)
        self._forget(stranger)
        return Arrival(stranger.rank, stranger.connection, stranger.data[_FIXED_BYTES:])

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger]
