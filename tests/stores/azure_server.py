"""Runs Azurite, Microsoft's emulator of Azure's storage, as a process; gives the environment variable to reach it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

CONTAINER = "bucket"
# The public account of Azurite's documentation: it protects nothing.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azure_environment(port: int) -> dict[str, str]:
    blobs = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    account = f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};BlobEndpoint={blobs};"
    return {"AZURE_STORAGE_CONNECTION_STRING": account}


def azurite() -> list[str]:
    """Returns the command; [] if there is none."""
    found = shutil.which("azurite-blob")
    if found or not shutil.which("npx"):
        return [found] if found else []
    return ["npx", "--yes", "--package=azurite", "azurite-blob"]  # npm keeps what it has downloaded


@contextlib.contextmanager
def azure_server(patience: float = 120.0) -> Iterator[int]:
    """Yields the port of a server with an empty container. Raises OSError if it does not start."""
    from azure.storage.blob import BlobServiceClient

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--blobHost=127.0.0.1", f"--blobPort={port}", "--inMemoryPersistence", "--skipApiVersionCheck"]
    process = subprocess.Popen(
        [*azurite(), *options, "--silent", "--disableTelemetry"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # npx starts further processes
    )
    try:
        deadline = time.monotonic() + patience
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise OSError("Azurite did not start")
            time.sleep(0.1)
        (account,) = azure_environment(port).values()
        BlobServiceClient.from_connection_string(account).create_container(CONTAINER)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
