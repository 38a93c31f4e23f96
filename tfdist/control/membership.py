"""Membership of the training group while processes come and go: the launcher decides who is in it (Groups), each worker
asks to join (Member).

Each worker has one TCP connection to the launcher. It begins with the handshake of control/wire.py, with the slot
(which process of the job this is) in place of a rank; then come JSON lines:

  worker -> launcher   {"ready": 40, "lost": true}    in no group now, with a copy of the state of step 40 (-1: none);
                                                      lost: its group broke, it did not leave in order
  launcher -> worker   {"group": 3, "workers": ["host:port", ...], "rank": 1}
                       {"leave": true}                all end the group at its next boundary, for a new group
                       {"broken": true}               a worker of the group has died or failed: do not wait for it
                       {"dismissed": true}            this worker is no longer needed

A new group (the next generation) is formed as soon as no worker is in a group any more. Its members are the workers
that wait. Of these, the one with the newest copy gets rank 0, the others follow in the order of their last ranks, and
newcomers come last. So the chief always holds the state to resume from, and all others take over what the chief
chooses, as when a run resumes from a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfdist.control import wire
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError, PeerLostError
from tfdist.control.reception import Reception
from tfdist.control.tf_config import parse_tf_config
from tfdist.control.token import Secret

VARIABLE = "TFDIST_ELASTIC"  # host:port/slot of the launcher's Groups
_CONNECT_SECONDS = 30.0
_LAUNCHER = -1  # the launcher's rank in handshakes
_LONGEST_LINE = 65536  # bytes


@dataclass
class ConnectedWorker:
    """A connected worker, as the launcher sees it."""

    connection: socket.socket
    slot: int  # in the job
    generation: int = 0  # of the last group that it was in; 0: none yet
    rank: int = -1  # in that group
    waits: bool = False  # for a group
    copy: int = -1  # step of the state copy that the waiting worker holds; -1: none
    lost: bool = False  # it waits because its group broke
    sent: set[str] = field(default_factory=set)  # messages sent in this generation: "leave", "broken", "dismissed"
    unread: bytes = b""

    @property
    def busy(self) -> bool:
        return self.generation > 0 and not self.waits

    def send(self, **message: Any) -> None:
        """Sends a message, each kind at most once per generation. Does nothing if the worker is gone."""
        word = next(iter(message))
        if word not in self.sent:
            self.sent.add(word)
            with contextlib.suppress(OSError):
                self.connection.sendall(json.dumps(message).encode() + b"\n")


@dataclass(frozen=True)
class FormedGroup:
    """A new group."""

    generation: int
    slots: tuple[int, ...]  # by rank
    step: int  # of the copy from which it resumes; -1: it starts from a snapshot, or from the beginning
    newcomers: int


class Groups:
    """The launcher's side. Never waits: `look` and `form` are called repeatedly."""

    def __init__(self, secret: Secret) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._reception = Reception(
            self._listener, wire.SharedKey.of(secret, "membership"), _LAUNCHER, lambda slot: slot >= 0
        )
        self._all: list[ConnectedWorker] = []
        self.generation = 0  # groups formed
        # Since when (monotonic seconds) some workers of a broken group have been waiting for others of that group.
        self.broken_since: float | None = None

    def invitation(self, slot: int) -> dict[str, str]:
        """Returns the environment variables that a worker needs to connect."""
        return {VARIABLE: f"127.0.0.1:{self._listener.getsockname()[1]}/{slot}"}

    @property
    def connected(self) -> dict[int, ConnectedWorker]:
        """The connected workers by slot."""
        return {worker.slot: worker for worker in self._all}

    def look(self) -> None:
        """Accepts new connections and reads the workers' messages."""
        self._all += [ConnectedWorker(arrival.connection, arrival.rank) for arrival in self._reception.poll(0)]
        for worker in self._all:
            self._read(worker)
        lost = any(worker.lost and "dismissed" not in worker.sent for worker in self._all)
        waits_for_others = lost and any(worker.busy for worker in self._all)
        self.broken_since = (self.broken_since or time.monotonic()) if waits_for_others else None

    def _read(self, worker: ConnectedWorker) -> None:
        with contextlib.suppress(OSError):
            worker.unread += worker.connection.recv(_LONGEST_LINE)
        *lines, worker.unread = worker.unread.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                message = wire.parse_object(line)
                if type(message.get("ready")) is int and type(message.get("lost")) is bool:
                    worker.waits, worker.copy, worker.lost = True, message["ready"], message["lost"]
                    worker.sent = set()
                    if worker.lost:
                        self._tell_group_of(worker)
        worker.unread = worker.unread[-_LONGEST_LINE:]

    def remove(self, slot: int) -> None:
        """Removes a worker whose process has ended. The others of its group need not wait for it."""
        gone = self.connected.get(slot)
        if gone:
            self._all.remove(gone)
            gone.connection.close()
            self._tell_group_of(gone)

    def _tell_group_of(self, missing: ConnectedWorker) -> None:
        """Tells the others of a worker's group that it will not come back to it."""
        for other in self._all:
            if missing.generation and other.busy and other.generation == missing.generation:
                other.send(broken=True)

    def form(self, addresses: Sequence[str], wanted: int, least: int, expected: int) -> FormedGroup | None:
        """Forms a group if it is time to, or asks the current one to end if a different one is wanted.

        addresses: by slot. wanted: number of workers that the group should have. least: number that it must have.
        expected: number of workers that the first group waits for.
        """
        connected = list(self.connected.values())
        busy = [worker for worker in connected if worker.busy]
        waiting = [worker for worker in connected if worker.waits and "dismissed" not in worker.sent]
        if busy:
            if len(busy) > wanted or (waiting and len(busy) < wanted):
                for worker in busy:
                    worker.send(leave=True)
            return None
        if len(waiting) < (least if self.generation else max(least, expected)) or not waiting:
            return None
        waiting.sort(key=lambda each: (-each.copy, each.rank if each.rank >= 0 else len(addresses), each.slot))
        for worker in waiting[wanted:]:
            worker.send(dismissed=True)
        return self._begin_generation(waiting[:wanted], addresses)

    def _begin_generation(self, members: Sequence[ConnectedWorker], addresses: Sequence[str]) -> FormedGroup:
        """Begins a new group with these members, given in rank order."""
        self.generation += 1
        self.broken_since = None
        formed = FormedGroup(
            generation=self.generation,
            slots=tuple(member.slot for member in members),
            step=members[0].copy,
            newcomers=sum(member.generation == 0 for member in members),
        )
        workers = [addresses[member.slot] for member in members]
        for rank, member in enumerate(members):
            member.generation, member.rank = self.generation, rank
            member.waits, member.lost, member.sent = False, False, set()
            member.send(group=self.generation, workers=workers, rank=rank)
        return formed

    def dismiss(self, only_newcomers: bool) -> None:
        """Tells the waiting workers that they are not needed. only_newcomers: only those that were never in a group."""
        for worker in self._all:
            if worker.waits and not (only_newcomers and worker.generation):
                worker.send(dismissed=True)

    def close(self) -> None:
        """Closes all connections."""
        self._reception.close()
        self._listener.close()
        for worker in self._all:
            worker.connection.close()


class Member:
    """A worker's side. `leave` and `broken` may be read at any time; `join` waits."""

    def __init__(self, environment: Mapping[str, str], secret: Secret):
        address, slot = environment[VARIABLE].split("/")
        self._secret = secret
        self.leave = self.broken = False
        self._changed = threading.Condition()
        self._answer: dict[str, Any] | None = None  # the launcher's answer to the last `join`
        self._gone = False
        try:
            self._connection = wire.connect(
                address,
                wire.SharedKey.of(secret, "membership"),
                int(slot),
                _LAUNCHER,
                time.monotonic() + _CONNECT_SECONDS,
            )
        except wire.OtherJobError as mismatch:
            raise ClusterError(f"The launcher at {address} {mismatch}") from None
        self._connection.settimeout(None)
        threading.Thread(target=self._listen, name="tfdist-member", daemon=True).start()

    def join(self, copy: int, lost: bool) -> Cluster | None:
        """Waits for a group and returns the cluster with this worker's rank in it; None: it is no longer needed.

        copy: step of the state copy that this worker holds; -1: none. lost: whether its last group broke.
        Raises PeerLostError if the launcher is gone.
        """
        self._send(ready=copy, lost=lost)
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self._gone)
            answer, self._answer = self._answer, None
        if answer is None:
            raise PeerLostError("The launcher is gone: start the job again.")
        if "group" not in answer:
            return None
        cluster = {"cluster": {"worker": answer["workers"]}, "task": {"type": "worker", "index": answer["rank"]}}
        return replace(parse_tf_config(json.dumps(cluster)), is_broken=lambda: self.broken, secret=self._secret)

    def _send(self, **message: Any) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._gone = True

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError), self._connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                with self._changed:
                    if "leave" in message:
                        self.leave = True
                    elif "broken" in message:
                        self.broken = True
                    else:
                        self.leave = self.broken = False
                        self._answer = message
                        self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()
