"""Which nodes can serve a request at all, however busy they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gateway import errors
from gateway.fleet.catalogue import Catalogue
from gateway.fleet.node import Node
from gateway.request import Request
from gateway.scheduling.hybrid import Route
from gateway.scheduling.mirror import Groups, Key, Mirror

HOST_DOUBT = 1e5
"""Seconds by which the other nodes of a host look slower to a request that failed on one: so many
that it goes to another host, however slow, that has room. So does a node that needs a request on
trial: this one has been tried enough."""

Able = Sequence[tuple[str, Sequence[Node]]]
"""The nodes that can serve a request, for each name it stands for that some node serves."""

_NOBODY: Mapping[int, float] = {}


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request may go, as the dispatcher wants it: rows are told by index."""

    able: Able
    groups: Groups
    closed: Collection[int] = ()
    failed: Collection[int] = ()
    doubts: Mapping[int, float] = field(default_factory=lambda: _NOBODY)
    route: Route | None = None
    """Between tiers, where it could go to either (`Tiers.routed`)."""
    open_at: float = math.inf
    """When the other tiers of the route are open too; infinity: they are, or never will be."""

    def same(self, other: Plan) -> bool:
        """Whether a waiting request may stay in line as it is."""
        return (
            self.groups == other.groups
            and self.closed == other.closed
            and self.failed == other.failed
        )

    def any_alive(self) -> bool:
        """Whether one of its nodes is worth the ordinary wait, of the tiers that are open to it."""
        return any(
            row.alive and row.index not in self.closed
            for pools in self.groups
            for pool in pools
            for row in pool.rows
        )


@dataclass(slots=True, eq=False)
class Eligible:
    """Finds them, by the fleet's catalogue."""

    catalogue: Catalogue
    mirror: Mirror

    def plan(self, request: Request) -> Plan:
        """Where it may go.

        Raises: GatewayError when there is no node, or none that could ever hold it.
        """
        names = request.candidates
        if len(names) == 1 and not request.refused and not request.failed:
            # Nearly always: one name, and every node that serves it will do.
            service = self.mirror.service(_key(names[0], request))
            offering = service.offering
            assert offering is not None
            if (
                offering.nodes
                and request.slots <= offering.slots
                and request.prompt_tokens <= offering.context >= request.smallest_context
            ):
                plan: Plan | None = service.plan
                if plan is None or plan.able is not offering.able:
                    plan = service.plan = Plan(offering.able, service.groups)
                return plan
        able = self.able(request)
        groups = tuple(
            pools for name, _ in able for pools in self.mirror.service(_key(name, request)).groups
        )
        return Plan(able, groups, self._closed(able, groups), *self._failed(able, request))

    def _closed(self, able: Able, groups: Groups) -> Collection[int]:
        """Rows of the pools whose nodes can't hold this request."""
        kept = {row.index for _, nodes in able for row in self.mirror.rows(nodes)}
        every = {row.index for pools in groups for pool in pools for row in pool.rows}
        return frozenset(every - kept)

    def _failed(self, able: Able, request: Request) -> tuple[Collection[int], Mapping[int, float]]:
        """Rows that have failed it, and doubts about their hosts' others and about trials."""
        failed = request.failed
        if not failed:
            return (), _NOBODY
        nodes = {node for _, found in able for node in found}
        hosts = {node.spec.host for node in nodes if node.name in failed}
        rows, doubts = set(), {}
        for node in nodes:
            for row in self.mirror.rows((node,)):
                if node.name in failed:
                    rows.add(row.index)
                elif node.spec.host in hosts or row.doubt < 0:
                    doubts[row.index] = HOST_DOUBT
        return frozenset(rows), doubts

    def able(self, request: Request) -> Able:
        """The nodes that can serve it, by name. Raises: GatewayError."""
        offered = False
        able: list[tuple[str, Sequence[Node]]] = []
        widest = 0
        needed = max(request.prompt_tokens, request.smallest_context)
        for name in request.candidates:
            offering = self.catalogue.offering(
                name, request.endpoint, vision=request.vision, native=request.native
            )
            nodes: Sequence[Node] = offering.nodes
            offered = offered or bool(nodes) or self.catalogue.known(name)
            if request.refused:
                nodes = [node for node in nodes if node.name not in request.refused]
            if not nodes:
                continue
            if offering.slots < request.slots:
                widest = max(widest, *(node.slots_most for node in nodes))
                nodes = [node for node in nodes if node.slots_most >= request.slots]
            if nodes and offering.context < needed:
                nodes = narrowed(nodes, request)
            if nodes:
                able.append((name, nodes))
        if able:
            return able
        raise self._nobody(request, offered=offered, widest=widest)

    def unsupported(self, request: Request) -> errors.GatewayError | None:
        """The 501 of a request whose model's nodes all say that they don't do this; else None."""
        names = request.candidates
        nodes = [node for name in names for node in self.catalogue.nodes_for(name)]
        hints = [request.hint]
        for node in nodes:
            if node.name not in request.unsupported and (
                node.offers(request.endpoint)
                and not (request.native and node.spec.kind == "openai")
            ):
                return None
            hints.append(node.hints.get(request.endpoint))
        if not nodes:
            return None
        hint = next((hint for hint in hints if hint is not None), None)
        return errors.not_supported(request.endpoint, request.path, request.model, hint)

    def _nobody(self, request: Request, *, offered: bool, widest: int) -> errors.GatewayError:
        if widest:
            body = next(iter(request.bodies.values()), b"")
            return errors.invalid_request(
                f"This request takes {request.slots} slots at once, more than any node has "
                f"({widest}). Ask for fewer answers.",
                "n_cmpl" if b'"n_cmpl"' in body else "n",
            )
        if offered:
            if (unsupported := self.unsupported(request)) is not None:
                return unsupported
            if request.vision and not request.refused:
                return errors.invalid_request(
                    f"No node that serves '{request.model}' reads images.",
                    _PICTURED.get(request.path, "messages"),
                )
            return errors.node_failed(
                f"No node serves '{request.endpoint}' requests for '{request.model}'."
            )
        return self.catalogue.unknown(request.model)


_PICTURED = {"/v1/responses": "input", "/v1/completions": "prompt", "/completion": "prompt"}
"""Fields that hold pictures, where it is not `messages`."""


def _key(name: str, request: Request) -> Key:
    return name, request.endpoint, request.vision, request.native


def fits(node: Node, request: Request) -> bool:
    """Whether the prompt, as far as it is known, fits into one slot's context."""
    return node.context is None or node.context >= max(
        request.prompt_tokens, request.smallest_context
    )


def narrowed(nodes: Sequence[Node], request: Request) -> Sequence[Node]:
    """The nodes whose context fits; if none does, those with the largest, which can say so."""
    fitting = [node for node in nodes if fits(node, request)]
    if fitting:
        return fitting
    largest = max((node.context or 0 for node in nodes), default=0)
    return [node for node in nodes if (node.context or 0) == largest]
