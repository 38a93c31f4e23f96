"""Reads, checks and writes TF_CONFIG. The check comes before TensorFlow sees any of it.

It is `{"cluster": {"chief": ["host:port"], "worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}`.
Without a "chief", the first worker is the chief. An "evaluator" takes no part in training and need not be listed. "ps"
(parameter servers) requires a "chief" and is for --strategy=parameter_server: the chief then only coordinates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfdist.control.cluster import ROLES, TRAINING_ROLES, Cluster
from tfdist.control.exit_codes import ClusterError


class Task(NamedTuple):
    """Role and index of one process in a cluster."""

    role: str
    index: int  # among the processes of its role


def from_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    """Makes a Cluster from TF_CONFIG; None if that is not set or empty."""
    text = environ.get("TF_CONFIG")
    return None if _is_empty(text) else parse_tf_config(text)


def _is_empty(text: str | None) -> bool:
    return text is None or text.strip() in ("", "{}")


def parse_tf_config(text: str | None) -> Cluster:
    """Reads and checks TF_CONFIG; a single process if there is none.

    Raises ClusterError with a sentence that names the field and the fix.
    """
    if text is None or _is_empty(text):
        return Cluster()
    try:
        config = json.loads(text, object_pairs_hook=_no_repeated_keys)
    except (ValueError, RecursionError) as error:  # also an endless number, or endless brackets
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(
            f"TF_CONFIG is not valid JSON ({str(error).replace('(char ', '(character ')}, near"
            f" {text[max(0, getattr(error, 'pos', 0) - 10) :][:20]!r}): check its quotes and brackets."
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(
            f'TF_CONFIG must be an object with "cluster" and "task", not {type(config).__name__}: write'
            ' {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}, or unset it.'
        )
    spec = _check_spec(config.get("cluster"))
    task = _check_task(config.get("task"), spec)
    peers = tuple(address for name in TRAINING_ROLES for address in spec.get(name, ()))
    rank = peers.index(spec[task.role][task.index]) if task.role in TRAINING_ROLES else -1
    return Cluster(task.role, task.index, rank, len(peers), peers, spec)


def _no_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Raises ClusterError for repeated keys: Python's JSON reader would keep only the last one, and lose workers."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ClusterError(f'TF_CONFIG has "{key}" twice in one object: merge the two.')
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
                f'TF_CONFIG: cluster.{role} must be a list of "host:port" strings, not {json.dumps(addresses)}.'
            )
        for index, address in enumerate(addresses):
            check_address(f"TF_CONFIG: cluster.{role}[{index}]", address)
            if address in seen:
                raise ClusterError(
                    f"TF_CONFIG: {address} is listed at both {seen[address]} and cluster.{role}[{index}]: give each"
                    " process its own address."
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


def check_address(where: str, address: str) -> None:
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


def _check_task(task: object, spec: Mapping[str, list[str]]) -> Task:
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
        index = int(index)  # templates of job systems often write numbers as strings
    if not isinstance(index, int) or isinstance(index, bool):
        raise ClusterError(
            f"TF_CONFIG: task.index is {json.dumps(index)}, not a whole number: use 0 to {max(count - 1, 0)}."
        )
    if role == "evaluator" and not count:
        return Task(role, index)
    if not count:
        raise ClusterError(
            f'TF_CONFIG: task.type is "{role}", but cluster lists no {role}: add cluster.{role}, or use another type.'
        )
    if not 0 <= index < count:
        raise ClusterError(
            f"TF_CONFIG: task.index is {index}, but cluster.{role} has {count} entr{'y' if count == 1 else 'ies'}: use"
            f" 0 to {count - 1}."
        )
    return Task(role, index)


def worker_environment(
    addresses: Sequence[str], rank: int | None, threads: int, environment: Mapping[str, str], servers: int = 0
) -> dict[str, str]:
    """Returns the environment of one of the local workers at `addresses`, or (rank None) of an evaluator beside them.

    A single worker gets a TF_CONFIG, too: else it would take what surrounds the launcher (a Slurm step, a pod) for its
    cluster. `threads`: 0 does not set the number of threads; variables already set are kept. With `servers`, the
    addresses belong to the chief, the workers and, last, that number of parameter servers.
    """
    tasks = local_tasks(len(addresses), servers)
    spec: dict[str, list[str]] = {}
    for task, address in zip(tasks, addresses, strict=True):
        spec.setdefault(task.role, []).append(address)
    own_task = Task("evaluator", 0) if rank is None else tasks[rank]
    result = {
        "TF_CONFIG": json.dumps({"cluster": spec, "task": {"type": own_task.role, "index": own_task.index}}),
        "TF_GRPC_REUSE_PORT": "true",
        "PYTHONUNBUFFERED": "1",
    }
    if threads:
        result |= {
            name: environment.get(name, str(threads))
            for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        }
    return result


def local_tasks(count: int, servers: int) -> list[Task]:
    """Returns the tasks of a local job in rank order: workers, or a chief, workers and `servers` parameter servers."""
    if not servers:
        return [Task("worker", index) for index in range(count)]
    return [
        Task("chief", 0),
        *(Task("worker", index) for index in range(count - 1 - servers)),
        *(Task("ps", index) for index in range(servers)),
    ]
