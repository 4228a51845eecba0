"""An HTTP proxy on loopback before a real store, which spoils the answers it is told to spoil.

Requests are numbered from 1 as they arrive; a `Rule` looks at number and path and names the fault, or None for an
answer as the store gave it. What was done is counted, so that a test can hold the journal against it.
"""

from __future__ import annotations

import http.client
import http.server
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["busy", "cut", "flip", "hang", "slow", "expired", "reset", "short"]
"""`busy`: 503 SlowDown; `cut`: the body ends after half; `flip`: one bit in its middle is another; `hang`: no answer,
at most for `HANG_S`; `slow`: 1 MB/s; `expired`: 400 ExpiredToken; `reset`: the connection ends before an answer;
`short`: half of the bytes, whose length the header gives consistently."""
Rule = Callable[[int, str], Fault | None]

HANG_S = 20.0
_SLOW_PIECE = 65536
_SLOW_BYTES_PER_S = 1_000_000


def never(number: int, path: str) -> Fault | None:
    return None


def every(count: int, fault: Fault) -> Rule:
    """One in `count` requests for an object, listings and manifests left alone."""
    seen = iter(range(1, 1 << 60))
    return lambda number, path: fault if "/train-" in path and next(seen) % count == 0 else None


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class FaultProxy:
    """Use as a context manager. `down` refuses connections and ends those there are, `up` takes the same port again."""

    def __init__(
        self,
        endpoint: str,
        rule: Rule = never,
        tls: tuple[Path, Path] | None = None,
        *,
        keep_alive: bool = True,
    ) -> None:
        """`tls`: certificate and key, for an endpoint that speaks HTTPS. `keep_alive` off: a connection for each
        request."""
        parts = urlsplit(endpoint)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self.rule = rule
        self._tls = tls
        self.keep_alive = keep_alive
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self.requests = 0
        self.spare_rereads = False
        """A range that ends where an earlier one did is left alone."""
        self._asked: set[tuple[str, str]] = set()
        self.served_bytes = 0
        self.faults: Counter[str] = Counter()
        self._server: _Server | None = None
        self.port = 0
        self.up()

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending.set()
        self.down()

    def up(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), self, self._tls)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def down(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            server.reset_all()

    def decide(self, path: str, wanted: str = "") -> Fault | None:
        """`wanted` is the Range header."""
        asked = (path, wanted.rpartition("-")[2])
        with self._lock:
            self.requests += 1
            if self.spare_rereads and asked in self._asked:
                return None
            self._asked.add(asked)
            fault = self.rule(self.requests, path)
            if fault:
                self.faults[fault] += 1
            return fault

    def fetch(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        connection = http.client.HTTPConnection(*self._target, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders(body or None)
            response = connection.getresponse()
            return Answer(response.status, response.getheaders(), response.read())
        finally:
            connection.close()

    def wait(self, seconds: float) -> None:
        self._ending.wait(seconds)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], proxy: FaultProxy, tls: tuple[Path, Path] | None) -> None:
        self.proxy = proxy
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        self._open.discard(request)
        super().shutdown_request(request)

    def reset_all(self) -> None:
        for request in list(self._open):
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what is tested here."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        proxy = self.server.proxy
        # A client with an HTTP proxy sends the whole address.
        path = "/" + self.path.split("/", 3)[3] if self.path.startswith("http://") else self.path
        fault = proxy.decide(path, self.headers.get("Range", ""))
        if fault == "hang":
            proxy.wait(HANG_S)
            self.close_connection = True
            return
        if fault == "reset":
            self.close_connection = True
            return
        if fault == "busy":
            return self._send(Answer(503, [], b"<Error><Code>SlowDown</Code></Error>"))
        if fault == "expired":
            return self._send(Answer(400, [], b"<Error><Code>ExpiredToken</Code></Error>"))
        size = int(self.headers.get("Content-Length") or 0)
        answer = proxy.fetch(self.command, path, self.headers.items(), self.rfile.read(size))
        body = bytearray(answer.body)
        if fault == "flip" and body:
            body[len(body) // 2] ^= 4
        headers = answer.headers
        if fault == "short":
            del body[len(body) // 2 :]
            headers = [
                (name, _shortened(value, len(body)) if name == "Content-Range" else value) for name, value in headers
            ]
        self._send(Answer(answer.status, headers, bytes(body)), fault)

    def _send(self, answer: Answer, fault: Fault | None = None) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        if not self.server.proxy.keep_alive:
            self.send_header("Connection", "close")
        self.end_headers()
        body = answer.body
        if fault == "cut":
            body = body[: len(body) // 2]
            self.close_connection = True
        pieces = [body]
        if fault == "slow":
            pieces = [body[at : at + _SLOW_PIECE] for at in range(0, len(body), _SLOW_PIECE)]
        for piece in pieces:
            if fault == "slow":
                time.sleep(len(piece) / _SLOW_BYTES_PER_S)
            self.wfile.write(piece)
        self.server.proxy.served_bytes += len(body)


def _shortened(content_range: str, size: int) -> str:
    """`bytes 100-199/1000` with the end that `size` bytes have."""
    first, _, rest = content_range.removeprefix("bytes ").partition("-")
    return f"bytes {first}-{int(first) + size - 1}/{rest.partition('/')[2]}"
