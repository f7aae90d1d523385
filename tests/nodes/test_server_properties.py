"""What servers say of themselves, what of it is kept, and which nodes serve a model by it."""

from __future__ import annotations

import json
import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.events import ModelsDiffer
from gateway.nodes.lifecycle import ProbeAnswer, ProbeResult
from gateway.nodes.model_index import ComparedServer, ModelIndex, model_differences
from gateway.nodes.node import Node, NodeState
from gateway.nodes.server_properties import (
    MOST_MODELS,
    ServerProperties,
    SlotCounts,
    count_processing,
    count_slots,
    inventory_drift,
    memory_told,
    parse_models,
    parse_props,
)
from gateway.nodes.state_files import LARGEST_PROPERTIES_FILE, PropertiesStore, StoredNames
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.nodes.build import a_fleet, a_node, a_spec

PROPS: dict[str, Any] = {
    "total_slots": 2,
    "default_generation_settings": {"n_ctx": 4096},
    "model_alias": "demo",
    "build_info": "b11549",
    "chat_template": "{{ messages }}",
    "modalities": {"vision": False, "audio": True},
    "endpoint_slots": True,
}
META = {"n_params": 900, "size": 3500, "ftype": "all F32", "n_ctx": 4096, "n_ctx_train": 8192}
MODELS: dict[str, Any] = {"data": [{"id": "demo", "meta": META}]}

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from([*PROPS, "data", "id", "aliases", "architecture", "input_modalities"]),
            inner,
        )
    ),
)


def test_what_props_and_models_report_is_kept_when_a_later_answer_leaves_it_out() -> None:
    facts = ServerProperties()
    facts.read_props(PROPS)
    facts.read_models(MODELS)
    for _ in range(2):
        assert (facts.slots, facts.context, facts.build) == (2, 4096, "b11549")
        assert (facts.vision, facts.audio, facts.slots_endpoint) == (False, True, True)
        assert (facts.n_params, facts.size, facts.ftype) == (900, 3500, "all F32")
        assert (facts.models, facts.trained_context) == (("demo",), 8192)
        assert facts.template is not None
        assert "messages" not in facts.template
        facts.read_props({})
        facts.read_models({})


def test_a_model_has_the_names_that_its_server_answers_to() -> None:
    facts = ServerProperties()
    entry = {"id": "a", "aliases": ["a", "b", "", 7, "x" * 600, "c"]}
    facts.read_models({"data": [entry, {"id": "b", "aliases": ["c", "d"]}, {"id": "e"}]})
    assert facts.models == ("a", "b", "e")
    assert facts.aliases == {"c": "a", "d": "b"}
    assert facts.names == ("a", "b", "e", "c", "d")
    facts.read_models({"data": [{"id": "a", "aliases": [f"n{one}" for one in range(5000)]}]})
    assert len(facts.names) == MOST_MODELS
    facts.read_models({"data": [{"id": "a", "aliases": "b"}]})
    assert not facts.aliases


@each_case(
    ("inputs", "modalities", "found"),
    [
        (["text", "image", "video"], None, (True, False, True)),
        (["text"], {"vision": True, "audio": True, "video": True}, (True, True, True)),
        (["text", "audio"], {"vision": True}, (True, True, False)),  # builds without video
        (None, {"vision": False, "audio": True}, (False, True, None)),
        ("image", {"vision": 1}, (None, None, None)),
    ],
)
def test_what_a_model_reads_is_told_in_either_place(
    inputs: Any, modalities: Any, found: Any
) -> None:
    facts = ServerProperties()
    facts.read_models({"data": [{"id": "m", "architecture": {"input_modalities": inputs}}]})
    facts.read_props({"modalities": modalities})
    assert (facts.vision, facts.audio, facts.video) == found


def test_a_purpose_is_known_until_another_process_answers() -> None:
    facts = ServerProperties()
    facts.read_props({"media_marker": "1"})
    facts.purpose_found("rerank")
    assert facts.all_refused == {"embeddings"}
    facts.read_props({"media_marker": "1"})
    facts.clear_remembered()
    assert facts.all_refused == {"embeddings"}
    facts.read_props({"media_marker": "2"})
    assert not facts.all_refused


def test_an_endpoint_that_tells_its_context_by_max_model_len_is_believed() -> None:
    facts = ServerProperties()
    entry = {"id": "tiny", "owned_by": "vllm", "max_model_len": 1024}
    facts.read_models({"data": [entry]})
    assert facts.context == 1024
    facts.read_models({"data": [{**entry, "max_model_len": 512}]})  # started anew with less
    assert facts.context == 512
    facts.read_models({"data": [entry, {"id": "other", "max_model_len": 4096}]})
    assert facts.context == 512  # several models: no single figure is true
    facts.read_models({"data": [{**entry, "max_model_len": -1}]})
    assert facts.context == 512


@given(ANYTHING)
def test_any_answer_can_be_read(answer: Any) -> None:
    facts = ServerProperties()
    facts.read_props(answer)
    facts.read_models(answer)
    data = msgspec.json.encode(answer)
    facts.read_props(parse_props(data))
    facts.read_models(parse_models(data))
    count_slots(data)
    assert all(isinstance(name, str) for name in facts.models)


def test_busy_slots_are_counted() -> None:
    slots = [
        {"is_processing": True, "n_prompt_tokens": 7, "id_task": 41},
        {"is_processing": False, "n_prompt_tokens": 5, "id_task": 40},
        {"is_processing": True, "n_prompt_tokens": "many"},
    ]
    busy = frozenset({(0, b"41"), (2, b"null")})
    assert count_slots(msgspec.json.encode(slots)) == SlotCounts((7, 0), 3, busy)


def test_busy_slots_are_counted_in_metrics_too() -> None:
    page = b"# HELP llamacpp:requests_processing 7\nllamacpp:requests_processing 3\nllamacpp:x 1\n"
    assert count_processing(page) == 3
    assert count_processing(b"llamacpp:requests_processing much\n") is None


@each_case(
    ("declared", "reported", "drift"),
    [
        (
            {"slots": 4, "context": 8192, "model": {"public": "phi-4"}},
            PROPS,
            (
                "slots: the inventory says 4, the server has 2",
                "context: the inventory says 8192 tokens a slot, the server has 4096",
                "model: the inventory says phi-4, the server serves demo",
            ),
        ),
        ({"kv": "split"}, {}, ("kv: the inventory says split, the server's slots share one pool",)),
        # Equal, undeclared or unreported values are none.
        ({"slots": 2, "context": 4096, "model": {"mine": "demo"}}, PROPS, ()),
        ({}, PROPS, ()),
        ({"slots": 4, "context": 1, "model": "x"}, {}, ()),
    ],
)
def test_drift_names_both_values(
    declared: dict[str, Any], reported: dict[str, Any], drift: tuple[str, ...]
) -> None:
    facts = ServerProperties(shared_pool=True)
    facts.read_props(reported)
    assert inventory_drift(a_spec(**declared), facts) == drift


def test_a_shared_pool_is_known_until_another_process_answers() -> None:
    properties = ServerProperties()
    properties.read_props({"media_marker": "<__media_a__>"})
    assert properties.pool_learnt()
    assert not properties.pool_learnt()
    properties.remembered = True
    properties.process_ended()  # perhaps: its mark will show
    properties.clear_remembered()
    properties.read_props({"media_marker": "<__media_a__>", "is_sleeping": True})
    assert properties.shared_pool
    properties.read_props({"media_marker": "<__media_b__>"})
    assert not properties.shared_pool


@each_case(
    ("parse", "answer"),
    [
        (parse_props, b'{"total_slots":4,"x":[%b[]]}' % (b"[]," * 1_000_000)),
        (parse_props, b'{"total_slots":[%b[]]}' % (b"[]," * 1_000_000)),
        (parse_props, b'{"total_slots":4%b}' % b"".join(b',"f%d":0' % n for n in range(200_000))),
        (parse_models, b'{"data":[%b{}]}' % (b"{}," * 1_000_000)),
        (parse_models, b'{"data":[{"id":"m","x":[%b{}]}]}' % (b"{}," * 1_000_000)),
        (count_slots, b"[%b[]]" % (b"[]," * 1_000_000)),
        (count_slots, b"[%b{}]" % (b'{"is_processing":true},' * 150_000)),
    ],
)
def test_an_answer_of_a_million_values_takes_no_memory(
    parse: Callable[[bytes], object], answer: bytes
) -> None:
    tracemalloc.start()
    try:
        parse(answer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


GIB = 1 << 30
# As published: parameters, vocabulary, width, layers, elements of a layer's keys.
KNOWN_SHAPES = (
    ("Llama 2 7B", 6_738_000_000, 32_000, 4096, 32, 4096),
    ("Phi 3 mini", 3_821_000_000, 32_064, 3072, 32, 3072),
    ("Llama 3.1 70B", 70_550_000_000, 128_256, 8192, 80, 1024),
    ("Qwen 2.5 0.5B", 494_000_000, 151_936, 896, 24, 128),
    ("Qwen 3 235B A22B", 235_100_000_000, 151_936, 4096, 94, 512),
    ("gpt-oss 20b", 20_910_000_000, 201_088, 2880, 24, 512),
)


@each_case(("name", "n_params", "n_vocab", "n_embd", "layers", "keys"), KNOWN_SHAPES)
def test_the_memory_of_a_known_model_is_bound_from_above(
    name: str, n_params: int, n_vocab: int, n_embd: int, layers: int, keys: int
) -> None:
    size = n_params * 5 // 8
    cache = 8192 * layers * keys * 4
    meta = {"size": size, "n_params": n_params, "n_embd": n_embd, "n_vocab": n_vocab, "n_ctx": 4096}
    told = memory_told(meta, ("--parallel", "2", "--ctx-size", "8192"))
    assert told is not None
    assert size + cache <= told <= size + 12 * cache + GIB, name


def test_slots_context_and_types_of_the_cache_count_as_a_server_was_started() -> None:
    figures = {"n_params": 8_030_000_000, "n_embd": 4096, "n_vocab": 128_256, "n_ctx": 4096}

    def memory(*args: str) -> int:
        return memory_told({"size": 4_700_000_000, **figures}, args) or 0

    alone = memory()
    assert memory("--parallel", "2") > alone + GIB
    assert memory("--parallel", "2", "--ctx-size", "8192") == memory("--parallel", "2")
    assert memory("--parallel", "4", "--ctx-size", "4096") < memory("--parallel", "2")  # one pool
    quarter = ("--cache-type-k", "q4_0", "--cache-type-v", "q4_0")
    assert memory(*quarter) < memory("--cache-type-k", "q8_0") < alone
    assert memory("--cache-ram", "1024") == alone + GIB
    assert memory("--ubatch-size", "4096") > alone + GIB * 9 // 10


SAID = ServerProperties(models=("demo",), slots=4, context=4096, vision=False, refused={"rerank"})


def saying(facts: ServerProperties, **keys: Any) -> Node:
    node = a_node(**keys)
    node.properties = facts
    return node


def drained_nodes(path: Path) -> StoredNames:
    return StoredNames(path, "drained", "Drained nodes", "no node is drained")


def written(path: Path, *nodes: Node) -> None:
    store = PropertiesStore(path)
    for node in nodes:
        store.record(node.spec, node.properties)
    store.save()


def test_properties_last_over_a_restart_for_the_same_server_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "seen.json"
    written(path, saying(SAID))
    found = PropertiesStore(path).recall(a_spec())
    assert found == SAID
    assert found.remembered
    assert [file.name for file in path.parent.iterdir()] == ["seen.json"]
    for other in (a_spec(url="http://127.0.0.1:10"), a_spec("b"), a_spec(kind="openai")):
        assert PropertiesStore(path).recall(other) == ServerProperties()


def test_properties_are_read_from_older_versions_and_kept_readable_for_them(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    new = ServerProperties(
        models=("demo",),
        aliases={"tiny": "demo"},
        video=True,
        process="p",
        purpose="embeddings",
        is_router=True,
        most_loaded=4,
    )
    written(path, saying(new))
    assert PropertiesStore(path).recall(a_spec()) == new
    value = json.loads(path.read_text())
    facts = value["servers"][0]["facts"]
    assert facts["models"] == ["demo"]  # all that an older version reads of the names
    for name in ("aliases", "video", "process", "purpose", "is_router", "most_loaded"):
        del facts[name]
    path.write_text(json.dumps(value))
    assert PropertiesStore(path).recall(a_spec()) == ServerProperties(models=("demo",))


@each_case(
    "damage",
    [
        b"", b"{", b"[]", b"null", b'{"version": "1"}', b'{"version": 1}', b'{"drained": "a"}',
        b'{"drained": [1]}', b"\xff" * 9, b"[" * 9999,
    ],
)  # fmt: skip
def test_a_damaged_file_is_set_aside_and_logged(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    seen, drained = tmp_path / "seen.json", tmp_path / "drains.json"
    for path in (seen, drained):
        path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert PropertiesStore(seen).recall(a_spec()) == ServerProperties()
        drains = drained_nodes(drained)
    assert "a" not in drains
    for path in (seen, drained):
        assert path.with_name(f"{path.name}.bad").read_bytes() == damage
        assert f"{path.name}.bad" in caplog.text
    written(seen, saying(SAID))
    assert PropertiesStore(seen).recall(a_spec()) == SAID
    drains.keep("a")
    drains.save()
    assert "a" in drained_nodes(drained)


@each_case(
    "facts",
    [
        {"slots": -1}, {"slots": "many"}, {"context": 1 << 40}, {"models": ["x" * 5000]},
        {"models": ["m"] * 2000}, {"refused": 7}, {"aliases": {"a": "unknown"}},
        {"aliases": {f"{n}": "demo" for n in range(1000)}}, {"purpose": "war"},
        {"is_router": True, "most_loaded": -1},
    ],
)  # fmt: skip
def test_implausible_properties_are_left_out_and_the_rest_is_read(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    path = tmp_path / "seen.json"
    path.unlink(missing_ok=True)
    written(path, saying(SAID), saying(SAID, name="b"))
    value = json.loads(path.read_text())
    value["servers"][0]["facts"] |= facts
    path.write_text(json.dumps(value))
    seen = PropertiesStore(path)
    assert seen.recall(a_spec()) == ServerProperties()
    assert seen.recall(a_spec("b")) == SAID


def test_a_folder_that_cannot_be_used_is_logged_and_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        written(tmp_path / "file" / "seen.json", saying(SAID))
        drains = drained_nodes(tmp_path / "file" / "drains.json")
        drains.keep("a")
        drains.save()
    assert caplog.text.count("forgotten at a restart") == 2
    assert "a" in drains
    (tmp_path / "folder").mkdir()
    with caplog.at_level(logging.WARNING):
        assert PropertiesStore(tmp_path / "folder").recall(a_spec()) == ServerProperties()
    assert "can't be read" in caplog.text


def test_nodes_that_report_too_much_do_not_fill_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "seen.json"
    chatty = [
        ServerProperties(models=tuple(f"{number}-{name}-{'x' * 490}" for name in range(1000)))
        for number in range(40)
    ]
    with caplog.at_level(logging.WARNING):
        written(path, *(saying(facts, name=f"n{i}") for i, facts in enumerate(chatty)))
    assert path.stat().st_size <= LARGEST_PROPERTIES_FILE
    assert "too much" in caplog.text
    assert PropertiesStore(path).recall(a_spec("n39")) == chatty[39]
    assert PropertiesStore(path).recall(a_spec("n0")) == ServerProperties()


def test_servers_that_left_long_ago_are_forgotten() -> None:
    store = PropertiesStore(most_servers=2)
    for name in "abc":
        store.record(a_spec(name), SAID)
    assert store.recall(a_spec("a")) == ServerProperties()
    assert store.recall(a_spec("c")) == SAID


def an_index(*nodes: Node) -> ModelIndex:
    index = ModelIndex()
    index.set_nodes(nodes)
    return index


def names(nodes: tuple[Node, ...]) -> list[str]:
    return [node.name for node in nodes]


def chat(index: ModelIndex, model: str, **more: Any) -> tuple[Node, ...]:
    return index.capable_nodes(model, "chat", **{"vision": False, "native": False, **more})


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
