"""The cluster as one process sees it: its own role and rank, and the addresses of the other processes.

resolvers.py makes it from the environment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.control.amounts_text import counted
from tfdist.control.token import Secret

TRAINING_ROLES = ("chief", "worker")  # in rank order
ROLES = (*TRAINING_ROLES, "ps", "evaluator")


@dataclass(frozen=True)
class Cluster:
    """Role and rank of this process, and the addresses of all processes of the cluster."""

    role: str = "worker"
    index: int = 0
    rank: int = 0  # among the training workers; 0 is the chief; -1 for an evaluator or a parameter server
    size: int = 1  # number of training workers
    peers: tuple[str, ...] = ()  # addresses of the training workers in rank order; empty if none are known
    spec: Mapping[str, list[str]] = field(default_factory=dict)  # role -> addresses
    started_by: str = ""  # name of a launcher that gives ranks but no addresses (control/horovod_env.py)
    launcher_local_rank: int = 0  # the local rank that this launcher gives
    secret: Secret = field(default=Secret(), compare=False, repr=False)  # by which its processes authenticate
    # Returns whether a process of the group has died. Set only in elastic jobs, where a process can join a later group
    # (membership.py).
    is_broken: Callable[[], bool] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_workers(cls, addresses: Sequence[str], rank: int) -> Cluster:
        """Makes a cluster of workers at these addresses (in rank order); this process is the one with rank `rank`."""
        return cls("worker", rank, rank, len(addresses), tuple(addresses), {"worker": list(addresses)})

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    @property
    def address(self) -> str:
        """host:port of this training worker; "" if it is alone, or if this process is not a training worker."""
        return self.peers[self.rank] if 0 <= self.rank < len(self.peers) else ""

    @property
    def hosts(self) -> list[str]:
        """The host part of each training worker's address, in rank order. Equal text means the same machine."""
        return [address.rpartition(":")[0] for address in self.peers]

    @property
    def local_rank(self) -> int:
        """The rank of this process among the training workers of its machine, as far as the addresses show it."""
        hosts = self.hosts
        return hosts[: self.rank].count(hosts[self.rank]) if 0 <= self.rank < len(hosts) else self.launcher_local_rank

    @property
    def most_local_rank(self) -> int:
        """The largest `local_rank` of all training workers if addresses are known, else that of this process."""
        hosts = self.hosts
        return max(Counter(hosts).values()) - 1 if hosts else self.local_rank

    @property
    def local_size(self) -> int:
        """The number of training workers on this machine, including this process, as far as the addresses show it."""
        hosts = self.hosts
        return hosts.count(hosts[self.rank]) if 0 <= self.rank < len(hosts) else 1

    def name(self, rank: int) -> str:
        """The name of a training worker in messages: "worker 1 (rank 2, host:port)"."""
        if not self.peers:
            return f"rank {rank}"
        role, index = self._role_and_index(rank)
        return f"{role} {index} (rank {rank}, {self.peers[rank]})"

    def task(self, rank: int) -> str:
        """TensorFlow's name for a rank."""
        role, index = self._role_and_index(rank)
        return f"/job:{role}/replica:0/task:{index}"

    def _role_and_index(self, rank: int) -> tuple[str, int]:
        return next(
            (role, index)
            for role in TRAINING_ROLES
            for index, address in enumerate(self.spec.get(role, ()))
            if address == self.peers[rank]
        )

    def others(self, *roles: str) -> dict[str, str]:
        """Returns name -> address of every process with one of these roles: {"ps 0 (host:port)": "host:port"}."""
        return {
            f"{role} {index} ({address})": address
            for role in roles
            for index, address in enumerate(self.spec.get(role, ()))
        }

    @property
    def training_spec(self) -> dict[str, list[str]]:
        """role -> addresses of the training workers only, for TensorFlow, which waits for every listed process."""
        return {role: list(self.spec[role]) for role in TRAINING_ROLES if role in self.spec}

    def tf_config(self) -> str:
        """Returns the text of TF_CONFIG for TensorFlow."""
        return json.dumps({"cluster": self.training_spec, "task": {"type": self.role, "index": self.index}})

    def describe(self) -> str:
        """Describes the cluster in one line, for logs."""
        if self.role == "evaluator":
            return f"evaluator alongside {counted(self.size, 'worker')}"
        if self.started_by:
            return f"rank {self.rank} of {self.size} workers, started by {self.started_by}"
        if not self.peers:
            return "one worker (no TF_CONFIG)"
        if "ps" in self.spec:
            workers, servers = len(self.spec.get("worker", ())), len(self.spec["ps"])
            return (
                f"{self.role} {self.index} of a chief, {counted(workers, 'worker')} and"
                f" {counted(servers, 'parameter server')}"
            )
        if self.size == 1:
            return f"one worker, at {self.address}"
        return f"{self.role} {self.index} = rank {self.rank} of {self.size} workers at {', '.join(self.peers)}"
