"""API keys, and what they, their groups and all callers may use and learn."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from gateway.config.fields import (
    ConfigModel,
    Count,
    Lowercased,
    LowercasedOrOff,
    NonEmptyText,
    PriorityName,
    Timestamp,
    TypeLabel,
    as_list,
    matching,
    validation_error,
)

NodeLabels = tuple[tuple[str, str], ...]
"""Labels that a node must have, sorted by name; empty: any node."""


def has_labels(labels: Mapping[str, str], wanted: NodeLabels) -> bool:
    """Whether a node with these `labels` has all that are wanted."""
    return all(labels.get(name) == value for name, value in wanted)


class CacheSpec(ConfigModel):
    """Prompt caches and privacy. A key's own entry counts, else its group's, else the top level's.

    Each says what that caller may learn of others. To keep a caller's own prompts from the rest,
    it must hold for the rest: at the top level.
    """

    hide: bool | None = None
    """Take the figures that tell what was cached out of responses: `cached_tokens` and its kin,
    `timings` of the prompt, progress of the prefill, `id_slot`. Unset: no."""
    isolate: Annotated[Literal["group", "key", "off"] | None, LowercasedOrOff] = None
    """Whose prompts may draw a request to the node that has them cached: those of its `group`
    (without one, of its key), of its `key` (without one, of its address), or everybody's (`off`).
    Unset: `off`."""
    nodes: Annotated[
        Mapping[NonEmptyText, str] | None, Field(max_length=64), TypeLabel("mapping of texts")
    ] = None
    """Labels of the nodes that it may use, such as `{tenant: a}`: nodes with all of them, and no
    other. `{}`: all nodes. Unset: all nodes."""
    prompt_cache: bool | None = None
    """`false`: llama.cpp's server reads each prompt anew (`cache_prompt: false`), which costs its
    whole prefill. Unset: what the client asks for."""


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """What holds for the requests of one caller."""

    hide: bool = False
    """Whether responses must not tell what was cached."""
    scope: str = ""
    """Names those whose prompts may draw its requests to a node; empty: everybody's may."""
    node_labels: NodeLabels = ()
    """Labels of the nodes that it may use."""
    prompt_cache: bool = True
    """Whether nodes may serve its prompts from their caches."""

    def scope_of(self, request_id: str) -> str:
        """The scope of one request: its own, if no node may serve its prompt from a cache."""
        return self.scope if self.prompt_cache else f"request {request_id}"


SHARED_CACHE = CachePolicy()
"""Nothing is hidden, and all share all."""


_CACHE_DEFAULTS: dict[str, Any] = {
    "hide": False, "isolate": "off", "nodes": {}, "prompt_cache": True,
}  # fmt: skip


def cache_policy(specs: Iterable[CacheSpec | None], caller: str, group: str | None) -> CachePolicy:
    """The policy of a caller by `specs`, the most specific first; each field counts by itself.

    `caller`: its id; `group`: the name of its group.
    """
    given = [spec for spec in specs if spec is not None]
    said = {
        name: next((value for one in given if (value := getattr(one, name)) is not None), default)
        for name, default in _CACHE_DEFAULTS.items()
    }
    scope = "" if said["isolate"] == "off" else f"caller {caller}"
    if said["isolate"] == "group" and group is not None:
        scope = f"group {group}"
    labels = tuple(sorted(said["nodes"].items()))
    found = CachePolicy(said["hide"], scope, labels, said["prompt_cache"])
    return SHARED_CACHE if found == SHARED_CACHE else found


BudgetPeriod = Literal["day", "month"]

LARGEST_BUDGET = 1e9

LEAST_BUDGET = 1e-9


class Budget(NamedTuple):
    """Money for each day or month, by UTC."""

    amount: float
    period: BudgetPeriod


_BUDGET = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*/\s*(day|month)")

_LONGEST_BUDGET = 40


def parse_budget(text: str) -> Budget:
    """The budget that a text such as `20/month` or `0.5/day` means. Raises: ValueError."""
    found = _BUDGET.fullmatch(text.strip().lower()) if len(text) <= _LONGEST_BUDGET else None
    if found is None:
        raise ValueError('must be an amount a day or a month, such as "20/month" or "0.5/day"')
    amount = float(found[1])
    if not LEAST_BUDGET <= amount <= LARGEST_BUDGET:
        raise ValueError(f"the amount must be above 0 and at most {LARGEST_BUDGET:.0f}")
    return Budget(amount, "day" if found[2] == "day" else "month")


def _budget(value: object) -> object:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        raise validation_error("says no period", f'write "{value:g}/month" or "{value:g}/day"')
    if not isinstance(value, str):
        return value
    try:
        amount, period = parse_budget(value)
    except ValueError as error:
        raise validation_error(str(error)) from None
    # Without an exponent, since it is read again.
    return f"{f'{amount:.9f}'.rstrip('0').rstrip('.')}/{period}"


GROUP_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


GroupName = Annotated[
    str,
    matching(GROUP_NAME.fullmatch, "must be 1 to 64 letters, digits, '.', '_' or '-'"),
    Field(json_schema_extra={"pattern": f"^{GROUP_NAME.pattern}$"}),
    TypeLabel("name"),
]


ModelNames = Annotated[
    tuple[NonEmptyText, ...] | None, BeforeValidator(as_list), TypeLabel("list of names")
]


class LimitSpec(ConfigModel):
    """Limits on use. What is unset is not limited."""

    rpm: Count | None = None
    """Requests within any 60 seconds."""
    tpm: Annotated[Count | None, TypeLabel("number", "tokens")] = None
    """Tokens of prompts and answers within any 60 seconds."""
    tokens_per_day: Annotated[Count | None, TypeLabel("number", "tokens")] = None
    """Tokens of prompts and answers in a day (UTC)."""
    budget: Annotated[
        str | None,
        BeforeValidator(_budget),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "pattern": r"^\s*[0-9.]+\s*/\s*(day|month)\s*$"},
                    {"type": "null"},
                ]
            }
        ),
        TypeLabel("amount/month or amount/day"),
    ] = None
    """Money in a calendar month or day (UTC), such as `"20/month"` or `"0.5/day"`, in the currency
    of the nodes' costs."""
    concurrency: Count | None = None
    """Requests at one time."""
    prompt_tokens: Annotated[Count | None, TypeLabel("number", "tokens")] = None
    """Largest prompt, as estimated from its length; a request with a longer one gets 400."""
    completion_tokens: Annotated[Count | None, TypeLabel("number", "tokens")] = None
    """Most tokens of one answer; a request for more is lowered to it."""
    max_class: Annotated[PriorityName | None, Lowercased] = None
    """Highest class of the requests; higher ones are lowered."""
    models: ModelNames = None
    """Public model names that may be used, of those that the key may use; written as in `keys`."""

    @property
    def budget_limit(self) -> Budget | None:
        """The parsed `budget`."""
        return None if self.budget is None else parse_budget(self.budget)


class GroupSpec(ConfigModel):
    """What holds for all keys of one group."""

    limits: LimitSpec | None = None
    """Limits of all keys of the group together."""
    user_limits: LimitSpec | None = None
    """Limits of each end user that a trusted key of the group names, unless the key has
    `user_limits` of its own."""
    cache: CacheSpec | None = None
    """Prompt caches and privacy, where they differ from the top level's."""


_CLASSES = get_args(PriorityName)

KEY_ID = re.compile(r"[A-Za-z0-9.-]{1,64}")

SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def check_unique(keys: Iterable[object], attribute: str) -> None:
    """Check that no two keys have the same one, but for empty ones. Raises: PydanticCustomError."""
    seen: set[str] = set()
    for word in (getattr(key, attribute) for key in keys):
        if word and word in seen:
            raise validation_error(
                f"two keys have the {attribute} {word}", f"a key's {attribute} must be unique"
            )
        seen.add(word)


KeyId = Annotated[
    str,
    matching(
        KEY_ID.fullmatch,
        "must be 1 to 64 letters, digits, '.' or '-'",
        "the part between lg_ and _ of the key",
    ),
    Field(json_schema_extra={"pattern": f"^{KEY_ID.pattern}$"}),
    TypeLabel("text"),
]

KeyHash = Annotated[
    str,
    matching(
        SHA256.fullmatch, "must be 64 hexadecimal digits", "`llama-gateway keys hash` makes them"
    ),
    Lowercased,
    Field(
        description="SHA-256 of the secret, as `llama-gateway keys hash` prints it.",
        json_schema_extra={"pattern": f"^{SHA256.pattern}$"},
        repr=False,
    ),
    TypeLabel("64 hex digits"),
]


class KeySpec(ConfigModel):
    """One API key: a public id and the SHA-256 of its secret."""

    id: KeyId
    """Public part of the key `lg_<id>_<secret>`; unique."""
    sha256: KeyHash
    name: Annotated[str, Field(max_length=256), TypeLabel("text")] = ""
    """Who uses it; shown in logs and metrics."""
    class_: Annotated[
        PriorityName | None,
        Lowercased,
        Field(validation_alias="class", serialization_alias="class"),
    ] = None
    """Class of its requests that name none. Unset: `normal`, or `max_class` if that is lower."""
    max_class: Annotated[PriorityName | None, Lowercased] = None
    """Highest class of its requests; higher ones are lowered. Unset: its `class`, else `normal`."""
    models: ModelNames = None
    """Public model names that it may use; `"*"` allows the names that the catch-all of `models`
    takes. Unset: all."""
    trust_user_headers: bool = False
    """Its holder, such as a chat's web interface, may name its end users in the headers of
    `identity.user_headers`."""
    group: GroupName | None = None
    """Group of keys that it belongs to; `groups` has the group's limits."""
    limits: LimitSpec | None = None
    """Limits of this key, beside those of its group and `limits.total`."""
    user_limits: LimitSpec | None = None
    """Limits of each end user that it names (`trust_user_headers`). Unset: its group's."""
    expires: Timestamp | None = None
    """Until when it works. Unset: until it is removed."""

    cache: CacheSpec | None = None
    """Prompt caches and privacy, where they differ from its group's."""

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
