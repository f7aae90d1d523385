from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.config.scheduling import ModelRule, find_alias_loop
from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case


def test_a_model_says_where_and_how_long_it_is_loaded(load_gateway: LoadSettings) -> None:
    settings = load_gateway(
        """
        models:
          qwen-14b: {replicas: {min: 0, max: 2}, pin: [epyc-a], idle_unload: 30m, memory: 12GiB}
          small: {use: [small, other], pin: epyc-a}
          plain: {max_tokens: 5}
        model_placement: {starvation: 2m, hysteresis: 0, commands: false}
        """
    )
    rule = settings.models["qwen-14b"]
    assert (rule.replicas.min, rule.replicas.max, rule.pin) == (0, 2, ("epyc-a",))
    assert (rule.idle_unload, rule.memory, rule.is_placed) == (1800.0, 12 << 30, True)
    assert settings.models["small"].pin == ("epyc-a",)
    assert not settings.models["plain"].is_placed
    placement = {"starvation": 120.0, "hysteresis": 0.0, "commands": False}
    assert settings.model_placement.model_dump() == placement


@each_case(
    ("wrong", "key", "words"),
    [
        ("a: {replicas: {min: 3, max: 2}}", "models.a.replicas.max", "must not be less than `min`"),
        ("a: {pin: 3}", "models.a.pin", "must be a list"),
        ("a: {idle_unload: 0}", "models.a.idle_unload", "greater than 0"),
        ("a: {use: b, pin: x}", "models", "a is no model that a node loads, but stands for b"),
        ('"*": {use: b, memory: 1GiB}', "models", "* is no model that a node loads"),
        ("a: {ttl: 300}", "models.a.ttl", "unknown key"),
    ],
)
def test_a_place_that_a_model_can_not_have_is_refused(
    gateway_problems: Problems, wrong: str, key: str, words: str
) -> None:
    (problem,) = gateway_problems(f"models: {{{wrong}}}")
    assert problem.key == key
    assert words in problem.message


def test_names_that_stand_for_each_other_are_refused(gateway_problems: Problems) -> None:
    (problem,) = gateway_problems("models:\n  a: {use: [x, b]}\n  b: {use: c}\n  c: {use: a}\n")
    assert problem.message == "the names stand for each other: a -> b -> c -> a"


@each_case(
    ("wrong", "expected", "remedy"),
    [
        ('{"*": {set: {temperature: 0}}}', '"*" names no model', "use: NAME"),
        ('{"*": }', '"*" names no model', "use: NAME"),
        ('{"*": {use: "*"}}', '* uses "*"', "name the models"),
        ('{"*": {use: [a, "*"]}}', '* uses "*"', "name the models"),
        ('{"*": {use: a}, b: {use: ["*"]}}', 'b uses "*"', "name the models"),
        ('{"*": {use: a}, a: {use: b}, b: {use: a}}', "stand for each other", ""),
    ],
)
def test_a_catch_all_that_leads_nowhere_is_refused(
    gateway_problems: Problems, wrong: str, expected: str, remedy: str
) -> None:
    (problem,) = gateway_problems(f"models: {wrong}")
    assert problem.key == "models"
    assert expected in problem.message
    assert remedy in problem.remedy


def test_a_long_chain_of_names_is_no_loop_and_no_recursion() -> None:
    chain = {f"m{i}": ModelRule(use=(f"m{i + 1}",)) for i in range(20_000)}
    assert find_alias_loop(chain) == []
    assert len(find_alias_loop({**chain, "m20000": ModelRule(use=("m0",))})) == 20_002


GRAPHS = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdefgh"), max_size=4)
)


@given(GRAPHS)
def test_a_loop_is_found_exactly_where_there_is_one(graph: dict[str, list[str]]) -> None:
    rules = {name: ModelRule(use=tuple(used)) for name, used in graph.items()}
    loop = find_alias_loop(rules)

    # The other direction: take away names that lead nowhere until nothing changes.
    left = {name: {one for one in used if one != name} for name, used in graph.items()}
    while ends := [name for name, used in left.items() if not used & left.keys()]:
        for name in ends:
            del left[name]
    assert bool(loop) == bool(left)
    for name, used in pairwise(loop):
        assert used in rules[name].use
    assert not loop or (loop[0] == loop[-1] and len(loop) > 2)
