"""Which nodes serve a model, and where nodes differ."""

from __future__ import annotations

from typing import Any

from gateway.events import ModelsDiffer
from gateway.nodes.lifecycle import ProbeAnswer, ProbeResult
from gateway.nodes.model_index import ComparedServer, ModelIndex, model_differences
from gateway.nodes.node import Node, NodeState
from gateway.nodes.server_properties import ServerProperties
from tests.emulator import EmulatedNode
from tests.nodes.build import a_fleet, a_node, a_spec


def an_index(*nodes: Node) -> ModelIndex:
    index = ModelIndex()
    index.set_nodes(nodes)
    return index


def names(nodes: tuple[Node, ...]) -> list[str]:
    return [node.name for node in nodes]


def chat(index: ModelIndex, model: str, **more: Any) -> tuple[Node, ...]:
    return index.capable_nodes(model, "chat", **{"vision": False, "native": False, **more})


def test_a_model_has_the_nodes_that_declare_or_report_it() -> None:
    declares, reports, other = (
        a_node(name="a", models={"m": "own"}, slots=2, context=4096),
        a_node(name="b", slots=5),
        a_node(name="c", models={"n": "n"}),
    )
    reports.properties.models = ("m",)
    index = an_index(declares, reports, other, a_node(models={"off": "off"}, enabled=False))
    assert index.nodes_for("m") == (declares, reports)
    assert index.model_names() == ("m", "n")
    assert (index.serves("m"), index.serves("own")) == (True, False)
    assert names(chat(index, "m")) == ["a", "b"]


def test_nodes_that_cannot_do_what_is_wanted_are_left_out() -> None:
    blind = a_node(name="a", models={"m": "m"}, endpoints=["chat"])
    hosted = a_node(name="b", models={"m": "m"}, kind="openai")
    index = an_index(blind, hosted)
    assert names(chat(index, "m", vision=True)) == ["b"]
    assert names(chat(index, "m", native=True)) == ["a"]


def a_server(name: str, *models: str, purpose: Any = None, **keys: Any) -> Node:
    """A node whose server has these names for its one model."""
    node = a_node(name=name, **keys)
    node.properties.models = models[:1]
    node.properties.aliases = dict.fromkeys(models[1:], models[0])
    if purpose is not None:
        node.properties.purpose_found(purpose)
    node.probe_history.discovered_at = 0.0
    return node


def test_all_names_of_a_model_are_served_and_count_as_one() -> None:
    one, other, third = (
        a_server("a", "demo", "small", "tiny"), a_server("b", "small", "demo"), a_server("c", "x"),
    )  # fmt: skip
    index = an_index(one, other)
    assert index.model_names() == ("demo", "small", "tiny")
    assert [names(chat(index, model)) for model in ("demo", "tiny")] == [["a", "b"], ["a"]]
    assert (one.served_name("tiny"), other.served_name("tiny")) == ("tiny", None)
    assert index.one_name_each(index.model_names()) == ("demo",)
    assert index.one_name_each(("tiny", "small")) == ("small",)
    index = an_index(one, other, third)
    assert index.one_name_each(index.model_names()) == ("demo", "x")
    declared = a_server("a", "demo", "small", models={"mine": "small"})
    assert an_index(declared).model_names() == ("mine",)
    assert declared.served_name("mine") == "small"


def test_requests_go_to_servers_that_were_started_for_them() -> None:
    index = an_index(
        a_server("chat", "m", purpose="chat"),
        a_server("old", "m"),
        a_server("embed", "m", purpose="embeddings"),
        a_server("rank", "m", purpose="rerank"),
        a_server("both", "m", purpose="embeddings", endpoints=["chat", "embeddings"]),
    )

    def able(endpoint: Any) -> list[str]:
        return names(index.capable_nodes("m", endpoint, vision=False, native=False))

    assert able("chat") == ["chat", "old", "both"]
    assert able("embeddings") == ["old", "embed", "both"]
    assert able("rerank") == ["old", "rank"]
    assert able("infill") == ["chat", "old"]


def test_a_server_for_other_work_gets_chats_where_no_other_node_could_be_for_them() -> None:
    embedder = a_server("e", "m", purpose="embeddings")
    assert names(chat(an_index(embedder), "m")) == ["e"]
    down = a_server("c", "m", purpose="chat", state=NodeState.DOWN)
    assert names(chat(an_index(embedder, down), "m")) == ["c"]
    labelled = a_server("e", "m", purpose="rerank", labels={"pool": "x"})
    assert names(chat(an_index(labelled, down), "m", labels=(("pool", "x"),))) == []
    silent = a_node(name="s", state=NodeState.LOADING)
    index = an_index(embedder, silent)
    assert names(chat(index, "m")) == []
    assert index.awaits_chat_node(["m"])
    silent.drain(draining=True)
    index.node_changed()
    assert names(chat(index, "m")) == ["e"]
    silent.drain(draining=False)
    refused = ProbeResult(ProbeAnswer.CONNECTION_REFUSED, "")
    silent.probe_history.record(refused, rise=1, fall=1, sign_of_life=None)
    index.node_changed()
    assert names(chat(index, "m")) == ["e"]


def test_a_pause_and_an_id_hold_for_the_names_that_all_servers_give_to_a_model() -> None:
    one, two = a_server("a", "secret", "nick", "both"), a_server("b", "both")
    index = an_index(one, two)
    assert index.aliases == {"nick": "secret"}
    index.set_paused(frozenset({"secret"}))
    assert index.paused == {"secret", "nick"}
    assert index.paused_by_name == {"secret"}
    index.set_paused(frozenset({"nick", "gone"}))
    assert index.paused == {"nick", "gone", "secret"}
    index.set_paused(frozenset({"both"}))
    assert index.paused == {"nick", "both", "secret"}
    declared = a_server("a", "secret", "nick", models={"nick": "nick"})
    assert an_index(declared).aliases == {}
    one.models_changed()
    one.properties.models, one.properties.aliases = ("nick",), {"secret": "nick", "both": "nick"}
    assert one.models_changed()


def test_a_model_may_be_served_by_a_node_that_has_not_reported_any_and_is_not_down() -> None:
    silent = a_node()
    index = an_index(silent)
    assert index.may_serve("m")
    assert index.not_found_error("m").status == 503
    refused = ProbeResult(ProbeAnswer.CONNECTION_REFUSED, "no connection")
    silent.probe_history.record(refused, rise=1, fall=1, sign_of_life=None)
    assert not index.may_serve("m")


def test_a_pool_has_the_nodes_with_all_of_its_labels() -> None:
    left = a_node(name="a", models={"m": "m", "n": "n"}, labels={"side": "left", "zone": "1"})
    right = a_node(name="b", models={"m": "m"}, labels={"side": "right"})
    index, pool = an_index(left, right, a_node(name="c", models={"m": "m"})), (("side", "right"),)
    assert names(chat(index, "m", labels=pool)) == ["b"]
    assert names(chat(index, "m", labels=(("side", "left"), ("zone", "2")))) == []
    assert names(chat(index, "m")) == ["a", "b", "c"]
    assert index.model_names(pool) == ("m",)
    assert (index.serves("n"), index.serves("n", pool)) == (True, False)
    for one in (pool, (("side", "left"),)):  # one of them has both models
        assert len(index.servers_of(["m", "n"], one)) == 1
    error = index.not_found_error("n", pool)
    assert (error.status, error.code) == (404, "model_not_found")
    assert error.message == "The model 'n' does not exist here. Known here: 'm'."


def server(
    node: str, *models: str, context: int | None = 4096, **properties: Any
) -> ComparedServer:
    own = {"ftype": "Q4_K_M", "build": "b1", "template": "t1", **properties}
    return ComparedServer(node, models or ("demo",), context, ServerProperties(**own))


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
