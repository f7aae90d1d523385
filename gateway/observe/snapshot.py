"""The gateway's state at the time of a scrape, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.observe.exposition import Histogram
from gateway.request import Priority


@dataclass(slots=True)
class NodeSample:
    """A node at the time of a scrape. Speeds in tokens per second, None until measured."""

    name: str
    state: str
    slots_total: int
    slots_busy: int
    decode_tps: float | None = None
    prefill_tps: float | None = None
    differs: bool = False
    """Whether it differs from what the inventory declares."""


@dataclass(slots=True)
class StoreSample:
    """The store at the time of a scrape."""

    up: bool
    """Whether it can be read and written."""
    waiting: int
    """Jobs that wait for it."""


@dataclass(slots=True)
class LedgerSample:
    """The ledger of requests at the time of a scrape; counts are of this process."""

    pending: int
    """Rows that wait to be written."""
    written: int
    recovered: int
    """Of them, rows of requests whose process was killed."""
    dropped: int
    """Rows that were lost, since too many waited or none could store them."""


@dataclass(slots=True)
class TraceSample:
    """Traces of requests that have ended; counts are of this process."""

    exported: int
    dropped: Mapping[str, int]
    """By the reason."""


@dataclass(slots=True)
class BatchSample:
    """Work that can wait, at the time of a scrape; counts are of this process."""

    batches: Mapping[str, int]
    """By state."""
    lines: Mapping[str, int]
    """Lines whose result was recorded, by outcome."""
    waiting: Mapping[str, int]
    """Stored requests that may run, by kind."""
    running: int
    """Lines that were offered to the scheduler."""
    claimed: int
    """Lines that are to be offered next."""
    deferred: int
    retried: int
    oldest_seconds: float
    results_blocked: bool = False
    """Whether results wait, since the disk or the store does not take them."""
    folder_refusals: int = 0
    """Files for which the folder had no room."""
    folder_full: bool = False
    """Whether the folder has no room for what came of late."""


@dataclass(slots=True)
class MetricsSnapshot:
    """The gateway's state at the time of a scrape."""

    nodes: Iterable[NodeSample] = ()
    """Read once, in steps."""
    queue: Mapping[Priority, int] = field(default_factory=dict)
    """Queued requests by class; a missing class has none."""
    oldest: Mapping[Priority, float] = field(default_factory=dict)
    """Seconds that the longest waiting request of each class has waited."""
    predictions: Mapping[str, Histogram] = field(default_factory=dict)
    """Actual times by those that were expected, `first_token` and `completion`."""
    cached_expected: float = 0.0
    """Tokens that nodes were believed to have cached of the prompts that they got."""
    cached_found: int = 0
    """Those of them that they had cached."""
    queue_places: int = 0
    """Requests that may wait at once."""
    spill_money_left: float | None = None
    """What spill-over to GPUs may still cost in its window; None: money does not limit it."""
    in_flight: int = 0
    """Requests that are queued or run."""
    paused_models: Sequence[str] = ()
    """Public names that an operator has paused."""
    inventory_error: bool = False
    """The inventory on disk is invalid; an older one is in force."""
    retry_budget: float | None = None
    """Retries that the budget allows now."""
    certificate_days_left: Mapping[str, float] = field(default_factory=dict)
    """Days until the certificate of each listener with TLS expires."""
    store: StoreSample | None = None
    """None: there is no store."""
    ledger: LedgerSample | None = None
    batches: BatchSample | None = None
    traces: TraceSample | None = None
    """None: no requests are traced."""
    webhooks_waiting: int = 0
    """Deliveries that wait in the store."""
