"""Writes the results of a finished run: exports, the plot of its curves, the summary. Used only by the chief."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts import state
from tfdist.artifacts.export import check_exportable, export_model
from tfdist.build import Job
from tfdist.config import Config
from tfdist.control.exit_codes import CheckpointError
from tfdist.control.run_address import is_url
from tfdist.control.user_errors import first_paragraph
from tfdist.models.build_model import build_model
from tfdist.run.recovery import Recovery
from tfdist.runtime.errors import cause, message_of
from tfdist.telemetry import plot, summary
from tfdist.telemetry.events import Event, Tell
from tfdist.telemetry.timer import Clock
from tfdist.training.loop import TrainResult


@dataclass(frozen=True)
class Figures:
    """The session's numbers about a finished run. trainer: values from the trainer."""

    result: TrainResult
    verdict: str
    attempts: int
    clock: Clock
    trainer: Mapping[str, Any]


def run_summary(job: Job, recovery: Recovery, figures: Figures) -> dict[str, Any]:
    """The values of the summary that describe the training."""
    result, clock, losses = figures.result, figures.clock, recovery.losses.losses
    samples = recovery.progress.trained(result.step)
    return {
        "steps": result.step,
        "workers": job.runtime.size,
        "samples": samples,
        "attempts": figures.attempts,
        "train_s": clock.seconds,
        "samples_per_s": samples / max(clock.seconds, 1e-9),
        "pauses_s": dict(clock.pauses),
        **({"train/loss": losses[-1]} if losses else {}),
        **{f"eval/{name}": value for name, value in result.evaluation.items()},
        "verdict": figures.verdict,
        **({"snapshots": asdict(recovery.files.writer.stats)} if recovery.files.writer else {}),
        **figures.trainer,
    }


def leave_results(
    job: Job,
    weights: Mapping[str, np.ndarray],
    folder: Path,
    observer: Tell,
    step: int,
    values: Mapping[str, Any],
    unwritten: str,
) -> None:
    """Writes exports, curves.png, summary.json and the table on the console. Raises CheckpointError if the export
    fails; other failures only warn, since the rest can be made again from the logs.

    weights: see `Recovery.weights`. values: the run's values for the summary.
    unwritten: why the last snapshot could not be written; "" if it was.
    """
    config, info = job.config, source_info(job)
    formats = _formats(config)
    if formats:
        try:
            export_model(_plain_model(job, weights), folder / "export", formats)
        except Exception as error:  # noqa: BLE001 - including user code, while Keras traces and saves the model
            words = _in_words(error)
            saved = (
                f"nor could the last snapshot be written ({unwritten})" if unwritten else "the training itself is saved"
            )
            raise CheckpointError(
                f"The model could not be exported to {folder / 'export'} ({words}): free or repair it, then start"
                f" again; {saved}."
            ) from None
    log, curves = folder / "logs" / "rank-0.jsonl", folder / "curves.png"
    if config.telemetry.plot:
        entropy = info.get("data/eval_unigram_entropy_nats")
        problem = plot.draw_curves(log, curves, {"byte-unigram entropy": entropy} if entropy else None)
        if problem:
            observer(Event("warning", step, {"message": problem}))
    table = {
        "run_dir": config.run.run_dir if is_url(config.run.run_dir) else str(folder),
        "parameters": job.parameters,
        "global_batch": job.plan.global_batch,
        **values,
        **info,
        "log": str(log),
        "tensorboard": (
            f"tensorboard --logdir={folder / 'tensorboard'}"
            if "tensorboard" in config.telemetry.trackers.split(",")
            else ""
        ),
        "checkpoints": str(folder / "checkpoints"),
        "export": str(folder / "export") if formats else "",
        "curves": str(curves) if config.telemetry.plot and curves.exists() else "",
    }
    try:
        summary.write_summary(folder / "summary.json", table)
    except OSError as error:
        observer(Event("warning", step, {"message": f"The summary could not be written ({error})."}))
    summary.print_summary(table)


def _in_words(error: Exception) -> str:
    if isinstance(error, tf.errors.OpError):
        return cause(message_of(error))
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {first_paragraph(error)}"


def _formats(config: Config) -> tuple[str, ...]:
    return tuple(form for form in config.export.export.split(",") if form != "none")


def exportable(job: Job) -> Job:
    """Returns the job, with a warning where needed. Raises ConfigError if its model cannot be exported as requested."""
    formats = _formats(job.config)
    check_exportable(job.model, formats)
    hidden = state.hidden_variables(job.model) if "keras" in formats else []
    if not hidden:
        return job
    warning = (
        f"--export=keras leaves out the tf.Variable {hidden[0].name!r} of a layer, which Keras does not track: the"
        " exported model starts with its initial value. Create it with self.add_weight(trainable=False), or use"
        " --export=saved_model."
    )
    return dataclasses.replace(job, warnings=[*job.warnings, warning])


def source_info(job: Job) -> dict[str, Any]:
    """The facts that sources report about themselves (sizes, entropies, ...), as event values."""
    values: dict[str, Any] = {"data/train_samples": job.train_split.size}
    if job.eval_split:
        values["data/eval_samples"] = job.eval_split.size
        values |= {
            f"data/{name}": value for name, value in job.eval_split.info.items() if isinstance(value, (int, float, str))
        }
    return values


def _plain_model(job: Job, weights: Mapping[str, np.ndarray]) -> keras.Model:
    """A whole copy of the model outside of any strategy, with these weights."""
    keras.utils.set_random_seed(job.config.run.seed)
    copy = build_model(job.config.model, job.train_split.element_spec[0], job.train_split.num_classes)
    for key, variable in (state.model_variables(copy) | state.hidden(copy)).items():
        state.tf_variable(variable).assign(weights[key])
    return copy
