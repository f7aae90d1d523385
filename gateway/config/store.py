"""Settings of the store: where API keys, usage and the audit log are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import BeforeValidator, Field, ValidationInfo

from gateway.config.fields import ConfigModel, CountOrZero, TypeLabel, validation_error

STORE_OFF = "off"
"""The value of `store.url` without which there is a store."""

_FORMS = "write sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE, or off"

_SQLITE = "sqlite:///"

_POSTGRES = ("postgresql", "postgres", "postgresql+psycopg")

_SECRETS = {"password", "sslpassword", "passfile"}

MASKED_PASSWORD = "***"  # noqa: S105 - it stands for one


def _store_url(value: object, info: ValidationInfo) -> object:
    """Check a URL; a relative path starts in the folder of the file that names it."""
    # YAML 1.1 reads `off` as a boolean.
    if value is None or value is False:
        return None if value is None else STORE_OFF
    if not isinstance(value, str):
        raise validation_error("must be a URL", _FORMS)
    text = value.strip()
    if text.lower() == STORE_OFF:
        return STORE_OFF
    if text.startswith("sqlite:"):
        return _sqlite_url(text, (info.context or {}).get("folder"))
    _check_postgres_url(text)
    return text


def _sqlite_url(text: str, folder: Path | str | None) -> str:
    if not text.startswith(_SQLITE) or len(text) == len(_SQLITE):
        raise validation_error(
            "names no file", "write sqlite:///gateway.db, or sqlite:////var/lib/x/gateway.db"
        )
    path = Path(text.removeprefix(_SQLITE))
    if "\0" in text or "?" in text or path.name in {"", ".", ".."}:
        raise validation_error("must be the path of a file", "remove what follows a question mark")
    if folder is not None:
        path = Path(folder).absolute() / path
        if path.is_dir():
            raise validation_error("is a folder", "name a file in it, such as gateway.db")
    return f"{_SQLITE}{path}"


def _check_postgres_url(text: str) -> None:
    """Raises a validation error, which never shows the URL: it holds a password."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        raise validation_error(
            "is no URL", f"{_FORMS}; in a password write @ as %40, / as %2F and : as %3A"
        ) from None
    if parts.scheme not in _POSTGRES or not text.startswith(f"{parts.scheme}://"):
        raise validation_error("is no URL of a store", _FORMS)
    # In `u:12/x@host` the password begins like a port: it would be taken for one, and shown.
    if (
        parts.fragment
        or "@" in parts.path + parts.query
        or _SECRETS & set(parse_qs(parts.query, keep_blank_values=True))
    ):
        raise validation_error(
            "must have its password in front of the @",
            f"{_FORMS}; in a password write # as %23, / as %2F and ? as %3F",
        )


def masked_store_url(url: str) -> str:
    """The URL for people, its password masked."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, host = parts.netloc.rpartition("@")
    user = user.partition(":")[0]
    return parts._replace(netloc=f"{user}:{MASKED_PASSWORD}@{host}").geturl()


class RetentionSettings(ConfigModel):
    """For how long requests are kept one by one; then as sums by day, which reports count alike."""

    days: Annotated[CountOrZero, TypeLabel("number", "days")] = 90
    """Whole days for which each request has a row; 0: no limit."""
    rows: CountOrZero = 2_000_000
    """Most rows, some 400 bytes each with their indexes; the oldest go first, but none of the last
    two hours; 0: no limit."""


class StoreSettings(ConfigModel):
    """The store keeps API keys, usage and the audit log. A change needs a restart."""

    url: Annotated[
        str | None, BeforeValidator(_store_url), Field(repr=False), TypeLabel("URL, or off")
    ] = None
    """`sqlite:///FILE` (`sqlite:////…` for a path from the root) or
    `postgresql://USER:PASSWORD@HOST/DATABASE`. Unset: `gateway.db` in the state folder. `off`: no
    store; then keys are those of the settings, and limits count in memory only, from zero at each
    start."""
    retention: RetentionSettings = RetentionSettings()
    """For how long requests are kept one by one."""
