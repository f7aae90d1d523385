from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.config.inventory import Endpoint, NodeSpec, NodeTimeouts
from tests.config.conftest import LoadNodes, Problems
from tests.each_case import each_case

ONE = "nodes:\n  - {{name: a, url: 'http://h:80', {}}}\n"


def test_a_node_needs_only_a_name_and_an_address(load_nodes: LoadNodes) -> None:
    (node,) = load_nodes("nodes: [{name: a, url: 'http://10.0.0.1:8080'}]").nodes
    assert node == NodeSpec(name="a", url="http://10.0.0.1:8080")
    assert (node.models, node.host, node.api_key) == (None, "10.0.0.1", None)


def test_every_key_of_the_contract_is_read(load_nodes: LoadNodes, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("ca")
    (node,) = load_nodes(
        """
        nodes:
          - name: epyc-a-numa0
            url: http://10.0.0.11:8080/llama/
            kind: openai
            tier: gpu
            slots: 2
            model: mistral-7b
            endpoints: [chat, vision]
            context: 4096
            host: epyc-a
            cost_per_hour: 0.20
            speed_hint: 1.5
            api_key_env: NODE_KEY
            timeouts: {connect: 3, total: 1h}
            tls: {ca: ca.pem, verify: off, server_name: inner}
            enabled: false
            standby: yes
            labels: {numa: "0"}
        """,
        NODE_KEY="sk-1",
    ).nodes
    assert node.url == "http://10.0.0.11:8080/llama"
    assert (node.kind, node.tier, node.slots, node.context) == ("openai", "gpu", 2, 4096)
    assert node.models == {"mistral-7b": "mistral-7b"}
    assert node.endpoints == frozenset[Endpoint](["chat", "vision"])
    assert (node.host, node.cost_per_hour, node.speed_hint) == ("epyc-a", 0.2, 1.5)
    assert node.api_key == SecretStr("sk-1")
    assert node.timeouts == NodeTimeouts(connect=3, total=3600)
    assert node.tls is not None
    tls = (node.tls.ca, node.tls.verify, node.tls.server_name)
    assert tls == (tmp_path / "ca.pem", False, "inner")
    assert (node.enabled, node.standby, node.labels) == (False, True, {"numa": "0"})


@each_case(
    ("written", "models"),
    [("m", {"m": "m"}), ("[m, n]", {"m": "m", "n": "n"}), ("{public: inner}", {"public": "inner"})],
)
def test_models_are_a_name_a_list_or_a_mapping(
    load_nodes: LoadNodes, written: str, models: dict[str, str]
) -> None:
    assert load_nodes(ONE.format(f"model: {written}")).nodes[0].models == models


@each_case(
    ("written", "url"),
    [
        ("http://10.0.0.1:8080/", "http://10.0.0.1:8080"),
        ("HTTPS://Node.Example/Prefix//", "https://node.example/Prefix"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("http://h/v1beta", "http://h/v1beta"),
    ],
)
def test_addresses_are_normalised(load_nodes: LoadNodes, written: str, url: str) -> None:
    assert load_nodes(f"nodes: [{{name: a, url: '{written}'}}]").nodes[0].url == url


@each_case(
    ("url", "expected"),
    [
        ("http://h:80/v1/", "must not end in /v1"),
        ("http://h/p/v1", "must not end in /v1"),
        ("ftp://h", "http or https"),
        ("10.0.0.1:8080", "http or https"),
        ("http://", "http or https"),
        ("http://u:secret@h", "user or a password"),
        ("http://h?x=1", "query"),
        ("http://h#x", "query or a fragment"),
        ("http://h:99999", "has a wrong port 99999"),
        ("http://u:secret@h:8o80", "has a wrong port"),
        ("http://h:0", "valid host and port"),
        ("http://[::1", "no valid URL"),
        ("http://a b", "valid host"),
        ("http://höst", "valid host"),
        ("http://h/a b", "characters"),
        ("http://h/\\x", "characters"),
    ],
)
def test_an_address_that_would_not_work_is_refused(
    nodes_problems: Problems, url: str, expected: str
) -> None:
    (problem,) = nodes_problems(f"nodes: [{{name: a, url: '{url}'}}]")
    assert expected in problem.message
    assert problem.remedy
    assert "secret" not in str(problem)


@each_case(
    ("url", "written"),
    [
        ("http://::1:8080", "http://[::1]:8080"),
        ("https://fd00::11:8443/llm", "https://[fd00::11]:8443/llm"),
        ("http://2001:db8::5", "http://[2001:db8::5]"),
        ("http://fe80::1:2", "http://[fe80::1:2]"),
        ("http://::ffff:10.0.0.1:8080", "http://[::ffff:10.0.0.1]:8080"),
    ],
)
def test_an_ipv6_address_without_brackets_is_written_with_them(
    nodes_problems: Problems, url: str, written: str
) -> None:
    (problem,) = nodes_problems(f"nodes: [{{name: a, url: '{url}'}}]")
    assert "needs brackets" in problem.message
    assert problem.remedy == f"write {written}"


@each_case(
    ("key", "called"),
    [
        ("weight: 3", "speed_hint"),
        ("priority: 1", "`tier: gpu`"),
        ("backup: true", "`standby: true`"),
        ("max_conns: 4", "slots"),
        ("api_base: http://h", "url"),
        ("fail_timeout: 10s", "health"),
        ("ctx_size: 4096", "context"),
        ("timeout: 60", "timeouts"),
        ("ttl: 300", "models.NAME.idle_unload"),
        ("keep_alive: 5m", "models.NAME.idle_unload"),
        ("pin: [a]", "models.NAME.idle_unload, pin"),
        ("models_max: 2", "memory"),
        ("slot_save_path: /tmp", "slot_save: true"),
    ],
)
def test_keys_of_other_programs_say_what_they_are_called_here(
    nodes_problems: Problems, key: str, called: str
) -> None:
    for text in (f"nodes: [{{name: a, url: http://h, {key}}}]", f"nodes: []\ndefaults: {{{key}}}"):
        (problem,) = nodes_problems(text)
        assert problem.message == "unknown key"
        assert called in problem.remedy


@each_case("name", ["", "a b", "a/b", "ä", "..", ".", "a" * 129, "a\\n"])
def test_a_name_has_only_harmless_characters(nodes_problems: Problems, name: str) -> None:
    (problem,) = nodes_problems(f"nodes:\n  - name: '{name}'\n    url: http://h")
    assert (problem.line, problem.key) == (2, "nodes[0].name")


@each_case(
    "wrong",
    [
        "slots: many", "slots: true", 'slots: "2"', "slots: 1.5", "context: .inf",
        "cost_per_hour: .nan", "cost_per_hour: .inf", "cost_per_hour: true", "cost_per_hour: cheap",
        "cost_per_million_tokens: 3", "cost_per_million_tokens: {prompt: -1}", "speed_hint: .inf",
        "model: []", "model: 7", "model: {a: 1}", "model: ['']", "endpoints: 3",
        "timeouts: {connect: 0}", "timeouts: {connect: 30 days}", "timeouts: {conect: 3}",
        "timeouts: 3", "tls: {ca: missing.pem}", "tls: {verify: maybe}", "api_key_env: sk-secret",
        "api_key: sk-secret", "api_key_file: missing.key", "api_key_file: .", "enabled: 7",
        "labels: [a]", "labels: {a: 1}", "labels: {a: ~}", "host: a/b", "models: {a: b}",
        "colour: red",
    ],
)  # fmt: skip
def test_a_wrong_value_is_reported_with_its_key_and_nothing_secret(
    nodes_problems: Problems, wrong: str
) -> None:
    (problem,) = nodes_problems(ONE.format(wrong))
    assert problem.line == 2
    assert problem.key.startswith("nodes[0]." + wrong.partition(":")[0])
    assert problem.message
    assert "sk-secret" not in str(problem)


def test_both_prices_both_keys_and_a_certificate_s_key_alone_are_refused(
    nodes_problems: Problems, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("k")
    prices = "cost_per_hour: 1,\n    cost_per_million_tokens: {prompt: 1}"
    keys = "api_key_env: K,\n    api_key_file: key"
    problems = nodes_problems(ONE.format(f"{prices}, {keys}"), K="k")
    assert [(p.line, p.key) for p in problems] == [
        (3, "nodes[0].cost_per_million_tokens"),
        (4, "nodes[0].api_key_file"),
    ]
    # And a certificate's key needs its certificate.
    (problem,) = nodes_problems(ONE.format("tls: {key: key}"))
    assert problem.key == "nodes[0].tls.key"


@each_case("content", [b"", b" \n", b"a\nb", b"\xff", b"k" * 20000, b"a\x00b"])
def test_a_key_is_one_line_of_ascii(
    nodes_problems: Problems, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "key").write_bytes(content)
    (problem,) = nodes_problems(ONE.format("api_key_file: key"))
    assert problem.key == "nodes[0].api_key_file"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_a_key_file_that_cannot_be_read_is_reported(nodes_problems: Problems) -> None:
    (problem,) = nodes_problems(ONE.format("api_key_file: /proc/self/mem"))
    assert problem.key == "nodes[0].api_key_file"
    assert problem.message == "can't be read: Input/output error"


def test_a_missing_or_empty_variable_of_a_key_is_reported(nodes_problems: Problems) -> None:
    (missing,) = nodes_problems(ONE.format("api_key_env: NODE_KEY"))
    assert missing.key == "nodes[0].api_key_env"
    assert missing.message == "the variable NODE_KEY is not set"
    (empty,) = nodes_problems(ONE.format("api_key_env: NODE_KEY"), NODE_KEY="")
    assert empty.message == "the variable NODE_KEY is empty"


def test_no_key_shows_in_a_repr_or_a_dump_and_another_one_makes_another_node(
    load_nodes: LoadNodes,
) -> None:
    text = ONE.format("api_key_env: K")
    inventory = load_nodes(text, K="sk-secret")
    assert load_nodes(text, K="other") != inventory == load_nodes(text, K="sk-secret")
    assert "sk-secret" not in repr(inventory) + str(inventory) + str(inventory.model_dump())
    assert "sk-secret" not in inventory.model_dump_json()
    assert inventory.nodes[0].api_key is not None
    assert inventory.nodes[0].api_key.get_secret_value() == "sk-secret"
