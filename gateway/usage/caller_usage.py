"""What a caller may know of its own use: figures of today and this month, limits, what is left.

Figures come from the ledger and are kept for some seconds, longer the more rows they took; so
callers that poll cost the store little, however much they have used. Limits are live.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.store.failures import StoreError
from gateway.usage.accounts import Accounts
from gateway.usage.limits import LimitBook, LimitStanding
from gateway.usage.reports import (
    DAY,
    InvalidQuery,
    Reporter,
    ReportInterrupted,
    ReportQuery,
    Sums,
    UsageReport,
    date_of,
    time_text,
)

LEAST_AGE = 5.0
"""Seconds for which figures are kept at least."""

AGE_FACTOR = 20.0
"""Figures are kept for so many times as long as it took to read them: a caller that polls takes a
twentieth of the store's time at most."""

MOST_KEPT = 1000
"""Callers and end users whose figures are kept."""

NO_STORE = "the gateway has no store: requests are not recorded"


class _Kept(NamedTuple):
    figures: dict[str, Any]
    until: float


@dataclass(slots=True, eq=False)
class CallerUsage:
    """Answers callers about themselves. `reporter` is None where there is no store."""

    book: LimitBook
    reporter: Reporter | None
    now: Callable[[], float]
    """Unix seconds."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    _kept: OrderedDict[tuple[str, str | None], _Kept] = field(default_factory=OrderedDict)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def describe(self, accounts: Accounts, *, hides_cache: bool) -> dict[str, Any]:
        """The use of this caller, or of the end user that it names, as JSON values.

        `hides_cache`: without what tells of prompt caches. What the store can't say now is None,
        with the reason.
        """
        caller = accounts.caller
        return {
            "object": "usage",
            "key": caller.id,
            "name": caller.name,
            "group": caller.group,
            "user": accounts.user,
            **_without_cache(await self._figures(caller.id, accounts.user), hides_cache),
            "limits": [_standing_json(one) for one in self.book.standings(accounts)],
            "max_class": caller.max_priority.label,
            "models_allowed": None if caller.models is None else sorted(caller.models),
            "largest_prompt_tokens": accounts.prompt_tokens,
            "largest_completion_tokens": accounts.completion_tokens,
        }

    async def _figures(self, key: str, user: str | None) -> dict[str, Any]:
        if self.reporter is None:
            return _unknown(NO_STORE)
        async with self._reading:
            kept = self._kept.get((key, user))
            if kept is not None and self.clock() < kept.until:
                return kept.figures
            began = self.clock()
            try:
                report = await self.reporter.read(self._query(key, user))
            except (StoreError, ReportInterrupted, InvalidQuery) as error:
                return _unknown(error.message if isinstance(error, StoreError) else str(error))
            figures = await asyncio.to_thread(_figures_json, report, self.now())
            until = self.clock() + max(LEAST_AGE, AGE_FACTOR * (self.clock() - began))
            self._kept[key, user] = _Kept(figures, until)
            self._kept.move_to_end((key, user))
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return figures

    def _query(self, key: str, user: str | None) -> ReportQuery:
        """All days of this month."""
        now = self.now()
        today = now // DAY * DAY
        first = today - (int(date_of(now)[8:]) - 1) * DAY
        return ReportQuery(("model", "day"), first, today + DAY, key=key, user=user)


def _unknown(reason: str) -> dict[str, Any]:
    return {"as_of": None, "today": None, "month": None, "reason": reason}


def _figures_json(report: UsageReport, now: float) -> dict[str, Any]:
    today, models = Sums(), dict[str, Sums]()
    for (model, day), sums in report.groups:
        models.setdefault(model, Sums()).add(sums.values())
        if day == date_of(now):
            today.add(sums.values())
    return {
        "as_of": time_text(now),
        "today": {"since": date_of(now), **_sums_json(today)},
        "month": {
            "since": date_of(report.query.since),
            **_sums_json(report.total),
            "models": [
                {"model": model or None, **_sums_json(sums)}
                for model, sums in sorted(models.items(), key=lambda one: -one[1].requests)
            ],
        },
        "reason": None,
    }


def _sums_json(sums: Sums) -> dict[str, Any]:
    return {
        "requests": sums.requests,
        "failures": sums.failures,
        "prompt_tokens": sums.prompt_tokens,
        "cached_tokens": sums.cached_tokens,
        "completion_tokens": sums.completion_tokens,
        "cost": sums.cost,
    }


def _without_cache(figures: dict[str, Any], hidden: bool) -> dict[str, Any]:  # noqa: FBT001
    """The figures, without those that tell whose prompts a node has cached."""
    if not hidden or figures["month"] is None:
        return figures
    month = figures["month"]
    return {
        **figures,
        "today": figures["today"] | {"cached_tokens": None},
        "month": month
        | {
            "cached_tokens": None,
            "models": [one | {"cached_tokens": None} for one in month["models"]],
        },
    }


def _standing_json(one: LimitStanding) -> dict[str, Any]:
    return {
        "of": one.kind,
        "limit": one.limit,
        "period": one.period,
        "most": one.most,
        "used": one.used,
        "reserved": one.reserved,
        "remaining": max(0, one.most - one.used - one.reserved),
        "resets_at": None if one.resets_at is None else time_text(one.resets_at),
    }
