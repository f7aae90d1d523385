from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.ci import all as run_groups
from tests.ci.all import run_group, within
from tests.ci.change import ROOT
from tests.ci.groups import Group, commands_of, read_table, runs_of

TABLE = """
[groups.kills]
about = "kills"
seconds = 10
tests = ["tests/kills/", "tests/a/test_one.py"]
options = ["", "--fast yes"]

[groups.real]
about = "real servers"
seconds = 20
marks = ["real"]
is_second = true

[groups.equipment]
about = "equipment"
seconds = 5
files = ["tests/equipment/"]
commands = ["make docs ARGS='a b'", "python -m this"]

[groups.rest]
about = "the rest"
seconds = 5
tests = ["tests/"]

[code]
"gateway/" = ["rest"]
"gateway/a/" = ["kills", "real"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "groups.toml").write_text(TABLE)
    return tmp_path / "groups.toml"


@pytest.mark.parametrize(
    ("test", "is_fast", "group"),
    [
        ("tests/kills/test_a.py", False, "kills"),
        ("tests/kills/test_a.py", True, None),
        ("tests/equipment/test_a.py", True, "equipment"),
        ("tests/b/test_a.py", False, "rest"),
    ],
)
def test_a_test_belongs_to_the_first_group_that_claims_it(
    path: Path, test: str, is_fast: bool, group: str | None
) -> None:
    found = read_table(path).group_of(test, {"real"}, is_fast=is_fast)
    assert (found.name if found else None) == group


def test_the_groups_of_a_change_come_with_the_most_touched_one_first(path: Path) -> None:
    changed = {"gateway/b.py": {1, 2, 3}, "gateway/a/b.py": {1}, "tests/a/test_one.py": {5, 6}}
    names = [group.name for group in read_table(path).touched(changed)]
    assert names == ["rest", "kills", "real"]


def test_a_group_runs_its_tests_with_each_option_and_then_its_commands(path: Path) -> None:
    groups = read_table(path).groups
    places = ["tests/kills/", "tests/a/test_one.py"]
    assert runs_of(groups["kills"]) == [
        ["--group", "kills", *places],
        ["--group", "kills", "--fast", "yes", *places],
    ]
    assert runs_of(groups["real"]) == [["--group", "real", "tests"]]
    assert commands_of(groups["equipment"]) == [
        ["make", "docs", "ARGS=a b"],
        [sys.executable, "-m", "this"],
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [('"kills", "real"', '"kils"', "no group is called kils"), ("about", "abuot", "abuot")],
)
def test_a_wrong_table_is_refused(path: Path, old: str, new: str, said: str) -> None:
    path.write_text(TABLE.replace(old, new))
    with pytest.raises(ValueError, match=said):
        read_table(path)


def test_everything_that_the_table_names_exists() -> None:
    table = read_table()
    named = {
        *table.code,
        *(one for group in table.groups.values() for one in group.files + group.tests),
    }
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_package_of_the_gateway_has_groups_of_its_own() -> None:
    table = read_table()
    packages = [path.parent for path in (ROOT / "gateway").glob("*/__init__.py")]
    assert [one.name for one in packages if f"gateway/{one.name}/" not in table.code] == []


# Running them.


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
