"""Horovod where it is not installed, its settings, and who is missing at the start."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, ExitCode, PeerLostError, StartupError, UnsupportedError
from tfdist.control.preflight import PortReservation
from tfdist.runtime import horovod_start
from tfdist.runtime.errors import explain
from tfdist.runtime.factory import create_runtime


def test_without_horovod_the_script_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.delitem(sys.modules, "horovod.tensorflow", raising=False)
    with pytest.raises(UnsupportedError, match="scripts/install_horovod.sh") as told:
        create_runtime(Config().replace(strategy="horovod"), Cluster(), began=None)
    assert told.value.exit_code == ExitCode.UNSUPPORTED and "\n" not in str(told.value)


def test_a_launcher_without_addresses_is_for_horovod_only():
    with pytest.raises(ConfigError, match="--strategy=multi_worker, but mpirun"):
        create_runtime(Config().replace(strategy="multi_worker"), Cluster(size=2, started_by="mpirun"), began=None)


def test_settings():
    config = Config().replace(
        horovod_fusion_mb=2.0, horovod_cycle_ms=0.5, heartbeat_timeout=3.2, collective_timeout=9.0
    )
    found = horovod_start.settings(config, 3)
    assert (
        found["HOROVOD_FUSION_THRESHOLD"] == str(2 << 20)
        and found["HOROVOD_CYCLE_TIME"] == "0.5"
        and found["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "4"
    )
    # Horovod ignores a shutdown time below the check time.
    assert int(found["HOROVOD_STALL_CHECK_TIME_SECONDS"]) <= int(found["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]) == 9
    assert (
        horovod_start.settings(config.replace(collective_timeout=0.0), 3)["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "0"
    )
    deterministic = config.replace(deterministic=True)
    assert [horovod_start.settings(deterministic, size)["HOROVOD_FUSION_THRESHOLD"] for size in (2, 3)] == [
        str(2 << 20),
        "0",
    ]


def test_who_is_missing_is_named():
    pytest.importorskip("horovod", reason="Horovod's rendezvous server is part of Horovod")
    reserved = PortReservation(2)
    cluster = Cluster("worker", 0, 0, 2, tuple(reserved.addresses), {"worker": reserved.addresses})
    port = int(reserved.addresses[0].rpartition(":")[2])
    server = horovod_start._rendezvous_server(port, host="")  # beside the reservation, as under the launcher
    try:
        with pytest.raises(StartupError, match=r"worker 1 \(rank 1, .*did not appear within 0.3 s"):
            horovod_start.wait_for_all(("127.0.0.1", port), cluster, 0.3)
    finally:
        server.shutdown()
        server.server_close()
        reserved.close()
    with pytest.raises(StartupError, match="did not answer within 0.3 s"):
        horovod_start.wait_for_all(("127.0.0.1", port), cluster, 0.3)


def test_a_lost_peer_is_explained():
    for text in (
        "Horovod has been shut down. This was caused by an exception on one of the ranks",
        "[/x/gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:4306: Connection reset by peer",
    ):
        assert isinstance(explain(tf.errors.UnknownError(None, None, text), Cluster(size=2)), PeerLostError)


@pytest.mark.parametrize("missing", ["g++", "make"])
def test_the_installer_names_what_it_needs(missing, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in {"bash", "dirname", "mkdir", "mktemp", "flock", "rm", "g++", "make", "cmake"} - {missing}:
        (tools / tool).symlink_to(shutil.which(tool) or "/bin/true")
    (tools / "python").symlink_to(sys.executable)
    script = Path("scripts/install_horovod.sh").resolve()
    made = subprocess.run(
        ["bash", script, "--force"],
        capture_output=True,
        text=True,
        env={"PATH": str(tools), "HOME": str(tmp_path), "HOROVOD_PYTHON": sys.executable},
    )
    assert made.returncode == ExitCode.UNSUPPORTED and f"{missing} (apt-get install {missing}" in made.stderr, (
        made.stderr
    )
