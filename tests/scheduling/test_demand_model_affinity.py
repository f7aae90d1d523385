"""Sessions, which a header names, keep their node."""

from __future__ import annotations

import pytest

from gateway.fleet.node import Node
from gateway.lease import LeaseRequest, PromptKey
from gateway.scheduling.demand_model import SessionAffinity
from gateway.scheduling.scheduler import Scheduler
from tests.scheduling.build import a_request, a_scheduler, lease_at_once, node
from tests.scheduling.queue_simulation import QueueSimulation


def serve(scheduler: Scheduler, request: LeaseRequest) -> str:
    """Serve a request to its end; the name of its node."""
    lease = lease_at_once(scheduler, request)
    lease.release()
    return lease.node.name


def session_request(session: str | None, number: int, model: str = "demo") -> LeaseRequest:
    """A request of a session, with a prompt that no node has cached."""
    prompt = PromptKey((number,), 100.0, size=400)
    return a_request(model, prompt_key=prompt, text_bytes=400, max_tokens=100, session=session)


@pytest.fixture
def nodes() -> list[Node]:
    return [node(name, models=("demo", "other")) for name in "abcd"]


def test_a_session_goes_to_its_last_node(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    first = {
        f"s{number}": serve(scheduler, session_request(f"s{number}", number))
        for number in range(20)
    }
    assert set(first.values()) == set("abcd")
    for number, (session, last_node) in enumerate(first.items(), start=100):
        assert serve(scheduler, session_request(session, number)) == last_node


def test_a_request_without_a_session_goes_anywhere(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    assert {serve(scheduler, session_request(None, number)) for number in range(40)} == set("abcd")


def test_a_session_has_a_node_for_each_model(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    last_nodes = {
        model: [serve(scheduler, session_request(f"s{n}", n, model)) for n in range(20)]
        for model in ("demo", "other")
    }
    assert last_nodes["demo"] != last_nodes["other"]


@pytest.mark.parametrize(("times", "stays"), [(1.4, True), (1.6, False)])
def test_a_session_leaves_a_node_that_is_much_slower_than_another(
    times: float, stays: bool
) -> None:
    scheduler = a_scheduler(node("a"), node("b"))
    last_node = serve(scheduler, session_request("s", 1))
    for row in scheduler.dispatcher.placement_state.by_name.values():
        factor = 1.0 if row.name == last_node else times
        scheduler.dispatcher.placement_state.set_speed(row, 100.0 * factor, 0.1 / factor, 0.0)
    assert (serve(scheduler, session_request("s", 2)) == last_node) is stays


def test_a_session_does_not_wait_for_its_node() -> None:
    one, two = node("one", slots=1), node("two", slots=1)
    scheduler = a_scheduler(one, two)
    last_node = serve(scheduler, session_request("s", 1))
    assert lease_at_once(scheduler, session_request("s", 2)).node.name == last_node
    assert serve(scheduler, session_request("s", 3)) != last_node


def test_a_session_leaves_a_node_that_takes_no_work(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    last_node = serve(scheduler, session_request("s", 1))
    scheduler.fleet.drain(last_node)
    assert serve(scheduler, session_request("s", 2)) != last_node


def test_the_session_that_was_quiet_longest_is_forgotten_first() -> None:
    sim = QueueSimulation((1,))
    affinity = SessionAffinity(most_sessions=3)
    for session in ("a", "b", "c", "a", "d"):
        affinity.placed(session, "demo", sim.rows[0])
    queued = sim.request()
    known = [one for one in "abcd" if affinity.penalties(one, "demo", queued, sim.state)]
    assert known == ["a", "c", "d"]
