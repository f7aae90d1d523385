"""The audit log: who has changed what, when, and with which outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

log = structlog.get_logger()

LONGEST_TEXT = 200
"""Characters of a name or value that are kept."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change, or an attempt at one. It holds no secret."""

    at: float
    """Seconds since 1970."""
    actor: str
    """The id of an admin key; `local`, `file`, `signal` or `gateway` without one."""
    role: str | None
    action: str
    target: str
    outcome: str
    """`done`, or the code of the error."""
    details: Mapping[str, str]


class AuditTrail:
    """Logs changes and keeps them; `record` never waits."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock

    def record(
        self,
        actor: str,
        role: str | None,
        action: str,
        target: str = "",
        outcome: str = "done",
        *,
        details: Mapping[str, str] | None = None,
    ) -> None:
        """Tell of a change. Texts are shortened; nothing secret may be in them."""
        entry = AuditEntry(
            self._wall_clock(),
            _shortened(actor),
            role,
            action,
            _shortened(target),
            outcome,
            {_shortened(key): _shortened(value) for key, value in (details or {}).items()},
        )
        log.info(
            "audit",
            actor=entry.actor,
            role=entry.role,
            action=entry.action,
            target=entry.target,
            outcome=entry.outcome,
            **({"details": dict(entry.details)} if entry.details else {}),
        )


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
