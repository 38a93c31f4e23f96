"""Attacks a job as a stranger might: finds every open port of its processes, and sends there whatever might harm.

It knows of tfdist only what an onlooker can know: addresses, formats, old formats and, where it is allowed to listen
(as root), the passing datagrams, which it replays and changes. It is bounded in sockets and in time, and only talks to
ports of the given process and of processes below it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections import deque
from pathlib import Path

_MOST_HELD = 100  # silent connections that are kept open
_WORKER_HELLO = struct.Struct("!8s?i32s")
_MARK_BYTES, _CODE_BYTES = 8, 16  # of a datagram, before the rank and the stamp
_IPV4, _UDP = 0x0800, 17


class Executes:
    """A pickle that writes a file where it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "executed")


def processes(root: int) -> set[int]:
    """Returns a process and all below it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, before = {root}, set()
    while found != before:
        before = set(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def ports(root: int) -> tuple[set[int], set[int]]:
    """Returns (TCP ports on which a process or one below it listens, UDP ports that they have bound)."""
    inodes = set()
    for pid in processes(root):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    tcp, udp = set(), set()
    for name, found, states in (
        ("tcp", tcp, ("0A",)),
        ("tcp6", tcp, ("0A",)),
        ("udp", udp, ("07",)),
        ("udp6", udp, ("07",)),
    ):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes and fields[3] in states:
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return tcp, udp


class Attacker:
    """Attacks the ports of a process and of those below it, in threads, from `with` until its end.

    Attributes: tcp, udp, the ports that were attacked; proof, a file that exists if anything was executed.
    """

    def __init__(self, root: int, proof: Path, size: int, seconds: float = 300.0):
        self.root, self.proof, self.size = root, proof, size
        self.tcp, self.udp = set(), set()
        # Seconds between two rounds, and between two looks for new ports: short while ports open and close.
        self.rounds, self.pause, self.look = 0, 0.1, 0.02
        self._end, self._stop = time.monotonic() + seconds, threading.Event()
        self._overheard: deque[tuple[int, bytes]] = deque(maxlen=200)  # (port, datagram)
        self._threads = [threading.Thread(target=self._attack, args=(seed,), daemon=True) for seed in range(2)]
        # A round may take seconds where a full port lets connections wait; other ports are open for one second only.
        self._threads.append(threading.Thread(target=self._attack, args=(2,), kwargs={"new_only": True}, daemon=True))
        self._threads.append(threading.Thread(target=self._listen, daemon=True))

    def __enter__(self) -> Attacker:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def words(self, rng: random.Random) -> list[bytes]:
        """Returns what is sent on connections: garbage, lengths beyond all bounds, hellos of all versions, pickles."""
        rank = rng.randrange(-1, self.size + 1)
        hello = _WORKER_HELLO.pack(b"tfdist\x00\x01", rng.random() < 0.5, rank, rng.randbytes(32))
        evil = pickle.dumps(Executes(self.proof))
        table = json.dumps(["127.0.0.1:1/00"] * self.size).encode()  # as if the proof before it were valid
        old = {
            "rank": rng.choice([rank, [], {}, None, "1", 1e308]),
            "peers": rng.choice([[], {}, ["127.0.0.1:1"] * self.size]),
            "endpoint": "127.0.0.1:1",
        }
        return [
            b"",
            b"\n",
            hello[:20],
            hello,
            hello + rng.randbytes(32) + b"\xff\xff\xff\xff",
            _WORKER_HELLO.pack(b"tfdist\x00\x01", True, self.size - 1, rng.randbytes(32))
            + rng.randbytes(32)
            + struct.pack("!I", len(table))
            + table,
            json.dumps(old).encode() + b"\n",
            struct.pack("!i", rank),
            struct.pack("!i", rank) + struct.pack("!12sIQ", b"broadcast", 0, len(evil)) + evil,
            evil,
            b"\xff" * 5000,
            rng.randbytes(300),
            struct.pack("!IIQqq", 0, 0, 2**63, -1, 0),
            b'{"slot": 1, "token": ""}\n{"ready": 5, "lost": true}\n',
            b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
            b"[" * 10_000,
        ]

    def datagrams(self, rng: random.Random) -> list[bytes]:
        """Returns what is sent to the beacons: failures of others and invalid reports, sealed and not."""
        rank = rng.randrange(self.size)
        report = {
            "section": "step",
            "seconds": 0.1,
            "calls": 10**6,
            "at": "",
            "waiting_for": None,
            "error": "forged \x1b[2J failure",
            "code": 4,
            "error_time": 1.0,
            "secondary": False,
            "rank": rank,
        }
        wrong = [
            {**report, "rank": []},
            {**report, "calls": "x"},
            {**report, "waiting_for": []},
            {**report, "error": ""},
            report,
        ]
        data = [json.dumps(each).encode() for each in wrong]
        return [
            *data,
            *(rng.randbytes(24) + struct.pack("!iQ", rank, time.monotonic_ns()) + each for each in data),
            *(
                heard[:_MARK_BYTES] + rng.randbytes(_CODE_BYTES) + struct.pack("!iQ", rank, time.monotonic_ns()) + each
                for _, heard in list(self._overheard)[-2:]
                for each in data
            ),
            *(heard for _, heard in list(self._overheard)),
            b"",
            b"null",
            b"[" * 1300,
            rng.randbytes(1400),
            b"\xff" * 60_000,
        ]

    def _listen(self) -> None:
        """Keeps what others send to the attacked ports, if this process is allowed to see it."""
        with contextlib.suppress(PermissionError), socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as ear:
            ear.bind(("lo", _IPV4))
            ear.settimeout(0.5)
            while not self._stop.is_set() and time.monotonic() < self._end:
                with contextlib.suppress(TimeoutError):
                    packet = ear.recv(70_000)
                    udp = packet[4 * (packet[0] & 15) :]  # behind the IP header, whose length is in words
                    port = int.from_bytes(udp[2:4])
                    if packet[9] == _UDP and port in self.udp and int.from_bytes(udp[:2]) in self.udp:
                        self._overheard.append((port, udp[8:]))

    def _attack(self, seed: int, new_only: bool = False) -> None:
        """Attacks the open ports, round after round; with `new_only`, each port once, as soon as it opens."""
        rng, held = random.Random(seed), []
        done_tcp, done_udp = set(), set()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as voice:
            while not self._stop.is_set() and time.monotonic() < self._end:
                tcp, udp = ports(self.root)
                self.tcp.update(tcp)  # in place, since all threads do this and must not lose what another one has seen
                self.udp.update(udp)
                for port in tcp - done_tcp:
                    self._attack_tcp(port, rng, held)
                for port in udp - done_udp:
                    self._attack_udp(port, rng, voice)
                if new_only:
                    done_tcp, done_udp = done_tcp | tcp, done_udp | udp
                else:
                    self.rounds += 1
                self._stop.wait(self.look if new_only else self.pause)
        for connection in held:
            connection.close()

    def _attack_tcp(self, port: int, rng: random.Random, held: list[socket.socket]) -> None:
        for words in self.words(rng):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), timeout=0.5)
                held.append(connection)
                connection.sendall(words)
        while len(held) > _MOST_HELD:
            held.pop(rng.randrange(len(held))).close()

    def _attack_udp(self, port: int, rng: random.Random, voice: socket.socket) -> None:
        for data in self.datagrams(rng) * 5:
            with contextlib.suppress(OSError):
                voice.sendto(data, ("127.0.0.1", port))
