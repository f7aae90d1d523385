"""The drawing in docs/architecture.md is that of the code, and of nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.house.picture import BEGIN, END, PAGE, ROOT, counted, drawing, layers, packages, page
from tests.house.source import modules

FILES = {
    "pyproject.toml": (
        "[tool.importlinter]\n[[tool.importlinter.contracts]]\n"
        'layers = ["(top)", "left | right", "(base) : (gone)"]\n'
    ),
    "gateway/__init__.py": "",
    "gateway/top.py": '"""Begins."""\nfrom gateway.left.deep import one\nfrom gateway import base',
    "gateway/left/__init__.py": '"""Does what is left."""',
    "gateway/left/deep/__init__.py": "",
    "gateway/left/deep/one.py": "from gateway.left import deep",
    "gateway/right.py": "def late():\n    from gateway import base",
    "gateway/base.py": "",
    "docs/architecture.md": f"# Page\n\n{BEGIN}\nold\n{END}\n\nmore\n",
}


def write(root: Path) -> None:
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_packages_are_drawn_by_layer_with_what_they_import(tmp_path: Path) -> None:
    write(tmp_path)
    drawn = drawing(layers(tmp_path), packages(modules(tmp_path)))
    assert [line.strip("│ ").replace(" ", "") for line in drawn.splitlines() if "│" in line] == [
        "top│──►left,ground",
        "left(deep)",
        "right│──►ground",
        "ground:base",
    ]


def test_a_page_keeps_its_text_around_the_drawing(tmp_path: Path) -> None:
    write(tmp_path)
    text = page(tmp_path)
    assert text.startswith(f"# Page\n\n{BEGIN}\n")
    assert text.endswith(f"\n{END}\n\nmore\n")
    assert "| 2 | `left` | Does what is left. |" in text
    assert "old" not in text


def test_lines_of_listed_modules_are_counted(tmp_path: Path) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway/a.py").write_text("x = 1\ny = 2\n")
    assert counted("| 1 | `a.py` | 9 | begins |", tmp_path) == "| 1 | `a.py` | 2 | begins |"
    assert counted("| 1 | `gone.py` | 9 | begins |", tmp_path) == "| 1 | `gone.py` | 9 | begins |"


def test_the_drawing_is_up_to_date() -> None:
    assert page(ROOT) == (ROOT / PAGE).read_text(), "python -m tests.house.picture --write"
