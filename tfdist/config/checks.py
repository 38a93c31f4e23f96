"""The checks across fields: contradictions raise a ConfigError that names the flag, its value and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tfdist.config.mesh_degrees import cuts_of_weights
from tfdist.config.options import SMALLEST_FLOAT32, parse_args, parse_profile_steps
from tfdist.config.strategies import strategy_or_undecided
from tfdist.control.exit_codes import ConfigError
from tfdist.control.ranks import parse_ranks
from tfdist.control.run_address import SNAPSHOTS, check_address, is_below, is_url

if TYPE_CHECKING:
    from tfdist.config.configuration import Config


# Flags that have a meaning under one strategy only.
MESH_ONLY = ("mesh", "zero", "pipe_chunks", "pipe_cut", "offload", "all_reduce", "sequence_parallel")
_PARAMETER_SERVER_ONLY = ("ps_mode", "max_staleness", "staleness_scaling", "backup_workers")


def check_across_fields(config: Config) -> None:
    """Raises ConfigError if fields that are valid by themselves contradict each other."""
    _check_length(config)
    _check_model(config)
    _check_schedule(config)
    _check_strategy(config)
    _check_parallel(config)
    _check_artifacts(config)
    _check_texts(config)
    _check_servers(config)


def _check_length(config: Config) -> None:
    run = config.run
    if run.steps and run.epochs:
        raise ConfigError(f"--steps={run.steps} and --epochs={run.epochs:g} both set the end: give one of them.")
    if not run.steps and not run.epochs:
        raise ConfigError("Neither --steps nor --epochs is given: set how long to train, for example --epochs=10.")


def _check_model(config: Config) -> None:
    ema, smoothing = config.optimizer.ema, config.model.label_smoothing
    if ema >= 1:
        raise ConfigError(f"--ema={ema:g} must be below 1: use for example --ema=0.999, or 0 for none.")
    if smoothing >= 1:
        raise ConfigError(f"--label_smoothing={smoothing:g} must be below 1: use for example 0.1.")
    if 0 < config.optimizer.clip_norm < SMALLEST_FLOAT32:
        raise ConfigError(
            f"--clip_norm={config.optimizer.clip_norm:g} would be 0 in float32, and so would all gradients: raise it,"
            " or give 0 for no clipping."
        )
    if config.model.jit_compile and config.model.jit_tune:
        raise ConfigError("--jit_compile uses XLA, --jit_tune measures whether it pays: give one of them.")


def _check_schedule(config: Config) -> None:
    schedule = config.schedule
    if schedule.min_learning_rate_ratio > 1:
        raise ConfigError(f"--min_learning_rate_ratio={schedule.min_learning_rate_ratio:g} must be at most 1.")
    if not 0 < schedule.decay_fraction <= 1:
        raise ConfigError(f"--decay_fraction={schedule.decay_fraction:g} must be above 0 and at most 1.")
    decay_end = schedule.decay_steps or config.run.steps
    if decay_end and schedule.warmup_steps >= decay_end and schedule.schedule != "constant":
        raise ConfigError(
            f"--warmup_steps={schedule.warmup_steps} leaves no step to decay before step {decay_end}: lower it, or"
            " raise --steps or --decay_steps."
        )


def _check_strategy(config: Config) -> None:
    strategy = config.strategy
    if strategy.virtual_devices and strategy.strategy not in ("auto", "mirrored"):
        raise ConfigError(
            f"--virtual_devices={strategy.virtual_devices} is for --strategy=mirrored, not {strategy.strategy}: drop"
            " one of them."
        )


def _refuse_given(options: Any, flags: Iterable[str], needed: str, strategy: str) -> None:
    """Raises ConfigError if one of the flags, which have a meaning with the strategy `needed`, has not its default."""
    for flag in flags:
        if (value := getattr(options, flag)) != getattr(type(options)(), flag):
            raise ConfigError(
                f"--{flag}={value} is for --strategy={needed}, not {strategy}: add --strategy={needed}, or drop it."
            )


def _check_parallel(config: Config) -> None:
    parallel, strategy = config.parallel, config.strategy.strategy
    if parallel.zero > 3:
        raise ConfigError(f"--zero={parallel.zero} is not a stage: use 0, 1, 2 or 3.")
    if strategy != "mesh":
        _refuse_given(parallel, MESH_ONLY, "mesh", strategy)
    if strategy != "auto":
        check_compression(config, strategy)
    if refusal := what_distorts_carried_errors(config):
        raise ConfigError(refusal)
    if parallel.workers_per_host and parallel.all_reduce != "hierarchical":
        raise ConfigError(
            f"--workers_per_host={parallel.workers_per_host} is for --all_reduce=hierarchical, not"
            f" {parallel.all_reduce}: drop one of them."
        )
    if parallel.all_reduce != "flat" and (parallel.zero or parallel.compression != "none"):
        other = f"--zero={parallel.zero}" if parallel.zero else f"--compression={parallel.compression}"
        raise ConfigError(
            f"--all_reduce={parallel.all_reduce} is for gradients that are whole on all workers and travel as they are,"
            f" which {other} changes: drop one of them."
        )
    if config.telemetry.histograms_every and (cut := what_divides_weights(config)):
        raise ConfigError(
            f"--histograms_every={config.telemetry.histograms_every} is not available with {cut}: no worker holds whole"
            " weights. Drop one of them."
        )


def what_divides_weights(config: Config) -> str:
    """The part of --mesh, or --zero=3, by which workers hold parts of the weights only; "" if they hold all."""
    cuts = cuts_of_weights(config.parallel.mesh)
    return f"--mesh={cuts[0]}" if cuts else "--zero=3" if config.parallel.zero == 3 else ""


def what_distorts_carried_errors(config: Config, has_weights: bool = False) -> str:
    """Why --compression does not go with gradients whose unit changes from step to step, as a sentence; "" if it does.

    has_weights: whether the data give samples or tokens weights.
    """
    kind, objective = config.parallel.compression, config.model.objective
    if kind not in ("int8", "topk", "powersgd"):
        return ""
    if config.precision.precision == "float16":
        what, instead = "loss scale of --precision=float16", "--precision=bfloat16"
    elif ":" in objective:
        what, instead = f"sum of the weights that --objective={objective} returns", "an objective of tfdist"
    elif has_weights:
        what, instead = f"sum of the weights that --source={config.data.source} gives", "data without weights"
    else:
        return ""
    return (
        f"--compression={kind} carries errors from step to step, which the changing {what} would distort: use"
        f" {instead}, or --compression=fp16."
    )


def check_compression(config: Config, strategy: str) -> None:
    """Raises ConfigError unless the resolved strategy supports this --compression."""
    kind, can = config.parallel.compression, strategy_or_undecided(strategy)
    if kind != "none" and kind not in can.compression:
        raise ConfigError(f"--compression={kind} is not for --strategy={strategy}: {can.compression_fix}.")


def _check_artifacts(config: Config) -> None:
    if not config.run.run_dir:
        raise ConfigError("--run_dir= is empty: name the folder of the run, for example --run_dir=runs/first.")
    check_address("run_dir", config.run.run_dir)
    check_address("data_dir", config.data.data_dir)
    check_address("backup_dir", config.checkpoint.backup_dir)
    run_dir, backup_dir = config.run.run_dir, config.checkpoint.backup_dir
    stored = is_url(run_dir) and is_url(backup_dir)
    if stored and (is_below(run_dir, backup_dir) or is_below(backup_dir, run_dir)):
        raise ConfigError(
            f"--backup_dir={config.checkpoint.backup_dir} is inside --run_dir={config.run.run_dir}, or the other way"
            " round: use a place outside the run."
        )
    if backup_dir and is_below(backup_dir, run_dir) and is_below(run_dir, backup_dir):
        raise ConfigError(f"--backup_dir={backup_dir} is the same as --run_dir={run_dir}: use a separate folder.")
    if backup_dir and not is_url(run_dir) and is_below(backup_dir, f"{run_dir}/{SNAPSHOTS}"):
        raise ConfigError(
            f"--backup_dir={backup_dir} is where the snapshots of --run_dir={run_dir} are, which would be removed as"
            " old backups: use a separate folder."
        )
    _check_corpus(config)
    if is_url(config.run.cache_dir):
        raise ConfigError(f"--cache_dir={config.run.cache_dir} must be a folder of this machine.")
    best, export = config.checkpoint.keep_best, config.export.export
    if best and not best.startswith(("min:", "max:")):
        raise ConfigError(f"--keep_best={best} must start with min: or max:, for example max:accuracy.")
    if best and config.loop.eval_every < 0:
        raise ConfigError(f"--keep_best={best} needs evaluations, but --eval_every=-1 turns them off.")
    formats = set(export.split(","))
    if not formats <= {"keras", "saved_model", "none"} or ("none" in formats and len(formats) > 1):
        raise ConfigError(f"--export={export} must be keras, saved_model, keras,saved_model or none.")


def _check_corpus(config: Config) -> None:
    """Checks that files written by a run are not read as text when it is resumed."""
    data_dir = config.data.data_dir
    if config.data.source != "text" or not data_dir:
        return
    for flag, place in {"run_dir": config.run.run_dir, "backup_dir": config.checkpoint.backup_dir}.items():
        if place and is_below(place, data_dir):
            raise ConfigError(
                f"--{flag}={place} is inside --data_dir={data_dir}, where --source=text reads all files, also those of"
                " the run: use a place outside the data."
            )


def _check_texts(config: Config) -> None:
    """Checks that fields with a small language of their own can be parsed."""
    parse_profile_steps(config.telemetry.profile_steps)
    parse_ranks("profile_ranks", config.telemetry.profile_ranks)
    parse_args("source_args", config.data.source_args)
    parse_args("model_args", config.model.model_args)
    parse_args("optimizer_args", config.optimizer.optimizer_args)


def _check_servers(config: Config) -> None:
    """Refuses options that a parameter-server run does not support, and those that only such a run supports."""
    servers, strategy = config.servers, config.strategy.strategy
    if strategy not in ("auto", "parameter_server"):
        _refuse_given(servers, _PARAMETER_SERVER_ONLY, "parameter_server", strategy)
    if servers.ps_mode == "async" and servers.backup_workers:
        raise ConfigError(
            f"--backup_workers={servers.backup_workers} is for --ps_mode=sync: asynchronous workers do not wait for"
            " each other."
        )
    if servers.ps_mode == "sync" and (servers.max_staleness >= 0 or servers.staleness_scaling):
        raise ConfigError(
            "--max_staleness and --staleness_scaling are for --ps_mode=async: with sync no gradient is stale."
        )
    if strategy == "parameter_server":
        _check_parameter_server_run(config)


def _check_parameter_server_run(config: Config) -> None:
    """Refuses options that no run on parameter servers supports."""
    if config.precision.precision == "float16":
        raise ConfigError("--precision=float16 needs a loss scale that all workers share: use --precision=bfloat16.")
    if config.optimizer.optimizer == "adafactor":
        raise ConfigError(
            "--optimizer=adafactor keeps its state in a way that parameter servers cannot divide: use another"
            " optimizer."
        )
    if config.model.jit_compile or config.model.jit_tune:
        flag = "jit_compile" if config.model.jit_compile else "jit_tune"
        raise ConfigError(f"--{flag}: XLA cannot compile reads from parameter servers: drop it.")
    if config.loop.on_nan == "rollback":
        raise ConfigError(
            "--on_nan=rollback is not available with --strategy=parameter_server: use --on_nan=stop or skip."
        )
    if config.checkpoint.backup_dir:
        raise ConfigError(
            f"--backup_dir={config.checkpoint.backup_dir} is not available with --strategy=parameter_server: use"
            " --save_every."
        )
    if config.telemetry.histograms_every and config.servers.ps_mode == "async":
        raise ConfigError(
            f"--histograms_every={config.telemetry.histograms_every} is not available with --ps_mode=async, whose"
            " workers update the weights at any time: use --ps_mode=sync."
        )
    if config.run.deterministic and config.servers.ps_mode == "async":
        raise ConfigError(
            "--deterministic cannot be guaranteed with --ps_mode=async, whose updates come in any order: use"
            " --ps_mode=sync."
        )
