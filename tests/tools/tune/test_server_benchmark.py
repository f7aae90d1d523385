from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gateway.tools.local.plan import LocalFleetPlan, plan_local_fleet
from gateway.tools.local.topology import read_topology
from gateway.tools.tune.machine_benchmark import (
    MachineBenchmark,
    SettingFailedError,
    measurement_subject,
)
from gateway.tools.tune.measurements import BenchmarkRequest, Figures
from gateway.tools.tune.server_benchmark import (
    BenchmarkError,
    ServerBenchmark,
    StreamSample,
    combined_throughput,
    longest_silence,
)
from gateway.tools.tune.setting import Setting, rule_of_thumb
from tests.servers import demo_servers
from tests.tools.local.machine import make_machine

REQUEST = BenchmarkRequest(prompt=400, answer=24)
CONTEXT = 2048


def stream(*steps: tuple[float, int], speed: float = 1000.0) -> list[StreamSample]:
    return [StreamSample(at, tokens, speed) for at, tokens in steps]


class TestTogether:
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


async def probed(answers: dict[str, httpx.Response], slots: int = 2) -> Figures:
    def answer(request: httpx.Request) -> httpx.Response:
        found = answers[request.url.path]
        return httpx.Response(found.status_code, content=found.content)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        return await ServerBenchmark(
            "http://node", client, REQUEST, slots=slots, context=CONTEXT
        ).run()


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
        await probed(answers)


async def test_prefill_and_decode_speeds_are_the_server_s_own() -> None:
    timings = {"prompt_n": 400, "prompt_per_second": 900.0, "predicted_per_second": 30.0}
    message = httpx.Response(200, text=f"data: {json.dumps({'timings': timings})}\n\n")
    found = await probed({"/tokenize": TOKENS, "/completion": message}, slots=1)
    assert found == Figures(900.0, 30.0, 30.0, None, None)


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
    async def test_a_server_is_measured_and_left_idle(self, url: str) -> None:
        async with unshared_client() as client:
            probe = ServerBenchmark(url, client, REQUEST, slots=2, context=CONTEXT)
            figures = await probe.run()
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
            probe = ServerBenchmark(url, client, REQUEST, slots=1, context=CONTEXT)
            await probe.run()
            read = await prompt_tokens(client, url) - before
        repeats, remainder = divmod(read, REQUEST.prompt)
        assert repeats in {1, 2, 3}
        assert remainder == 32  # the warm-up's


async def prompt_tokens(client: httpx.AsyncClient, url: str) -> int:
    for line in (await client.get(f"{url}/metrics")).text.splitlines():
        if line.startswith("llamacpp:prompt_tokens_total "):
            return int(float(line.split()[1]))
    raise AssertionError("no llamacpp:prompt_tokens_total")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalFleetPlan:
    monkeypatch.setenv("PATH", "/nowhere")  # the embedded server, whatever this machine has
    return plan_local_fleet(cache=tmp_path)


@pytest.mark.real
@pytest.mark.slow
async def test_servers_are_started_with_the_setting_measured_and_ended(
    plan: LocalFleetPlan,
) -> None:
    machine = MachineBenchmark(plan, REQUEST, context=CONTEXT)
    # One thread: two of them wait for each other while other tests use the CPUs.
    start = rule_of_thumb(read_topology()).with_knob("threads", 1)
    two = await machine.measure(start, 200)
    one = await machine.measure(start.with_knob("slots", 1), 200)
    assert two.figures.stall is not None
    assert one.figures.stall is None
    for measured in (one, two):
        assert measured.figures.prefill > 0
        assert (measured.figures.memory or 0) > 3 << 20
        assert measured.other_work is not None


@pytest.mark.real
@pytest.mark.slow
async def test_the_servers_of_a_machine_are_measured_at_the_same_time(
    plan: LocalFleetPlan, tmp_path: Path
) -> None:
    several = plan_local_fleet(servers=2, cache=tmp_path)
    start = rule_of_thumb(read_topology()).with_knob("threads", 1)
    alone = await MachineBenchmark(plan, REQUEST, context=CONTEXT).measure(start, 200)
    both = await MachineBenchmark(several, REQUEST, context=CONTEXT).measure(start, 200)
    assert alone.figures.memory is not None
    assert both.figures.memory is not None
    assert both.figures.memory > 1.5 * alone.figures.memory


@pytest.mark.real
async def test_a_setting_that_takes_too_long_is_given_up_and_its_server_ended(
    plan: LocalFleetPlan,
) -> None:
    machine = MachineBenchmark(plan, REQUEST, context=CONTEXT)
    with pytest.raises(TimeoutError):
        await machine.measure(rule_of_thumb(read_topology()), 0.2)


@pytest.mark.real
async def test_a_server_that_does_not_start_is_no_crash(
    plan: LocalFleetPlan, tmp_path: Path
) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(plan.model.path.read_bytes()[:200_000])
    broken = LocalFleetPlan(
        plan.model,  # `up` and `tune` refuse what is cut short; this one breaks after they looked
        False,
        tuple(replace(spec, model=model) for spec in plan.specs),
        None,
        plan.log_folder,
    )
    machine = MachineBenchmark(broken, REQUEST, context=CONTEXT)
    with pytest.raises(SettingFailedError, match="before it was ready"):
        await machine.measure(rule_of_thumb(read_topology()), 60)


async def test_a_setting_with_too_much_memory_is_not_started(
    plan: LocalFleetPlan, tmp_path: Path
) -> None:
    machine = read_topology(make_machine(tmp_path / "machine", [[[0], [1]]], memory_gib=16))
    start = Setting(1, 512, 256, 2, "free")
    measured = MachineBenchmark(
        plan, REQUEST, context=CONTEXT, known_memory=(start, 3 << 30), read_machine=lambda: machine
    )
    # 12 GiB are free: 3 GiB with two slots may become 12 with eight.
    with pytest.raises(
        SettingFailedError, match=r"may take 12\.0 GiB, and 2\.0 GiB must stay free"
    ):
        await measured.measure(start.with_knob("slots", 8), 60)
    assert not plan.log_folder.exists()


def test_figures_depend_on_model_server_machine_and_request(plan: LocalFleetPlan) -> None:
    topology = read_topology()
    about = measurement_subject(plan, topology, REQUEST, CONTEXT)
    assert about["model_bytes"] == plan.model.size
    assert "xllamacpp" in about["server"]
    assert about != measurement_subject(plan, topology, BenchmarkRequest(500, 24), CONTEXT)
