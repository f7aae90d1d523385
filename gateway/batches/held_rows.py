"""The rows that a process has claimed, and what is known of the targets that they are for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.batches.feeding import Lane, Pace
from gateway.batches.late_rows import LateRows
from gateway.batches.request_rows import StoredRow
from gateway.batches.runner import RequestTarget


@dataclass(slots=True, eq=False)
class HeldRow:
    """A claimed row."""

    row: StoredRow
    target: RequestTarget | None
    body: bytes | None
    """None: it runs or has run."""
    task: asyncio.Task[None] | None = None
    has_slot: bool = False
    """Whether it counts as running in its lane."""
    recording: bool = False
    """Whether it has a result, which is being recorded."""
    in_late_place: bool = False
    """Whether it was offered as late, without room for class `batch`."""


@dataclass(slots=True, eq=False)
class TargetRows:
    """The lane of one target, and what is known of its room."""

    pace: Pace
    lane: Lane = field(default_factory=Lane)
    credit: int = 0
    """Rows that may be offered now."""
    slots: int = 0
    urgent: list[str] = field(default_factory=list)
    """Batches whose deadline is in danger, the nearest first."""
    late: LateRows = field(default_factory=LateRows)
    """Those of them whose class is raised."""
    arriving: set[str] = field(default_factory=set)
    """Rows that were offered and that the scheduler has not seen yet."""
    probes: int = 1
    """Rows that are tried at a time while no node is there."""
    paused_until: float = 0.0
