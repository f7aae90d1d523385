"""Command lines that pages and alerts tell one to type, and whether the program knows them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any

import typer.main

from gateway.cli import app

BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
PROMPT = re.compile(r"^ *(?:[a-z0-9-]+)?\$ ")
ENDS_A_COMMAND = {"|", "||", "&&", ">", ">>", ";", "&"}


def commands(text: str) -> Iterator[str]:
    """Yield what a page's console blocks tell one to type, in one line each."""
    for block in BLOCK.finditer(text):
        if block["kind"] == "console":
            for line in re.sub(r"\\\n\s*", "", block["text"]).splitlines():
                if prompt := PROMPT.match(line):
                    yield line[prompt.end() :]


def calls(text: str) -> Iterator[list[str]]:
    """Yield the words behind each `llama-gateway` of a text, in its blocks and in its prose."""
    for command in [*commands(text), *re.findall(r"`(llama-gateway [^`]+)`", text)]:
        words = shlex.split(command.replace("...", ""), comments=True)
        for place, word in enumerate(words):
            begins = place == 0 or words[place - 1] in ENDS_A_COMMAND | {"sudo"}
            if begins and word.rpartition("/")[2] == "llama-gateway":
                rest = words[place + 1 :]
                ends = [number for number, word in enumerate(rest) if word in ENDS_A_COMMAND]
                yield rest[: min(ends, default=len(rest))]


def unknown(words: list[str]) -> list[str]:
    """Return what the program does not know of these words: a command, an action, or flags."""
    command: Any = _program()
    words = list(words)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    flags |= {"--help"}
    given = [word.partition("=")[0] for word in words if word.startswith("-")]
    missing = [flag for flag in given if flag not in flags]
    wants_more = getattr(command, "commands", {}) and not command.invoke_without_command
    if wants_more and not given:
        missing += words[:1]
    if words[:1] and words[0] not in _actions(command, words[0]):
        missing.append(words[0])
    return missing


@cache
def _program() -> Any:
    """The program with all its commands, which takes long to build."""
    return typer.main.get_command(app)


def _actions(command: Any, word: str) -> list[str]:
    """Return the words that may stand where `word` is, the first behind the command."""
    first = next((param for param in command.params if param.param_type_name == "argument"), None)
    choices = (first.metavar or "") if first else ""
    return choices.split("|") if "|" in choices and not word.startswith("-") else [word]
