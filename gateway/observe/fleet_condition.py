"""The state from which problems are found: plain data, gathered by `web/admin/live_view.py`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """A node that is not simply at work."""

    name: str
    host: str
    state: str
    reason: str
    tier: str = "cpu"
    drift: Sequence[str] = ()
    """How its server differs from the inventory."""
    start_failures: int = 0
    """Of a standby node: starts in a row that failed."""


@dataclass(frozen=True, slots=True)
class ModelNodes:
    """The nodes in service that serve a model."""

    total: int
    usable: int


@dataclass(frozen=True, slots=True)
class QueueCondition:
    """The requests that wait."""

    waiting: int = 0
    most: int = 256
    """`queue.max`."""
    oldest_seconds: float = 0.0
    most_wait: float = 300.0
    """`queue.max_wait` in seconds."""
    top_caller: str | None = None
    """Whose requests most places hold."""
    top_waiting: int = 0
    callers: int = 0
    """How many callers wait, as far as was counted."""


@dataclass(frozen=True, slots=True)
class TrafficCondition:
    """The requests that ended within the last minute."""

    requests: int = 0
    failed: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    """By the error's code."""
    limited_caller: str | None = None
    """Whose requests limits refused most."""
    limited: int = 0
    """How many of its requests they refused."""
    callers: int = 0
    """How many callers sent some, as far as was counted."""
    failures: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Of `failed`, by the error's code and the last node that was tried ("": none)."""


@dataclass(frozen=True, slots=True)
class SpillCondition:
    """The budget of spill-over to the GPU tier."""

    paid: float = 0.0
    reserved: float | None = 0.0
    """None: the requests that run have no bound."""
    money: float | None = None
    """What may be paid within the window; None: no limit."""
    window: float = 3600.0


@dataclass(frozen=True, slots=True)
class StorageCondition:
    """The folder of files and results, while it can't take what callers and batches have for it."""

    error: str | None = None
    """Why not, and what to do; None: it takes everything."""
    is_full: bool = False
    """Whether that is for want of room."""
    results: int = 0
    """Results of batches that wait to be written."""
    full_callers: Sequence[str] = ()
    """Callers whose batches wait, since they keep as much as each may."""


@dataclass(frozen=True, slots=True)
class FleetCondition:
    """The state from which problems are found."""

    nodes: Sequence[NodeCondition] = ()
    """Those that are not simply at work."""
    hosts: Mapping[str, int] = field(default_factory=dict)
    """Nodes in service by host."""
    in_service: int = 0
    """Nodes that should work."""
    usable: int = 0
    """Of them, nodes that do."""
    models: Mapping[str, ModelNodes] = field(default_factory=dict)
    paused_models: Collection[str] = ()
    """Public names that an operator has paused."""
    differing_models: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By public name: how the nodes that serve it differ, in words."""
    queue: QueueCondition = QueueCondition()
    traffic: TrafficCondition = TrafficCondition()
    settings_keys: Mapping[str, int] = field(default_factory=dict)
    """Of the callers named above, those whose keys are in the settings: their places in `keys`."""
    spill: SpillCondition | None = None
    inventory_error: str | None = None
    settings_error: str | None = None
    keys_lost: str | None = None
    certificate_error: str | None = None
    certificates: Mapping[str, float] = field(default_factory=dict)
    """Days left, by the listener's setting."""
    store: Mapping[str, Any] = field(default_factory=dict)
    """`state`, `error` and `remedy` of the store."""
    ledger: Mapping[str, Any] | None = None
    """`dropped` and `error` of the ledger."""
    audit_lost: int = 0
    storage: StorageCondition = StorageCondition()
