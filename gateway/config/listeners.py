"""Settings of both listeners: addresses, certificates, keys and roles, CORS and limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from gateway.config.cache_privacy import CacheSpec
from gateway.config.fields import (
    ByteCount,
    ConfigModel,
    Count,
    CountOrZero,
    ExistingFile,
    Host,
    Lowercased,
    Network,
    NonEmptyText,
    Port,
    PriorityName,
    Seconds,
    SecondsOrZero,
    Timestamp,
    TypeLabel,
    as_list,
    validation_error,
)
from gateway.config.usage_limits import GroupName, LimitSpec

_CLASSES = get_args(PriorityName)

MIB = 1 << 20


class TlsFiles(ConfigModel):
    """Certificate of a listener."""

    cert: Annotated[ExistingFile, Field(description="PEM file of the certificate chain.")]
    key: Annotated[ExistingFile, Field(description="PEM file of the certificate's key.")]


class ListenSettings(ConfigModel):
    """The public listener. A change needs a restart."""

    host: Annotated[
        Host,
        Field(
            description=(
                "Address to bind; `0.0.0.0` or `::` for all. Without `keys`, only a loopback "
                "address is accepted, unless `allow_anonymous` is set."
            )
        ),
    ] = "127.0.0.1"
    port: Annotated[Port, Field(description="Port to bind; 0 takes a free one.")] = 8000
    tls: Annotated[TlsFiles | None, Field(description="Serve https with this certificate.")] = None
    trusted_proxies: Annotated[
        tuple[Network, ...],
        BeforeValidator(as_list),
        Field(
            description=(
                "Proxies in front of the gateway, as addresses or networks. `X-Forwarded-For` is "
                "trusted from them only. With proxies no caller is local, so `keys` are needed, or "
                "`allow_anonymous`."
            )
        ),
        TypeLabel("list of networks"),
    ] = ()
    hosts: Annotated[
        tuple[Host, ...],
        BeforeValidator(as_list),
        Field(
            description=(
                "Further `Host` names that are accepted from requests without a key. On a loopback "
                "address without `trusted_proxies` a `Host` that is not loopback is refused, so "
                "that no web page reaches the gateway through a browser; elsewhere only if this is "
                "set."
            )
        ),
        TypeLabel("list of host names"),
    ] = ()
    expose_node: Annotated[
        bool | None,
        Field(
            description=(
                "Send the node's name in `X-Gateway-Node`. Unset: to local callers of a loopback "
                "listener only, and to nobody behind a proxy."
            )
        ),
        TypeLabel("true or false"),
    ] = None
    keep_alive: Annotated[
        Seconds, Field(description="An idle client connection is closed after this time.")
    ] = 75.0


KEY_ID = re.compile(r"[A-Za-z0-9.-]{1,64}")

SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def check_key_id(value: object) -> object:
    """The public id of a key. Raises: PydanticCustomError."""
    if isinstance(value, str) and not KEY_ID.fullmatch(value):
        raise validation_error(
            "must be 1 to 64 letters, digits, '.' or '-'", "the part between lg_ and _ of the key"
        )
    return value


def check_sha256(value: object) -> object:
    """The SHA-256 of a secret, in lower case. Raises: PydanticCustomError."""
    # Never shown: the key itself may have been pasted here.
    if isinstance(value, str):
        if not SHA256.fullmatch(value):
            raise validation_error(
                "must be 64 hexadecimal digits", "`llama-gateway keys hash` makes them"
            )
        return value.lower()
    return value


KeyHash = Annotated[
    str,
    BeforeValidator(check_sha256),
    Field(
        description="SHA-256 of the secret, as `llama-gateway keys hash` prints it.",
        json_schema_extra={"pattern": f"^{SHA256.pattern}$"},
        repr=False,
    ),
    TypeLabel("64 hex digits"),
]


class KeySpec(ConfigModel):
    """One API key: a public id and the SHA-256 of its secret."""

    id: Annotated[
        str,
        BeforeValidator(check_key_id),
        Field(
            description="Public part of the key `lg_<id>_<secret>`; unique.",
            json_schema_extra={"pattern": f"^{KEY_ID.pattern}$"},
        ),
        TypeLabel("text"),
    ]
    sha256: KeyHash
    name: Annotated[
        str,
        Field(description="Who uses it; shown in logs and metrics.", max_length=256),
        TypeLabel("text"),
    ] = ""
    class_: Annotated[
        PriorityName | None,
        Lowercased,
        Field(
            validation_alias="class",
            serialization_alias="class",
            description=(
                "Class of its requests that name none. Unset: `normal`, or `max_class` if that is "
                "lower."
            ),
        ),
    ] = None
    max_class: Annotated[
        PriorityName | None,
        Lowercased,
        Field(
            description=(
                "Highest class of its requests; higher ones are lowered. Unset: its `class`, else "
                "`normal`."
            )
        ),
    ] = None
    models: Annotated[
        tuple[NonEmptyText, ...] | None,
        BeforeValidator(as_list),
        Field(
            description=(
                'Public model names that it may use; `"*"` allows the names that the catch-all of '
                "`models` takes. Unset: all."
            )
        ),
        TypeLabel("list of names"),
    ] = None
    trust_user_headers: Annotated[
        bool,
        Field(
            description=(
                "Its holder, such as a chat's web interface, may name its end users in the headers "
                "of `identity.user_headers`."
            )
        ),
        TypeLabel("true or false"),
    ] = False
    group: Annotated[
        GroupName | None,
        Field(description="Group of keys that it belongs to; `groups` has the group's limits."),
    ] = None
    limits: Annotated[
        LimitSpec | None,
        Field(description="Limits of this key, beside those of its group and `limits.total`."),
    ] = None
    user_limits: Annotated[
        LimitSpec | None,
        Field(
            description=(
                "Limits of each end user that it names (`trust_user_headers`). Unset: its group's."
            )
        ),
    ] = None
    expires: Annotated[
        Timestamp | None,
        Field(description="Until when it works. Unset: until it is removed."),
    ] = None

    cache: Annotated[
        CacheSpec | None,
        Field(description="Prompt caches and privacy, where they differ from its group's."),
    ] = None

    @field_validator("max_class")
    @classmethod
    def _covers_the_class(
        cls, best: PriorityName | None, info: ValidationInfo
    ) -> PriorityName | None:
        usual = info.data.get("class_")
        if best is not None and usual is not None and _CLASSES.index(usual) < _CLASSES.index(best):
            raise validation_error(
                f"is below the key's class, {usual}",
                f"raise it to {usual}, or lower class to {best}",
            )
        return best


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#]+")

_HEADER = re.compile(r"\*|[!#$%&'+.^_`|~0-9A-Za-z-]+")


def _origin(value: object) -> object:
    if isinstance(value, str) and not _ORIGIN.fullmatch(value):
        raise validation_error(
            'must be an origin or "*"', "such as https://chat.example.org, without a path or slash"
        )
    return value


def _header(value: object) -> object:
    if isinstance(value, str) and not _HEADER.fullmatch(value):
        raise validation_error('must be the name of a header or "*"')
    return value


class CorsSpec(ConfigModel):
    """Which web pages may call the public listener from a browser."""

    origins: Annotated[
        tuple[Annotated[str, BeforeValidator(_origin)], ...],
        BeforeValidator(as_list),
        Field(description='Origins of the pages, or `"*"` for all.', min_length=1),
        TypeLabel("list of origins"),
    ]
    headers: Annotated[
        tuple[Annotated[str, BeforeValidator(_header)], ...],
        BeforeValidator(as_list),
        Field(description="Request headers that pages may send."),
        TypeLabel("list of header names"),
    ] = ("*",)
    max_age: Annotated[
        SecondsOrZero, Field(description="Time for which a browser may cache the permission.")
    ] = 600.0
    credentials: Annotated[
        bool,
        Field(description="Let browsers send cookies and certificates. Not together with `*`."),
        TypeLabel("true or false"),
    ] = False

    @field_validator("credentials")
    @classmethod
    def _not_for_every_page(cls, credentials: bool, info: ValidationInfo) -> bool:  # noqa: FBT001
        if credentials and "*" in info.data.get("origins", ()):
            raise validation_error('can\'t be true with the origin "*"', "name the origins")
        return credentials


class LimitSettings(ConfigModel):
    """Limits of requests, responses, connections and memory."""

    total: Annotated[
        LimitSpec | None,
        Field(description="Limits on the use by all callers together, those without a key too."),
    ] = None
    body_bytes: Annotated[
        ByteCount, Field(description="Largest request body; a larger one gets 413.")
    ] = 64 * MIB
    header_bytes: Annotated[
        ByteCount,
        Field(description="Largest head of a request; a larger one gets 431."),
    ] = 64 << 10
    buffered_bytes: Annotated[
        ByteCount,
        Field(
            description=(
                "Request bodies in memory at one time, all together; callers share it as they "
                "share the places of `queue.max`."
            )
        ),
    ] = 1024 * MIB
    header_timeout: Annotated[
        Seconds,
        Field(
            description="A request's head, and before it a TLS handshake, must be complete within "
            "this time."
        ),
    ] = 15.0
    body_timeout: Annotated[
        Seconds,
        Field(
            description="A body must be complete within this time, plus its bytes / `body_rate`."
        ),
    ] = 30.0
    body_rate: Annotated[
        ByteCount,
        Field(description="Bytes per second that a body beyond `body_timeout` must average."),
        TypeLabel("size", "bytes/s"),
    ] = 16384
    send_timeout: Annotated[
        Seconds,
        Field(
            description=(
                "A client that reads nothing of its response for this time is disconnected."
            )
        ),
    ] = 300.0
    connections: Annotated[
        Count,
        Field(
            description=(
                "Client connections at one time, and at most five eighths of the open files that "
                "the system allows. One address may hold seven eighths; for another's its idle "
                "ones are closed. `/health` and `/ready` are answered beyond. A change needs a "
                "restart."
            )
        ),
    ] = 10000
    n: Annotated[
        Count, Field(description="Largest `n` (choices of one request); above it, 400.")
    ] = 32
    prompts: Annotated[
        Count, Field(description="Most prompts of one completion request; above it, 400.")
    ] = 2048
    max_tokens: Annotated[
        Count | None,
        Field(
            description=(
                "Most tokens of one answer; a request for more is lowered to it. Unset: no bound."
            )
        ),
        TypeLabel("number", "tokens"),
    ] = None
    n_probs: Annotated[
        CountOrZero,
        Field(
            description=(
                "Largest `n_probs`, `top_logprobs` and numeric `logprobs`; higher ones are lowered."
            )
        ),
    ] = 64
    stop_bytes: Annotated[
        ByteCount,
        Field(
            description=(
                "Largest `stop` (or `stop_sequences`), all its strings together; above it, 400."
            )
        ),
    ] = 4096
    logit_bias_bytes: Annotated[
        ByteCount, Field(description="Largest `logit_bias` and `response_fields`; above it, 400.")
    ] = 64 << 10
    event_bytes: Annotated[
        ByteCount,
        Field(
            description=(
                "Largest single event in a node's stream, beside 32 bytes for each byte of the "
                "request's body and 1 KiB for each event before, up to `response_bytes`. Where a "
                "request asks for probabilities: `response_bytes`."
            )
        ),
    ] = MIB
    response_bytes: Annotated[
        ByteCount,
        Field(
            description=(
                "Largest response without streaming that is held back so that it can be retried."
            )
        ),
    ] = 64 * MIB
    resume_bytes: Annotated[
        ByteCount,
        Field(
            description=(
                "Text of one stream that is kept so that another node can resume it; a longer "
                "stream is not resumed."
            )
        ),
    ] = MIB
    json_depth: Annotated[
        Annotated[Count, Field(le=900)],
        Field(description="Deepest nesting of a request's JSON; above it, 400."),
        TypeLabel("number"),
    ] = 128
    grammar_bytes: Annotated[
        ByteCount,
        Field(
            description=(
                "Largest grammar (`grammar`), and largest schema that a node turns into one "
                "(`json_schema`, `response_format`, each of `tools`); above it, 400."
            )
        ),
    ] = 128 << 10
    grammar_depth: Annotated[
        Annotated[Count, Field(le=900)],
        Field(
            description=(
                "Deepest nesting of such a grammar's parentheses, or of such a schema's JSON; "
                "above it, 400."
            )
        ),
        TypeLabel("number"),
    ] = 64
    media_hosts: Annotated[
        tuple[Host, ...],
        BeforeValidator(as_list),
        Field(
            description=(
                "Hosts of remote image URLs that are forwarded. All others are refused, since the "
                "node would fetch them; `data:` URLs always pass."
            )
        ),
        TypeLabel("list of host names"),
    ] = ()
    json_containers: Annotated[
        Count,
        Field(
            description=(
                "Lists and objects in a request's JSON, counted in bodies over 64 KiB; above it, "
                "400."
            )
        ),
        TypeLabel("number"),
    ] = 100_000
    json_strings: Annotated[
        Count,
        Field(description="Strings in such JSON, names included; above it, 400."),
        TypeLabel("number"),
    ] = 500_000
    json_numbers: Annotated[
        Count,
        Field(
            description=(
                "Numbers (token ids, for example) and other plain values in such JSON; above it, "
                "400."
            )
        ),
        TypeLabel("number"),
    ] = 4_000_000
    json_fields: Annotated[
        Count,
        Field(description="Fields of such a body itself; above it, 400."),
        TypeLabel("number"),
    ] = 1000
    grammar_properties: Annotated[
        Count,
        Field(
            description=(
                "Optional properties of an object in such a schema; above it, 400, since a node's "
                "work grows with the cube of their number."
            )
        ),
        TypeLabel("number"),
    ] = 400
    grammar_optionals: Annotated[
        Count,
        Field(
            description=(
                "Optional items in a row of a grammar, or of a schema's `pattern`: `x?` is one, "
                "`x*` two, `x{m,n}` (n - m) ^ 0.3, repeats multiplied; 16 properties of an object "
                "that may be left out count as one. Above it, 400: 32 stop a node for half a "
                "second at the most, 1,000 for 20 s at each token."
            )
        ),
        TypeLabel("number"),
    ] = 32
    tools_bytes: Annotated[
        ByteCount, Field(description="All `tools` of a request together; above it, 400.")
    ] = MIB


RoleName = Literal["viewer", "operator", "admin"]

_RESERVED_ACTORS = frozenset({"local", "file", "signal", "gateway"})
"""Names in the audit log of those who act without a key."""


def _admin_key_id(value: object) -> object:
    if isinstance(value, str) and value.lower() in _RESERVED_ACTORS:
        raise validation_error(
            f"can't be {value!r}, which the audit log uses for actors without a key",
            "make a key with another id: `llama-gateway keys hash --id NAME`",
        )
    return check_key_id(value)


class AdminKeySpec(ConfigModel):
    """One key of the admin listener: a public id, the SHA-256 of its secret, and a role."""

    id: Annotated[
        str,
        BeforeValidator(_admin_key_id),
        Field(
            description="Public part of the key `lg_<id>_<secret>`; unique, and in the audit log.",
            json_schema_extra={"pattern": f"^{KEY_ID.pattern}$"},
        ),
        TypeLabel("text"),
    ]
    sha256: KeyHash
    role: Annotated[
        RoleName,
        Lowercased,
        Field(
            description=(
                "What its holder may do; each role includes the lower ones. `viewer`: status, "
                "nodes, metrics, dashboard. `operator`: requests, usage, chat, drain, resume, "
                "probe, cancel, reload. `admin`: keys, configuration, audit log."
            )
        ),
    ]


class AdminSettings(ConfigModel):
    """The admin listener: metrics, nodes, drain, reload. Only a change of its keys is live."""

    host: Annotated[
        Host,
        Field(
            description="Address to bind. Any but a loopback address needs `keys` or `key_file`."
        ),
    ] = "127.0.0.1"
    port: Annotated[Port, Field(description="Port to bind; 0 takes a free one.")] = 8001
    tls: Annotated[TlsFiles | None, Field(description="Serve https with this certificate.")] = None
    key_file: Annotated[
        ExistingFile | None,
        Field(
            description=(
                "File that holds an admin key (`Authorization: Bearer`) of the role `admin`."
            )
        ),
    ] = None
    keys: Annotated[
        tuple[AdminKeySpec, ...],
        Field(
            description=(
                "Admin keys with roles. Without any, and without `key_file`, no key is needed on a "
                "loopback address; but after a reload that removes the last one every request gets "
                "401, until there is a key or a restart."
            )
        ),
        TypeLabel("list"),
    ] = ()
    hosts: Annotated[
        tuple[Host, ...],
        BeforeValidator(as_list),
        Field(
            description=(
                "Further `Host` names that are accepted. Requests with another `Host` are refused, "
                "so that no web page reaches the listener through a browser."
            )
        ),
        TypeLabel("list of host names"),
    ] = ()

    @field_validator("keys")
    @classmethod
    def _ids_are_unique(cls, keys: tuple[AdminKeySpec, ...]) -> tuple[AdminKeySpec, ...]:
        seen: set[str] = set()
        for key in keys:
            if key.id in seen:
                raise validation_error(
                    f"two keys have the id {key.id}", "a key's id must be unique"
                )
            seen.add(key.id)
        return keys
