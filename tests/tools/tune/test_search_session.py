from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.tools.local.topology import read_topology
from gateway.tools.tune.machine_benchmark import BenchmarkResult, SettingFailedError
from gateway.tools.tune.measurements import BenchmarkRequest, Figures, Measurement, MeasurementLog
from gateway.tools.tune.report import (
    TuningReport,
    WriteError,
    build_report,
    check_target,
    draw_report,
    render_host_vars,
    role_variables,
    settings_along_knob,
    write_result,
)
from gateway.tools.tune.search import PlannedMeasurement, Search, TuningSession
from gateway.tools.tune.setting import Setting, rule_of_thumb, search_space
from tests.tools.local.machine import make_machine, two_sockets_with_smt

REPOSITORY = Path(__file__).resolve().parents[3]
REQUEST = BenchmarkRequest(1000, 100)
SUBJECT: dict[str, Any] = {
    "model": "m.gguf", "server": "embedded", "processor": "EPYC", "context": 4096,
}  # fmt: skip
EACH = 30.0  # seconds of a measurement


class Bench:
    """A machine whose figures are a formula and whose clock goes on as it measures."""

    def __init__(self, tmp_path: Path) -> None:
        self.topology = read_topology(make_machine(tmp_path / "m", two_sockets_with_smt()[:1]))
        self.records = MeasurementLog(tmp_path / "tuning.jsonl", SUBJECT)
        self.time = 0.0
        self.measured: list[Setting] = []
        self.refused: Callable[[Setting], bool] = lambda _: False
        self.others = 0.0

    def session(self) -> TuningSession:
        space = search_space(self.topology, context=4096, max_slots=4)
        earlier, _ = self.records.read()
        return TuningSession(
            Search(space, rule_of_thumb(self.topology)), REQUEST, "balanced", earlier
        )

    async def measure(self, setting: Setting, seconds: float) -> BenchmarkResult:
        self.measured.append(setting)
        self.time += EACH
        if self.refused(setting):
            raise SettingFailedError("not enough memory")
        figures = Figures(
            prefill=25.0 * setting.threads,
            decode=12.0 - abs(setting.threads - 3),
            decode_busy=(12.0 - abs(setting.threads - 3)) * setting.slots**0.5,
            stall=setting.batch / 100 if setting.slots > 1 else None,
            memory=setting.slots << 30,
        )
        return BenchmarkResult(figures, self.others)

    async def run(self, session: TuningSession, minutes: float = 60.0) -> list[PlannedMeasurement]:
        steps: list[PlannedMeasurement] = []
        await session.run(
            self.measure,
            seconds=minutes * 60,
            record=self.records.append,
            on_begin=steps.append,
            clock=lambda: self.time,
            now=lambda: 1e9 + self.time,
        )
        return steps


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def reported(session: TuningSession) -> TuningReport:
    found = build_report(session)
    assert found is not None
    return found


async def test_a_search_ends_with_the_best_and_says_by_how_much(bench: Bench) -> None:
    session = bench.session()
    await bench.run(session)
    found = reported(session)
    assert session.end_reason == "complete"
    assert found.best.setting == Setting(4, 128, 128, 4, "free")
    assert found.best.gain > 0.1
    assert found.best.significant
    assert "less than that of the rule of thumb" in found.verdict()[0]
    assert "smaller differences than" in found.verdict()[1]
    assert found.results[0].score == min(row.score for row in found.results)


async def test_nothing_is_begun_that_would_end_too_late(bench: Bench) -> None:
    session = bench.session()
    steps = await bench.run(session, minutes=5)
    assert session.end_reason == "time"
    assert bench.time <= 5 * 60
    assert [step.number for step in steps] == list(range(1, 10))
    assert steps[0].seconds_each is None
    assert steps[1].seconds_each == EACH
    found = reported(session)
    assert "the time was over" in " ".join(found.verdict())
    assert found.as_dict()["not_searched"]


async def test_the_time_may_end_within_the_first(bench: Bench) -> None:
    async def slow(setting: Setting, seconds: float) -> BenchmarkResult:
        raise TimeoutError

    session = bench.session()
    await session.run(slow, seconds=60, record=bench.records.append)
    assert session.end_reason == "time"
    assert build_report(session) is None


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


async def test_another_goal_uses_the_same_measurements(bench: Bench) -> None:
    await bench.run(bench.session())
    before = len(bench.measured)
    session = bench.session()
    session.goal = "throughput"
    await bench.run(session)
    assert len(session.measurements) > session.new_measurements
    assert session.new_measurements == len(bench.measured) - before


async def test_what_is_cancelled_keeps_what_was_measured(bench: Bench) -> None:
    session = bench.session()

    async def until_cancelled(setting: Setting, seconds: float) -> BenchmarkResult:
        if len(bench.measured) == 5:
            raise asyncio.CancelledError
        return await bench.measure(setting, seconds)

    with pytest.raises(asyncio.CancelledError):
        await session.run(until_cancelled, seconds=600, record=bench.records.append)
    assert session.end_reason == "interrupted"
    assert len(bench.records.read()[0]) == 5
    assert reported(session).best.repeats >= 3


async def test_a_setting_that_fails_is_reported_and_tried_again_by_a_later_run(
    bench: Bench,
) -> None:
    bench.refused = lambda setting: setting.slots > 2
    session = bench.session()
    await bench.run(session)
    failed = reported(session).as_dict()["failed"]
    assert {one["error"] for one in failed} == {"not enough memory"}
    assert {one["setting"]["slots"] for one in failed} == {3}
    assert reported(session).best.setting.slots <= 2
    bench.refused = lambda _: False
    again = bench.session()
    await bench.run(again)
    assert reported(again).best.setting.slots == 4


async def test_other_work_is_reported(bench: Bench) -> None:
    bench.others = 0.5
    session = bench.session()
    await bench.run(session, minutes=3)
    found = reported(session)
    assert found.disturbed_count == len(session.measurements)
    assert "Other work disturbed" in " ".join(found.verdict())


async def test_a_single_measurement_claims_nothing(bench: Bench) -> None:
    session = bench.session()
    await bench.run(session, minutes=0.75)
    verdict = reported(session).verdict()
    assert verdict[0].startswith("Only the rule of thumb was measured")
    assert verdict[1].startswith("A single measurement is taken to vary by 2.0%")


async def test_the_verdict_says_when_nothing_is_better(bench: Bench) -> None:
    async def same(setting: Setting, seconds: float) -> BenchmarkResult:
        return BenchmarkResult(Figures(100.0, 10.0, 10.0, 1.0, None), None)

    session = bench.session()
    await session.run(same, seconds=600, record=bench.records.append)
    found = reported(session)
    assert found.verdict()[0].startswith("Nothing that was tried is better than the rule of thumb")
    assert not found.as_dict()["better_than_rule_of_thumb"]
    assert not any(row.significant for row in found.results)


class TestRecords:
    ONE = Measurement(
        Setting(4, 512, 256, 2, "free"), Figures(1.0, 2.0, 3.0, None, None), None, 9.5, 1e9, 0.1
    )
    FAILED = Measurement(Setting(4, 512, 256, 8, "free"), None, "no memory", 1.0, 1e9)

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        records = MeasurementLog(tmp_path / "new" / "t.jsonl", SUBJECT)
        assert records.read() == ([], 0)
        records.append(self.ONE)
        records.append(self.FAILED)
        assert records.read() == ([self.ONE, self.FAILED], 0)

    def test_other_models_and_machines_are_left_alone(self, tmp_path: Path) -> None:
        ours, other = (
            MeasurementLog(tmp_path / "t.jsonl", SUBJECT | {"model": name}) for name in ("a", "b")
        )
        ours.append(self.ONE)
        assert other.read() == ([], 0)
        other.append(self.FAILED)
        assert ours.read() == ([self.ONE], 0)

    def test_a_line_that_a_kill_cut_short_costs_itself_only(self, tmp_path: Path) -> None:
        records = MeasurementLog(tmp_path / "t.jsonl", SUBJECT)
        records.append(self.ONE)
        with records.path.open("a") as file:
            file.write('{"subject": {"mod')
        records.append(self.FAILED)
        assert records.read() == ([self.ONE, self.FAILED], 1)

    def test_a_new_log_keeps_the_old_one(self, tmp_path: Path) -> None:
        records = MeasurementLog(tmp_path / "t.jsonl", SUBJECT)
        records.rotate()
        records.append(self.ONE)
        records.rotate()
        assert records.read() == ([], 0)
        assert len((tmp_path / "t.jsonl.1").read_text().splitlines()) == 1


class TestWriting:
    AT = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)

    async def test_host_vars_hold_variables_of_the_role_and_what_they_rest_on(
        self, bench: Bench, tmp_path: Path
    ) -> None:
        session = bench.session()
        await bench.run(session)
        path = tmp_path / "tuned.yml"
        write_result(path, reported(session), bench.topology, SUBJECT, self.AT)
        text = path.read_text()
        assert yaml.safe_load(text) == {
            "llama_node_threads": 4,
            "llama_node_batch": 128,
            "llama_node_ubatch": 128,
            "llama_node_slots": 4,
        }
        assert "# Goal balanced: requests of 1000 + 100 tokens" in text
        assert "2026-05-01 12:30 UTC" in text
        check_target(path)  # its own file may be written again
        assert not any(name.endswith(".part") for name in os.listdir(tmp_path))  # noqa: PTH208

    def test_the_role_knows_every_variable(self, bench: Bench) -> None:
        defaults = yaml.safe_load(
            (REPOSITORY / "deploy/ansible/roles/llama_node/defaults/main.yml").read_text()
        )
        written = role_variables(Setting(4, 512, 256, 2, "cores"), bench.topology)
        assert len(written) == 5
        assert set(written) <= set(defaults)

    def test_cores_become_an_affinity_that_systemd_reads(self, bench: Bench) -> None:
        written = role_variables(Setting(4, 512, 256, 2, "cores"), bench.topology)
        assert written["llama_node_service_options"] == {"CPUAffinity": "0-3"}

    async def test_json_holds_all_figures(self, bench: Bench, tmp_path: Path) -> None:
        session = bench.session()
        await bench.run(session)
        path = tmp_path / "tuned.json"
        write_result(path, reported(session), bench.topology, SUBJECT, self.AT)
        found = json.loads(path.read_text())
        assert found["best"]["setting"]["slots"] == 4
        assert len(found["tried"]) == len(session.median_by_setting())
        assert found["subject"] == SUBJECT

    async def test_a_comment_stays_one(self, bench: Bench) -> None:
        session = bench.session()
        await bench.run(session)
        text = render_host_vars(reported(session), bench.topology, SUBJECT, self.AT)
        head, _, _ = text.partition("\n---\n")
        assert all(line.startswith("# ") for line in head.splitlines())

    def test_variables_of_somebody_else_are_not_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "main.yml"
        path.write_text("llama_node_slots: 3\n")
        with pytest.raises(WriteError, match="a file of its own"):
            check_target(path)
        assert path.read_text() == "llama_node_slots: 3\n"

    def test_a_folder_that_would_hide_a_file_from_ansible_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "host_vars" / "epyc-1"
        folder.mkdir(parents=True)
        check_target(folder / "tuned.yml")
        (tmp_path / "host_vars" / "epyc-1.yml").write_text("a: 1\n")
        with pytest.raises(WriteError, match=r"Remedy: mv .*epyc-1\.yml .*main\.yml"):
            check_target(folder / "tuned.yml")

    @pytest.mark.parametrize("name", ["tuned.txt", "missing/tuned.yml"])
    def test_a_file_that_cannot_be_written_is_refused_before(
        self, tmp_path: Path, name: str
    ) -> None:
        with pytest.raises(WriteError):
            check_target(tmp_path / name)


class TestPlot:
    @pytest.mark.slow
    async def test_a_search_that_was_stopped_can_be_drawn(
        self, bench: Bench, tmp_path: Path
    ) -> None:
        session = bench.session()
        await bench.run(session, minutes=2)
        draw_report(tmp_path / "tuned.svg", reported(session), "title")
        assert b"<svg" in (tmp_path / "tuned.svg").read_bytes()

    async def test_a_column_holds_settings_that_differ_in_its_knob_only(self, bench: Bench) -> None:
        session = bench.session()
        await bench.run(session)
        near = settings_along_knob(reported(session), "slots")
        assert set(near) == {1, 2, 3, 4}
        assert len({setting.with_knob("slots", 1) for setting in near.values()}) == 1
