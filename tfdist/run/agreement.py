"""What all workers must agree on, and how they find out: collectives on small host values."""

from __future__ import annotations

import uuid
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tfdist.artifacts.status import read_status
from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import texts_of_all
from tfdist.telemetry.jsonl import next_attempt

# Options that do not change what a step computes, but which step is the last and what all workers do together between
# steps: a worker with others would wait for ever for what its peers do not do.
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
    # Which samples of a global batch each takes, and in how many parts.
    "micro_batch",
    "accumulation",
    "eval_batch",
)


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run: one `run_id` over all restarts and ranks; `attempt`: how often it was started before."""

    run_id: str
    attempt: int


def identify(runtime: Runtime, folder: Path) -> RunIdentity:
    """The identity of the run in `folder`, or a new one. A collective."""
    identity = {}
    if runtime.rank == 0:
        run_id = read_status(folder).get("run_id") or uuid.uuid4().hex[:12]
        identity = asdict(RunIdentity(run_id, next_attempt(folder / "logs" / "rank-0.jsonl")))
    return RunIdentity(**runtime.broadcast_object(identity))


def must_agree(runtime: Runtime, what: str, identity: str, fix: str) -> None:
    """Raises ConfigError on all workers unless `identity` (of the same length everywhere) is the same on all."""
    found = texts_of_all(runtime, identity, len(identity))
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ConfigError(f"Rank {rank} has {what} {other}, rank 0 has {found[0]}: {fix}.")


def must_go_together(runtime: Runtime, config: Config) -> None:
    """Raises ConfigError on all workers unless they will do the same at the same steps. A collective."""
    values = config.flat()
    values["backup_dir"] = bool(values["backup_dir"])  # where it is, the chief alone says
    sums = np.array([zlib.crc32(repr(values[name]).encode()) for name in _TOGETHER], np.int64)
    rows = runtime.all_gather(sums)
    for rank, row in enumerate(rows):
        if (different := row != rows[0]).any():
            raise ConfigError(
                f"Rank {rank} has another --{_TOGETHER[int(different.argmax())]} than rank 0: give all workers the same"
                " flags."
            )
