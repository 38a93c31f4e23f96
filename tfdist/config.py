"""The configuration: one frozen dataclass per component, their cross-field checks, the digest.

Every field made with `option()` is also a command-line flag of the same name (flags.py reads the fields), so a new
flag is one line here and one line in tests/unit/flag_surface.txt. No TensorFlow import: `--help` and `--dry_run`
must answer at once.

Fields marked `identity=True` count towards `Config.digest()`: they are those that change the numbers a run computes
(model, data order, global batch, optimizer, ...). What only changes where or how fast the numbers are computed
(strategy, number of workers, micro-batch, paths, logging, saving) does not count, so that a run may be resumed on
another cluster.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.control.exit_codes import ConfigError


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), identity: bool = False, least: float | None = None
) -> Any:
    """Declares a field that is also a flag: its help text, its allowed values, whether it is part of the identity."""
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "identity": identity, "least": least}
    )


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    run_dir: str = option("runs/default", "Folder of this run: logs, checkpoints, exports. An existing one is resumed.")
    steps: int = option(0, "Optimizer steps to train in all. 0: taken from --epochs.", least=0)
    epochs: float = option(0.0, "Passes over the training data, instead of --steps.", least=0)
    seed: int = option(0, "Seed of weights, data order, dropout and augmentation.", identity=True, least=0)
    deterministic: bool = option(False, "Bitwise repeatable: deterministic kernels, slower on GPUs.")
    dry_run: bool = option(False, "Print the resolved configuration and the batch arithmetic, then stop.")


@dataclass(frozen=True)
class ClusterConfig:
    """How workers find each other, and the threads of each."""

    startup_timeout: float = option(300.0, "Seconds to wait for every peer to appear.", least=1)
    heartbeat_timeout: float = option(10.0, "Seconds of silence after which a peer counts as dead.", least=1)
    job_token_file: str = option(
        "",
        "File (of mode 0600) with the secret by which the workers of a job know each other; without it TFDIST_JOB_TOKEN"
        " of the environment, which tfdist.launch sets.",
    )
    step_timeout: float = option(
        600.0,
        "Seconds that one call of the training function (at most 100 steps) may take before the run counts as stuck. 0:"
        " no limit.",
        least=0,
    )
    first_step_timeout: float = option(1800.0, "The same for the first call, which also traces and compiles.", least=0)
    eval_timeout: float = option(3600.0, "The same for one evaluation.", least=0)
    save_timeout: float = option(
        1800.0, "The same for one save, as far as training waits for it, and for restoring.", least=0
    )
    grace_period: float = option(
        30.0,
        "Seconds that the platform gives between SIGTERM and SIGKILL: within it all is saved, or the process says that"
        " it is not.",
        least=1,
    )
    preemption_notice: str = option(
        "none",
        "Where to ask whether this machine is about to be taken away, beside SIGTERM. gce: Google Compute Engine's"
        " metadata server.",
        choices=("none", "gce"),
    )
    straggler_factor: float = option(
        1.5, "A worker that computes this many times as long as the others is named. 0: none is.", least=0
    )
    intra_op_threads: int = option(0, "Threads within one TensorFlow operation. 0: TensorFlow decides.", least=0)
    inter_op_threads: int = option(0, "Operations run at the same time. 0: TensorFlow decides.", least=0)


@dataclass(frozen=True)
class StrategyConfig:
    """Which Runtime, and how it communicates."""

    strategy: str = option(
        "auto",
        "auto: parameter_server if TF_CONFIG lists ps, multi_worker if it lists several workers, horovod under"
        " horovodrun or mpirun, mirrored if there are several local GPUs, else one_device. sockets: plain processes"
        " over TCP, without tf.distribute; one device each. mesh: see --mesh.",
    )
    virtual_devices: int = option(
        0, "With --strategy=mirrored: this many CPU devices instead of the local GPUs.", least=0
    )
    communication: str = option(
        "auto",
        "How gradients travel between workers. socket: our own ring over TCP (CPU); ring: TensorFlow's, over gRPC;"
        " nccl: NVIDIA's. auto: nccl on GPUs; on the CPU socket, with shared memory between neighbours on one host.",
        choices=("auto", "socket", "ring", "nccl"),
    )
    pack_mb: float = option(
        1.0,
        "Gradients are reduced in packs of about this many MB, so that the first packs travel while the backward pass"
        " goes on. 0: one pack per tensor.",
        least=0,
    )
    collective_timeout: float = option(
        1800.0,
        "Seconds after which a collective that does not end is an error. Must exceed the longest save or evaluation. 0:"
        " never.",
        least=0,
    )
    horovod_fusion_mb: float = option(
        64.0,
        "With --strategy=horovod: gradients are reduced in groups of about this many MB. 0: one by one, as"
        " --deterministic does over three and more workers.",
        least=0,
    )
    horovod_cycle_ms: float = option(
        1.0, "With --strategy=horovod: milliseconds between two looks for gradients that are ready.", least=0
    )
    horovod_compression: str = option(
        "none",
        "With --strategy=horovod: what gradients are rounded to on their way. fp16: half the bytes.",
        choices=("none", "fp16"),
    )


@dataclass(frozen=True)
class ParallelConfig:
    """--strategy=mesh: how models larger than a device are spread over workers."""

    mesh: str = option(
        "",
        "Axes over all workers: pipe, data, expert, model, for example data=2,model=2. data, if left out, takes the"
        " workers that remain.",
    )
    zero: int = option(
        0,
        "What the data axis shares out instead of holding copies of. 1: optimizer state; 2: gradients too; 3:"
        " parameters too.",
        least=0,
    )
    pipe_schedule: str = option(
        "1f1b",
        "Order of a pipeline's work. gpipe: all micro-batches forward, then all backward; 1f1b: in turn, which holds"
        " fewer.",
        choices=("gpipe", "1f1b"),
    )
    pipe_chunks: int = option(
        1,
        "Parts of the model on each stage of the pipeline. More than 1: interleaved, a smaller bubble for more"
        " traffic.",
        least=1,
    )
    pipe_cut: str = option(
        "",
        "Blocks with which the parts of the pipeline after the first begin, for example block_02,block_05. Empty:"
        " balanced by parameters.",
    )
    sequence_parallel: bool = option(
        False,
        "Between the layers that are spread over the model axis, each worker holds only its share of the positions.",
    )
    offload: str = option(
        "none", "Keep optimizer state and master weights in host memory.", choices=("none", "optimizer")
    )
    recompute: str = option(
        "none",
        "Activations that are computed again in the backward pass instead of kept.",
        choices=("none", "block", "attention"),
    )
    compression: str = option(
        "none",
        "How gradients travel between workers: all on a mesh, bf16 also on multi_worker, mirrored and sockets. int8,"
        " topk and powersgd carry their error to the next step.",
        choices=("none", "fp16", "bf16", "int8", "topk", "powersgd"),
        identity=True,
    )
    compression_after: int = option(
        1000,
        "With --compression=topk or powersgd: steps at the beginning in which gradients travel whole.",
        identity=True,
        least=0,
    )
    all_reduce: str = option(
        "flat",
        "How the sum over workers of a mesh is made. hierarchical: within each host first, then across hosts.",
        choices=("flat", "hierarchical"),
    )
    workers_per_host: int = option(
        0,
        "With --all_reduce=hierarchical: so many consecutive workers count as one host. 0: hosts are told by the"
        " workers' addresses.",
        least=0,
    )


@dataclass(frozen=True)
class ParameterServerConfig:
    """--strategy=parameter_server: how updates reach the weights, and how old they may be."""

    ps_mode: str = option(
        "async",
        "async: each worker's gradient is an update of its own; sync: one update a step, from all workers.",
        choices=("async", "sync"),
    )
    max_staleness: int = option(
        -1,
        "async: a gradient of weights that are more than this many updates old is dropped, and its batch done again."
        " -1: none is.",
        least=-1,
    )
    staleness_scaling: bool = option(
        False,
        "async: divide the learning rate of an update by 1 + its staleness (Zhang et al. 2016, arXiv:1511.05950).",
    )
    backup_workers: int = option(
        0,
        "sync: this many workers more than the parts of a step: they do the slowest parts again, and the first result"
        " counts.",
        least=0,
    )
    ps_piece_kb: float = option(
        256.0,
        "A variable is cut into pieces, one a parameter server, if these have at least this many KB. 0: never.",
        least=0,
    )


@dataclass(frozen=True)
class BatchConfig:
    """global batch = micro-batch x accumulation x replicas. Give any two; the third follows."""

    global_batch: int = option(
        0, "Samples per optimizer step over all workers. 0: follows from the others.", identity=True, least=0
    )
    micro_batch: int = option(
        0,
        "Samples per replica in one forward pass; beside --global_batch, at most. 0: follows from the others.",
        least=0,
    )
    accumulation: int = option(0, "Micro-batches per optimizer step. 0: follows from the others.", least=0)


@dataclass(frozen=True)
class DataConfig:
    """What is trained on, in which order."""

    source: str = option("digits", "Data source: a registered name or package.module:function.", identity=True)
    source_args: str = option("", "Options of the source, key=value,key=value.", identity=True)
    data_dir: str = option("", "Where the source finds its files, if it needs any.")
    sequence_length: int = option(128, "Tokens per sample of a text source.", identity=True, least=1)
    shuffle: bool = option(True, "Permute the samples anew in each epoch.", identity=True)
    augment: str = option(
        "none", "Augmentation of training samples: none, a registered name or package.module:function.", identity=True
    )
    eval_batch: int = option(0, "Samples per replica in one evaluation step. 0: the micro-batch.", least=0)
    eval_samples: int = option(0, "Evaluate on the first N samples only. 0: all.", least=0)
    reader_threads: int = option(0, "Batches fetched at the same time. 0: tf.data tunes it.", least=0)


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    model: str = option(
        "cnn", "Model: a registered name or package.module:function returning a Keras 3 model.", identity=True
    )
    model_args: str = option(
        "", "Options of the model, key=value,key=value, for example size=tiny,dropout=0.1.", identity=True
    )
    objective: str = option(
        "auto",
        "Loss and metrics: auto, classification, next_token, regression or package.module:function.",
        identity=True,
    )
    label_smoothing: float = option(
        0.0, "Label smoothing of the classification objective, 0 to 1.", identity=True, least=0
    )
    sync_batchnorm: bool = option(True, "BatchNormalization takes its statistics over all replicas.", identity=True)
    jit_compile: bool = option(False, "Compile the forward and backward pass with XLA.")
    jit_tune: bool = option(
        False,
        "Measure at the start whether --jit_compile makes steps faster, and set it so; the run remembers the answer.",
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Compute type, and the dynamic loss scale of float16 (Micikevicius et al. 2018, arXiv:1710.03740)."""

    precision: str = option(
        "float32", "Compute type; variables stay float32.", choices=("float32", "bfloat16", "float16"), identity=True
    )
    loss_scale_initial: float = option(32768.0, "First loss scale of float16.", identity=True, least=1)
    loss_scale_growth_steps: int = option(
        2000, "The loss scale doubles after this many steps without overflow.", identity=True, least=1
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule."""

    optimizer: str = option(
        "adamw",
        "Update rule.",
        choices=("sgd", "momentum", "adam", "adamw", "lion", "lamb", "adafactor", "muon"),
        identity=True,
    )
    optimizer_args: str = option(
        "", "Options of the Keras optimizer, key=value,key=value, for example beta_2=0.95.", identity=True
    )
    weight_decay: float = option(
        0.0, "Decoupled weight decay per step, times the learning rate.", identity=True, least=0
    )
    weight_decay_exclude: str = option(
        "bias,gamma,beta", "Variables whose name contains one of these are not decayed.", identity=True
    )
    clip_norm: float = option(0.0, "Clip the reduced gradient to this global norm. 0: off.", identity=True, least=0)
    ema: float = option(
        0.0,
        "Decay of an exponential moving average of the weights, used in evaluation and export. 0: off.",
        identity=True,
        least=0,
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the steps."""

    learning_rate: float = option(1e-3, "Peak learning rate.", identity=True, least=0)
    schedule: str = option(
        "constant",
        "Shape after the warm-up. wsd: warm-up, stable, linear decay.",
        choices=("constant", "linear", "cosine", "wsd"),
        identity=True,
    )
    warmup_steps: int = option(0, "Steps of linear warm-up from 0.", identity=True, least=0)
    decay_steps: int = option(0, "Step at which the decay ends. 0: the last step of the run.", identity=True, least=0)
    decay_fraction: float = option(0.1, "Part of --decay_steps in which wsd decays.", identity=True, least=0)
    min_learning_rate_ratio: float = option(
        0.0, "Learning rate at the end of the decay, as a part of the peak.", identity=True, least=0
    )


@dataclass(frozen=True)
class LoopConfig:
    """How often the outer loop does what, in steps."""

    steps_per_loop: int = option(
        0, "Steps inside one tf.function call. 0: up to the next boundary, at most 100.", least=0
    )
    log_every: int = option(20, "Steps between two log lines.", least=1)
    eval_every: int = option(0, "Steps between two evaluations. 0: at the end only; -1: never.", least=-1)
    on_nan: str = option(
        "stop",
        "What a NaN or infinite loss or gradient does (float16 overflow is handled by the loss scale). skip: no update"
        " in that step; rollback: back to the last snapshot, and past the batches since then.",
        choices=("stop", "skip", "rollback"),
    )
    max_rollbacks: int = option(3, "Rollbacks of --on_nan=rollback after which the run stops.", least=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Snapshots: when to save, what to keep, what to trust."""

    save_every: int = option(0, "Steps between two snapshots. 0: by --save_minutes and at the end only.", least=0)
    save_minutes: float = option(15.0, "Minutes between two snapshots, by the chief's clock. 0: off.", least=0)
    save_final: bool = option(True, "Save when training ends.")
    keep: int = option(3, "Newest snapshots kept.", least=1)
    keep_every: int = option(0, "Every snapshot whose step is a multiple of this is kept for ever. 0: none.", least=0)
    keep_best: str = option(
        "", "Keep also the snapshot that is best by this evaluation metric, for example min:loss or max:accuracy."
    )
    async_save: bool = option(
        True, "Write snapshots in a background thread; training waits only for the copy to host memory."
    )
    backup_dir: str = option(
        "",
        "Folder of a short-lived backup beside the snapshots, on a fast local disk or in memory; only the chief uses"
        " it. Empty: none.",
    )
    backup_every: int = option(0, "Steps between two backups. 0: at the end of each epoch.", least=0)
    double_backup: bool = option(False, "Keep the backup before the last one as well.")
    delete_backup: bool = option(True, "Delete the backup when training has finished.")
    elastic_commit_every: int = option(
        0,
        "With --elastic of tfdist.launch: least steps between two copies of the state in every worker's memory. 0: a"
        " copy after every call of the training function (at most 100 steps, about 5 s).",
        least=0,
    )
    resume: str = option(
        "auto",
        "auto: from the newest valid snapshot if there is one; never: refuse a run folder that has one; must: fail"
        " without one.",
        choices=("auto", "never", "must"),
    )
    allow_config_change: bool = option(False, "Resume although the configuration's digest differs.")


@dataclass(frozen=True)
class ExportConfig:
    """What is left for others at the end."""

    export: str = option("keras,saved_model", "Formats exported at the end: keras, saved_model, both, or none.")


@dataclass(frozen=True)
class TelemetryConfig:
    """What is shown, and where."""

    progress: str = option(
        "auto",
        "Progress on the console: a bar on a terminal, plain lines elsewhere.",
        choices=("auto", "bar", "plain", "none"),
    )
    trackers: str = option(
        "tensorboard",
        "Where the chief tracks the run: some of tensorboard, csv, mlflow, wandb, or package.module:function; none.",
    )
    phase_every: int = option(
        10,
        "Of as many calls of the training function one measures the phases of its steps; on a CPU, without"
        " --deterministic, each does, which costs less. 0: none.",
        least=0,
    )
    peak_tflops: float = option(
        0.0,
        "Peak of one device in the compute type, TFLOP/s, for the MFU. 0: from the planner's table, by the name of the"
        " GPU.",
        least=0,
    )
    scaling_baseline: str = option(
        "",
        "What scaling efficiency is against: samples per second of one worker, or the folder of a run of one worker."
        " Empty: none is told.",
    )
    histograms_every: int = option(
        0, "Steps between two histograms of the weights in TensorBoard, taken at log lines. 0: none.", least=0
    )
    prometheus_port: int = option(
        0, "Every worker serves its numbers to Prometheus at this port + its rank on its machine. 0: not.", least=0
    )
    opentelemetry: bool = option(
        False, "Every worker sends spans by OpenTelemetry; the OTEL_ environment variables say where to."
    )
    profile_steps: str = option(
        "",
        "FIRST:LAST: trace from step FIRST to step LAST, for TensorBoard's profile plugin. SIGUSR2 traces the next call"
        " at any time.",
    )
    profile_ranks: str = option("0", "Ranks that trace: all, or some such as 0,1.")
    plot: bool = option(True, "Draw RUN_DIR/curves.png at the end.")


COMPONENTS: dict[str, type] = {
    "run": RunConfig,
    "cluster": ClusterConfig,
    "strategy": StrategyConfig,
    "parallel": ParallelConfig,
    "servers": ParameterServerConfig,
    "batch": BatchConfig,
    "data": DataConfig,
    "model": ModelConfig,
    "precision": PrecisionConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "loop": LoopConfig,
    "checkpoint": CheckpointConfig,
    "export": ExportConfig,
    "telemetry": TelemetryConfig,
}


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
        """{flag name: value} of every option."""
        return {field.name: getattr(getattr(self, component), field.name) for component, field in iter_options()}

    def replace(self, **values: Any) -> Config:
        """A copy with some options changed, by flag name."""
        return Config.from_flat({**self.flat(), **values})

    def identity(self) -> dict[str, Any]:
        """{flag name: value} of the options that decide what the run computes."""
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
        if self.run.steps and self.run.epochs:
            raise ConfigError(
                f"--steps={self.run.steps} and --epochs={self.run.epochs:g} both say when to end: give one of them."
            )
        if not self.run.steps and not self.run.epochs:
            raise ConfigError("Neither --steps nor --epochs is given: say how long to train, for example --epochs=10.")
        if self.optimizer.ema >= 1:
            raise ConfigError(
                f"--ema={self.optimizer.ema:g} must be below 1: use for example --ema=0.999, or 0 for none."
            )
        if self.model.label_smoothing >= 1:
            raise ConfigError(f"--label_smoothing={self.model.label_smoothing:g} must be below 1: use for example 0.1.")
        if self.model.jit_compile and self.model.jit_tune:
            raise ConfigError("--jit_compile uses XLA, --jit_tune measures whether it pays: give one of them.")
        if self.schedule.min_learning_rate_ratio > 1:
            raise ConfigError(f"--min_learning_rate_ratio={self.schedule.min_learning_rate_ratio:g} must be at most 1.")
        if not 0 < self.schedule.decay_fraction <= 1:
            raise ConfigError(f"--decay_fraction={self.schedule.decay_fraction:g} must be above 0 and at most 1.")
        decay_end = self.schedule.decay_steps or self.run.steps
        if decay_end and self.schedule.warmup_steps >= decay_end and self.schedule.schedule != "constant":
            raise ConfigError(
                f"--warmup_steps={self.schedule.warmup_steps} leaves no step to decay before step {decay_end}: lower"
                " it, or raise --steps or --decay_steps."
            )
        if self.strategy.virtual_devices and self.strategy.strategy not in ("auto", "mirrored"):
            raise ConfigError(
                f"--virtual_devices={self.strategy.virtual_devices} is for --strategy=mirrored, not"
                f" {self.strategy.strategy}: drop one of them."
            )
        self._check_parallel()
        if self.checkpoint.keep_best and not self.checkpoint.keep_best.startswith(("min:", "max:")):
            raise ConfigError(
                f"--keep_best={self.checkpoint.keep_best} must start with min: or max:, for example max:accuracy."
            )
        if self.checkpoint.keep_best and self.loop.eval_every < 0:
            raise ConfigError(
                f"--keep_best={self.checkpoint.keep_best} needs evaluations, but --eval_every=-1 turns them off."
            )
        formats = set(self.export.export.split(","))
        if not formats <= {"keras", "saved_model", "none"} or ("none" in formats and len(formats) > 1):
            raise ConfigError(f"--export={self.export.export} must be keras, saved_model, keras,saved_model or none.")
        parse_profile_steps(self.telemetry.profile_steps)
        parse_ranks(self.telemetry.profile_ranks)
        for name in ("source_args", "model_args", "optimizer_args"):
            parse_args(name, values[name])
        self._check_servers()
        return self

    def _check_parallel(self) -> None:
        parallel = self.parallel
        if parallel.zero > 3:
            raise ConfigError(f"--zero={parallel.zero} is not a stage: use 0, 1, 2 or 3.")
        for name, value, off in (
            ("mesh", parallel.mesh, ""),
            ("zero", parallel.zero, 0),
            ("pipe_chunks", parallel.pipe_chunks, 1),
            ("pipe_cut", parallel.pipe_cut, ""),
            ("offload", parallel.offload, "none"),
            ("all_reduce", parallel.all_reduce, "flat"),
            ("sequence_parallel", parallel.sequence_parallel, False),
        ):
            if value != off and self.strategy.strategy != "mesh":
                raise ConfigError(
                    f"--{name}={value} is for --strategy=mesh, not {self.strategy.strategy}: add --strategy=mesh, or"
                    " drop it."
                )
        if self.strategy.strategy != "auto":
            self.check_compression(self.strategy.strategy)
        if parallel.workers_per_host and parallel.all_reduce != "hierarchical":
            raise ConfigError(
                f"--workers_per_host={parallel.workers_per_host} is for --all_reduce=hierarchical, not"
                f" {parallel.all_reduce}: drop one of them."
            )
        if parallel.all_reduce != "flat" and (parallel.zero or parallel.compression != "none"):
            other = f"--zero={parallel.zero}" if parallel.zero else f"--compression={parallel.compression}"
            raise ConfigError(
                f"--all_reduce={parallel.all_reduce} is for gradients that are whole on all workers and travel as they"
                f" are, which {other} changes: drop one of them."
            )

    def check_compression(self, strategy: str) -> None:
        """Whether gradients can travel as --compression says, on the strategy that --strategy has come to."""
        kind = self.parallel.compression
        if (
            kind == "none"
            or strategy == "mesh"
            or (kind == "bf16" and strategy in ("multi_worker", "mirrored", "sockets"))
        ):
            return
        fix = (
            "use --horovod_compression=fp16"
            if strategy == "horovod"
            else (
                "drop it"
                if strategy in ("one_device", "parameter_server")
                else "use --compression=bf16, or --strategy=mesh"
            )
        )
        raise ConfigError(f"--compression={kind} is not for --strategy={strategy}: {fix}.")

    def _check_servers(self) -> None:
        """What a parameter-server run cannot do, and what only such a run can."""
        servers, own = self.servers, self.strategy.strategy in ("auto", "parameter_server")
        for name, default in (
            ("ps_mode", "async"),
            ("max_staleness", -1),
            ("staleness_scaling", False),
            ("backup_workers", 0),
        ):
            if getattr(servers, name) != default and not own:
                raise ConfigError(
                    f"--{name}={getattr(servers, name)} is for --strategy=parameter_server, not"
                    f" {self.strategy.strategy}: drop one of them."
                )
        if servers.ps_mode == "async" and servers.backup_workers:
            raise ConfigError(
                f"--backup_workers={servers.backup_workers} is for --ps_mode=sync: asynchronous workers do not wait for"
                " each other."
            )
        if servers.ps_mode == "sync" and (servers.max_staleness >= 0 or servers.staleness_scaling):
            raise ConfigError(
                "--max_staleness and --staleness_scaling are for --ps_mode=async: with sync no gradient is stale."
            )
        if self.strategy.strategy != "parameter_server":
            return
        for wrong, flag, fix in (
            (
                self.precision.precision == "float16",
                "--precision=float16 needs a loss scale that all workers share",
                "use --precision=bfloat16",
            ),
            (
                self.optimizer.optimizer == "adafactor",
                "--optimizer=adafactor keeps its state in a way that parameter servers cannot divide",
                "use another optimizer",
            ),
            (
                self.model.jit_compile or self.model.jit_tune,
                (
                    f"--jit_{'compile' if self.model.jit_compile else 'tune'}: XLA cannot compile what reads from"
                    " parameter servers"
                ),
                "drop it",
            ),
            (
                self.loop.on_nan == "rollback",
                "--on_nan=rollback is not available with --strategy=parameter_server",
                "use --on_nan=stop or skip",
            ),
            (
                bool(self.checkpoint.backup_dir),
                f"--backup_dir={self.checkpoint.backup_dir} is not available with --strategy=parameter_server",
                "use --save_every",
            ),
            (
                self.run.deterministic and servers.ps_mode == "async",
                "--deterministic cannot hold with --ps_mode=async, whose updates come in any order",
                "use --ps_mode=sync",
            ),
        ):
            if wrong:
                raise ConfigError(f"{flag}: {fix}.")


def iter_options() -> Iterator[tuple[str, dataclasses.Field]]:
    """Every option as (component name, field), in the order of declaration."""
    for component, kind in COMPONENTS.items():
        for field in dataclasses.fields(kind):
            yield component, field


_LARGEST = 2**63 - 1  # what a tensor can hold


def check_option(field: dataclasses.Field, value: Any) -> None:
    """Raises ConfigError if a flag's value is not among its choices, or too small."""
    choices, least = field.metadata["choices"], field.metadata["least"]
    if choices and value not in choices:
        raise ConfigError(f"--{field.name}={value} is not one of {', '.join(choices)}.")
    if isinstance(value, float) and math.isinf(value) or type(value) is int and abs(value) > _LARGEST:
        raise ConfigError(f"--{field.name}={value} is too large: give a number that can be counted to.")
    if least is not None and not value >= least:  # also catches NaN
        raise ConfigError(f"--{field.name}={value} is too small: it must be at least {least:g}.")


def parse_profile_steps(text: str) -> tuple[int, int] | None:
    """(first, last) of --profile_steps; None if it is empty. Raises ConfigError."""
    if not text:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ConfigError(f"--profile_steps={text} must be FIRST:LAST with FIRST below LAST, for example 100:110.")
    return int(first), int(last)


def parse_ranks(text: str) -> set[int] | None:
    """The ranks of --profile_ranks; None for all. Raises ConfigError."""
    if text == "all":
        return None
    if not all(rank.isdecimal() for rank in text.split(",")):
        raise ConfigError(f"--profile_ranks={text} must be all, or ranks such as 0,1.")
    return {int(rank) for rank in text.split(",")}


def parse_args(flag: str, text: str) -> dict[str, Any]:
    """Reads `key=value,key=value` into {key: Python literal or string}; commas inside brackets or quotes do not split.

    Raises ConfigError if a piece has no `=`.
    """
    result: dict[str, Any] = {}
    for piece in _split_outside_brackets(text):
        key, equals, value = piece.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ConfigError(
                f"--{flag}={text}: {piece.strip()!r} is not key=value; write for example size=tiny,dropout=0.1."
            )
        try:
            result[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            result[key.strip()] = value.strip()
    return result


def _split_outside_brackets(text: str) -> list[str]:
    pieces, depth, quote, current = [], 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if char == "," and depth == 0 and not quote:
            pieces.append(current)
            current = ""
        else:
            current += char
    return [piece for piece in [*pieces, current] if piece.strip()]
