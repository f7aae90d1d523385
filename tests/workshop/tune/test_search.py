from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli.workshop.tune import print_report
from gateway.local.gguf import ModelFile
from gateway.local.plan import plan_servers
from gateway.local.topology import Topology, read_topology
from gateway.workshop.tune.report import (
    TuningReport,
    WriteError,
    build_report,
    check_target,
    role_variables,
    write_result,
)
from gateway.workshop.tune.search import (
    BATCH_SIZES,
    MICRO_BATCH_SIZES,
    BenchmarkRequest,
    BenchmarkResult,
    Figures,
    Measurement,
    MeasurementLog,
    Search,
    SearchSpace,
    Setting,
    SettingFailedError,
    TuningGoal,
    TuningSession,
    combine_servers,
    median_figures,
    rule_of_thumb,
    score,
    search_space,
    server_spec,
)
from tests.each_case import each_case
from tests.known import known
from tests.local.machine import make_machine, two_sockets_with_smt

SPACE = SearchSpace(
    threads=(8, 12, 15, 16),
    batch=BATCH_SIZES,
    micro_batch=MICRO_BATCH_SIZES,
    slots=(1, 2, 3, 4, 6, 8),
    pinning=("free", "cores"),
)
START = Setting(16, 512, 256, 2, "free")
MOST = 75  # measurements that a search may take; the full grid has 2,000 settings

Surface = Callable[[Setting], float]


def towards(best: Setting, steep: float = 0.15) -> Surface:
    """A surface that gets worse by a share with each step away from the best value of a knob."""

    def seconds(setting: Setting) -> float:
        away = (
            abs(SPACE.threads.index(setting.threads) - SPACE.threads.index(best.threads))
            + abs(math.log2(setting.batch / best.batch))
            + abs(math.log2(setting.micro_batch / best.micro_batch))
            + abs(SPACE.slots.index(setting.slots) - SPACE.slots.index(best.slots))
            + (setting.pinning != best.pinning)
        )
        return float(30 * (1 + steep) ** away)

    return seconds


def run(
    surface: Surface, *, noise: float = 0.0, seed: int = 1, space: SearchSpace = SPACE
) -> tuple[Search, int]:
    rng = random.Random(seed)
    search = Search(space, START)
    measured = 0
    for setting in search.settings_to_measure():
        measured += 1
        assert measured <= 10 * MOST, "it does not end"
        search.history.add(setting, surface(setting) * math.exp(rng.gauss(0, noise)))
    return search, measured


@pytest.mark.parametrize(
    "best",
    [
        START,
        Setting(12, 512, 256, 2, "free"),
        Setting(15, 1024, 512, 4, "cores"),
        Setting(8, 128, 64, 1, "free"),
        Setting(16, 2048, 1024, 8, "cores"),
        Setting(16, 128, 128, 2, "free"),
        Setting(16, 1024, 1024, 2, "free"),
    ],
    ids=str,
)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_best_of_a_surface_is_found(best: Setting, noise: float) -> None:
    search, measured = run(towards(best), noise=noise)
    assert search.best == best
    assert measured <= MOST
    assert search.unsearched_knobs() == []
    assert all(one.micro_batch <= one.batch for one in search.history.scores)


def test_on_a_flat_surface_the_rule_of_thumb_stays() -> None:
    unchanged = sum(
        run(lambda _: 30.0, noise=0.03, seed=seed)[0].best == START for seed in range(60)
    )
    assert unchanged >= 54


# Sessions on a machine whose figures follow a formula.


MODEL = ModelFile(Path("/models/m.gguf"), "m", 4 << 30, 32_768)
FIGURES = Figures(prefill=100.0, decode=10.0, decode_busy=16.0, stall=4.0, memory=None)
REQUEST = BenchmarkRequest(prompt=1000, answer=100)
SUBJECT: dict[str, Any] = {
    "model": "m.gguf", "server": "embedded", "processor": "EPYC", "context": 4096,
}  # fmt: skip


EACH = 30.0  # seconds of a measurement


class Bench:
    """A machine whose figures follow a formula, with a clock that each measurement advances."""

    def __init__(self, tmp_path: Path) -> None:
        self.topology = read_topology(make_machine(tmp_path / "m", two_sockets_with_smt()[:1]))
        self.records = MeasurementLog(tmp_path / "tuning.jsonl", SUBJECT)
        self.time = 0.0
        self.measured: list[Setting] = []
        self.fails: Callable[[Setting], bool] = lambda _: False

    def session(self) -> TuningSession:
        space = search_space(self.topology, context=4096, max_slots=4)
        earlier, _ = self.records.read()
        return TuningSession(
            Search(space, rule_of_thumb(self.topology)), REQUEST, "balanced", earlier
        )

    async def measure(self, setting: Setting, seconds: float) -> BenchmarkResult:
        self.measured.append(setting)
        self.time += EACH
        if self.fails(setting):
            raise SettingFailedError("not enough memory")
        figures = Figures(
            prefill=25.0 * setting.threads,
            decode=12.0 - abs(setting.threads - 3),
            decode_busy=(12.0 - abs(setting.threads - 3)) * setting.slots**0.5,
            stall=setting.batch / 100 if setting.slots > 1 else None,
            memory=setting.slots << 30,
        )
        return figures, 0.0

    async def run(self, session: TuningSession, minutes: float = 60.0) -> list[float | None]:
        """Run it; the seconds that a measurement was expected to take, before each."""
        steps: list[float | None] = []
        await session.run(
            self.measure,
            seconds=minutes * 60,
            record=self.records.append,
            on_begin=lambda _setting, _left, each: steps.append(each),
            clock=lambda: self.time,
            now=lambda: 1e9 + self.time,
        )
        return steps

    async def tuned(self, minutes: float = 60.0) -> TuningReport:
        """The report of a new session of so many minutes at most."""
        session = self.session()
        await self.run(session, minutes)
        return reported(session)


def reported(session: TuningSession) -> TuningReport:
    return known(build_report(session))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_search_ends_with_the_best_and_says_by_how_much(bench: Bench) -> None:
    session = bench.session()
    await bench.run(session)
    found = reported(session)
    assert session.end_reason == "complete"
    assert found.best.setting == Setting(4, 128, 128, 4, "free")
    assert found.best.gain > 0.1
    assert found.best.more_than_noise
    assert "less than that of the rule of thumb" in found.verdict()[0]
    assert "smaller differences than" in found.verdict()[1]
    assert found.results[0].score == min(row.score for row in found.results)


async def test_no_measurement_begins_that_would_end_too_late(bench: Bench) -> None:
    session = bench.session()
    steps = await bench.run(session, minutes=5)
    assert session.end_reason == "time"
    assert bench.time <= 5 * 60
    assert len(steps) == 9
    assert steps[:2] == [None, EACH]
    found = reported(session)
    assert "the time was over" in " ".join(found.verdict())
    assert found.as_dict()["not_searched"]


async def test_a_later_run_goes_on_where_the_first_one_stopped(
    bench: Bench, tmp_path: Path
) -> None:
    whole = Bench(tmp_path / "whole")
    at_once = whole.session()
    await whole.run(at_once)
    await bench.run(bench.session(), minutes=4)
    second = bench.session()
    await bench.run(second)
    assert bench.measured == whole.measured
    assert len(second.measurements) == len(at_once.measurements)
    assert reported(second).best == reported(at_once).best
    third = bench.session()
    assert await bench.run(third) == []
    assert third.end_reason == "complete"


async def test_cancelling_keeps_the_measurements(bench: Bench) -> None:
    session = bench.session()

    async def until_cancelled(setting: Setting, seconds: float) -> BenchmarkResult:
        if len(bench.measured) == 5:
            raise asyncio.CancelledError
        return await bench.measure(setting, seconds)

    with pytest.raises(asyncio.CancelledError):
        await session.run(until_cancelled, seconds=600, record=bench.records.append)
    assert session.end_reason == "interrupted"
    assert len(bench.records.read()[0]) == 5
    assert reported(session).best.measured >= 3


async def test_a_setting_that_fails_is_reported_and_tried_again_by_a_later_run(
    bench: Bench,
) -> None:
    bench.fails = lambda setting: setting.slots > 2
    found = await bench.tuned()
    failed = found.as_dict()["failed"]
    assert {one["error"] for one in failed} == {"not enough memory"}
    assert {one["setting"]["slots"] for one in failed} == {3}
    assert found.best.setting.slots <= 2
    bench.fails = lambda _: False
    assert (await bench.tuned()).best.setting.slots == 4


ONE = Measurement(
    Setting(4, 512, 256, 2, "free"), Figures(1.0, 2.0, 3.0, None, None), None, 9.5, 1e9, 0.1
)
FAILED = Measurement(Setting(4, 512, 256, 8, "free"), None, "no memory", 1.0, 1e9)


def test_a_line_that_a_kill_cut_short_costs_itself_only_and_a_new_log_keeps_the_old_one(
    tmp_path: Path,
) -> None:
    records = MeasurementLog(tmp_path / "new" / "t.jsonl", SUBJECT)
    records.rotate()
    assert records.read() == ([], 0)
    records.append(ONE)
    with records.path.open("a") as file:
        file.write('{"subject": {"mod')
    records.append(FAILED)
    assert records.read() == ([ONE, FAILED], 1)
    # Other models and machines are left alone.
    other = MeasurementLog(records.path, SUBJECT | {"model": "other"})
    assert other.read() == ([], 1)
    records.rotate()
    assert records.read() == ([], 0)
    assert "no memory" in records.path.with_name("t.jsonl.1").read_text()


@pytest.fixture
def two_sockets(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path, two_sockets_with_smt()))


@pytest.fixture
def smt(tmp_path: Path) -> Topology:
    return read_topology(make_machine(tmp_path, two_sockets_with_smt()[:1]))


def test_the_search_begins_with_the_setting_of_up(two_sockets: Topology) -> None:
    start = rule_of_thumb(two_sockets)
    assert start == Setting(4, 512, 256, 2, "node")
    planned = plan_servers(two_sockets, MODEL)
    for spec in planned:
        changed = server_spec(start, spec, two_sockets, spec.context)
        same = replace(
            spec,
            name=changed.name,
            batch=512,
            micro_batch=256,
            prompt_cache_bytes=changed.prompt_cache_bytes,
        )
        assert changed == same


def test_threads_are_physical_cores_at_most_and_no_more_than_a_quota(smt: Topology) -> None:
    for quota, threads in ((None, (2, 3, 4)), (2.0, (1, 2))):
        machine = replace(smt, cpu_quota=quota)
        assert search_space(machine, context=4096, max_slots=8).threads == threads


def test_one_thread_of_each_core_is_tried_where_cores_have_several(
    smt: Topology, tmp_path: Path
) -> None:
    assert search_space(smt, context=4096, max_slots=8).pinning == ("free", "cores")
    spec = plan_servers(smt, MODEL)[0]
    pinned = server_spec(Setting(4, 512, 256, 2, "cores"), spec, smt, 4096)
    assert pinned.cpus == (0, 1, 2, 3)
    plain = read_topology(make_machine(tmp_path / "plain", [[[0], [1]]]))
    assert search_space(plain, context=4096, max_slots=8).pinning == ("free",)


@each_case(
    ("goal", "changed", "seconds"),
    [
        ("latency", {}, 10 + 10 + 4),
        # With one slot a request waits for its neighbour.
        ("latency", {"stall": None}, (10 + 10) * 1.5),
        ("throughput", {}, 10 + 100 / 16),
        ("balanced", {}, (24 * 16.25) ** 0.5),
    ],
)
def test_a_goal_is_a_number_of_seconds(
    goal: TuningGoal, changed: dict[str, float | None], seconds: float
) -> None:
    figures = replace(FIGURES, **changed)  # type: ignore[arg-type]
    assert score(figures, REQUEST, goal) == pytest.approx(seconds)


def test_repeats_give_medians_and_servers_give_means() -> None:
    slow = Figures(80.0, 8.0, 14.0, 6.0, 100)
    fast = Figures(120.0, 30.0, 20.0, 1.0, 300)
    assert median_figures([FIGURES, slow, fast]) == Figures(100.0, 10.0, 16.0, 4.0, 300)
    assert combine_servers([slow, fast]) == Figures(100.0, 19.0, 17.0, 6.0, 400)


ROLE = Path(__file__).parents[3] / "deploy/ansible/roles/llama_node/defaults/main.yml"
AT = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)


async def test_the_verdict_says_when_nothing_is_better_and_what_energy_was_measured(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    async def same(setting: Setting, seconds: float) -> BenchmarkResult:
        return Figures(100.0, 10.0, 10.0, 1.0, None, 0.25, 7.2), None

    session = bench.session()
    await session.run(same, seconds=600, record=bench.records.append)
    found = reported(session)
    assert found.verdict()[0].startswith("Nothing that was tried is better than the rule of thumb")
    assert not found.as_dict()["better_than_rule_of_thumb"]
    assert not any(row.more_than_noise for row in found.results)
    assert (
        "takes 7.2 J for a written token (2 kWh a million) and 0.25 J for a prompt token"
        in " ".join(found.verdict())
    )
    print_report(found)
    assert "J/TOK" in capsys.readouterr().out


async def test_host_vars_hold_variables_of_the_role_and_their_measurements(
    bench: Bench, tmp_path: Path
) -> None:
    path, tuned = tmp_path / "tuned.yml", await bench.tuned()
    write_result(path, tuned, bench.topology, SUBJECT, AT)
    text = path.read_text()
    comment, _, _ = text.partition("\n---\n")
    assert all(line.startswith("# ") for line in comment.splitlines())
    names = {"threads": 4, "batch": 128, "ubatch": 128, "slots": 4}
    assert yaml.safe_load(text) == {f"llama_node_{name}": value for name, value in names.items()}
    assert "# Goal balanced: requests of 1000 + 100 tokens" in text
    assert "2026-05-01 12:30 UTC" in text
    check_target(path)  # its own file may be written again
    write_result(tmp_path / "tuned.json", tuned, bench.topology, SUBJECT, AT)
    found = json.loads((tmp_path / "tuned.json").read_text())
    assert (found["best"]["setting"]["slots"], found["subject"]) == (4, SUBJECT)
    assert len(found["tried"]) == len(set(bench.measured))
    # The role knows every variable, and cores are an affinity for systemd.
    written = role_variables(Setting(4, 512, 256, 2, "cores"), bench.topology)
    assert len(written) == 5
    assert set(written) <= set(yaml.safe_load(ROLE.read_text()))
    assert written["llama_node_service_options"] == {"CPUAffinity": "0-3"}


def test_other_variables_are_neither_overwritten_nor_hidden(tmp_path: Path) -> None:
    path = tmp_path / "main.yml"
    path.write_text("llama_node_slots: 3\n")
    with pytest.raises(WriteError, match="a file of its own"):
        check_target(path)
    folder = tmp_path / "host_vars" / "epyc-1"
    folder.mkdir(parents=True)
    check_target(folder / "tuned.yml")
    (tmp_path / "host_vars" / "epyc-1.yml").write_text("a: 1\n")
    with pytest.raises(WriteError, match=r"Remedy: mv .*epyc-1\.yml .*main\.yml"):
        check_target(folder / "tuned.yml")
    for name in ("tuned.txt", "missing/tuned.yml"):
        with pytest.raises(WriteError):
            check_target(tmp_path / name)
