"""What others can watch while a run is going on: Prometheus endpoints, OpenTelemetry spans, traces; with real
sockets.
"""

import http.server
import os
import random
import signal
import threading
import time
import urllib.request

import pytest

from tests.e2e.job import free_ports
from tfdist.config import Config, parse_profile_steps
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, StartupError, UnsupportedError
from tfdist.control.ranks import parse_ranks
from tfdist.telemetry.events import Event, FanOut
from tfdist.telemetry.profiler import Profiler
from tfdist.telemetry.trackers import Run
from tfdist.training.loop_hooks import LoopSchedule

TRAIN = Event("train", 20, {"train/loss": 0.5, "perf/samples_per_s": 100.0})


def test_sections_are_told_also_when_they_fail(capsys):
    class Follower:
        told = []

        def __call__(self, event):
            self.told.append(event.kind)

        def enter(self, name):
            self.told.append(f"enter {name}")

        def leave(self, name, failed):
            self.told.append(f"leave {name} {failed}")
            if failed:
                raise OSError("gone")

    fan_out = FanOut([Follower(), print])
    with fan_out.section("save"):
        fan_out(TRAIN)
    with pytest.raises(KeyError), fan_out.section("step"):
        raise KeyError
    assert Follower.told == ["enter save", "train", "leave save False", "enter step", "leave step True"]
    assert len(fan_out.observers) == 1 and "Follower failed (OSError: gone)" in capsys.readouterr().err


def test_prometheus_reads_the_endpoint_of_every_worker(tmp_path):
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from tfdist.telemetry.prometheus import PrometheusEndpoint

    port = free_ports(2)
    endpoints = [
        PrometheusEndpoint(port, Run(tmp_path, "run5", attempt=3, resumed_step=10, rank=rank + 4, local_rank=rank))
        for rank in range(2)
    ]
    for endpoint in endpoints:
        fan_out = FanOut([endpoint])
        with fan_out.section("evaluation"):
            pass
        with fan_out.section("step"):
            fan_out(Event("start", 10, {"config_digest": "abc"}))
            fan_out(TRAIN)
            text = urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=20).read().decode()
        rank = str(4 + endpoints.index(endpoint))
        samples = {
            (sample.name, *sorted(value for name, value in sample.labels.items() if name != "rank")): sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert {sample.labels.get("rank") for key, sample in samples.items() if key[0].startswith("tfdist_")} == {rank}
        values = {key: sample.value for key, sample in samples.items()}
        assert (
            values[("tfdist_train_loss",)] == 0.5
            and values[("tfdist_step",)] == 20
            and values[("tfdist_attempt",)] == 3
        )
        assert values["tfdist_run_info", "abc", "run5"] == 1 and values["tfdist_events_total", "train"] == 1
        assert values["tfdist_section_active", "step"] == 1 and values["tfdist_section_active", "evaluation"] == 0
        assert (
            0 <= time.time() - values[("tfdist_section_start_time_seconds",)] < 60
            and values["tfdist_section_seconds_total", "evaluation"] >= 0
        )
        assert values[("process_resident_memory_bytes",)] > 1e6
    with pytest.raises(
        StartupError, match=f"--prometheus_port={port}: port {port + 1} of local rank 1 cannot be opened"
    ):
        PrometheusEndpoint(port, Run(tmp_path, "run5", local_rank=1))
    for endpoint in endpoints:
        endpoint.close()
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5)


def test_local_ranks():
    peers = ("a:1", "b:1", "a:2", "[::1]:5", "a:3")
    assert [Cluster("worker", rank, rank, 5, peers).local_rank for rank in range(5)] == [0, 0, 1, 0, 2]
    assert (
        Cluster().local_rank == 0
        and Cluster("worker", 3, 3, 4, started_by="mpirun", launcher_local_rank=1).local_rank == 1
    )
    assert Cluster("evaluator", 0, -1, 2, peers[:2]).local_rank == 0


def test_spans_arrive_at_a_collector(tmp_path, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from tfdist.telemetry.opentelemetry import Spans

    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=blue")
    of_the_user = random.getstate()
    fan_outs = [FanOut([Spans(Run(tmp_path, "run5", 1, rank=rank))]) for rank in range(2)]
    for fan_out in fan_outs:
        fan_out(Event("start", 0, {"startup_s": 9.0, "import_s": 4.0, "build_s": 3.0, "restore_s": 2.0, "workers": 2}))
        with fan_out.section("first step"):
            pass
        fan_out(TRAIN)
        with pytest.raises(KeyError), fan_out.section("evaluation"):
            raise KeyError
        fan_out(Event("save", 20, {"save/write_s": 1.5, "save/bytes": 10}))
        fan_out(Event("error", 20, {"message": "no more"}))
        fan_out.close()
    assert random.getstate() == of_the_user
    server.shutdown()
    server.server_close()
    resources = [resource for request in received for resource in request.resource_spans]
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert {attribute.key: attribute.value.string_value for attribute in resources[0].resource.attributes}.items() >= {
        "service.name": "tfdist",
        "team": "blue",
        "service.instance.id": "run5-0",
    }.items()
    assert len({span.trace_id for span in spans}) == 1  # all workers of the attempt in one trace
    own = {span.name: span for span in spans[: len(spans) // 2]}
    seconds = {
        name: round((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, 3) for name, span in own.items()
    }
    assert (
        set(own) == {"start-up", "import", "build", "restore", "train", "evaluation", "write save", "error"}
        and len(spans) == 16
    )
    assert (seconds["start-up"], seconds["import"], seconds["build"], seconds["restore"], seconds["write save"]) == (
        9,
        4,
        3,
        2,
        1.5,
    )
    assert (
        own["restore"].parent_span_id == own["start-up"].span_id
        and own["restore"].end_time_unix_nano == own["start-up"].end_time_unix_nano
    )
    assert own["evaluation"].status.code == 2 and own["error"].status.message == "no more"
    assert {attribute.key: attribute.value.double_value for attribute in own["train"].attributes}["train/loss"] == 0.5


def test_an_unknown_exporter_is_a_sentence(tmp_path, monkeypatch):
    pytest.importorskip("opentelemetry.sdk.trace")
    from tfdist.telemetry.opentelemetry import Spans

    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(UnsupportedError, match="OTEL_TRACES_EXPORTER=pigeon is not installed"):
        Spans(Run(tmp_path, "r"))


@pytest.fixture
def signals():
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def test_traces_of_given_steps_and_on_demand(tmp_path, signals):
    import tensorflow as tf

    now, told = [0], []
    profiler = Profiler((3, 5), Run(tmp_path, "r", rank=1, step=lambda: now[0]), told.append)
    fan_out = FanOut([profiler])

    def steps(first, last):
        for now[0] in range(first, last):
            with fan_out.section("step"):
                tf.add(tf.ones([4]), 1.0, name="inside").numpy()
                now[0] += 1

    steps(0, 3)
    assert not told
    steps(3, 8)
    assert [(event.kind, event.step, event.values["trace/first_step"]) for event in told] == [("trace", 5, 3)]
    (trace,) = (tmp_path / "tensorboard" / "rank-1" / "plugins" / "profile").glob("*/*.xplane.pb")
    assert b"train" in trace.read_bytes() and b"AddV2" in trace.read_bytes()
    os.kill(os.getpid(), signal.SIGUSR2)
    steps(8, 10)
    assert [(event.step, event.values["trace/first_step"]) for event in told] == [(5, 3), (9, 8)]
    os.kill(os.getpid(), signal.SIGUSR2)
    profiler.enter("step")
    fan_out.close()  # in the middle of a trace: it is written all the same
    assert len(told) == 3
    os.kill(os.getpid(), signal.SIGUSR2)  # after the run it does nothing


def test_traced_steps_are_calls_of_their_own():
    schedule = LoopSchedule(40, log_every=20, eval_every=0, save_every=0, traced=(23, 26))
    steps, step = [], 0
    while step < 40:
        step = schedule.next_boundary(step)
        steps.append(step)
    assert steps == [20, 23, 24, 25, 26, 40]
    assert LoopSchedule(40, 20, 0, 0).next_boundary(20) == 40


def test_flags_of_traces():
    assert (
        parse_profile_steps("100:110") == (100, 110)
        and parse_profile_steps("") is None
        and parse_ranks("profile_ranks", "all") is None
        and parse_ranks("profile_ranks", "0,3") == {0, 3}
    )
    for flags, sentence in (
        ({"profile_steps": "110:100"}, "--profile_steps=110:100 must be FIRST:LAST"),
        ({"profile_steps": "5"}, "--profile_steps=5 must be"),
        ({"profile_ranks": "0,x"}, "--profile_ranks=0,x must be all, or ranks"),
        ({"prometheus_port": -1}, "--prometheus_port=-1 is too small"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Config().replace(steps=10, **flags).validate()
