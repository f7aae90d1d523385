"""A small HTTP server on a thread, for tests of commands."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, Mapping[str, str], object]
"""Status, header fields, and bytes or a JSON value."""


@contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve with this handler; the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    scheme = "http" if tls is None else "https"
    try:
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answering(
    answer: Callable[[BaseHTTPRequestHandler, bytes], Answer | None],
    tls: ssl.SSLContext | None = None,
) -> AbstractContextManager[str]:
    """Serve what this makes of each request and its body; None cuts the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if (answered := answer(self, body)) is None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            status, fields, value = answered
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {**fields, "content-length": str(len(content))}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815 - http.server's name

        def log_message(self, *_: object) -> None:
            pass

    return serving(Handler, tls)
