"""Strict HTTP/1.1 framing: chunked request bodies (RFC 9112, section 7.1), and the host of a head.

httptools decodes chunks too, but everything received at once, with a call into Python for each
chunk, and it buffers whole trailers: one packet can hold 40,000 chunks, one trailer 40 MB. Here
each call does a bounded amount of work, extensions and trailers are limited, and trailers are
dropped.

Only what no other parser could read differently is accepted: lines end with CRLF, and sizes consist
of digits alone.
"""

from __future__ import annotations

import re

from gateway import errors
from gateway.errors import GatewayError
from gateway.request import Headers

MOST_CHUNKS_PER_FEED = 256
"""Most chunks that one call of `feed` decodes; usual chunks have some ten kilobytes."""

MOST_EXTENSION_BYTES = 256
"""Most bytes of extensions in one chunk; those in use, signatures of AWS, have 85."""

_TEXT = rb"[^\x00-\x08\x0a-\x1f\x7f]"

_SIZE = rb"([0-9a-fA-F]{1,16})(;%b{0,%d})?\r\n" % (_TEXT, MOST_EXTENSION_BYTES)

_FIRST_SIZE = re.compile(_SIZE)

_NEXT_SIZE = re.compile(rb"\r\n" + _SIZE)

_PARTIAL = rb"(?:[0-9a-fA-F]{1,16}(?:;%b{0,%d})?\r?)?" % (_TEXT, MOST_EXTENSION_BYTES)

_PARTIAL_FIRST_SIZE = re.compile(_PARTIAL)

_PARTIAL_NEXT_SIZE = re.compile(rb"\r?|\r\n" + _PARTIAL)

_LONGEST_SIZE = MOST_EXTENSION_BYTES + 32

_TRAILERS = re.compile(rb"(?:[!#$%%&'*+.^_`|~0-9A-Za-z-]+:%b*\r\n)*\r\n" % _TEXT)

_END = b"\r\n\r\n"


class ChunkedDecoder:
    """Decodes one body. Its extensions and trailers may have `limit` bytes in all."""

    __slots__ = (
        "_chunk_left",
        "_extra_bytes",
        "_in_trailers",
        "_limit",
        "_partial",
        "_started",
        "done",
    )

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._extra_bytes = 0
        """Bytes of extensions so far."""
        self._started = False
        self._chunk_left = 0
        """Bytes of the current chunk that are still to come."""
        self._in_trailers = False
        self._partial = b""
        """The received part of a size line, or of the trailers."""
        self.done = False

    def feed(self, data: bytes, offset: int = 0) -> tuple[int, bytes]:
        """Decode `data` from `offset`; returns the next offset and the decoded bytes.

        Stops after the body, or after `MOST_CHUNKS_PER_FEED`. Raises: GatewayError 400, 431.
        """
        parts: list[bytes] = []
        if not self._in_trailers:
            offset = self._read_chunks(data, offset, parts)
        if self._in_trailers:
            offset = self._skip_trailers(data, offset)
        return offset, b"".join(parts)

    def _read_chunks(self, data: bytes, offset: int, parts: list[bytes]) -> int:
        before = len(self._partial)
        if before:
            data, offset, shift = self._partial + data[offset:], 0, offset - before
            self._partial = b""
        else:
            shift = 0
        for _ in range(MOST_CHUNKS_PER_FEED):
            if self._chunk_left:
                part = data[offset : offset + self._chunk_left]
                self._chunk_left -= len(part)
                offset += len(part)
                parts.append(part)
            if offset >= len(data):
                break
            offset = self._read_size(data, offset)
            if not self._chunk_left:
                break  # The size line is incomplete, or the last chunk was read.
        return offset + shift

    def _read_size(self, data: bytes, offset: int) -> int:
        """Read the size line of the next chunk, after the line end of the chunk before."""
        found = (_NEXT_SIZE if self._started else _FIRST_SIZE).match(data, offset)
        if found is None:
            rest = data[offset : offset + _LONGEST_SIZE]
            partial = _PARTIAL_NEXT_SIZE if self._started else _PARTIAL_FIRST_SIZE
            if not partial.fullmatch(rest):
                raise errors.invalid_request("The chunks of the body are not valid HTTP.")
            self._partial = rest
            return offset + len(rest)
        self._started = True
        self._chunk_left = int(found[1], 16)
        self._in_trailers = not self._chunk_left
        if found[2] is not None:
            self._extra_bytes += len(found[2])
            if self._extra_bytes > self._limit:
                raise self._too_large()
        return found.end()

    def _skip_trailers(self, data: bytes, offset: int) -> int:
        """Check the trailers and drop them."""
        before = len(self._partial)
        room = self._limit - self._extra_bytes + len(_END) - before
        trailers = self._partial = self._partial + data[offset : offset + room]
        if trailers.startswith(b"\r\n"):
            end = 2
        elif (found := trailers.find(_END, max(0, before - 3))) >= 0:
            end = found + len(_END)
        elif offset + room < len(data):
            raise self._too_large()
        else:
            return len(data)
        if not _TRAILERS.fullmatch(trailers, 0, end):
            raise errors.invalid_request("The trailers of the body are not valid HTTP.")
        self._partial = b""
        self.done = True
        return offset + end - before

    def _too_large(self) -> GatewayError:
        return errors.headers_too_large(self._limit)


REQUEST_LINE = re.compile(rb"(?:\r\n)*[A-Z-]+ +[^ #]+ HTTP/1\.([01])\r\n")
"""Stricter than httptools, which accepts HTTP/0.9 and 2.0, RTSP, bare LF and URL fragments."""

_ABSOLUTE = re.compile(rb"https?://([^/?]*)", re.IGNORECASE)

_HOST = re.compile(rb"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")


def with_single_host(headers: Headers, url: bytes, *, http_10: bool) -> Headers:
    """The headers, with exactly one valid `Host`; in HTTP/1.0 it may be missing.

    A host in the request line takes precedence over the header. Raises: GatewayError 400.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise errors.invalid_request("The request has more than one 'Host' header.")
    if not hosts and not http_10:
        raise errors.invalid_request("The request has no 'Host' header.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise errors.invalid_request("The 'Host' header is not a host name.")
    if url.startswith(b"/") or url == b"*":
        return headers
    target = _ABSOLUTE.match(url)
    if target is None or not _HOST.fullmatch(target[1]):
        raise errors.invalid_request("The request line has no valid host name.")
    return [*(field for field in headers if field[0] != b"host"), (b"host", target[1])]
