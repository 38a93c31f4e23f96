"""Socket filters: the kernel drops packets that are not for us before this process sees them (SO_ATTACH_FILTER; Linux).

TensorFlow's gRPC server listens on all interfaces, whatever its address is, and does not authenticate clients.
`own_address_only` finds its listening socket and lets in only packets to the worker's own address, as if the server had
been bound to it: for a local job, only packets from this machine. This needs no privilege. `marked_only` keeps a flood
of datagrams from strangers out of the receive buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tfdist.control.repeated_look import repeatedly
from tfdist.control.token import host_of, is_loopback

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, of <asm-generic/socket.h>
_LOOK_SECONDS, _LOOK_AGAIN_SECONDS = 0.005, 0.1
_LOAD_WORD, _LOAD_BYTE, _SHIFT, _EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x06  # opcodes of classic BPF
_NETWORK = 0x100000000 - 0x100000  # offset of the IP header: SKF_NET_OFF
_VERSION, _TO_V4, _TO_V6 = _NETWORK, _NETWORK + 16, _NETWORK + 24
_UDP_HEADER = 8
_ALL, _NOTHING = 0xFFFFFFFF, 0


class Instruction(NamedTuple):
    """An instruction of classic BPF, in the order of the kernel's struct sock_filter."""

    code: int
    if_true: int = 0  # instructions to skip
    if_false: int = 0
    constant: int = 0


class Check(NamedTuple):
    """A check whether a packet has `value` at `place`."""

    load: int  # opcode that loads the value
    place: int
    value: int


_KEEP, _DROP = Instruction(_RETURN, constant=_ALL), Instruction(_RETURN, constant=_NOTHING)


def bind_address(address: str, peers: Iterable[str]) -> str:
    """Returns the IP address to listen at for host:port such that all `peers` (host:port) can reach it; "": all
    interfaces.

    An address is returned only if all hosts are IP addresses of one kind and this one belongs to this machine. Names do
    not count: here a name may mean another address than for the peers (127.0.1.1 in /etc/hosts).
    """
    try:
        first, *others = (
            ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
            for host in map(host_of, [address, *peers])
        )
        if any(other.version != first.version or other.is_loopback != first.is_loopback for other in others):
            return ""
        with socket.socket(_family(first), socket.SOCK_DGRAM) as probe:
            probe.bind((str(first), 0))
        return str(first)
    except (ValueError, OSError):
        return ""


def _family(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    return socket.AF_INET6 if address.version == 6 else socket.AF_INET


@contextlib.contextmanager
def own_address_only(address: str, peers: Iterable[str]) -> Iterator[None]:
    """Context manager for starting servers that listen on all interfaces: restricts them to the host of `address`.

    The filter is attached when the socket is found, a few milliseconds after it is made.
    """
    host = bind_address(address, peers)
    if not host or not sys.platform.startswith("linux"):
        yield
        return
    known, pause = _sockets(), _LOOK_SECONDS

    def look() -> float:
        nonlocal pause
        if _narrow(to_address(host), known):
            pause = _LOOK_AGAIN_SECONDS  # gRPC may open more such sockets
        return pause

    with repeatedly(look, "tfdist-narrow"):
        yield


def _sockets() -> dict[int, int]:
    """Returns the sockets of this process: identity (inode) -> descriptor; {} if the system does not list them."""
    found, names = {}, []
    with contextlib.suppress(OSError):
        names = os.listdir("/proc/self/fd")
    for name in names:
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _narrow(program: Sequence[Instruction], known: dict[int, int]) -> bool:
    """Attaches the program to listening sockets that are not in `known`. Returns whether there was one."""
    found_one = False
    for identity, descriptor in _sockets().items():
        if identity not in known:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if found.family not in (socket.AF_INET, socket.AF_INET6) or (not listens and _is_connected(found)):
                    known[identity] = descriptor
                elif listens:
                    attach(found, program)
                    known[identity] = descriptor
                    found_one = True
    return found_one


def _is_connected(found: socket.socket) -> bool:
    try:
        found.getpeername()
    except OSError:
        return False
    return True


def attach(target: socket.socket, program: Sequence[Instruction]) -> None:
    """Attaches a filter program to a socket. Raises OSError if the kernel rejects it."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    target.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))


def to_address(host: str) -> list[Instruction]:
    """Returns a filter that lets in packets to this IP address of this machine, or to its loopback addresses."""
    address = ipaddress.ip_address(host)
    if4 = [Instruction(_LOAD_BYTE, constant=_TO_V4), Instruction(_EQUAL, if_false=1, constant=127), _KEEP]
    if address.version == 4 and not is_loopback(host):
        if4 += _keep_if_all([Check(_LOAD_WORD, _TO_V4, int(address))])
    if6 = _keep_if_all(_is_v6(address)) if address.version == 6 else []
    if6 += _keep_if_all(_is_v6(ipaddress.IPv6Address("::1")))
    by_version = [
        Instruction(_LOAD_BYTE, constant=_VERSION),
        Instruction(_SHIFT, constant=4),
        Instruction(_EQUAL, if_false=len(if4) + 1, constant=4),
    ]
    return [*by_version, *if4, _DROP, *if6, _DROP]


def _is_v6(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[Check]:
    """Returns the checks whether this IPv6 address is a packet's destination."""
    words = struct.unpack("!IIII", address.packed)
    return [Check(_LOAD_WORD, _TO_V6 + 4 * at, word) for at, word in enumerate(words)]


def _keep_if_all(checks: Sequence[Check]) -> list[Instruction]:
    """Returns instructions that let in a packet that passes all checks, and else continue after them."""
    program: list[Instruction] = []
    for index, check in enumerate(checks):
        rest = 2 * (len(checks) - index) - 1
        program += [
            Instruction(check.load, constant=check.place),
            Instruction(_EQUAL, if_false=rest, constant=check.value),
        ]
    return [*program, _KEEP]


def marked_only(target: socket.socket, mark: bytes) -> None:
    """Lets a socket receive only datagrams that begin with these 8 bytes, if the kernel supports filters."""
    words = struct.unpack("!II", mark)
    program = [
        *_keep_if_all([Check(_LOAD_WORD, _UDP_HEADER + 4 * at, word) for at, word in enumerate(words)]),
        _DROP,
    ]
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            attach(target, program)
