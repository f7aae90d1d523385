"""`/admin/nodes`: what each node is and does, and drain, resume and probe."""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.errors import GatewayError
from gateway.fleet.fleet import Fleet
from gateway.fleet.node import LeasePhase, Node
from gateway.proxy.in_flight import InFlightRegistry, InFlightRequest
from gateway.web.asgi import JsonResponse, truncate_echo

LONGEST_DRAIN_DEADLINE = 7 * 24 * 3600.0
"""Seconds; a drain that lasts longer has none."""


def node_json(node: Node) -> dict[str, Any]:
    """One node as the admin API shows it. Seconds, tokens, tokens/s."""
    spec, facts, now = node.spec, node.properties, node.clock()
    circuit, cost = node.circuit, spec.cost_per_million_tokens
    models = facts.models if spec.models is None else spec.models
    open_until = circuit.open_until
    return {
        "name": spec.name,
        "url": spec.url,
        "kind": spec.kind,
        "tier": spec.tier,
        "host": spec.host,
        "labels": dict(spec.labels),
        "enabled": spec.enabled,
        "standby": spec.standby,
        "elastic": _elastic(node, now) if spec.autoscaled else None,
        "draining": node.draining,
        "state": node.state.value,
        "reason": node.reason,
        "slots_total": node.slots_total,
        "slots_busy": node.slots_busy,
        "leased": node.leased,
        "foreign": node.foreign,
        "in_flight": node.in_flight,
        "models": list(models),
        "context": node.context,
        "prefill_tps": _rounded(node.speed.prefill_tps),
        "decode_tps": _rounded(node.speed.decode_tps),
        "requests": node.requests,
        "failures": node.failures,
        "cost_per_hour": spec.cost_per_hour,
        "cost_per_million_tokens": None if cost is None else cost.model_dump(),
        "build": facts.build,
        "drift": list(node.drift),
        "endpoints": None if spec.endpoints is None else sorted(spec.endpoints),
        "endpoints_refused": sorted(facts.refused),
        "circuit": {
            "phase": circuit.phase(now).value,
            "failures": circuit.failures,
            "open_for": None if open_until is None else _rounded(max(0.0, open_until - now)),
        },
    }


def _elastic(node: Node, now: float) -> dict[str, Any]:
    """Of a standby node with hooks: whether it runs, and what comes next."""
    power = node.lifecycle
    return {
        "phase": power.phase.value,
        "seconds": _rounded(now - power.since) if math.isfinite(power.since) else None,
        "failures": power.failures,
        "retry_in": _rounded(power.retry_at - now) if power.retry_at > now else None,
        "startup_seconds": _rounded(power.startup_seconds),
    }


def node_not_found(name: str, known: dict[str, Node]) -> GatewayError:
    """404, with the names that were probably meant."""
    near = difflib.get_close_matches(truncate_echo(name), known, n=3)
    meant = ", ".join(f"'{one}'" for one in near)
    hint = f" Did you mean {meant}?" if near else " GET /admin/nodes lists them."
    return GatewayError(
        404, "node_not_found", f"There is no node '{truncate_echo(name)}'.{hint}", param="name"
    )


def _deadline(request: Request) -> float | None:
    """Seconds. Raises: GatewayError (400)."""
    word = request.query_params.get("deadline")
    if word is None:
        return None
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= LONGEST_DRAIN_DEADLINE:
        raise errors.invalid_request(
            f"'deadline' must be a number of seconds from 0 to {LONGEST_DRAIN_DEADLINE:.0f}.",
            "deadline",
        )
    return seconds


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DrainDeadlines:
    """At most one deadline for each node. Owns its timers: `close` must be called."""

    registry: InFlightRegistry
    _timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def set(self, name: str, seconds: float) -> None:
        """Have what it runs leave it in so many seconds; takes the place of an earlier one."""
        self.cancel(name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(seconds, self._over, name)

    def cancel(self, name: str) -> None:
        """Let what it runs end by itself."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def seconds_left(self, name: str) -> float | None:
        """Seconds until the node's deadline; None: it has none."""
        timer = self._timers.get(name)
        if timer is None:
            return None
        return max(0.0, timer.when() - asyncio.get_running_loop().time())

    def close(self) -> None:
        """Forget all of them."""
        for name in list(self._timers):
            self.cancel(name)

    def _over(self, name: str) -> None:
        self._timers.pop(name, None)
        left = [live for live in self.registry if is_running_on(live, name)]
        for live in left:
            live.evict(node_drained(name))
        if left:
            log.warning("Node %s is drained: %d requests leave it at its deadline", name, len(left))


@dataclass(frozen=True, slots=True)
class NodeEndpoints:
    """The endpoints."""

    fleet: Fleet
    drain_deadlines: DrainDeadlines

    async def list(self, _: Request) -> Response:
        """Every node, in the inventory's order."""
        return JsonResponse({"nodes": [self._shown(node) for node in self.fleet.nodes.values()]})

    async def show(self, request: Request) -> Response:
        """One node."""
        return JsonResponse(self._shown(self._asked(request)))

    async def drain(self, request: Request) -> Response:
        """No new work for it. The last order counts: without a deadline it has none any more."""
        node = self._asked(request)
        seconds = _deadline(request)
        self.fleet.drain(node.name)
        if seconds is None:
            self.drain_deadlines.cancel(node.name)
        else:
            self.drain_deadlines.set(node.name, seconds)
        return JsonResponse(self._shown(node))

    async def resume(self, request: Request) -> Response:
        """Back to work."""
        node = self._asked(request)
        self.drain_deadlines.cancel(node.name)
        self.fleet.resume(node.name)
        return JsonResponse(self._shown(node))

    async def probe(self, request: Request) -> Response:
        """Ask it now; it is trusted again if it answers."""
        node = self._asked(request)
        outcome = await self.fleet.probe(node.name)
        told = {
            "answer": outcome.answer.value,
            "detail": outcome.detail,
            "seconds": round(outcome.seconds, 4),
        }
        return JsonResponse({**self._shown(node), "probe": told})

    def _asked(self, request: Request) -> Node:
        name = request.path_params["name"]
        node = self.fleet.nodes.get(name)
        if node is None:
            raise node_not_found(name, self.fleet.nodes)
        return node

    def _shown(self, node: Node) -> dict[str, Any]:
        left = self.drain_deadlines.seconds_left(node.name)
        return {**node_json(node), "deadline_in": None if left is None else round(left, 1)}


def is_running_on(live: InFlightRequest, name: str) -> bool:
    """Whether a request is at work on the node of this name."""
    if live.attempt is None:
        return False
    lease = live.attempt.lease
    return lease.node.name == name and lease.phase not in {LeasePhase.RECLAIM, LeasePhase.RELEASED}


def node_drained(name: str) -> GatewayError:
    """503: worth repeating, since another node gets it then."""
    return GatewayError(
        503,
        "node_drained",
        f"The node '{name}' was taken out of service before it had answered. Try again.",
        retry_after=1.0,
    )
