"""What an edge knows of keys and models: taken from the brain's, whenever those change."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from gateway import errors
from gateway.callers.keys import HeldKey, KeyRing
from gateway.catalog import ServerFigures
from gateway.config.keys import CacheSpec, LimitSpec, NodeLabels, has_labels
from gateway.edges.messages import KeyOnWire, Keys, Models, ServerGroup
from gateway.errors import GatewayError
from gateway.nodes.model_index import ModelIndex, server_figures
from gateway.nodes.node import Node
from gateway.terms import Caller

MOST_KEYS_TOLD = 500  # keys of one message
MOST_SILENT_TOLD = 16  # nodes that have not said what they serve, which errors name
LOOK_SECONDS = 2.0  # seconds between two looks at figures of servers, which change often


# Keys.


class KeySnapshots:
    """Tells an edge of the keys in a ring, as far as they have changed since the last call."""

    def __init__(self, ring: KeyRing, wall_clock: Callable[[], float] = time.time) -> None:
        self._ring, self._wall_clock = ring, wall_clock
        self._told: dict[str, HeldKey] = {}
        self._version: int | None = None

    def changes(self) -> Iterator[Keys]:
        """What the edge does not know yet, in one message or several."""
        ring = self._ring
        if ring.version == self._version:
            return
        self._version, held, told = ring.version, ring.held(), self._told
        gone = tuple(id_ for id_ in told if id_ not in held)
        changed = [key for id_, key in held.items() if told.get(id_) != key]
        self._told, now = dict(held), self._wall_clock()
        for begin in range(0, len(changed) or 1, MOST_KEYS_TOLD):
            some = changed[begin : begin + MOST_KEYS_TOLD]
            yield Keys(
                tuple([key_on_wire(key, now) for key in some]),
                () if begin else gone,
                ring.is_complete,
                ring.access,
                last=begin + MOST_KEYS_TOLD >= len(changed),
            )


class KeyCopies:
    """The keys that an edge was told of, and the ring that holds them."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self.ring = KeyRing(is_complete=False, clock=wall_clock)
        self._wall_clock = wall_clock
        self._keys: dict[str, HeldKey] = {}

    def begin_anew(self) -> None:
        """Another brain tells of all keys from now on. Until then the ring stays as it is."""
        self._keys = {}

    def take(self, message: Keys) -> None:
        """Take in a message; the ring follows with the last of several."""
        for id_ in message.gone:
            self._keys.pop(id_, None)
        now = self._wall_clock()
        self._keys.update((key.id, _held(key, now)) for key in message.keys)
        if message.last:
            self.ring.follow(
                self._keys.values(), access=message.access, is_complete=message.is_complete
            )


def key_on_wire(key: HeldKey, now: float) -> KeyOnWire:
    """A key as it is sent at this Unix time."""
    caller, is_rotated = key.caller, key.previous_until is not None
    specs = (caller.limits, caller.user_limits, caller.cache)
    limits, user_limits, cache = (
        None if spec is None else spec.model_dump(mode="json", exclude_none=True) for spec in specs
    )
    return KeyOnWire(
        key.id, caller.name, key.digest, caller.max_priority, caller.default_priority,
        caller.models, caller.trust_user_headers, caller.group, (limits, user_limits, cache),
        _left(key.expires_at, now),
        key.previous if is_rotated else None,
        _left(key.previous_until, now),
    )  # fmt: skip


def _held(key: KeyOnWire, now: float) -> HeldKey:
    limits, user_limits, cache = key.specs
    caller = Caller(
        key.id,
        key.name,
        key.max_priority,
        key.models,
        trust_user_headers=key.trust_user_headers,
        default_priority=key.default_priority,
        group=key.group,
        limits=None if limits is None else LimitSpec.model_validate(limits),
        user_limits=None if user_limits is None else LimitSpec.model_validate(user_limits),
        cache=None if cache is None else CacheSpec.model_validate(cache),
    )
    held = HeldKey(key.id, caller, key.digest, _moment(key.expires_in, now))
    if key.previous is None:
        return held
    return HeldKey(
        key.id, caller, key.digest, held.expires_at, key.previous, _moment(key.previous_for, now)
    )


def _left(moment: float | None, now: float) -> float | None:
    return None if moment is None else moment - now


def _moment(left: float | None, now: float) -> float | None:
    return None if left is None else now + left


# Models.


NO_MODELS = Models((), {}, {}, frozenset(), (), (), may_grow=True, nodes=0, most_slots_of_a_host=0)


class ModelSnapshots:
    """The models that nodes serve, as all edges are told of them: made once for all."""

    def __init__(
        self, index: ModelIndex, most_slots: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        """`most_slots`: of a host."""
        self._index, self._most_slots, self._clock = index, most_slots, clock
        self._models = NO_MODELS
        self._of: tuple[object, frozenset[str]] | None = None
        self._version: int | None = None
        self._looked_at = 0.0

    def current(self) -> Models:
        """What an edge must know: the same object until something of it changes."""
        index, now = self._index, self._clock()
        of = index.aliases, index.paused
        is_same = self._of is not None and self._of[0] is of[0] and self._of[1] == of[1]
        # If no model has come or gone, other figures need not be told at once.
        looks_late = index.version == self._version or now - self._looked_at < LOOK_SECONDS
        if not (is_same and looks_late):
            self._of, self._version, self._looked_at = of, index.version, now
            models = models_of(index, self._most_slots())
            if models != self._models:
                self._models = models
        return self._models


def models_of(index: ModelIndex, most_slots: int) -> Models:
    """The models of an index as they are told. Whether a server is up is not: that is no use."""
    names = index.model_names()
    served: dict[Node, list[str]] = defaultdict(list)
    for name in names:
        for node in index.nodes_for(name):
            served[node].append(name)
    alike = Counter(
        (tuple(models), tuple(sorted(node.spec.labels.items())), server_figures(node, is_up=True))
        for node, models in served.items()
    )
    return Models(
        names,
        dict(index.aliases),
        dict(index.links),
        index.paused,
        tuple([ServerGroup(*group, count) for group, count in alike.items()]),
        tuple(
            (tuple(node.spec.labels.items()), node.name, node.state.value, node.reason)
            for node in islice(index.silent, MOST_SILENT_TOLD)
        ),
        index.may_grow(),
        index.node_count,
        most_slots,
    )


class ModelCopies:
    """The models that nodes serve, as an edge was told last; answers as `ServedModels`."""

    def __init__(self) -> None:
        self._models = NO_MODELS
        self._groups: dict[str, list[ServerGroup]] = {}

    def take(self, models: Models) -> None:
        """What nodes serve has changed."""
        self._models, self._groups = models, defaultdict(list)
        for group in models.groups:
            for name in group.models:
                self._groups[name].append(group)

    @property
    def paused(self) -> frozenset[str]:
        """Public model names that an operator has paused, and other names of such models."""
        return self._models.paused

    @property
    def aliases(self) -> Mapping[str, str]:
        """For names that all nodes which serve them give to one model: its own name."""
        return self._models.aliases

    def model_names(self, labels: NodeLabels = ()) -> tuple[str, ...]:
        """The public model names that nodes serve, declared or reported, down or not."""
        names = self._models.names
        return tuple(name for name in names if self.serves(name, labels)) if labels else names

    def one_name_each(self, names: Sequence[str]) -> tuple[str, ...]:
        """Of the names that servers give to one model: the one that most nodes serve."""
        links, found = self._models.links, dict[str, str]()
        for name in names:
            first = found.setdefault(links.get(name, name), name)
            if self._nodes_of(name) > self._nodes_of(first):
                found[links[name]] = name
        return tuple(found.values())

    def serves(self, model: str, labels: NodeLabels = ()) -> bool:
        """Whether some node serves this public model name, down or not."""
        return bool(self._groups_of(model, labels))

    def may_serve(self, model: str) -> bool:
        """Whether some node serves this public model name, or may yet report that it does."""
        return self._models.may_grow or self.serves(model)

    def not_found_error(
        self, model: str | None, labels: NodeLabels = (), targets: Sequence[str] = ()
    ) -> GatewayError:
        """Why no node can serve this model name; None: the request names no model."""
        count = self._models.nodes
        silent = [one[1:] for one in self._models.silent if has_labels(dict(one[0]), labels)]
        if silent:
            return errors.no_node_reported(model, silent, count, targets)
        if model is None:
            return errors.invalid_request("'model' is missing, and there is none to use.", "model")
        if labels:
            groups = self._models.groups
            count = sum(one.count for one in groups if has_labels(dict(one.labels), labels))
        return errors.model_not_found(model, list(self.model_names(labels)), labels, count, targets)

    def servers_of(self, models: Iterable[str], labels: NodeLabels = ()) -> list[ServerFigures]:
        """The servers of any of these models, down or not: one of those that are alike."""
        groups = dict.fromkeys(group for name in models for group in self._groups_of(name, labels))
        return [group.figures for group in groups]

    def _groups_of(self, model: str, labels: NodeLabels = ()) -> list[ServerGroup]:
        groups = self._groups.get(model, [])
        return [one for one in groups if has_labels(dict(one.labels), labels)] if labels else groups

    def _nodes_of(self, model: str) -> int:
        return sum(group.count for group in self._groups_of(model))
