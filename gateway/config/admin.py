"""Settings of the admin listener: its address, certificate, keys and their roles."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from gateway.config.fields import (
    ConfigModel,
    ExistingFile,
    Host,
    Lowercased,
    Port,
    TypeLabel,
    as_list,
    validation_error,
)
from gateway.config.listeners import KEY_ID, KeyHash, TlsFiles, check_key_id

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
