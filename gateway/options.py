"""What the command line says over the files, and what must hold before anything starts."""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gateway.access.exposure import admin_refusal, edge_refusal, public_refusal, shared_refusal
from gateway.config.fields import is_host
from gateway.config.inventory import Inventory, load_inventory
from gateway.config.problems import ConfigError, Problem
from gateway.config.settings import Refused, Settings, load_settings
from gateway.transport.upstream import origin


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; None leaves it to the file."""

    nodes: Path
    config: Path | None = None
    host: str | None = None
    port: int | None = None
    admin_host: str | None = None
    admin_port: int | None = None
    admin_key_file: Path | None = None
    allow_anonymous: bool = False
    state: Path | None = None
    """Folder for what lasts over a restart; by default systemd's, else the user's."""
    command: tuple[str, ...] = ()
    """What starts this gateway anew, for a successor; empty: it can't be succeeded."""

    def over(self, settings: Settings) -> Settings:
        """These settings with what the command line says on top."""
        listen = {"host": self.host, "port": self.port}
        admin = {"host": self.admin_host, "port": self.admin_port, "key_file": self.admin_key_file}
        return settings.model_copy(
            update={
                "listen": settings.listen.model_copy(update=_given(listen)),
                "admin": settings.admin.model_copy(update=_given(admin)),
                "allow_anonymous": settings.allow_anonymous or self.allow_anonymous,
            }
        )


class StartError(Exception):
    """The gateway can't start; `status` is the process's exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class Refusal(NamedTuple):
    """Why a gateway may not start though its files are valid."""

    key: str
    """Of the settings or the inventory."""
    message: str
    """With the remedy."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Both files, and all that would keep a gateway from starting with them."""

    settings: Settings | None
    """None: the file has problems. So for the inventory."""
    inventory: Inventory | None
    problems: tuple[Problem, ...]
    """Of both files."""
    refusals: tuple[Refusal, ...]


def examine(options: Options, *, empty: bool = True) -> Examined:
    """Look for everything that is wrong; nothing is started and nothing is sent.

    A settings file without a single word is wrong, and where none may be `empty`, one with
    comments alone as well.
    """
    problems: list[Problem] = []
    refused: list[Refusal] = []
    settings = inventory = None
    try:
        hollow: Refused = "blank" if empty else "empty"
        settings = options.over(load_settings(options.config, refused=hollow))
        refused += _refusals(settings)
    except ConfigError as error:
        problems += error.problems
    try:
        inventory = load_inventory(options.nodes)
        refused += _unusable_tls(inventory)
    except ConfigError as error:
        problems += error.problems
    return Examined(settings, inventory, tuple(problems), tuple(refused))


def read(options: Options, *, empty: bool = True) -> tuple[Settings, Inventory]:
    """Both files, checked as `examine` does. Raises: StartError, with all that is wrong."""
    found = examine(options, empty=empty)
    told = [str(ConfigError(found.problems))] if found.problems else []
    told += [refusal.message for refusal in found.refusals]
    if told or found.settings is None or found.inventory is None:
        raise StartError("\n".join(told), status=2)
    return found.settings, found.inventory


def _refusals(settings: Settings) -> Iterator[Refusal]:
    """Why the listeners may not stand where these settings want them."""
    listen, admin = settings.listen, settings.admin
    for key, host in (("listen.host", listen.host), ("admin.host", admin.host)):
        if not is_host(host.strip("[]")):
            yield Refusal(key, f"{key}: {host!r} is no address; write one, or a host's name")
    for key, refusal in (
        (
            "listen.host",
            public_refusal(
                listen.host, keys=len(settings.keys), allow_anonymous=settings.allow_anonymous
            ),
        ),
        (
            "listen.trusted_proxies",
            edge_refusal(
                proxies=len(listen.trusted_proxies),
                keys=len(settings.keys),
                allow_anonymous=settings.allow_anonymous,
            ),
        ),
        ("admin.host", admin_refusal(admin.host, has_key=admin.key_file is not None)),
        ("listen.port", shared_refusal(listen.host, admin.host, listen.port, admin.port)),
    ):
        if refusal is not None:
            yield Refusal(key, refusal)
    if admin.key_file is not None:
        try:
            read_key(admin.key_file)
        except StartError as error:
            yield Refusal("admin.key_file", str(error))
    if listen.tls is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(listen.tls.cert, listen.tls.key)
        except OSError as error:
            yield Refusal(
                "listen.tls",
                f"listen.tls: {listen.tls.cert} and {listen.tls.key} can't be used ({error}): name "
                "PEM files of a certificate chain and of the key that belongs to it",
            )


def _unusable_tls(inventory: Inventory) -> Iterator[Refusal]:
    for number, spec in enumerate(inventory.nodes):
        try:
            origin(spec)
        except OSError as error:
            yield Refusal(
                f"nodes[{number}].tls",
                f"the TLS files of the node '{spec.name}' can't be used ({error}): name PEM files "
                "in its tls (ca, cert, key)",
            )


def read_key(path: Path) -> str:
    """The admin key in this file. Raises: StartError."""
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise StartError(
            f"{path}: the admin key can't be read: {why}; make the file, or name "
            "another with --admin-key-file (admin.key_file)",
            status=2,
        ) from None
    if not key:
        raise StartError(f"{path}: the file holds no admin key; write one into it", status=2)
    return key


def drains_file(options: Options) -> Path:
    """Where the drained nodes of this inventory are kept over a restart."""
    return _state_file(options, "drains")


def last_seen_file(options: Options) -> Path:
    """Where is kept over a restart what the nodes of this inventory said last."""
    return _state_file(options, "seen")


def _state_file(options: Options, what: str) -> Path:
    folder = options.state
    if folder is None and (systemd := os.environ.get("STATE_DIRECTORY", "").partition(":")[0]):
        folder = Path(systemd)
    if folder is None:
        base = os.environ.get("XDG_STATE_HOME")
        folder = (Path(base) if base else Path.home() / ".local" / "state") / "llama-gateway"
    which = hashlib.sha256(str(options.nodes.absolute()).encode()).hexdigest()[:12]
    return folder / f"{what}-{which}.json"


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
