from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutation import find_again, mutants, sample


def made(tmp_path: Path, source: str) -> set[str]:
    """The source with each fault in it."""
    (tmp_path / "m.py").write_text(source)
    return {one.source(tmp_path).decode() for one in mutants(Path("m.py"), tmp_path)}


@pytest.mark.parametrize(
    ("source", "faulty"),
    [
        ("a < b", "(a) <= (b)"),
        ("a and b", "((a) or (b))"),
        ("not a", "(a)"),
        ("x = True", "x = False"),
        ("x = 2", "x = 3"),
        ("a.b = c", "pass"),
        ("a.b()", "pass"),
        ("é = a + b", "é = ((a) - (b))"),
        ("if a:\n    b", "if (not (a)):\n    b"),
        ("def f():\n    return a", "def f():\n    return None"),
        ("while a:\n    break", "while a:\n    continue"),
    ],
)
def test_a_fault_replaces_one_piece_of_source(tmp_path: Path, source: str, faulty: str) -> None:
    found = made(tmp_path, source)
    assert faulty in found
    for one in found:
        compile(one, "m.py", "exec")


def test_a_fault_is_found_again_where_the_code_has_moved(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    module = tmp_path / "p" / "m.py"
    module.write_text("a = 1\nb = 1\nc = 2\n")
    described = [str(mutant) for mutant in sample(tmp_path, ["p"], 3, 1)]
    module.write_text("x.y = None\nb = 1\na = 1\n")
    assert [mutant.line for mutant in find_again(tmp_path, ["p"], described)] == [2, 2]
