"""Who serves what: asked by every request, so kept until something changes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gateway import errors
from gateway.fleet.node import Node, NodeState
from gateway.request import Endpoint

MOST_CACHED_LOOKUPS = 10_000


@dataclass(frozen=True, slots=True)
class CapableNodes:
    """Nodes that may be asked for one thing, and the least that all of them have."""

    nodes: tuple[Node, ...]
    least_slots: int
    least_context: float
    """Tokens of one slot; infinite where no node tells."""
    by_model: tuple[tuple[str, tuple[Node, ...]], ...]
    """The nodes with the name that they are asked for, as the scheduler wants them."""

    @classmethod
    def of(cls, model: str, nodes: Iterable[Node]) -> CapableNodes:
        """What these nodes have in common."""
        found = tuple(nodes)
        return cls(
            found,
            min((node.slots_total for node in found), default=0),
            min((node.context or math.inf for node in found), default=math.inf),
            ((model, found),),
        )


class ModelIndex:
    """The nodes by what they serve."""

    def __init__(self) -> None:
        self.version = 0
        """Goes up whenever an offering may have changed."""
        self._nodes: tuple[Node, ...] = ()
        self._serving: dict[str, tuple[Node, ...]] | None = None
        self._nameless: tuple[Node, ...] = ()
        """Nodes of which no name is known; as old as `_serving`."""
        self._offerings: dict[tuple[str, str, bool, bool], CapableNodes] = {}

    # What makes it look again.

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """These are the nodes now."""
        self._nodes = tuple(nodes)
        self.models_changed()

    def models_changed(self) -> None:
        """A node serves other models than before."""
        self._serving = None
        self.node_changed()

    def node_changed(self) -> None:
        """A node may offer something else than before."""
        self.version += 1
        self._offerings.clear()

    # What it tells.

    def capable_nodes(
        self, model: str, endpoint: Endpoint, *, vision: bool, native: bool
    ) -> CapableNodes:
        """The nodes that serve this public name and may be asked this, down or not."""
        key = (model, endpoint, vision, native)
        found = self._offerings.get(key)
        if found is None:
            found = CapableNodes.of(
                model,
                (
                    node
                    for node in self.nodes_for(model)
                    if node.supports(endpoint, vision=vision)
                    and not (native and node.spec.kind == "openai")
                ),
            )
            # A name that nobody serves is the client's own, of any length.
            if self.serves(model) and len(self._offerings) < MOST_CACHED_LOOKUPS:
                self._offerings[key] = found
        return found

    def model_names(self) -> tuple[str, ...]:
        """The public names that nodes serve, declared or said, down or not."""
        return tuple(self._index())

    def serves(self, model: str) -> bool:
        """Whether some node serves this public name, down or not."""
        return model in (self._serving or self._index())

    def may_serve(self, model: str) -> bool:
        """Whether some node serves this public name, or is about to say what it serves.

        One that is down and has never said it is not waited for.
        """
        return self.serves(model) or any(
            node.models_unknown and node.state is not NodeState.DOWN for node in self._nameless
        )

    def nodes_for(self, model: str) -> tuple[Node, ...]:
        """The nodes that serve this public name, down or not."""
        return self._index().get(model, ())

    def not_found_error(self, model: str | None) -> errors.GatewayError:
        """Why no node can be asked for this name; None: for whatever there is.

        While a node has never said what it serves, it may be this.
        """
        if silent := [node for node in self._nodes if node.models_unknown]:
            told = [(node.name, node.state.value, node.reason) for node in silent]
            return errors.no_node_reported(model, told, len(self._nodes))
        if model is None:
            return errors.invalid_request("'model' is missing, and there is none to use.", "model")
        return errors.model_not_found(model, list(self.model_names()))

    def _index(self) -> dict[str, tuple[Node, ...]]:
        if self._serving is None:
            serving: dict[str, list[Node]] = {}
            for node in self._nodes:
                if node.spec.enabled:
                    # In the node's own order, so that lists of models keep still.
                    models = (
                        node.properties.models if node.spec.models is None else node.spec.models
                    )
                    for model in models:
                        serving.setdefault(model, []).append(node)
            self._serving = {model: tuple(nodes) for model, nodes in serving.items()}
            named = set().union(*self._serving.values())
            self._nameless = tuple(node for node in self._nodes if node not in named)
        return self._serving
