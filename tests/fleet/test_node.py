from __future__ import annotations

from gateway.fleet.node import OPENAI_SLOTS
from tests.fleet.build import a_node, take


def test_slots_are_declared_or_said_or_assumed() -> None:
    node = a_node(slots=3)
    node.facts.slots = 5
    assert node.slots_total == 3
    node = a_node()
    assert node.slots_total == 1
    node.facts.slots = 5
    assert node.slots_total == 5
    assert a_node(kind="openai").slots_total == OPENAI_SLOTS


def test_context_is_declared_or_said() -> None:
    assert a_node().context is None
    node = a_node()
    node.facts.context = 4096
    assert node.context == 4096
    assert a_node(context=2048).context == 2048


def test_models_are_declared_by_public_name() -> None:
    node = a_node(model={"gpt-4o-mini": "mistral-7b-q4.gguf"})
    node.facts.models = ("mistral-7b-q4.gguf",)
    assert node.serves("gpt-4o-mini") == "mistral-7b-q4.gguf"
    assert node.serves("mistral-7b-q4.gguf") is None
    assert node.public_models == {"gpt-4o-mini"}


def test_models_are_what_the_server_says_where_nothing_is_declared() -> None:
    node = a_node()
    assert node.serves("demo") is None
    node.facts.models = ("demo", "other")
    assert node.serves("demo") == "demo"
    assert node.public_models == {"demo", "other"}


def test_endpoints_are_all_but_what_the_node_refused() -> None:
    node = a_node()
    assert node.offers("rerank")
    node.facts.refused.add("rerank")
    assert not node.offers("rerank")
    assert node.offers("chat")


def test_declared_endpoints_are_the_only_ones() -> None:
    node = a_node(endpoints=["chat"])
    assert node.offers("chat")
    assert not node.offers("embeddings")
    assert not node.offers("chat", vision=True)
    assert a_node(endpoints=["chat", "vision"]).offers("chat", vision=True)


def test_vision_is_offered_unless_the_server_says_it_has_none() -> None:
    node = a_node()
    assert node.offers("chat", vision=True)
    node.facts.vision = False
    assert not node.offers("chat", vision=True)
    assert node.offers("chat")


def test_free_slots_leave_out_ours_and_others() -> None:
    node = a_node(slots=4)
    take(node, 1)
    node.occupancy.foreign = 2
    assert node.free(node.clock()) == 1
    assert node.slots_busy == 3
    node.occupancy.foreign = 9
    assert node.free(node.clock()) == 0
    assert node.slots_busy == 4


def test_busy_slots_are_never_fewer_than_our_leases() -> None:
    node = a_node(slots=1)
    take(node, 3)
    assert node.slots_busy == 3
    assert node.free(node.clock()) == 0


def test_requests_are_counted() -> None:
    node = a_node()
    take(node).give_back()
    take(node)
    assert node.requests == 2
