"""Before a run starts: does what each worker must hold fit the memory that it may use? Otherwise the kernel, or a
failed allocation in the middle of a step, would say so, and not how to mend it.

Only what is certain counts: parameters, gradients and optimizer state (memory.py), and what the process has in use
already; not activations, buffers, or what passes through. So a run that is refused here could not have worked, and a
run that is let through may still need more than there is.

It is asked twice: before TensorFlow is imported, of models that have a formula; and of every model once it is built,
when its variables and the devices are known, but no optimizer state is there yet. Units: bytes.
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
from tfdist.config.strategies import strategy_or_undecided
from tfdist.config.training_options import ELEMENTWISE_OPTIMIZERS
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
_NO_LIMIT = 2**60  # cgroups of version 1 write about 2^63 for none


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that a worker may use.

    `sharers`: workers for which it must do together; `in_use`: by this one, already.
    """

    size: float
    source: str
    sharers: int = 1
    in_use: float = 0.0

    @property
    def left(self) -> float:
        """The bytes that are left for the state of one worker."""
        return self.size / self.sharers - self.in_use


@dataclass(frozen=True)
class MemoryLimits:
    """The limits for tensors on the training device, and for those that --offload keeps in host memory."""

    device: tuple[MemoryLimit, ...]
    host: tuple[MemoryLimit, ...]


def check_by_formula(config: Config, cluster: Cluster) -> None:
    """The check before anything is imported; passes if model, samples or device cannot be known yet.

    Raises MemoryShortError.
    """
    if Path("/dev/nvidiactl").exists():  # whether TensorFlow will use the GPUs, it alone knows
        return
    model = None
    with contextlib.suppress(ValueError, TypeError, KeyError):  # wrong options are the run's own to explain
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
    """Raises MemoryShortError if what a worker must hold of `weights`, each there so many times, exceeds one of
    `limits`.
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
    """The states that each worker, or with a pipeline some worker, holds at least in the middle of a step."""
    weights = list(weights)
    elements = sum(times * weight.elements / layout.divisor(weight.axis) for weight, times in weights) / layout.pipe
    slots = (
        sum(times * slot_elements(config.optimizer, weight) / layout.divisor(weight.axis) for weight, times in weights)
        / layout.pipe
    )
    states = shard_states(elements, slots, KERAS, layout.zero, layout.replicas)
    if layout.zero == 1 and config.batch.accumulation <= 1:  # a gradient may be scattered before the next one is there
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
    """The least change that would make it fit."""
    mesh = "" if strategy_or_undecided(config.strategy.strategy).mesh else "--strategy=mesh "
    if config.optimizer.optimizer not in ELEMENTWISE_OPTIMIZERS:  # which --zero cannot share out
        return (
            "use an optimizer that --zero can share out (sgd, momentum, adam, adamw, lion) with --strategy=mesh"
            " --zero=3 on more workers, or a smaller model"
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


# -- how much there is -------------------------------------------------------------------------------------------------


def find_limits(cluster: Cluster, gpus: bool) -> MemoryLimits:
    """The limits of a process whose runtime has started, and which trains on GPUs if it has any."""
    host = host_limits(cluster, anonymous_bytes())
    return MemoryLimits(gpu_limits() if gpus else host, host)


def host_limits(cluster: Cluster, in_use: float = 0.0) -> tuple[MemoryLimit, ...]:
    """Limits of this process, of its cgroups, and of the machine with its swap space."""
    found = [
        MemoryLimit(limit, source, in_use=in_use)
        for kind, source in _LIMITS
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    memory = amounts(MACHINE)
    machine, swap = memory.get("MemTotal", 0.0), memory.get("SwapTotal", 0.0)
    limits = [limit for path in _cgroup_files() if (limit := _cgroup_limit(path, swap)) < _NO_LIMIT]
    if limits:  # whether other workers share it cannot be seen
        found.append(MemoryLimit(min(limits), "the memory limit of its cgroup", in_use=in_use))
    if machine:
        found.append(MemoryLimit(machine + swap, "the machine's memory", cluster.local_size, in_use))
    return tuple(found)


def gpu_limits() -> tuple[MemoryLimit, ...]:
    """The largest GPU of this machine; none if the driver does not tell."""
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
    """Memory of this process that is no copy of a file."""
    return amounts(PROCESS).get("RssAnon", 0.0)


def _cgroup_files() -> list[Path]:
    """The files of limits of this process' cgroup and of those around it. A container may see its own as the root."""
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
    """The limit in a file of a group, with the swap space that it may use; infinite if there is no limit."""
    try:
        limit = float(path.read_text().replace("max", "inf"))
    except (OSError, ValueError):
        return math.inf
    if swap and path.name == "memory.max":
        with contextlib.suppress(OSError, ValueError):
            swap = min(swap, float(path.with_name("memory.swap.max").read_text().replace("max", "inf")))
    return limit + swap
