"""Certificates of the listeners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from gateway.http.certificates import (
    CertificateError,
    ListenerCertificates,
    ServerCertificate,
    load_certificate,
)
from tests.http.authority import issue, shown


@asynccontextmanager
async def served(certificate: ServerCertificate) -> AsyncIterator[int]:
    """A TLS server that says nothing; its port."""
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=certificate.context
    )
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("broken", ["other key", "half", "gone", "empty", "encrypted"])
async def test_a_renewal_that_can_not_be_used_changes_nothing_and_is_told(
    tmp_path: Path, authority: trustme.CA, broken: str
) -> None:
    files = issue(authority, tmp_path, "first")
    certificate = ServerCertificate(files)
    if broken == "other key":
        trustme.CA().issue_cert("x").private_key_pem.write_to_path(files.key)
    elif broken == "half":
        files.cert.write_bytes(files.cert.read_bytes()[:300])
    elif broken == "gone":
        files.cert.unlink()
    elif broken == "empty":
        files.key.write_text("")
    else:
        files.key.write_text(ENCRYPTED_KEY)
    with pytest.raises(CertificateError, match="can't be used"):
        await certificate.renew()
    assert str(files.cert) in str(certificate.error)
    async with served(certificate) as port:
        assert await shown(port, authority) == "first"
        issue(authority, tmp_path, "second")
        await certificate.renew()
        assert certificate.error is None
        assert await shown(port, authority) == "second"


def test_the_expiry_is_that_of_the_first_certificate(tmp_path: Path, authority: trustme.CA) -> None:
    for date in (datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC), datetime(2061, 5, 6, tzinfo=UTC)):
        files = issue(authority, tmp_path, "one", not_after=date)
        assert load_certificate(files).expires_at == date.timestamp()


async def test_the_certificates_of_both_listeners_are_renewed_on_their_own(
    tmp_path: Path, authority: trustme.CA
) -> None:
    public, admin = issue(authority, tmp_path / "a", "a"), issue(authority, tmp_path / "b", "b")
    both = ListenerCertificates({"listen.tls": public, "admin.tls": admin, "other": None})
    assert both.context_of("other") is None
    assert set(both.expiry) == {"listen.tls", "admin.tls"}
    admin.key.write_text("x")
    assert await both.renew({public.cert}) == {"listen.tls": None}
    assert not both.error
    results = await both.renew()
    assert results["listen.tls"] is None
    assert results["admin.tls"] is not None
    assert str(both.error).startswith("admin.tls: ")


ENCRYPTED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAhZzP7Lk6tH7gICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEPQwXkTHmj8UHk5PkX0V2PwEgZD3
-----END ENCRYPTED PRIVATE KEY-----
"""
