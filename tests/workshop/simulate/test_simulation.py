from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.workshop.simulate.simulation import (
    TRACE_KEYS,
    Front,
    Job,
    SimulatedFleet,
    SimulatedPromptCache,
    StuckError,
    TracePrompt,
    Traffic,
    generate,
    read_trace,
    simulate,
)
from tests.each_case import each_case
from tests.workshop.simulate import build
from tests.workshop.simulate.build import job, machine, trace


def play(*jobs: Job) -> tuple[Job, ...]:
    """Send all jobs to one node at their times; returns them in the order given."""
    build.play(jobs, [machine()])
    return jobs


def test_a_single_request_prefills_and_decodes_token_by_token() -> None:
    (one,) = play(job(prompt=1000, output=11))
    # Two steps read 512 and 488 tokens; the second gives the first token, ten more follow.
    assert one.first == pytest.approx(1.0)
    assert one.ended == pytest.approx(1.0 + 10 * 0.1)
    # A step is never shorter than reading the weights.
    (short,) = play(job(prompt=5, output=1))
    assert short.ended == pytest.approx(0.1)


def test_two_decoding_slots_share_a_step_that_is_little_longer() -> None:
    one, two = play(job(prompt=100, output=21), job(prompt=100, output=21))
    # The second arrives during the first one's prefill, and prefills while that decodes a token.
    assert one.first == pytest.approx(0.1)
    assert two.first == pytest.approx(0.1 + 0.11)
    assert one.ended == pytest.approx(0.21 + 19 * 0.11)
    assert two.ended == pytest.approx(one.ended + 0.1)


def test_prefill_holds_decoding_neighbours_to_one_token_a_step() -> None:
    writer, reader = play(job(prompt=100, output=101), job(time=2.05, prompt=5110, output=2))
    # Ten steps of 511 tokens (the batch less the decoded one), each 0.511 + 0.01 s.
    assert reader.began == pytest.approx(2.05)
    assert reader.first == pytest.approx(2.1 + 10 * 0.521)
    # Ten tokens in 5.21 s; a token alone takes 0.1 s, one beside the reader's second token 0.11.
    assert writer.ended == pytest.approx(0.1 + 10.0 - 11 * 0.1 + 10 * 0.521 + 0.11)


def test_the_next_turn_waits_for_the_one_before_and_finds_it_but_for_the_last_token() -> None:
    first, turn = play(
        job(prompt=500, output=50, stream=1),
        job(time=1.0, prompt=600, output=5, stream=1, pause=3.0),
    )
    assert turn.arrived == pytest.approx(first.ended + 3.0)
    assert turn.cached == 549


def test_every_token_of_a_busy_node_is_accounted_for() -> None:
    jobs = [
        job(time=i * 0.37, prompt=50 + 97 * (i % 7), output=1 + (i * 13) % 40) for i in range(200)
    ]
    fleet = build.play(jobs, [machine(3)])
    server = fleet.servers[0]
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


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""


def written(folder: Path, *lines: object, name: str = "trace.jsonl") -> Path:
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_every_key_is_read(tmp_path: Path) -> None:
    one: dict[str, Any] = {"time": 1700000000.5, "prompt_tokens": 1800, "output_tokens": 120}
    one |= {"max_tokens": 512, "model": "qwen3-8b", "class": "batch", "caller": "team-a"}
    one |= {"session": "s12", "pause": 8.0, "prefix": "assistant-v3", "prefix_tokens": 1500}
    assert set(one) == set(TRACE_KEYS)
    trace = read_trace(written(tmp_path, one, one | {"time": 1700000010.5, "prompt_tokens": 2000}))
    first, second = trace.jobs
    assert (first.time, second.time) == (0.0, 10.0)
    assert first.prompt == TracePrompt(first.prompt.stream, 1800, first.prompt.prefix, 1500)
    assert (first.max_tokens, first.priority_label, first.caller) == (512, "batch", "team-a")
    assert first.model == "qwen3-8b"
    assert trace.next_turns == {0: 1}
    assert (second.is_later_turn, second.pause) == (True, 8.0)


def test_broken_lines_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    good = {"prompt_tokens": 1, "output_tokens": 1}
    first, late = good | {"time": 1}, good | {"time": 900, "pause": -1}
    trace = read_trace(written(tmp_path, "x", first, late, good), skip_broken=True)
    # The last one, which has no time, comes with the one before it that is not broken.
    assert ([job.time for job in trace.jobs], trace.skipped) == ([0, 0], 2)


def test_the_azure_layout_is_read_with_a_time_zone_or_without(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE, name="azure.csv")
    trace = read_trace(path)
    figures = [(job.prompt.tokens, job.output) for job in trace.jobs]
    assert figures == [(374, 44), (396, 109), (879, 55)]
    assert [job.time for job in trace.jobs] == pytest.approx([0.0, 4.314579, 4.541977], abs=1e-5)
    assert len({job.prompt.stream for job in trace.jobs}) == 3
    assert len(read_trace(path, limit=2).jobs) == 2
    head, *_ = AZURE.splitlines()
    stamps = ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:02.5+00:00")
    later = written(tmp_path, head, *(f"{stamp},5,1" for stamp in stamps), name="a.csv")
    times = [job.time for job in read_trace(later).jobs]
    assert times == pytest.approx([0.0, 2.49007], abs=1e-5)


def test_traffic_has_the_requested_rate_and_means_and_turns_that_continue() -> None:
    trace = generate(Traffic(requests=20_000, rate=5.0, answer=200.0, turns=3.0), 1, MODELS)
    jobs = trace.jobs
    assert len(jobs) == 20_000
    assert jobs[-1].time - jobs[0].time == pytest.approx(4000, rel=0.05)
    # From the first tenth on: earlier conversations are under way.
    assert sum(job.time < 400 for job in jobs) == pytest.approx(2000, rel=0.12)
    assert sum(job.output for job in jobs) / len(jobs) == pytest.approx(200, rel=0.05)
    conversations = len({job.prompt.stream for job in jobs})
    assert len(jobs) / conversations == pytest.approx(3.0, rel=0.1)
    for before, after in trace.next_turns.items():
        one, then = jobs[before], jobs[after]
        assert (one.prompt.stream, one.model) == (then.prompt.stream, then.model)
        assert then.prompt.tokens > one.prompt.tokens + one.output
        assert then.time > one.time
        assert then.is_later_turn


MODELS = [f"m{number}" for number in range(8)]


def test_popularity_moves_where_it_is_said_to() -> None:
    for moves, alike in ((0.0, True), (300.0, False)):
        trace = generate(Traffic(6000, 10.0, turns=1.0, moves=moves), 3, MODELS)
        first, second = [
            Counter(job.model for job in trace.jobs if (job.time < 300.0) is early).most_common(3)
            for early in (True, False)
        ]
        assert ([name for name, _ in first] == [name for name, _ in second]) is alike
