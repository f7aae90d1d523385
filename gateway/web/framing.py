"""The body of a chunked request, cut out of its framing (RFC 9112, section 7.1).

httptools decodes chunks as well, but all that has come in one go, a call into Python for each, and
it keeps trailers whole: one packet can hold 40,000 chunks, one trailer 40 MB. Here each call does
a bounded amount of work, extensions and trailers are counted, and nobody sees a trailer.

Only what no other reader could understand differently is accepted: lines end with CRLF, sizes are
digits and nothing else.
"""

from __future__ import annotations

import re

from gateway import errors
from gateway.errors import GatewayError
from gateway.request import Headers

MOST_CHUNKS_PER_FEED = 256
"""Chunks that one call of `feed` takes; usual ones have some ten kilobytes."""

MOST_EXTENSION_BYTES = 256
"""Longest extensions of one chunk; those that are in use, signatures of AWS, have 85."""

_TEXT = rb"[^\x00-\x08\x0a-\x1f\x7f]"

_SIZE = rb"([0-9a-fA-F]{1,16})(;%b{0,%d})?\r\n" % (_TEXT, MOST_EXTENSION_BYTES)

_FIRST = re.compile(_SIZE)

_NEXT = re.compile(rb"\r\n" + _SIZE)

_HALF = rb"(?:[0-9a-fA-F]{1,16}(?:;%b{0,%d})?\r?)?" % (_TEXT, MOST_EXTENSION_BYTES)

_HALF_FIRST = re.compile(_HALF)

_HALF_NEXT = re.compile(rb"\r?|\r\n" + _HALF)

_LONGEST = MOST_EXTENSION_BYTES + 32

_TRAILERS = re.compile(rb"(?:[!#$%%&'*+.^_`|~0-9A-Za-z-]+:%b*\r\n)*\r\n" % _TEXT)

_END = b"\r\n\r\n"


class ChunkedDecoder:
    """One body. `most` is how many bytes its extensions and trailers may have, all together."""

    __slots__ = ("_extra", "_in_trailers", "_kept", "_left", "_most", "_started", "done")

    def __init__(self, limit: int) -> None:
        self._most = limit
        self._extra = 0
        self._started = False
        self._left = 0
        """Bytes of the chunk that are still to come."""
        self._in_trailers = False
        self._kept = b""
        """The beginning of a line, or of the trailers."""
        self.done = False

    def feed(self, data: bytes, offset: int = 0) -> tuple[int, bytes]:
        """Take what has come, from `at` on: up to where, and the bytes of the body in it.

        It stops behind the body, and after some chunks. Raises: GatewayError 400, 431.
        """
        parts: list[bytes] = []
        if not self._in_trailers:
            offset = self._pass_chunks(data, offset, parts)
        if self._in_trailers:
            offset = self._pass_trailers(data, offset)
        return offset, b"".join(parts)

    def _pass_chunks(self, data: bytes, at: int, parts: list[bytes]) -> int:
        before = len(self._kept)
        if before:
            data, at, shift = self._kept + data[at:], 0, at - before
            self._kept = b""
        else:
            shift = 0
        for _ in range(MOST_CHUNKS_PER_FEED):
            if self._left:
                part = data[at : at + self._left]
                self._left -= len(part)
                at += len(part)
                parts.append(part)
            if at >= len(data):
                break
            at = self._pass_size(data, at)
            if not self._left:
                break  # for the rest of a line, or behind the last chunk
        return at + shift

    def _pass_size(self, data: bytes, at: int) -> int:
        """Read the line with the next chunk's size, and the end of the chunk before it."""
        found = (_NEXT if self._started else _FIRST).match(data, at)
        if found is None:
            rest = data[at : at + _LONGEST]
            if not (_HALF_NEXT if self._started else _HALF_FIRST).fullmatch(rest):
                raise errors.invalid_request("The chunks of the body are not valid HTTP.")
            self._kept = rest
            return at + len(rest)
        self._started = True
        self._left = int(found[1], 16)
        self._in_trailers = not self._left
        if found[2] is not None:
            self._extra += len(found[2])
            if self._extra > self._most:
                raise self._too_much()
        return found.end()

    def _pass_trailers(self, data: bytes, at: int) -> int:
        """Pass over the fields behind the body: nobody here has a use for them."""
        before = len(self._kept)
        room = self._most - self._extra + len(_END) - before
        kept = self._kept = self._kept + data[at : at + room]
        if kept.startswith(b"\r\n"):
            end = 2
        elif (found := kept.find(_END, max(0, before - 3))) >= 0:
            end = found + len(_END)
        elif at + room < len(data):
            raise self._too_much()
        else:
            return len(data)
        if not _TRAILERS.fullmatch(kept, 0, end):
            raise errors.invalid_request("The trailers of the body are not valid HTTP.")
        self._kept = b""
        self.done = True
        return at + end - before

    def _too_much(self) -> GatewayError:
        return errors.headers_too_large(self._most)


REQUEST_LINE = re.compile(rb"(?:\r\n)*[A-Z-]+ +[^ #]+ HTTP/1\.([01])\r\n")
"""Stricter than httptools, which takes HTTP/0.9 and 2.0, RTSP, short line ends and fragments."""

_ABSOLUTE = re.compile(rb"https?://([^/?]*)", re.IGNORECASE)

_HOST = re.compile(rb"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")


def with_single_host(headers: Headers, url: bytes, *, http_10: bool) -> Headers:
    """The headers, of which one `Host` says whom was asked; none has to in HTTP/1.0.

    A host in the request line counts more than the field. Raises: GatewayError 400.
    """
    names = [value for name, value in headers if name == b"host"]
    if len(names) > 1:
        raise errors.invalid_request("The request has more than one 'Host' header.")
    if not names and not http_10:
        raise errors.invalid_request("The request has no 'Host' header.")
    if names and not _HOST.fullmatch(names[0]):
        raise errors.invalid_request("The 'Host' header is not a host name.")
    if url.startswith(b"/") or url == b"*":
        return headers
    asked = _ABSOLUTE.match(url)
    if asked is None or not _HOST.fullmatch(asked[1]):
        raise errors.invalid_request("The request line names no host name.")
    return [*(field for field in headers if field[0] != b"host"), (b"host", asked[1])]
