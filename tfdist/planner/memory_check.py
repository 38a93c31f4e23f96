"""Checks before a run starts whether the state that each worker must hold fits the memory that it may use. Otherwise
the kernel, or a failed allocation in the middle of a step, would report it, without saying how to fix it.

Only what is certain counts: parameters, gradients and optimizer state (memory.py), and memory that the process already
uses; not activations, buffers, or data in transit. So a run that is refused here could not have worked, and a run that
passes may still need more memory than there is.

The check runs twice: before TensorFlow is imported, for models that have a formula; and for every model once it is
built, when its variables and the devices are known, but its optimizer state does not exist yet. Units: bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.config import Config
from tfdist.config.optimizers import ELEMENTWISE_OPTIMIZERS
from tfdist.config.strategies import strategy_or_undecided
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import MemoryShortError
from tfdist.control.memory_amounts import MACHINE, PROCESS, amounts
from tfdist.planner import formulas, shapes
from tfdist.planner.layout import Layout
from tfdist.planner.memory import KERAS, States, shard_states, slot_elements
from tfdist.planner.plan_text import gigabytes
from tfdist.planner.shapes import Weight
from tfdist.runtime.mesh import Mesh

_LIMITS = ((resource.RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)"), (resource.RLIMIT_AS, "RLIMIT_AS (ulimit -v)"))
_NO_LIMIT = 2**60  # version 1 cgroups show about 2^63 if there is no limit


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that a worker may use.

    sharers: number of workers that share it; in_use: already used by this worker.
    """

    size: float
    source: str
    sharers: int = 1
    in_use: float = 0.0

    @property
    def left(self) -> float:
        """The bytes left for the state of one worker."""
        return self.size / self.sharers - self.in_use


@dataclass(frozen=True)
class MemoryLimits:
    """The limits for tensors on the training device, and for those that --offload keeps in host memory."""

    device: tuple[MemoryLimit, ...]
    host: tuple[MemoryLimit, ...]


def check_by_formula(config: Config, cluster: Cluster) -> None:
    """Checks before anything is imported. Passes if model, samples or device cannot be known yet.

    Raises MemoryShortError.
    """
    if Path("/dev/nvidiactl").exists():  # only TensorFlow knows whether it will use the GPUs
        return
    model = None
    with contextlib.suppress(ValueError, TypeError, KeyError):  # the run itself reports wrong options
        sample = shapes.sample_of(config)
        model = formulas.shape_of(config, sample) if sample else None
    if model is None:
        return
    layout = Layout(data=cluster.size)
    if strategy_or_undecided(config.strategy.strategy).mesh:
        layout = Layout.on(Mesh.parse(config.parallel.mesh, cluster.size), zero=config.parallel.zero)
    limits = host_limits(cluster)
    check(
        config,
        layout,
        [(weight, part.repeat) for part in model.parts for weight in part.weights],
        MemoryLimits(limits, limits),
    )


def check(config: Config, layout: Layout, weights: Sequence[tuple[Weight, int]], limits: MemoryLimits) -> None:
    """Raises MemoryShortError if what a worker must hold of `weights` (pairs of weight and number of repetitions)
    exceeds one of `limits`.
    """
    states = least_states(config, layout, weights)
    moved = states.optimizer + states.master if config.parallel.offload == "optimizer" else 0.0
    for what, need, places in (
        (
            "parameters, gradients and optimizer state" if not moved else "parameters and gradients",
            states.total - moved,
            limits.device,
        ),
        ("optimizer state", moved, limits.host),
    ):
        for limit in places:
            if need > limit.left:
                raise MemoryShortError(_sentence(config, layout, weights, f"{what} of", need, limit))


def least_states(config: Config, layout: Layout, weights: Iterable[tuple[Weight, int]]) -> States:
    """Returns the least state that each worker (with a pipeline: some worker) holds in the middle of a step."""
    elements = dense = slots = 0.0  # as many of float32
    for weight, times in weights:
        each = times * weight.element_bytes / KERAS.parameter / layout.divisor(weight.axis) / layout.pipe
        elements += each * weight.elements
        slots += each * slot_elements(config.optimizer, weight)
        # A gradient of rows of a table may be slices, which plain SGD applies as they are.
        is_sliced = config.optimizer.optimizer == "sgd" and "embedding" in weight.path.lower()
        dense += 0 if is_sliced else each * weight.elements
    states = shard_states(elements, slots, KERAS, layout.zero, layout.replicas)
    if elements:
        states = dataclasses.replace(states, gradients=states.gradients * dense / elements)
    if layout.zero == 1 and config.batch.accumulation <= 1:  # a gradient may be scattered before the next one exists
        states = dataclasses.replace(states, gradients=states.gradients / layout.replicas)
    return states


def _sentence(
    config: Config, layout: Layout, weights: Sequence[tuple[Weight, int]], what: str, need: float, limit: MemoryLimit
) -> str:
    count = sum(times * weight.elements for weight, times in weights)
    used = f", beside {gigabytes(limit.in_use)} in use already" if limit.in_use else ""
    shared = f" for {limit.sharers} workers" if limit.sharers > 1 else ""
    return (
        f"--model={config.model.model} does not fit: the {what} {count:,} parameters take {gigabytes(need)} on each"
        f" worker with --optimizer={config.optimizer.optimizer} and --zero={layout.zero}{used}, but {limit.source}"
        f" gives {gigabytes(limit.size)}{shared}: {_cure(config, layout, weights, limit)}."
    )


def _cure(config: Config, layout: Layout, weights: Sequence[tuple[Weight, int]], limit: MemoryLimit) -> str:
    """Returns the smallest change that would make it fit."""
    mesh = "" if strategy_or_undecided(config.strategy.strategy).mesh else "--strategy=mesh "
    if config.optimizer.optimizer not in ELEMENTWISE_OPTIMIZERS:  # --zero cannot divide their state
        return (
            "use an optimizer that --zero can shard (sgd, momentum, adam, adamw, lion) with --strategy=mesh --zero=3 on"
            " more workers, or a smaller model"
        )
    for zero in range(layout.zero + 1, 4):
        total = least_states(config, dataclasses.replace(layout, zero=zero), weights).total
        if layout.replicas > 1 and total <= limit.left:
            return f"use {mesh}--zero={zero}, with which these take {gigabytes(total)}"
    whole = least_states(config, dataclasses.replace(layout, zero=3, data=1, expert=1), weights).total
    if limit.left <= 0 or limit.sharers > 1:
        return "use a machine with more memory, or a smaller model"
    return (
        f"use {mesh}--zero=3 on at least {math.ceil(whole / limit.left) * layout.pipe * layout.model} workers, or a"
        " smaller model"
    )


# -- how much memory there is ------------------------------------------------------------------------------------------


def find_limits(cluster: Cluster, gpus: bool) -> MemoryLimits:
    """Returns the limits of a process whose runtime has started, and which trains on GPUs if it has any."""
    host = host_limits(cluster, anonymous_bytes())
    return MemoryLimits(gpu_limits() if gpus else host, host)


def host_limits(cluster: Cluster, in_use: float = 0.0) -> tuple[MemoryLimit, ...]:
    """Returns the limits of this process, of its cgroups, and of the machine with its swap space."""
    found = [
        MemoryLimit(limit, source, in_use=in_use)
        for kind, source in _LIMITS
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    memory = amounts(MACHINE)
    machine, swap = memory.get("MemTotal", 0.0), memory.get("SwapTotal", 0.0)
    limits = [limit for path in _cgroup_files() if (limit := _cgroup_limit(path, swap)) < _NO_LIMIT]
    if limits:  # other workers may share the cgroup, which cannot be seen here
        found.append(MemoryLimit(min(limits), "the memory limit of its cgroup", in_use=in_use))
    if machine:
        found.append(MemoryLimit(machine + swap, "the machine's memory", cluster.local_size, in_use))
    return tuple(found)


def gpu_limits() -> tuple[MemoryLimit, ...]:
    """Returns the memory of this machine's largest GPU; nothing if the driver does not tell."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return (
            MemoryLimit(
                max(float(line) for line in listing.stdout.split("\n") if line.strip()) * 2**20, "the GPU's memory"
            ),
        )
    return ()


def anonymous_bytes() -> float:
    """Returns the memory of this process that is not a copy of a file."""
    return amounts(PROCESS).get("RssAnon", 0.0)


def _cgroup_files() -> list[Path]:
    """Returns the limit files of this process's cgroup and its ancestors. A container may see its own as the root."""
    files = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, name = (
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
                if controllers == "memory"
                else ("/sys/fs/cgroup", "memory.max")
            )
            if controllers in ("", "memory"):
                here = Path(root + path)
                files += [folder / name for folder in (here, *here.parents) if folder.is_relative_to(root)]
    return files


def _cgroup_limit(path: Path, swap: float) -> float:
    """Returns the limit in a cgroup's file plus the swap space that the cgroup may use; infinite if unlimited."""
    try:
        limit = float(path.read_text().replace("max", "inf"))
    except (OSError, ValueError):
        return math.inf
    if swap and path.name == "memory.max":
        with contextlib.suppress(OSError, ValueError):
            swap = min(swap, float(path.with_name("memory.swap.max").read_text().replace("max", "inf")))
    return limit + swap
