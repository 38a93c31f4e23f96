"""The checks before the rows of a batch are divided: tries how a model and an objective depend on rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist.config import Config
from tfdist.config.strategies import strategy_or_undecided
from tfdist.control.amounts_text import counted
from tfdist.data.batch_plan import BatchPlan
from tfdist.runtime.base import Runtime
from tfdist.training.objectives import Objective
from tfdist.training.row_checks import objective_rows, row_mixing
from tfdist.training.row_checks.added_losses import found_by_the_chief
from tfdist.training.row_checks.model_probe import ROWS
from tfdist.training.row_checks.row_proof import Proofs
from tfdist.training.row_checks.sums_as_means import SumsAsMeans


def come_in_parts(config: Config, runtime: Runtime, plan: BatchPlan) -> bool:
    """Returns whether a model sees only a part of a global batch at a time."""
    slices = runtime.compute_workers if config.servers.ps_mode == "sync" else 1
    return plan.replicas * plan.accumulation * slices > 1


def check_rows(
    config: Config,
    runtime: Runtime,
    model: keras.Model,
    objective: Objective,
    plan: BatchPlan,
    batches: Callable[[int], Iterator[Any]],
) -> SumsAsMeans:
    """Returns the `SumsAsMeans` with which sums over rows that layers add count correctly if the model sees only a part
    of the rows. Raises ConfigError if an added loss is neither a sum nor a mean, if a user's model or objective mixes
    rows, or if the model needs their number where it is not known. batches: (number) -> samples (x, y, w), that many at
    a time, always the same.
    """
    _refuse_unknown_rows(config, model, plan)
    in_parts = come_in_parts(config, runtime, plan)
    proofs = Proofs(model, plan.global_batch, plan.micro_batch)

    @functools.cache
    def read() -> tuple[Any, Iterator[Any]]:
        further = batches(ROWS)
        return next(further), further

    def rows() -> Any:
        return read()[0][0]

    # Several workers that share one replica train on whole batches, but pad the last batch of an evaluation.
    if (in_parts or runtime.size > 1) and config.model.row_mixing == "refuse":
        reason = row_mixing.IN_PARTS if in_parts else row_mixing.FILLED_UP
        if ":" in config.model.model:
            row_mixing.refuse(runtime, model, rows, proofs, reason)
        if ":" in config.model.objective:
            name = config.model.objective
            objective_rows.refuse(runtime, name, objective, model, read, proofs, reason)
    return found_by_the_chief(runtime, model, rows, proofs) if in_parts else SumsAsMeans(())


def _refuse_unknown_rows(config: Config, model: keras.Model, plan: BatchPlan) -> None:
    if strategy_or_undecided(config.strategy.strategy).parameter_servers:
        row_mixing.refuse_unknown_rows(model, "as on parameter servers", "use another --strategy")
    if not plan.even:
        where = (
            f"as with --global_batch={plan.global_batch}, which is no multiple of --accumulation={plan.accumulation} x"
            f" {counted(plan.replicas, 'replica')}"
        )
        row_mixing.refuse_unknown_rows(model, where, "change one of them")
