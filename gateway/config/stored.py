"""Settings of what is stored: the store, files and batches, and webhooks that tell of them."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import parse_qs, urlsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator

from gateway.config.fields import (
    ByteCount,
    ConfigModel,
    Count,
    CountOrZero,
    EnvVarName,
    ExistingFile,
    FolderPath,
    KeptSeconds,
    Listed,
    NonEmptyText,
    Seconds,
    TypeLabel,
    at_least,
    at_most,
    instead_of,
    text_of_file,
    text_of_variable,
    validation_error,
)
from gateway.config.keys import GroupName

STORE_OFF = "off"
"""The value of `store.url` without which there is a store."""

_FORMS = "write sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE, or off"

_SQLITE = "sqlite:///"

_POSTGRES = ("postgresql", "postgres", "postgresql+psycopg")

_SECRETS = {"password", "sslpassword"}


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
    return parts._replace(netloc=f"{user}:***@{host}").geturl()


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


DAY = 86400.0

MOST_LINES = 1_000_000
"""Lines of a batch that the settings may allow at most."""


class WindowSettings(ConfigModel):
    """The time within which a batch must be done, its `completion_window`."""

    shortest: Seconds = 60.0
    """A batch may ask for no less."""
    longest: Annotated[Seconds, at_least("shortest"), Field(validate_default=True)] = 7 * DAY
    """A batch may ask for no more."""
    default: Annotated[
        Seconds, at_least("shortest"), at_most("longest"), Field(validate_default=True)
    ] = DAY
    """Of a batch that asks for none."""


class BatchSettings(ConfigModel):
    """Files that callers upload, batches of requests, and background responses."""

    folder: FolderPath | None = None
    """Folder of files and results, readable for the gateway's user alone. Unset: `batches` in the
    state folder. A change needs a restart, and moves nothing."""
    file_bytes: ByteCount = 200 << 20
    """Largest file that a caller may upload; above it, 413."""
    folder_bytes: ByteCount = 10 << 30
    """All files of the folder together, uploads and results; beyond it, uploads get 507."""
    files_per_key: Count = 1000
    """Files that one key may own; beyond them, 429 until one is deleted."""
    bytes_per_key: Annotated[ByteCount, at_least("file_bytes"), Field(validate_default=True)] = (
        2 << 30
    )
    """All that one key keeps in the folder: files, batches and their results, background requests
    and their responses. Beyond it, 429 until something is deleted or expires, and its batches
    pause. Well below `folder_bytes` it leaves room for other keys."""
    line_bytes: ByteCount = 1 << 20
    """Longest line of a batch's input; a longer one is an error of its own."""
    lines: Annotated[Count, Field(le=MOST_LINES)] = 50_000
    """Most lines of one batch."""
    batches_per_key: Count = 100
    """Batches of one key that have not ended; beyond them, 429."""
    windows: WindowSettings = WindowSettings()
    """Times within which a batch must be done."""
    keep: KeptSeconds = 30 * DAY
    """For how long files and the results of batches are kept; an upload may ask for less
    (`expires_after`)."""
    background_keep: KeptSeconds = 3600.0
    """For how long the result of a background request is kept."""
    waiting_per_key: Count = 1000
    """Requests of one key that wait or run in the background, lines of batches aside; beyond them,
    429."""
    waiting_bytes_per_key: ByteCount = 256 << 20
    """Bodies of these requests together; beyond it, 429."""
    background_at_once: Count = 64
    """Background requests that one process runs or has in its queue at a time; the others wait in
    the store."""
    store_responses: bool = False
    """Keep a response whose request has `store: true`, for `keep`. False: only those that also have
    `background: true` are kept."""


SECRET_PREFIX = "whsec_"  # noqa: S105 - of every secret of a webhook

LEAST_SECRET_BYTES, MOST_SECRET_BYTES = 24, 64

MOST_SECRETS = 8
"""Secrets of one target: each adds a signature to every request."""

EventType = Literal[
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "response.completed",
    "response.failed",
    "response.incomplete",
    "response.cancelled",
    "quota.near",
    "quota.spent",
]

EVENTS: tuple[EventType, ...] = get_args(EventType)
"""Types of events: those of batches and responses in OpenAI's words."""

QUOTA_EVENTS = frozenset({"quota.near", "quota.spent"})
"""What only targets get that name it."""

_SECRET_FORM = f"a secret is {SECRET_PREFIX} and 24 to 64 bytes in base64, such as "
_SECRET_FORM += "`llama-gateway webhooks secret` prints"


def secret_bytes(secret: str) -> bytes:
    """The bytes that a secret `whsec_...` stands for. Raises: ValueError, which never shows it."""
    if not secret.startswith(SECRET_PREFIX):
        raise ValueError(f"does not begin with {SECRET_PREFIX}")
    try:
        found = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("is no base64 with its padding") from None
    if not LEAST_SECRET_BYTES <= len(found) <= MOST_SECRET_BYTES:
        raise ValueError(f"has {len(found)} bytes")
    return found


def _webhook_url(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return str(WebhookUrl.parse(value))
    except ValueError as error:
        raise validation_error(str(error), "such as https://hooks.example.org/llama") from None


class WebhookTarget(ConfigModel):
    """One receiver of events. Requests to it are signed as Standard Webhooks describes."""

    url: Annotated[
        str,
        BeforeValidator(_webhook_url),
        Field(examples=["https://hooks.example.org/llama"], repr=False),
        TypeLabel("URL"),
    ]
    """Where events are posted. A `webhook_url` of a request must be this URL, or lie below its
    path. It is shown without its path: that may be a secret."""
    secret_env: EnvVarName | None = None
    """Name of the environment variable that holds the secret (`whsec_...`); several with white
    space between them while a secret is being replaced: each signs."""
    secret_file: Annotated[ExistingFile | None, instead_of("secret_env")] = None
    """File that holds the secrets, instead of `secret_env`; read at reloads."""
    keys: Annotated[Listed[NonEmptyText], TypeLabel("list of ids")] = ()
    """Ids of keys whose events go there. Neither `keys` nor `groups`: all."""
    groups: Annotated[Listed[GroupName], TypeLabel("list of names")] = ()
    """Groups of keys whose events go there."""
    events: Annotated[
        Listed[EventType],
        Field(
            description=(
                f"Events that go there: {', '.join(EVENTS)}. None: all but those of quotas."
            )
        ),
        TypeLabel("list of events"),
    ] = ()
    named_only: bool = False
    """Only events of requests that name this URL, or one below it, by `webhook_url`."""
    allow_http: bool = False
    """Let the URL begin with http: others on the way can read the events."""
    allow_private: Annotated[bool, Field(validate_default=True)] = False
    """Let its host have loopback and private addresses; with http, those alone unless `allow_http`
    is set."""
    ca: ExistingFile | None = None
    """PEM file of the certificate authorities to trust, instead of the system's."""
    # Resolved from `secret_env` or `secret_file`; `exclude` keeps it out of the file's keys.
    secrets: tuple[SecretStr, ...] = Field(
        default=(), exclude=True, validate_default=True, repr=False
    )

    @field_validator("allow_private")
    @classmethod
    def _is_not_readable_by_all(cls, private: bool, info: ValidationInfo) -> bool:  # noqa: FBT001
        url = info.data.get("url")
        if url is None or info.data.get("allow_http"):
            return private
        parsed = WebhookUrl.parse(url)
        if parsed.scheme == "http" and not private:
            raise validation_error(
                "must begin with https",
                "or set allow_http, or allow_private for a receiver with a private address",
                "url",
            )
        if parsed.scheme == "http" and _is_public(parsed.host):
            raise validation_error(
                "must begin with https, as its address is public", "or set allow_http", "url"
            )
        return private

    @field_validator("secrets", mode="before")
    @classmethod
    def _resolve_secrets(cls, secrets: object, info: ValidationInfo) -> Any:
        if (info.context or {}).get("folder") is None:  # built in code, where a secret may be given
            return secrets
        if secrets:
            raise validation_error(
                "secrets must not stand in this file", "name them by secret_env or secret_file"
            )
        data = info.data
        if not {"secret_env", "secret_file"} <= data.keys():
            return ()  # one of them has a problem of its own
        env: Mapping[str, str] = (info.context or {}).get("env") or os.environ
        if variable := data["secret_env"]:
            return _checked(text_of_variable(variable, env, "secret_env"), "secret_env")
        if path := data["secret_file"]:
            return _checked(text_of_file(path, "secret_file"), "secret_file")
        raise validation_error(
            "has no secret to sign with", "name one by secret_file or secret_env", "secret_file"
        )

    @property
    def parsed_url(self) -> WebhookUrl:
        """The URL's parts."""
        return WebhookUrl.parse(self.url)

    def is_for(self, owner: str, group: str | None) -> bool:
        """Whether events of this key go there."""
        if not self.keys and not self.groups:
            return True
        return owner in self.keys or (group is not None and group in self.groups)

    def wants(self, event: str) -> bool:
        """Whether events of this type go there."""
        return event in self.events if self.events else event not in QUOTA_EVENTS


def _checked(text: str, key: str) -> tuple[SecretStr, ...]:
    found = text.split()
    if not 1 <= len(found) <= MOST_SECRETS:
        raise validation_error(f"holds {len(found)} secrets", f"1 to {MOST_SECRETS} are meant", key)
    for number, secret in enumerate(found, 1):
        try:
            secret_bytes(secret)
        except ValueError as error:
            raise validation_error(f"its secret {number} {error}", _SECRET_FORM, key) from None
    return tuple(SecretStr(secret) for secret in found)


def _is_public(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


class WebhookSettings(ConfigModel):
    """Webhooks: events of batches, background responses and quotas, posted to receivers."""

    targets: Annotated[tuple[WebhookTarget, ...], TypeLabel("list")] = ()
    """Receivers, and so the only URLs that a `webhook_url` may name. Of several that cover a URL,
    the one with the longest path counts, then the first."""
    timeout: Annotated[Seconds, Field(le=60)] = 15.0
    """Time for a receiver to answer, from the look-up of its name on."""
    give_up: KeptSeconds = 86400.0
    """An event that could not be delivered for so long is given up."""


LONGEST_URL = 2048

_DEFAULT_PORTS = {"http": 80, "https": 443}

_FORM = re.compile(r"(https?)://([^/?#]*)(/[^?#]*)?(\?[^#]*)?", re.IGNORECASE)

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")

_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""As the last label it makes a host an IPv4 address, for libc too: `127.1`, `0x7f.1`."""

_PATH = re.compile(r"(?:/(?:[A-Za-z0-9._~!$&'()*+,=:@-]|%[0-9A-Fa-f]{2})*)*")

_QUERY = re.compile(r"\?(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*")

_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")

_MAY_BE_ESCAPED = frozenset({*b' "<>[]^`{|}', *range(0x80, 0x100)})
"""What a path can't have as it is. Every other byte must stand for itself, or not be there."""


@dataclass(frozen=True, slots=True)
class WebhookUrl:
    """A webhook's URL in one strict form, so that what is compared is also what is called.

    Nothing is repaired. A URL that two programs could read differently is refused: one with a user,
    with dots or slashes that are percent-encoded, with dot segments, with a number for a host that
    is no plain address. Scheme and host are in lower case, and the default port is left out. An
    IPv6 address as `host` has no brackets.
    """

    scheme: str
    host: str
    port: int
    path: str
    """Begins with a slash."""
    query: str
    """With its question mark; empty: none."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises: ValueError, whose text never repeats the URL: it may hold a secret."""
        if len(text) > LONGEST_URL:
            raise ValueError(f"is longer than {LONGEST_URL} characters")
        if not text.isascii() or not text.isprintable():
            raise ValueError("has characters that a URL can't have; percent-encode them")
        if "#" in text:
            raise ValueError("must have no fragment (#...)")
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError("must be an http or https URL with a host")
        scheme, place, path, query = found[1].lower(), found[2], found[3] or "/", found[4] or ""
        if "@" in place:
            raise ValueError("must have no user and no password")
        host, port = _host_and_port(place, _DEFAULT_PORTS[scheme])
        _check_path(path)
        if query and not _QUERY.fullmatch(query):
            raise ValueError("has characters in its query that a URL can't have")
        return cls(scheme, host, port, path, query)

    @property
    def origin(self) -> str:
        """Scheme, host and port: what may be shown in logs and metrics."""
        return f"{self.scheme}://{self.host_field}"

    @property
    def host_field(self) -> str:
        """The value of the field `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.origin}{self.path}{self.query}"

    def covers(self, other: WebhookUrl) -> bool:
        """Whether the other is this one, or lies below it; never below one that has a query."""
        if (self.scheme, self.host, self.port) != (other.scheme, other.host, other.port):
            return False
        if self.query:
            return self == other
        if self.path == other.path:
            return True
        return other.path.startswith(self.path if self.path.endswith("/") else f"{self.path}/")


def _host_and_port(place: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname or "", parts.port or default_port
        written = f"[{host}]" if ":" in host else host
        host = str(ipaddress.IPv6Address(host)) if ":" in host else host
    except ValueError:
        raise ValueError("has no valid host or port") from None
    # No zone (`fe80::1%eth0`), which belongs to one machine; no empty port, and no zeros before it.
    if "%" in place or place.lower() not in {written, f"{written}:{port}"}:
        raise ValueError("has no valid host or port")
    return host if ":" in host else _name(host), port


def _name(text: str) -> str:
    labels = text.split(".")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            raise ValueError("must write an IPv4 address as four decimal numbers") from None
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("has no valid host")
    return text


def _check_path(path: str) -> None:
    if not _PATH.fullmatch(path):
        raise ValueError("has characters in its path that a webhook's URL can't have")
    for found in _ESCAPE.finditer(path):
        if int(found[1], 16) not in _MAY_BE_ESCAPED:
            raise ValueError(f"must not have {found[0]} in its path")
    segments = path.split("/")[1:]
    # A slash at the end is no empty segment.
    if not all(segments[:-1]):
        raise ValueError("must have no empty segment (//) in its path")
    if not {".", ".."}.isdisjoint(segments):
        raise ValueError("must have no dot segment (. or ..) in its path")
