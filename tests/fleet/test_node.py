from __future__ import annotations

from gateway.fleet.circuit import KEY_REJECTED_SECONDS, MOST_LIMIT, START_LIMIT
from gateway.fleet.health import judge_state
from gateway.fleet.node import NodeState
from tests.fleet.build import Clock, a_node, no_upstream, take


def test_slots_are_declared_or_reported_or_assumed() -> None:
    node = a_node(slots=3)
    node.properties.slots = 5
    assert node.slots_total == 3
    node = a_node()
    assert node.slots_total == 1
    node.properties.slots = 5
    assert node.slots_total == 5
    assert a_node(kind="openai").slots_total == START_LIMIT


def test_an_endpoint_without_slots_may_turn_out_to_take_more() -> None:
    node = a_node(kind="openai")
    assert (node.slots_total, node.most_slots) == (START_LIMIT, MOST_LIMIT)
    assert a_node(kind="openai", slots=2).most_slots == 2
    assert a_node().most_slots == 1


def test_the_slots_of_an_endpoint_are_its_learnt_limit() -> None:
    node = a_node(kind="openai")
    lease = take(node)
    assert node.concurrency_limit is not None
    node.concurrency_limit.record_refusal(lease.taken_at, node.clock())
    assert node.slots_total < START_LIMIT
    declared = a_node(kind="openai", slots=4)
    assert declared.concurrency_limit is not None
    declared.concurrency_limit.record_refusal(0.0, declared.clock())
    assert declared.slots_total == 4


def test_an_endpoint_that_asked_for_a_pause_has_no_free_slots() -> None:
    clock = Clock()
    node = a_node(clock, kind="openai", slots=4)
    assert node.concurrency_limit is not None
    node.concurrency_limit.record_refusal(clock(), clock(), retry_after=20.0)
    assert (node.paused(clock()), node.free_slots(clock())) == (True, 0)
    assert node.next_change(clock()) == clock() + 20.0
    clock.passes(20.0)
    assert (node.paused(clock()), node.free_slots(clock())) == (False, 4)


def test_a_limit_below_the_requests_in_flight_leaves_nothing_free() -> None:
    node = a_node(kind="openai")
    leases = [take(node) for _ in range(8)]
    assert node.concurrency_limit is not None
    node.concurrency_limit.record_refusal(leases[0].taken_at, node.clock(), retry_after=0.0)
    assert node.free_slots(node.clock()) == 0
    for lease in leases[:4]:
        lease.release()
    assert node.free_slots(node.clock()) == node.slots_total - 4 == 1


def test_context_is_declared_or_reported() -> None:
    assert a_node().context is None
    node = a_node()
    node.properties.context = 4096
    assert node.context == 4096
    assert a_node(context=2048).context == 2048


def test_models_are_declared_by_public_name() -> None:
    node = a_node(model={"gpt-4o-mini": "mistral-7b-q4.gguf"})
    node.properties.models = ("mistral-7b-q4.gguf",)
    assert node.served_name("gpt-4o-mini") == "mistral-7b-q4.gguf"
    assert node.served_name("mistral-7b-q4.gguf") is None
    assert node.public_models == {"gpt-4o-mini"}


def test_undeclared_models_are_those_that_the_server_reports() -> None:
    node = a_node()
    assert node.served_name("demo") is None
    node.properties.models = ("demo", "other")
    assert node.served_name("demo") == "demo"
    assert node.public_models == {"demo", "other"}


def test_undeclared_endpoints_are_all_but_refused_ones() -> None:
    node = a_node()
    assert node.supports("rerank")
    node.properties.refused.add("rerank")
    assert not node.supports("rerank")
    assert node.supports("chat")


def test_declared_endpoints_are_the_only_ones() -> None:
    node = a_node(endpoints=["chat"])
    assert node.supports("chat")
    assert not node.supports("embeddings")
    assert not node.supports("chat", vision=True)
    assert a_node(endpoints=["chat", "vision"]).supports("chat", vision=True)


def test_vision_is_supported_unless_the_server_reports_none() -> None:
    node = a_node()
    assert node.supports("chat", vision=True)
    node.properties.vision = False
    assert not node.supports("chat", vision=True)
    assert node.supports("chat")


def test_free_and_busy_slots_count_ours_and_those_of_others() -> None:
    node = a_node(slots=4)
    take(node, 1)
    node.occupancy.foreign = 2
    assert node.free_slots(node.clock()) == 1
    assert node.slots_busy == 3
    node.occupancy.foreign = 9
    assert node.free_slots(node.clock()) == 0
    assert node.slots_busy == 4
    take(node, 5)
    assert (node.slots_busy, node.free_slots(node.clock())) == (6, 0), "never fewer than ours"


def test_requests_are_counted() -> None:
    node = a_node()
    take(node).release()
    take(node)
    assert node.requests == 2


def test_a_rejected_key_is_not_tried_for_a_while() -> None:
    clock = Clock()
    node = a_node(clock)
    node.key_rejection.record("wrong key", clock())
    assert judge_state(node, clock()) == (NodeState.DOWN, "wrong key")
    clock.passes(KEY_REJECTED_SECONDS)
    assert judge_state(node, clock())[0] is NodeState.READY
    node.key_rejection.record("wrong key", clock())
    node.replace_upstream(no_upstream(), clock())
    assert judge_state(node, clock())[0] is NodeState.READY


def test_a_key_that_has_just_worked_must_be_rejected_twice() -> None:
    node = a_node()
    node.key_rejection.record_success()
    node.key_rejection.record("wrong key", node.clock())
    assert judge_state(node, node.clock())[0] is NodeState.READY
    node.key_rejection.record("wrong key", node.clock())
    assert judge_state(node, node.clock())[0] is NodeState.DOWN
