"""What keeps work from a node: its circuit, and the limit that an endpoint shows."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.scheduling import HealthSettings
from gateway.nodes.circuit import (
    LEAST_LIMIT,
    MOST_LIMIT,
    MOST_PAUSE,
    OPEN_JITTER,
    REFUSAL_CUT,
    REFUSAL_REMEMBERED,
    START_LIMIT,
    Circuit,
    ConcurrencyLimit,
)
from tests.each_case import each_case

RULES = HealthSettings(failures=3, open=30, open_max=300, slow_start=30)


def opened(now: float = 0.0) -> Circuit:
    circuit = Circuit(RULES, random.Random(1))
    for _ in range(RULES.failures):
        circuit.record_failure(now)
    return circuit


def end_of_open(circuit: Circuit) -> float:
    assert circuit.open_until is not None
    return circuit.open_until


def test_it_stays_open_for_about_the_set_time_then_wants_one_trial() -> None:
    circuit = opened(now=100.0)
    until = end_of_open(circuit)
    assert 100 + 30 * (1 - OPEN_JITTER) <= until <= 100 + 30 * (1 + OPEN_JITTER)
    assert circuit.next_change(100.0) == until
    assert not circuit.wants_trial(until - 0.001)
    assert circuit.phase(until) == "half-open"
    assert circuit.wants_trial(until)
    circuit.begin_trial("lease")
    assert not circuit.wants_trial(until + 100)
    circuit.end_trial("lease")
    assert circuit.wants_trial(until), "it proved nothing, and makes room for the next"


def test_a_trial_that_fails_opens_it_for_twice_as_long_up_to_the_maximum() -> None:
    circuit = opened()
    lengths = [circuit.open_seconds]
    for _ in range(6):
        now = end_of_open(circuit)
        circuit.begin_trial("lease")
        assert circuit.record_failure(now + 1, began=now)
        lengths.append(circuit.open_seconds)
    assert lengths == [30, 60, 120, 240, 300, 300, 300]


def test_a_node_that_was_killed_gets_work_when_it_is_back_unless_it_keeps_dying() -> None:
    circuit = opened(now=10.0)
    circuit.server_restarted(11.0)
    assert circuit.phase(11.0) == "closed"
    assert circuit.slow_start_slots(10, 11.0) == 1  # step by step
    assert not circuit.record_failure(11.5, began=9.0)  # another request that the crash ended
    assert circuit.phase(11.5) == "closed"
    for _ in range(RULES.failures):
        circuit.record_failure(20.0)
    circuit.server_restarted(21.0)
    assert circuit.open_seconds == 60
    assert circuit.phase(21.0) == "open"


def test_the_end_of_an_old_trial_does_not_end_the_new_one() -> None:
    circuit = opened()
    now = end_of_open(circuit)
    circuit.begin_trial("first")
    circuit.record_failure(now + 1, began=now)
    again = end_of_open(circuit)
    circuit.begin_trial("second")
    circuit.end_trial("first")
    assert not circuit.wants_trial(again)


def test_requests_that_began_before_it_opened_neither_extend_nor_close_it() -> None:
    circuit = opened(now=100.0)
    until = end_of_open(circuit)
    assert not circuit.record_failure(110.0, began=90.0)
    assert not circuit.record_failure(until + 1, began=90.0)
    assert not circuit.record_success(until + 1, began=90.0)
    assert circuit.open_until == until


def test_a_trial_that_succeeds_closes_it_with_a_slow_start() -> None:
    circuit = opened()
    now = end_of_open(circuit)
    circuit.begin_trial("lease")
    assert circuit.record_success(now, began=now)
    assert (circuit.phase(now), circuit.failures) == ("closed", 0)
    assert not circuit.close(now), "it is closed already"
    circuit.record_failure(now + 1, began=-1.0)
    assert circuit.failures == 0, "an old failure does not count"
    allowed = [circuit.slow_start_slots(8, now + t) for t in (0, 10, 15, 20, 29)]
    assert allowed == [1, 3, 4, 6, 8]
    assert circuit.next_change(now + 29.5) == now + 30
    assert circuit.next_change(now + 30) == float("inf")
    assert circuit.fully_closed
    assert [circuit.slow_start_slots(8, now + t) for t in (30, 31)] == [8, 8]


@dataclass
class Endpoint:
    """An endpoint with so many places, its own queue, and a decode that slows down when full."""

    places: int = 10_000
    queue: int = 10_000
    knee: int = 10_000
    first: Callable[[random.Random], float] = lambda _: 0.2
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    refusals: list[float] = field(default_factory=list)
    free_at: list[float] = field(default_factory=list)

    def run(
        self, limit: ConcurrencyLimit, *, seconds: float, demand: int = 10_000, start: float = 0.0
    ) -> list[tuple[float, int]]:
        """Let `demand` clients send one request after the other, as far as the limit allows."""
        now, out, inside, count = start, 0, 0, 0
        events: list[tuple[float, int, float, tuple[float, float, float] | None]] = []
        history = [(now, limit.slots)]
        while now < start + seconds:
            while out < min(limit.slots, demand) and not limit.paused(now):
                out += 1
                count += 1
                limit.record_in_flight(out)
                if inside >= self.places + self.queue:
                    heapq.heappush(events, (now + 0.02, count, now, None))
                    continue
                inside += 1
                prompt = self.rng.choice([30.0, 200.0, 1500.0])
                tokens = float(self.rng.randint(20, 60))
                begins = now
                while self.free_at and self.free_at[0] <= now:
                    heapq.heappop(self.free_at)
                if len(self.free_at) >= self.places:
                    begins = heapq.heappop(self.free_at)
                slower = max(1.0, inside / self.knee)
                first = begins - now + self.first(self.rng) * slower + prompt / 10_000
                end = now + first + (tokens - 1) * 0.01 * slower
                heapq.heappush(self.free_at, end)
                heapq.heappush(events, (end, count, now, (first, prompt, tokens)))
            if not events:
                now = limit.paused_until
                continue
            now, _, began, answer = heapq.heappop(events)
            out -= 1
            if answer is None:
                self.refusals.append(now)
                limit.record_refusal(began, now)
            else:
                inside -= 1
                first, prompt, tokens = answer
                limit.record_success(
                    began, now, ttft=first, prompt_tokens=prompt, completion_tokens=tokens
                )
            history.append((now, limit.slots))
        return history


def test_it_grows_while_it_is_used_and_latency_is_steady() -> None:
    history = Endpoint().run(ConcurrencyLimit(), seconds=60)
    assert history[-1][1] > 200
    assert max(slots for _, slots in history) <= MOST_LIMIT


@each_case(
    ("endpoint", "least", "most"),
    [
        (Endpoint(places=3, queue=0), 1.8, 4),
        (Endpoint(places=20, queue=0), 12, 21),
        # It queues what is beyond its places.
        (Endpoint(places=4), 2.8, 10),
        (Endpoint(places=16), 11, 40),
        # Every token gets slower.
        (Endpoint(knee=20), 15, 75),
    ],
)
def test_it_finds_the_limit_of_an_endpoint(endpoint: Endpoint, least: float, most: float) -> None:
    limit = ConcurrencyLimit()
    endpoint.run(limit, seconds=30, demand=2)  # a quiet time shows the least latency
    history = endpoint.run(limit, seconds=600, start=31.0)
    late = [slots for when, slots in history if when >= 331]
    assert least <= sum(late) / len(late) <= most
    # It exceeds the places about once a minute, and no more often.
    refused = [when for when in endpoint.refusals if when >= 331]
    assert len(refused) <= 300 / REFUSAL_REMEMBERED + 2
    assert not endpoint.refusals or max(late) <= endpoint.places + 1


def test_cached_prompts_do_not_make_the_others_look_slow() -> None:
    endpoint = Endpoint(first=lambda rng: 0.02 if rng.random() < 0.3 else 0.4)
    history = endpoint.run(ConcurrencyLimit(), seconds=60)
    assert min(slots for _, slots in history) >= START_LIMIT
    assert history[-1][1] > 50


def test_requests_refused_together_count_once_and_answers_to_those_before_do_not() -> None:
    limit = ConcurrencyLimit()
    for _ in range(8):
        limit.record_refusal(10.0, 10.1)
    assert limit.slots == int(START_LIMIT * REFUSAL_CUT)
    limit.record_in_flight(8)
    for _ in range(50):
        limit.record_success(10.0, 11.0, ttft=0.1, prompt_tokens=10, completion_tokens=10)
    assert limit.slots == int(START_LIMIT * REFUSAL_CUT)


def test_a_requested_pause_is_kept_and_bounded() -> None:
    limit = ConcurrencyLimit()
    assert limit.record_refusal(0.0, 1.0, retry_after=20.0)
    assert limit.paused(20.9)
    assert not limit.paused(21.0)
    limit.record_refusal(30.0, 31.0, retry_after=1e9)
    assert limit.paused_until == 31.0 + MOST_PAUSE
    limit.record_refusal(30.5, 31.5, retry_after=1.0)
    assert limit.paused_until == 31.0 + MOST_PAUSE, "a later refusal does not shorten it"


def test_the_pauses_of_an_endpoint_that_keeps_refusing_get_longer() -> None:
    limit, now = ConcurrencyLimit(), 0.0
    pauses = []
    for _ in range(12):
        limit.record_refusal(now, now)
        pauses.append(limit.paused_until - now)
        now = limit.paused_until + 0.01
    assert pauses[:3] == pytest.approx([0.25, 0.5, 1.0])
    assert pauses[-1] == pytest.approx(30.0)
    limit.record_success(now - 1, now, ttft=0.2, prompt_tokens=100, completion_tokens=100)
    limit.record_refusal(now + 1, now + 1)
    assert limit.paused_until - (now + 1) == pytest.approx(0.25)


def test_an_endpoint_out_of_credit_is_paused_and_keeps_its_limit() -> None:
    limit, now = ConcurrencyLimit(), 0.0
    for _ in range(12):
        now = max(now, limit.paused_until)
        assert limit.record_refusal(now, now, crowded=False)
    assert limit.paused_until - now == pytest.approx(30.0)
    assert limit.slots == START_LIMIT
    at_once = ConcurrencyLimit()
    for _ in range(12):
        at_once.record_refusal(0.0, 1.0, crowded=False)
    assert at_once.paused_until - 1.0 == pytest.approx(0.25), "they count as one"


any_float = st.floats(allow_nan=True, allow_infinity=True)
calls = st.lists(
    st.tuples(
        st.sampled_from(["answered", "refused", "took"]),
        st.floats(0, 5),
        any_float,
        any_float,
        st.none() | any_float,
    ),
    max_size=300,
)


@given(calls)
def test_any_events_leave_it_within_its_bounds(
    events: list[tuple[str, float, float, float, float | None]],
) -> None:
    limit, now = ConcurrencyLimit(), 0.0
    for what, gap, one, other, maybe in events:
        now += gap
        if what == "took":
            limit.record_in_flight(min(int(gap * 300), MOST_LIMIT))
        elif what == "refused":
            limit.record_refusal(now - gap, now, maybe)
        else:
            limit.record_success(
                now - gap, now, ttft=maybe, prompt_tokens=one, completion_tokens=other
            )
        assert LEAST_LIMIT <= limit.slots <= MOST_LIMIT
        assert limit.paused_until <= now + MOST_PAUSE
