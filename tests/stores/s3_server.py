"""Runs moto's S3 server as a process; gives the variables to reach it, as users set them, and its content."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import boto3

BUCKET = "bucket"


@dataclass
class S3Server:
    """A server that listens on a loopback port."""

    port: int

    def environment(self, port: int = 0) -> dict[str, str]:
        """Returns the variables to reach the server. port: that of a proxy in front of it, if any."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "a secret of tests",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def empty(self) -> None:
        """Deletes everything, and makes the bucket. Raises OSError while the server is not up."""
        reset = urllib.request.Request(f"http://127.0.0.1:{self.port}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset, timeout=30).close()
        self.make_bucket()

    def make_bucket(self) -> None:
        self._client.create_bucket(Bucket=BUCKET)

    def content(self, name: str) -> bytes | None:
        """Returns the content of an object in the bucket; None if it does not exist."""
        with contextlib.suppress(self._client.exceptions.NoSuchKey):
            return self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        return None

    def change(self, name: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=name, Body=content)

    def remove(self, name: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=name)

    def names(self, below: str = "") -> list[str]:
        return [entry["Key"] for entry in self._client.list_objects_v2(Bucket=BUCKET, Prefix=below).get("Contents", ())]

    @functools.cached_property
    def _client(self):
        values = self.environment()
        return boto3.client(
            "s3",
            endpoint_url=values["AWS_ENDPOINT_URL"],
            aws_access_key_id=values["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=values["AWS_SECRET_ACCESS_KEY"],
            region_name=values["AWS_REGION"],
        )


@contextlib.contextmanager
def s3_server(patience: float = 120.0) -> Iterator[S3Server]:
    """Yields a server with an empty bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = S3Server(free.getsockname()[1])
    command = shutil.which("moto_server", path=os.path.dirname(sys.executable)) or "moto_server"
    process = subprocess.Popen(
        [command, "-H", "127.0.0.1", "-p", str(server.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                server.empty()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "moto's server did not start"
                time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()
