from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import instructions


def test_the_sum_is_read_from_a_dump(tmp_path: Path) -> None:
    dump = tmp_path / "counted.1.1"
    dump.write_text(
        "version: 1\nevents: Ir\nsummary: 12345\n\nfn=(1) main\n16 400\ntotals: 12345\n"
    )
    assert instructions.sum_of(dump) == 12345


def test_a_dump_without_a_sum_is_no_count(tmp_path: Path) -> None:
    dump = tmp_path / "counted.1.1"
    dump.write_text("version: 1\n")
    with pytest.raises(RuntimeError, match="no sum"):
        instructions.sum_of(dump)


def test_a_checkout_without_an_environment_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/valgrind")
    with pytest.raises(SystemExit) as ended:
        instructions.main([str(tmp_path)])
    assert ended.value.code == 2
    assert "has no .venv" in capsys.readouterr().err


def test_work_by_the_clock_is_shared_out_over_the_requests_of_a_second() -> None:
    embedding = instructions.SCENARIOS[0].name
    rows = [
        [{embedding: 1000, instructions.IDLE: 0}, {embedding: 1100, instructions.IDLE: 50}],
        [{embedding: 1200, instructions.IDLE: 10_000}],
    ]
    assert list(instructions.report(rows)) == [
        "plain embeddings: 1,000 to 1,100 (1.000 x), 1,200 to 1,200 (1.200 x)",
        "a second of an idle gateway: 0 to 50, 10,000 to 10,000",
        "With their share of the work by the clock, at 100 requests a second:",
        "plain embeddings: 1,000 (1.000 x), 1,300 (1.300 x)",
    ]
