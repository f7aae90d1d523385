"""Opens a file on an HTTP server, from any byte on, over redirects.

Credentials go to the host of the first address alone. Error texts name hosts and paths, never
queries, passwords or tokens.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

import httpx

from gateway import __version__
from gateway.config.errors import single_line
from gateway.tools.local import LocalFleetError
from gateway.tools.local.model_url import printable, redirect_target, same_origin

MOST_REDIRECTS = 8

TIMEOUT = httpx.Timeout(30.0, read=60.0)  # seconds; of the body: between two pieces of it

MOST_RETRY_AFTER = 60.0  # seconds of a server's Retry-After that are waited

MOST_BYTES = 1 << 50
"""A file that is announced as larger is none."""

CONTENT_RANGE = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16}|\*)")

UNSATISFIED_RANGE = re.compile(r"bytes \*/(\d{1,16})")

REDIRECTS = frozenset({301, 302, 303, 307, 308})

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


class RemoteError(LocalFleetError):
    """The file can't be read. The text names the server and what it answered."""

    def __init__(
        self, message: str, *, retryable: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.retryable = retryable  # whether a later try may help
        self.retry_after = retry_after  # seconds, where the server names them


class RangeRefusedError(RemoteError):
    """The server has no such range. `total` is the file's size, where it says so."""

    def __init__(self, message: str, total: int | None) -> None:
        super().__init__(message)
        self.total = total


@dataclass(frozen=True, slots=True)
class FileVersion:
    """What tells one content of a file from another one under the same address."""

    etag: str | None = None
    last_modified: str | None = None

    @property
    def if_range(self) -> str | None:
        """The value of `If-Range`, which takes no weak ETag; None: a part can't be resumed."""
        if self.etag is not None and not self.etag.startswith("W/"):
            return self.etag
        return self.last_modified


@dataclass(frozen=True, slots=True)
class RemoteBody:
    """The bytes of a file from `start` on. Reading `chunks` raises httpx.TransportError."""

    start: int
    total: int | None  # bytes of the whole file; None: the server does not say
    version: FileVersion
    chunks: Iterator[bytes]


def open_client(verify: ssl.SSLContext | None = None) -> httpx.Client:
    """Return a client for `open_remote`; SSL_CERT_FILE and proxies of the environment count.

    Addresses of this machine are reached without a proxy.
    """
    return httpx.Client(
        timeout=TIMEOUT,
        verify=True if verify is None else verify,
        follow_redirects=False,
        mounts=dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]")),
    )


@contextmanager
def open_remote(
    client: httpx.Client,
    url: httpx.URL,
    *,
    start: int = 0,
    if_range: str | None = None,
    token: str | None = None,
) -> Iterator[RemoteBody]:
    """Open the file at `url` from byte `start` on.

    With `if_range` the body begins at 0 instead where the file is no longer that version. Raises
    RemoteError, and ModelUrlError for a redirect to where it may not lead.
    """
    headers = {"Accept-Encoding": "identity", "User-Agent": f"llama-gateway/{__version__}"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if if_range is not None:
            headers["If-Range"] = if_range
    response = _follow(client, url, headers, token)
    try:
        yield _body(response, start)
    finally:
        response.close()


def describe_failure(error: httpx.HTTPError) -> RemoteError:
    """Return a connection's failure as a RemoteError of the host's."""
    host = error.request.url.host if _has_request(error) else "the server"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return RemoteError(
            f"{host}: its certificate is not trusted: {single_line(str(error))}. Remedy: the PEM "
            "file of its authority in SSL_CERT_FILE"
        )
    # The texts of some errors are empty, and others quote what the server sent.
    what = single_line(str(error))[:200] or type(error).__name__
    return RemoteError(f"{host}: {what}", retryable=True)


def _follow(
    client: httpx.Client, url: httpx.URL, headers: dict[str, str], token: str | None
) -> httpx.Response:
    """Send the request, again to where redirects lead; return an unread response."""
    current = url
    for _ in range(MOST_REDIRECTS + 1):
        sent = dict(headers)
        if token is not None and same_origin(current, url):
            sent["Authorization"] = f"Bearer {token}"
        try:
            request = client.build_request("GET", current, headers=sent)
            response = client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise describe_failure(error) from error
        if response.status_code not in REDIRECTS:
            return response
        response.close()
        current = redirect_target(current, response.headers.get("location", ""))
    raise RemoteError(f"{printable(url)}: more than {MOST_REDIRECTS} redirects")


def _body(response: httpx.Response, start: int) -> RemoteBody:
    """Judge the response's head. Raises RemoteError."""
    where = printable(response.request.url)
    headers = response.headers
    version = FileVersion(headers.get("etag"), headers.get("last-modified"))
    if response.status_code in {200, 206}:
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise RemoteError(f"{where}: sends the file as {single_line(encoding)}, unasked")
    match response.status_code:
        case 200:
            return RemoteBody(0, _content_length(response), version, response.iter_raw())
        case 206:
            first, total = _content_range(response)
            if first != start:
                raise RangeRefusedError(f"{where}: sends another range than the one asked", total)
            return RemoteBody(start, total, version, response.iter_raw())
        case 416:
            found = UNSATISFIED_RANGE.fullmatch(headers.get("content-range", "").strip())
            raise RangeRefusedError(f"{where}: has no such range", int(found[1]) if found else None)
    raise _refusal(response, where)


def _content_length(response: httpx.Response) -> int | None:
    text = response.headers.get("content-length")
    if text is None:
        return None
    where = printable(response.request.url)
    if not (text.isascii() and text.isdecimal()) or int(text[:20]) > MOST_BYTES:
        raise RemoteError(f"{where}: announces a length that is none: {single_line(text[:40])}")
    return int(text)


def _content_range(response: httpx.Response) -> tuple[int, int | None]:
    """Return the first byte of a partial body and the whole file's size."""
    text = response.headers.get("content-range", "").strip()
    found = CONTENT_RANGE.fullmatch(text)
    if found is None:
        where = printable(response.request.url)
        raise RangeRefusedError(f"{where}: sends a part without a usable Content-Range", None)
    return int(found[1]), None if found[3] == "*" else int(found[3])


def _refusal(response: httpx.Response, where: str) -> RemoteError:
    status = response.status_code
    try:
        phrase = f" {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = ""
    remedy = {
        401: ". Remedy: a token, in the variable that --token-env names",
        403: (
            ". Remedy: a token with access, in the variable that --token-env names; for a gated "
            "model accept its terms on its page first"
        ),
        404: ". Remedy: check the address; a private model needs a token, see --token-env",
    }.get(status, "")
    return RemoteError(
        f"{where}: HTTP {status}{phrase}{remedy}",
        retryable=status in RETRYABLE,
        retry_after=_retry_after(response.headers.get("retry-after", "")),
    )


def _retry_after(text: str) -> float | None:
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return min(float(text), MOST_RETRY_AFTER)
    return None


def _has_request(error: httpx.HTTPError) -> bool:
    try:
        return error.request is not None
    except RuntimeError:  # httpx: it was never set
        return False
