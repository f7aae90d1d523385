"""The settings in the dispatcher's words."""

from __future__ import annotations

from gateway.config.settings import Settings
from gateway.config.waiting import PATIENCE
from gateway.request import Priority
from gateway.scheduling.dispatch import LineRules


def rules_of(settings: Settings) -> LineRules:
    """What the settings say to the dispatcher."""
    rules = settings.classes
    patience = {}
    for priority in Priority:
        rule = rules.get(priority.label)  # type: ignore[call-overload]
        own = None if rule is None else rule.patience
        patience[priority] = PATIENCE[priority.label] if own is None else own
    batch = rules.get("batch")
    reserve = None if batch is None else batch.reserve_slots
    return LineRules(
        settings.policy, patience, reserve=reserve or 0.0, slotless=settings.queue.slotless
    )
