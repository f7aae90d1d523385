"""Which nodes serve a model, and where they differ.

**Differences.** Compared is what llama.cpp servers report: quantisation, build, context and chat
template. A stream is resumed only on a node with the same file, quantisation, template and build,
so a difference also says which nodes can't take over from each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from gateway import errors
from gateway.catalog import ServerFigures
from gateway.config.keys import NodeLabels, has_labels
from gateway.nodes.node import Node, NodeState
from gateway.nodes.server_properties import ServerProperties
from gateway.terms import Endpoint

# Endpoints that servers are started for, and which those of another purpose refuse.
DEDICATED_ENDPOINTS: frozenset[Endpoint] = frozenset({"embeddings", "rerank"})


class _Names(NamedTuple):
    """The public names of models, and who serves them."""

    serving: dict[str, tuple[Node, ...]]
    names: tuple[str, ...]  # the keys of `serving`
    nameless: list[Node]  # nodes of which no model is known
    aliases: dict[str, str]
    links: dict[str, str]
    paused: frozenset[str]


class ModelIndex:
    """The nodes by the models that they serve."""

    def __init__(self) -> None:
        self.version = 0  # goes up whenever the result of a lookup may have changed
        self._nodes: tuple[Node, ...] = ()
        self._known: _Names | None = None  # None: to be found anew
        self.paused_by_name: frozenset[str] = frozenset()
        """Public model names that an operator has paused."""

    def set_paused(self, names: frozenset[str]) -> None:
        """An operator has paused these public model names, and no others."""
        self.paused_by_name = names
        self.models_changed()

    @property
    def paused(self) -> frozenset[str]:
        """`paused_by_name`, and all names of the same models at every node that serves them."""
        return self._index().paused if self.paused_by_name else self.paused_by_name

    @property
    def aliases(self) -> Mapping[str, str]:
        """For names that all nodes which serve them give to one model: its own name."""
        return self._index().aliases

    @property
    def links(self) -> Mapping[str, str]:
        """For names of models that have several, one of them."""
        return self._index().links

    @property
    def silent(self) -> list[Node]:
        """The nodes that have never said what they serve."""
        return [node for node in self._nodes if node.models_unknown]

    @property
    def node_count(self) -> int:
        """All nodes."""
        return len(self._nodes)

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """Index these nodes."""
        self._nodes = tuple(nodes)
        self.models_changed()

    def models_changed(self) -> None:
        """A node serves other models than before."""
        self._known = None
        self.node_changed()

    def node_changed(self) -> None:
        """A node may be able to do more or less than before."""
        self.version += 1

    def capable_nodes(
        self, model: str, endpoint: Endpoint, *, vision: bool, native: bool, labels: NodeLabels = ()
    ) -> tuple[Node, ...]:
        """The nodes, down or not, that serve this public model name and this endpoint.

        `native`: a llama.cpp path of its own, which other servers do not have. `labels`: those of
        the pool; empty: all nodes. So it is everywhere here.
        """
        dedicated_too = endpoint in DEDICATED_ENDPOINTS or not (
            self._has_chat_node(model) or self.may_grow()
        )
        nodes = self.nodes_for(model, labels)
        # Its work is learnt when it wakes: not by a chat, while another node takes chats.
        leaves_sleepers = endpoint not in DEDICATED_ENDPOINTS and any(
            node.is_for_chat and node.is_alive and not _may_be_for_other_work(node)
            for node in nodes
        )
        return tuple(
            node
            for node in nodes
            if node.supports(endpoint, vision=vision)
            and (dedicated_too or node.is_for_chat)
            and not (leaves_sleepers and _may_be_for_other_work(node))
            and not (native and node.spec.kind == "openai")
        )

    def awaits_chat_node(self, models: Iterable[str]) -> bool:
        """Whether none of the models' nodes is for chats, but one may yet turn up."""
        return self.may_grow() and not any(map(self._has_chat_node, models))

    def _has_chat_node(self, model: str) -> bool:
        """Whether a node is for chats of this model, down or not."""
        return any(node.is_for_chat for node in self.nodes_for(model))

    def may_grow(self) -> bool:
        """Whether a node may yet report any model; one that is down or drained does not count."""
        return any(
            node.models_unknown and not node.probe_history.down and not node.draining
            for node in self._index().nameless
        )

    def model_names(self, labels: NodeLabels = ()) -> tuple[str, ...]:
        """The public model names that nodes serve, declared or reported, down or not."""
        names = (self._known or self._index()).names
        return tuple(name for name in names if self.serves(name, labels)) if labels else names

    def one_name_each(self, names: Sequence[str]) -> tuple[str, ...]:
        """Of the names that servers give to one model: the one that most nodes serve."""
        known, found = self._index(), dict[str, str]()
        for name in names:
            first = found.setdefault(known.links.get(name, name), name)
            if len(known.serving.get(name, ())) > len(known.serving.get(first, ())):
                found[known.links[name]] = name
        return tuple(found.values())

    def serves(self, model: str, labels: NodeLabels = ()) -> bool:
        """Whether some node serves this public model name, down or not."""
        if labels:
            return bool(self.nodes_for(model, labels))
        return model in (self._known or self._index()).serving

    def may_serve(self, model: str) -> bool:
        """Whether some node serves this public model name, or may yet report that it does.

        A node that is down or drained and has never reported its models does not count.
        """
        return self.serves(model) or self.may_grow()

    def nodes_for(self, model: str, labels: NodeLabels = ()) -> tuple[Node, ...]:
        """The nodes that serve this public model name, down or not."""
        nodes = self._index().serving.get(model, ())
        return _with_labels(nodes, labels) if labels else nodes

    def servers_of(self, models: Iterable[str], labels: NodeLabels = ()) -> list[ServerFigures]:
        """The servers of any of these models, down or not, each once."""
        nodes = dict.fromkeys(node for model in models for node in self.nodes_for(model, labels))
        return [server_figures(node) for node in nodes]

    def not_found_error(
        self, model: str | None, labels: NodeLabels = (), targets: Sequence[str] = ()
    ) -> errors.GatewayError:
        """Why no node can serve this model name; None: the request names no model.

        `targets`: the models that it stands for.
        While a node has not reported its models, it may serve this one.
        """
        nodes = _with_labels(self._nodes, labels) if labels else self._nodes
        if silent := [node for node in nodes if node.models_unknown]:
            states = [(node.name, node.state.value, node.reason) for node in silent]
            return errors.no_node_reported(model, states, len(nodes), targets)
        if model is None:
            return errors.invalid_request("'model' is missing, and there is none to use.", "model")
        return errors.model_not_found(model, list(self.model_names(labels)), targets)

    def _index(self) -> _Names:
        if self._known is None:
            self._known = _find_names(self._nodes, self.paused_by_name)
        return self._known


def _find_names(nodes: Iterable[Node], paused: frozenset[str]) -> _Names:
    serving = defaultdict[str, list[Node]](list)
    own_names = defaultdict[str, set[str]](set)
    open_names, nameless = set[str](), list[Node]()
    for node in nodes:
        # In the node's own order, so that lists of models are stable.
        declared, properties = node.spec.models, node.properties
        models = properties.names if declared is None else declared
        if not (models and node.spec.enabled) or node.is_router:
            if not node.instances:
                nameless.append(node)
            continue
        aliases = properties.aliases if declared is None else {}
        for model in models:
            serving[model].append(node)
            own_names[model].add(aliases.get(model, model))
        if paused:
            closed = {aliases.get(model, model) for model in paused.intersection(models)}
            open_names.update(one for one in models if aliases.get(one, one) not in closed)
    return _Names(
        {model: tuple(nodes) for model, nodes in serving.items()},
        tuple(serving),
        nameless,
        {
            name: next(iter(owns))
            for name, owns in own_names.items()
            if len(owns) == 1 and name not in owns
        },
        _link_names(own_names),
        paused | (serving.keys() - open_names),
    )


def server_figures(node: Node, *, is_up: bool | None = None) -> ServerFigures:
    """The node's server, as the public edge may know it; `is_up` None: as it is."""
    return ServerFigures(
        slots=node.slots_total,
        context=node.context,
        trained_context=node.properties.trained_context,
        has_vision=_has_vision(node),
        has_audio=node.properties.audio is True,
        has_video=node.properties.video is True,
        endpoints=_known_endpoints(node),
        is_up=node.is_alive if is_up is None else is_up,
        on_gpu=node.spec.tier == "gpu",
        parameters=node.properties.n_params,
        size=node.properties.size,
        quantization=node.properties.ftype,
        file=node.properties.file,
    )


def _link_names(own_names: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """For each name of a model with several names the same one of them."""
    links: dict[str, str] = {}

    def end(name: str) -> str:
        while (further := links.get(name, name)) != name:
            links[name] = links.get(further, further)
            name = further
        return name

    for name, owns in own_names.items():
        for own in owns:
            if own != name:
                links[end(name)] = end(own)
    return {name: end(name) for name in tuple(links)} | {end(name): end(name) for name in links}


def _with_labels(nodes: Iterable[Node], labels: NodeLabels) -> tuple[Node, ...]:
    return tuple(node for node in nodes if has_labels(node.spec.labels, labels))


def _may_be_for_other_work(node: Node) -> bool:
    return node.state is NodeState.SLEEPING and node.is_purpose_unknown


def _known_endpoints(node: Node) -> frozenset[str]:
    if node.spec.endpoints is not None:
        return frozenset(node.spec.endpoints)
    found = {"embeddings" if "chat" in node.properties.refused else "chat"}
    if not node.is_for_chat:
        found.add(str(node.properties.purpose))
    return frozenset(found | {"vision"} if _has_vision(node) else found)


def _has_vision(node: Node) -> bool:
    if node.spec.endpoints is not None:
        return "vision" in node.spec.endpoints
    return node.properties.vision is True and "vision" not in node.properties.refused


MOST_MODELS = 100
MOST_VALUES, MOST_NAMES = 8, 8  # values of one property, and nodes of one value, that are named

_WORDS = {
    "quantisation": "quantisation",
    "build": "build of llama.cpp",
    "context": "context of a slot",
    "template": "chat template",
}


@dataclass(frozen=True, slots=True)
class ComparedServer:
    """A node's server, as far as it is compared."""

    node: str
    models: tuple[str, ...]
    context: int | None  # tokens of one slot
    properties: ServerProperties


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """One property in which nodes that serve one model differ."""

    model: str
    what: str  # `quantisation`, `build`, `context` or `template`
    nodes_by_value: Mapping[str, tuple[str, ...]]
    """The nodes of each value, the most frequent value first."""

    def in_words(self) -> str:
        """For a log line or a table."""
        values = list(self.nodes_by_value.items())
        told = [f"{value} on {_names(nodes)}" for value, nodes in values[:MOST_VALUES]]
        if len(values) > MOST_VALUES:
            told.append(f"{len(values) - MOST_VALUES} more")
        return f"{self.model}: {_WORDS[self.what]}: {'; '.join(told)}"


def model_differences(servers: Iterable[ComparedServer]) -> tuple[ModelDifference, ...]:
    """The differences, by model and property. What a server has not reported is left out."""
    # Of a thousand servers most are alike: those are compared once, for each of their models.
    alike = defaultdict[tuple[tuple[str, ...], _Values], list[str]](list)
    for server in servers:
        alike[server.models, _values(server)].append(server.node)
    compared: dict[str, dict[str, dict[str, list[str]]]] = {}  # model, property, value: nodes
    for (models, values), nodes in alike.items():
        for model in models:
            properties = compared.setdefault(model, {what: {} for what in _WORDS})
            for by_value, value in zip(properties.values(), values, strict=True):
                if value is not None:
                    by_value.setdefault(value, []).extend(nodes)
    found = (
        [
            ModelDifference(model, what, _most_frequent_first(by_value))
            for what, by_value in properties.items()
            if len(by_value) > 1
        ]
        for model, properties in compared.items()
    )
    return tuple(chain.from_iterable(islice(filter(None, found), MOST_MODELS)))


def _most_frequent_first(nodes_by_value: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    ranked = sorted(nodes_by_value.items(), key=lambda one: -len(one[1]))
    return {value: tuple(nodes) for value, nodes in ranked}


_Values = tuple[str | None, str | None, str | None, str | None]


def _values(server: ComparedServer) -> _Values:
    """In the order of `_WORDS`; None: not reported."""
    properties = server.properties
    context = None if server.context is None else f"{server.context} tokens"
    return properties.ftype, properties.build, context, properties.template


def _names(nodes: tuple[str, ...]) -> str:
    more = len(nodes) - MOST_NAMES
    return ", ".join(nodes[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
