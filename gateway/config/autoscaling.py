"""Settings of autoscaling: when standby nodes are started and stopped, and the hooks for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator

from gateway.config.fields import (
    ConfigModel,
    Count,
    CountOrZero,
    EnvVarName,
    ExistingFile,
    NonEmptyText,
    PriorityName,
    Seconds,
    SecondsOrZero,
    TypeLabel,
    as_list,
    is_host,
    secret_from_file,
    secret_from_variable,
    validation_error,
)

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")

_LINE = re.compile(r"[\t\x20-\x7e]*")

CommandArgument = Annotated[str, Field(max_length=4096), TypeLabel("text")]


def _headers(value: object) -> object:
    for name in value if isinstance(value, Mapping) else ():
        if not isinstance(name, str) or not _HEADER.fullmatch(name):
            raise validation_error(
                "must be a mapping with names of headers", "such as Authorization"
            )
    return value


def _url(value: object) -> object:
    """Check the address of an HTTP call; no error shows it, since it may hold a secret."""
    if not isinstance(value, str):
        return value
    try:
        parts = urlsplit(value)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise validation_error(
            "is no valid URL", "such as https://cloud.example.org/start"
        ) from None
    sound = value.isascii() and value.isprintable() and " " not in value and len(value) <= 4096
    if not sound or parts.scheme not in {"http", "https"} or not is_host(host) or port == 0:
        raise validation_error(
            "must be an http or https URL with a host", "such as https://cloud/start"
        )
    if "@" in parts.netloc:
        raise validation_error("must not hold a user or a password", "see `headers_env`")
    return value


class Hook(ConfigModel):
    """Starts or stops a node: a command that exits with 0, or an HTTP call that gets a 2xx."""

    command: Annotated[
        tuple[CommandArgument, ...],
        BeforeValidator(as_list),
        Field(
            description=(
                "Program and arguments, run without a shell. `LLAMA_GATEWAY_NODE` and "
                "`LLAMA_GATEWAY_NODE_URL` are in its environment."
            ),
            max_length=256,
        ),
        TypeLabel("list of texts"),
    ] = ()
    method: Annotated[
        Literal["GET", "POST", "PUT", "PATCH", "DELETE"],
        Field(description="Method of the HTTP call."),
    ] = "POST"
    headers: Annotated[
        Mapping[str, NonEmptyText],
        BeforeValidator(_headers),
        Field(description="Headers of the HTTP call.", max_length=64),
        TypeLabel("mapping of texts"),
    ] = {}
    headers_env: Annotated[
        Mapping[str, EnvVarName],
        BeforeValidator(_headers),
        Field(
            description="Headers with a secret: the names of the variables that hold the values.",
            max_length=64,
        ),
        TypeLabel("mapping of names of variables"),
    ] = {}
    headers_file: Annotated[
        Mapping[str, ExistingFile],
        BeforeValidator(_headers),
        Field(description="Headers with a secret: the files that hold the values.", max_length=64),
        TypeLabel("mapping of paths"),
    ] = {}
    body: Annotated[
        Annotated[str, Field(max_length=65536)] | None,
        Field(description="Body of the HTTP call, sent as it stands."),
        TypeLabel("text"),
    ] = None
    url: Annotated[
        Annotated[str, BeforeValidator(_url)] | None,
        Field(description="Address of the HTTP call, instead of `command`.", validate_default=True),
        TypeLabel("URL"),
    ] = None
    # Resolved from the two mappings above; `exclude` keeps it out of the file's keys.
    secrets: Mapping[str, SecretStr] = Field(default={}, exclude=True, validate_default=True)

    @field_validator("headers")
    @classmethod
    def _one_line_each(cls, headers: Mapping[str, str]) -> Mapping[str, str]:
        for name, value in headers.items():
            if not _LINE.fullmatch(value):
                raise validation_error(f"the header {name} must be one line of ASCII characters")
        return headers

    @field_validator("url")
    @classmethod
    def _command_or_url(cls, url: str | None, info: ValidationInfo) -> str | None:
        command = info.data.get("command")
        if command is None:
            return url
        if url is not None and command:
            raise validation_error("can't stand beside `command`", "keep one of the two")
        if url is None and not (command and command[0]):
            raise validation_error(
                "the hook does nothing",
                "give `command` ([program, argument, ...]) or `url`",
                "command",
            )
        return url

    @field_validator("secrets", mode="before")
    @classmethod
    def _resolve_secrets(cls, secrets: object, info: ValidationInfo) -> object:
        env = (info.context or {}).get("env")
        if env is None:
            return secrets
        if secrets:
            raise validation_error("a secret must not stand in this file", "see `headers_env`")
        variables: Mapping[str, str] = info.data.get("headers_env") or {}
        files: Mapping[str, Path] = info.data.get("headers_file") or {}
        found = {
            name: secret_from_variable(variable, env, "headers_env")
            for name, variable in variables.items()
        }
        return found | {
            name: secret_from_file(path, "headers_file") for name, path in files.items()
        }


def command_as_hook(value: object) -> object:
    """Let a list stand for a hook with that command."""
    return {"command": value} if isinstance(value, list | tuple) else value


class ElasticSettings(ConfigModel):
    """When nodes with `standby: true`, `start` and `stop` are started and stopped."""

    start_above: Annotated[
        SecondsOrZero,
        Field(description="Another node is started when the predicted wait stays above this."),
    ] = 10.0
    start_after: Annotated[
        SecondsOrZero,
        Field(description="Time that it must stay above; counted again after each start."),
    ] = 5.0
    classes: Annotated[
        tuple[PriorityName, ...],
        BeforeValidator(as_list),
        Field(
            description=(
                "Classes whose wait counts. A model that only standby nodes serve is started for a "
                "request of any class."
            )
        ),
        TypeLabel("list"),
    ] = ("urgent", "premium", "normal")
    stop_after: Annotated[
        Seconds,
        Field(
            description=(
                "A started node is stopped when it has been idle for this time, or when the other "
                "nodes could have done its work all that time; it is drained first."
            )
        ),
    ] = 600.0
    min: Annotated[
        CountOrZero, Field(description="Least number of standby nodes that run, whatever the load.")
    ] = 0
    max: Annotated[
        Count | None,
        Field(description="Most standby nodes that run. Unset: all of them."),
    ] = None
    cooldown: Annotated[
        SecondsOrZero,
        Field(
            description=(
                "No node is stopped within this time after a start, and none is started within "
                "this time after its own stop."
            )
        ),
    ] = 60.0
    hook_timeout: Annotated[
        Seconds,
        Field(description=("Longest duration of a hook; then it is killed and counts as failed.")),
    ] = 60.0
    ready_timeout: Annotated[
        Seconds,
        Field(
            description=(
                "A started node that takes no work after this time is stopped again, and so is one "
                "that has been down for this time."
            )
        ),
    ] = 300.0
    backoff: Annotated[
        Seconds,
        Field(
            description=("Time until a failed start or stop is tried again; it doubles each time.")
        ),
    ] = 30.0
    backoff_max: Annotated[
        Seconds, Field(description="The longest such time.", validate_default=True)
    ] = 600.0

    @field_validator("max")
    @classmethod
    def _not_below_min(cls, most: int | None, info: ValidationInfo) -> int | None:
        if most is not None and most < info.data.get("min", 0):
            raise validation_error("must not be below `min`")
        return most

    @field_validator("backoff_max")
    @classmethod
    def _not_below_backoff(cls, longest: float, info: ValidationInfo) -> float:
        if longest < info.data.get("backoff", 0.0):
            raise validation_error("must not be below `backoff`")
        return longest
