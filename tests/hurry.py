"""A gateway in a hurry: what it looks for every second or so, it looks for all the time.

For tests that wait for such a look in real time, since threads, files or other processes take part.
In virtual time it makes more steps, and no test needs it.
"""

from __future__ import annotations

from typing import Any

import pytest

from gateway.admin.live import LiveFeed
from gateway.callers.stored_keys import KeySync
from gateway.config.watch import changed_files
from gateway.events import DEFER_SECONDS
from gateway.store.store import Store
from gateway.stored.batch_registry import BatchUpkeep
from gateway.stored.webhooks import WebhookSender
from gateway.watch.request_tracing import RequestTracing, TraceExporter

PAUSES: tuple[tuple[Any, str, float], ...] = (
    (BatchUpkeep.__init__, "idle_seconds", 0.03),
    (BatchUpkeep.__init__, "round_seconds", 0.03),
    (KeySync.__init__, "poll_seconds", 0.03),
    (LiveFeed.__init__, "look_seconds", 0.03),
    (LiveFeed.__init__, "update_seconds", 0.03),
    (RequestTracing.__init__, "settle_seconds", 2 * DEFER_SECONDS),
    (Store.__init__, "check_seconds", 0.1),
    (Store.__init__, "look_seconds", 0.03),
    (TraceExporter.__init__, "batch_seconds", 0.03),
    (WebhookSender.__init__, "poll_seconds", 0.03),
    (changed_files, "poll_seconds", 0.03),
)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses that a gateway makes if it is given no other."""
    for function, name, seconds in PAUSES:
        assert seconds < function.__kwdefaults__[name]
        monkeypatch.setitem(function.__kwdefaults__, name, seconds)
