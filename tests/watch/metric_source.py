"""The state of a gateway, made up, from which each family of the metrics has a sample."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from gateway.admin.status import MetricsSource
from gateway.app.background import BackgroundWork
from gateway.callers.limits import LimitStanding, UsedQuota
from gateway.schedule.decision_log import PredictionAccuracy
from gateway.store.store import StoreStatus
from gateway.terms import Priority
from gateway.watch.metrics import ClusterSample, EdgeSample, MetricsPage

EDGES = [EdgeSample("edge-1", 7, True, 1, 1, 0.1, 1.0, 1 << 20, 9.0)]
CLUSTER = ClusterSample("prod", "a", "leader", 9.0, 1, "a", (), (), (), 0)
FEEDER = SimpleNamespace(
    waiting=SimpleNamespace(batches={"completed": 1}, kinds={"line": 1}, oldest=1.0),
    outcomes={"done": 1}, deferred=1, retried=1, running=1, claimed=1,
)  # fmt: skip
QUOTA = LimitStanding("key", "budget", "month", 100.0, 83.0, 0.0, None)


def a_source(
    queue: dict[Priority, int] | None = None, oldest: dict[Priority, float] | None = None
) -> MetricsSource:
    """A gateway with one of everything; requests of these classes wait."""
    scheduler = SimpleNamespace(
        accuracy=PredictionAccuracy(),
        clock=lambda: 0.0,
        depths=lambda: queue or {},
        waiters=SimpleNamespace(longest_waits=lambda _: oldest or {}),
        settings=SimpleNamespace(queue=SimpleNamespace(max=256)),
        tier_policy=SimpleNamespace(money_left=lambda _: 1.0),
    )
    expiry = {"listen.tls": time.time() + 9 * 86400}
    gateway: Any = SimpleNamespace(
        scheduler=scheduler,
        fleet=SimpleNamespace(model_index=SimpleNamespace(paused_by_name={"demo"})),
        registry=range(5),
        quotas=SimpleNamespace(used=[UsedQuota("k1", QUOTA, spent=False)]),
        config_files=SimpleNamespace(inventory_error="no such key"),
        certificates=SimpleNamespace(listeners=SimpleNamespace(expiry=expiry)),
        store=SimpleNamespace(status=lambda: StoreStatus("", "up", 0.0, None, None, 6, 0)),
        ledger=SimpleNamespace(pending=0, written=0, recovered=0, dropped=0),
        edges=SimpleNamespace(
            sample=lambda: EDGES, brain=SimpleNamespace(edges=1, late_leases=0), died=0
        ),
        cluster=SimpleNamespace(sample=lambda: CLUSTER),
    )
    return MetricsSource(gateway, retries_left=lambda: 9, add_batches=add_batches)


def add_batches(page: MetricsPage) -> None:
    """Add what is told of work that callers need not wait for."""
    folder = SimpleNamespace(refusals=0, full=None)
    work: Any = SimpleNamespace(
        feeder=FEEDER,
        files=SimpleNamespace(storage=SimpleNamespace(folder=folder)),
        webhook_sender=SimpleNamespace(waiting=0),
        _results=SimpleNamespace(problem=None),
    )
    BackgroundWork.add_metrics(work, page)
