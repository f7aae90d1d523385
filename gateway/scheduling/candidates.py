"""Which nodes can serve a request, however busy they are; or the error that says why none can."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway import errors
from gateway.fleet.model_index import DEDICATED_ENDPOINTS, ModelIndex
from gateway.fleet.node import Node
from gateway.lease import LeaseRequest, Tried, WantedNode
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

    def find(self, request: LeaseRequest, tried: Tried) -> NodeCandidates:
        """Where the request may go.

        Raises: GatewayError when no node serves it, or none could ever hold it.
        """
        wanted = request.wanted
        names = wanted.model_names
        if (
            len(names) == 1
            and not tried.excluded_nodes
            and not tried.failed_nodes
            and wanted.resume_key is None
        ):
            # Nearly always: one name, and every node that serves it can take the request.
            # As `_key`, without a call.
            key = (
                names[0],
                wanted.endpoint,
                wanted.needs_vision,
                wanted.llama_cpp_only,
                wanted.node_labels,
            )
            service = self.fleet_sync.services.get(key)
            if service is None or service.version != self.model_index.version:
                service = self.fleet_sync.service(key)
            capable, candidates = service.capable_nodes, service.candidates
            assert capable is not None
            assert candidates is not None
            if (
                capable.nodes
                and request.size.slots <= capable.least_slots
                and request.size.prompt_tokens <= capable.least_context >= tried.min_context
            ):
                return candidates
        by_model = self.nodes_by_model(request, tried)
        groups = tuple(
            tiers
            for name, _ in by_model
            for tiers in self.fleet_sync.service(_key(name, request.wanted)).groups
        )
        excluded = self._excluded(by_model, groups)
        return NodeCandidates(by_model, groups, excluded, *self._failed(by_model, tried))

    def nodes_by_model(self, request: LeaseRequest, tried: Tried) -> NodesByModel:
        """The nodes that can serve the request, by model name. Raises: GatewayError."""
        wanted, is_served = request.wanted, False
        by_model: list[tuple[str, Sequence[Node]]] = []
        most_slots = 0
        resume_key, context = (
            wanted.resume_key,
            max(request.size.prompt_tokens, tried.min_context),
        )
        for name in wanted.model_names:
            capable = self.model_index.capable_nodes(
                name,
                wanted.endpoint,
                vision=wanted.needs_vision,
                native=wanted.llama_cpp_only,
                labels=wanted.node_labels,
            )
            nodes: Sequence[Node] = capable.nodes
            is_served = (
                is_served or bool(nodes) or self.model_index.serves(name, wanted.node_labels)
            )
            if tried.excluded_nodes:
                nodes = [node for node in nodes if node.name not in tried.excluded_nodes]
            if resume_key is not None:
                nodes = [node for node in nodes if node.properties.resume_key() == resume_key]
            if not nodes:
                continue
            if capable.least_slots < request.size.slots:
                most_slots = max(most_slots, *(node.most_slots for node in nodes))
                nodes = [node for node in nodes if node.most_slots >= request.size.slots]
            if nodes and capable.least_context < context:
                nodes = with_context(nodes, context)
            if nodes:
                by_model.append((name, nodes))
        if by_model:
            return by_model
        raise self._no_node_error(request, tried, is_served=is_served, most_slots=most_slots)

    def unsupported_error(self, request: LeaseRequest, tried: Tried) -> errors.GatewayError | None:
        """The 501 of a request whose endpoint no node of its models supports; else None."""
        wanted = request.wanted
        names, labels = wanted.model_names, wanted.node_labels
        nodes = [node for name in names for node in self.model_index.nodes_for(name, labels)]
        hints = [tried.unsupported_hint]
        for node in nodes:
            if node.name not in tried.unsupported_nodes and (
                node.supports(wanted.endpoint)
                and not (wanted.llama_cpp_only and node.spec.kind == "openai")
            ):
                return None
            hints.append(node.refusal_hints.get(wanted.endpoint))
        if not nodes:
            return None
        hint = next((hint for hint in hints if hint is not None), None)
        return errors.not_supported(wanted.endpoint, wanted.feature, wanted.model, hint)

    def _excluded(self, by_model: NodesByModel, groups: ModelGroups) -> Collection[int]:
        """Rows of the candidate sets whose nodes can't hold this request."""
        able = {row.index for _, nodes in by_model for row in self.fleet_sync.rows(nodes)}
        every = {row.index for tiers in groups for candidates in tiers for row in candidates.rows}
        return frozenset(every - able)

    def _failed(
        self, by_model: NodesByModel, tried: Tried
    ) -> tuple[Collection[int], Mapping[int, float]]:
        """Rows that have failed it; penalties for their hosts' other nodes and for trials."""
        failed = tried.failed_nodes
        if not failed:
            return (), NO_ROWS
        nodes = {node for _, nodes in by_model for node in nodes}
        hosts = {node.spec.host for node in nodes if node.name in failed}
        rows, penalties = set(), {}
        for node in nodes:
            for row in self.fleet_sync.rows((node,)):
                if node.name in failed:
                    rows.add(row.index)
                elif node.spec.host in hosts or row.penalty < row.wake:
                    penalties[row.index] = SAME_HOST_PENALTY
        return frozenset(rows), penalties

    def _no_node_error(
        self, request: LeaseRequest, tried: Tried, *, is_served: bool, most_slots: int
    ) -> errors.GatewayError:
        """`most_slots`: of one node, where all have fewer than the request takes; else 0."""
        wanted = request.wanted
        if most_slots:
            return errors.invalid_request(
                f"This request takes {request.size.slots} slots at once, more than any node has "
                f"({most_slots}). Ask for fewer answers.",
                wanted.slots_field,
            )
        if is_served:
            if (unsupported := self.unsupported_error(request, tried)) is not None:
                return unsupported
            if wanted.endpoint not in DEDICATED_ENDPOINTS and self.model_index.awaits_chat_node(
                wanted.model_names
            ):
                return self._not_found(request)
            if wanted.needs_vision and not tried.excluded_nodes:
                return errors.invalid_request(
                    f"No node that serves '{wanted.model}' reads images.",
                    wanted.prompt_field or "messages",
                )
            if tried.excluded_nodes:
                return errors.node_failed("Every node that could serve this request refused it.")
            return errors.node_failed(
                f"No node serves '{wanted.endpoint}' requests for '{wanted.model}'."
            )
        return self._not_found(request)

    def _not_found(self, request: LeaseRequest) -> errors.GatewayError:
        wanted = request.wanted
        return self.model_index.not_found_error(
            wanted.model, wanted.node_labels, wanted.model_names
        )


def _key(name: str, wanted: WantedNode) -> ServiceKey:
    return (
        name,
        wanted.endpoint,
        wanted.needs_vision,
        wanted.llama_cpp_only,
        wanted.node_labels,
    )


def with_context(nodes: Sequence[Node], tokens: int) -> Sequence[Node]:
    """Nodes with a context of so many tokens; if none, the largest: their error names the size."""
    fitting = [node for node in nodes if node.context is None or node.context >= tokens]
    if fitting:
        return fitting
    largest = max((node.context or 0 for node in nodes), default=0)
    return [node for node in nodes if (node.context or 0) == largest]
