from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.config.inventory import NodeTimeouts, TokenCost, load_inventory
from tests.config.conftest import LoadNodes, Problems
from tests.each_case import each_case

ONE = "nodes:\n  - {{name: a, url: 'http://h:80', {}}}\n"


def test_an_empty_list_of_nodes_is_allowed_and_a_missing_one_is_not(
    load_nodes: LoadNodes, nodes_problems: Problems
) -> None:
    assert load_nodes("nodes: []").nodes == ()
    for text in ("", "defaults: {}", "nodes:", "nodes: ~"):
        (problem,) = nodes_problems(text)
        assert "nodes: []" in problem.remedy


@each_case(
    ("text", "expected"),
    [
        ("- name: a\n  url: http://h\n", "1: must be a mapping, not a list (write the line nodes:"),
        ("nodes:\n- http://h\n", "2: nodes[0]: must be a mapping (write - {name: epyc-a, url: "),
        ("nodes:\n- name: a\n", "2: nodes[0].url: is missing (add it, such as url: http://"),
        ("nodes:\n- url: http://h\n", "2: nodes[0].name: is missing (add it, such as name: "),
        ("nodes:\n- name: a\n  url:\n", "3: nodes[0].url: is missing (add it, such as url: "),
        (
            "nodes:\n- name: a\n  port: 8\n",
            "3: nodes[0].port: unknown key (it is part of the url: ",
        ),
        (
            "nodes:\n- name: a\n  url: http://h:80800\n",
            "3: nodes[0].url: has a wrong port 80800 (a",
        ),
        (
            "nodes:\n- name: a\nurl: http://h\n",
            "3: url: unknown key (it is a key of a node: indent",
        ),
    ],
)
def test_a_common_mistake_is_reported_with_the_remedy(
    nodes_problems: Problems, text: str, expected: str
) -> None:
    problems = nodes_problems(text)
    lines = [str(problem).removeprefix(f"{problem.file}:") for problem in problems]
    assert any(line.startswith(expected) for line in lines), lines


@each_case("text", ["[1]", "nodes", "nodes: {a: b}", "nodes: [1]", "defaults: 3"])
def test_a_file_of_another_form_is_refused(nodes_problems: Problems, text: str) -> None:
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
    own = "cost_per_million_tokens: {prompt: 0.1}, api_key_file: key"
    text = f"defaults: {{cost_per_hour: 1, api_key_env: KEY}}\n{ONE.format(own)}"
    (node,) = load_nodes(text, KEY="from-env").nodes
    assert (node.cost_per_hour, node.cost_per_million_tokens) == (0, TokenCost(prompt=0.1))
    assert node.api_key == SecretStr("from-file")


@each_case("nodes", ["[]", "[{name: a, url: http://a}, {name: b, url: http://b}]"])
def test_a_mistake_in_the_defaults_is_reported_once_and_there(
    nodes_problems: Problems, nodes: str
) -> None:
    (problem,) = nodes_problems(f"nodes: {nodes}\ndefaults:\n  tier: tpu\n")
    assert (problem.line, problem.key) == (3, "defaults.tier")


def test_a_name_or_an_address_is_no_default(nodes_problems: Problems) -> None:
    problems = nodes_problems("defaults:\n  name: a\n  url: http://a\nnodes: []")
    assert [p.line for p in problems] == [2, 3]
    assert {p.message for p in problems} == {"can't be a default"}


@each_case(
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


def test_defaults_times_nodes_is_bounded(nodes_problems: Problems) -> None:
    labels = ", ".join(f"k{i}: v" for i in range(2000))
    nodes = "\n".join(f"  - {{name: n{i}, url: http://h}}" for i in range(300))
    problems = nodes_problems(f"defaults: {{labels: {{{labels}}}}}\nnodes:\n{nodes}\n")
    assert any("values in all" in problem.message for problem in problems)


def test_a_fleet_of_thousands_is_read(load_nodes: LoadNodes) -> None:
    text = "defaults: {slots: 2, labels: {a: b}}\nnodes:\n"
    text += "".join(f"  - {{name: n{i}, url: 'http://h{i}:8080'}}\n" for i in range(3000))
    assert len(load_nodes(text).nodes) == 3000


def test_the_default_environment_is_the_process_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_HOST_OF_MINE", "h")
    path = tmp_path / "nodes.yaml"
    path.write_text("nodes: [{name: a, url: 'http://${SOME_HOST_OF_MINE}'}]")
    assert load_inventory(path).nodes[0].url == "http://h"


@each_case("second", ["*first", "<<: *first"])
def test_a_node_that_is_another_ones_alias_has_its_name(
    nodes_problems: Problems, second: str
) -> None:
    (problem,) = nodes_problems(f"nodes:\n- &first {{name: a, url: http://a}}\n- {second}\n")
    assert (problem.line, problem.key) == (3, "nodes[1]")
    assert "line 2" in problem.message


@each_case(
    ("one", "other", "are_one"),
    [
        ("http://localhost:8080", "http://127.0.0.1:8080", True),
        ("http://localhost:8080", "http://[::1]:8080", False),
        ("http://127.0.0.1:8080", "http://[::ffff:127.0.0.1]:8080", True),
        ("http://[::1]:8080", "http://[0:0:0:0:0:0:0:1]:8080/", True),
        ("http://10.0.0.1:8080", "http://[::ffff:a00:1]:8080", True),
        ("http://127.0.0.1:8080", "http://LocalHost.:8080", True),
        ("http://0.0.0.0:8080", "http://127.0.0.1:8080", True),
        ("http://host", "http://HOST:80/", True),
        ("https://host:443/a", "https://host/a", True),
        ("http://127.0.0.1:8080", "http://[::1]:8080", False),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8081", False),
        ("http://host/a", "http://host/b", False),
        ("http://host", "http://host.example", False),
        ("http://host", "https://host", False),
    ],
)
def test_one_server_under_two_spellings_is_warned_of(
    load_nodes: LoadNodes, one: str, other: str, are_one: bool
) -> None:
    for first, second in ((one, other), (other, one)):
        text = f"nodes:\n- {{name: a, url: '{first}'}}\n- {{name: b, url: '{second}'}}\n"
        warnings = load_nodes(text).warnings
        assert len(warnings) == are_one
        for warning in warnings:
            assert (warning.line, warning.key) == (3, "nodes[1].url")
            assert "the nodes a and b are one server, whose slots count twice" in str(warning)
