"""The audit log: who has changed what, when, and with which outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from gateway.events import InventoryChanged

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

    def record_settings(self, actor: str, changed: Sequence[str], *, invalid: bool) -> None:
        """Tell of settings that were read again: the top-level keys that have changed."""
        if changed or invalid:
            outcome = "invalid_configuration" if invalid else "done"
            details = {"changed": ", ".join(changed)} if changed else {}
            self.record(actor, None, "settings", "", outcome, details=details)

    def record_inventory(self, actor: str, change: InventoryChanged | None) -> None:
        """Tell of an inventory that was read again; None: it was invalid."""
        if change is None:
            self.record(actor, None, "inventory", "", "invalid_configuration")
            return
        groups = {"added": change.added, "changed": change.changed, "removed": change.removed}
        details = {group: ", ".join(names) for group, names in groups.items() if names}
        self.record(actor, None, "inventory", details=details)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
