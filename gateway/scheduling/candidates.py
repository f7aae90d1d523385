"""Which nodes can serve a request at all, however busy they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gateway import errors
from gateway.fleet.model_index import ModelIndex
from gateway.fleet.node import Node
from gateway.request import Request
from gateway.scheduling.fleet_sync import FleetSync, ModelGroups, ServiceKey
from gateway.scheduling.tier_policy import TierRoute

SAME_HOST_PENALTY = 1e5
"""Seconds by which the other nodes of a host look slower to a request that failed on one: so many
that it goes to another host, however slow, that has room. So does a node that needs a request on
trial: this one has been tried enough."""

NodesByModel = Sequence[tuple[str, Sequence[Node]]]
"""The nodes that can serve a request, for each name it stands for that some node serves."""

_NOBODY: Mapping[int, float] = {}


@dataclass(frozen=True, slots=True)
class NodeCandidates:
    """Where a request may go, as the dispatcher wants it: rows are told by index."""

    by_model: NodesByModel
    groups: ModelGroups
    excluded: Collection[int] = ()
    failed: Collection[int] = ()
    penalties: Mapping[int, float] = field(default_factory=lambda: _NOBODY)
    tier_route: TierRoute | None = None
    """Between tiers, where it could go to either (`Tiers.routed`)."""
    fallback_at: float = math.inf
    """When the other tiers of the route are open too; infinity: they are, or never will be."""

    def same_targets(self, other: NodeCandidates) -> bool:
        """Whether a waiting request may stay in line as it is."""
        return (
            self.groups == other.groups
            and self.excluded == other.excluded
            and self.failed == other.failed
        )

    def any_alive(self) -> bool:
        """Whether one of its nodes is worth the ordinary wait, of the tiers that are open to it."""
        return any(
            row.alive and row.index not in self.excluded
            for pools in self.groups
            for pool in pools
            for row in pool.rows
        )


@dataclass(slots=True, eq=False)
class CandidateFinder:
    """Finds them, by the fleet's catalogue."""

    model_index: ModelIndex
    fleet_sync: FleetSync

    def find(self, request: Request) -> NodeCandidates:
        """Where it may go.

        Raises: GatewayError when there is no node, or none that could ever hold it.
        """
        names = request.model_names
        if len(names) == 1 and not request.excluded_nodes and not request.failed_nodes:
            # Nearly always: one name, and every node that serves it will do.
            service = self.fleet_sync.service(_key(names[0], request))
            offering = service.capable_nodes
            assert offering is not None
            if (
                offering.nodes
                and request.slots <= offering.least_slots
                and request.prompt_tokens <= offering.least_context >= request.min_context
            ):
                plan: NodeCandidates | None = service.candidates
                if plan is None or plan.by_model is not offering.by_model:
                    plan = service.candidates = NodeCandidates(offering.by_model, service.groups)
                return plan
        able = self.nodes_by_model(request)
        groups = tuple(
            pools
            for name, _ in able
            for pools in self.fleet_sync.service(_key(name, request)).groups
        )
        return NodeCandidates(
            able, groups, self._closed(able, groups), *self._failed(able, request)
        )

    def _closed(self, able: NodesByModel, groups: ModelGroups) -> Collection[int]:
        """Rows of the pools whose nodes can't hold this request."""
        kept = {row.index for _, nodes in able for row in self.fleet_sync.rows(nodes)}
        every = {row.index for pools in groups for pool in pools for row in pool.rows}
        return frozenset(every - kept)

    def _failed(
        self, able: NodesByModel, request: Request
    ) -> tuple[Collection[int], Mapping[int, float]]:
        """Rows that have failed it, and doubts about their hosts' others and about trials."""
        failed = request.failed_nodes
        if not failed:
            return (), _NOBODY
        nodes = {node for _, found in able for node in found}
        hosts = {node.spec.host for node in nodes if node.name in failed}
        rows, doubts = set(), {}
        for node in nodes:
            for row in self.fleet_sync.rows((node,)):
                if node.name in failed:
                    rows.add(row.index)
                elif node.spec.host in hosts or row.penalty < 0:
                    doubts[row.index] = SAME_HOST_PENALTY
        return frozenset(rows), doubts

    def nodes_by_model(self, request: Request) -> NodesByModel:
        """The nodes that can serve it, by name. Raises: GatewayError."""
        offered = False
        able: list[tuple[str, Sequence[Node]]] = []
        widest = 0
        needed = max(request.prompt_tokens, request.min_context)
        for name in request.model_names:
            offering = self.model_index.capable_nodes(
                name, request.endpoint, vision=request.needs_vision, native=request.llama_cpp_only
            )
            nodes: Sequence[Node] = offering.nodes
            offered = offered or bool(nodes) or self.model_index.serves(name)
            if request.excluded_nodes:
                nodes = [node for node in nodes if node.name not in request.excluded_nodes]
            if not nodes:
                continue
            if offering.least_slots < request.slots:
                widest = max(widest, *(node.most_slots for node in nodes))
                nodes = [node for node in nodes if node.most_slots >= request.slots]
            if nodes and offering.least_context < needed:
                nodes = with_context(nodes, request)
            if nodes:
                able.append((name, nodes))
        if able:
            return able
        raise self._nobody(request, offered=offered, widest=widest)

    def unsupported_error(self, request: Request) -> errors.GatewayError | None:
        """The 501 of a request whose model's nodes all say that they don't do this; else None."""
        names = request.model_names
        nodes = [node for name in names for node in self.model_index.nodes_for(name)]
        hints = [request.unsupported_hint]
        for node in nodes:
            if node.name not in request.unsupported_nodes and (
                node.supports(request.endpoint)
                and not (request.llama_cpp_only and node.spec.kind == "openai")
            ):
                return None
            hints.append(node.refusal_hints.get(request.endpoint))
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
            if (unsupported := self.unsupported_error(request)) is not None:
                return unsupported
            if request.needs_vision and not request.excluded_nodes:
                return errors.invalid_request(
                    f"No node that serves '{request.model}' reads images.",
                    request.prompt_field or "messages",
                )
            return errors.node_failed(
                f"No node serves '{request.endpoint}' requests for '{request.model}'."
            )
        return self.model_index.not_found_error(request.model)


def _key(name: str, request: Request) -> ServiceKey:
    return name, request.endpoint, request.needs_vision, request.llama_cpp_only


def fits_context(node: Node, request: Request) -> bool:
    """Whether the prompt, as far as it is known, fits into one slot's context."""
    return node.context is None or node.context >= max(request.prompt_tokens, request.min_context)


def with_context(nodes: Sequence[Node], request: Request) -> Sequence[Node]:
    """The nodes whose context fits; if none does, those with the largest, which can say so."""
    fitting = [node for node in nodes if fits_context(node, request)]
    if fitting:
        return fitting
    largest = max((node.context or 0 for node in nodes), default=0)
    return [node for node in nodes if (node.context or 0) == largest]
