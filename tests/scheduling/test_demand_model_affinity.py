"""Conversations that are named by a header keep their node."""

from __future__ import annotations

import pytest

from gateway.fleet.node import Node
from gateway.fleet.prompt_tree import PromptKey
from gateway.request import Request
from gateway.scheduling.demand_model import SessionAffinity
from gateway.scheduling.scheduler import Scheduler
from tests.scheduling.build import a_request, a_scheduler, node
from tests.scheduling.queue_simulation import QueueSimulation


def turn(scheduler: Scheduler, request: Request) -> str:
    """The node that gets it, when it has ended."""
    granted = scheduler.lease_now(request)
    assert granted is not None
    granted[0].release()
    return granted[0].node.name


def said(session: str | None, number: int, model: str = "demo") -> Request:
    """One of a conversation's requests: its prompt is like none before."""
    prompt = PromptKey((number,), 100.0, size=400)
    return a_request(model, prompt_key=prompt, text_bytes=400, max_tokens=100, session=session)


@pytest.fixture
def nodes() -> list[Node]:
    return [node(name, models=("demo", "other")) for name in "abcd"]


def test_it_goes_where_it_went_last(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    first = {f"s{number}": turn(scheduler, said(f"s{number}", number)) for number in range(20)}
    assert set(first.values()) == set("abcd")
    for number, (session, home) in enumerate(first.items(), start=100):
        assert turn(scheduler, said(session, number)) == home


def test_without_a_name_it_goes_anywhere(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    assert {turn(scheduler, said(None, number)) for number in range(40)} == set("abcd")


def test_each_model_has_its_own_home(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    homes_of = {
        model: [turn(scheduler, said(f"s{n}", n, model)) for n in range(20)]
        for model in ("demo", "other")
    }
    assert homes_of["demo"] != homes_of["other"]


@pytest.mark.parametrize(("times", "stays"), [(1.4, True), (1.6, False)])
def test_it_leaves_a_home_that_has_become_a_good_deal_slower(times: float, stays: bool) -> None:
    scheduler = a_scheduler(node("a"), node("b"))
    home = turn(scheduler, said("s", 1))
    for row in scheduler.dispatcher.placement_state.by_name.values():
        factor = 1.0 if row.name == home else times
        scheduler.dispatcher.placement_state.set_speed(row, 100.0 * factor, 0.1 / factor, 0.0)
    assert (turn(scheduler, said("s", 2)) == home) is stays


def test_it_does_not_wait_for_its_home() -> None:
    one, two = node("one", slots=1), node("two", slots=1)
    scheduler = a_scheduler(one, two)
    home = turn(scheduler, said("s", 1))
    held = scheduler.lease_now(said("s", 2))
    assert held is not None
    assert held[0].node.name == home
    assert turn(scheduler, said("s", 3)) != home


def test_a_home_that_takes_no_work_is_none(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    home = turn(scheduler, said("s", 1))
    scheduler.fleet.drain(home)
    assert turn(scheduler, said("s", 2)) != home


def test_the_session_that_was_quiet_longest_is_forgotten_first() -> None:
    sim = QueueSimulation((1,))
    affinity = SessionAffinity(most_sessions=3)
    for session in ("a", "b", "c", "a", "d"):
        affinity.placed(session, "demo", sim.rows[0])
    queued = sim.request()
    known = [one for one in "abcd" if affinity.penalties(one, "demo", queued, sim.state)]
    assert known == ["a", "c", "d"]
