"""Settings of prompts: patterns of the lines that change with each request.

A pattern runs over each request's text, so it must not run long: `pattern_problem` accepts a
subset of regular expressions, and bounds in how many ways one can match a line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BeforeValidator

from gateway.config.fields import ConfigModel, Listed, TypeLabel, validation_error

# The parser of `re` has no public name; tests hold it to each Python.
_parser, ops = vars(re)["_parser"], vars(re)["_constants"]


def _pattern(value: object) -> object:
    if not isinstance(value, str):
        raise validation_error("must be a regular expression", "for the beginning of one line")
    if (problem := pattern_problem(value)) is not None:
        raise validation_error(problem)
    return value


LinePattern = Annotated[str, BeforeValidator(_pattern), TypeLabel("regular expression")]
LinePatterns = Annotated[Listed[LinePattern], TypeLabel("list of patterns")]


class PromptSettings(ConfigModel):
    """Lines of system prompts that change with each request, and so void every prompt cache.

    Patterns are matched against the beginnings of lines. The billing line of Claude Code is known.
    """

    volatile: LinePatterns = ()
    """Lines to overlook when the node that knows a prompt is looked for."""
    strip: LinePatterns = ()
    """Lines to overlook, and to take out of the request as well."""
    remember: bool = True
    """Keep over a restart which prompts each node has cached, as digests beside their key. `false`:
    what was kept is deleted, and a restart forgets."""


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
        ways = _ways(parts)
    except _UnsupportedError as error:
        return str(error)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    if len(_prefix(parts)) < SHORTEST_LITERAL_PREFIX:
        return (
            f"must begin with {SHORTEST_LITERAL_PREFIX} plain characters or more, by which "
            f"lines are found"
        )
    if ways > MOST_MATCH_PATHS:
        return "can match in too many ways; leave one `.*` or `.+` at most"
    return None


def literal_prefix(pattern: str) -> str:
    """Return the plain characters that a pattern begins with; it must have no `pattern_problem`."""
    return _prefix(_parse(pattern))


def _parse(pattern: str) -> list[tuple[object, Any]]:
    """Return the parts of a pattern as `re` sees them: operation and argument."""
    return list(_parser.parse(pattern))


class _UnsupportedError(Exception):
    pass


_ONE_CHARACTER_OR_PLACE = {ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.AT}


def _ways(parts: Iterable[tuple[object, Any]]) -> int:
    """Return in how many ways these parts can share out a line, at most.

    Raises _UnsupportedError, with words for people.
    """
    ways = 1
    for operation, argument in parts:
        if operation is ops.SUBPATTERN:
            ways *= _ways(argument[-1])
        elif operation is ops.BRANCH:
            ways *= sum(map(_ways, argument[1]))
        elif operation in {ops.MAX_REPEAT, ops.MIN_REPEAT}:
            least, most, inner = argument
            ways_inside = _ways(inner)
            if most > 1 and ways_inside > 1:
                raise _UnsupportedError("repeats something that has repeats or choices of its own")
            if most > 1 and inner.getwidth()[0] == 0:
                # However short the line is, `re` would go through all of the repeats.
                raise _UnsupportedError("repeats something empty")
            ways *= ways_inside * min(most - least + 1, LONGEST_LINE)
        elif operation not in _ONE_CHARACTER_OR_PLACE:
            raise _UnsupportedError(
                "looks around, back, or into groups; plain characters, sets and repeats will do"
            )
    return ways


def _prefix(parts: Iterable[tuple[object, Any]]) -> str:
    plain = itertools.takewhile(lambda part: part[0] is ops.LITERAL, parts)
    return "".join(chr(argument) for _, argument in plain)
