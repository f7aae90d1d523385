from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from gateway.cli.workshop.tune import print_report
from gateway.workshop.tune.report import (
    WriteError,
    check_target,
    draw_report,
    role_variables,
    write_result,
)
from gateway.workshop.tune.search import BenchmarkResult, Figures, Setting
from tests.workshop.tune.fake_machine import SUBJECT, Bench, reported

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


@pytest.mark.slow
async def test_a_search_that_was_stopped_can_be_drawn(bench: Bench, tmp_path: Path) -> None:
    draw_report(tmp_path / "tuned.svg", await bench.tuned(minutes=2), "title")
    assert b"<svg" in (tmp_path / "tuned.svg").read_bytes()
