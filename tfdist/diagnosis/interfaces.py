"""Finds the network that NCCL uses between machines, and whether it is that of the workers' addresses.

NCCL's rule (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname): NCCL_SOCKET_IFNAME
is a list of name prefixes; a leading "=" requires whole names, a leading "^" excludes the listed ones. If it is not
set: interfaces whose names begin with "ib" first, then all but docker* and lo, then docker*, then lo.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping

from tfdist.diagnosis.findings import Finding, fine, warning, wrong

VARIABLE = "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # netdevice(7)


def read_interfaces() -> dict[str, str]:
    """Returns name -> IPv4 address for the interfaces that have one, in the system's order."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found[name] = socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
    return found


def taken(names: list[str], asked: str | None) -> list[str]:
    """Returns those of `names` that NCCL uses. asked: NCCL_SOCKET_IFNAME; None if it is not set."""
    if asked:
        others, whole = asked.startswith("^"), asked.lstrip("^").startswith("=")
        words = [word for word in asked.lstrip("^=").split(",") if word]
        matches = {name for name in names if any(name == word if whole else name.startswith(word) for word in words)}
        return [name for name in names if (name in matches) != others]
    infiniband = [name for name in names if name.startswith("ib")]
    docker, loopback = [name for name in names if name.startswith("docker")], [name for name in names if name == "lo"]
    return infiniband or [name for name in names if name not in docker + loopback] or docker or loopback


def network(interfaces: Mapping[str, str], own_address: str, environment: Mapping[str, str]) -> Finding:
    """Compares NCCL's interfaces with own_address, the IP address of this worker in TF_CONFIG. A loopback address means
    a job on one machine, whose workers NCCL connects by shared memory.
    """
    asked = environment.get(VARIABLE)
    chosen = taken(list(interfaces), asked)
    all_of_them = ", ".join(f"{name} ({address})" for name, address in interfaces.items())
    if not chosen:
        return wrong(
            "network",
            f"{VARIABLE}={asked}, but this machine has {all_of_them or 'no interface with an address'}.",
            f"set {VARIABLE} to the one that workers reach each other by, or unset it.",
        )
    of_address = [name for name, address in interfaces.items() if address == own_address]
    said = f"NCCL takes {', '.join(f'{name} ({interfaces[name]})' for name in chosen)}"
    if own_address.startswith("127."):
        return fine("network", said)
    if of_address and of_address[0] not in chosen:
        return warning(
            "network",
            f"{said}, but this worker's address {own_address} belongs to {of_address[0]}.",
            f"set {VARIABLE}={of_address[0]}, unless the other network is faster and connects all workers.",
        )
    if of_address and not asked and len(chosen) > 1 and of_address[0] != chosen[0]:
        return warning(
            "network",
            f"{said} as it likes; this worker's address {own_address} belongs to {of_address[0]}.",
            f"set {VARIABLE}={of_address[0]}, or to the fastest one that connects all workers.",
        )
    return fine("network", said)
