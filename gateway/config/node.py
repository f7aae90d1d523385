"""One node, as `config/nodes.yaml` describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from gateway.config.fields import (
    ConfigModel,
    Count,
    EnvVarName,
    ExistingFile,
    Factor,
    Host,
    Money,
    NonEmptyText,
    Seconds,
    TypeLabel,
    as_list,
    bracketed_ipv6,
    is_host,
    secret_from_file,
    secret_from_variable,
    validation_error,
)
from gateway.config.scheduling import Hook, command_as_hook

Endpoint = Literal["chat", "embeddings", "rerank", "infill", "audio", "vision"]

STARTED_BY, UP = "started_by", "llama-gateway up"
"""The label, and its value, of the nodes whose servers `llama-gateway up` has started."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def _node_name(value: object) -> object:
    if isinstance(value, str) and (not _NAME.fullmatch(value) or value in {".", ".."}):
        raise validation_error(
            "must be 1 to 128 letters, digits, '.', '_' or '-'", "such as epyc-a-numa0"
        )
    return value


def _slots(value: object) -> object:
    if value == "auto":
        return None
    if isinstance(value, (bool, str)):
        raise validation_error('must be a number of slots or "auto"')
    return value


def _models(value: object) -> object:
    """Normalise the three forms of `model` to one: {public name: the node's name}."""
    match value:
        case str():
            return {value: value}
        case Mapping():
            models = dict(value)
        case list() | tuple() if all(isinstance(name, str) for name in value):
            models = {name: name for name in value}
        case _:
            raise validation_error(
                "must be a name, a list of names, or a mapping {public name: node's name}"
            )
    if not models:
        raise validation_error(
            "must name a model", "leave the key out to take the models that the server reports"
        )
    return models


class TokenCost(ConfigModel):
    """The price of a million tokens, in the settings' currency."""

    prompt: Money = 0.0
    """Price of a million prompt tokens."""
    completion: Money = 0.0
    """Price of a million generated tokens."""


class NodeTimeouts(ConfigModel):
    """A node's own timeouts; an unset key takes its value from `timeouts` in the settings."""

    connect: Seconds | None = None
    """Longest wait for a connection to be made."""
    first_byte: Seconds | None = None
    """Longest wait for the first event with content, before scaling."""
    silence: Seconds | None = None
    """Longest silence between two chunks of a response."""
    total: Seconds | None = None
    """Longest duration of a whole request."""


class NodeTls(ConfigModel):
    """How the gateway checks a node's certificate, and presents its own."""

    ca: ExistingFile | None = None
    """PEM file of the certificate authorities to trust, instead of the system's."""
    cert: ExistingFile | None = None
    """PEM file of the gateway's own certificate."""
    key: ExistingFile | None = None
    """PEM file of that certificate's key, if `cert` does not hold it."""
    verify: bool = True
    """`false` accepts any certificate. For a closed network only."""
    server_name: Host | None = None
    """Name expected in the certificate, if it is not the URL's host."""

    @field_validator("key")
    @classmethod
    def _key_has_a_certificate(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        if key is not None and info.data.get("cert", key) is None:
            raise validation_error("needs `cert`", "name the certificate that this key belongs to")
        return key


_EXAMPLE = "such as http://10.0.0.11:8080"

_PORT = re.compile(r":([0-9]{1,20})$")

_PATH = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")


def normalise_node_url(value: object) -> object:
    """Normalise a node's address: http or https, a host, perhaps a port and a path prefix.

    Scheme and host are lowercased, and the path loses its last slash. No error shows the address:
    it may hold a password.
    """
    if not isinstance(value, str):
        return value
    try:
        parts = urlsplit(value)
        host = parts.hostname or ""
    except ValueError:
        raise validation_error("is no valid URL", _EXAMPLE) from None
    if "@" not in parts.netloc and (bracketed := bracketed_ipv6(parts.netloc)):
        raise validation_error(
            "an IPv6 address needs brackets", f"write {parts.scheme}://{bracketed}{parts.path}"
        )
    try:
        port = parts.port
    except ValueError:
        shown = _PORT.search(parts.netloc)
        number = f" {shown[1]}" if shown else ""
        raise validation_error(
            f"has a wrong port{number}", f"a port is a number up to 65535, {_EXAMPLE}"
        ) from (None)
    if parts.scheme not in {"http", "https"} or not host:
        raise validation_error("must be an http or https URL with a host", _EXAMPLE)
    if "@" in parts.netloc:
        raise validation_error(
            "must not hold a user or a password",
            "name the node's key by api_key_env or api_key_file",
        )
    if "?" in value or "#" in value:
        raise validation_error(
            "must not have a query or a fragment", "leave out the part from the ? or # on"
        )
    if not is_host(host) or port == 0:
        raise validation_error("must name a valid host and port", _EXAMPLE)
    path = parts.path.rstrip("/")
    if not _PATH.fullmatch(path):
        raise validation_error(
            "has characters in its path that a URL can't have", "percent-encode them"
        )
    if path.endswith("/v1"):
        raise validation_error("must not end in /v1", "leave /v1 out; the gateway adds it")
    bracketed = f"[{host}]" if ":" in host else host
    netloc = bracketed if port is None else f"{bracketed}:{port}"
    return f"{parts.scheme}://{netloc}{path}"


class NodeSpec(ConfigModel):
    """One node: a llama.cpp server, or another OpenAI-compatible endpoint."""

    misplaced_keys: ClassVar[Mapping[str, str]] = {
        "port": "it is part of the url: http://10.0.0.11:8080",
        **dict.fromkeys(
            ("address", "server", "api_base", "base_url", "apiBase", "baseUrl", "proxy"),
            "it is called url: http://10.0.0.11:8080, without /v1",
        ),
        "api_key": "name its variable in api_key_env, or its file in api_key_file",
        "weight": (
            "there are no weights: speeds are measured, and speed_hint is the first guess (2: "
            "twice as fast as the others)"
        ),
        "priority": (
            "nodes have none: each request goes where it is expected to end first. A node for "
            "what the others can't do in time is `tier: gpu`; requests have classes"
        ),
        "backup": (
            "a reserve is `tier: gpu`, which gets what the others can't do in time, or "
            "`standby: true` with `start` and `stop`, which is started for that"
        ),
        **dict.fromkeys(
            (
                "max_conns", "maxconn", "max_connections", "max_parallel_requests", "parallel",
                "n_parallel", "concurrency", "concurrencyLimit",
            ),
            "it is called slots, and learnt from llama.cpp",
        ),
        **dict.fromkeys(
            ("max_fails", "fail_timeout", "health_check", "healthcheck", "check_interval"),
            "it is of all nodes: health, in the settings",
        ),
        **dict.fromkeys(("ctx_size", "n_ctx", "context_length"), "it is called context"),
        **dict.fromkeys(("model_name", "model_id"), "it is called model"),
        **dict.fromkeys(
            ("timeout", "request_timeout"),
            "it is one of timeouts: {connect, first_byte, silence, total}",
        ),
    }  # fmt: skip

    name: Annotated[
        str,
        BeforeValidator(_node_name),
        Field(examples=["epyc-a"], json_schema_extra={"pattern": f"^{_NAME.pattern}$"}),
        TypeLabel("text"),
    ]
    """Unique name: letters, digits, `.`, `_`, `-`."""
    url: Annotated[
        str,
        BeforeValidator(normalise_node_url),
        Field(
            examples=["http://10.0.0.11:8080"],
            json_schema_extra={"pattern": r"^(https?://|.*\$\{)"},
        ),
        TypeLabel("URL"),
    ]
    """Address without `/v1`; a path prefix is kept."""
    kind: Literal["llama.cpp", "openai"] = "llama.cpp"
    """`llama.cpp`, or `openai` for any other OpenAI-compatible endpoint."""
    tier: Literal["cpu", "gpu"] = "cpu"
    """The processor that the node computes on."""
    slots: Annotated[
        Annotated[int, Field(ge=1, le=65536)] | None,
        BeforeValidator(_slots),
        WithJsonSchema(
            {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65536}, {"const": "auto"}]}
        ),
        TypeLabel("number or `auto`"),
    ] = None
    """Requests that it works on at once. `auto`: as many as the server reports."""
    models: Annotated[
        Mapping[NonEmptyText, NonEmptyText] | None,
        BeforeValidator(_models),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {
                        "type": "object",
                        "additionalProperties": {"type": "string"},
                        "minProperties": 1,
                    },
                ]
            }
        ),
        Field(validation_alias="model"),
        TypeLabel("text, list or mapping"),
    ] = None
    """The models that it serves: a name, a list, or a mapping `{public name: node's name}`. Unset:
    those that the server reports."""
    endpoints: Annotated[
        frozenset[Endpoint] | None, BeforeValidator(as_list), TypeLabel("list")
    ] = None
    """The APIs that it serves: `chat`, `embeddings`, `rerank`, `infill`, `audio`, `vision`. Unset:
    all that the node does not refuse with 501; but a server for embeddings or reranking gets chats
    only where no node of its model is for them."""
    context: Annotated[Count | None, TypeLabel("number", "tokens")] = None
    """Tokens of one slot. Unset: as the server reports."""
    kv: Literal["auto", "shared", "split"] = "auto"
    """`shared`: all its slots share one pool of `context` tokens, as those of a server that was
    started without `-np`; `split`: each slot has its own. `auto`: learnt from the error of a full
    pool."""
    host: Annotated[Host, Field(validate_default=True), TypeLabel("text")] = ""
    """Failure domain: nodes that fail together share it, and a retry prefers another. Unset: the
    URL's host."""
    cost_per_hour: Money = 0.0
    """Cost of an hour, in the settings' currency."""
    cost_per_million_tokens: TokenCost | None = None
    """Cost of its tokens, instead of `cost_per_hour`."""
    speed_hint: Factor = 1.0
    """Assumed speed relative to that of similar nodes, until it is measured. Where it is not
    written: that of the best of them."""
    calibrate: bool = True
    """`false`: no tiny requests that measure its speed while it is idle and unmeasured."""
    api_key_env: EnvVarName | None = None
    """Name of the environment variable that holds the node's key."""
    api_key_file: ExistingFile | None = None
    """File that holds the node's key, instead of `api_key_env`."""
    # Resolved from the two keys above; `exclude` keeps it out of the file's keys.
    api_key: SecretStr | None = Field(default=None, exclude=True, validate_default=True)
    timeouts: NodeTimeouts = NodeTimeouts()
    """This node's own timeouts, instead of the settings' `timeouts`."""
    tls: NodeTls | None = None
    """For an https node."""
    enabled: bool = True
    """`false`: it stays in the file and gets no requests."""
    standby: bool = False
    """`true`: it gets no requests until its `start` hook has been run on demand; without hooks it
    never does."""
    start: Annotated[
        Hook | None, BeforeValidator(command_as_hook), TypeLabel("list or mapping")
    ] = None
    """Starts a standby node: a list (program, arguments), or the mapping below. Needs `stop` and
    `model`."""
    stop: Annotated[
        Hook | None,
        BeforeValidator(command_as_hook),
        Field(validate_default=True),
        TypeLabel("list or mapping"),
    ] = None
    """Stops it; written as `start` is."""
    labels: Annotated[
        Mapping[NonEmptyText, str], Field(max_length=64), TypeLabel("mapping of texts")
    ] = {}
    """Free text about it, such as `{numa: "0"}`."""

    @field_validator("host", mode="before")
    @classmethod
    def _host_of_the_url(cls, host: object, info: ValidationInfo) -> object:
        return host or url_host(info.data.get("url", "http://unknown"))

    @field_validator("stop")
    @classmethod
    def _can_be_started_on_demand(cls, stop: Hook | None, info: ValidationInfo) -> Hook | None:
        if "start" not in info.data:
            return stop
        if info.data["start"] is None:
            if stop is not None:
                raise validation_error("is missing", "a node with `stop` needs it", "start")
            return None
        if stop is None:
            raise validation_error(
                "is missing", "a node that the gateway starts must be stopped, too"
            )
        if "models" in info.data and info.data["models"] is None:
            raise validation_error(
                "is missing",
                "name what it serves: it can't be asked while it is stopped",
                "model",
            )
        return stop

    @property
    def written_hint(self) -> float | None:
        """Its `speed_hint`; None: the file has none."""
        return self.speed_hint if "speed_hint" in self.model_fields_set else None

    @property
    def autoscaled(self) -> bool:
        """Whether the gateway starts and stops the node."""
        return self.standby and self.start is not None and self.stop is not None

    @field_validator("cost_per_million_tokens")
    @classmethod
    def _one_price(cls, cost: TokenCost | None, info: ValidationInfo) -> TokenCost | None:
        if cost is not None and info.data.get("cost_per_hour"):
            raise validation_error(
                "can't stand beside cost_per_hour", "a node is paid by the hour or by the token"
            )
        return cost

    @field_validator("api_key_file")
    @classmethod
    def _one_key(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and info.data.get("api_key_env"):
            raise validation_error("can't stand beside api_key_env", "keep one of the two")
        return path

    @field_validator("api_key", mode="before")
    @classmethod
    def _resolve_the_key(cls, key: object, info: ValidationInfo) -> object:
        env = (info.context or {}).get("env")
        if env is None:
            return key
        if key is not None:
            raise validation_error(
                "a key must not stand in this file", "name it by api_key_env or api_key_file"
            )
        if variable := info.data.get("api_key_env"):
            return secret_from_variable(variable, env)
        if path := info.data.get("api_key_file"):
            return secret_from_file(path)
        return None


def url_host(url: str) -> str:
    """Return the host of an address from `normalise_node_url`."""
    return urlsplit(url).hostname or ""
