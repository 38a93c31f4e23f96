"""TensorBoard: scalars, flags as text and as hyperparameters, histograms of weights; one run over all attempts.

Written with TensorBoard's own package.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from importlib import import_module
from io import BytesIO
from numbers import Real
from pathlib import Path
from typing import Any

from tfdist.telemetry.appended_file import AppendedFile
from tfdist.telemetry.events import Event, Observer
from tfdist.telemetry.trackers import Run

_GROUPS = ("train/", "eval/", "perf/", "staleness/")
_number = itertools.count()  # of the files of this process


def track(run: Run) -> TensorBoardObserver:
    """Makes the tracker `tensorboard`, which writes to RUN_DIR/tensorboard."""
    return TensorBoardObserver(run.folder / "tensorboard", run.resumed_step, run=run)


class _EventsFile(AppendedFile):
    """A file of TensorBoard's events in a folder. Unlike TensorBoard's own EventFileWriter it outlives a full disk."""

    def __init__(self, folder: Path):
        self._messages = _messages("event")
        super().__init__(folder / "events")

    def path_now(self) -> Path:
        """A name after all earlier ones: TensorBoard reads the files of a folder in the order of their names."""
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_number):04d}"
        return self.path.with_name(name)

    def beginning(self) -> bytes:
        return _record(self._messages.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add_event(self, event: Any) -> None:
        self.write(_record(event))


def _record(message: Any) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = BytesIO()
    RecordWriter(record).write(message.SerializeToString())
    return record.getvalue()


class TensorBoardObserver(Observer):
    """Writes train/, eval/, perf/ and staleness/ values as scalars, and the flags as text.

    resumed_step: values that earlier attempts wrote after this step come again; TensorBoard is told to discard the old.
    forgets: whether to tell it so at all. Every attempt does, the first too, because TensorBoard's server ignores the
      first START of a run.
    run: gives hyperparameters and weights; the weights' histograms are written every --histograms_every steps, at the
      next train event. None: neither is written.
    """

    def __init__(self, folder: Path, resumed_step: int, *, forgets: bool = True, run: Run | None = None):
        self._proto = _messages("event")
        self._writer = _EventsFile(folder)
        self._run, self._forgets = run, forgets
        self._last = {"train": resumed_step, "eval": resumed_step - 1}  # which may be evaluated again
        self._histograms_every = run.flags.get("histograms_every", 0) if run else 0
        if forgets:
            self._forget(resumed_step + 1)

    def _forget(self, step: int) -> None:
        """Tells TensorBoard that values from this step on will come again."""
        session = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._writer.add_event(self._proto.Event(step=step, session_log=session))

    def __call__(self, event: Event) -> None:
        Summary = _messages("summary").Summary
        if event.step <= self._last.get(event.kind, -1) and self._forgets:  # after a rollback
            self._forget(event.step)
            self._last = {kind: min(last, event.step - 1) for kind, last in self._last.items()}
        elif event.kind == "train":
            self._write_histograms(event)
        if event.kind in self._last:
            self._last[event.kind] = event.step
        scalars = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in event.values.items()
            if event.kind in ("train", "eval") and name.startswith(_GROUPS) and isinstance(value, Real)
        ]  # not for "end", which repeats earlier values
        if scalars:
            self._writer.add_event(
                self._proto.Event(wall_time=event.time, step=event.step, summary=Summary(value=scalars))
            )
        if event.values.get("flags"):
            self._writer.add_event(
                self._proto.Event(
                    wall_time=event.time,
                    step=event.step,
                    summary=Summary(value=[_text("flags", event.values["flags"])]),
                )
            )
        if self._run and event.kind in ("start", "end"):
            self._hyper_parameters(self._run, event)

    def _write_histograms(self, event: Event) -> None:
        every = self._histograms_every
        if self._run and every and event.step // every > self._last["train"] // every:
            from tensorboard.plugins.histogram.summary_v2 import histogram_pb

            for name, value in self._run.weights().items():
                self._writer.add_event(
                    self._proto.Event(
                        wall_time=event.time, step=event.step, summary=histogram_pb(f"weights/{name}", value)
                    )
                )

    def _hyper_parameters(self, run: Run, event: Event) -> None:
        """Writes the flags at the start of the run, and its success at its end, but not before: TensorBoard keeps the
        first status that it reads.
        """
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        if event.kind == "start":
            summary = hparams_pb(dict(run.flags), trial_id=run.run_id, start_time_secs=event.time)
        elif not event.values.get("stopped"):
            summary, plugin = _messages("summary"), import_module("tensorboard.plugins.hparams.plugin_data_pb2")
            status = import_module("tensorboard.plugins.hparams.api_pb2").STATUS_SUCCESS
            end = plugin.SessionEndInfo(status=status, end_time_secs=event.time)
            data = plugin.HParamsPluginData(session_end_info=end)
            summary = summary.Summary(
                value=[
                    summary.Summary.Value(
                        tag=metadata.SESSION_END_INFO_TAG,
                        metadata=metadata.create_summary_metadata(data),
                        tensor=metadata.NULL_TENSOR,
                    )
                ]
            )
        else:
            return
        self._writer.add_event(self._proto.Event(wall_time=event.time, step=event.step, summary=summary))

    def close(self) -> None:
        self._writer.close()


def _messages(name: str) -> Any:
    """Returns TensorBoard's protocol buffers of one file, which are unknown to type checkers."""
    return import_module(f"tensorboard.compat.proto.{name}_pb2")


def _text(tag: str, text: str):
    from tensorboard.plugins.text.metadata import create_summary_metadata

    indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown for preformatted text
    tensor = _messages("tensor").TensorProto(dtype=_messages("types").DT_STRING, string_val=[indented.encode()])
    return _messages("summary").Summary.Value(
        tag=tag, metadata=create_summary_metadata(display_name=tag, description=""), tensor=tensor
    )
