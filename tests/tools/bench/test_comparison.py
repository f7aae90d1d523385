from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gateway.tools.bench import comparison
from gateway.tools.bench.comparison import ComparisonError, Difference, compare, read_report
from gateway.tools.bench.report import FORMAT


def report(slower: float = 1.0, *, requests: int = 60, seed: int = 1, **given: Any) -> Any:
    """A report of one load, whose times are drawn at random."""
    rng = random.Random(seed)
    ttft = [slower * rng.lognormvariate(0, 0.2) for _ in range(requests)]
    samples = {
        "ttft": ttft,
        "inter_token": [0.05 * one for one in ttft],
        "completion": [5 * one for one in ttft],
        "tokens": [100] * requests,
    }
    load = {
        "label": "4 at a time",
        "load": {"loop": "closed", "level": 4},
        "samples": samples,
    }
    return {"format": FORMAT, "endpoint": "chat", "request": {"seed": 1}, "loads": [load], **given}


def by_figure(differences: list[Difference]) -> dict[str, Difference]:
    return {one.figure: one for one in differences}


def test_a_run_that_is_slower_by_a_third_is_worse_in_every_figure() -> None:
    differences, notes = compare(report(), report(1.33, seed=2))
    assert notes == []
    found = by_figure(differences)
    assert set(found) == {
        *(f"{name} {p}" for name in ("TTFT", "inter-token", "completion") for p in ("p50", "p95")),
        "tokens/s of all",
    }
    for name in ("TTFT p50", "completion p50", "tokens/s of all"):
        assert found[name].verdict == "worse"
    assert found["TTFT p50"].low < 0.33 < found["TTFT p50"].high
    assert found["tokens/s of all"].change == pytest.approx(1 / 1.33 - 1, abs=0.08)
    assert by_figure(compare(report(1.33), report(seed=2))[0])["TTFT p50"].verdict == "better"


def test_two_runs_of_one_server_rarely_differ() -> None:
    """Of 95 % intervals about one in twenty leaves out what is true."""
    wrong = sum(
        by_figure(compare(report(seed=seed), report(seed=seed + 1000))[0])["TTFT p50"].verdict
        in {"better", "worse"}
        for seed in range(20)
    )
    assert wrong <= 3


def test_the_same_figures_are_the_same() -> None:
    samples = {"ttft": [1.0] * 20, "inter_token": [], "completion": [2.0] * 20, "tokens": [3] * 20}
    one = report()
    one["loads"][0]["samples"] = samples
    differences, _ = compare(one, one)
    assert {one.verdict for one in differences} == {"same"}
    assert "inter-token p50" not in by_figure(differences)


def test_differing_requests_and_few_of_them_are_told() -> None:
    _, notes = compare(report(), report(request={"seed": 2}))
    assert notes == ["The runs differ in `request`: seed 1 and 2."]
    differences, notes = compare(report(requests=4), report())
    assert differences == []
    assert "only 4 requests succeeded" in notes[0]


def test_runs_without_a_common_load_can_not_be_compared() -> None:
    with pytest.raises(ComparisonError, match="no load in common: none; 4 at a time"):
        compare(report(loads=[]), report())


@pytest.mark.parametrize(
    "samples",
    [
        {},
        [],
        None,
        {"ttft": ["a"], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [float("nan")], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [-1], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [[1]], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [], "inter_token": [], "completion": [1], "tokens": []},
    ],
)
def test_broken_reports_are_refused(samples: object) -> None:
    broken = report()
    broken["loads"][0]["samples"] = samples
    with pytest.raises(ComparisonError, match="a report is broken"):
        compare(broken, report())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "no report"),
        ('{"loads": 1}', "no report"),
        ('{"loads": [], "format": 99}', "has format 99"),
    ],
)
def test_files_that_are_no_reports_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ComparisonError, match=message):
        read_report(path)


def test_an_enormous_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LARGEST_FILE", 100)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(report()))
    with pytest.raises(ComparisonError, match="larger than"):
        read_report(path)
