"""A TCP proxy on loopback whose line can be cut, also by itself after a number of bytes: an endpoint that is lost."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from urllib.parse import urlsplit


class Proxy:
    def __init__(self, endpoint: str, cut_after_bytes: int | None = None) -> None:
        """`cut_after_bytes` counts what clients sent. Once cut, connections are reset and new ones refused."""
        parts = urlsplit(endpoint)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._left = cut_after_bytes
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.was_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def cut(self) -> None:
        self.was_cut = True
        self._close()

    def _close(self) -> None:
        with self._lock:
            for each in (self._listener, *self._sockets):
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                each.close()
            self._sockets.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            with self._lock:
                self._sockets += (client, server)
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if counted and self._spend(len(data)):
                    self.cut()
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _spend(self, size: int) -> bool:
        if self._left is None:
            return False
        with self._lock:
            self._left -= size
            return self._left < 0
