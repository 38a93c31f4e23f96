"""Checks that all workers agree where they must: collective calls on small host values."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.artifacts.run_identity import run_of
from tfdist.config import Config
from tfdist.config.cluster_options import ParallelConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import texts_of_all
from tfdist.telemetry.jsonl import next_attempt

# Options that do not change what a step computes, but which step is the last, or what all workers do together between
# steps. A worker with other values would wait forever for something that its peers do not do.
_TOGETHER = (
    "steps",
    "epochs",
    "steps_per_loop",
    "log_every",
    "eval_every",
    "eval_samples",
    "on_nan",
    "max_rollbacks",
    "save_every",
    "save_final",
    "backup_every",
    "backup_dir",
    "elastic_commit_every",
    "keep_best",
    "export",
    "profile_steps",
    "phase_every",
    "jit_tune",
    "deterministic",
    # Which samples of a global batch each worker takes, and in how many parts.
    "micro_batch",
    "accumulation",
    "eval_batch",
    # How a step is compiled, and how its communication is divided.
    "jit_compile",
    "fused_batchnorm",
    "row_mixing",
    "pack_mb",
    "horovod_fusion_mb",
    "horovod_compression",
    *(each.name for each in fields(ParallelConfig)),
)


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run: `run_id` is shared by all restarts and ranks; `attempt` counts the earlier starts."""

    run_id: str
    attempt: int


def identify(runtime: Runtime, folder: Path) -> RunIdentity:
    """The identity of the run in `folder`, or a new one. A collective call."""
    identity = {}
    if runtime.rank == 0:
        run_id = run_of(folder) or uuid.uuid4().hex[:12]
        identity = asdict(RunIdentity(run_id, next_attempt(folder / "logs" / "rank-0.jsonl")))
    return RunIdentity(**runtime.broadcast_object(identity))


def check_same_identity(runtime: Runtime, config: Config) -> None:
    """Raises ConfigError on all workers unless all have the same identity (Config.identity): with different flags they
    would train different models on each other's gradients. A collective call.
    """
    found = texts_of_all(runtime, config.digest(), len(config.digest()))
    for rank, other in enumerate(found):
        if other != found[0]:
            identity = config.identity()
            _, names = _first_unlike(runtime, identity, sorted(identity))
            raise ConfigError(
                f"Rank {rank} has configuration {other}, rank 0 has {found[0]}: give all workers the same flags (rank"
                f" {runtime.rank} has {', '.join(f'--{name}={identity[name]}' for name in names) or 'its own'})."
            )


def check_same_options(runtime: Runtime, config: Config) -> None:
    """Raises ConfigError on all workers unless they will do the same at the same steps. A collective call."""
    values = config.flat()
    values["backup_dir"] = bool(values["backup_dir"])  # only the chief's value says where it is
    rank, names = _first_unlike(runtime, values, _TOGETHER)
    if names:
        raise ConfigError(
            f"Rank {rank} has a different --{names[0]} than rank 0: give all workers the same flags (rank"
            f" {runtime.rank} has {values[names[0]]!r})."
        )


def _first_unlike(runtime: Runtime, values: Mapping[str, Any], names: Sequence[str]) -> tuple[int, list[str]]:
    """Returns the first rank whose values differ from rank 0's, and the names of these values. A collective call."""
    rows = runtime.all_gather(np.array([zlib.crc32(repr(values[name]).encode()) for name in names], np.int64))
    for rank, row in enumerate(rows):
        if unlike := [name for name, same in zip(names, row == rows[0], strict=True) if not same]:
            return rank, unlike
    return 0, []
