"""Settings of what the gateway makes of prompts."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from gateway.config.fields import ConfigModel, Kind, one_or_many, wrong
from gateway.config.line_patterns import refusal


def _pattern(value: object) -> object:
    if not isinstance(value, str):
        raise wrong("must be a regular expression", "for the beginning of one line")
    why = refusal(value)
    if why is not None:
        raise wrong(why)
    return value


LinePattern = Annotated[str, BeforeValidator(_pattern), Kind("regular expression")]


class PromptSettings(ConfigModel):
    """Lines of system prompts that change with each request, and so void every prompt cache.

    Patterns are matched against the beginnings of lines. The billing line of Claude Code is known.
    """

    volatile: Annotated[
        tuple[LinePattern, ...],
        BeforeValidator(one_or_many),
        Field(description="Lines to overlook when the node that knows a prompt is looked for."),
        Kind("list of patterns"),
    ] = ()
    strip: Annotated[
        tuple[LinePattern, ...],
        BeforeValidator(one_or_many),
        Field(description="Lines to overlook, and to take out of the request as well."),
        Kind("list of patterns"),
    ] = ()
