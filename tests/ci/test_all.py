from __future__ import annotations

import pytest

from tests.ci import all as run_groups
from tests.ci.all import run_group, within
from tests.ci.groups import Group


def group(name: str, seconds: int = 10, **more: tuple[str, ...]) -> Group:
    return Group(about=name, seconds=seconds, name=name, **more)  # type: ignore[arg-type]


def test_a_budget_takes_groups_in_their_order_as_far_as_they_fit() -> None:
    groups = [group("one", 50), group("two", 100), group("three", 40)]
    fitting, rest = within(groups, 90)
    assert [one.name for one in fitting] == ["one", "three"]
    assert [one.name for one in rest] == ["two"]


def test_all_commands_of_a_group_run_though_one_fails() -> None:
    found = run_group(group("one", commands=("false", "true", "false")), since=None, repeat=False)
    assert found.failures == ["false", "false"]
    assert not found.passed


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
