"""Runs Ceph's S3 gateway (radosgw) with a monitor and a store in memory, as processes. The programs are in Debian's
packages ceph-mon, ceph-osd and radosgw. It needs no manager, and no authentication between these processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.stores.s3_server import S3Server

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "ceph-authtool", "radosgw", "radosgw-admin")
_SETTINGS = """[global]
fsid = {fsid}
mon host = {monitor}
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon max pg per osd = 1000
run dir = {folder}
admin socket =
pid file =
log file =
crash dir = {folder}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd class dir = {libraries}/rados-classes
erasure code dir = {libraries}/ceph/erasure-code
plugin dir = {libraries}/ceph
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
osd journal =
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw mime types file = {folder}/mime.types
rgw data = {folder}
keyring = {folder}/keyring
ms mon client mode = crc
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if not shutil.which(name)]


@contextlib.contextmanager
def ceph_server(folder: Path, patience: float = 90.0) -> Iterator[S3Server]:
    """Yields a server with an empty bucket. Raises OSError if it does not start."""
    ceph = _Ceph(folder)
    try:
        ceph.start(patience)
        server = S3Server(ceph.port)
        server.make_bucket()
        yield server
    finally:
        ceph.end()


class _Ceph:
    def __init__(self, folder: Path):
        root = Path(shutil.which("radosgw") or "/usr/bin/radosgw").parents[2]  # packages may be unpacked elsewhere
        (libraries,) = (found.parent for found in root.glob("usr/lib/*/rados-classes"))
        self.folder, self.port, monitors = folder, _free_port(), (_free_port(), _free_port())
        self._monitor = "[v2:127.0.0.1:{},v1:127.0.0.1:{}]".format(*monitors)
        self._fsid, self._processes = str(uuid.uuid4()), list[subprocess.Popen]()
        self._environment = {
            **os.environ,
            "LD_LIBRARY_PATH": f"{libraries}:{libraries}/ceph:{root}/lib/{libraries.name}",
            "PYTHONPATH": f"{root}/usr/lib/python3/dist-packages",  # for the program `ceph`
            "CEPH_CONF": str(folder / "ceph.conf"),
        }
        for name in ("mon", "osd"):
            (folder / name).mkdir(parents=True)
        (folder / "mime.types").write_text("text/plain txt\n")
        values = {"fsid": self._fsid, "monitor": self._monitor, "folder": folder, "libraries": libraries}
        (folder / "ceph.conf").write_text(_SETTINGS.format(port=self.port, **values))

    def start(self, patience: float) -> None:
        folder = self.folder
        self._do("monmaptool", "--create", "--addv", "a", self._monitor, "--fsid", self._fsid, str(folder / "monmap"))
        for name in ("mon.", "client.rgw"):
            how = [] if (folder / "keyring").exists() else ["--create-keyring"]
            self._do("ceph-authtool", str(folder / "keyring"), *how, "--gen-key", "-n", name, "--cap", "mon", "allow *")
        self._do("ceph-mon", "--mkfs", "-i", "a", f"--monmap={folder}/monmap", f"--keyring={folder}/keyring")
        self._begin("ceph-mon", "-i", "a", "-f")
        disk = str(uuid.uuid4())
        self._do("ceph", f"--connect-timeout={patience:.0f}", "osd", "new", disk, "0")
        self._do("ceph-osd", "-i", "0", "--mkfs", f"--osd-uuid={disk}")
        self._begin("ceph-osd", "-i", "0", "-f")
        self._begin("radosgw", "-n", "client.rgw", "-f")
        deadline = time.monotonic() + patience
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}", timeout=5):
                break
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise OSError("Ceph did not start")
            time.sleep(0.2)
        values = S3Server(self.port).environment()
        keys = [f"--access-key={values['AWS_ACCESS_KEY_ID']}", f"--secret-key={values['AWS_SECRET_ACCESS_KEY']}"]
        self._do("radosgw-admin", "-n", "client.rgw", "user", "create", "--uid=tests", "--display-name=tests", *keys)

    def end(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _do(self, *command: str) -> None:
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr[-2000:]}")

    def _begin(self, *command: str) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._processes.append(subprocess.Popen(command, env=self._environment, **quiet))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
