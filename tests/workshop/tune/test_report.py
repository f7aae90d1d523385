from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from gateway.cli.workshop.tune import print_report
from gateway.workshop.tune.report import (
    WriteError,
    check_target,
    draw_report,
    format_figures,
    role_variables,
    settings_along_knob,
    write_result,
)
from gateway.workshop.tune.search import BenchmarkResult, Figures, Setting
from tests.workshop.tune.fake_machine import SUBJECT, Bench, reported

REPOSITORY = Path(__file__).resolve().parents[3]


async def test_other_work_is_reported(bench: Bench) -> None:
    bench.other_work = 0.5
    session = bench.session()
    await bench.run(session, minutes=3)
    found = reported(session)
    assert found.disturbed_count == len(session.measurements)
    assert "Other work disturbed" in " ".join(found.verdict())


async def test_a_single_measurement_claims_nothing(bench: Bench) -> None:
    verdict = (await bench.tuned(minutes=0.75)).verdict()
    assert verdict[0].startswith("Only the rule of thumb was measured")
    assert verdict[1].startswith("A single measurement is taken to vary by 2.0%")


async def test_the_verdict_says_when_nothing_is_better(bench: Bench) -> None:
    async def same(setting: Setting, seconds: float) -> BenchmarkResult:
        return Figures(100.0, 10.0, 10.0, 1.0, None), None

    session = bench.session()
    await session.run(same, seconds=600, record=bench.records.append)
    found = reported(session)
    assert found.verdict()[0].startswith("Nothing that was tried is better than the rule of thumb")
    assert not found.as_dict()["better_than_rule_of_thumb"]
    assert not any(row.more_than_noise for row in found.results)


async def test_energy_is_reported_where_it_was_measured(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    async def metered(setting: Setting, seconds: float) -> BenchmarkResult:
        return Figures(100.0, 10.0, 10.0, 1.0, None, 0.25, 7.2), None

    session = bench.session()
    await session.run(metered, seconds=600, record=bench.records.append)
    found = reported(session)
    assert (
        "takes 7.2 J for a written token (2 kWh a million) and 0.25 J for a prompt token"
        in " ".join(found.verdict())
    )
    assert found.as_dict()["best"]["figures"]["decode_joules"] == 7.2
    assert "7.2 J a written token" in format_figures(found.best.figures)
    print_report(found)
    shown = capsys.readouterr().out
    assert "J/TOK" in shown
    assert " 7.2 " in shown


async def test_nothing_is_said_of_energy_where_none_was_measured(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(await bench.tuned(minutes=3))
    shown = capsys.readouterr().out
    assert "STALL" in shown
    assert "J/TOK" not in shown
    assert " J " not in shown


class TestWriting:
    AT = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)

    async def test_host_vars_hold_variables_of_the_role_and_their_measurements(
        self, bench: Bench, tmp_path: Path
    ) -> None:
        path = tmp_path / "tuned.yml"
        write_result(path, await bench.tuned(), bench.topology, SUBJECT, self.AT)
        text = path.read_text()
        comment, _, _ = text.partition("\n---\n")
        assert all(line.startswith("# ") for line in comment.splitlines())
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

    def test_the_role_knows_every_variable_and_cores_are_an_affinity_for_systemd(
        self, bench: Bench
    ) -> None:
        defaults = yaml.safe_load(
            (REPOSITORY / "deploy/ansible/roles/llama_node/defaults/main.yml").read_text()
        )
        written = role_variables(Setting(4, 512, 256, 2, "cores"), bench.topology)
        assert len(written) == 5
        assert set(written) <= set(defaults)
        assert written["llama_node_service_options"] == {"CPUAffinity": "0-3"}

    async def test_json_holds_all_figures(self, bench: Bench, tmp_path: Path) -> None:
        path = tmp_path / "tuned.json"
        write_result(path, await bench.tuned(), bench.topology, SUBJECT, self.AT)
        found = json.loads(path.read_text())
        assert found["best"]["setting"]["slots"] == 4
        assert len(found["tried"]) == len(set(bench.measured))
        assert found["subject"] == SUBJECT

    def test_other_variables_are_not_overwritten(self, tmp_path: Path) -> None:
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
        draw_report(tmp_path / "tuned.svg", await bench.tuned(minutes=2), "title")
        assert b"<svg" in (tmp_path / "tuned.svg").read_bytes()

    async def test_a_column_holds_settings_that_differ_in_its_knob_only(self, bench: Bench) -> None:
        near = settings_along_knob(await bench.tuned(), "slots")
        assert set(near) == {1, 2, 3, 4}
        assert len({setting.with_knob("slots", 1) for setting in near.values()}) == 1
