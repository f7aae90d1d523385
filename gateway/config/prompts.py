"""Settings of prompts: patterns of the lines that change with each request.

A pattern runs over each request's text, so it must not run long: `pattern_problem` accepts a
subset of regular expressions, and bounds in how many ways one can match a line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field

from gateway.config.fields import ConfigModel, TypeLabel, as_list, validation_error


def _pattern(value: object) -> object:
    if not isinstance(value, str):
        raise validation_error("must be a regular expression", "for the beginning of one line")
    if (problem := pattern_problem(value)) is not None:
        raise validation_error(problem)
    return value


LinePattern = Annotated[str, BeforeValidator(_pattern), TypeLabel("regular expression")]


class PromptSettings(ConfigModel):
    """Lines of system prompts that change with each request, and so void every prompt cache.

    Patterns are matched against the beginnings of lines. The billing line of Claude Code is known.
    """

    volatile: Annotated[
        tuple[LinePattern, ...],
        BeforeValidator(as_list),
        Field(description="Lines to overlook when the node that knows a prompt is looked for."),
        TypeLabel("list of patterns"),
    ] = ()
    strip: Annotated[
        tuple[LinePattern, ...],
        BeforeValidator(as_list),
        Field(description="Lines to overlook, and to take out of the request as well."),
        TypeLabel("list of patterns"),
    ] = ()
    remember: Annotated[
        bool,
        Field(
            description=(
                "Keep over a restart which prompts each node has cached, as digests beside their "
                "key. `false`: what was kept is deleted, and a restart forgets."
            )
        ),
        TypeLabel("true or false"),
    ] = True


SHORTEST_LITERAL_PREFIX = 4
"""Plain characters that a pattern begins with."""

LONGEST_PATTERN = 256

LONGEST_LINE = 1024
"""Characters of a line that a pattern is matched against."""

MOST_MATCH_PATHS = 16 * LONGEST_LINE
"""Ways in which the repeats and choices of a pattern may share out a line."""


def pattern_problem(pattern: str) -> str | None:
    """Return why a text can't be a pattern, with the remedy; None where it can."""
    if len(pattern) > LONGEST_PATTERN:
        return f"is longer than {LONGEST_PATTERN} characters"
    try:
        compiled = re.compile(pattern)
        if compiled.flags & ~re.UNICODE:
            return "sets flags; spell out what is to match"
        if "\n" in pattern:
            return "goes over the end of a line; a pattern is for one line"
        parts = _parse(pattern)
    except _UnsupportedError as error:
        return str(error)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    if len(_prefix(parts)) < SHORTEST_LITERAL_PREFIX:
        return (
            f"must begin with {SHORTEST_LITERAL_PREFIX} plain characters or more, by which "
            f"lines are found"
        )
    if _ways(parts) > MOST_MATCH_PATHS:
        return "can match in too many ways; leave one `.*` or `.+` at most"
    return None


def literal_prefix(pattern: str) -> str:
    """Return the plain characters that a pattern begins with; it must have no `pattern_problem`."""
    return _prefix(_parse(pattern))


class _UnsupportedError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _PatternPart:
    """One piece of a pattern.

    `text`: how a character, a set or an anchor is written, empty for anything else; `char`: the
    only character that it matches, if there is one; `in_set`: whether `re` puts it into a set
    with others like it (`a|[0-9]`); `ways`: at most so many ways to match a line; `repeatable`:
    neither a repeat nor a choice; `group`: the parts of a group without a name, number and flags.
    """

    text: str = ""
    char: str = ""
    in_set: bool = False
    ways: int = 1
    repeatable: bool = True
    group: tuple[_PatternPart, ...] = ()


# The supported subset. `re` has compiled the pattern before: it needs no check of its syntax.
_TOKEN = re.compile(
    r"""
      (?P<skipped> \(\?(?:\#[^)]*|u+)\) )
    | (?P<open> \((?!\?) | \(\?(?P<plain>:) | \(\?P<\w+> | \(\?[aimsu]*(?:-[imsx]+)?: )
    | (?P<close> \) )
    | (?P<choice> \| )
    | (?P<repeat> (?:[*+?] | \{(?!\})(?P<least>[0-9]*)(?P<to>,(?P<most>[0-9]*))?\}) \?? )
    | (?P<anchor> [$^] | \\[AbBZz] )
    | (?P<set> \\[dDsSwW] | \[(?!\^)\]?(?:\\.|[^]\\])*\] )
    | (?P<any> \. | \[\^\]?(?:\\.|[^]\\])*\] )
    | (?P<char> [^\\(] | \\(?:[^0-9A-Za-z] | [abfnrtv] | x.{2} | u.{4} | U.{8} | N\{[^}]*\}
                            | 0[0-7]{0,2} | [0-7]{3}) )
    """,
    re.VERBOSE | re.DOTALL,
)


def _parse(pattern: str) -> list[_PatternPart]:
    """Take a pattern that compiles apart; raises _UnsupportedError, with words for people."""
    return _read_choices(_tokens(pattern))


def _tokens(pattern: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            raise _UnsupportedError(
                "looks around, back, or into groups; plain characters, sets and repeats will do"
            )
        yield token
        at = token.end()


def _read_choices(tokens: Iterator[re.Match[str]]) -> list[_PatternPart]:
    """Read to the end of a group, or of the pattern."""
    choices: list[list[_PatternPart]] = [[]]
    for token in tokens:
        parts, text = choices[-1], token[0]
        match token.lastgroup:
            case "open":
                inner = _read_choices(tokens)
                group = tuple(inner) if token["plain"] else ()
                repeatable = all(part.repeatable for part in inner)
                parts.append(_PatternPart(ways=_ways(inner), repeatable=repeatable, group=group))
            case "close":
                break
            case "choice":
                choices.append([])
            case "repeat":
                parts.append(_repeat(parts.pop(), token))
            case "anchor" | "any":
                parts.append(_PatternPart(text))
            case "set":
                char = _only_char(text)
                parts.append(_PatternPart(char or text, char, in_set=True))
            case "char":
                char = _char(text)
                parts.append(_PatternPart(char, char, in_set=True))
    return _join([[p for part in parts for p in part.group or (part,)] for parts in choices])


def _repeat(part: _PatternPart, token: re.Match[str]) -> _PatternPart:
    least, most = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}.get(
        token[0][0], (int(token["least"] or 0), int(token["most"] or token["least"] or 0))
    )
    if token["to"] == ",":
        most = math.inf
    if most > 1 and not part.repeatable:
        raise _UnsupportedError("repeats something that has repeats or choices of its own")
    times = int(min(most - least + 1, LONGEST_LINE))
    return _PatternPart(ways=part.ways * times, repeatable=False)


def _join(choices: list[list[_PatternPart]]) -> list[_PatternPart]:
    """Make one sequence of choices: `time: a|time: b` is `time: [ab]`, as it is to `re`."""
    if len(choices) == 1:
        return choices[0]
    joined: list[_PatternPart] = []
    while all(choices) and len({parts[0] for parts in choices}) == 1 and choices[0][0].text:
        joined.append(choices[0][0])
        choices = [parts[1:] for parts in choices]
    if all(len(parts) == 1 and parts[0].in_set for parts in choices):
        return [*joined, _PatternPart("|".join(parts[0].text for parts in choices), in_set=True)]
    return [*joined, _PatternPart(ways=sum(map(_ways, choices)), repeatable=False)]


def _ways(parts: list[_PatternPart]) -> int:
    return math.prod(part.ways for part in parts)


def _prefix(parts: list[_PatternPart]) -> str:
    prefix = ""
    for part in parts:
        if not part.char:
            break
        prefix += part.char
    return prefix


def _only_char(text: str) -> str:
    """Return the character of a set such as `[.]`; empty for all other sets."""
    inside = text[1:-1] if text[0] == "[" else ""
    if len(inside) == 1:
        return inside
    token = _TOKEN.fullmatch(inside)
    return _char(inside) if inside[:1] == "\\" and token and token["char"] else ""


def _char(text: str) -> str:
    """Return the character that a plain one or an escape stands for."""
    if len(text) > 1 and text[1].isascii() and text[1].isalnum():
        return text.encode().decode("unicode_escape")
    return text[-1]
