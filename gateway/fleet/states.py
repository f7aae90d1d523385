"""A node's state, the first of the contract's list that holds, with a reason to act on."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from gateway.fleet.circuit import CircuitPhase
from gateway.fleet.power import Phase

if TYPE_CHECKING:
    from gateway.fleet.node import Node


class State(enum.Enum):
    """The contract's states, in its order."""

    STANDBY = "standby"
    DRAINING = "draining"
    DOWN = "down"
    LOADING = "loading"
    STARTING = "starting"
    EJECTED = "ejected"
    MUTE = "mute"
    DEGRADED = "degraded"
    """Far below its own past (`pace.py`). It goes on working: its speed is what it is chosen by."""
    READY = "ready"


_LEAVING = frozenset({Phase.RETIRING, Phase.STOPPING})


def judge(node: Node, now: float) -> tuple[State, str]:
    """The state and its reason."""
    probing = node.probing
    kept = _kept_off(node)
    if kept is not None:
        return kept
    if probing.down:
        return State.DOWN, probing.detail
    if now < node.locked_until:
        return State.DOWN, node.locked
    if probing.loading:
        return State.LOADING, "the server is loading its model"
    if not probing.probed:
        return State.STARTING, "not probed yet"
    match node.circuit.phase(now):
        case CircuitPhase.OPEN:
            return State.EJECTED, (
                f"{node.circuit.failures} requests in a row failed; "
                f"no work for about {node.circuit.length:.0f} s, then one on trial"
            )
        case CircuitPhase.HALF_OPEN:
            return State.EJECTED, (
                f"{node.circuit.failures} requests in a row failed; the next one is on trial"
            )
        case CircuitPhase.CLOSED:
            pass
    if probing.mute:
        return State.MUTE, probing.detail
    if node.pace.degraded:
        return State.DEGRADED, node.pace.reason(now, endpoint=node.spec.kind == "openai")
    return State.READY, _ready(node, now)


def _kept_off(node: Node) -> tuple[State, str] | None:
    """What the inventory, an operator or its hooks have made of it; None: it may work."""
    spec, probing = node.spec, node.probing
    if not spec.enabled:
        return State.STANDBY, "enabled: false in the inventory"
    if spec.standby and not spec.elastic:
        return State.STANDBY, "standby: true in the inventory, without start and stop"
    power = node.power
    if spec.elastic and power.phase is Phase.OFF:
        return State.STANDBY, power.reason
    if spec.elastic and power.phase is Phase.UNKNOWN and probing.down:
        return State.STANDBY, "it does not run"
    if node.draining:
        return State.DRAINING, "drained by an operator, until it is resumed"
    if spec.elastic and power.phase in _LEAVING:
        return State.DRAINING, power.reason
    if spec.elastic and power.phase is Phase.STARTING and not (probing.up or probing.loading):
        told = f"; not up yet: {probing.detail}" if probing.detail else ""
        return State.STARTING, power.reason + told
    return None


def _ready(node: Node, now: float) -> str:
    if node.limit is not None and node.limit.paused(now):
        left = node.limit.paused_until - now
        return f"it refused work (429 or 503): none for about {left:.0f} s"
    return "answers its probes"
