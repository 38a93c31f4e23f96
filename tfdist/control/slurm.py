"""Makes a Cluster from Slurm's environment variables, without a wrapper script and without a call to any server.

Applies inside a step (`srun`) with several tasks. The step's node list and tasks per node give each task's host. The
port is a function of the job and step, plus the rank, so that jobs that share a node rarely collide; TFDIST_PORT, if
set, is the first port. A shell inside an allocation, a batch script, and a step of one task each run as one worker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError
from tfdist.control.ranks import environment_number

_FIRST_PORT, _PORTS, _STRIDE = 10_000, 20_000, 64  # below Linux's ephemeral ports (from 32768)


def from_slurm(environ: Mapping[str, str]) -> Cluster | None:
    """Makes the Cluster of a Slurm step with several tasks from its variables; None outside of one.

    Raises ClusterError.
    """
    needed = (
        "SLURM_JOB_ID",
        "SLURM_PROCID",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
    )
    if not all(environ.get(name) for name in needed) or environ["SLURM_STEP_NUM_TASKS"] == "1":
        return None
    size, rank, job = (
        environment_number(environ, name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID")
    )
    nodes = expand_hostlist(environ["SLURM_STEP_NODELIST"])
    counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    if len(nodes) != len(counts) or sum(counts) != size or not rank < size:
        raise ClusterError(
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']},"
            f" SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']}, SLURM_STEP_NUM_TASKS={size} and"
            f" SLURM_PROCID={rank} contradict each other: start the workers with srun, or set TF_CONFIG."
        )
    hosts = _distribute(nodes, counts, environ.get("SLURM_DISTRIBUTION", "block"))
    node = environ.get("SLURMD_NODENAME", hosts[rank])
    if node != hosts[rank]:
        raise ClusterError(
            f"SLURM_PROCID={rank} is on {node}, where {hosts[rank]} was expected: start the workers with srun"
            " --distribution=block."
        )
    step = int(environ["SLURM_STEP_ID"]) if environ.get("SLURM_STEP_ID", "").isdecimal() else 0
    base = (
        environment_number(environ, "TFDIST_PORT")
        if environ.get("TFDIST_PORT")
        else _FIRST_PORT + _STRIDE * (job + 97 * step) % _PORTS
    )
    if base + size > 65536:
        raise ClusterError(
            f"TFDIST_PORT={base} leaves no ports for {size} workers: give one of at most {65536 - size}."
        )
    return Cluster.of_workers([f"{host}:{base + index}" for index, host in enumerate(hosts)], rank)


def _distribute(nodes: list[str], counts: list[int], distribution: str) -> list[str]:
    """Returns the host of each rank. block: the ranks of a node are consecutive; cyclic: round-robin over the nodes."""
    kind = distribution.lower().partition(":")[0].partition(",")[0]
    if kind in ("block", "*", "unknown", ""):
        return [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    if kind == "cyclic":
        return [node for turn in range(max(counts)) for node, count in zip(nodes, counts, strict=True) if turn < count]
    raise ClusterError(
        f"SLURM_DISTRIBUTION={distribution} is neither block nor cyclic: start the workers with srun"
        " --distribution=block."
    )


def expand_counts(text: str) -> list[int]:
    """Expands Slurm's counts per node: "2(x3),1" -> [2, 2, 2, 1]. Raises ClusterError."""
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", piece)
        if not match:
            raise ClusterError(f"SLURM_STEP_TASKS_PER_NODE={text} cannot be read: set TF_CONFIG.")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def expand_hostlist(text: str) -> list[str]:
    """Expands Slurm's host list: "gpu[08-10,3],a[1-2]b[1-2],login" -> gpu08 gpu09 gpu10 gpu3 a1b1 a1b2 a2b1 a2b2 login.

    Leading zeros give the width. Raises ClusterError if the text is not a host list.
    """
    hosts = [host for piece in _split(text) for host in _expand(piece, text)]
    if not all(re.fullmatch(r"[\w.-]+", host) for host in hosts):
        raise _bad_hostlist(text)
    return hosts


def _split(text: str) -> list[str]:
    """Splits at commas that are not inside brackets."""
    pieces = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not text or ",".join(pieces) != text:
        raise _bad_hostlist(text)
    return pieces


def _expand(piece: str, text: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", piece)
    if not match:
        return [piece]
    head, ranges, tail = match.groups()
    numbers: list[str] = []
    for part in ranges.split(","):
        ends = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if not ends or int(ends.group(2) or ends.group(1)) < int(ends.group(1)):
            raise _bad_hostlist(text)
        first, last = ends.group(1), ends.group(2) or ends.group(1)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [f"{head}{number}{rest}" for number in numbers for rest in _expand(tail, text)]


def _bad_hostlist(text: str) -> ClusterError:
    return ClusterError(f"SLURM_STEP_NODELIST={text} cannot be read as a list of hosts: set TF_CONFIG.")
