"""Prompt templates: `{name}` stands for a field, `{{` and `}}` for braces. Nothing else is special.

Fields are replaced by their text as it stands: a template has no attributes, no indexes, no
conversions and no formats, so that neither it nor a field's text can reach anything else.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LONGEST_TEMPLATE = 1 << 20
"""Characters."""


class TemplateError(ValueError):
    """The template is wrong, or asks for a field that there is not."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A template, read."""

    pieces: tuple[tuple[str, str | None], ...]
    """Text, and the field that follows it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its fields, each once."""
        return tuple(dict.fromkeys(name for _, name in self.pieces if name is not None))

    def check(self, known: Sequence[str], what: str = "column") -> None:
        """Check that there are all its fields. Raises TemplateError."""
        for name in self.fields:
            if name not in known:
                there = ", ".join(f"'{one}'" for one in known) or "none"
                raise TemplateError(
                    f"the template names '{{{name}}}', but there is no such {what}: "
                    f"there is {there}"
                )

    def fill(self, fields: Mapping[str, str]) -> str:
        """The prompt; all fields must be there."""
        return "".join(text if name is None else text + fields[name] for text, name in self.pieces)


def parse_template(text: str) -> PromptTemplate:
    """Read a template. Raises TemplateError."""
    if len(text) > LONGEST_TEMPLATE:
        raise TemplateError(f"the template has more than {LONGEST_TEMPLATE:,} characters")
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise TemplateError(
            f"the template can't be read ({str(error).lower()}): write {{{{ and }}}} for braces "
            "that are text"
        ) from None
    pieces: list[tuple[str, str | None]] = []
    for literal, name, spec, conversion in parsed:
        if conversion or spec:
            raise TemplateError(
                f"the template's '{{{name}' goes on with '!' or ':': a field is its name alone; "
                "write {{ and }} for braces that are text"
            )
        if name is not None and not name.strip():
            raise TemplateError(
                "the template has '{}' without a name: write {text}, or {{ and }} for braces "
                "that are text"
            )
        pieces.append((literal, name))
    return PromptTemplate(tuple(pieces))
