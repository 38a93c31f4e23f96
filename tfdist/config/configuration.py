"""The configuration as a whole: its components, its flat view by flag name, its identity and digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.config import checks, unused
from tfdist.config.cluster_options import ClusterConfig, ParallelConfig, ParameterServerConfig, StrategyConfig
from tfdist.config.options import check_option, check_utf8
from tfdist.config.run_options import CheckpointConfig, ExportConfig, LoopConfig, RunConfig, TelemetryConfig
from tfdist.config.strategies import strategy_or_undecided
from tfdist.config.training_options import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from tfdist.control.exit_codes import ConfigError
from tfdist.control.run_address import is_url


@dataclass(frozen=True)
class Config:
    """Everything a run needs to know. Built by flags.py, or in code: `Config(run=RunConfig(steps=100))`."""

    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    strategy: StrategyConfig = StrategyConfig()
    parallel: ParallelConfig = ParallelConfig()
    servers: ParameterServerConfig = ParameterServerConfig()
    batch: BatchConfig = BatchConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loop: LoopConfig = LoopConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Config:
        """Builds a Config from {flag name: value}; absent names keep their defaults."""
        known = {field.name for _, field in iter_options()}
        for name in values:
            if name not in known:
                raise ConfigError(f"--{name} is not an option of tfdist; `--help` lists them.")
        return cls(
            **{
                component: kind(**{f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values})
                for component, kind in COMPONENTS.items()
            }
        )

    def flat(self) -> dict[str, Any]:
        """{flag name: value} for every option."""
        return {field.name: getattr(getattr(self, component), field.name) for component, field in iter_options()}

    def replace(self, **values: Any) -> Config:
        """A copy with some options changed, by flag name."""
        return Config.from_flat({**self.flat(), **values})

    def with_absolute_folders(self) -> Config:
        """A copy with absolute folder paths, which stay valid if user code changes the working directory. Raises
        ConfigError if the working directory has a name that no file of a run could hold."""
        run, backup = self.run, self.checkpoint.backup_dir
        places = {"run_dir": run.run_dir, "cache_dir": run.cache_dir, "backup_dir": backup}
        folders = {flag: os.path.abspath(place) for flag, place in places.items() if place and not is_url(place)}
        for flag, folder in folders.items():
            check_utf8(f"--{flag}={folder}")
        return self.replace(**folders)

    def in_one_process(self) -> Config:
        """A configuration to evaluate the run's model in one process, whatever trains it; the batch must fit there."""
        strategy = self.strategy.strategy
        batch = self.batch.global_batch or self.batch.micro_batch
        return dataclasses.replace(
            self,
            parallel=ParallelConfig(recompute=self.parallel.recompute),
            batch=BatchConfig(global_batch=batch),
        ).replace(
            strategy="auto" if strategy_or_undecided(strategy).several_workers else strategy,
            eval_batch=self.data.eval_batch or min(batch, 128),
            jit_compile=False,
        )

    def identity(self) -> dict[str, Any]:
        """{flag name: value} for the options that determine what the run computes."""
        values = self.flat()
        named = {field.name: values[field.name] for _, field in iter_options() if field.metadata["identity"]}
        if self.schedule.schedule == "constant":  # its end has no effect, so a longer run is still the same run
            named["decay_steps"] = 0
        elif not self.schedule.decay_steps:
            named["decay_steps"] = self.run.steps or f"{self.run.epochs:g} epochs"
        return named

    def digest(self) -> str:
        """16 hex digits that identify what the run computes: SHA-256 of the identity as canonical JSON."""
        text = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def validate(self) -> Config:
        """Returns self, or raises ConfigError with a sentence that names the flag, its value and the fix."""
        values = self.flat()
        for _, field in iter_options():
            check_option(field, values[field.name])
        checks.check_across_fields(self)
        return self

    def check_used(self) -> None:
        """Raises ConfigError for a flag that would have no effect in a training."""
        unused.check_used(self, Config())

    def check_compression(self, strategy: str) -> None:
        """Raises ConfigError unless gradients can travel as --compression says, on this strategy."""
        checks.check_compression(self, strategy)


COMPONENTS: dict[str, type] = {field.name: type(field.default) for field in dataclasses.fields(Config)}


def iter_options() -> Iterator[tuple[str, dataclasses.Field]]:
    """Every option as (component name, field), in the order of declaration."""
    for component, kind in COMPONENTS.items():
        for field in dataclasses.fields(kind):
            yield component, field
