"""What an operator must know of a TLS failure: which key mends it, or that the scheme is wrong.

A port that is asked in the wrong scheme says so seldom: TLS servers drop plain HTTP without a word,
and plain ones wait for the rest of what looks to them like a request. So the other scheme is tried,
once, where a failure looks like that.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - the first handshake reads it, on the event loop
import ssl

ANSWER_BYTES = 12
"""Of `HTTP/1.1 200`."""

_SAYS_PLAIN = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")


async def speaks_tls(host: str, port: int, limit: float) -> bool:
    """Whether a TLS handshake succeeds there within `limit` seconds, whatever the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(limit):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError as error:
        # It wants a certificate of ours, or other ciphers.
        return "ALERT" in (error.reason or "")
    except (OSError, TimeoutError, UnicodeError):
        return False
    writer.transport.abort()
    return True


async def speaks_plain_http(host: str, port: int, limit: float) -> bool:
    """Whether a request in plain HTTP is answered there within `limit` seconds.

    Some TLS servers answer it with 400, in plain HTTP.
    """
    try:
        async with asyncio.timeout(limit):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                answer = await reader.readexactly(ANSWER_BYTES)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, UnicodeError, asyncio.IncompleteReadError):
        return False
    return answer.startswith(b"HTTP/1.") and not answer.endswith(b"400")


def tls_failure(error: str) -> tuple[str, str]:
    """What OpenSSL's words mean: `untrusted`, `name`, `expired`, `client`, `plain` or nothing.

    And the words without their codes.
    """
    words = error.partition("certificate verify failed: ")[2].partition(" (_ssl")[0].rstrip(".")
    if "CERTIFICATE_VERIFY_FAILED" in error or words:
        if "mismatch" in words or "not valid for" in words:
            return "name", words
        return "expired" if "expired" in words else "untrusted", words
    if any(one in error for one in _SAYS_PLAIN):
        return "plain", "it answers, but not in TLS"
    if "CERTIFICATE_REQUIRED" in error or "HANDSHAKE_FAILURE" in error:
        return "client", "it refuses the handshake"
    return "", error
