from __future__ import annotations

from typing import Any

from gateway.events import ModelsDiffer
from gateway.fleet.model_index import ComparedServer, model_differences
from gateway.fleet.server_properties import ServerProperties
from tests.emulator import EmulatedNode
from tests.fleet.build import a_fleet, a_spec


def server(
    node: str, *models: str, context: int | None = 4096, **properties: Any
) -> ComparedServer:
    own = {"ftype": "Q4_K_M", "build": "b1", "template": "t1", **properties}
    return ComparedServer(node, models or ("demo",), context, ServerProperties(**own))


def test_equal_nodes_do_not_differ() -> None:
    assert model_differences([server("a"), server("b"), server("c", "other", build="b2")]) == ()


def test_each_property_is_told_with_its_nodes_the_most_frequent_value_first() -> None:
    servers = [
        server("a", ftype="Q8_0", template="t2"),
        server("b", context=8192),
        server("c", build="b2"),
        server("d"),
    ]
    found = {one.what: one for one in model_differences(servers)}
    assert set(found) == {"quantisation", "build", "context", "template"}
    assert list(found["quantisation"].nodes_by_value.items()) == [
        ("Q4_K_M", ("b", "c", "d")),
        ("Q8_0", ("a",)),
    ]
    assert found["context"].in_words() == (
        "demo: context of a slot: 4096 tokens on a, c, d; 8192 tokens on b"
    )


def test_what_a_server_has_not_reported_is_no_difference() -> None:
    assert model_differences([server("a"), server("b", context=None, ftype=None, build=None)]) == ()


def test_only_nodes_of_the_same_public_name_are_compared() -> None:
    servers = [server("a", "x", "y"), server("b", "y", build="b2"), server("c", "x")]
    (found,) = model_differences(servers)
    assert (found.model, found.what) == ("y", "build")


def test_many_nodes_and_values_make_a_short_sentence() -> None:
    servers = [server(f"n{i}", build=f"b{i // 20}") for i in range(1000)]
    (found,) = model_differences(servers)
    assert len(found.in_words()) < 1500
    assert "and 12 more" in found.in_words()
    assert found.in_words().endswith("; 42 more")


async def test_a_change_is_published_once_and_so_is_its_end() -> None:
    async with (
        EmulatedNode(build="b1-one") as one,
        EmulatedNode(build="b2-two") as other,
        a_fleet(a_spec("a", one.url), a_spec("b", other.url), discover_interval=600) as running,
    ):
        told = running.model_differences
        for _ in range(3):
            running.fleet.compare_models()
        assert told == [ModelsDiffer(("demo: build of llama.cpp: b1-one on a; b2-two on b",))]
        running["b"].properties.build = "b1-one"
        running.fleet.compare_models()
        assert told[1:] == [ModelsDiffer(())]
