from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from gateway.tools.tune.measurements import BenchmarkRequest, Figures
from gateway.tools.tune.server_benchmark import (
    BenchmarkError,
    ServerBenchmark,
    StreamSample,
    combined_throughput,
    longest_silence,
)
from tests.servers import demo_servers

REQUEST = BenchmarkRequest(prompt=400, answer=24)
CONTEXT = 2048


def stream(*steps: tuple[float, int], speed: float = 1000.0) -> list[StreamSample]:
    return [StreamSample(at, tokens, speed) for at, tokens in steps]


class TestThroughput:
    def test_all_tokens_over_all_time(self) -> None:
        streams = [stream((0, 1), (1, 11), (2, 21)), stream((0.5, 1), (2.5, 21))]
        assert combined_throughput(streams) == 40 / 2.5

    def test_tokens_that_arrive_in_a_bunch_do_not_count_as_fast(self) -> None:
        late = [stream((5.0, 1), (5.001, 41), speed=20.0)] * 2
        assert combined_throughput(late) == 40.0

    def test_a_stream_of_one_chunk_has_no_speed(self) -> None:
        with pytest.raises(BenchmarkError, match="one piece"):
            combined_throughput([stream((0, 1), (1, 2)), stream((0, 30))])


def test_silence_counts_from_the_neighbour_s_prompt_on() -> None:
    times = [0.0, 5.0, 5.1, 5.2, 7.2, 7.3]
    assert longest_silence(times, since=5.1) == pytest.approx(2.0)
    assert longest_silence(times, since=4.0) == 5.0
    assert longest_silence(times, since=9.0) == 0.0


async def benchmark(
    answers: dict[str, httpx.Response],
    slots: int = 2,
    read_joules: Callable[[], float | None] = lambda: None,
    servers: int = 1,
) -> Figures:
    def answer(request: httpx.Request) -> httpx.Response:
        found = answers[request.url.path]
        return httpx.Response(found.status_code, content=found.content)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        return await ServerBenchmark(
            "http://node", client, REQUEST, slots=slots, context=CONTEXT,
            read_joules=read_joules, servers=servers,
        ).run()  # fmt: skip


IDLE = httpx.Response(200, json=[{"is_processing": False}])

TOKENS = httpx.Response(200, json={"tokens": list(range(1000))})


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/tokenize": httpx.Response(200, json={"tokens": [1, 2]})}, "/tokenize answered"),
        ({"/tokenize": httpx.Response(200, text="<html>")}, "not JSON"),
        (
            {"/tokenize": TOKENS, "/completion": httpx.Response(503, text="Loading model")},
            "HTTP 503: Loading model",
        ),
        (
            {"/tokenize": TOKENS, "/completion": httpx.Response(200, text="data: {}\n\n")},
            "no usable `timings`",
        ),
        (
            {
                "/tokenize": TOKENS,
                "/completion": httpx.Response(200, text='data: {"error": "context"}\n\n'),
            },
            "context",
        ),
    ],
)
async def test_an_odd_response_is_reported(
    answers: dict[str, httpx.Response], message: str
) -> None:
    with pytest.raises(BenchmarkError, match=message):
        await benchmark(answers)


async def test_prefill_and_decode_speeds_are_the_server_s_own() -> None:
    timings = {"prompt_n": 400, "prompt_per_second": 900.0, "predicted_per_second": 30.0}
    message = httpx.Response(200, text=f"data: {json.dumps({'timings': timings})}\n\n")
    found = await benchmark({"/tokenize": TOKENS, "/completion": message}, slots=1)
    assert found == Figures(900.0, 30.0, 30.0, None, None)


def chunks(*written: int) -> httpx.Response:
    timings = {"prompt_n": 400, "prompt_per_second": 900.0, "predicted_per_second": 30.0}
    text = "".join(
        f"data: {json.dumps({'timings': {**timings, 'predicted_n': number}})}\n\n"
        for number in written
    )
    return httpx.Response(200, text=text)


class TestEnergy:
    async def test_each_server_takes_its_share_of_the_machines_energy(self) -> None:
        """200 J for reading 400 tokens and 60 J for writing 6, by two servers at a time."""
        readings = iter([0.0, 5.0, 5.0] + [100.0, 300.0, 360.0] * 3)
        found = await benchmark(
            {"/tokenize": TOKENS, "/completion": chunks(1, 4, 7)},
            slots=1,
            read_joules=lambda: next(readings),
            servers=2,
        )
        assert (found.prefill_joules, found.decode_joules) == (0.25, 5.0)

    async def test_all_busy_slots_share_the_energy(self) -> None:
        readings = iter(range(0, 100_000, 10))  # 10 J from reading to reading
        found = await benchmark(
            {"/tokenize": TOKENS, "/completion": chunks(*range(1, 12)), "/slots": IDLE},
            slots=2,
            read_joules=lambda: next(readings),
        )
        assert found.decode_joules == 10 / 20

    async def test_a_counter_that_fails_costs_only_the_energy(self) -> None:
        readings = iter([0.0, 1.0, 2.0, 3.0] + [None] * 100)
        found = await benchmark(
            {"/tokenize": TOKENS, "/completion": chunks(1, 4, 7)},
            slots=1,
            read_joules=lambda: next(readings),
        )
        assert (found.prefill_joules, found.decode_joules) == (None, None)
        assert found.prefill == 900.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_servers(1, slots=2, context=CONTEXT) as (url,):
        yield url


def unshared_client() -> httpx.AsyncClient:
    """A connection for each request: the server closes those that were idle for 5 s."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=120, trust_env=False, limits=limits)


@pytest.mark.real
class TestReal:
    @pytest.mark.smoke
    async def test_a_server_is_measured_and_left_idle(self, url: str) -> None:
        async with unshared_client() as client:
            benchmark = ServerBenchmark(url, client, REQUEST, slots=2, context=CONTEXT)
            figures = await benchmark.run()
            slots = (await client.get(f"{url}/slots")).json()
        assert figures.prefill > 0
        assert figures.decode > 0
        assert figures.decode_busy > 0
        assert figures.stall is not None
        assert figures.stall > 0
        assert not any(slot["is_processing"] for slot in slots)

    async def test_each_prompt_is_prefilled_whole(self, url: str) -> None:
        async with unshared_client() as client:
            before = await prompt_tokens(client, url)
            benchmark = ServerBenchmark(url, client, REQUEST, slots=1, context=CONTEXT)
            await benchmark.run()
            read = await prompt_tokens(client, url) - before
        repeats, remainder = divmod(read, REQUEST.prompt)
        assert repeats in {1, 2, 3}
        assert remainder == 32  # the warm-up's


async def prompt_tokens(client: httpx.AsyncClient, url: str) -> int:
    for line in (await client.get(f"{url}/metrics")).text.splitlines():
        if line.startswith("llamacpp:prompt_tokens_total "):
            return int(float(line.split()[1]))
    raise AssertionError("no llamacpp:prompt_tokens_total")
