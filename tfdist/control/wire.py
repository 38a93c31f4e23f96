"""How two processes of a job make sure of each other before either reads a word of the other's.

Every TCP connection of tfdist's own (rendezvous, rings, membership) begins so; TensorFlow's and Horovod's do not:

  I -> A   hello: magic, whether there is a token, rank, nonce
  A -> I   hello, and HMAC-SHA256("accepts", both hellos)
  I -> A   HMAC-SHA256("connects", both hellos), length, message
  A -> I   one byte: you are let in

The key comes from the job token, the purpose, and the meeting (a ring: the table of all endpoints, each with a random
part). Nothing of varying length is read before the other side has proved itself, so a stranger costs 81 bytes and a few
seconds of one of a bounded number of places. What comes after is neither encrypted nor signed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tfdist.control.token import VARIABLE, Secret, host_of

LARGEST_MESSAGE = 1 << 24  # bytes of JSON
_MAGIC = b"tfdist\x00\x01"
_HELLO = struct.Struct("!8s?i32s")  # magic, whether it has a token, rank, nonce
_LENGTH = struct.Struct("!I")
_PROOF = hashlib.sha256().digest_size
_LET_IN = b"\x01"
_PATIENCE = 5.0  # seconds for a stranger to prove that it is none
_MOST_STRANGERS = 512  # at a time; the oldest makes room
_ACCEPT_AT_ONCE = 32
_MOST_NOTES = 3  # lines about those who were turned away
_CURE = f"give all workers the same token, by --job_token_file or {VARIABLE}"


class Mismatch(Exception):
    """The other side is one of another job, or has no token where this one has one. Its text goes on after a name."""


@dataclass(frozen=True)
class Lock:
    """What both ends of a connection must have alike."""

    key: bytes = field(repr=False)
    token: bool  # whether the key comes from a job token

    @classmethod
    def of(cls, secret: Secret, purpose: str, *context: str) -> Lock:
        return cls(secret.key(purpose, *context), bool(secret))

    def hello(self, rank: int) -> bytes:
        return _HELLO.pack(_MAGIC, self.token, rank, secrets.token_bytes(32))

    def proof(self, word: bytes, connecting: bytes, accepting: bytes) -> bytes:
        return hmac.digest(self.key, word + connecting + accepting, hashlib.sha256)


def endpoint(host: str, listener: socket.socket) -> str:
    """host:port/nonce: where a socket can be reached, and a random part that makes the table of all endpoints
    unique.
    """
    return f"{host}:{listener.getsockname()[1]}/{secrets.token_hex(8)}"


def address_of(place: str) -> tuple[str, int]:
    """(host, port) of host:port, or of an endpoint."""
    address = place.partition("/")[0]
    return host_of(address), int(address.rpartition(":")[2])


def connect(place: str, lock: Lock, rank: int, expected: int, deadline: float, message: bytes = b"") -> socket.socket:
    """A connection to rank `expected` at `place`, that has let this rank in; `message` comes with it.

    Raises OSError if there is no answer, or none of tfdist, before `deadline` (monotonic); Mismatch.
    """
    connection = socket.create_connection(address_of(place), timeout=_left(deadline))
    try:
        if connection.getsockname() == connection.getpeername():  # the kernel picked the very port that it connects to
            raise ConnectionError("nobody listens there")
        mine = lock.hello(rank)
        connection.sendall(mine)
        theirs = read_exactly(connection, _HELLO.size, deadline)
        magic, token, their_rank, _ = _HELLO.unpack(theirs)
        if magic != _MAGIC:
            raise ConnectionError("what answers there is not tfdist")
        if token != lock.token:
            raise Mismatch(f"has {_one(token)}, but this worker has {_one(lock.token)}: {_CURE}.")
        proven = hmac.compare_digest(read_exactly(connection, _PROOF, deadline), lock.proof(b"accepts", mine, theirs))
        if not proven:
            with contextlib.suppress(OSError):
                connection.sendall(
                    lock.proof(b"connects", mine, theirs) + _LENGTH.pack(0)
                )  # so that it can tell the same there
        if not proven or their_rank != expected:
            raise Mismatch(f"has another job token, or is of another job: {_CURE}.")
        connection.sendall(lock.proof(b"connects", mine, theirs) + _LENGTH.pack(len(message)) + message)
        if read_exactly(connection, 1, deadline) != _LET_IN:
            raise ConnectionError("it was not let in")
        return connection
    except BaseException:
        connection.close()
        raise


def _one(token: bool) -> str:
    return "a job token" if token else "none"


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def read_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """`count` bytes. Raises OSError if they are not there before the deadline, however slowly they come."""
    data = b""
    while len(data) < count:
        connection.settimeout(_left(deadline))
        part = connection.recv(min(count - len(data), 65536))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def send_message(connection: socket.socket, message: Any) -> None:
    """Sends JSON with its length."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def read_message(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """What `send_message` sent, an object. Raises OSError; ValueError for what is none."""
    (length,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size, deadline))
    if length > LARGEST_MESSAGE:
        raise ValueError(f"a message of {length} bytes")
    return parse_object(read_exactly(connection, length, deadline))


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError for anything else, however deep it is nested."""
    try:
        message = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


@dataclass(frozen=True)
class Arrival:
    """Somebody who has proved to be of the job. The connection does not block."""

    rank: int
    connection: socket.socket
    message: bytes


@dataclass
class _Stranger:
    """A connection that has not proved anything yet."""

    connection: socket.socket
    host: str
    until: float  # monotonic
    data: bytes = b""
    mine: bytes = b""  # my hello: set once theirs is there
    length: int = -1  # of the message: set once the proof is there

    @property
    def theirs(self) -> bytes:
        return self.data[: _HELLO.size]


class Reception:
    """Takes the connections of a listening socket, many side by side, so that nobody can hold up the others.

    Args: rank, of this process; admits, whether somebody who has proved to be of the job may come in as a rank.
    """

    def __init__(self, listener: socket.socket, lock: Lock, rank: int, admits: Callable[[int], bool]):
        self._listener, self._lock, self._rank, self._admits = listener, lock, rank, admits
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self.notes: dict[str, None] = {}  # sentences about those who were turned away, in order
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Reception:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def poll(self, timeout: float) -> list[Arrival]:
        """Those who have proved themselves since the last call; waits up to `timeout` seconds for news of any kind."""
        arrivals = []
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._take()
            elif (stranger := self._strangers.get(key.fileobj)) and (arrival := self._hear(stranger)):
                arrivals.append(arrival)
        now = time.monotonic()
        for stranger in [stranger for stranger in self._strangers.values() if stranger.until < now]:
            self._drop(stranger)
        return arrivals

    def close(self) -> None:
        """Turns away those who have not proved themselves. The listening socket stays open."""
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        self._selector.close()

    def _take(self) -> None:
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
                self._drop(next(iter(self._strangers.values())))
            self._strangers[connection] = _Stranger(connection, address[0], time.monotonic() + _PATIENCE)
            self._selector.register(connection, selectors.EVENT_READ)

    def _drop(self, stranger: _Stranger, note: str = "") -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]
        stranger.connection.close()
        if note and note not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes[note] = None
            print(f"tfdist: {note}", file=sys.stderr, flush=True)

    def _wanted(self, stranger: _Stranger) -> int:
        """Bytes that it may have sent by now in all."""
        return _HELLO.size + (_PROOF + _LENGTH.size if stranger.mine else 0) + max(stranger.length, 0)

    def _hear(self, stranger: _Stranger) -> Arrival | None:
        try:
            while (missing := self._wanted(stranger) - len(stranger.data)) > 0:
                part = stranger.connection.recv(missing)
                if not part:
                    raise ConnectionError("closed")
                stranger.data += part
                if len(part) == missing and (problem := self._judge(stranger)) is not None:
                    return self._drop(stranger, problem)
            return self._let_in(stranger)
        except BlockingIOError:
            return None
        except OSError:
            return self._drop(stranger)

    def _judge(self, stranger: _Stranger) -> str | None:
        """Looks at a piece that is complete.

        None: all is well; else it is to be dropped, with this note if there is one.
        """
        if not stranger.mine:
            magic, token, rank, _ = _HELLO.unpack(stranger.theirs)
            if magic != _MAGIC:
                return ""
            stranger.mine = self._lock.hello(self._rank)
            stranger.connection.send(stranger.mine + self._lock.proof(b"accepts", stranger.theirs, stranger.mine))
            if token != self._lock.token:
                return (
                    f"somebody at {stranger.host} who says to be rank {rank} has {_one(token)}, but this worker has"
                    f" {_one(self._lock.token)}: {_CURE}."
                )
        elif stranger.length < 0:
            proof, length = stranger.data[_HELLO.size : _HELLO.size + _PROOF], stranger.data[-_LENGTH.size :]
            rank = _HELLO.unpack(stranger.theirs)[2]
            if not hmac.compare_digest(proof, self._lock.proof(b"connects", stranger.theirs, stranger.mine)):
                return (
                    f"somebody at {stranger.host} who says to be rank {rank} has another job token, or is of another"
                    f" job: {_CURE}."
                )
            stranger.length = _LENGTH.unpack(length)[0]
            if stranger.length > LARGEST_MESSAGE or not self._admits(rank):
                return (
                    f"a worker at {stranger.host} says to be rank {rank}, which cannot be: give each worker its own"
                    " place in the same cluster."
                )
        return None

    def _let_in(self, stranger: _Stranger) -> Arrival:
        stranger.connection.send(_LET_IN)
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]
        return Arrival(
            _HELLO.unpack(stranger.theirs)[2], stranger.connection, stranger.data[_HELLO.size + _PROOF + _LENGTH.size :]
        )
