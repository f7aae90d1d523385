"""What an edge knows of keys and models is what the brain knows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from gateway.callers.keys import AnonymousAccess, KeyRing, hash_key, held_key
from gateway.config.keys import KeySpec
from gateway.edges.messages import (
    LOOK_SECONDS,
    MOST_KEYS_TOLD,
    KeyCopies,
    Keys,
    KeySnapshots,
    ModelCopies,
    Models,
    ModelSnapshots,
)
from gateway.nodes.model_index import ModelIndex
from gateway.nodes.node import Node
from gateway.nodes.server_properties import ServerProperties
from gateway.terms import Priority
from tests.nodes.build import Clock, a_node

NOW = 1_790_000_000.0


def secret(name: str) -> str:
    return f"lg_{name}_{name * 20}"


def a_key(id_: str, **keys: Any) -> KeySpec:
    return KeySpec.model_validate({"id": id_, "sha256": hash_key(secret(id_)).sha256, **keys})


class Rings:
    """The brain's ring and an edge's, whose wall clocks differ by a minute."""

    def __init__(self) -> None:
        self.clock, self.theirs = Clock(NOW), Clock(NOW + 60.0)
        self.ring = KeyRing(clock=self.clock)
        self.snapshots = KeySnapshots(self.ring, self.clock)
        self.copies = KeyCopies(self.theirs)

    def tell(self) -> list[Keys]:
        """Tell what has changed; returns it as it was sent."""
        sent = [
            msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Keys)
            for message in self.snapshots.changes()
        ]
        for message in sent:
            self.copies.take(message)
        return sent


def test_keys_and_access_are_the_same_at_an_edge() -> None:
    rings = Rings()
    spec = a_key(
        "alice", name="Alice", max_class="premium", models=["a", "b"], group="team",
        limits={"rpm": 7, "budget": "5/day"}, user_limits={"tpm": 9}, trust_user_headers=True,
        **{"class": "batch"},
    )  # fmt: skip
    rings.ring.configure([spec])
    rings.tell()
    ring = rings.copies.ring
    found = ring.find(secret("alice"))
    assert found == rings.ring.find(secret("alice"))
    assert found is not None
    assert (found.max_priority, found.default_priority) == (Priority.PREMIUM, Priority.BATCH)
    assert found.limits is not None
    assert ring.find(secret("bob")) is None
    access = AnonymousAccess(had_keys=True, locked=True)
    for complete in (True, False):
        rings.ring.follow([], access=access, is_complete=complete)
        rings.tell()
        assert (ring.access, ring.is_complete) == (access, complete)


def test_only_changes_are_told_in_messages_of_a_bounded_size() -> None:
    rings = Rings()
    many = [a_key(f"k{number}") for number in range(2 * MOST_KEYS_TOLD + 1)]
    rings.ring.configure(many)
    assert [message.last for message in rings.tell()] == [False, False, True]
    ring = rings.copies.ring
    assert len(ring) == len(many)
    assert rings.tell() == []
    rings.ring.configure([*many[3:], a_key("k1", models=["m"]), a_key("new")])
    (sent,) = rings.tell()
    assert {key.id for key in sent.keys} == {"k1", "new"}
    assert set(sent.gone) == {"k0", "k2"}
    found = [ring.caller(id_) is not None for id_ in ("k0", "k1", "k2", "k3", "new")]
    assert found == [False, True, False, True, True]


def test_a_key_ends_after_the_same_time_whatever_the_edges_wall_clock_says() -> None:
    rings = Rings()
    expires = datetime.fromtimestamp(NOW + 100.0, UTC).isoformat()
    rings.ring.configure([a_key("alice", expires=expires)])
    rotated = held_key(a_key("bob"), hash_key(secret("old")).sha256, NOW + 50.0)
    rings.ring.replace_stored([rotated])
    rings.tell()
    ring = rings.copies.ring
    old = secret("old").replace("lg_old_", "lg_bob_")
    for passed, alice, previous in ((49.0, True, True), (51.0, True, False), (101.0, False, False)):
        rings.theirs.now = NOW + 60.0 + passed
        ring.expire()
        assert (ring.find(secret("alice")) is not None) is alice, passed
        assert (ring.find(old) is not None) is previous, passed
    assert ring.has_expired(secret("alice"))
    assert ring.find(secret("bob")) is not None


# Models.


def a_server(name: str, *models: str, labels: dict[str, str] | None = None, **keys: Any) -> Node:
    one = a_node(name=name, url=f"http://{name}:1", labels=labels or {}, **keys)
    one.properties = ServerProperties(models=models)
    return one


class Indexes:
    """The brain's index and what an edge knows of it."""

    def __init__(self, *nodes: Node) -> None:
        self.clock, self.index = Clock(), ModelIndex()
        self.index.set_nodes(nodes)
        self.snapshots = ModelSnapshots(self.index, lambda: 3, self.clock)
        self.copy = ModelCopies()
        self._told: Models | None = None

    def tell(self) -> bool:
        """Tell what has changed; whether anything has."""
        told, self._told = self._told, self.snapshots.current()
        if self._told is told:
            return False
        data = msgspec.msgpack.encode(self._told)
        self.copy.take(msgspec.msgpack.decode(data, type=Models))
        return True


LEFT, RIGHT, NOWHERE = (("side", "left"),), (("side", "right"),), (("side", "up"),)


@pytest.mark.parametrize("silent", [False, True])
def test_an_edge_answers_as_the_index_does(silent: bool) -> None:
    left: dict[str, Any] = {"labels": {"side": "left"}, "context": 4096}
    fleet = [
        a_server("a", "m", "m-latest", **left),
        *(a_server(f"b{number}", "m", **left) for number in range(50)),
        a_server("c", "m", "other", labels={"side": "right"}, context=8192),
        a_server("d", model={"declared": "declared.gguf"}),
    ]
    if silent:  # One that has said nothing may serve any model.
        fleet.append(a_node(name="s", url="http://s:1"))
    indexes = Indexes(*fleet)
    indexes.index.set_paused(frozenset({"other"}))
    assert indexes.tell()
    index, copy = indexes.index, indexes.copy
    assert (copy.paused, copy.aliases) == (index.paused, index.aliases)
    for labels in ((), LEFT, RIGHT, NOWHERE):
        assert copy.model_names(labels) == index.model_names(labels)
        for name in ("m", "m-latest", "other", "declared", "nobody"):
            assert copy.serves(name, labels) == index.serves(name, labels)
            assert copy.may_serve(name) == index.may_serve(name)
            ours = [one.context for one in copy.servers_of([name], labels)]
            assert set(ours) == {one.context for one in index.servers_of([name], labels)}
            assert len(ours) < 5, "servers that are alike are told once"
            told, known = copy.not_found_error(name, labels), index.not_found_error(name, labels)
            assert (told.status, told.message) == (known.status, known.message)
            assert told.reveal_nodes().message == known.reveal_nodes().message
    names = ("m", "m-latest", "other")
    assert copy.one_name_each(names) == index.one_name_each(names)
    assert copy.not_found_error(None).message == index.not_found_error(None).message


def test_new_models_are_told_at_once_and_other_figures_somewhat_later() -> None:
    one = a_server("a", "m")
    indexes = Indexes(one)
    assert indexes.tell()
    assert not indexes.tell()
    one.properties = ServerProperties(models=("m", "n"))
    indexes.index.models_changed()
    assert indexes.tell()
    assert indexes.copy.serves("n")
    one.properties = ServerProperties(models=("m", "n"), context=512)
    indexes.index.node_changed()
    assert not indexes.tell()
    indexes.clock.passes(LOOK_SECONDS)
    assert indexes.tell()
    assert indexes.copy.servers_of(["m"])[0].context == 512
    indexes.index.node_changed()
    indexes.clock.passes(LOOK_SECONDS)
    assert not indexes.tell()
