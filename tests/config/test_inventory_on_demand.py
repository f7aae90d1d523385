from __future__ import annotations

from gateway.config.inventory import host_memory
from tests.config.conftest import LoadNodes, Problems
from tests.each_case import each_case

GIB = 1 << 30


def test_a_router_has_memory_and_models_that_it_always_holds(load_nodes: LoadNodes) -> None:
    plain, router, swap = load_nodes(
        """
        nodes:
          - {name: plain, url: http://a}
          - {name: r1, url: http://b, memory: 1.5TiB, preload: small, slot_save: true}
          - {name: swap, url: http://c, kind: openai, models_on_demand: true, memory: 64GiB}
        """
    ).nodes
    unset = (plain.memory, plain.preload, plain.models_on_demand, plain.slot_save)
    assert unset == (None, (), None, False)
    assert (router.memory, router.preload, router.slot_save) == (1536 * GIB, ("small",), True)
    assert (swap.models_on_demand, swap.models) == (True, None)


def test_a_host_has_the_memory_that_one_of_its_nodes_says(load_nodes: LoadNodes) -> None:
    nodes = load_nodes(
        """
        nodes:
          - {name: a0, url: http://a:1, memory: 64GiB}
          - {name: a1, url: http://a:2}
          - {name: a2, url: http://a:3, memory: 65536MiB}
          - {name: b, url: http://b}
        """
    ).nodes
    assert host_memory(nodes) == {"a": 64 * GIB}


@each_case(
    ("wrong", "key", "words"),
    [
        ("memory: 64 gigs", "memory", "must be a number of bytes"),
        ("memory: 1000TiB", "memory", "less than or equal to"),
        ("models_on_demand: true", "models_on_demand", "for kind openai"),
        ("kind: openai, preload: [a]", "preload", "can't be told to load"),
        ("models_on_demand: false, preload: [a]", "preload", "may be told to load"),
        ("model: [a, b], preload: [a, c]", "preload", "names c, which is no model of the node"),
        ("model: {a: own}, preload: own", "preload", "names own, which is no model of the node"),
        ("preload: ['']", "preload[0]", "must not be empty"),
        ("kind: openai, slot_save: true", "slot_save", "can't be told to load"),
        ("models_on_demand: false, slot_save: true", "slot_save", "may be told to load"),
    ],
)
def test_what_a_node_can_not_do_on_demand_is_refused(
    nodes_problems: Problems, wrong: str, key: str, words: str
) -> None:
    (problem,) = nodes_problems(f"nodes:\n  - {{name: a, url: http://a, {wrong}}}")
    assert (problem.line, problem.key) == (2, f"nodes[0].{key}")
    assert words in problem.message
