"""A WebHDFS server for the tests: a name node and a data node in one, with files in memory.

https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

_PREFIX = "/webhdfs/v1"


class WebHdfsServer(ThreadingHTTPServer):
    """files: path -> content. users: names of the users that sent requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.times: dict[str, int] = {}  # path -> ms
        self.users: set[str] = set()
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        return f"webhdfs://127.0.0.1:{self.server_address[1]}/user/tests/run"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits 40 ms, until the client says that it has the headers
    server: WebHdfsServer

    def _do(self) -> None:
        parts = urlsplit(self.path)
        given = {name: values[0] for name, values in parse_qs(parts.query).items()}
        path = unquote(parts.path).removeprefix(_PREFIX)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "user.name" in given:
            self.server.users.add(given["user.name"])
        with self.server.lock:
            getattr(self, f"_{given['op'].lower()}")(path, given, body)

    do_GET = do_PUT = do_POST = do_DELETE = _do

    def _create(self, path: str, given: dict[str, str], body: bytes) -> None:
        if "written" not in given:
            self._redirect()
            return
        if path in self.server.files and given.get("overwrite") != "true":
            self._refuse(403, "FileAlreadyExistsException", path)
            return
        self.server.files[path] = body
        self._touch(path)
        self._answer(201)

    def _append(self, path: str, given: dict[str, str], body: bytes) -> None:
        if "written" not in given:
            self._redirect()
            return
        self.server.files[path] += body
        self._touch(path)
        self._answer(200)

    def _open(self, path: str, given: dict[str, str], body: bytes) -> None:
        if path not in self.server.files:
            self._refuse(404, "FileNotFoundException", path)
            return
        start = int(given.get("offset", 0))
        end = start + int(given["length"]) if "length" in given else None
        self._answer(200, self.server.files[path][start:end])

    def _getfilestatus(self, path: str, given: dict[str, str], body: bytes) -> None:
        if path in self.server.files:
            self._answer(200, json.dumps({"FileStatus": self._status(path, "")}).encode())
        elif self._below(path):
            folder = {"type": "DIRECTORY", "length": 0, "pathSuffix": ""}
            self._answer(200, json.dumps({"FileStatus": folder}).encode())
        else:
            self._refuse(404, "FileNotFoundException", path)

    def _liststatus(self, path: str, given: dict[str, str], body: bytes) -> None:
        path = path.rstrip("/")
        if path in self.server.files:
            found = [self._status(path, "")]
        elif below := self._below(path):
            names = sorted({name[len(path) + 1 :].partition("/")[0] for name in below})
            found = [
                self._status(f"{path}/{name}", name)
                if f"{path}/{name}" in self.server.files
                else {"type": "DIRECTORY", "length": 0, "pathSuffix": name}
                for name in names
            ]
        else:
            self._refuse(404, "FileNotFoundException", path)
            return
        self._answer(200, json.dumps({"FileStatuses": {"FileStatus": found}}).encode())

    def _rename(self, path: str, given: dict[str, str], body: bytes) -> None:
        target = given["destination"]
        moved = path in self.server.files and target not in self.server.files
        if moved:
            self.server.files[target] = self.server.files.pop(path)
            self.server.times[target] = self.server.times.pop(path)
        self._answer(200, json.dumps({"boolean": moved}).encode())

    def _delete(self, path: str, given: dict[str, str], body: bytes) -> None:
        self._answer(200, json.dumps({"boolean": self.server.files.pop(path, None) is not None}).encode())

    def _mkdirs(self, path: str, given: dict[str, str], body: bytes) -> None:
        self._answer(200, b'{"boolean": true}')

    def _status(self, path: str, suffix: str) -> dict:
        return {
            "type": "FILE",
            "length": len(self.server.files[path]),
            "modificationTime": self.server.times[path],
            "pathSuffix": suffix,
        }

    def _touch(self, path: str) -> None:
        self.server.times[path] = time.time_ns() // 1_000_000

    def _below(self, path: str) -> list[str]:
        return [name for name in self.server.files if name.startswith(path.rstrip("/") + "/")]

    def _redirect(self) -> None:
        host, port = self.server.server_address[:2]
        self._answer(307, headers={"Location": f"http://{host}:{port}{self.path}&written=1"})

    def _refuse(self, status: int, kind: str, message: str) -> None:
        self._answer(status, json.dumps({"RemoteException": {"exception": kind, "message": message}}).encode())

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments) -> None: ...


@contextlib.contextmanager
def webhdfs_server() -> Iterator[WebHdfsServer]:
    """Yields a server that runs in threads of this process."""
    server = WebHdfsServer()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
