"""A small HTTP(S) server with one file, which fails in the ways that servers of files do."""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def digest(content: bytes) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(content).hexdigest()


@dataclass
class Fault:
    """How one response differs from a good one."""

    status: int | None = None  # instead of the file
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None  # close the connection after so many bytes of the body
    announce: int | None = None  # a Content-Length that lies
    chunked: bool = False  # no length
    end: int | None = None  # end properly after so many bytes, where there is no length
    hold: threading.Event | None = None  # wait in the middle of the body
    body: bytes | None = None  # instead of the file's


class FileServer:
    """Serves `content` at any path; each request takes the next of `faults`."""

    def __init__(self, content: bytes, tls: ssl.SSLContext | None = None) -> None:
        self.content = content
        self.etag: str | None = '"v1"'
        self.ranges = True
        self.faults: deque[Fault] = deque()
        self.always: Fault | None = None  # for each request without one of its own
        self.requests: list[tuple[str, dict[str, str]]] = []  # target and headers
        self.paths: dict[str, bytes] = {}  # other files
        self.half_way = threading.Event()  # a held response has sent its first half
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that has left

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._scheme = "http"
        if tls is not None:
            self._scheme = "https"
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)

    @property
    def origin(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    @property
    def ranges_asked(self) -> list[str | None]:
        return [headers.get("range") for _, headers in self.requests]

    @contextmanager
    def serving(self) -> Iterator[FileServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.requests.append((handler.path, headers))
        fault = self.faults.popleft() if self.faults else (self.always or Fault())
        content = self.paths.get(handler.path, self.content)
        if fault.status is not None:
            self._head(handler, fault.status, {**fault.headers, "Content-Length": "0"})
            return
        start, status = 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        if asked and self.ranges and headers.get("if-range") in (None, self.etag):
            start, status = int(asked[1]), 206
            if start >= len(content):
                size = {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"}
                self._head(handler, 416, size)
                return
        body = content[start:] if fault.body is None else fault.body
        sent = {"ETag": self.etag} if self.etag else {}
        if status == 206:
            sent["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if fault.chunked:
            sent["Transfer-Encoding"] = "chunked"
        else:
            sent["Content-Length"] = str(len(body) if fault.announce is None else fault.announce)
        self._head(handler, status, {**sent, **fault.headers})
        self._body(handler, body, fault)

    def _head(self, handler: BaseHTTPRequestHandler, status: int, sent: Mapping[str, str]) -> None:
        handler.send_response(status)
        for name, value in sent.items():
            handler.send_header(name, value)
        handler.end_headers()

    def _body(self, handler: BaseHTTPRequestHandler, body: bytes, fault: Fault) -> None:
        try:
            if fault.chunked:
                whole = body if fault.end is None else body[: fault.end]
                for at in range(0, len(whole), 65536):
                    piece = whole[at : at + 65536]
                    handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                handler.wfile.write(b"0\r\n\r\n")
            elif fault.cut is not None:
                handler.wfile.write(body[: fault.cut])
                handler.close_connection = True
            elif fault.hold is not None:
                half = len(body) // 2
                handler.wfile.write(body[:half])
                handler.wfile.flush()
                self.half_way.set()
                fault.hold.wait(60)
                handler.wfile.write(body[half:])
            else:
                handler.wfile.write(body)
                # What was announced beyond it never comes.
                handler.close_connection = fault.announce is not None
        except OSError:
            handler.close_connection = True  # the client has left
