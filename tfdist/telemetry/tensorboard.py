"""Scalars for TensorBoard, one run over all attempts, written with TensorBoard's own package."""

from __future__ import annotations

from numbers import Real
from pathlib import Path

from tfdist.telemetry.events import Event

_GROUPS = ("train/", "eval/", "perf/", "staleness/")


class TensorBoardObserver:
    """Writes train/, eval/, perf/ and staleness/ values as scalars, and the flags as text.

    resumed_step: what earlier attempts wrote after this step is repeated now; TensorBoard is told to forget it.
    forgets: whether to say so at all. Said by every attempt, the first too: TensorBoard's server takes no notice of the
      first START of a run.
    """

    def __init__(self, folder: Path, resumed_step: int, *, forgets: bool = True):
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._proto = event_pb2
        self._writer = EventFileWriter(str(folder), flush_secs=5)
        if forgets:
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(step=resumed_step + 1, session_log=session))

    def __call__(self, event: Event) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=float(value)) for name, value in event.values.items()
                   if name.startswith(_GROUPS) and isinstance(value, Real)]
        if scalars:
            self._writer.add_event(self._proto.Event(wall_time=event.time, step=event.step, summary=Summary(value=scalars)))
        if event.values.get("flags"):
            self._writer.add_event(self._proto.Event(wall_time=event.time, step=event.step, summary=Summary(value=[_text("flags", event.values["flags"])])))
        if event.kind != "train":
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _text(tag: str, text: str):
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown for "as it is"
    tensor = TensorProto(dtype=DT_STRING, string_val=[indented.encode()])
    return Summary.Value(tag=tag, metadata=create_summary_metadata(display_name=tag, description=""), tensor=tensor)
