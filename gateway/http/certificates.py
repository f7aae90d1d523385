"""Certificates of the listeners: TLS contexts, expiry dates, and renewal while they serve.

A renewed certificate takes effect with the next handshake: connections that are open stay as they
are. A renewal that can't be used changes nothing.
"""

from __future__ import annotations

import asyncio
import ssl

# Not public, but there since Python 2.6; the other way is a parser of X.509.
from _ssl import _test_decode_cert  # type: ignore[attr-defined]
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from gateway.config.listeners import TlsFiles

log = structlog.get_logger()


class CertificateError(OSError):
    """A certificate can't be used; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class LoadedCertificate:
    """A certificate that is in order."""

    context: ssl.SSLContext
    expires_at: float  # seconds since 1970
    client_context: ssl.SSLContext | None = None  # for connections to others that have such a one


def load_certificate(files: TlsFiles) -> LoadedCertificate:
    """Read and check both files. Raises: CertificateError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
        # The first one of the file. Else Python tells this of a peer's certificate only.
        expires_at = ssl.cert_time_to_seconds(str(_test_decode_cert(files.cert)["notAfter"]))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise CertificateError(
            f"{files.cert} and {files.key} can't be used ({reason}): name PEM files of a "
            "certificate chain and of the key that belongs to it, without a password"
        ) from None
    return LoadedCertificate(context, expires_at)


class ServerCertificate:
    """The certificate of one listener. `context` is for its socket; it always shows the newest."""

    def __init__(
        self,
        files: TlsFiles,
        load: Callable[[TlsFiles], LoadedCertificate] = load_certificate,
    ) -> None:
        """Raises: CertificateError."""
        self.files = files
        self.error: str | None = None
        """Why the files on the disk can't be used, while an older certificate is in force."""
        self._load = load
        self.loaded = load(files)
        self.context = load(files).context
        # Asked in each handshake, whether the client names a server or not.
        self.context.sni_callback = self._use_newest

    @property
    def paths(self) -> set[Path]:
        """Its files."""
        return {path for _, path in self.files if isinstance(path, Path)}

    @property
    def expires_at(self) -> float:
        """When the certificate in force expires, in seconds since 1970."""
        return self.loaded.expires_at

    async def renew(self) -> None:
        """Read the files again; handshakes from now on use them. Raises: CertificateError."""
        try:
            self.loaded = await asyncio.to_thread(self._load, self.files)
        except CertificateError as error:
            self.error = str(error)
            raise
        self.error = None

    def _use_newest(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self.loaded.context


class ListenerCertificates:
    """The certificates of the listeners, by the key of the settings that names their files."""

    def __init__(self, files: Mapping[str, TlsFiles | ServerCertificate | None]) -> None:
        """Raises: CertificateError."""
        self._by_key = {
            key: one if isinstance(one, ServerCertificate) else ServerCertificate(one)
            for key, one in files.items()
            if one is not None
        }

    def context_of(self, key: str) -> ssl.SSLContext | None:
        """For the listener's socket; None: it has no certificate."""
        certificate = self._by_key.get(key)
        return None if certificate is None else certificate.context

    def file_of(self, key: str) -> Path:
        """The certificate's file. Raises: KeyError, if this listener has none."""
        return self._by_key[key].files.cert

    @property
    def files(self) -> set[Path]:
        """All files of theirs."""
        return {path for one in self._by_key.values() for path in one.paths}

    @property
    def error(self) -> str | None:
        """Why files on the disk can't be used, while older certificates are in force."""
        errors = [f"{key}: {one.error}" for key, one in self._by_key.items() if one.error]
        return "; ".join(errors) or None

    @property
    def expiry(self) -> dict[str, float]:
        """When each certificate in force expires, in seconds since 1970."""
        return {key: one.expires_at for key, one in self._by_key.items()}

    async def renew(self, changed: Collection[Path] | None = None) -> dict[str, str | None]:
        """Read again the certificates of these files, or all; returns the error of each key."""
        results: dict[str, str | None] = {}
        for key, one in self._by_key.items():
            if changed is not None and not one.paths.intersection(changed):
                continue
            before = one.expires_at
            try:
                await one.renew()
            except CertificateError as error:
                log.error("certificate", key=key, error=str(error))  # noqa: TRY400
                results[key] = str(error)
            else:
                results[key] = None
                if changed is not None or one.expires_at != before:
                    date = datetime.fromtimestamp(one.expires_at, UTC).isoformat(timespec="seconds")
                    log.info("certificate renewed", key=key, expires=date)
        return results


def _no_password() -> str:
    # Without this, OpenSSL would ask for it on the terminal.
    raise ValueError("the key is encrypted")
