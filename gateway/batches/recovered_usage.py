"""The usage of a response whose process was killed between the end of its log and its record."""

from __future__ import annotations

from collections.abc import Iterable

from gateway import errors
from gateway.access.callers import owner_of_stored
from gateway.batches.runner import RunEnd, Runner, StoredRequest, node_word
from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.lease import Usage
from gateway.usage.ledger import UsageRow
from gateway.usage.meter import UsedBefore


def recovered_usage(
    runner: Runner,
    stored: StoredRequest,
    end: RunEnd,
    tokens: Usage,
    *,
    model: str | None,
    group: str | None,
    nodes: Iterable[tuple[str, str]],
) -> UsageRow:
    """The ledger's row of such a response; it counts on its key's limits, too.

    `nodes`: names and tiers of those that it may have run on; others are not named.
    """
    record = RequestFinished(stored.id, stored.path, model or "unknown", stored.priority)
    for name, tier in nodes:
        if node_word(stored.id, name) == end.node:
            record.node, record.tier = name, tier
    record.stream, record.attempts = True, end.attempts
    record.count_tokens(tokens.prompt_tokens, tokens.cached_tokens, tokens.completion_tokens)
    record.charge(end.cost, end.slot_seconds)
    accounts = None
    try:
        caller = owner_of_stored(
            stored.owner, runner.key_ring, allow_anonymous=runner.settings.allow_anonymous
        )
        accounts = runner.meter.book.accounts(caller, stored.user)
        record.classify(max(stored.priority, caller.max_priority))
    except GatewayError as error:
        errors.drop_traceback(error)  # Its key is gone; its use was all the same.
    used = UsedBefore(stored.id, stored.owner, group, stored.user, end.started_at, end.ended_at)
    return runner.meter.recovered_row(used, record, accounts)
