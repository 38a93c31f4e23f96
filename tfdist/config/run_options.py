"""The options of a run besides its steps: how long it is, what it saves, what it leaves behind, what it shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfdist.config.options import option
from tfdist.control.run_address import is_url, working_folder
from tfdist.control.time_limit import MOST_SECONDS

MOST_PORT = 65535


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    run_dir: str = option(
        "runs/default",
        "Folder of this run: logs, checkpoints, exports; or a URL, such as s3://BUCKET/FOLDER. An existing one is"
        " resumed.",
        key=True,
    )
    cache_dir: str = option(
        "", "Folder for copies of runs and data in object stores. Empty: tfdist in $XDG_CACHE_HOME or ~/.cache."
    )
    store_timeout: float = option(
        300.0,
        "Seconds at the end of a run for which failed uploads to an object store are retried. Training itself never"
        " waits for the store.",
        least=0,
        most=MOST_SECONDS,
    )
    steps: int = option(0, "Optimizer steps to train in all. 0: taken from --epochs.", least=0, key=True)
    epochs: float = option(0.0, "Passes over the training data, instead of --steps.", least=0, most=1e9, key=True)
    seed: int = option(
        0, "Seed of weights, data order, dropout and augmentation.", identity=True, least=0, most=2**32 - 1
    )
    deterministic: bool = option(False, "Bitwise repeatable: deterministic kernels, slower on GPUs.")
    dry_run: bool = option(False, "Print the resolved configuration and the batch arithmetic, then stop.", key=True)

    @property
    def folder(self) -> Path:
        """The run's folder on this machine."""
        return working_folder(self.run_dir, self.cache_dir)

    @property
    def folder_flag(self) -> str:
        """The run's folder as named in messages."""
        return (
            f"--run_dir={self.folder}" if not is_url(self.run_dir) else f"--cache_dir={self.cache_dir}: {self.folder}"
        )


@dataclass(frozen=True)
class LoopConfig:
    """How often the outer loop acts, in steps."""

    steps_per_loop: int = option(
        0, "Steps inside one tf.function call. 0: up to the next boundary, at most 100.", least=0
    )
    log_every: int = option(20, "Steps between two log lines.", least=1)
    eval_every: int = option(0, "Steps between two evaluations. 0: at the end only; -1: never.", least=-1, key=True)
    on_nan: str = option(
        "stop",
        "What a NaN or infinite loss or gradient does (float16 overflow is handled by the loss scale). skip: no update"
        " in that step; rollback: back to the last snapshot, then skip the batches since then.",
        choices=("stop", "skip", "rollback"),
    )
    max_rollbacks: int = option(3, "Rollbacks of --on_nan=rollback after which the run stops.", least=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Snapshots: when to save, what to keep, what to trust."""

    save_every: int = option(
        0, "Steps between two snapshots. 0: by --save_minutes and at the end only.", least=0, key=True
    )
    save_minutes: float = option(
        15.0, "Minutes between two snapshots, by the chief's clock. 0: off.", least=0, most=MOST_SECONDS / 60
    )
    save_final: bool = option(True, "Save when training ends.")
    keep: int = option(3, "Newest snapshots kept.", least=1)
    keep_every: int = option(0, "Every snapshot whose step is a multiple of this is kept forever. 0: none.", least=0)
    keep_best: str = option(
        "", "Also keep the snapshot that is best by this evaluation metric, for example min:loss or max:accuracy."
    )
    async_save: bool = option(
        True, "Write snapshots in a background thread; training waits only for the copy to host memory."
    )
    backup_dir: str = option(
        "",
        "Place of a short-lived backup in addition to the snapshots: a folder on a fast local disk or in memory, or a"
        " URL, such as s3://BUCKET/FOLDER, to which it is sent in the background; only the chief uses it. Empty: none.",
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

    @property
    def best_metric(self) -> str:
        """The metric of --keep_best; "" without it."""
        return self.keep_best.partition(":")[2]


@dataclass(frozen=True)
class ExportConfig:
    """Exports for other programs at the end."""

    export: str = option("keras,saved_model", "Formats exported at the end: keras, saved_model, both, or none.")


@dataclass(frozen=True)
class TelemetryConfig:
    """What to show, and where."""

    progress: str = option(
        "auto",
        "Progress on the console: a bar on a terminal, plain lines elsewhere.",
        choices=("auto", "bar", "plain", "none"),
    )
    trackers: str = option(
        "tensorboard",
        "Where the chief tracks the run: any of tensorboard, csv, mlflow, wandb, or package.module:function; none.",
    )
    phase_every: int = option(
        10,
        "One of this many calls of the training function measures the phases of its steps; on a CPU, without"
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
        "Baseline of the scaling efficiency: samples per second of one worker, or the folder of a run of one worker."
        " Empty: none.",
    )
    histograms_every: int = option(
        0, "Steps between two histograms of the weights in TensorBoard, taken at log lines. 0: none.", least=0
    )
    prometheus_port: int = option(
        0,
        "Every worker serves its numbers to Prometheus at this port + its rank on its machine. 0: off.",
        least=0,
        most=MOST_PORT,
    )
    opentelemetry: bool = option(
        False, "Every worker sends spans by OpenTelemetry; the OTEL_ environment variables set where to."
    )
    profile_steps: str = option(
        "",
        "FIRST:LAST: trace from step FIRST to step LAST, for TensorBoard's profile plugin. SIGUSR2 traces the next call"
        " at any time.",
    )
    profile_ranks: str = option("0", "Ranks that trace: all, or some such as 0,1.")
    plot: bool = option(True, "Draw RUN_DIR/curves.png at the end.")
