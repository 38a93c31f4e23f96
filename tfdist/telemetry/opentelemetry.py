"""OpenTelemetry spans of every worker: start-up with its parts, training intervals, evaluations, saves, restores.

The usual variables apply: OTEL_TRACES_EXPORTER (otlp, console, or any installed one), OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_SDK_DISABLED. A tracer provider that
the program has already set is used as it is. Otherwise all workers of one attempt share one trace id, computed from run
id and attempt. No span covers the whole run: it would be sent only at the end, and never by a process that is killed.
"""

from __future__ import annotations

import hashlib
import os
import time
from importlib.metadata import entry_points

from tfdist.control import sections
from tfdist.control.exit_codes import UnsupportedError
from tfdist.control.optional_packages import isolate_random, optional_module
from tfdist.telemetry.events import Event, Observer
from tfdist.telemetry.trackers import Run, numbers

_PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_STARTUP_PARTS = (("import", "import_s"), ("build", "build_s"), ("restore", "restore_s"))  # in order of time
_SECTIONS = (sections.EVALUATION, sections.SAVE, sections.RESTORE)


class Spans(Observer):
    """Turns events and sections into spans. Raises UnsupportedError without the packages."""

    def __init__(self, run: Run):
        sdk = optional_module("opentelemetry.sdk.trace", "--opentelemetry", _PACKAGES)
        from opentelemetry import trace

        self._own = None
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            provider = self._own = _make_provider(sdk, run)
        self._tracer = provider.get_tracer("tfdist")
        self._constant = {"tfdist.run_id": run.run_id, "tfdist.rank": run.rank, "tfdist.attempt": run.attempt}
        self._interval_began: int | None = None
        self._open: list = []

    def __call__(self, event: Event) -> None:
        end = _nanoseconds(event.time)
        if event.kind == "start":
            self._start_up(event)
        elif event.kind == "train":
            self._span("train", self._interval_began or end, end, {"tfdist.step": event.step, **numbers(event)})
            self._interval_began = None
        elif event.kind in ("save", "backup"):
            self._span(
                f"write {event.kind}",
                end - _nanoseconds(event.values.get("save/write_s", 0.0)),
                end,
                {"tfdist.step": event.step, **numbers(event)},
            )
        elif event.kind in ("warning", "error", "end"):
            self._span(
                event.kind,
                end,
                end,
                {"tfdist.step": event.step, "message": str(event.values.get("message", ""))},
                failed=event.kind == "error",
            )

    def _start_up(self, event: Event) -> None:
        from opentelemetry import context, trace

        end = _nanoseconds(event.time)
        begin = end - _nanoseconds(event.values.get("startup_s", 0.0))
        whole = self._tracer.start_span(
            "start-up",
            context=context.Context(),
            start_time=begin,
            attributes={**self._constant, "tfdist.step": event.step, **numbers(event)},
        )
        at = begin
        for name, seconds in _STARTUP_PARTS:
            after = at + _nanoseconds(event.values.get(seconds, 0.0))
            self._tracer.start_span(
                name, context=trace.set_span_in_context(whole, context.Context()), start_time=at
            ).end(after)
            at = after
        whole.end(end)

    def _span(self, name: str, begin: int, end: int, attributes: dict, *, failed: bool = False) -> None:
        from opentelemetry import context, trace

        span = self._tracer.start_span(
            name, context=context.Context(), start_time=begin, attributes={**self._constant, **attributes}
        )
        if failed:
            span.set_status(trace.StatusCode.ERROR, attributes["message"])
        span.end(end)

    def enter(self, name: str) -> None:
        from opentelemetry import context

        if self._interval_began is None and name in sections.STEPS:
            self._interval_began = time.time_ns()
        self._open.append(
            self._tracer.start_span(name, context=context.Context(), attributes=self._constant)
            if name in _SECTIONS
            else None
        )

    def leave(self, name: str, failed: bool) -> None:
        from opentelemetry import trace

        if span := self._open.pop():
            if failed:
                span.set_status(trace.StatusCode.ERROR)
            span.end()

    def close(self) -> None:
        if self._own:
            self._own.shutdown()


def _make_provider(sdk, run: Run):
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class OneTrace(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            return int.from_bytes(hashlib.sha256(f"{run.run_id}/{run.attempt}".encode()).digest()[:16], "big")

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "tfdist"}))
    provider = sdk.TracerProvider(
        resource=resource.merge(Resource({"service.instance.id": f"{run.run_id}-{run.rank}"})), id_generator=OneTrace()
    )
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        if name != "none":
            provider.add_span_processor(BatchSpanProcessor(_exporter(name)))
    isolate_random()
    return provider


def _exporter(name: str):
    """Returns the exporter installed under `name`, found in the way of OpenTelemetry's own configuration."""
    found = next(
        (
            entry
            for candidate in ({"otlp": "otlp_proto_http"}.get(name, name), name)
            for entry in entry_points(group="opentelemetry_traces_exporter", name=candidate)
        ),
        None,
    )
    if found is None:
        raise UnsupportedError(
            f"OTEL_TRACES_EXPORTER={name} is not installed: pip install {_PACKAGES}, or set it to console or none."
        )
    return found.load()()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
