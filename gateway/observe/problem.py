"""One problem of the fleet, as operators are told it: what is wrong, why, and what to do."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Severity(enum.Enum):
    """How soon somebody should act."""

    CRITICAL = "critical"
    """Requests fail, or will within minutes."""
    WARNING = "warning"
    """The fleet works, with less than it should have."""
    NOTICE = "notice"
    """Nothing is broken; somebody may have forgotten it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that an operator should know, and what to do about it."""

    id: str
    """The same for as long as it lasts."""
    severity: Severity
    title: str
    cause: str
    remedy: str
    commands: tuple[str, ...] = ()
    """Command lines of the remedy."""
    nodes: tuple[str, ...] = ()
    """The first of the nodes that it is about."""
    caller: str | None = None
    """The caller that it is about; for operators only."""
    anonymous_commands: tuple[str, ...] | None = None
    """`commands` for those who may not know the caller; None: they do not name it."""
    anonymous_remedy: str | None = None
    """Likewise."""

    def as_json(self, *, may_name_callers: bool) -> dict[str, Any]:
        """As the admin API shows it."""
        caller, remedy, commands = self.caller, self.remedy, self.commands
        if not may_name_callers:
            caller, remedy = None, self.anonymous_remedy or remedy
            commands = self.anonymous_commands or commands
        return {
            "id": self.id,
            "severity": self.severity.value,
            "title": self.title,
            "cause": self.cause,
            "remedy": remedy,
            "commands": commands,
            "nodes": self.nodes,
            "caller": caller,
        }
