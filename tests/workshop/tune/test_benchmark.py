from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gateway.local.plan import LocalFleetPlan, plan_local_fleet
from gateway.local.topology import read_topology
from gateway.workshop.tune.benchmark import (
    BenchmarkError,
    CpuTimes,
    MachineBenchmark,
    ServerBenchmark,
    StreamSample,
    combined_throughput,
    other_work_between,
    read_cpu_times,
)
from gateway.workshop.tune.search import (
    BenchmarkRequest,
    Figures,
    Setting,
    SettingFailedError,
    rule_of_thumb,
)
from tests.known import known
from tests.local.machine import make_machine, write
from tests.servers import demo_servers, server_path

REQUEST = BenchmarkRequest(prompt=400, answer=24)
CONTEXT = 2048


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalFleetPlan:
    monkeypatch.setenv("PATH", server_path())
    return plan_local_fleet(cache=tmp_path)


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
    # `up` and `tune` refuse what is cut short; this one breaks after they looked.
    broken = replace(plan, specs=tuple(replace(spec, model=model) for spec in plan.specs))
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


def test_work_is_time_that_cpus_were_not_idle_but_for_our_own(tmp_path: Path) -> None:
    other = "a) R (b"  # a name may hold brackets and blanks

    def read(busy: tuple[int, int], idle: int, **processes: int) -> CpuTimes:
        """`/proc` with the ticks of two usable CPUs, of a third, and of processes."""
        cpus = [f"cpu{cpu} {ticks} 0 0 {idle} 0 0 0 0 0 0" for cpu, ticks in enumerate(busy)]
        write(tmp_path, "proc/stat", "\n".join(["cpu 1 2 3 4", *cpus, "cpu2 99 0 0 1", "intr 5"]))
        for pid, (name, ticks) in enumerate(processes.items(), start=100):
            fields = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 30]
            write(tmp_path, f"proc/{pid}/stat", f"{pid} ({name}) {' '.join(fields)}")
        return read_cpu_times({0, 1}, tmp_path)

    before = read((100, 100), 1000, server=0, **{other: 50})
    after = read((190, 110), 1005, server=90, **{other: 60})
    busy, words = other_work_between(before, after, own={100})
    assert busy == pytest.approx(10 / 55)
    assert words.endswith(f"CPUs are busy: {other} (101) 18%")
    assert other_work_between(before, after)[0] == pytest.approx(100 / 55)


def stream(*steps: tuple[float, int], speed: float = 1000.0) -> list[StreamSample]:
    return [StreamSample(at, tokens, speed) for at, tokens in steps]


def test_the_speed_of_streams_is_all_tokens_over_all_time_but_not_that_of_a_bunch() -> None:
    streams = [stream((0, 1), (1, 11), (2, 21)), stream((0.5, 1), (2.5, 21))]
    assert combined_throughput(streams) == 40 / 2.5
    late = [stream((5.0, 1), (5.001, 41), speed=20.0)] * 2
    assert combined_throughput(late) == 40.0
    with pytest.raises(BenchmarkError, match="one piece"):
        combined_throughput([stream((0, 1), (1, 2)), stream((0, 30))])


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
    ("path", "response", "message"),
    [
        ("/tokenize", httpx.Response(200, json={"tokens": [1, 2]}), "/tokenize answered"),
        ("/tokenize", httpx.Response(200, text="<html>"), "not JSON"),
        ("/completion", httpx.Response(503, text="Loading model"), "HTTP 503: Loading model"),
        ("/completion", httpx.Response(200, text="data: {}\n\n"), "no usable `timings`"),
        ("/completion", httpx.Response(200, text='data: {"error": "context"}\n\n'), "context"),
    ],
)
async def test_an_odd_response_is_reported(
    path: str, response: httpx.Response, message: str
) -> None:
    with pytest.raises(BenchmarkError, match=message):
        await benchmark({"/tokenize": TOKENS, path: response})


def chunks(*written: int) -> httpx.Response:
    timings = {"prompt_n": 400, "prompt_per_second": 900.0, "predicted_per_second": 30.0}
    text = "".join(
        f"data: {json.dumps({'timings': {**timings, 'predicted_n': number}})}\n\n"
        for number in written
    )
    return httpx.Response(200, text=text)


async def test_prefill_and_decode_speeds_are_the_server_s_own() -> None:
    found = await benchmark({"/tokenize": TOKENS, "/completion": chunks(7)}, slots=1)
    assert found == Figures(900.0, 30.0, 30.0, None, None)


async def test_each_server_takes_its_share_of_the_machines_energy() -> None:
    """200 J for reading 400 tokens and 60 J for writing 6, by two servers at a time."""
    answers = {"/tokenize": TOKENS, "/completion": chunks(1, 4, 7)}
    readings = iter([0.0, 5.0, 5.0] + [100.0, 300.0, 360.0] * 3)
    found = await benchmark(answers, slots=1, read_joules=lambda: next(readings), servers=2)
    assert (found.prefill_joules, found.decode_joules) == (0.25, 5.0)
    # A counter that fails costs the energy alone.
    failing = iter([0.0, 1.0, 2.0, 3.0] + [None] * 100)
    found = await benchmark(answers, slots=1, read_joules=lambda: next(failing))
    assert (found.prefill, found.prefill_joules, found.decode_joules) == (900.0, None, None)
    # All busy slots share it: 10 J from reading to reading.
    more = iter(range(0, 100_000, 10))
    answers |= {"/completion": chunks(*range(1, 12)), "/slots": IDLE}
    found = await benchmark(answers, slots=2, read_joules=lambda: next(more))
    assert found.decode_joules == 10 / 20


@pytest.mark.real
@pytest.mark.smoke
async def test_a_server_is_measured_with_whole_prompts_and_left_idle() -> None:
    # A connection for each request: the server closes those that were idle for 5 s.
    limits = httpx.Limits(max_keepalive_connections=0)
    with demo_servers(1, slots=2, context=CONTEXT) as (url,):
        async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as client:
            benchmark = ServerBenchmark(url, client, REQUEST, slots=2, context=CONTEXT)
            figures = await benchmark.run()
            slots = (await client.get(f"{url}/slots")).json()
            before = await prompt_tokens(client, url)
            await ServerBenchmark(url, client, REQUEST, slots=1, context=CONTEXT).run()
            read = await prompt_tokens(client, url) - before
    assert min(figures.prefill, figures.decode, figures.decode_busy, known(figures.stall)) > 0
    assert not any(slot["is_processing"] for slot in slots)
    repeats, remainder = divmod(read, REQUEST.prompt)
    assert repeats in {1, 2, 3}
    assert remainder == 32  # the warm-up's


async def prompt_tokens(client: httpx.AsyncClient, url: str) -> int:
    for line in (await client.get(f"{url}/metrics")).text.splitlines():
        if line.startswith("llamacpp:prompt_tokens_total "):
            return int(float(line.split()[1]))
    raise AssertionError("no llamacpp:prompt_tokens_total")
