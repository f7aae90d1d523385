"""Renewed certificates: those of both listeners, and those with which nodes are reached."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import structlog

from gateway.config.errors import Problem
from gateway.config.settings import Settings
from gateway.fleet.fleet import Fleet
from gateway.observe.audit import AuditTrail
from gateway.transport.certificates import ListenerCertificates, changed_files

log = structlog.get_logger()


class CertificateStatus(Protocol):
    """What `/admin/status` and the metrics show of certificates."""

    @property
    def error(self) -> str | None:
        """Why renewed files can't be used, while older certificates are in force."""

    @property
    def expiry(self) -> Mapping[str, float]:
        """When the certificate of each listener with TLS expires, in seconds since 1970."""


class CertificateRenewal:
    """The certificates in force; `watch` puts renewed ones in force."""

    def __init__(self, settings: Settings, fleet: Fleet, audit: AuditTrail) -> None:
        """Raises: CertificateError."""
        self.listeners = ListenerCertificates(
            {"listen.tls": settings.listen.tls, "admin.tls": settings.admin.tls}
        )
        self._fleet = fleet
        self._audit = audit
        self._node_errors: dict[str, str] = {}

    @property
    def error(self) -> str | None:
        """See `CertificateStatus`."""
        errors = [self.listeners.error] if self.listeners.error else []
        errors += [
            f"the TLS files of the node '{name}': {error}"
            for name, error in self._node_errors.items()
            if name in self._fleet.nodes
        ]
        return "; ".join(errors) or None

    @property
    def expiry(self) -> Mapping[str, float]:
        """See `CertificateStatus`."""
        return self.listeners.expiry

    async def watch(self) -> None:
        """Put files in force when they change; never ends."""
        files = changed_files(lambda: self.listeners.files | self._fleet.tls_files())
        async for changed in files:
            results = await self.listeners.renew(changed)
            results |= self._renew_nodes(changed)
            for target, problem in results.items():
                outcome = "done" if problem is None else "invalid_certificate"
                self._audit.record("file", None, "certificate", target, outcome)

    async def reread(self) -> list[Problem]:
        """Read the listeners' files again, changed or not; returns what is wrong with them."""
        results = await self.listeners.renew()
        return [
            Problem(self.listeners.file_of(key), 0, key, error)
            for key, error in results.items()
            if error is not None
        ]

    def _renew_nodes(self, changed: Collection[Path]) -> dict[str, str | None]:
        results: dict[str, str | None] = {}
        for name, error in self._fleet.renew_connections(changed).items():
            self._node_errors.pop(name, None)
            if error is not None:
                self._node_errors[name] = error
                log.error("certificate", node=name, error=error)
            results[f"node {name}"] = error
        return results
