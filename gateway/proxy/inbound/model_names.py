"""Resolves public model names: aliases, fallbacks, and the `models` rules that apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.catalog import ServedModels
from gateway.config.routing import CATCH_ALL, ModelRule

MOST_TARGETS = 32
"""Models that one alias may resolve to."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that nodes may serve, and the rules for requests that reach it by this name."""

    name: str
    rules: tuple[ModelRule, ...] = ()


@dataclass(slots=True)
class ModelAliases:
    """The `models` of one version of the settings; replaced at each reload."""

    rules: Mapping[str, ModelRule]
    _resolved: dict[str, tuple[ResolvedModel, ...]] = field(default_factory=dict)
    has_catch_all: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_catch_all = CATCH_ALL in self.rules

    def is_catch_all(self, name: str, catalog: ServedModels) -> bool:
        """Whether the catch-all applies: no rule has this name, and no node may serve it.

        A node whose models are not known yet may serve any.
        """
        return self.has_catch_all and (
            name == CATCH_ALL or not (name in self.rules or catalog.may_serve(name))
        )

    def knows(self, name: str, catalog: ServedModels) -> bool:
        """Whether a rule has this name, or some node serves it."""
        return name in self.rules or catalog.serves(name)

    def resolve(self, name: str) -> tuple[ResolvedModel, ...]:
        """The models that `name` stands for, in order of preference; itself without a rule."""
        if name not in self.rules:
            return (ResolvedModel(name),)
        found = self._resolved.get(name)
        if found is None:
            found = self._resolved[name] = tuple(_follow_aliases(name, self.rules, ()))[
                :MOST_TARGETS
            ]
        return found


def _follow_aliases(
    name: str, rules: Mapping[str, ModelRule], applied: tuple[ModelRule, ...]
) -> list[ResolvedModel]:
    rule = rules.get(name)
    if rule is None:
        return [ResolvedModel(name, applied)]
    applied = (*applied, rule)
    models: dict[str, ResolvedModel] = {}
    for target in rule.use or (name,):
        found = (
            [ResolvedModel(target, applied)]
            if target == name
            else _follow_aliases(target, rules, applied)
        )
        for model in found:
            models.setdefault(model.name, model)
    return list(models.values())
