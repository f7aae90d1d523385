"""An authority for the certificates of a test, what it issues, and a client that trusts it."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from gateway.config.listeners import TlsFiles


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def issue(authority: trustme.CA, folder: Path, name: str, **more: object) -> TlsFiles:
    """Write a new certificate with its key, as a renewal does."""
    folder.mkdir(exist_ok=True)
    own = authority.issue_cert("127.0.0.1", common_name=name, **more)  # type: ignore[arg-type]
    cert, key = folder / "cert.pem", folder / "key.pem"
    own.private_key_pem.write_to_path(key)
    cert.write_bytes(b"".join(pem.bytes() for pem in own.cert_chain_pems))
    return TlsFiles(cert=cert, key=key)


def server_side(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    """The context of a server with a certificate of these names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


async def shown(port: int, authority: trustme.CA) -> str:
    """The common name of the certificate that a new connection to this port is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
    subject = dict(pair for (pair,) in writer.get_extra_info("peercert")["subject"])
    writer.close()
    await writer.wait_closed()
    return str(subject["commonName"])
