"""Public model names resolve through aliases, with the rules on the way."""

from __future__ import annotations

from gateway.config.routing import ModelRule
from gateway.proxy.inbound.model_names import MOST_TARGETS, ModelAliases, ResolvedModel


def aliases(**rules: ModelRule) -> ModelAliases:
    return ModelAliases({name.replace("_", "-"): rule for name, rule in rules.items()})


def test_a_name_without_a_rule_resolves_to_itself() -> None:
    assert aliases().resolve("mistral") == (ResolvedModel("mistral"),)


def test_an_alias_resolves_to_the_model_it_uses() -> None:
    rule = ModelRule(use=("mistral",))
    assert aliases(gpt=rule).resolve("gpt") == (ResolvedModel("mistral", (rule,)),)


def test_a_list_is_kept_in_its_order() -> None:
    found = aliases(helper=ModelRule(use=("phi", "mistral"))).resolve("helper")
    assert [model.name for model in found] == ["phi", "mistral"]


def test_rules_are_collected_along_the_chain() -> None:
    outer, inner = ModelRule(use=("b",), set={"x": 1}), ModelRule(set={"x": 2})
    assert aliases(a=outer, b=inner).resolve("a") == (ResolvedModel("b", (outer, inner)),)


def test_a_name_may_use_itself_beside_others() -> None:
    rule = ModelRule(use=("a", "b"))
    found = aliases(a=rule).resolve("a")
    assert found == (ResolvedModel("a", (rule,)), ResolvedModel("b", (rule,)))


def test_the_first_path_to_a_model_counts() -> None:
    via, direct = ModelRule(use=("m",), set={"x": 1}), ModelRule(use=("via", "m"))
    found = aliases(top=direct, via=via).resolve("top")
    assert found == (ResolvedModel("m", (direct, via)),)


def test_the_models_of_an_alias_are_bounded() -> None:
    wide = ModelRule(use=tuple(f"m{i}" for i in range(100)))
    assert len(aliases(wide=wide).resolve("wide")) == MOST_TARGETS


def test_an_alias_is_resolved_once() -> None:
    some = aliases(gpt=ModelRule(use=("mistral",)))
    assert some.resolve("gpt") is some.resolve("gpt")


def test_a_name_of_any_length_resolves_to_itself() -> None:
    for length in (1, 1_000_000):
        name = "x" * length
        assert aliases().resolve(name) == (ResolvedModel(name),)
