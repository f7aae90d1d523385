"""What a public model name stands for."""

from __future__ import annotations

from gateway.config.routing import ModelRule
from gateway.proxy.inbound import model_names
from gateway.proxy.inbound.model_names import (
    LONGEST_CACHED_NAME,
    MOST_TARGETS,
    ModelAliases,
    ResolvedModel,
)


def names(**rules: ModelRule) -> ModelAliases:
    return ModelAliases({name.replace("_", "-"): rule for name, rule in rules.items()})


def test_a_name_without_a_rule_means_itself() -> None:
    assert names().resolve("mistral") == (ResolvedModel("mistral"),)


def test_an_alias_means_what_it_uses() -> None:
    rule = ModelRule(use=("mistral",))
    assert names(gpt=rule).resolve("gpt") == (ResolvedModel("mistral", (rule,)),)


def test_a_list_is_kept_in_its_order() -> None:
    found = names(helper=ModelRule(use=("phi", "mistral"))).resolve("helper")
    assert [meaning.name for meaning in found] == ["phi", "mistral"]


def test_rules_are_collected_along_the_chain() -> None:
    outer, inner = ModelRule(use=("b",), set={"x": 1}), ModelRule(set={"x": 2})
    assert names(a=outer, b=inner).resolve("a") == (ResolvedModel("b", (outer, inner)),)


def test_a_name_may_use_itself_beside_others() -> None:
    rule = ModelRule(use=("a", "b"))
    found = names(a=rule).resolve("a")
    assert found == (ResolvedModel("a", (rule,)), ResolvedModel("b", (rule,)))


def test_the_first_way_to_a_model_counts() -> None:
    via, direct = ModelRule(use=("m",), set={"x": 1}), ModelRule(use=("via", "m"))
    found = names(top=direct, via=via).resolve("top")
    assert found == (ResolvedModel("m", (direct, via)),)


def test_an_alias_fans_out_to_a_bound() -> None:
    wide = ModelRule(use=tuple(f"m{i}" for i in range(100)))
    assert len(names(wide=wide).resolve("wide")) == MOST_TARGETS


def test_a_meaning_is_worked_out_once() -> None:
    some = names(gpt=ModelRule(use=("mistral",)))
    assert some.resolve("gpt") is some.resolve("gpt")


def test_a_name_of_any_length_means_itself_but_only_short_ones_are_kept() -> None:
    some = names()
    kept = model_names._unaliased.cache_info().currsize
    for length in (LONGEST_CACHED_NAME + 1, 1_000_000):
        name = "x" * length
        assert some.resolve(name) == (ResolvedModel(name),)
    assert model_names._unaliased.cache_info().currsize == kept
