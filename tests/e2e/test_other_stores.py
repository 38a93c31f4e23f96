"""A run in stores other than S3: Google's and Azure's (emulators), WebHDFS (a server of the tests), Ceph's gateway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e import job
from tests.e2e.test_object_store import FLAGS, arrays, losses, machine, pace, same
from tests.stores.azure_server import azure_environment
from tests.stores.gcs_server import gcs_environment
from tests.stores.webhdfs_server import webhdfs_server
from tfdist.storage.object_store import ObjectStore

pytestmark = pytest.mark.thorough


@pytest.fixture(params=["gs", "webhdfs", "abfs", "ceph"])
def url(request, monkeypatch) -> Iterator[str]:
    """A place in an empty store, which jobs that are started reach, too."""
    place, scheme = "bucket/runs/one", request.param
    if scheme == "webhdfs":
        with webhdfs_server() as server:
            yield server.url
        return
    if scheme == "gs":
        variables = gcs_environment(request.getfixturevalue("gcs"))
    elif scheme == "abfs":
        variables = azure_environment(request.getfixturevalue("azure"))
    else:
        scheme, variables = "s3", request.getfixturevalue("ceph").environment()
    for name, value in variables.items():
        monkeypatch.setitem(job.ENVIRONMENT, name, value)
    yield f"{scheme}://{place}"


def test_a_run_that_is_killed_goes_on_elsewhere(url, tmp_path):
    job.run(1, [*FLAGS, f"--run_dir={tmp_path / 'undisturbed'}"])
    objects = ObjectStore(url)
    first, here = machine(tmp_path, "first", url)
    pace(here, 0.2)
    command = [sys.executable, "-m", "tfdist.train", *FLAGS, "--steps_per_loop=1", f"--run_dir={url}", first]
    process = subprocess.Popen(command, env={**job.ENVIRONMENT, "TFDIST_FAULTS": "armed"})
    job.wait_for(lambda: process.poll() is not None or any("20/manifest" in name for name in objects.names()))
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    second, folder = machine(tmp_path, "second", url)
    ended = job.train([*FLAGS, f"--run_dir={url}", second])
    assert ended.returncode == 0 and "resumed from" in ended.stdout + ended.stderr, ended.stdout + ended.stderr
    assert same(arrays(folder), arrays(tmp_path / "undisturbed"))
    assert losses(folder) == losses(tmp_path / "undisturbed")
    there = {name.split("/")[1] for name in objects.names("checkpoints/") if "/step-" in name}
    assert there == {"step-00000050", "step-00000060"} and objects.text("lease.json") is None
