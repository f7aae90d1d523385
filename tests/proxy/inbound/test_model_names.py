"""Public model names resolve through aliases, with the rules on the way."""

from __future__ import annotations

from gateway.config.routing import ModelRule
from gateway.fleet.model_index import ModelIndex
from gateway.proxy.inbound.request import MOST_TARGETS, ModelAliases, ResolvedModel
from tests.fleet.build import a_node

SERVED = ModelIndex()


def aliases(**rules: ModelRule) -> ModelAliases:
    return ModelAliases({name.replace("_", "-"): rule for name, rule in rules.items()})


def test_a_name_without_a_rule_resolves_to_itself() -> None:
    assert aliases().resolve("mistral", SERVED) == (ResolvedModel("mistral"),)


def test_an_alias_resolves_to_the_model_it_uses() -> None:
    rule = ModelRule(use=("mistral",))
    assert aliases(gpt=rule).resolve("gpt", SERVED) == (ResolvedModel("mistral", (rule,)),)


def test_a_list_is_kept_in_its_order() -> None:
    found = aliases(helper=ModelRule(use=("phi", "mistral"))).resolve("helper", SERVED)
    assert [model.name for model in found] == ["phi", "mistral"]


def test_rules_are_collected_along_the_chain() -> None:
    outer, inner = ModelRule(use=("b",), set={"x": 1}), ModelRule(set={"x": 2})
    assert aliases(a=outer, b=inner).resolve("a", SERVED) == (ResolvedModel("b", (outer, inner)),)


def test_a_name_may_use_itself_beside_others() -> None:
    rule = ModelRule(use=("a", "b"))
    found = aliases(a=rule).resolve("a", SERVED)
    assert found == (ResolvedModel("a", (rule,)), ResolvedModel("b", (rule,)))


def test_the_first_path_to_a_model_counts() -> None:
    via, direct = ModelRule(use=("m",), set={"x": 1}), ModelRule(use=("via", "m"))
    found = aliases(top=direct, via=via).resolve("top", SERVED)
    assert found == (ResolvedModel("m", (direct, via)),)


def test_the_models_of_an_alias_are_bounded() -> None:
    wide = ModelRule(use=tuple(f"m{i}" for i in range(100)))
    assert len(aliases(wide=wide).resolve("wide", SERVED)) == MOST_TARGETS


def test_an_alias_is_resolved_once() -> None:
    some = aliases(gpt=ModelRule(use=("mistral",)))
    assert some.resolve("gpt", SERVED) is some.resolve("gpt", SERVED)


def test_a_name_of_any_length_resolves_to_itself() -> None:
    for length in (1, 1_000_000):
        name = "x" * length
        assert aliases().resolve(name, SERVED) == (ResolvedModel(name),)


def test_the_rules_of_a_model_hold_for_the_further_names_that_its_servers_give_it() -> None:
    node, served = a_node(), ModelIndex()
    node.properties.models, node.properties.aliases = ("m",), {"nick": "m", "free": "m"}
    served.set_nodes([node])
    capped, own = ModelRule(max_tokens=4), ModelRule(set={"x": 1})
    some = aliases(m=capped, free=own, gpt=ModelRule(use=("nick",)))
    assert some.resolve("nick", served) == (ResolvedModel("nick", (capped,)),)
    assert some.resolve("free", served) == (ResolvedModel("free", (own,)),)
    assert some.resolve("gpt", served)[0].rules[1:] == (capped,)
    assert aliases(m=ModelRule(use=("other",))).resolve("nick", served)[0].name == "other"
    back = ModelRule(use=("nick",))
    assert aliases(m=back).resolve("nick", served) == (ResolvedModel("nick", (back,)),)
    assert aliases(m=back).resolve("m", served) == (ResolvedModel("nick", (back,)),)
    node.properties.aliases = {}
    served.models_changed()
    assert some.resolve("nick", served) == (ResolvedModel("nick"),)
