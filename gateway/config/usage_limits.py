"""Limits on what callers may use: of a key, a group, each end user, or all callers together."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, WithJsonSchema

from gateway.config.cache_privacy import CacheSpec
from gateway.config.fields import (
    ConfigModel,
    Count,
    Lowercased,
    NonEmptyText,
    PriorityName,
    TypeLabel,
    as_list,
    validation_error,
)

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


_GROUP = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _group_name(value: object) -> object:
    if isinstance(value, str) and not _GROUP.fullmatch(value):
        raise validation_error("must be 1 to 64 letters, digits, '.', '_' or '-'")
    return value


GroupName = Annotated[
    str,
    BeforeValidator(_group_name),
    Field(json_schema_extra={"pattern": f"^{_GROUP.pattern}$"}),
    TypeLabel("name"),
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
    models: Annotated[
        tuple[NonEmptyText, ...] | None, BeforeValidator(as_list), TypeLabel("list of names")
    ] = None
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
