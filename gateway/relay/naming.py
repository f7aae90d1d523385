"""What a public model name stands for: aliases, fall-backs, and the rules met on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from gateway.config.routing import CATCH_ALL, ModelRule
from gateway.fleet.catalogue import Catalogue

LONGEST_KEPT = 256
"""Characters of a name that is remembered: clients may send names of megabytes."""

MOST_MEANINGS = 32
"""Names that one alias may fan out to."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """A model that nodes may serve, and the rules for requests that come to it by this name."""

    name: str
    rules: tuple[ModelRule, ...] = ()


@dataclass(slots=True)
class Names:
    """The `models` of one settings file; made anew at each reload."""

    rules: Mapping[str, ModelRule]
    _known: dict[str, tuple[Meaning, ...]] = field(default_factory=dict)
    catches: bool = field(init=False)
    """Whether there is a catch-all."""

    def __post_init__(self) -> None:
        self.catches = CATCH_ALL in self.rules

    def caught(self, name: str, catalogue: Catalogue) -> bool:
        """Whether the catch-all takes this name: no rule has it, and no node is known to.

        Nor may a node have it that is about to say what it serves.
        """
        return self.catches and (
            name == CATCH_ALL or not (name in self.rules or catalogue.may_know(name))
        )

    def meanings(self, name: str) -> tuple[Meaning, ...]:
        """The models that `name` stands for, in order of preference; itself if nothing is said."""
        if name not in self.rules:
            return _plain(name) if len(name) <= LONGEST_KEPT else (Meaning(name),)
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = tuple(_follow(name, self.rules, ()))[:MOST_MEANINGS]
        return found


@lru_cache(maxsize=1024)
def _plain(name: str) -> tuple[Meaning, ...]:
    return (Meaning(name),)


def _follow(
    name: str, rules: Mapping[str, ModelRule], applied: tuple[ModelRule, ...]
) -> list[Meaning]:
    rule = rules.get(name)
    if rule is None:
        return [Meaning(name, applied)]
    applied = (*applied, rule)
    meanings: dict[str, Meaning] = {}
    for used in rule.use or (name,):
        inner = [Meaning(used, applied)] if used == name else _follow(used, rules, applied)
        for meaning in inner:
            meanings.setdefault(meaning.name, meaning)
    return list(meanings.values())
