"""`/admin/nodes`: what each node is and does, and drain, resume and probe."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.errors import GatewayError
from gateway.fleet.fleet import Fleet
from gateway.fleet.node import Node
from gateway.web.admin.deadlines import Deadlines
from gateway.web.public.answers import Json, echoed

LONGEST_DEADLINE = 7 * 24 * 3600.0
"""Seconds; a drain that lasts longer has none."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The endpoints."""

    fleet: Fleet
    deadlines: Deadlines

    async def list(self, _: Request) -> Response:
        """Every node, in the inventory's order."""
        return Json({"nodes": [self._shown(node) for node in self.fleet.nodes.values()]})

    async def show(self, request: Request) -> Response:
        """One node."""
        return Json(self._shown(self._asked(request)))

    async def drain(self, request: Request) -> Response:
        """No new work for it. The last order counts: without a deadline it has none any more."""
        node = self._asked(request)
        seconds = _deadline(request)
        self.fleet.drain(node.name)
        if seconds is None:
            self.deadlines.cancel(node.name)
        else:
            self.deadlines.set(node.name, seconds)
        return Json(self._shown(node))

    async def resume(self, request: Request) -> Response:
        """Back to work."""
        node = self._asked(request)
        self.deadlines.cancel(node.name)
        self.fleet.resume(node.name)
        return Json(self._shown(node))

    async def probe(self, request: Request) -> Response:
        """Ask it now; it is trusted again if it answers."""
        node = self._asked(request)
        outcome = await self.fleet.probe(node.name)
        told = {
            "answer": outcome.answer.value,
            "detail": outcome.detail,
            "seconds": round(outcome.seconds, 4),
        }
        return Json({**self._shown(node), "probe": told})

    def _asked(self, request: Request) -> Node:
        name = request.path_params["name"]
        node = self.fleet.nodes.get(name)
        if node is None:
            raise node_not_found(name, self.fleet.nodes)
        return node

    def _shown(self, node: Node) -> dict[str, Any]:
        left = self.deadlines.left(node.name)
        return {**described(node), "deadline_in": None if left is None else round(left, 1)}


def described(node: Node) -> dict[str, Any]:
    """One node as the admin API shows it. Seconds, tokens, tokens/s."""
    spec, facts, now = node.spec, node.facts, node.clock()
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
        "elastic": _elastic(node, now) if spec.elastic else None,
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
    power = node.power
    return {
        "phase": power.phase.value,
        "seconds": _rounded(now - power.since) if math.isfinite(power.since) else None,
        "failures": power.failures,
        "retry_in": _rounded(power.retry_at - now) if power.retry_at > now else None,
        "startup_seconds": _rounded(power.startup),
    }


def node_not_found(name: str, known: dict[str, Node]) -> GatewayError:
    """404, with the names that were probably meant."""
    near = difflib.get_close_matches(echoed(name), known, n=3)
    meant = ", ".join(f"'{one}'" for one in near)
    hint = f" Did you mean {meant}?" if near else " GET /admin/nodes lists them."
    return GatewayError(
        404, "node_not_found", f"There is no node '{echoed(name)}'.{hint}", param="name"
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
    if not 0.0 <= seconds <= LONGEST_DEADLINE:
        raise errors.invalid_request(
            f"'deadline' must be a number of seconds from 0 to {LONGEST_DEADLINE:.0f}.", "deadline"
        )
    return seconds


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
