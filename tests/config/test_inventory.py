from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from gateway.config import ConfigError, Inventory, NodeSpec, load_inventory
from gateway.config.inventory import Endpoint, NodeTimeouts, TokenCost
from tests.config.conftest import LoadNodes, Problems

ONE = "nodes:\n  - {{name: a, url: 'http://h:80', {}}}\n"


def test_a_node_needs_only_a_name_and_an_address(load_nodes: LoadNodes) -> None:
    (node,) = load_nodes("nodes: [{name: a, url: 'http://10.0.0.1:8080'}]").nodes
    assert node == NodeSpec(name="a", url="http://10.0.0.1:8080")
    assert (node.kind, node.tier, node.slots, node.models) == ("llama.cpp", "cpu", None, None)
    assert (node.endpoints, node.context, node.host) == (None, None, "10.0.0.1")
    assert (node.cost_per_hour, node.cost_per_million_tokens, node.speed_hint) == (0.0, None, 1.0)
    assert (node.api_key, node.tls, node.enabled, node.standby) == (None, None, True, False)
    assert node.timeouts == NodeTimeouts()
    assert node.labels == {}


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
    assert (node.tls.ca, node.tls.verify, node.tls.server_name) == (
        tmp_path / "ca.pem",
        False,
        "inner",
    )
    assert (node.enabled, node.standby, node.labels) == (False, True, {"numa": "0"})


@pytest.mark.parametrize(
    ("written", "models"),
    [
        ("m", {"m": "m"}),
        ("[m, n]", {"m": "m", "n": "n"}),
        ("{public: inner}", {"public": "inner"}),
    ],
)
def test_models_are_a_name_a_list_or_a_mapping(
    load_nodes: LoadNodes, written: str, models: dict[str, str]
) -> None:
    assert load_nodes(ONE.format(f"model: {written}")).nodes[0].models == models


def test_an_empty_list_of_nodes_is_allowed_and_a_missing_one_is_not(
    load_nodes: LoadNodes, nodes_problems: Problems
) -> None:
    assert load_nodes("nodes: []").nodes == ()
    for text in ("", "defaults: {}", "nodes:", "nodes: ~"):
        (problem,) = nodes_problems(text)
        assert "nodes: []" in problem.remedy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "- name: a\n  url: http://h\n",
            "F:1: must be a mapping, not a list (write the line nodes:",
        ),
        (
            "nodes:\n  - http://h\n",
            "F:2: nodes[0]: must be a mapping (write - {name: epyc-a, url: ",
        ),
        ("nodes:\n  - name: a\n", "F:2: nodes[0].url: is missing (add it, such as url: http://"),
        ("nodes:\n  - url: http://h\n", "F:2: nodes[0].name: is missing (add it, such as name: "),
        ("nodes:\n  - name: a\n    url:\n", "F:3: nodes[0].url: is missing (add it, such as url: "),
        (
            "nodes:\n  - name: a\n    url: http://h\n    port: 80800\n",
            "F:4: nodes[0].port: unknown key (it is part of the url: http://10.0.0.11:8080)",
        ),
        (
            "nodes:\n  - name: a\n    url: http://h:80800\n",
            "F:3: nodes[0].url: has a wrong port 80800 (a port is a number up to 65535",
        ),
        (
            "nodes:\n  - name: a\nurl: http://h\n",
            "F:3: url: unknown key (it is a key of a node: indent it",
        ),
    ],
)
def test_a_common_mistake_is_reported_with_the_remedy(
    nodes_problems: Problems, text: str, expected: str
) -> None:
    problems = nodes_problems(text)
    lines = [str(problem).replace(str(problem.file), "F") for problem in problems]
    assert any(line.startswith(expected) for line in lines), lines


@pytest.mark.parametrize("text", ["[1]", "nodes", "nodes: {a: b}", "nodes: [1]", "defaults: 3"])
def test_the_file_has_its_form(nodes_problems: Problems, text: str) -> None:
    assert any("must be a" in problem.message for problem in nodes_problems(text))


def test_defaults_go_into_every_node_and_into_its_mappings(load_nodes: LoadNodes) -> None:
    first, second = load_nodes(
        """
        defaults:
          slots: 4
          timeouts: {connect: 1, silence: 2m}
          labels: {site: north, rack: "1"}
          api_key_env: KEY
        nodes:
          - {name: a, url: http://a, timeouts: {connect: 9}, labels: {rack: "2"}}
          - {name: b, url: http://b, slots: auto, timeouts: ~, api_key_env: ~}
        """,
        KEY="k",
    ).nodes
    assert first.slots == 4
    assert first.timeouts == NodeTimeouts(connect=9, silence=120)
    assert first.labels == {"site": "north", "rack": "2"}
    assert first.api_key == SecretStr("k")
    assert (second.slots, second.timeouts, second.api_key) == (None, NodeTimeouts(), None)


def test_a_node_of_another_price_or_key_replaces_the_default(
    load_nodes: LoadNodes, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    (node,) = load_nodes(
        """
        defaults: {cost_per_hour: 1, api_key_env: KEY}
        nodes:
          - name: a
            url: http://a
            cost_per_million_tokens: {prompt: 0.1}
            api_key_file: key
        """,
        KEY="from-env",
    ).nodes
    assert (node.cost_per_hour, node.cost_per_million_tokens) == (0, TokenCost(prompt=0.1))
    assert node.api_key == SecretStr("from-file")


def test_a_mistake_in_the_defaults_is_reported_once_and_there(nodes_problems: Problems) -> None:
    (problem,) = nodes_problems(
        """\
        nodes:
          - {name: a, url: http://a}
          - {name: b, url: http://b}
        defaults:
          tier: tpu
        """
    )
    assert (problem.line, problem.key) == (5, "defaults.tier")


def test_defaults_are_checked_without_nodes(nodes_problems: Problems) -> None:
    (problem,) = nodes_problems("defaults: {slots: many}\nnodes: []")
    assert problem.key == "defaults.slots"


def test_a_name_or_an_address_is_no_default(nodes_problems: Problems) -> None:
    problems = nodes_problems("defaults:\n  name: a\n  url: http://a\nnodes: []")
    assert [(p.line, p.message) for p in problems] == [
        (2, "can't be a default"),
        (3, "can't be a default"),
    ]


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:80/v1", "must not end in /v1"),
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


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "..", ".", "a" * 129, "a\\n"])
def test_a_name_has_only_harmless_characters(nodes_problems: Problems, name: str) -> None:
    (problem,) = nodes_problems(f"nodes:\n  - name: '{name}'\n    url: http://h")
    assert (problem.line, problem.key) == (2, "nodes[0].name")


@pytest.mark.parametrize(
    "wrong",
    [
        "slots: 0",
        "slots: many",
        "slots: true",
        'slots: "2"',
        "slots: 1.5",
        "context: 0",
        "context: .inf",
        "cost_per_hour: -1",
        "cost_per_hour: .nan",
        "cost_per_hour: .inf",
        "cost_per_hour: true",
        "cost_per_hour: cheap",
        "cost_per_million_tokens: 3",
        "cost_per_million_tokens: {prompt: -1}",
        "speed_hint: 0",
        "speed_hint: .inf",
        "kind: vllm",
        "tier: CPU!",
        "model: []",
        "model: 7",
        "model: {a: 1}",
        "model: ['']",
        "endpoints: [chat, talk]",
        "endpoints: 3",
        "timeouts: {connect: 0}",
        "timeouts: {connect: -3s}",
        "timeouts: {connect: 30 days}",
        "timeouts: {conect: 3}",
        "timeouts: 3",
        "tls: {ca: missing.pem}",
        "tls: {verify: maybe}",
        "api_key_env: sk-secret",
        "api_key: sk-secret",
        "api_key_file: missing.key",
        "api_key_file: .",
        "enabled: 7",
        "labels: [a]",
        "labels: {a: 1}",
        "labels: {a: ~}",
        "host: a/b",
        "models: {a: b}",
        "colour: red",
    ],
)
def test_a_wrong_value_is_reported_with_its_key_and_nothing_secret(
    nodes_problems: Problems, wrong: str
) -> None:
    (problem,) = nodes_problems(ONE.format(wrong))
    assert problem.line == 2
    assert problem.key.startswith("nodes[0]." + wrong.partition(":")[0])
    assert problem.message
    assert "sk-secret" not in str(problem)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("node: []\nnodes: []", "did you mean nodes? Allowed: defaults, nodes"),
        ("Defaults: {}\nnodes: []", "did you mean defaults? Allowed: defaults, nodes"),
        ("slots: 2\nnodes: []", "it is a key of a node: indent it as far as that node's name"),
        ("zebra: 2\nnodes: []", "allowed: defaults, nodes"),
    ],
)
def test_an_unknown_key_of_the_file_is_reported_with_the_nearest(
    nodes_problems: Problems, text: str, remedy: str
) -> None:
    (problem,) = nodes_problems(text)
    assert (problem.line, problem.message, problem.remedy) == (1, "unknown key", remedy)


@pytest.mark.parametrize(("key", "value", "meant"), [("tier", "CPU", "cpu"), ("Slots", 2, "slots")])
def test_capital_letters_hide_no_near_word(
    nodes_problems: Problems, key: str, value: object, meant: str
) -> None:
    (problem,) = nodes_problems(ONE.format(f"{key}: {value}"))
    assert f"did you mean {meant}?" in problem.remedy


def test_an_unknown_key_is_reported_with_the_nearest_and_all_known(
    nodes_problems: Problems,
) -> None:
    (problem,) = nodes_problems(ONE.format("slot: 2"))
    assert problem.message == "unknown key"
    assert "did you mean slots?" in problem.remedy
    assert "api_key_env, api_key_file, context" in problem.remedy
    assert "api_key," not in problem.remedy


def test_a_duplicate_name_is_reported_with_both_lines(nodes_problems: Problems) -> None:
    text = "nodes:\n  - name: a\n    url: http://a\n  - name: a\n    url: http://b\n"
    (problem,) = nodes_problems(text)
    assert (problem.line, problem.key) == (4, "nodes[1].name")
    assert "line 2" in problem.message


def test_both_prices_or_both_keys_at_once_are_refused(
    nodes_problems: Problems, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("k")
    problems = nodes_problems(
        """\
        nodes:
          - name: a
            url: http://a
            cost_per_hour: 1
            cost_per_million_tokens: {prompt: 1}
            api_key_env: K
            api_key_file: key
        """,
        K="k",
    )
    assert [(p.line, p.key) for p in problems] == [
        (5, "nodes[0].cost_per_million_tokens"),
        (7, "nodes[0].api_key_file"),
    ]


def test_a_certificate_key_needs_its_certificate(nodes_problems: Problems, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("k")
    (problem,) = nodes_problems(ONE.format("tls: {key: key.pem}"))
    assert problem.key == "nodes[0].tls.key"


@pytest.mark.parametrize("content", [b"", b" \n", b"a\nb", b"\xff", b"k" * 20000, b"a\x00b"])
def test_a_key_is_one_line_of_ascii(
    nodes_problems: Problems, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "key").write_bytes(content)
    (problem,) = nodes_problems(ONE.format("api_key_file: key"))
    assert problem.key == "nodes[0].api_key_file"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_a_key_file_that_cannot_be_read_is_reported(nodes_problems: Problems) -> None:
    (problem,) = nodes_problems(ONE.format("api_key_file: /proc/self/mem"))
    assert (problem.key, problem.message) == (
        "nodes[0].api_key_file",
        "can't be read: Input/output error",
    )


def test_a_missing_or_empty_variable_of_a_key_is_reported(nodes_problems: Problems) -> None:
    (missing,) = nodes_problems(ONE.format("api_key_env: NODE_KEY"))
    assert (missing.key, missing.message) == (
        "nodes[0].api_key_env",
        "the variable NODE_KEY is not set",
    )
    (empty,) = nodes_problems(ONE.format("api_key_env: NODE_KEY"), NODE_KEY="")
    assert empty.message == "the variable NODE_KEY is empty"


def test_no_key_shows_in_a_repr_or_a_dump(load_nodes: LoadNodes) -> None:
    inventory = load_nodes(ONE.format("api_key_env: K"), K="sk-secret")
    assert "sk-secret" not in repr(inventory) + str(inventory) + str(inventory.model_dump())
    assert "sk-secret" not in inventory.model_dump_json()
    assert inventory.nodes[0].api_key is not None
    assert inventory.nodes[0].api_key.get_secret_value() == "sk-secret"


def test_a_changed_key_makes_another_node(load_nodes: LoadNodes) -> None:
    text = ONE.format("api_key_env: K")
    assert load_nodes(text, K="one") != load_nodes(text, K="two")
    assert load_nodes(text, K="one") == load_nodes(text, K="one")


def test_variables_stand_for_numbers_booleans_and_texts(load_nodes: LoadNodes) -> None:
    (node,) = load_nodes(
        """
        nodes:
          - name: ${NUMBER}
            url: http://${HOST}:${PORT}
            slots: "${NUMBER}"
            model: {a: "${NUMBER}"}
            enabled: ${FLAG}
            context: ${MISSING:-}
            tier: ${MISSING:-gpu}
        """,
        NUMBER="42",
        HOST="h",
        PORT="80",
        FLAG="false",
    ).nodes
    assert (node.name, node.url, node.slots) == ("42", "http://h:80", 42)
    assert (node.models, node.enabled, node.context, node.tier) == ({"a": "42"}, False, None, "gpu")


def test_a_value_from_a_variable_is_never_shown(nodes_problems: Problems) -> None:
    problems = nodes_problems(
        "nodes: [{name: '${S}', url: '${S}', tier: '${S}', slots: '${S}', host: '${S}'}]",
        S="top/secret",
    )
    assert len(problems) == 5
    assert "secret" not in "\n".join(map(str, problems))


def test_all_problems_come_at_once_in_the_order_of_the_file(nodes_problems: Problems) -> None:
    problems = nodes_problems(
        """\
        nodes:
          - name: a
            url: ${URL}
            slot: 3
          - url: http://b
            tier: cpuu
          - name: a
            name: c
            url: nonsense
        node: []
        """
    )
    assert [(p.line, p.key) for p in problems] == [
        (3, "nodes[0].url"),
        (4, "nodes[0].slot"),
        (5, "nodes[1].name"),
        (6, "nodes[1].tier"),
        (7, "nodes[2].name"),
        (8, "nodes[2].name"),
        (9, "nodes[2].url"),
        (10, "node"),
    ]


def test_an_error_reads_as_file_line_key_message_remedy(
    load_nodes: LoadNodes, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_nodes("nodes:\n  - name: a\n    url: http://a/v1\n")
    assert str(caught.value) == (
        f"{tmp_path}/nodes.yaml:3: nodes[0].url: must not end in /v1 "
        "(leave /v1 out; the gateway adds it)"
    )


def test_nodes_share_what_aliases_name(load_nodes: LoadNodes) -> None:
    nodes = load_nodes(
        """
        nodes:
          - &first {name: a, url: http://h:1, slots: 2, labels: {x: y}}
          - {<<: *first, name: b, url: http://h:2}
        """
    ).nodes
    assert [(node.name, node.slots, node.labels) for node in nodes] == [
        ("a", 2, {"x": "y"}),
        ("b", 2, {"x": "y"}),
    ]


def test_defaults_times_nodes_is_bounded(nodes_problems: Problems) -> None:
    labels = ", ".join(f"k{i}: v" for i in range(2000))
    nodes = "\n".join(f"  - {{name: n{i}, url: http://h}}" for i in range(300))
    problems = nodes_problems(f"defaults: {{labels: {{{labels}}}}}\nnodes:\n{nodes}\n")
    assert any("values in all" in problem.message for problem in problems)


def test_a_fleet_of_thousands_is_read(load_nodes: LoadNodes) -> None:
    text = "defaults: {slots: 2, labels: {a: b}}\nnodes:\n"
    text += "".join(f"  - {{name: n{i}, url: 'http://h{i}:8080'}}\n" for i in range(3000))
    assert len(load_nodes(text).nodes) == 3000


def test_an_inventory_built_in_code_keeps_the_same_rules() -> None:
    plain = {"nodes": [{"name": "local-0", "url": "http://127.0.0.1:8081", "model": "demo"}]}
    assert Inventory.model_validate(plain).nodes[0].models == {"demo": "demo"}
    with pytest.raises(ValidationError, match="two nodes are named local-0"):
        Inventory.model_validate({"nodes": plain["nodes"] * 2})


def test_the_environment_is_the_process_own_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_HOST_OF_MINE", "h")
    path = tmp_path / "nodes.yaml"
    path.write_text("nodes: [{name: a, url: 'http://${SOME_HOST_OF_MINE}'}]")
    assert load_inventory(path).nodes[0].url == "http://h"
