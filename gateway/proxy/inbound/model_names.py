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
    _of: Mapping[str, str] = field(default_factory=dict)
    """The servers' aliases for which `_resolved` holds."""
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

    def resolve(self, name: str, catalog: ServedModels) -> tuple[ResolvedModel, ...]:
        """The models that `name` stands for, in order of preference; itself without a rule.

        For a further name that servers give to a model, the model's rule holds, unless the name
        has one of its own.
        """
        if not self.rules:
            return (ResolvedModel(name),)
        aliases = catalog.aliases
        if aliases is not self._of:
            self._of, self._resolved = aliases, {}
        if name not in self.rules and aliases.get(name) not in self.rules:
            return (ResolvedModel(name),)
        found = self._resolved.get(name)
        if found is None:
            every = _follow_aliases(name, self.rules, (), aliases)
            found = self._resolved[name] = tuple(every)[:MOST_TARGETS]
        return found


def _follow_aliases(
    name: str,
    rules: Mapping[str, ModelRule],
    applied: tuple[ModelRule, ...],
    aliases: Mapping[str, str],
) -> list[ResolvedModel]:
    model = name if name in rules else aliases.get(name, name)
    rule = rules.get(model)
    if rule is None or (model != name and any(rule is one for one in applied)):
        return [ResolvedModel(name, applied)]
    applied = (*applied, rule)
    models: dict[str, ResolvedModel] = {}
    for target in rule.use or (model,):
        found = (
            [ResolvedModel(name, applied)]
            if target == model
            else _follow_aliases(target, rules, applied, aliases)
        )
        for one in found:
            models.setdefault(one.name, one)
    return list(models.values())
