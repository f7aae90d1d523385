"""The HTTP client of commands that ask a gateway, and words for why it can't."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

from gateway.tools.cli.terminal import CommandFailed

if TYPE_CHECKING:
    import httpx


SCHEME_LIMIT = 2.0
"""Seconds for a look whether a server speaks the other scheme."""


def open_client(
    url: str, key: str | None, timeout: httpx.Timeout | float, tls: ssl.SSLContext | None = None
) -> httpx.Client:
    """A client of the gateway at this URL, which sends the key to it alone.

    `timeout` in seconds; `tls`: how to check its certificate, else as usual.
    """
    import httpx  # commands that ask no gateway start without it

    if tls is None and url.startswith("http:"):
        # Trusts nobody, as nobody is asked: to read the machine's authorities takes 30 ms.
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=timeout,
            # With an explicit transport httpx takes no proxy from the environment: the gateway is
            # on loopback or in a private network, and the key is for nobody else.
            transport=httpx.HTTPTransport() if tls is None else httpx.HTTPTransport(verify=tls),
        )
    except httpx.InvalidURL as error:
        from gateway.config.fields import bracketed_ipv6

        scheme, _, rest = url.partition("://")
        bracketed = bracketed_ipv6(rest.partition("/")[0])
        remedy = f"an IPv6 address needs brackets: {scheme}://{bracketed}" if bracketed else error
        raise CommandFailed(f"the address is no valid URL: {remedy}", status=2) from None


def reason(error: httpx.HTTPError) -> str:
    """Why no answer came, in a few words."""
    return str(error).partition("] ")[2] or str(error) or type(error).__name__


def scheme_hint(url: str) -> str:
    """What to write if the server there speaks the other scheme; else nothing."""
    import asyncio
    from urllib.parse import urlsplit

    from gateway.transport.pool import speaks_plain_http, speaks_tls

    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    speaks = speaks_plain_http if secure else speaks_tls
    if not asyncio.run(speaks(host, port, SCHEME_LIMIT)):
        return ""
    other = "http" if secure else "https"
    return f": it speaks {other}: write {other}{url[len(parts.scheme) :]}"


def tls_problem(url: str, error: httpx.ConnectError, option: str) -> str:
    """What is wrong with TLS to the gateway there; empty: nothing, as far as is known."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"the certificate of the gateway at {url} is not trusted ({reason(error)}): name it, "
            f"or the authority behind it, with {option}"
        )
    hint = scheme_hint(url) if url.startswith("https:") else ""
    return hint and f"no TLS handshake with {url} ({reason(error)}){hint}"


def read_answer(response: httpx.Response, most: int) -> bytes:
    """Read a streamed answer of up to `most` bytes. Raises: CommandFailed, httpx.HTTPError."""
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) > most:
            raise CommandFailed(f"the answer of {response.request.url} is too long")
    return bytes(content)


def json_object(content: bytes) -> dict[str, Any] | None:
    """The JSON object in an answer; None if it holds something else."""
    import json

    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
