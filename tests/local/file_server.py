"""A small HTTP(S) server with one file, which fails in the ways that servers of files do."""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.cli.local_server import serving


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

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.etag: str | None = '"v1"'
        self.ranges = True
        self.faults: deque[Fault] = deque()
        self.always: Fault | None = None  # for each request without one of its own
        self.requests: list[tuple[str, dict[str, str]]] = []  # target and headers
        self.paths: dict[str, bytes] = {}  # other files
        self.half_way = threading.Event()  # a held response has sent its first half
        self.origin = ""

    @property
    def ranges_asked(self) -> list[str | None]:
        return [headers.get("range") for _, headers in self.requests]

    @contextmanager
    def serving(self, tls: ssl.SSLContext | None = None) -> Iterator[FileServer]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with suppress(OSError):  # a client that has left
                    super().handle()

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        with serving(Handler, tls) as self.origin:
            yield self

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.requests.append((handler.path, headers))
        fault = self.faults.popleft() if self.faults else (self.always or Fault())
        content = self.paths.get(handler.path, self.content)
        if fault.status is not None:
            _head(handler, fault.status, {**fault.headers, "Content-Length": "0"})
            return
        start, status = 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        if asked and self.ranges and headers.get("if-range") in (None, self.etag):
            start, status = int(asked[1]), 206
            if start >= len(content):
                size = {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"}
                _head(handler, 416, size)
                return
        body = content[start:] if fault.body is None else fault.body
        sent = {"ETag": self.etag} if self.etag else {}
        if status == 206:
            sent["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if fault.chunked:
            sent["Transfer-Encoding"] = "chunked"
        else:
            sent["Content-Length"] = str(len(body) if fault.announce is None else fault.announce)
        _head(handler, status, {**sent, **fault.headers})
        if fault.chunked:
            for at in range(0, len(whole := body[: fault.end]), 65536):
                piece = whole[at : at + 65536]
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            handler.wfile.write(b"0\r\n\r\n")
            return
        if fault.hold is not None:
            half, body = body[: len(body) // 2], body[len(body) // 2 :]
            handler.wfile.write(half)
            handler.wfile.flush()
            self.half_way.set()
            fault.hold.wait(60)
        handler.wfile.write(body[: fault.cut])
        # What was announced beyond it never comes.
        handler.close_connection = (fault.cut, fault.announce) != (None, None)


def _head(handler: BaseHTTPRequestHandler, status: int, sent: Mapping[str, str]) -> None:
    handler.send_response(status)
    for name, value in sent.items():
        handler.send_header(name, value)
    handler.end_headers()
