"""Finds samples that may have caused a loss that was not finite, or a label that fits no output. It searches only after
the damage (data/flaws.py), in the samples read by the last call of the training function, or by the evaluation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from tfdist.build import Job
from tfdist.control.exit_codes import DataError, DivergedError
from tfdist.data import flaws
from tfdist.data.reading import Reading
from tfdist.models.missing_rows import table_sizes
from tfdist.run.recovery import Recovery
from tfdist.runtime.errors import bad_label, missing_row
from tfdist.telemetry.events import Event


class BadSamples:
    """Tracks the position of training. warn: shows a sentence to the user; used at most once, and only on the chief."""

    def __init__(self, job: Job, recovery: Recovery, first_step: int, warn: Callable[[str], None]):
        self.job, self.recovery, self._warn, self._warned = job, recovery, warn, False
        self.called_at = self._logged_at = first_step  # steps

    @contextlib.contextmanager
    def naming(self, evaluated: bool = False) -> Iterator[None]:
        """Context manager: errors that samples may have caused are raised again with these samples named."""
        try:
            yield
        except DivergedError as error:
            found = self.flaws(evaluated)
            if not found:
                raise
            raise DivergedError(f"{found} Repair or leave out such samples first. {error}") from error
        except tf.errors.InvalidArgumentError as error:
            label = bad_label(error)
            sentence = label.sentence if label else missing_row(error)
            if not sentence:
                raise
            found = self.flaws(evaluated, label.classes if label else None, failed=True)
            raise DataError(f"{sentence} {found}".strip()) from error

    def flaws(
        self, evaluated: bool = False, classes: int | None = None, first: int | None = None, failed: bool = False
    ) -> str:
        """Describes suspicious samples since step `first` (None: in the last call), or among the evaluated ones; or
        returns "". failed: the step after the last completed one failed, and its samples count, too.
        """
        config, job = self.job.config, self.job
        choices = {place: flaws.rows(count) for place, count in table_sizes(job.model).items()}
        if classes is not None:
            choices["y"] = flaws.classes(classes)
        if evaluated and job.eval_split:
            return flaws.find_evaluated(job.eval_split, limit=config.data.eval_samples, choices=choices)
        first = self.called_at if first is None else first
        steps = max(1, int(job.step.counter.numpy()) - first + failed)
        return flaws.find_trained(
            job.train_split,
            job.plan,
            Reading(config.run.seed, config.data.shuffle, cut=self.recovery.stream_cut),
            first=self.recovery.progress.consumed(first),
            count=steps * job.plan.global_batch,
            choices=choices,
        )

    def evaluated(self, means: Mapping[str, float]) -> None:
        """Checks the means of an evaluation, and warns if they are not finite, or if no sample counted."""
        if not math.isfinite(means["loss"]):
            self._report("the loss of the evaluation is not finite", lambda: self.flaws(evaluated=True))
        elif not means["samples"]:
            nothing = "its loss and metrics are shown as 0, as in Keras' evaluate."
            self._report("all samples of the evaluation have weight 0", lambda: nothing)

    def observed(self, event: Event) -> None:
        """Checks a train event, and warns if updates were skipped."""
        if event.values.get("train/skipped_steps") and self.job.config.loop.on_nan == "skip":
            self._report("updates were skipped", lambda: self.flaws(first=self._logged_at))
        self._logged_at = event.step

    def _report(self, what: str, find: Callable[[], str]) -> None:
        if self.job.runtime.rank == 0 and not self._warned:
            self._warned = True
            if found := find():
                self._warn(f"{what}: {found}")
