from __future__ import annotations

from gateway.fleet.health import another_prefills, sign_of_life
from tests.fleet.build import Clock, a_node, take


def test_an_idle_node_shows_no_sign_of_life() -> None:
    assert sign_of_life(a_node(), 1000.0) is None


def test_a_stream_is_a_sign_of_life_for_as_long_as_it_may_be_silent() -> None:
    clock = Clock()
    node = a_node(clock)
    lease = take(node)
    clock.passes(500)
    lease.content_received(clock())
    assert sign_of_life(node, clock.passes(59)) == "one of its streams moves"
    assert sign_of_life(node, clock.passes(2)) is None


def test_the_nodes_own_silence_timeout_counts() -> None:
    clock = Clock()
    node = a_node(clock, timeouts={"silence": 5})
    lease = take(node)
    lease.content_received(clock())
    assert sign_of_life(node, clock.passes(6)) is None


def test_a_prefill_is_a_sign_of_life_for_the_grace_time() -> None:
    clock = Clock()
    node = a_node(clock)
    take(node)
    assert sign_of_life(node, clock.passes(59)) == "it reads a prompt"
    assert sign_of_life(node, clock.passes(2)) is None


def test_a_long_prefill_is_a_sign_of_life_for_four_times_its_prediction() -> None:
    clock = Clock()
    node = a_node(clock)
    take(node, expected_prefill=100.0)
    assert sign_of_life(node, clock.passes(399))
    assert sign_of_life(node, clock.passes(2)) is None


def test_a_prefill_that_waited_for_its_slot_counts_from_the_head() -> None:
    clock = Clock()
    node = a_node(clock)
    lease = take(node)
    clock.passes(50)
    lease.head_received(clock())
    assert sign_of_life(node, clock.passes(59))


def test_a_prefill_goes_on_after_the_client_has_left() -> None:
    clock = Clock()
    node = a_node(clock)
    take(node).abandon()
    assert sign_of_life(node, clock.passes(30)) == "it reads a prompt"


def test_an_ended_request_is_no_sign_of_life() -> None:
    clock = Clock()
    node = a_node(clock)
    lease = take(node)
    lease.content_received(clock())
    lease.release()
    assert sign_of_life(node, clock()) is None


def test_a_neighbour_is_delayed_while_another_prompt_is_read() -> None:
    clock = Clock()
    node = a_node(clock)
    stream, reader = take(node), take(node)
    stream.content_received(clock())
    assert another_prefills(stream, clock.passes(30))
    assert not another_prefills(reader, clock())
    reader.content_received(clock())
    assert not another_prefills(stream, clock())
