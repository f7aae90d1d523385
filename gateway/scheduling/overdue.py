"""When a wait has lasted long enough, or has become hopeless."""

from __future__ import annotations

from gateway import errors
from gateway.config.settings import Settings
from gateway.scheduling.eligible import Able
from gateway.scheduling.ticket import Ticket


def starts_in(able: Able, cooldown: float, now: float) -> float | None:
    """Seconds until a standby node among these is expected to work; None: none is coming."""
    return min(
        (
            node.power.ready_in(now, cooldown)
            for _, nodes in able
            for node in nodes
            if node.spec.standby and node.on_demand
        ),
        default=None,
    )


def overdue(
    ticket: Ticket, settings: Settings, retry_after: float, now: float
) -> errors.GatewayError | None:
    """Why a request may not wait any longer; None: it may. `retry_after`: seconds for a place.

    While all its nodes are out it waits `retries.wait_for_node`; but for a standby node that is
    coming it waits as for any slot.
    """
    coming = None
    if ticket.plan.any_alive():
        ticket.out_since = None
    else:
        coming = starts_in(ticket.plan.able, settings.elastic.cooldown, now)
        if coming is not None:
            ticket.out_since = None
        elif ticket.out_since is None:
            ticket.out_since = now
    out = ticket.out_since
    if out is not None and now - out >= settings.retries.wait_for_node:
        names = ", ".join(repr(name) for name in ticket.request.candidates)
        return errors.no_node(f"Every node for {names} is out.", retry_after)
    if now < ticket.until:
        return None
    waited = now - ticket.entered
    if coming is not None:
        return errors.starting(
            f"The node for it is still being started after {waited:.0f} s; "
            f"it is expected in {coming:.0f} s.",
            coming,
        )
    return errors.queue_timeout(f"No slot came free in {waited:.0f} s.", retry_after)
