"""Certificates of the listeners."""

from __future__ import annotations

import asyncio
import time
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
    changed_files,
    load_certificate,
)
from tests.gateways import until
from tests.http.authority import issue, shown
from tests.virtual import in_virtual_time


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


# TlsFiles that change.


class Looks:
    """The names of files, and how often somebody has asked for them."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self.count = 0

    def __call__(self) -> tuple[Path, ...]:
        self.count += 1
        return self._paths


async def changes(paths: Looks) -> set[Path]:
    """The next change."""
    async for changed in changed_files(paths, poll_seconds=0.05):
        return changed
    raise AssertionError


async def after_first_look(work: asyncio.Task[set[Path]], paths: Looks) -> None:
    await until(lambda: paths.count >= 2)
    assert not work.done()


async def test_a_file_that_is_replaced_by_a_rename_is_seen(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("1")
    paths = Looks(one, other)
    work = asyncio.create_task(changes(paths))
    await after_first_look(work, paths)
    (tmp_path / "new").write_text("2")
    (tmp_path / "new").rename(one)
    assert await asyncio.wait_for(work, 30) == {one}


@in_virtual_time
async def test_a_file_that_keeps_changing_is_reported_once_it_rests(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("")
    work = asyncio.create_task(changes(Looks(path)))
    for number in range(20):
        await asyncio.sleep(0.03)
        path.write_text("x" * number)
        time.sleep(0.002)  # noqa: ASYNC251 - the file system's clock, which is not virtual
    assert await work == {path}


ENCRYPTED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAhZzP7Lk6tH7gICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEPQwXkTHmj8UHk5PkX0V2PwEgZD3
-----END ENCRYPTED PRIVATE KEY-----
"""
