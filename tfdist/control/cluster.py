"""Who is in the cluster: the environment of a process -> Cluster. Checked here, before TensorFlow sees any of it.

TF_CONFIG is `{"cluster": {"chief": ["host:port"], "worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}`.
Without a "chief" the first worker is the chief. An "evaluator" takes no part in training and need not be listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tfdist.control.exit_codes import ClusterError

TRAINING_ROLES = ("chief", "worker")  # in rank order
ROLES = (*TRAINING_ROLES, "ps", "evaluator")


@dataclass(frozen=True)
class Cluster:
    """The place of this process among the others."""

    role: str = "worker"
    index: int = 0
    rank: int = 0  # among the training workers; 0 is the chief, an evaluator has -1
    size: int = 1  # training workers
    peers: tuple[str, ...] = ()  # addresses of the training workers in rank order; empty if there is only this process
    spec: Mapping[str, list[str]] = field(default_factory=dict)  # role -> addresses

    @property
    def address(self) -> str:
        """host:port of this process; "" if it is alone or an evaluator."""
        return self.peers[self.rank] if 0 <= self.rank < len(self.peers) else ""

    def name(self, rank: int) -> str:
        """How messages name a rank: "worker 1 (rank 2, host:port)"."""
        role, index = self._role_and_index(rank)
        return f"{role} {index} (rank {rank}, {self.peers[rank]})"

    def task(self, rank: int) -> str:
        """How TensorFlow names a rank."""
        role, index = self._role_and_index(rank)
        return f"/job:{role}/replica:0/task:{index}"

    def _role_and_index(self, rank: int) -> tuple[str, int]:
        return next((role, index) for role in TRAINING_ROLES for index, address in enumerate(self.spec.get(role, ())) if address == self.peers[rank])

    def tf_config(self) -> str:
        """TF_CONFIG for TensorFlow: the training workers only, since it waits for every process that it lists."""
        spec = {role: list(self.spec[role]) for role in TRAINING_ROLES if role in self.spec}
        return json.dumps({"cluster": spec, "task": {"type": self.role, "index": self.index}})

    def describe(self) -> str:
        if self.role == "evaluator":
            return f"evaluator beside {self.size} worker{'s' if self.size > 1 else ''}"
        if not self.peers:
            return "one worker (no TF_CONFIG)"
        return f"{self.role} {self.index} = rank {self.rank} of {self.size} workers at {', '.join(self.peers)}"


def resolve_cluster(environ: Mapping[str, str]) -> Cluster:
    """The cluster that the environment describes; alone if no resolver finds one. Raises ClusterError."""
    for resolver in RESOLVERS:
        cluster = resolver(environ)
        if cluster is not None:
            return cluster
    return Cluster()


def from_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    """From TF_CONFIG; None if it is not set or empty."""
    text = environ.get("TF_CONFIG", "").strip()
    return parse_tf_config(text) if text and text != "{}" else None


# Tried in this order; the first that answers wins. A new kind of cluster is a function and an entry here.
RESOLVERS: list[Callable[[Mapping[str, str]], Cluster | None]] = [from_tf_config]


def parse_tf_config(text: str) -> Cluster:
    """Reads and checks TF_CONFIG. Raises ClusterError with a sentence that names the field and the fix."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"TF_CONFIG is not valid JSON ({error.msg} at character {error.pos}): check its quotes and brackets.") from None
    if not isinstance(config, dict):
        raise ClusterError(f"TF_CONFIG must be an object with \"cluster\" and \"task\", not {type(config).__name__}.")
    spec = _check_spec(config.get("cluster"))
    role, index = _check_task(config.get("task"), spec)
    peers = tuple(address for name in TRAINING_ROLES for address in spec.get(name, ()))
    rank = -1 if role == "evaluator" else peers.index(spec[role][index])
    return Cluster(role, index, rank, len(peers), peers, spec)


def _check_spec(spec: object) -> dict[str, list[str]]:
    if not isinstance(spec, dict) or not spec:
        raise ClusterError('TF_CONFIG has no "cluster": add {"cluster": {"worker": ["host:port", ...]}, ...}, the same on all workers.')
    seen: dict[str, str] = {}
    for role, addresses in spec.items():
        if role not in ROLES:
            raise ClusterError(f'TF_CONFIG: cluster.{role} is not a known role: use {", ".join(ROLES)}.')
        if role == "ps":
            raise ClusterError("TF_CONFIG: cluster.ps lists parameter servers, which no strategy of this version uses: remove it.")
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ClusterError(f'TF_CONFIG: cluster.{role} must be a list of "host:port" texts, not {json.dumps(addresses)}.')
        for index, address in enumerate(addresses):
            _check_address(f"cluster.{role}[{index}]", address)
            if address in seen:
                raise ClusterError(f"TF_CONFIG: {address} stands at both {seen[address]} and cluster.{role}[{index}]: give each process an address of its own.")
            seen[address] = f"cluster.{role}[{index}]"
    if len(spec.get("chief", ())) > 1:
        raise ClusterError(f"TF_CONFIG: cluster.chief lists {len(spec['chief'])} chiefs: keep one, and list the others under cluster.worker.")
    if not any(spec.get(role) for role in TRAINING_ROLES):
        raise ClusterError("TF_CONFIG: cluster lists no chief and no worker: add cluster.worker with at least one address.")
    return {role: list(addresses) for role, addresses in spec.items() if addresses}


def _check_address(where: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ClusterError(f'TF_CONFIG: {where} is "{address}", which has no port or no host: write host:port, for example worker-0:2222.')
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(f'TF_CONFIG: {where} is "{address}", whose port is not a number from 1 to 65535.')


def _check_task(task: object, spec: Mapping[str, list[str]]) -> tuple[str, int]:
    if not isinstance(task, dict):
        raise ClusterError('TF_CONFIG has no "task": add "task": {"type": "worker", "index": 0}, with this worker\'s own index.')
    role, index = task.get("type"), task.get("index", 0)
    if role not in ROLES:
        raise ClusterError(f"TF_CONFIG: task.type is {json.dumps(role)}: use one of {', '.join(ROLES)}.")
    if isinstance(index, str) and index.isdigit():
        index = int(index)  # templates of job systems often write numbers as texts
    if not isinstance(index, int) or isinstance(index, bool):
        raise ClusterError(f"TF_CONFIG: task.index is {json.dumps(index)}, not a whole number.")
    if role == "evaluator" and role not in spec:
        return role, index
    count = len(spec.get(role, ()))
    if not count:
        raise ClusterError(f'TF_CONFIG: task.type is "{role}", but cluster lists no {role}: add cluster.{role}, or use another type.')
    if not 0 <= index < count:
        raise ClusterError(f"TF_CONFIG: task.index is {index}, but cluster.{role} has {count} entr{'y' if count == 1 else 'ies'}: use 0 to {count - 1}.")
    return role, index
