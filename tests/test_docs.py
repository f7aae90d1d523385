"""The pages are written alike, and what they tell one to type exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gateway.tools.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PICTURE = ROOT / "docs" / "images" / "first-minute.svg"
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
PROMPT = re.compile(r"^ *(?:[a-z0-9-]+)?\$ ")
BEFORE_THE_PATH = re.compile(r"\.venv/bin/(?!activate)")
ENDS_A_COMMAND = {"|", "||", "&&", ">", ">>", ";", "&"}


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(text: str) -> Iterator[str]:
    """Yield what a page's console blocks tell one to type, in one line each."""
    for block in BLOCK.finditer(text):
        if block["kind"] == "console":
            for line in re.sub(r"\\\n\s*", "", block["text"]).splitlines():
                if prompt := PROMPT.match(line):
                    yield line[prompt.end() :]


def calls(text: str) -> Iterator[list[str]]:
    """Yield the words behind each `llama-gateway` of a page, in its blocks and in its prose."""
    for command in [*commands(text), *re.findall(r"`(llama-gateway [^`]+)`", text)]:
        words = shlex.split(command.replace("...", ""), comments=True)
        for place, word in enumerate(words):
            begins = place == 0 or words[place - 1] in ENDS_A_COMMAND | {"sudo"}
            if begins and word.rpartition("/")[2] == "llama-gateway":
                rest = words[place + 1 :]
                ends = [number for number, word in enumerate(rest) if word in ENDS_A_COMMAND]
                yield rest[: min(ends, default=len(rest))]


def unknown(words: list[str]) -> list[str]:
    """Return what the program does not know of these words: a command, or flags of it."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    flags |= {"--help"}
    given = [word.partition("=")[0] for word in words if word.startswith("-")]
    missing = [flag for flag in given if flag not in flags]
    wants_more = getattr(command, "commands", {}) and not command.invoke_without_command
    return missing + (words[:1] if wants_more and not given else [])


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_command_and_flag_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    assert [
        (" ".join(words), wrong) for words in calls(text) if (wrong := unknown(list(words)))
    ] == []
    modules = re.findall(r"python -m ((?:tests|gateway)[\w.]*)", text)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


MODULES = {
    f"/{shown(path)}"
    for part in ("gateway", "tests", "deploy")
    for path in (ROOT / part).rglob("*.py")
}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    assert {name for name in named if not any(one.endswith(f"/{name}") for one in MODULES)} == set()


def test_a_command_that_does_not_exist_is_found() -> None:
    page = "```console\n$ cd x && llama-gateway nodes drain a --slowly  # soon\n```\n"
    page += "`llama-gateway fly`, `journalctl -u llama-gateway -n 5`\n"
    assert [unknown(words) for words in calls(page)] == [["--slowly"], ["fly"]]


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


def test_the_picture_is_of_this_program_and_of_no_machine() -> None:
    words = [" ".join(line.split()) for line in re.findall(r">([^<]+)</text>", PICTURE.read_text())]
    typed = [line for line in words if line.startswith("llama-gateway ")]
    assert len(typed) >= 2
    assert [wrong for line in typed if (wrong := unknown(shlex.split(line)[1:]))] == []
    assert "logs are in ~/" in " ".join(words)
