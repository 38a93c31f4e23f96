"""Divides the cores and GPUs of a machine among its N workers."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tfdist.control.amounts_text import counted
from tfdist.control.exit_codes import ConfigError, StartupError

_DRIVER_SECONDS = 60.0  # a driver that is not kept loaded needs seconds for each GPU


def divide_cores(workers: int) -> list[set[int]]:
    """Returns the cores of each worker: equal parts. With fewer cores than workers, each gets one core, round-robin.

    The hardware threads of a core, and the cores of a socket, stay together.
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
    """Returns for each worker the environment variables that give it its GPUs, and a warning.

    The last entry is the evaluator's (a GPU that is left over, or none). With fewer GPUs than workers, nothing is
    divided; if there are any GPUs, the warning is then not empty. Raises ConfigError if `per_worker` needs too many.
    """
    share = per_worker or len(gpus) // workers
    if share * workers > len(gpus):
        raise ConfigError(
            f"--gpus_per_worker={per_worker} with --workers={workers} needs {share * workers} GPUs, but {len(gpus)} are"
            " visible: lower one of the two."
        )
    if not share:
        return [{}] * (workers + 1), (
            (
                f"{workers} workers share {counted(len(gpus), 'GPU')}, and each will try to use all of the memory: use"
                f" --workers={len(gpus)} or fewer."
            )
            if gpus
            else ""
        )
    parts = [gpus[rank * share : (rank + 1) * share] for rank in range(workers)] + [
        gpus[workers * share :][:1] or ["-1"]
    ]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts], ""


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the GPUs that may be used, as in CUDA_VISIBLE_DEVICES; [] if there are none.

    In one process always the same: a GPU that is lost later keeps its place, so that each worker keeps its own. Raises
    StartupError if the driver cannot be asked.
    """
    if "CUDA_VISIBLE_DEVICES" in environment:
        listed = (gpu.strip() for gpu in environment["CUDA_VISIBLE_DEVICES"].split(","))
        return list(itertools.takewhile(lambda gpu: gpu not in ("", "-1"), listed))  # as CUDA: the first such ends it
    program = shutil.which("nvidia-smi")
    return list(_listed_by(program)) if program else []


@cache
def _listed_by(nvidia_smi: str) -> tuple[str, ...]:
    try:
        listing = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=_DRIVER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(
            f"The GPUs cannot be listed ({error}): name them in CUDA_VISIBLE_DEVICES (-1 for none), or repair the"
            " driver."
        ) from None
    # By identity, not by index: nvidia-smi orders GPUs by bus address, CUDA by speed.
    return tuple(re.findall(r"^GPU \d+: .*\(UUID: (GPU-[0-9a-f-]+)\)", listing.stdout, re.MULTILINE))
