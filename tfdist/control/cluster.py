"""Who is in the cluster: the environment of a process -> Cluster. Checked here, before TensorFlow sees any of it.
And back: what each of N workers on one machine is given (cores, threads, GPUs, TF_CONFIG).

TF_CONFIG is `{"cluster": {"chief": ["host:port"], "worker": ["host:port", ...]}, "task": {"type": "worker", "index":
0}}`. Without a "chief" the first worker is the chief. An "evaluator" takes no part in training and need not be listed.
With "ps" (parameter servers), which need a "chief", --strategy=parameter_server is meant: the chief then only
coordinates.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdist.control.exit_codes import ClusterError, ConfigError
from tfdist.control.resolvers import kubernetes_addresses, slurm_addresses
from tfdist.control.token import Secret

TRAINING_ROLES = ("chief", "worker")  # in rank order
ROLES = (*TRAINING_ROLES, "ps", "evaluator")


@dataclass(frozen=True)
class Cluster:
    """The place of this process among the others."""

    role: str = "worker"
    index: int = 0
    rank: int = 0  # among the training workers; 0 is the chief, an evaluator and a parameter server have -1
    size: int = 1  # training workers
    peers: tuple[str, ...] = ()  # addresses of the training workers in rank order; empty if there is only this process
    spec: Mapping[str, list[str]] = field(default_factory=dict)  # role -> addresses
    started_by: str = ""  # a launcher that tells ranks but no addresses (control/horovod_env.py)
    told_local_rank: int = 0  # by that launcher
    secret: Secret = field(default=Secret(), compare=False, repr=False)  # by which its processes know each other
    is_broken: Callable[[], bool] | None = field(
        default=None, compare=False, repr=False
    )  # of a group after which this process may join others (membership.py): whether one of it has died

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    @property
    def address(self) -> str:
        """host:port of this training worker; "" if it is alone, or none."""
        return self.peers[self.rank] if 0 <= self.rank < len(self.peers) else ""

    @property
    def local_rank(self) -> int:
        """The rank of this process among the training workers of its machine, as far as their addresses tell."""
        hosts = [address.rpartition(":")[0] for address in self.peers]
        return hosts[: self.rank].count(hosts[self.rank]) if 0 <= self.rank < len(hosts) else self.told_local_rank

    @property
    def local_size(self) -> int:
        """How many training workers are on its machine, itself included, as far as their addresses tell."""
        hosts = [address.rpartition(":")[0] for address in self.peers]
        return hosts.count(hosts[self.rank]) if 0 <= self.rank < len(hosts) else 1

    def name(self, rank: int) -> str:
        """How messages name a training worker: "worker 1 (rank 2, host:port)"."""
        if not self.peers:
            return f"rank {rank}"
        role, index = self._role_and_index(rank)
        return f"{role} {index} (rank {rank}, {self.peers[rank]})"

    def task(self, rank: int) -> str:
        """How TensorFlow names a rank."""
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
        """name -> address of every process of these roles: {"ps 0 (host:port)": "host:port"}."""
        return {
            f"{role} {index} ({address})": address
            for role in roles
            for index, address in enumerate(self.spec.get(role, ()))
        }

    def tf_config(self) -> str:
        """TF_CONFIG for TensorFlow: the training workers only, since it waits for every process that it lists."""
        spec = {role: list(self.spec[role]) for role in TRAINING_ROLES if role in self.spec}
        return json.dumps({"cluster": spec, "task": {"type": self.role, "index": self.index}})

    def describe(self) -> str:
        """The cluster in one line, for logs."""
        if self.role == "evaluator":
            return f"evaluator beside {self.size} worker{'s' if self.size > 1 else ''}"
        if self.started_by:
            return f"rank {self.rank} of {self.size} workers, started by {self.started_by}"
        if not self.peers:
            return "one worker (no TF_CONFIG)"
        if "ps" in self.spec:
            workers, servers = len(self.spec.get("worker", ())), len(self.spec["ps"])
            return (
                f"{self.role} {self.index} of a chief, {workers} worker{'s' if workers > 1 else ''} and {servers}"
                f" parameter server{'s' if servers > 1 else ''}"
            )
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
    text = environ.get("TF_CONFIG")
    return None if _is_empty(text) else parse_tf_config(text)


def _from_horovod(environ: Mapping[str, str]) -> Cluster | None:
    from tfdist.control.horovod_env import from_horovod  # which needs Cluster

    return from_horovod(environ)


def from_slurm(environ: Mapping[str, str]) -> Cluster | None:
    """From the variables of a Slurm step with several tasks; None outside of one."""
    return _from_addresses(slurm_addresses(environ))


def from_kubernetes(environ: Mapping[str, str]) -> Cluster | None:
    """From the variables of an Indexed Job made by `tfdist.jobs`; None elsewhere."""
    return _from_addresses(kubernetes_addresses(environ))


def _from_addresses(found: tuple[list[str], int] | None) -> Cluster | None:
    if found is None:
        return None
    addresses, rank = found
    for address in addresses:
        _check_address("The address of a worker, by TFDIST_ADDRESS or the job system,", address)
    return Cluster("worker", rank, rank, len(addresses), tuple(addresses), {"worker": addresses})


# Tried in this order; the first that answers wins: what the user set, then launchers, then engines around them. A new
# kind of cluster is one function and an entry here.
RESOLVERS: list[Callable[[Mapping[str, str]], Cluster | None]] = [
    from_tf_config,
    _from_horovod,
    from_slurm,
    from_kubernetes,
]


def _is_empty(text: str | None) -> bool:
    return text is None or text.strip() in ("", "{}")


def parse_tf_config(text: str | None) -> Cluster:
    """Reads and checks TF_CONFIG; alone if there is none.

    Raises ClusterError with a sentence that names the field and the fix.
    """
    if _is_empty(text):
        return Cluster()
    try:
        config = json.loads(text, object_pairs_hook=_no_repeated_keys)
    except (ValueError, RecursionError) as error:  # also a number without end, or brackets
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(
            f"TF_CONFIG is not valid JSON ({str(error).replace('(char ', '(character ')}, near"
            f" {text[max(0, getattr(error, 'pos', 0) - 10) :][:20]!r}): check its quotes and brackets."
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(f'TF_CONFIG must be an object with "cluster" and "task", not {type(config).__name__}.')
    spec = _check_spec(config.get("cluster"))
    role, index = _check_task(config.get("task"), spec)
    peers = tuple(address for name in TRAINING_ROLES for address in spec.get(name, ()))
    rank = -1 if role in ("evaluator", "ps") else peers.index(spec[role][index])
    return Cluster(role, index, rank, len(peers), peers, spec)


def _no_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Python's JSON reader would silently keep only the last of them, and so lose workers."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ClusterError(f'TF_CONFIG holds "{key}" twice in one object: join the two.')
    return dict(pairs)


def _check_spec(spec: object) -> dict[str, list[str]]:
    if not isinstance(spec, dict) or not spec:
        raise ClusterError(
            'TF_CONFIG has no "cluster": add {"cluster": {"worker": ["host:port", ...]}, ...}, the same on all workers.'
        )
    seen: dict[str, str] = {}
    for role, addresses in spec.items():
        if role not in ROLES:
            raise ClusterError(f"TF_CONFIG: cluster.{role} is not a known role: use {', '.join(ROLES)}.")
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ClusterError(
                f'TF_CONFIG: cluster.{role} must be a list of "host:port" texts, not {json.dumps(addresses)}.'
            )
        for index, address in enumerate(addresses):
            _check_address(f"TF_CONFIG: cluster.{role}[{index}]", address)
            if address in seen:
                raise ClusterError(
                    f"TF_CONFIG: {address} stands at both {seen[address]} and cluster.{role}[{index}]: give each"
                    " process an address of its own."
                )
            seen[address] = f"cluster.{role}[{index}]"
    if len(spec.get("chief", ())) > 1:
        raise ClusterError(
            f"TF_CONFIG: cluster.chief lists {len(spec['chief'])} chiefs: keep one, and list the others under"
            " cluster.worker."
        )
    if not any(spec.get(role) for role in TRAINING_ROLES):
        raise ClusterError(
            "TF_CONFIG: cluster lists no chief and no worker: add cluster.worker with at least one address."
        )
    return {role: list(addresses) for role, addresses in spec.items() if addresses}


def _check_address(where: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not colon or not host or bare_ipv6 or any(char.isspace() or char == "/" for char in host):
        raise ClusterError(
            f'{where} is "{address}", which is not host:port: write for example worker-0:2222 or [::1]:2222.'
        )
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ClusterError(
            f'{where} is "{address}", whose port is not a number from 1 to 65535: write for example {host}:2222.'
        )


def _check_task(task: object, spec: Mapping[str, list[str]]) -> tuple[str, int]:
    if not isinstance(task, dict):
        raise ClusterError(
            'TF_CONFIG has no "task": add "task": {"type": "worker", "index": 0}, with this worker\'s own index.'
        )
    role = task.get("type")
    if role not in ROLES:
        missing = "" if "type" in task else " (it is missing)"
        raise ClusterError(f"TF_CONFIG: task.type is {json.dumps(role)}{missing}: use one of {', '.join(ROLES)}.")
    if role == "ps" and not (spec.get("chief") and spec.get("worker")):
        raise ClusterError(
            'TF_CONFIG: task.type is "ps", but cluster lists no chief or no worker: a parameter server serves a chief,'
            " which coordinates, and at least one worker."
        )
    count = len(spec.get(role, ()))
    if "index" not in task and count > 1:
        raise ClusterError(f"TF_CONFIG: task.index is missing: give each {role} its own, 0 to {count - 1}.")
    index = task.get("index", 0)
    if isinstance(index, str) and re.fullmatch("[0-9]{1,9}", index):
        index = int(index)  # templates of job systems often write numbers as texts
    if not isinstance(index, int) or isinstance(index, bool):
        raise ClusterError(
            f"TF_CONFIG: task.index is {json.dumps(index)}, not a whole number: use 0 to {max(count - 1, 0)}."
        )
    if role == "evaluator" and not count:
        return role, index
    if not count:
        raise ClusterError(
            f'TF_CONFIG: task.type is "{role}", but cluster lists no {role}: add cluster.{role}, or use another type.'
        )
    if not 0 <= index < count:
        raise ClusterError(
            f"TF_CONFIG: task.index is {index}, but cluster.{role} has {count} entr{'y' if count == 1 else 'ies'}: use"
            f" 0 to {count - 1}."
        )
    return role, index


def worker_environment(
    addresses: Sequence[str], rank: int | None, threads: int, environment: Mapping[str, str], servers: int = 0
) -> dict[str, str]:
    """What one of the local workers at `addresses` is told, or (rank None) an evaluator beside them.

    A worker that is alone gets no TF_CONFIG. `threads`: 0 leaves their number alone, as does a variable that is set.
    With `servers` the addresses are those of the chief, the workers and, last, as many parameter servers.
    """
    result = {"TF_GRPC_REUSE_PORT": "true", "PYTHONUNBUFFERED": "1"}
    if rank is None or len(addresses) > 1:
        addresses, tasks = list(addresses), local_tasks(len(addresses), servers)
        spec: dict[str, list[str]] = {}
        for (role, _), address in zip(tasks, addresses, strict=True):
            spec.setdefault(role, []).append(address)
        role, index = ("evaluator", 0) if rank is None else tasks[rank]
        result["TF_CONFIG"] = json.dumps({"cluster": spec, "task": {"type": role, "index": index}})
    if threads:
        result |= {
            name: environment.get(name, str(threads))
            for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        }
    return result


def local_tasks(count: int, servers: int = 0) -> list[tuple[str, int]]:
    """(role, index) of each process of a local job: all workers, or a chief, workers and `servers` parameter
    servers.
    """
    if not servers:
        return [("worker", index) for index in range(count)]
    return [
        ("chief", 0),
        *(("worker", index) for index in range(count - 1 - servers)),
        *(("ps", index) for index in range(servers)),
    ]


def divide_cores(workers: int) -> list[set[int]]:
    """The cores of each worker: equal parts; with fewer cores than workers, one core each, in turn.

    A core's hardware threads, and a socket's cores, stay together.
    """
    cores = sorted(
        os.sched_getaffinity(0), key=lambda cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id"), cpu)
    )
    share = len(cores) // workers
    return [
        set(cores[rank * share : (rank + 1) * share]) if share else {cores[rank % len(cores)]}
        for rank in range(workers)
    ]


def _topology(cpu: int, name: str) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{name}").read_text())
    except (OSError, ValueError):
        return 0


def divide_gpus(gpus: Sequence[str], workers: int, per_worker: int = 0) -> tuple[list[dict[str, str]], str]:
    """The environment that gives each worker its GPUs, then that of the evaluator (a GPU that is left over, or none).

    With fewer GPUs than workers nothing is divided, and a warning comes with it. Raises ConfigError if `per_worker` is
    more than there are.
    """
    share = per_worker or len(gpus) // workers
    if share * workers > len(gpus):
        raise ConfigError(
            f"--gpus_per_worker={per_worker} with --workers={workers} needs {share * workers} GPUs, but {len(gpus)} are"
            " visible: lower one of the two."
        )
    if not share:
        some = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
        return [{}] * (workers + 1), (
            f"{workers} workers share {some}, and each will want all of the memory: use --workers={len(gpus)} or fewer."
            if gpus
            else ""
        )
    parts = [gpus[rank * share : (rank + 1) * share] for rank in range(workers)] + [
        gpus[workers * share :][:1] or ["-1"]
    ]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts], ""


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them; [] if there are none."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [gpu.strip() for gpu in environment["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip() not in ("", "-1")]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    # By identity, not by index: nvidia-smi counts by bus address, CUDA by speed.
    return re.findall(r"^GPU \d+: .*\(UUID: (GPU-[0-9a-f-]+)\)", listing.stdout, re.MULTILINE)
