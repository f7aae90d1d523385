from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ci import all as run_groups
from tests.ci.all import Result, Results, run_all, run_group, within
from tests.ci.groups import Group, Table


def group(name: str, seconds: int = 10, **more: tuple[str, ...]) -> Group:
    return Group(about=name, seconds=seconds, name=name, **more)  # type: ignore[arg-type]


def result(name: str, *failures: str) -> Result:
    return Result(name, "c0ffee" * 6, not failures, 12.3, 4, list(failures))


def test_a_budget_takes_groups_in_their_order_as_far_as_they_fit() -> None:
    groups = [group("one", 50), group("two", 100), group("three", 40)]
    fitting, rest = within(groups, 90)
    assert [one.name for one in fitting] == ["one", "three"]
    assert [one.name for one in rest] == ["two"]


@pytest.fixture
def table() -> Table:
    return Table({"one": group("one")}, {"gateway/": ("one",)})


def test_the_newest_result_holds_until_something_changes_that_the_group_is_for(
    tmp_path: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, one = Results(tmp_path), table.groups["one"]
    monkeypatch.setattr(run_groups, "git", lambda root, *words: "c2\nc1\n")
    changed: dict[str, set[int]] = {"docs/a.md": {1}}
    monkeypatch.setattr(run_groups, "change", lambda since, root: changed)
    assert results.still_passed(one, table) is None
    results.keep(Result("one", "c1", passed=True, seconds=1.0))
    results.keep(Result("one", "", passed=False, seconds=1.0))  # of a dirty tree
    found = results.still_passed(one, table)
    assert found is not None
    assert found.commit == "c1"
    changed["gateway/a.py"] = {1}
    assert results.still_passed(one, table) is None
    del changed["gateway/a.py"]
    results.keep(Result("one", "c2", passed=False, seconds=1.0, failures=["a"]))
    assert results.still_passed(one, table) is None
    assert json.loads((tmp_path / "c2" / "one.json").read_text())["failures"] == ["a"]


def test_all_commands_of_a_group_run_though_one_fails() -> None:
    found = run_group(group("one", commands=("false", "true", "false")), since=None, repeat=False)
    assert found.failures == ["false", "false"]
    assert not found.passed


def test_a_failed_group_does_not_end_the_run() -> None:
    kept: list[str] = []
    results, resumed = run_all(
        [group("one"), group("two"), group("three")],
        kept=lambda one: result("one") if one.name == "one" else None,
        run=lambda one: result(one.name, *(["a"] if one.name == "two" else [])),
        keep=lambda one: kept.append(one.group),
    )
    assert [one.passed for one in results] == [True, False, True]
    assert resumed == {"one"}
    assert kept == ["two", "three"]


@pytest.mark.parametrize("words", [["nothing"], ["--without", "nothing"]])
def test_an_unknown_group_is_an_error_of_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_groups.main(words)
    assert "no group nothing: chaos, kills" in capsys.readouterr().err


def test_groups_of_hours_run_only_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_groups.main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "kills" in names
    assert "long" not in names
    assert run_groups.main(["--list", "long"]) == 0
    assert capsys.readouterr().out.startswith("long")
