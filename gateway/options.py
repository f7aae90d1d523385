"""What the command line says over the files, and what must hold before anything starts."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.access.exposure import admin_refusal, public_refusal, shared_refusal
from gateway.config.inventory import Inventory, load_inventory
from gateway.config.settings import Settings, load_settings


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


def read(options: Options) -> tuple[Settings, Inventory]:
    """Both files, checked. Raises: ConfigError, StartError."""
    settings = options.over(load_settings(options.config))
    if refused := refusals(settings):
        raise StartError("\n".join(refused), status=2)
    return settings, load_inventory(options.nodes)


def refusals(settings: Settings) -> list[str]:
    """Why the listeners may not stand where these settings want them, with the remedies."""
    listen, admin = settings.listen, settings.admin
    found = (
        public_refusal(
            listen.host, keys=len(settings.keys), allow_anonymous=settings.allow_anonymous
        ),
        admin_refusal(admin.host, has_key=admin.key_file is not None),
        shared_refusal(listen.host, admin.host, listen.port, admin.port),
    )
    return [refusal for refusal in found if refusal is not None]


def read_key(path: Path) -> str:
    """The admin key in this file. Raises: StartError."""
    try:
        key = path.read_text().strip()
    except OSError as error:
        raise StartError(
            f"{path}: the admin key can't be read: {error.strerror}; make the file, or name "
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
