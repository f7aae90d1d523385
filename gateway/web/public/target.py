"""Whom and what a request asks for: its first line and its `Host` (RFC 9112, section 3)."""

from __future__ import annotations

import re

from gateway import errors
from gateway.request import Headers

REQUEST_LINE = re.compile(rb"(?:\r\n)*[A-Z-]+ +[^ #]+ HTTP/1\.([01])\r\n")
"""Stricter than httptools, which takes HTTP/0.9 and 2.0, RTSP, short line ends and fragments."""

_ABSOLUTE = re.compile(rb"https?://([^/?]*)", re.IGNORECASE)
_HOST = re.compile(rb"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")


def with_one_host(headers: Headers, url: bytes, *, http_10: bool) -> Headers:
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
