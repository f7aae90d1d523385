"""Settings of models, health checks, timeouts, retries and repairs."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from gateway.config.fields import (
    ConfigModel,
    Count,
    CountOrZero,
    Fraction,
    JsonMap,
    Listed,
    MemorySize,
    NonEmptyText,
    Seconds,
    SecondsOrZero,
    TypeLabel,
    as_list,
    at_least,
    validation_error,
)

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
    set: Annotated[JsonMap, BeforeValidator(_parameters), TypeLabel("mapping")] = Field(
        default_factory=dict
    )
    """Parameters that every request gets, instead of its own."""
    default: Annotated[JsonMap, BeforeValidator(_parameters), TypeLabel("mapping")] = Field(
        default_factory=dict
    )
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
