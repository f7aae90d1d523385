from __future__ import annotations

import pytest

from gateway.workshop.simulate.simulation import (
    Front,
    Job,
    SimulatedFleet,
    SimulatedMachine,
    SimulatedPromptCache,
    StuckError,
    TracePrompt,
    simulate,
)
from tests.each_case import each_case
from tests.workshop.simulate import build
from tests.workshop.simulate.build import job, machine, trace


def play(jobs: list[Job], *, on: SimulatedMachine | None = None) -> list[Job]:
    """Send all jobs to one node at their times; returns them in the order given."""
    build.play(jobs, [on or machine()])
    return jobs


def test_a_single_request_prefills_and_decodes_token_by_token() -> None:
    (one,) = play([job(prompt=1000, output=11)])
    # Two steps read 512 and 488 tokens; the second gives the first token, ten more follow.
    assert one.first == pytest.approx(1.0)
    assert one.ended == pytest.approx(1.0 + 10 * 0.1)
    # A step is never shorter than reading the weights.
    (short,) = play([job(prompt=5, output=1)])
    assert short.ended == pytest.approx(0.1)


def test_two_decoding_slots_share_a_step_that_is_little_longer() -> None:
    one, two = play([job(prompt=100, output=21), job(prompt=100, output=21)])
    # The second arrives during the first one's prefill, and prefills while that decodes a token.
    assert one.first == pytest.approx(0.1)
    assert two.first == pytest.approx(0.1 + 0.11)
    assert one.ended == pytest.approx(0.21 + 19 * 0.11)
    assert two.ended == pytest.approx(one.ended + 0.1)


def test_prefill_holds_decoding_neighbours_to_one_token_a_step() -> None:
    writer, reader = play([job(prompt=100, output=101), job(time=2.05, prompt=5110, output=2)])
    # Ten steps of 511 tokens (the batch less the decoded one), each 0.511 + 0.01 s.
    assert reader.began == pytest.approx(2.05)
    assert reader.first == pytest.approx(2.1 + 10 * 0.521)
    # Ten tokens in 5.21 s; a token alone takes 0.1 s, one beside the reader's second token 0.11.
    assert writer.ended == pytest.approx(0.1 + 10.0 - 11 * 0.1 + 10 * 0.521 + 0.11)


def test_prompts_are_read_in_the_order_of_their_slots() -> None:
    first, second = play([job(prompt=1024, output=1), job(prompt=1024, output=1)])
    # The first got the last slot, idle longest; the next one's slot comes before it.
    assert second.slot < first.slot
    assert second.first == pytest.approx(0.512 + 1.024)
    assert first.first == pytest.approx(2.048)


def test_the_next_turn_waits_for_the_one_before_and_finds_it_but_for_the_last_token() -> None:
    first, turn = play(
        [
            job(prompt=500, output=50, stream=1),
            job(time=1.0, prompt=600, output=5, stream=1, pause=3.0),
        ]
    )
    assert turn.arrived == pytest.approx(first.ended + 3.0)
    assert turn.cached == 549


def test_every_token_of_a_busy_node_is_accounted_for() -> None:
    jobs = [
        job(time=i * 0.37, prompt=50 + 97 * (i % 7), output=1 + (i * 13) % 40) for i in range(200)
    ]
    fleet = build.play(jobs, [machine(3)])
    server = fleet.servers[0]
    least = sum(one.prompt.tokens - one.cached for one in jobs) / 1000
    assert least < server.busy_seconds <= fleet.ended - fleet.began + 1e-6
    for one in jobs:
        assert one.arrived <= one.began < one.first <= one.ended
        assert one.to_read == one.to_write == 0
        # No faster than alone.
        assert one.ended - one.first >= (one.output - 1) * 0.1 - 1e-9
    assert server.slots == [None] * 3
    assert not server.queue


def serve(
    cache: SimulatedPromptCache, prompt: TracePrompt, now: float, slots: int = 2
) -> tuple[int, int]:
    """Send a single request: its slot, and the tokens that the slot had cached."""
    slot, cached = cache.choose_slot(prompt, list(range(slots)))
    cache.store(slot, prompt, now)
    return slot, cached


def test_the_slot_with_most_of_the_prompt_takes_it() -> None:
    cache = SimulatedPromptCache(2, 0)
    serve(cache, TracePrompt(1, 100), 0.0)
    other, _ = serve(cache, TracePrompt(2, 100), 1.0)
    assert serve(cache, TracePrompt(2, 200), 2.0) == (other, 100)
    assert serve(cache, TracePrompt(1, 200), 3.0) == (1 - other, 100)
    # One token is always read.
    assert serve(cache, TracePrompt(1, 200), 4.0) == (1 - other, 199)


@each_case(("memory", "kept"), [(10_000, [TracePrompt(1, 1000)]), (0, [])])
def test_a_prompt_that_lost_its_slot_comes_back_from_host_memory_alone(
    memory: int, kept: list[TracePrompt]
) -> None:
    cache = SimulatedPromptCache(1, memory)
    serve(cache, TracePrompt(1, 1000), 0.0, 1)
    serve(cache, TracePrompt(2, 1000), 1.0, 1)
    assert cache.host_prompts == kept
    assert serve(cache, TracePrompt(1, 1200), 2.0, 1) == (0, 1000 if kept else 0)
    assert TracePrompt(1, 1000) not in cache.host_prompts


class Keeper(Front):
    """A front that sends nothing."""

    def arrive(self, job: Job) -> None: ...

    def ended(self, job: Job) -> None: ...


def test_a_front_that_serves_nothing_or_whose_alarm_never_ends_is_an_error() -> None:
    with pytest.raises(StuckError, match="2 of 2 requests were never served"):
        build.play([job(), job()], [machine()], Keeper)
    ringing = Keeper(SimulatedFleet([machine()], trace([job(time=1.0)])))
    ringing.alarm = 0.0
    with pytest.raises(StuckError, match="for ever"):
        simulate(ringing)
