"""What a public model name stands for: aliases, fall-backs, and the rules met on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from gateway.config.routing import CATCH_ALL, ModelRule
from gateway.fleet.model_index import ModelIndex

LONGEST_CACHED_NAME = 256
"""Characters of a name that is remembered: clients may send names of megabytes."""

MOST_TARGETS = 32
"""Names that one alias may fan out to."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that nodes may serve, and the rules for requests that come to it by this name."""

    name: str
    rules: tuple[ModelRule, ...] = ()


@dataclass(slots=True)
class ModelAliases:
    """The `models` of one settings file; made anew at each reload."""

    rules: Mapping[str, ModelRule]
    _known: dict[str, tuple[ResolvedModel, ...]] = field(default_factory=dict)
    has_catch_all: bool = field(init=False)
    """Whether there is a catch-all."""

    def __post_init__(self) -> None:
        self.has_catch_all = CATCH_ALL in self.rules

    def is_catch_all(self, name: str, model_index: ModelIndex) -> bool:
        """Whether the catch-all takes this name: no rule has it, and no node is known to.

        Nor may a node have it that is about to say what it serves.
        """
        return self.has_catch_all and (
            name == CATCH_ALL or not (name in self.rules or model_index.may_serve(name))
        )

    def resolve(self, name: str) -> tuple[ResolvedModel, ...]:
        """The models that `name` stands for, in order of preference; itself if nothing is said."""
        if name not in self.rules:
            return _unaliased(name) if len(name) <= LONGEST_CACHED_NAME else (ResolvedModel(name),)
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = tuple(_follow_aliases(name, self.rules, ()))[:MOST_TARGETS]
        return found


@lru_cache(maxsize=1024)
def _unaliased(name: str) -> tuple[ResolvedModel, ...]:
    return (ResolvedModel(name),)


def _follow_aliases(
    name: str, rules: Mapping[str, ModelRule], applied: tuple[ModelRule, ...]
) -> list[ResolvedModel]:
    rule = rules.get(name)
    if rule is None:
        return [ResolvedModel(name, applied)]
    applied = (*applied, rule)
    meanings: dict[str, ResolvedModel] = {}
    for used in rule.use or (name,):
        inner = (
            [ResolvedModel(used, applied)]
            if used == name
            else _follow_aliases(used, rules, applied)
        )
        for meaning in inner:
            meanings.setdefault(meaning.name, meaning)
    return list(meanings.values())
