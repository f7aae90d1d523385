"""`/admin/config` and `/admin/reload`, and what the admin listener needs of the running gateway."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.admin.reports import AUDIT_TARGET_KEY
from gateway.api.base import openai_error
from gateway.callers.ledger import Ledger
from gateway.callers.standings import QuotaWatch, Standings
from gateway.callers.stored_keys import KeySync
from gateway.config.errors import ConfigError, Problem, single_line
from gateway.config.settings import MOST_ROWS, Settings, masked_settings, settings_rows
from gateway.config.versions import (
    FileHistory,
    FileKind,
    Version,
    VersionError,
    difference,
    find_version,
)
from gateway.config.watch import changed_files
from gateway.edges.supervisor import Edges
from gateway.errors import GatewayError
from gateway.events import EventBus, InventoryChanged, SettingsChanged
from gateway.forward.in_flight import InFlightRegistry
from gateway.http.certificates import ListenerCertificates, ServerCertificate
from gateway.nodes.fleet import Fleet
from gateway.schedule.model_placer import ModelPlacer
from gateway.schedule.scheduler import Scheduler
from gateway.store.store import Store
from gateway.watch.audit import AuditTrail
from gateway.watch.metrics import ClusterSample
from gateway.watch.problems import StorageCondition
from gateway.web.asgi import JsonResponse, large_json, read_fields
from gateway.web.handler import RequestHandler


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The changes of a successful reload."""

    inventory: InventoryChanged
    settings: SettingsChanged


@dataclass
class ConfigFiles:
    """Both files of a gateway, and what it has in force of them."""

    histories: Mapping[FileKind, FileHistory]
    overrides: Mapping[str, str]
    """What gave values of the settings in place of the file, by their keys."""
    check: Callable[[FileKind, str], Sequence[Problem]]
    """What would keep the gateway from starting with this text. It waits for the disk."""
    in_force: dict[FileKind, str] = field(default_factory=dict)
    """The texts; a file that was never read has none."""
    inventory_error: str | None = None
    """The problems of the inventory on disk, while an older one is in force."""
    settings_error: str | None = None
    """The problems of the settings on disk, while older ones are in force."""


class ClusterMember(Protocol):
    """The gateway as a member of a cluster."""

    def sample(self) -> ClusterSample:
        """The cluster, as this member knows it now."""


class GatewayControl(Protocol):
    """The running gateway, as the admin listener asks and orders it."""

    version: str
    started_at: float  # by `clock`
    settings: Settings  # those in force
    certificates: CertificateRenewal
    fleet: Fleet
    scheduler: Scheduler
    registry: InFlightRegistry
    handler: RequestHandler  # of the public listener
    bus: EventBus
    audit: AuditTrail
    model_placer: ModelPlacer  # has routers load and unload models
    key_sync: KeySync  # keeps the API keys in force equal to those of settings and store
    standings: Standings  # how far limits are used
    quotas: QuotaWatch  # of these, limits of a day or month that are nearly used up
    store: Store | None  # None: the settings have switched it off
    ledger: Ledger | None  # None: there is no store
    edges: Edges | None  # None: this process relays all by itself

    def clock(self) -> float:
        """Monotonic seconds."""

    @property
    def config_files(self) -> ConfigFiles:
        """The two files, and their earlier texts."""

    @property
    def cluster(self) -> ClusterMember | None:
        """What it is in its cluster; None: it is a gateway of its own."""

    def undefined_groups(self) -> Mapping[str, int]:
        """How many keys are of each group that nobody has defined."""

    def storage(self) -> StorageCondition:
        """Whether files and results of callers can be kept."""

    async def reload(self) -> ReloadResult:
        """Reload the inventory and the settings.

        Raises: ConfigError, or OSError if a TLS file can't be used; then the file with the problem
        has changed nothing.
        """


MOST_LISTED_PROBLEMS = 50  # most problems that a response lists
LARGEST_ORDER, ORDER_SECONDS = 4096, 10.0  # bytes of a body, and for how long it is waited for


@dataclass(frozen=True, slots=True)
class ConfigEndpoints:
    """The endpoints of the configuration."""

    gateway: GatewayControl

    async def show(self, _: Request) -> Response:
        """The settings in force, with secrets masked."""
        return JsonResponse(masked_settings(self.gateway.settings))

    async def origins(self, _: Request) -> Response:
        """Each value in force: the default, or the line, the variable or the option it is from."""
        gateway, files = self.gateway, self.gateway.config_files
        settings, text = gateway.settings, files.in_force.get("gateway")
        history = files.histories.get("gateway")

        def make() -> dict[str, Any]:
            rows = settings_rows(settings, text, os.environ, files.overrides)
            return {
                "file": None if history is None else str(history.file),
                "values": [row._asdict() for row in rows],
                "complete": len(rows) < MOST_ROWS,
                "settings_error": files.settings_error,
                "inventory_error": files.inventory_error,
            }

        return await large_json(make)

    async def history(self, _: Request) -> Response:
        """The versions of both files, the newest first."""
        files = self.gateway.config_files
        told = [(one, files.in_force.get(kind, "")) for kind, one in files.histories.items()]
        return await large_json(
            lambda: {"files": [one.describe(in_force) for one, in_force in told]}
        )

    async def diff(self, request: Request) -> Response:
        """What has changed from one version to the file; secrets are masked."""
        history, before, text = await self._read(request.query_params.get("from", ""))
        names = {"file": str(history.file), "from": before.name}
        return await large_json(lambda: names | difference(text, history.on_disk() or ""))

    async def rollback(self, request: Request) -> Response:
        """Write an earlier text to its file, if a gateway would start with it."""
        fields = await read_fields(request, LARGEST_ORDER, ORDER_SECONDS)
        name = fields.get("version")
        if not isinstance(name, str) or len(fields) > 1:
            raise errors.invalid_request('The body is {"version": NAME}.', "version")
        history, version, text = await self._read(name)
        request.scope[AUDIT_TARGET_KEY] = version.name
        if managed := await asyncio.to_thread(history.managed):
            raise GatewayError(409, "file_managed", f"{history.file} was not changed: {managed}.")
        problems = await asyncio.to_thread(self.gateway.config_files.check, history.kind, text)
        if problems:
            return _invalid(str(problems[0]), problems)
        try:
            kept = await asyncio.to_thread(history.put_back, text, time.time())
        except OSError as error:
            raise GatewayError(
                409,
                "file_not_writable",
                f"{history.file} can't be written ({error.strerror or error}): llama-gateway "
                f"settings rollback {version.name}, as a user who may, can do it.",
            ) from None
        told = {"file": str(history.file), "version": version.name}
        return JsonResponse({**told, "kept": None if kept is None else kept.name})

    async def _read(self, name: str) -> tuple[FileHistory, Version, str]:
        """A version of a file, and its text. Raises: GatewayError 404."""

        def read() -> tuple[FileHistory, Version, str]:
            found = find_version(self.gateway.config_files.histories.values(), name)
            return (*found, found[1].read())

        try:
            return await asyncio.to_thread(read)
        except (VersionError, ConfigError) as error:
            raise GatewayError(404, "version_not_found", f"{error}.") from None

    async def reload(self, _: Request) -> Response:
        """Reload both files: what has changed, or every problem of the one that is invalid."""
        before = self.gateway.settings
        try:
            result = await self.gateway.reload()
        except ConfigError as error:
            return _invalid(str(error.problems[0]), error.problems)
        except OSError as error:
            return _invalid(single_line(str(error)), ())
        nodes = result.inventory
        return JsonResponse(
            {
                "nodes": {"added": nodes.added, "changed": nodes.changed, "removed": nodes.removed},
                "settings": {
                    "changed": changed_keys(before, self.gateway.settings),
                    "needs_restart": result.settings.needs_restart,
                },
            }
        )


def changed_keys(before: Settings, after: Settings) -> list[str]:
    """The top-level keys of the settings that differ."""
    return [
        name for name in type(after).model_fields if getattr(before, name) != getattr(after, name)
    ]


def _invalid(first: str, problems: Sequence[Problem]) -> Response:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    error = GatewayError(
        422, "invalid_configuration", f"A file is invalid and has changed nothing: {first}{more}"
    )
    listed_problems = [
        {
            "file": str(problem.file),
            "line": problem.line or None,
            "key": problem.key,
            "message": single_line(problem.message),
            "remedy": single_line(problem.remedy),
        }
        for problem in problems[:MOST_LISTED_PROBLEMS]
    ]
    return problems_response(error, listed_problems)


def problems_response(error: GatewayError, problems: Sequence[Mapping[str, object]]) -> Response:
    """The response to a request that ends with `error`, with every problem that led to it."""
    headers = {"x-gateway-reason": error.code}
    return JsonResponse({"error": openai_error(error), "problems": problems}, error.status, headers)


log = structlog.get_logger()


class CertificateRenewal:
    """The certificates in force; `watch` puts renewed ones in force."""

    def __init__(self, settings: Settings, fleet: Fleet, audit: AuditTrail) -> None:
        """Raises: CertificateError."""
        cluster = settings.cluster
        self.member: ServerCertificate | None = None
        """Its contexts are those of `gateway.cluster.tunnel`; None: there is no cluster."""
        if cluster is not None:
            from gateway.cluster.tunnel import member_certificate

            self.member = member_certificate(cluster.tls, cluster.member_name)
        self.listeners = ListenerCertificates(
            {
                "listen.tls": settings.listen.tls,
                "admin.tls": settings.admin.tls,
                "cluster.tls": self.member,
            }
        )
        self._fleet = fleet
        self._audit = audit
        self._node_errors: dict[str, str] = {}

    @property
    def error(self) -> str | None:
        """Why renewed files can't be used, while older certificates are in force."""
        errors = [self.listeners.error] if self.listeners.error else []
        errors += [
            f"the TLS files of the node '{name}': {error}"
            for name, error in self._node_errors.items()
            if name in self._fleet.nodes
        ]
        return "; ".join(errors) or None

    async def watch(self) -> None:
        """Put files in force when they change; never ends."""
        files = changed_files(lambda: self.listeners.files | self._fleet.tls_files())
        async for changed in files:
            results = await self.listeners.renew(changed)
            for name, error in self._fleet.renew_connections(changed).items():
                self._node_errors.pop(name, None)
                if error is not None:
                    self._node_errors[name] = error
                    log.error("certificate", node=name, error=error)
                results[f"node {name}"] = error
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
