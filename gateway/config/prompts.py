"""Settings of what the gateway makes of prompts."""

from __future__ import annotations

import math
import re

# Not public, but the only way to judge a pattern by what `re` makes of it.
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gateway.config.fields import ConfigModel, TypeLabel, as_list, validation_error


def _pattern(value: object) -> object:
    if not isinstance(value, str):
        raise validation_error("must be a regular expression", "for the beginning of one line")
    why = pattern_problem(value)
    if why is not None:
        raise validation_error(why)
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


SHORTEST_LITERAL_PREFIX = 4
"""Plain characters that a pattern begins with."""

LONGEST_PATTERN = 256

LONGEST_LINE = 1024
"""Characters of a line that a pattern gets to see."""

MOST_MATCH_PATHS = 16 * LONGEST_LINE
"""In how many ways the repeats of a pattern may share out a line."""


def pattern_problem(pattern: str) -> str | None:
    """Why this can't be a pattern, in words that tell the remedy; None: it can."""
    if len(pattern) > LONGEST_PATTERN:
        return f"is longer than {LONGEST_PATTERN} characters"
    try:
        parsed = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    if parsed.state.flags & ~re.UNICODE:
        return "sets flags; spell out what is to match"
    if "\n" in pattern:
        return "goes over the end of a line; a pattern is for one line"
    if len(_plain_start(parsed)) < SHORTEST_LITERAL_PREFIX:
        return (
            f"must begin with {SHORTEST_LITERAL_PREFIX} plain characters or more, by which "
            f"lines are found"
        )
    try:
        ways = _ways(parsed, repeated=False)
    except _RefusedError as error:
        return str(error)
    if ways > MOST_MATCH_PATHS:
        return "can match in too many ways; leave one `.*` or `.+` at most"
    return None


class _RefusedError(Exception):
    pass


def _plain_start(parsed: Any) -> str:
    """The characters that whatever matches begins with."""
    start = []
    for op, value in parsed:
        if op is not ops.LITERAL:
            break
        start.append(chr(value))
    return "".join(start)


def _ways(parsed: Any, *, repeated: bool) -> float:
    """At most so many ways to match; `repeated`: inside of something that repeats."""
    ways = 1.0
    for op, value in parsed:
        if op in {ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.CATEGORY}:
            continue
        if op is ops.AT:
            continue
        if op is ops.SUBPATTERN:
            ways *= _ways(value[-1], repeated=repeated)
        elif op is ops.BRANCH and not repeated:
            ways *= sum(_ways(branch, repeated=repeated) for branch in value[1])
        elif op in {ops.MAX_REPEAT, ops.MIN_REPEAT} and not repeated:
            least, most, inner = value
            if most > 1:
                _ways(inner, repeated=True)
            else:
                ways *= _ways(inner, repeated=False)
            ways *= min(most - least + 1, LONGEST_LINE)
        elif repeated:
            raise _RefusedError("repeats something that has repeats or choices of its own")
        else:
            raise _RefusedError(
                "looks around, back, or into groups; plain characters, sets and repeats will do"
            )
        if not math.isfinite(ways):
            break
    return ways


def literal_prefix(pattern: str) -> str:
    """The plain characters that a pattern begins with."""
    return _plain_start(parser.parse(pattern))
