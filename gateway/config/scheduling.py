"""Settings of where and when requests are served.

Models, health checks, timeouts, retries and repairs; classes, tiers, when nodes are started and
stopped, and models loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator

from gateway.config.fields import (
    ConfigModel,
    Count,
    CountOrZero,
    EnvVarName,
    ExistingFile,
    Fraction,
    JsonMap,
    Listed,
    MemorySize,
    Money,
    NonEmptyText,
    PriorityName,
    Seconds,
    SecondsOrZero,
    TypeLabel,
    as_list,
    at_least,
    is_host,
    secret_from_file,
    secret_from_variable,
    validation_error,
)

T = TypeVar("T")

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


_Headers = Annotated[Mapping[str, T], BeforeValidator(_headers), Field(max_length=64)]


class Hook(ConfigModel):
    """Starts or stops a node: a command that exits with 0, or an HTTP call that gets a 2xx."""

    command: Annotated[
        Listed[CommandArgument], Field(max_length=256), TypeLabel("list of texts")
    ] = ()
    """Program and arguments, run without a shell. `LLAMA_GATEWAY_NODE` and `LLAMA_GATEWAY_NODE_URL`
    are in its environment."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """Method of the HTTP call."""
    headers: Annotated[_Headers[NonEmptyText], TypeLabel("mapping of texts")] = Field(default={})
    """Headers of the HTTP call."""
    headers_env: Annotated[_Headers[EnvVarName], TypeLabel("mapping of names of variables")] = (
        Field(default={})
    )
    """Headers with a secret: the names of the variables that hold the values."""
    headers_file: Annotated[_Headers[ExistingFile], TypeLabel("mapping of paths")] = Field(
        default={}
    )
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


# The request itself, not its parameters: a rule that changed these would make another request.
_NOT_PARAMETERS = frozenset({"model", "messages", "prompt", "input", "stream"})


def _parameters(value: object) -> object:
    if isinstance(value, (Mapping, list, tuple)):
        for name in value:
            if isinstance(name, str) and name in _NOT_PARAMETERS:
                raise validation_error(
                    f"can't hold {name}", "a rule is for parameters such as temperature"
                )
    return value


_Parameters = Annotated[JsonMap, BeforeValidator(_parameters), TypeLabel("mapping")]


class ReplicaSettings(ConfigModel):
    """How many nodes hold a model at a time, of those that load models on demand."""

    min: CountOrZero = 0
    """Nodes that hold it whether it is asked for or not."""
    max: Annotated[Count, at_least("min")] | None = None
    """Most nodes that hold it. Unset: as many as its queue is worth."""


NameList = Annotated[Listed[NonEmptyText], TypeLabel("list of names")]


class ModelRule(ConfigModel):
    """The models that a public name stands for, changes to requests for it, and where it is loaded.

    The last four keys are for nodes that load models on demand (docs/models.md).
    """

    misplaced_keys: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("ttl", "keep_alive", "idle_timeout", "sleep_idle_seconds"),
            "it is called idle_unload: 30m; without it a model stays until its memory is needed",
        ),
        "preload": "it is a key of nodes in the inventory; here it is pin: [names of nodes]",
    }

    use: Annotated[Listed[NonEmptyText], TypeLabel("name or list")] = ()
    """A model, or a list of which the first that can serve is taken. Unset: the name itself."""
    set: _Parameters = Field(default_factory=dict)
    """Parameters that every request gets, instead of its own."""
    default: _Parameters = Field(default_factory=dict)
    """Parameters that a request gets unless it has them."""
    max_tokens: Annotated[Count | None, TypeLabel("number", "tokens")] = None
    """Tokens one answer may have; a request for more is lowered."""
    strip: Annotated[
        tuple[NonEmptyText, ...],
        BeforeValidator(_parameters),
        BeforeValidator(as_list),
        TypeLabel("list of names"),
    ] = ()
    """Parameters that are removed from every request."""
    replicas: ReplicaSettings = ReplicaSettings()
    """How many nodes hold it."""
    pin: NameList = ()
    """Names of nodes that always hold it; each counts as one of `replicas`."""
    idle_unload: Seconds | None = None
    """It is unloaded after so long without a request, where no pin and no `replicas.min` keeps it.
    Unset: it stays until another model needs the memory."""
    memory: MemorySize | None = None
    """What a node needs to hold it: weights, context and buffers, as `llama-gateway fit` tells.
    Unset: learnt after its first load."""

    @property
    def is_placed(self) -> bool:
        """Whether the rule says where, or for how long, the model is loaded."""
        keys = {"replicas", "pin", "idle_unload", "memory"}
        return bool(keys & self.model_fields_set)


CATCH_ALL = "*"
"""The public name that stands for every unknown name."""


def check_catch_all(rules: Mapping[str, ModelRule]) -> None:
    """Check that the catch-all names a model, and that no rule uses it.

    Raises PydanticCustomError.
    """
    rule = rules.get(CATCH_ALL)
    if rule is not None and not rule.use:
        raise validation_error(
            '"*" names no model', 'write "*": {use: NAME}, with a model that a node serves'
        )
    for name, one in rules.items():
        if CATCH_ALL in one.use:
            raise validation_error(f'{name} uses "*", which is no model', "name the models instead")
        if one.is_placed and (name == CATCH_ALL or (one.use and name not in one.use)):
            raise validation_error(
                f"{name} is no model that a node loads, but stands for {', '.join(one.use)}",
                "write its replicas, pin, idle_unload and memory under that name",
            )


def find_alias_loop(rules: Mapping[str, ModelRule]) -> list[str]:
    """Find names whose `use` leads back to them, in the order of the loop; empty if none.

    A name that uses itself is no loop: it means the nodes' model of that name.
    """
    graph = TopologicalSorter[str](dict.fromkeys(rules, ()))
    for name, rule in rules.items():
        for used in rule.use:
            if used != name:
                graph.add(used, name)
    try:
        graph.prepare()
    except CycleError as error:
        loop: list[str] = error.args[1]
        return loop
    return []


class HealthSettings(ConfigModel):
    """Probes of the nodes, and each node's circuit breaker."""

    interval: Seconds = 5.0
    """Time between two probes of a node."""
    timeout: Seconds = 2.0
    """Longest wait for a probe's answer."""
    rise: Count = 1
    """Good probes until a node counts as up."""
    fall: Count = 3
    """Failed probes until a node counts as down."""
    discover_interval: Seconds = 30.0
    """Time between two queries of a node's slots, models and context. They are asked earlier if a
    probe finds another answer to `/props`."""
    prefill_grace: Seconds = 60.0
    """A node that reads a prompt may leave probes unanswered for this time, or for 4 times the
    prompt's expected prefill if that is longer (state `mute`, not `down`)."""
    failures: Count = 5
    """Failed requests in a row that open a node's circuit."""
    open: Seconds = 30.0
    """An open circuit lets one trial through after this time; then it doubles."""
    open_max: Annotated[Seconds, at_least("open"), Field(validate_default=True)] = 300.0
    """Longest time a circuit stays open."""
    slow_start: SecondsOrZero = 30.0
    """Time after which a recovered node gets its full share."""


class TimeoutSettings(ConfigModel):
    """Limits of one request to a node. A node's own `timeouts` in the inventory come first."""

    connect: Seconds = 3.0
    """Longest wait for a connection to be made."""
    first_byte: Seconds = 60.0
    """Longest wait for the first event with content. Grows with the prompt's length and the node's
    measured speed."""
    silence: Seconds = 60.0
    """Longest silence between two chunks of a response. Suspended while the node reads another
    prompt."""
    total: Seconds = 3600.0
    """Longest duration of a whole request."""


class RetrySettings(ConfigModel):
    """Retries on another node, before the first byte has gone to the client."""

    attempts: Annotated[Annotated[Count, Field(le=100)], TypeLabel("number")] = 3
    """Attempts in all; 1 never retries."""
    backoff: SecondsOrZero = 0.05
    """Wait before the first retry; doubles, with jitter."""
    backoff_max: Annotated[SecondsOrZero, at_least("backoff"), Field(validate_default=True)] = 2.0
    """Longest wait before a retry."""
    budget: Fraction = 0.2
    """Retries allowed, as a share of the last minute's requests. Each further resumption of a
    stream counts as one; the first is always allowed."""
    budget_min: CountOrZero = 10
    """Retries a minute that are always allowed (the slots of the largest host are allowed too, if
    they are more)."""
    quarantine: SecondsOrZero = 600.0
    """A request during which two nodes died is refused for this time; 0: never. The quarantine ends
    when a node answers it."""
    wait_for_node: SecondsOrZero = 30.0
    """When no node is available, wait this long for one; then 503 `no_node`."""


class RepairSettings(ConfigModel):
    """Repairs of what llama.cpp's server leaves out or ignores, and official clients rely on.

    They concern nodes that are llama.cpp servers only, and requests that begin after a change.
    """

    stream_events: bool = True
    """Number the events of `/v1/responses` streams, and complete their first ones: the AI SDK and
    `openai` stop at them otherwise."""
    text_format: bool = True
    """Make nodes obey `text.format` on `/v1/responses`."""
    input_items: bool = True
    """Give nodes `/v1/responses` with items that they refuse in a form that they take: the
    assistant's without `type`, reasoning with a summary alone, calls of custom tools, and `tools:
    null`."""
    output_config: bool = True
    """Make nodes obey `output_config.format` on `/v1/messages`, by asking them for a chat."""
    stop_reason: bool = True
    """Tell by `stop_reason` on `/v1/messages` that a stop sequence was met, and by `status` on
    `/v1/responses` that the response was cut off."""
