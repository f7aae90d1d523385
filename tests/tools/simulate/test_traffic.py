from __future__ import annotations

import pytest

from gateway.tools.simulate.traffic import Traffic, generate
from tests.each_case import each_case


def test_the_same_seed_makes_the_same_trace() -> None:
    def drawn(seed: int) -> list[tuple[float, int, int]]:
        jobs = generate(Traffic(requests=500, rate=2.0), seed).jobs
        return [(job.time, job.prompt.tokens, job.output) for job in jobs]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_traffic_has_the_requested_rate_and_means() -> None:
    traffic = Traffic(requests=20_000, rate=5.0, answer=200.0, turns=3.0)
    trace = generate(traffic, 1)
    jobs = trace.jobs
    assert len(jobs) == 20_000
    assert jobs[-1].time - jobs[0].time == pytest.approx(4000, rel=0.05)
    # From the first tenth on: earlier conversations are under way.
    assert sum(job.time < 400 for job in jobs) == pytest.approx(2000, rel=0.12)
    assert sum(job.output for job in jobs) / len(jobs) == pytest.approx(200, rel=0.05)
    conversations = len({job.prompt.stream for job in jobs})
    assert len(jobs) / conversations == pytest.approx(3.0, rel=0.1)


def test_every_turn_continues_the_one_before() -> None:
    trace = generate(Traffic(requests=2000, rate=5.0), 1)
    assert trace.next_turns
    for before, after in trace.next_turns.items():
        one, next_one = trace.jobs[before], trace.jobs[after]
        assert one.prompt.stream == next_one.prompt.stream
        assert next_one.prompt.tokens > one.prompt.tokens + one.output
        assert next_one.time > one.time
        assert next_one.is_later_turn


def test_tenants_share_their_system_prompts_and_classes_their_part() -> None:
    jobs = generate(Traffic(requests=5000, rate=5.0, tenants=3, system=700, batch=0.3), 1).jobs
    assert {job.prompt.prefix for job in jobs} == {1, 2, 3}
    assert {job.prompt.prefix_tokens for job in jobs} == {700}
    assert sum(job.priority_label == "batch" for job in jobs) / 5000 == pytest.approx(0.3, abs=0.05)


def test_traffic_is_read_from_text() -> None:
    traffic = Traffic.from_text("rate=2.5, requests=100,turns=1")
    assert (traffic.rate, traffic.requests, traffic.turns) == (2.5, 100, 1.0)


@each_case(
    ("text", "message"),
    [
        ("speed=1", "'speed' is nothing to set; known: requests, rate"),
        ("rate=fast", "write a number"),
        ("requests=1.5", "write a whole number"),
        ("rate=0", "rate and lengths must be positive"),
        ("rate=inf", "rate and lengths must be positive"),
        ("requests=0", "at least 1"),
        ("turns=nan", "at least 1"),
        ("pause=-1", "not be negative"),
        ("batch=0.7,urgent=0.7", "shares of the classes"),
    ],
)
def test_invalid_traffic_is_an_error_with_an_explanation(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Traffic.from_text(text)
