"""Settings of scheduling: classes, tiers, when nodes are started and stopped, and models loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator

from gateway.config.fields import (
    ConfigModel,
    Count,
    CountOrZero,
    EnvVarName,
    ExistingFile,
    Fraction,
    Listed,
    Money,
    NonEmptyText,
    PriorityName,
    Seconds,
    SecondsOrZero,
    TypeLabel,
    at_least,
    is_host,
    secret_from_file,
    secret_from_variable,
    validation_error,
)

DEFAULT_PATIENCE = {"urgent": 10.0, "premium": 30.0, "normal": 60.0, "batch": 600.0}
"""Seconds of waiting after which a request of a class is overdue; `classes` overrides them."""

DEFAULT_QUEUE_SHARE = {"urgent": 1.0, "premium": 1.0, "normal": 0.9, "batch": 0.5}
"""Share of the queue that a class may fill; `classes` overrides it."""

DEFAULT_SLOTLESS = 4
"""Requests without a slot that a node gets at once. llama.cpp's server has four HTTP threads more
than slots, and each such request keeps one busy."""


PriorityNames = Annotated[Listed[PriorityName], TypeLabel("list")]


class ClassRule(ConfigModel):
    """Rules for one class of requests."""

    max_wait: Seconds | None = None
    """Longest wait in the queue, instead of `queue.max_wait`."""
    patience: SecondsOrZero | None = None
    """A request that has waited longer is overdue: of ten slots that come free, one goes to the
    oldest overdue request of any class. Unset: 10 s for `urgent`, 30 s for `premium`, 60 s for
    `normal`, 10 min for `batch`."""
    reserve_slots: Fraction | None = None
    """Share of the slots of nodes that serve the same models, rounded down, that this class leaves
    free for the other classes: whole nodes where it has as many slots. For `batch` only. Unset:
    none."""
    queue_share: Fraction | None = None
    """The class is admitted while the queue is filled less than this, by count and by predicted
    wait. Unset: 1 for `urgent` and `premium`, 0.9 for `normal`, 0.5 for `batch`."""


class QueueSettings(ConfigModel):
    """Requests that wait for a slot."""

    max: CountOrZero = 256
    """Requests that may wait; the next gets 429 `queue_full`. One key or address may hold seven
    eighths of the places; for another caller's request its newest ones give way."""
    max_wait: Seconds = 300.0
    """Longest wait; then 503 `queue_timeout`. A request whose predicted wait is longer gets it at
    once."""
    reopen: Fraction = 0.8
    """A class that was refused for its predicted wait is admitted again when that wait has fallen
    to this share of its limit."""
    latest_wins: bool = True
    """An editor's completion (`/infill`, or one with a `suffix`) ends the earlier one of its
    session with 409 `superseded`."""
    slotless: Count = DEFAULT_SLOTLESS
    """Requests without a slot (tokenizing, templates, counting) that one node gets at once, half as
    many from one caller; the others queue as for a slot."""


class SpillSettings(ConfigModel):
    """Requests that go to a GPU node only because they would wait too long for a CPU node.

    It needs a budget: `share`, `money_per_hour`, or both, and then both hold.
    """

    after: SecondsOrZero = 10.0
    """Requests spill over when the predicted wait for a CPU node is longer than this."""
    classes: PriorityNames = ("normal",)
    """Classes that spill over. `batch` does only if it is named here."""
    share: Fraction | None = None
    """At most this share of these classes' requests within `window`."""
    money_per_hour: Money | None = None
    """At most this much an hour, in the currency of the nodes' costs, counted over `window`: 2 with
    a window of 30m is 1 in any 30 minutes."""
    window: Annotated[Seconds, Field(validate_default=True)] = 3600.0
    """Time over which the budget is counted."""

    @field_validator("window")
    @classmethod
    def _has_a_budget(cls, window: float, info: ValidationInfo) -> float:
        named = {"share", "money_per_hour"} & info.data.keys()
        if len(named) == 2 and all(info.data[name] is None for name in named):
            raise validation_error(
                "the spill-over has no budget",
                "set `share` (1 for no bound) or `money_per_hour`",
                key="share",
            )
        return window


class HybridSettings(ConfigModel):
    """How nodes of `tier: gpu` and of `tier: cpu` share the work.

    Other classes use GPU nodes only to spill over, or for a model that no CPU node serves.
    """

    gpu_first: PriorityNames = ("urgent", "premium")
    """Classes that go to a GPU node while one has room, else to a CPU node."""
    wait: SecondsOrZero = 2.0
    """Time that these classes wait for a full GPU node, where it is predicted to finish sooner than
    a CPU node."""
    spill: SpillSettings | None = None
    """Spill-over to GPU nodes; unset: none."""

    @field_validator("spill")
    @classmethod
    def _spills_what_does_not_go_first(
        cls, spill: SpillSettings | None, info: ValidationInfo
    ) -> SpillSettings | None:
        both = set(spill.classes if spill else ()) & set(info.data.get("gpu_first", ()))
        if both:
            raise validation_error(
                f"{', '.join(sorted(both))} can't spill over, since it goes to the GPU first",
                "name it in `gpu_first` or in `spill.classes`",
            )
        return spill


HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")

_LINE = re.compile(r"[\t\x20-\x7e]*")

CommandArgument = Annotated[str, Field(max_length=4096), TypeLabel("text")]


def _headers(value: object) -> object:
    for name in value if isinstance(value, Mapping) else ():
        if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
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
        Listed[CommandArgument], Field(max_length=256), TypeLabel("list of texts")
    ] = ()
    """Program and arguments, run without a shell. `LLAMA_GATEWAY_NODE` and `LLAMA_GATEWAY_NODE_URL`
    are in its environment."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """Method of the HTTP call."""
    headers: Annotated[
        Mapping[str, NonEmptyText],
        BeforeValidator(_headers),
        Field(max_length=64),
        TypeLabel("mapping of texts"),
    ] = {}
    """Headers of the HTTP call."""
    headers_env: Annotated[
        Mapping[str, EnvVarName],
        BeforeValidator(_headers),
        Field(max_length=64),
        TypeLabel("mapping of names of variables"),
    ] = {}
    """Headers with a secret: the names of the variables that hold the values."""
    headers_file: Annotated[
        Mapping[str, ExistingFile],
        BeforeValidator(_headers),
        Field(max_length=64),
        TypeLabel("mapping of paths"),
    ] = {}
    """Headers with a secret: the files that hold the values."""
    body: Annotated[Annotated[str, Field(max_length=65536)] | None, TypeLabel("text")] = None
    """Body of the HTTP call, sent as it stands."""
    url: Annotated[
        Annotated[str, BeforeValidator(_url)] | None, Field(validate_default=True), TypeLabel("URL")
    ] = None
    """Address of the HTTP call, instead of `command`."""
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
        found = {}
        for name, variable in (info.data.get("headers_env") or {}).items():
            found[name] = secret_from_variable(variable, env, "headers_env")
        for name, path in (info.data.get("headers_file") or {}).items():
            found[name] = secret_from_file(path, "headers_file")
        return found


def command_as_hook(value: object) -> object:
    """Let a list stand for a hook with that command."""
    return {"command": value} if isinstance(value, list | tuple) else value


class ElasticSettings(ConfigModel):
    """When nodes with `standby: true`, `start` and `stop` are started and stopped."""

    start_above: SecondsOrZero = 10.0
    """Another node is started when the predicted wait stays above this."""
    start_after: SecondsOrZero = 5.0
    """Time that it must stay above; counted again after each start."""
    classes: PriorityNames = ("urgent", "premium", "normal")
    """Classes whose wait counts. A model that only standby nodes serve is started for a request of
    any class."""
    stop_after: Seconds = 600.0
    """A started node is stopped when it has been idle for this time, or when the other nodes could
    have done its work all that time; it is drained first."""
    min: CountOrZero = 0
    """Least number of standby nodes that run, whatever the load."""
    max: Annotated[Count, at_least("min")] | None = None
    """Most standby nodes that run. Unset: all of them."""
    cooldown: SecondsOrZero = 60.0
    """No node is stopped within this time after a start, and none is started within this time after
    its own stop."""
    hook_timeout: Seconds = 60.0
    """Longest duration of a hook; then it is killed and counts as failed."""
    ready_timeout: Seconds = 300.0
    """A started node that takes no work after this time is stopped again, and so is one that has
    been down for this time."""
    backoff: Seconds = 30.0
    """Time until a failed start or stop is tried again; it doubles each time."""
    backoff_max: Annotated[Seconds, at_least("backoff"), Field(validate_default=True)] = 600.0
    """The longest such time."""


class ModelPlacementSettings(ConfigModel):
    """Which nodes hold which models, of those that load models on demand.

    It concerns llama.cpp's servers in router mode, and nodes with `models_on_demand: true`.
    """

    starvation: Seconds = 60.0
    """A model keeps its place while its queue is worth more than another's, until requests of class
    `normal` have waited so long for the other; those of other classes in proportion to their
    `patience`. Where both have waited so long, those are served first that waited when the
    model was loaded, for twenty loads at most."""
    hysteresis: SecondsOrZero = 10.0
    """A model stays loaded for this time, whoever has loaded it. What others unload is not loaded
    again there for so long."""
    commands: bool = True
    """`false`: no llama.cpp server is told to load or unload a model; requests go to what is loaded
    there."""
