"""The pages are written alike, and what they tell one to type exists."""

from __future__ import annotations

import html
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.command_lines import BLOCK, PROMPT, calls, unknown

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MOST_ENTRIES = 12
"""What a reader takes in at a glance: of the navigation, and of a group that is unfolded."""
PICTURE = ROOT / "docs" / "images" / "first-minute.svg"
BEFORE_THE_PATH = re.compile(r"\.venv/bin/(?!activate)")


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_command_and_flag_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    assert [(" ".join(words), wrong) for words in calls(text) if (wrong := unknown(words))] == []
    modules = re.findall(r"python -m ((?:tests|gateway)[\w.]*)", text)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


MODULES = {
    f"/{shown(path)}"
    for part in ("gateway", "setup", "tests", "deploy")
    for path in (ROOT / part).rglob("*.py")
}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    assert {name for name in named if not any(one.endswith(f"/{name}") for one in MODULES)} == set()


def test_a_command_that_does_not_exist_is_found() -> None:
    page = "```console\n$ cd x && llama-gateway nodes drain a --slowly  # soon\n```\n"
    page += "`llama-gateway fly`, `journalctl -u llama-gateway -n 5`, `llama-gateway nodes fix a`\n"
    assert [unknown(words) for words in calls(page)] == [["--slowly"], ["fly"], ["fix"]]


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_commands_look_the_same_everywhere(page: Path) -> None:
    """In `console` blocks behind a `$`; the program and its peers are on the PATH."""
    for block in BLOCK.finditer(page.read_text()):
        assert block["kind"] not in {"bash", "sh", "shell"}, (
            "write ```console, and `$ ` before commands"
        )
        if block["kind"] == "console":
            assert not BEFORE_THE_PATH.search(block["text"]), (
                "after one `source .venv/bin/activate`"
            )
            assert PROMPT.match(block["text"]), "the first line of a console block is a command"


def test_the_navigation_is_read_at_a_glance() -> None:
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    groups = {name: pages for entry in entries for name, pages in entry.items()}
    assert len(groups) <= MOST_ENTRIES
    assert [
        name
        for name, pages in groups.items()
        if len(pages) > MOST_ENTRIES and isinstance(pages, list)
    ] == []


def test_readme_begins_with_the_picture_and_the_home_page_too() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        first, *_ = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
        assert Path(first).name == "slot-timeline.svg"


def test_the_picture_is_of_this_program_and_of_no_machine() -> None:
    drawn = PICTURE.read_text()
    assert "url(http" not in drawn, "nothing is loaded from elsewhere"
    texts = map(html.unescape, re.findall(r"<text[^>]*>([^<]+)</text>", drawn))
    words = [" ".join(text.split()) for text in texts if text.strip()]
    typed = [line for line in words if line.startswith("llama-gateway ")]
    assert len(typed) >= 2
    assert [wrong for line in typed if (wrong := unknown(shlex.split(line)[1:]))] == []
    assert "logs are in ~/" in " ".join(words)
