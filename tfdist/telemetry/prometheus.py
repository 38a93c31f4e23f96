"""A Prometheus endpoint per worker: http://HOST:PORT/metrics with the port --prometheus_port + local rank.

tfdist_run_info{run_id,config_digest}    gauge: 1
tfdist_attempt, tfdist_step              gauge: number of earlier starts of the run; the last step reported
tfdist_train_loss, tfdist_perf_..., ...  gauge: the numbers of the last events, with _ for / (telemetry/events.py)
tfdist_events_total{kind}                counter: events, for example warnings
tfdist_section_seconds_total{section}    counter: time in finished steps, evaluations, saves, restores
tfdist_section_active{section}           gauge: 1 for the section that the worker is in
tfdist_section_start_time_seconds        gauge: Unix time at which the worker last entered or left a section; shows
                                         since when a worker hangs
process_...                              memory, processor time, open files of the process

All but process_... have the label rank. An example of a Grafana dashboard: scripts/grafana_dashboard.json.
"""

from __future__ import annotations

import re
import time
from typing import Any

from tfdist.control.exit_codes import StartupError
from tfdist.control.optional_packages import optional_module
from tfdist.telemetry.events import Event, Observer
from tfdist.telemetry.trackers import Run, numbers


class PrometheusEndpoint(Observer):
    """Serves the numbers of one worker.

    Raises UnsupportedError without the package, StartupError if the port is taken.
    """

    def __init__(self, port: int, run: Run):
        self._client = optional_module("prometheus_client", f"--prometheus_port={port}", "prometheus_client")
        self.port = port + run.local_rank
        self._registry = self._client.CollectorRegistry()
        self._client.ProcessCollector(registry=self._registry)
        self._rank, self._run = str(run.rank), run
        self._gauges: dict[str, Any] = {}
        labels = {"registry": self._registry}
        self._events = self._client.Counter("tfdist_events", "Events by kind.", ["kind", "rank"], **labels)
        self._seconds = self._client.Counter(
            "tfdist_section_seconds", "Seconds in finished sections.", ["section", "rank"], **labels
        )
        self._active = self._client.Gauge(
            "tfdist_section_active", "1 for the section that the worker is in.", ["section", "rank"], **labels
        )
        self._info = self._client.Gauge(
            "tfdist_run_info", "Identity of the run.", ["run_id", "config_digest", "rank"], **labels
        )
        self._entered: list[float] = []
        try:
            self._server, self._thread = self._client.start_http_server(self.port, registry=self._registry)
        except (OSError, OverflowError) as error:  # OverflowError: the port number is too large
            reason = error.strerror if isinstance(error, OSError) else error
            raise StartupError(
                f"--prometheus_port={port}: port {self.port} of local rank {run.local_rank} cannot be opened"
                f" ({reason}): choose another."
            ) from error
        self._set("attempt", run.attempt)
        self._set("step", run.resumed_step)

    def _set(self, name: str, value: float) -> None:
        name = "tfdist_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if name not in self._gauges:
            self._gauges[name] = self._client.Gauge(name, "The last reported value.", ["rank"], registry=self._registry)
        self._gauges[name].labels(self._rank).set(value)

    def __call__(self, event: Event) -> None:
        self._events.labels(event.kind, self._rank).inc()
        if event.kind == "start":
            self._info.labels(self._run.run_id, event.values.get("config_digest", ""), self._rank).set(1)
        for name, value in numbers(event).items():
            self._set(name, value)
        self._set("step", event.step)  # last: whoever sees the new step sees its other values, too

    def enter(self, name: str) -> None:
        self._entered.append(time.monotonic())
        self._active.labels(name, self._rank).set(1)
        self._set("section_start_time_seconds", time.time())

    def leave(self, name: str, failed: bool) -> None:
        self._seconds.labels(name, self._rank).inc(time.monotonic() - self._entered.pop())
        self._active.labels(name, self._rank).set(0)
        self._set("section_start_time_seconds", time.time())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
