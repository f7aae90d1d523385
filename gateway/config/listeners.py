"""Settings of both listeners: addresses, certificates, keys and roles, CORS and limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from gateway.config.fields import (
    ByteCount,
    ConfigModel,
    Count,
    CountOrZero,
    ExistingFile,
    Host,
    Listed,
    Lowercased,
    Networks,
    Port,
    Seconds,
    SecondsOrZero,
    TypeLabel,
    matching,
    validation_error,
)
from gateway.config.keys import KeyHash, KeyId, LimitSpec, check_unique

MIB = 1 << 20

HostNames = Annotated[Listed[Host], TypeLabel("list of host names")]


class TlsFiles(ConfigModel):
    """Certificate of a listener."""

    cert: ExistingFile
    """PEM file of the certificate chain."""
    key: ExistingFile
    """PEM file of the certificate's key."""


MOST_EDGES = 64


def _edges(value: object) -> object:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int)):
        raise validation_error('must be a number of processes or "auto"')
    return value


class ListenSettings(ConfigModel):
    """The public listener. A change needs a restart, but for `caller_page`."""

    host: Host = "127.0.0.1"
    """Address to bind; `0.0.0.0` or `::` for all. Without `keys`, only a loopback address is
    accepted, unless `allow_anonymous` is set."""
    port: Port = 8000
    """Port to bind; 0 takes a free one."""
    tls: TlsFiles | None = None
    """Serve https with this certificate."""
    trusted_proxies: Networks = ()
    """Proxies in front of the gateway, as addresses or networks. `X-Forwarded-For` is trusted from
    them only. With proxies no caller is local, so `keys` are needed, or `allow_anonymous`."""
    hosts: HostNames = ()
    """Further `Host` names that are accepted from requests without a key. On a loopback address
    without `trusted_proxies` a `Host` that is not loopback is refused, so that no web page reaches
    the gateway through a browser; elsewhere only if this is set."""
    expose_node: bool | None = None
    """Send the node's name in `X-Gateway-Node`. Unset: to local callers of a loopback listener
    only, and to nobody behind a proxy."""
    keep_alive: Seconds = 75.0
    """An idle client connection is closed after this time."""
    caller_page: bool = False
    """Serve `GET /me`, a page on which the holder of a key sees its own use, limits and requests,
    and how to connect. Its files hold no data, and need no key."""
    edges: Annotated[
        Annotated[int, Field(ge=0, le=MOST_EDGES)] | Literal["auto"],
        BeforeValidator(_edges),
        WithJsonSchema(
            {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MOST_EDGES}, {"const": "auto"}]}
        ),
        TypeLabel("number or `auto`"),
    ] = 0
    """Processes that relay what clients and nodes send, beside the one that decides; 0: that one
    does it all. `auto`: one for each processor but one. `limits.connections` and
    `limits.buffered_bytes` are divided among them. In a `cluster` unset means `auto`."""


_ORIGIN = matching(
    re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#]+").fullmatch,
    'must be an origin or "*"',
    "such as https://chat.example.org, without a path or slash",
)

_HEADER = matching(
    re.compile(r"\*|[!#$%&'+.^_`|~0-9A-Za-z-]+").fullmatch, 'must be the name of a header or "*"'
)


class CorsSpec(ConfigModel):
    """Which web pages may call the public listener from a browser."""

    origins: Annotated[
        Listed[Annotated[str, _ORIGIN]], Field(min_length=1), TypeLabel("list of origins")
    ]
    """Origins of the pages, or `"*"` for all."""
    headers: Annotated[Listed[Annotated[str, _HEADER]], TypeLabel("list of header names")] = ("*",)
    """Request headers that pages may send."""
    max_age: SecondsOrZero = 600.0
    """Time for which a browser may cache the permission."""
    credentials: bool = False
    """Let browsers send cookies and certificates. Not together with `*`."""

    @field_validator("credentials")
    @classmethod
    def _not_for_every_page(cls, credentials: bool, info: ValidationInfo) -> bool:  # noqa: FBT001
        if credentials and "*" in info.data.get("origins", ()):
            raise validation_error('can\'t be true with the origin "*"', "name the origins")
        return credentials


class LimitSettings(ConfigModel):
    """Limits of requests, responses, connections and memory."""

    total: LimitSpec | None = None
    """Limits on the use by all callers together, those without a key too."""
    body_bytes: ByteCount = 64 * MIB
    """Largest request body; a larger one gets 413."""
    header_bytes: ByteCount = 64 << 10
    """Largest head of a request; a larger one gets 431."""
    buffered_bytes: ByteCount = 1024 * MIB
    """Request bodies in memory at one time, all together; callers share it as they share the places
    of `queue.max`."""
    header_timeout: Seconds = 15.0
    """A request's head, and before it a TLS handshake, must be complete within this time."""
    body_timeout: Seconds = 30.0
    """A body must be complete within this time, plus its bytes / `body_rate`."""
    body_rate: Annotated[ByteCount, TypeLabel("size", "bytes/s")] = 16384
    """Bytes per second that a body beyond `body_timeout` must average."""
    send_timeout: Seconds = 300.0
    """A client that reads nothing of its response for this time is disconnected."""
    connections: Count = 10000
    """Client connections at one time, and at most five eighths of the open files that the system
    allows. One address may hold seven eighths; for another's its idle ones are closed. `/health`
    and `/ready` are answered beyond. A change needs a restart."""
    n: Count = 32
    """Largest `n` (choices of one request); above it, 400."""
    prompts: Count = 2048
    """Most prompts of one completion request; above it, 400."""
    max_tokens: Annotated[Count | None, TypeLabel("number", "tokens")] = None
    """Most tokens of one answer; a request for more is lowered to it. Unset: no bound."""
    n_probs: CountOrZero = 64
    """Largest `n_probs`, `top_logprobs` and numeric `logprobs`; higher ones are lowered."""
    stop_bytes: ByteCount = 4096
    """Largest `stop` (or `stop_sequences`), all its strings together; above it, 400."""
    logit_bias_bytes: ByteCount = 64 << 10
    """Largest `logit_bias` and `response_fields`; above it, 400."""
    event_bytes: ByteCount = MIB
    """Largest single event in a node's stream, beside 32 bytes for each byte of the request's body
    and 1 KiB for each event before, up to `response_bytes`. Where a request asks for probabilities:
    `response_bytes`."""
    response_bytes: ByteCount = 64 * MIB
    """Largest response without streaming that is held back so that it can be retried."""
    resume_bytes: ByteCount = MIB
    """Text of one stream that is kept so that another node can resume it; a longer stream is not
    resumed."""
    json_depth: Annotated[Count, Field(le=900)] = 128
    """Deepest nesting of a request's JSON; above it, 400."""
    grammar_bytes: ByteCount = 128 << 10
    """Largest grammar (`grammar`), and largest schema that a node turns into one (`json_schema`,
    `response_format`, each of `tools`); above it, 400."""
    grammar_depth: Annotated[Count, Field(le=900)] = 64
    """Deepest nesting of such a grammar's parentheses, or of such a schema's JSON; above it,
    400."""
    media_hosts: HostNames = ()
    """Hosts of remote image URLs that are forwarded. All others are refused, since the node would
    fetch them; `data:` URLs always pass."""
    json_containers: Count = 100_000
    """Lists and objects in a request's JSON, counted in bodies over 64 KiB; above it, 400."""
    json_strings: Count = 500_000
    """Strings in such JSON, names included; above it, 400."""
    json_numbers: Count = 4_000_000
    """Numbers (token ids, for example) and other plain values in such JSON; above it, 400."""
    json_fields: Count = 1000
    """Fields of such a body itself; above it, 400."""
    grammar_properties: Count = 400
    """Optional properties of an object in such a schema; above it, 400, since a node's work grows
    with the cube of their number."""
    grammar_optionals: Count = 32
    """Optional items in a row of a grammar, or of a schema's `pattern`: `x?` is one, `x*` two,
    `x{m,n}` (n - m) ^ 0.3, repeats multiplied; 16 properties of an object that may be left out
    count as one. Above it, 400: 32 stop a node for half a second at the most, 1,000 for 20 s at
    each token."""
    tools_bytes: ByteCount = MIB
    """All `tools` of a request together; above it, 400."""


RoleName = Literal["viewer", "operator", "admin"]

_RESERVED_ACTORS = frozenset({"local", "file", "signal", "gateway"})
"""Names in the audit log of those who act without a key."""


def _admin_key_id(value: object) -> object:
    if isinstance(value, str) and value.lower() in _RESERVED_ACTORS:
        raise validation_error(
            f"can't be {value!r}, which the audit log uses for actors without a key",
            "make a key with another id: `llama-gateway keys hash --id NAME`",
        )
    return value


class AdminKeySpec(ConfigModel):
    """One key of the admin listener: a public id, the SHA-256 of its secret, and a role."""

    id: Annotated[KeyId, BeforeValidator(_admin_key_id)]
    """Public part of the key `lg_<id>_<secret>`; unique, and in the audit log."""
    sha256: KeyHash
    role: Annotated[RoleName, Lowercased]
    """What its holder may do; each role includes the lower ones. `viewer`: status, nodes, metrics,
    dashboard. `operator`: requests, usage, chat, drain, resume, probe, cancel, reload. `admin`:
    keys, configuration, audit log."""


class AdminSettings(ConfigModel):
    """The admin listener: metrics, nodes, drain, reload. Only a change of its keys is live."""

    host: Host = "127.0.0.1"
    """Address to bind. Any but a loopback address needs `keys` or `key_file`."""
    port: Port = 8001
    """Port to bind; 0 takes a free one."""
    tls: TlsFiles | None = None
    """Serve https with this certificate."""
    key_file: ExistingFile | None = None
    """File that holds an admin key (`Authorization: Bearer`) of the role `admin`."""
    keys: Annotated[tuple[AdminKeySpec, ...], TypeLabel("list")] = ()
    """Admin keys with roles. Without any, and without `key_file`, no key is needed on a loopback
    address; but after a reload that removes the last one every request gets 401, until there is a
    key or a restart."""
    hosts: HostNames = ()
    """Further `Host` names that are accepted. Requests with another `Host` are refused, so that no
    web page reaches the listener through a browser."""

    @field_validator("keys")
    @classmethod
    def _ids_are_unique(cls, keys: tuple[AdminKeySpec, ...]) -> tuple[AdminKeySpec, ...]:
        check_unique(keys, "id")
        return keys
