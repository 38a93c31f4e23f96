"""Checks the limits that machine or container set for a worker: cores, memory, shared memory, open files."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from tfdist.control import memory_amounts
from tfdist.diagnosis.findings import Finding, fine, warning, wrong

_SHARED, _CGROUP = Path("/dev/shm"), Path("/sys/fs/cgroup/memory.max")
_LEAST_SHARED, _LEAST_MEMORY, _LEAST_FILES = 512 * 2**20, 2 * 2**30, 1024
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of this process. Units: bytes; None: unknown."""

    cores: int
    shared: int | None
    memory: int | None
    open_files: int
    threads: Mapping[str, int]  # environment variable -> threads that a worker will have

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Limits:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(
            len(os.sched_getaffinity(0)),
            shutil.disk_usage(_SHARED).total if _SHARED.is_dir() else None,
            _memory(),
            soft if soft != resource.RLIM_INFINITY else 10**9,
            {name: int(environment[name]) for name in _THREADS if environment.get(name, "").isdecimal()},
        )


def _memory() -> int | None:
    """Returns the available memory, or the container's limit if that is lower."""
    available = memory_amounts.amounts(memory_amounts.MACHINE).get("MemAvailable")
    try:
        allowed = int(_CGROUP.read_text())
    except (OSError, ValueError):  # no container, or the limit is "max"
        allowed = None
    amounts = [amount for amount in (available, allowed) if amount]
    return int(min(amounts)) if amounts else None


def limits(found: Limits) -> list[Finding]:
    """Returns the findings about each kind of limit."""
    return [_cores(found), _memory_finding(found), _shared(found), _files(found)]


def _cores(found: Limits) -> Finding:
    for name, threads in found.threads.items():
        if threads > found.cores:
            return warning(
                "cores",
                f"{name}={threads}, but this process may use {found.cores}: threads compete for them.",
                f"set {name}={found.cores}, or give the worker more cores (--cpus-per-task, resources.limits.cpu).",
            )
    return fine("cores", f"{found.cores}")


def _memory_finding(found: Limits) -> Finding:
    if found.memory is None:
        return fine("memory", "not reported by this system")
    said = f"{found.memory / 2**30:.1f} GiB are free"
    if found.memory < _LEAST_MEMORY:
        return warning(
            "memory",
            f"{said}; TensorFlow alone takes about 0.6 GiB a worker.",
            "end other processes, or raise the container's limit.",
        )
    return fine("memory", said)


def _shared(found: Limits) -> Finding:
    if found.shared is None:
        return warning(
            "/dev/shm", "does not exist: workers of one machine exchange data by TCP.", "mount a tmpfs at /dev/shm."
        )
    said = f"{found.shared / 2**20:,.0f} MiB"
    if found.shared < _LEAST_SHARED:
        # Docker's default is 64 MB. NCCL keeps its buffers there and fails with "unhandled system error":
        # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#shared-memory
        return wrong(
            "/dev/shm",
            f"{said}: NCCL and workers of one machine exchange data there, and fail where it is full.",
            "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm.",
        )
    return fine("/dev/shm", said)


def _files(found: Limits) -> Finding:
    if found.open_files < _LEAST_FILES:
        return warning(
            "open files",
            f"at most {found.open_files} at a time: many TFRecord files and workers need more.",
            f"ulimit -n {64 * _LEAST_FILES} before the worker is started.",
        )
    return fine("open files", f"at most {found.open_files:,}")
