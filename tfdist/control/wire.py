"""Mutual authentication: two processes of a job verify each other before either reads a message of the other.

Every TCP connection of tfdist's own (rendezvous, rings, membership) begins with this handshake; TensorFlow's and
Horovod's do not. I is the initiator, who connects; A is the acceptor:

  I -> A   hello: magic, whether there is a token, rank, nonce
  A -> I   hello, and HMAC-SHA256("accepts", both hellos)
  I -> A   HMAC-SHA256("connects", both hellos), length, message
  A -> I   one byte: you are admitted

The key is derived from the job token, the purpose, and the session (for a ring: the table of all endpoints, each with a
random part). Nothing of variable length is read before the other side has authenticated itself, so a stranger costs 81
bytes and a few seconds of one of a bounded number of places. Later data are neither encrypted nor signed. This file has
I's side; A's side is in reception.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfdist.control.token import VARIABLE, Secret, host_of

LARGEST_MESSAGE = 1 << 24  # bytes of JSON
_MAGIC = b"tfdist\x00\x01"
_HELLO = struct.Struct("!8s?i32s")  # magic, whether it has a token, rank, nonce
HELLO_BYTES = _HELLO.size
LENGTH = struct.Struct("!I")
PROOF_BYTES = hashlib.sha256().digest_size
ADMITTED = b"\x01"
_CURE = f"give all workers the same token, with --job_token_file or {VARIABLE}"
OTHER_TOKEN = f"has another job token, or belongs to another job: {_CURE}."  # the end of a sentence


class OtherJobError(Exception):
    """The other side is of another job, or only one side has a token. The text continues a sentence after a name."""


class Hello(NamedTuple):
    """The first message of either side."""

    token: bool  # whether the side has a job token
    rank: int

    @classmethod
    def read(cls, data: bytes) -> Hello | None:
        """Reads a hello; None if the other side is not tfdist."""
        magic, token, rank, _ = _HELLO.unpack(data)
        return cls(token, rank) if magic == _MAGIC else None


@dataclass(frozen=True)
class SharedKey:
    """The secret key that must be the same at both ends of a connection."""

    key: bytes = field(repr=False)
    token: bool  # whether the key comes from a job token

    @classmethod
    def of(cls, secret: Secret, purpose: str, *context: str) -> SharedKey:
        return cls(secret.key(purpose, *context), bool(secret))

    def hello(self, rank: int) -> bytes:
        return _HELLO.pack(_MAGIC, self.token, rank, secrets.token_bytes(32))

    def proof_of_accepting(self, connecting: bytes, accepting: bytes) -> bytes:
        """Returns the accepting side's proof, computed from both hellos."""
        return self._proof(b"accepts", connecting, accepting)

    def proof_of_connecting(self, connecting: bytes, accepting: bytes) -> bytes:
        """Returns the connecting side's proof, computed from both hellos."""
        return self._proof(b"connects", connecting, accepting)

    def _proof(self, word: bytes, connecting: bytes, accepting: bytes) -> bytes:
        return hmac.digest(self.key, word + connecting + accepting, hashlib.sha256)

    def token_mismatch(self, token: bool) -> str:
        """Returns the end of a sentence if only one of the two sides has a token; "" if they agree."""
        if token == self.token:
            return ""
        has = {True: "a job token", False: "none"}
        return f"has {has[token]}, but this worker has {has[self.token]}: {_CURE}."


def endpoint(host: str, listener: socket.socket) -> str:
    """Returns host:port/nonce: a socket's address, and a random part that makes the table of all endpoints unique."""
    return f"{host}:{listener.getsockname()[1]}/{secrets.token_hex(8)}"


def address_of(place: str) -> tuple[str, int]:
    """Returns (host, port) of host:port, or of an endpoint."""
    address = place.partition("/")[0]
    return host_of(address), int(address.rpartition(":")[2])


def connect(
    place: str, key: SharedKey, rank: int, expected: int, deadline: float, message: bytes = b""
) -> socket.socket:
    """Connects to rank `expected` at `place` and sends `message`. Returns the connection once this rank is admitted.

    Raises OSError if no tfdist process answers before `deadline` (monotonic); OtherJobError.
    """
    connection = _connected(place, deadline)
    try:
        if connection.getsockname() == connection.getpeername():  # the kernel connected the socket to itself
            raise ConnectionError("nothing is listening there")
        mine = key.hello(rank)
        connection.sendall(mine)
        theirs = read_exactly(connection, HELLO_BYTES, deadline)
        hello = Hello.read(theirs)
        if hello is None:
            raise ConnectionError("what answers there is not tfdist")
        if mismatch := key.token_mismatch(hello.token):
            raise OtherJobError(mismatch)
        proof = key.proof_of_connecting(mine, theirs)
        proven = hmac.compare_digest(
            read_exactly(connection, PROOF_BYTES, deadline), key.proof_of_accepting(mine, theirs)
        )
        if not proven:
            with contextlib.suppress(OSError):  # so that the other side can report the same
                connection.sendall(proof + LENGTH.pack(0))
        if not proven or hello.rank != expected:
            raise OtherJobError(OTHER_TOKEN)
        connection.sendall(proof + LENGTH.pack(len(message)) + message)
        if read_exactly(connection, 1, deadline) != ADMITTED:
            raise ConnectionError("it was rejected")
        return connection
    except BaseException:
        connection.close()
        raise


def _connected(place: str, deadline: float) -> socket.socket:
    """Connects to the first address of a name that answers. Raises OSError.

    Each gets an equal part of the time that is left: one that drops packets, often the IPv6 address, must not use it up
    (as in socket.create_connection).
    """
    host, port = address_of(place)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for left_over, (family, kind, protocol, _, address) in zip(range(len(found), 0, -1), found, strict=True):
        connection = None
        try:
            connection = socket.socket(family, kind, protocol)  # fails if the kernel does not know the family
            connection.settimeout(_left(deadline) / left_over)
            connection.connect(address)
            return connection
        except OSError:
            if connection is not None:
                connection.close()
            if left_over == 1:
                raise
    raise OSError("the name has no address")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def read_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Reads `count` bytes. Raises OSError if not all have arrived before the deadline, however slowly they come."""
    data = b""
    while len(data) < count:
        connection.settimeout(_left(deadline))
        part = connection.recv(min(count - len(data), 65536))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def send_message(connection: socket.socket, message: Any) -> None:
    """Sends a message as JSON, preceded by its length."""
    data = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def read_message(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Reads a JSON object that `send_message` has sent. Raises OSError; ValueError if the message is not an object."""
    (length,) = LENGTH.unpack(read_exactly(connection, LENGTH.size, deadline))
    if length > LARGEST_MESSAGE:
        raise ValueError(f"a message of {length} bytes")
    return parse_object(read_exactly(connection, length, deadline))


def parse_object(data: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError for anything else, however deeply it is nested."""
    try:
        message = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message
