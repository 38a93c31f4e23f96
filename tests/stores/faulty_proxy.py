"""A proxy in front of an S3 server that makes the faults of networks and stores: it drops connections, delays, refuses,
answers with errors, truncates bodies, and returns outdated listings.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("drop", "drop_answer", "delay", "500", "503", "403", "truncate", "stale")
_CODES = {
    "500": "InternalError",
    "503": "SlowDown",
    "403": "AccessDenied",
    "412": "PreconditionFailed",
    "301": "PermanentRedirect",  # for a bucket in another region, like 400
    "400": "AuthorizationHeaderMalformed",
}
_REGION = ("x-amz-bucket-region", "eu-west-1")
_SILENCE_SECONDS = 60.0
_PIECE_BYTES = 1 << 18  # of a body that is sent slowly
_FORWARDED_SECONDS = 2.0  # a request that takes longer is one with the fault "silence"


class FaultyProxy(ThreadingHTTPServer):
    """Forwards to a loopback port.

    draw: (method, path) of a request -> one of FAULTS, another code, "silence", "flip" (a bit of the sent body) or "".
    bytes_per_second: limit for bodies, on each connection; 0: no limit. done: how often each fault was made. headers:
    path -> names of the headers of the last PUT to it, in lower case.
    """

    daemon_threads = True

    def __init__(self, port: int, draw: Callable[[str, str], str] = lambda method, path: ""):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.draw, self.bytes_per_second, self.done = port, draw, 0.0, Counter()
        self.delay_seconds = 0.3
        self.headers: dict[str, set[str]] = {}
        self.listings: dict[str, tuple] = {}  # path -> an earlier answer
        self.port = self.server_address[1]
        self._changed, self._under_way, self._closed = threading.Condition(), 0, False

    def begins(self) -> bool:
        """Counts a request that begins. Returns False if requests are no longer answered."""
        with self._changed:
            self._under_way += not self._closed
            return not self._closed

    def ends(self) -> None:
        """Counts the end of a request that has begun."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Stops forwarding: requests that killed processes have sent would arrive after the end of these processes."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way, timeout=_FORWARDED_SECONDS)

    def handle_error(self, request, client_address) -> None: ...  # connections that end early are intended


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits 40 ms, until the client says that it has the headers
    server: FaultyProxy

    def _do(self) -> None:
        if not self.server.begins():
            self._hang_up()
            return
        try:
            self._answer_or_fail()
        finally:
            self.server.ends()

    def _answer_or_fail(self) -> None:
        body = self._body()
        fault = self.server.draw(self.command, self.path)
        if fault:
            self.server.done[fault] += 1
        if self.command == "PUT":
            self.server.headers[self.path.partition("?")[0]] = {name.lower() for name in self.headers}
        if fault == "flip":
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        if self.server.bytes_per_second:
            time.sleep(len(body) / self.server.bytes_per_second)
        if fault == "silence":
            time.sleep(_SILENCE_SECONDS)
        if fault == "drop":
            self._hang_up()
            return
        if fault in _CODES:
            text = f"<Error><Code>{_CODES[fault]}</Code><Message>drawn</Message></Error>".encode()
            headers = [("Content-Type", "application/xml"), *([_REGION] if fault in ("301", "400") else [])]
            self._answer(int(fault), headers, b"" if self.command == "HEAD" else text)
            return
        if fault == "delay":
            time.sleep(self.server.delay_seconds)
        answer = self._forward(body)
        if "list-type" in self.path:
            earlier = self.server.listings.get(self.path)
            self.server.listings[self.path] = answer
            if fault == "stale" and earlier:
                answer = earlier
        if fault == "drop_answer":
            self._hang_up()
            return
        self._answer(*answer, cut=fault == "truncate")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
            connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            found = connection.getresponse()
            kept = [
                (name, value)
                for name, value in found.getheaders()
                if name.lower() not in ("transfer-encoding", "connection", "date", "server")
            ]
            return found.status, kept, found.read()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        body = b"" if self.command == "HEAD" else body[: len(body) // 2] if cut else body
        if self.server.bytes_per_second:
            self._send_slowly(body)
        else:
            self.wfile.write(body)
        if cut:
            self._hang_up()

    def _send_slowly(self, body: bytes) -> None:
        begun = time.monotonic()
        for start in range(0, len(body), _PIECE_BYTES):
            piece = body[start : start + _PIECE_BYTES]
            until = begun + (start + len(piece)) / self.server.bytes_per_second
            time.sleep(max(0.0, until - time.monotonic()))
            self.wfile.write(piece)

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()

    def log_message(self, *arguments) -> None: ...


@contextlib.contextmanager
def faulty_proxy(port: int, draw: Callable[[str, str], str] = lambda method, path: "") -> Iterator[FaultyProxy]:
    """Yields a proxy that runs in threads of this process."""
    proxy = FaultyProxy(port, draw)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        proxy.shutdown()
        proxy.server_close()
