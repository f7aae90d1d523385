"""Which nodes can serve a request, however busy they are; or the error that says why none can."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway import errors
from gateway.fleet.model_index import ModelIndex
from gateway.fleet.node import Node
from gateway.request import Request
from gateway.scheduling.fleet_sync import (
    FleetSync,
    ModelGroups,
    NodeCandidates,
    NodesByModel,
    ServiceKey,
)
from gateway.scheduling.node_slots import NO_ROWS

SAME_HOST_PENALTY = 1e5
"""Seconds by which the other nodes of a host look slower to a request that failed on one: so many
that it goes to another host that has room, however slow. So does a node that needs a request on
trial: this request has been tried enough."""


@dataclass(slots=True, eq=False)
class CandidateFinder:
    """Finds a request's candidates in the model index."""

    model_index: ModelIndex
    fleet_sync: FleetSync

    def find(self, request: Request) -> NodeCandidates:
        """Where the request may go.

        Raises: GatewayError when no node serves it, or none could ever hold it.
        """
        names = request.model_names
        if len(names) == 1 and not request.excluded_nodes and not request.failed_nodes:
            # Nearly always: one name, and every node that serves it can take the request.
            service = self.fleet_sync.service(_key(names[0], request))
            capable = service.capable_nodes
            assert capable is not None
            if (
                capable.nodes
                and request.slots <= capable.least_slots
                and request.prompt_tokens <= capable.least_context >= request.min_context
            ):
                return service.candidates
        by_model = self.nodes_by_model(request)
        groups = tuple(
            tiers
            for name, _ in by_model
            for tiers in self.fleet_sync.service(_key(name, request)).groups
        )
        excluded = self._excluded(by_model, groups)
        return NodeCandidates(by_model, groups, excluded, *self._failed(by_model, request))

    def nodes_by_model(self, request: Request) -> NodesByModel:
        """The nodes that can serve the request, by model name. Raises: GatewayError."""
        is_served = False
        by_model: list[tuple[str, Sequence[Node]]] = []
        most_slots = 0
        context = max(request.prompt_tokens, request.min_context)
        for name in request.model_names:
            capable = self.model_index.capable_nodes(
                name, request.endpoint, vision=request.needs_vision, native=request.llama_cpp_only
            )
            nodes: Sequence[Node] = capable.nodes
            is_served = is_served or bool(nodes) or self.model_index.serves(name)
            if request.excluded_nodes:
                nodes = [node for node in nodes if node.name not in request.excluded_nodes]
            if not nodes:
                continue
            if capable.least_slots < request.slots:
                most_slots = max(most_slots, *(node.most_slots for node in nodes))
                nodes = [node for node in nodes if node.most_slots >= request.slots]
            if nodes and capable.least_context < context:
                nodes = with_context(nodes, request)
            if nodes:
                by_model.append((name, nodes))
        if by_model:
            return by_model
        raise self._no_node_error(request, is_served=is_served, most_slots=most_slots)

    def unsupported_error(self, request: Request) -> errors.GatewayError | None:
        """The 501 of a request whose endpoint no node of its models supports; else None."""
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

    def _excluded(self, by_model: NodesByModel, groups: ModelGroups) -> Collection[int]:
        """Rows of the candidate sets whose nodes can't hold this request."""
        able = {row.index for _, nodes in by_model for row in self.fleet_sync.rows(nodes)}
        every = {row.index for tiers in groups for candidates in tiers for row in candidates.rows}
        return frozenset(every - able)

    def _failed(
        self, by_model: NodesByModel, request: Request
    ) -> tuple[Collection[int], Mapping[int, float]]:
        """Rows that have failed it; penalties for their hosts' other nodes and for trials."""
        failed = request.failed_nodes
        if not failed:
            return (), NO_ROWS
        nodes = {node for _, nodes in by_model for node in nodes}
        hosts = {node.spec.host for node in nodes if node.name in failed}
        rows, penalties = set(), {}
        for node in nodes:
            for row in self.fleet_sync.rows((node,)):
                if node.name in failed:
                    rows.add(row.index)
                elif node.spec.host in hosts or row.penalty < 0:
                    penalties[row.index] = SAME_HOST_PENALTY
        return frozenset(rows), penalties

    def _no_node_error(
        self, request: Request, *, is_served: bool, most_slots: int
    ) -> errors.GatewayError:
        """`most_slots`: of one node, where all have fewer than the request takes; else 0."""
        if most_slots:
            body = next(iter(request.bodies.values()), b"")
            return errors.invalid_request(
                f"This request takes {request.slots} slots at once, more than any node has "
                f"({most_slots}). Ask for fewer answers.",
                "n_cmpl" if b'"n_cmpl"' in body else "n",
            )
        if is_served:
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
    """Whether the prompt, as far as its size is known, fits into one slot's context."""
    return node.context is None or node.context >= max(request.prompt_tokens, request.min_context)


def with_context(nodes: Sequence[Node], request: Request) -> Sequence[Node]:
    """The nodes whose context the prompt fits; if none, the largest: their error names the size."""
    fitting = [node for node in nodes if fits_context(node, request)]
    if fitting:
        return fitting
    largest = max((node.context or 0 for node in nodes), default=0)
    return [node for node in nodes if (node.context or 0) == largest]
