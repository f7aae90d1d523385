from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from gateway.config.inventory import Endpoint, NodeTimeouts, TokenCost
from tests.config.conftest import LoadNodes, Problems
from tests.each_case import each_case
from tests.known import known

ONE = "nodes:\n  - {{name: a, url: 'http://h:80', {}}}\n"


def test_an_empty_list_of_nodes_is_allowed_and_a_missing_one_is_not(
    load_nodes: LoadNodes, nodes_problems: Problems
) -> None:
    assert load_nodes("nodes: []").nodes == ()
    for text in ("", "defaults: {}", "nodes:", "nodes: ~"):
        (problem,) = nodes_problems(text)
        assert "nodes: []" in problem.remedy


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
    tls = known(node.tls)
    assert (tls.ca, tls.verify, tls.server_name) == (tmp_path / "ca.pem", False, "inner")
    assert (node.enabled, node.standby, node.labels) == (False, True, {"numa": "0"})


# Defaults.


def test_defaults_go_into_every_node_and_into_its_mappings(
    load_nodes: LoadNodes, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    first, second, third = load_nodes(
        """
        defaults:
          slots: 4
          timeouts: {connect: 1, silence: 2m}
          labels: {site: north, rack: "1"}
          api_key_env: KEY
          cost_per_hour: 1
        nodes:
          - {name: a, url: http://a, timeouts: {connect: 9}, labels: {rack: "2"}}
          - {name: b, url: http://b, slots: auto, timeouts: ~, api_key_env: ~}
          - {name: c, url: http://c, cost_per_million_tokens: {prompt: 0.1}, api_key_file: key}
        """,
        KEY="k",
    ).nodes
    assert (first.slots, first.cost_per_hour) == (4, 1)
    assert first.timeouts == NodeTimeouts(connect=9, silence=120)
    assert first.labels == {"site": "north", "rack": "2"}
    assert first.api_key == SecretStr("k")
    assert (second.slots, second.timeouts, second.api_key) == (None, NodeTimeouts(), None)
    # Another price or key replaces the default one.
    assert (third.cost_per_hour, third.cost_per_million_tokens) == (0, TokenCost(prompt=0.1))
    assert third.api_key == SecretStr("from-file")


@each_case("nodes", ["[]", "[{name: a, url: http://a}, {name: b, url: http://b}]"])
def test_a_mistake_in_the_defaults_is_reported_once_and_there(
    nodes_problems: Problems, nodes: str
) -> None:
    (problem,) = nodes_problems(f"nodes: {nodes}\ndefaults:\n  tier: tpu\n")
    assert (problem.line, problem.key) == (3, "defaults.tier")


def test_defaults_times_nodes_is_bounded(nodes_problems: Problems) -> None:
    labels = ", ".join(f"k{i}: v" for i in range(2000))
    nodes = "\n".join(f"  - {{name: n{i}, url: http://h}}" for i in range(300))
    problems = nodes_problems(f"defaults: {{labels: {{{labels}}}}}\nnodes:\n{nodes}\n")
    assert any("values in all" in problem.message for problem in problems)


# Mistakes.


@each_case(
    ("text", "expected"),
    [
        ("- name: a\n  url: http://h\n", "1: must be a mapping, not a list (write the line nodes:"),
        ("nodes:\n- http://h\n", "2: nodes[0]: must be a mapping (write - {name: epyc-a, url: "),
        ("nodes:\n- name: a\n", "2: nodes[0].url: is missing (add it, such as url: http://"),
        ("nodes:\n- name: a\n  url:\n", "3: nodes[0].url: is missing (add it, such as url: "),
        ("nodes:\n- name: a\n  port: 8\n", "3: nodes[0].port: unknown key (it is part of the url"),
        ("nodes:\n- name: a\nurl: http://h\n", "3: url: unknown key (it is a key of a node: inden"),
        ("Defaults: {}\nnodes: []", "1: Defaults: unknown key (did you mean defaults? Allowed: de"),
        ("zebra: 2\nnodes: []", "1: zebra: unknown key (allowed: defaults, nodes)"),
    ],
)
def test_a_common_mistake_is_reported_with_the_remedy(
    nodes_problems: Problems, text: str, expected: str
) -> None:
    problems = nodes_problems(text)
    lines = [str(problem).removeprefix(f"{problem.file}:") for problem in problems]
    assert any(line.startswith(expected) for line in lines), lines


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
        "colour: red", "memory: 64 gigs", "memory: 1000TiB", "models_on_demand: true",
        "preload: [a], kind: openai", "preload: [a], models_on_demand: false",
        "preload: [a, c], model: [a, b]", "preload: own, model: {a: own}", "preload: ['']",
        "slot_save: true, kind: openai", "slot_save: true, models_on_demand: false",
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


@each_case("name", ["", "a b", "a/b", "ä", "..", ".", "a" * 129, "a\\n"])
def test_a_name_has_only_harmless_characters(nodes_problems: Problems, name: str) -> None:
    (problem,) = nodes_problems(f"nodes:\n  - name: '{name}'\n    url: http://h")
    assert (problem.line, problem.key) == (2, "nodes[0].name")


@each_case("second", ["*first", "<<: *first"])
def test_a_node_that_is_another_ones_alias_has_its_name(
    nodes_problems: Problems, second: str
) -> None:
    (problem,) = nodes_problems(f"nodes:\n- &first {{name: a, url: http://a}}\n- {second}\n")
    assert (problem.line, problem.key) == (3, "nodes[1]")
    assert "line 2" in problem.message


# Addresses.


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
        ("ftp://h", "http or https"),
        ("10.0.0.1:8080", "http or https"),
        ("http://", "http or https"),
        ("http://u:secret@h", "user or a password"),
        ("http://h?x=1", "query"),
        ("http://u:secret@h:8o80", "has a wrong port"),
        ("http://h:0", "valid host and port"),
        ("http://[::1", "no valid URL"),
        ("http://a b", "valid host"),
        ("http://höst", "valid host"),
        ("http://h/a b", "characters"),
        ("http://h/\\x", "characters"),
        ("http://::1:8080", "needs brackets (write http://[::1]:8080)"),
        ("https://fd00::11:8443/llm", "(write https://[fd00::11]:8443/llm)"),
        ("http://::ffff:10.0.0.1:8080", "(write http://[::ffff:10.0.0.1]:8080)"),
    ],
)
def test_an_address_that_would_not_work_is_refused(
    nodes_problems: Problems, url: str, expected: str
) -> None:
    (problem,) = nodes_problems(f"nodes: [{{name: a, url: '{url}'}}]")
    assert expected in str(problem)
    assert problem.remedy
    assert "secret" not in str(problem)


@each_case(
    ("one", "other", "are_one"),
    [
        ("http://localhost:8080", "http://127.0.0.1:8080", True),
        ("http://localhost:8080", "http://[::1]:8080", False),
        ("http://127.0.0.1:8080", "http://[::ffff:127.0.0.1]:8080", True),
        ("http://[::1]:8080", "http://[0:0:0:0:0:0:0:1]:8080/", True),
        ("http://0.0.0.0:8080", "http://127.0.0.1:8080", True),
        ("https://host:443/a", "https://host/a", True),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8081", False),
        ("http://host/a", "http://host/b", False),
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


# Keys, and commands that start and stop a node.


def test_both_prices_both_keys_and_a_certificate_s_key_alone_are_refused(
    nodes_problems: Problems, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("k")
    prices = "cost_per_hour: 1,\n    cost_per_million_tokens: {prompt: 1}"
    keys = "api_key_env: K,\n    api_key_file: key,\n    tls: {key: key}"
    problems = nodes_problems(ONE.format(f"{prices}, {keys}"), K="k")
    assert [(p.line, p.key) for p in problems] == [
        (3, "nodes[0].cost_per_million_tokens"),
        (4, "nodes[0].api_key_file"),
        (5, "nodes[0].tls.key"),
    ]


@each_case("content", [b"", b" \n", b"a\nb", b"\xff", b"k" * 20000, b"a\x00b"])
def test_a_key_is_one_line_of_ascii(
    nodes_problems: Problems, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "key").write_bytes(content)
    (problem,) = nodes_problems(ONE.format("api_key_file: key"))
    assert problem.key == "nodes[0].api_key_file"


def test_a_missing_or_empty_variable_of_a_key_is_reported(nodes_problems: Problems) -> None:
    for env, fault in (({}, "not set"), ({"NODE_KEY": ""}, "empty")):
        (problem,) = nodes_problems(ONE.format("api_key_env: NODE_KEY"), **env)
        assert problem.key == "nodes[0].api_key_env"
        assert problem.message == f"the variable NODE_KEY is {fault}"


STANDBY = "nodes: [{{name: a, url: 'http://h', standby: true, {}}}]\n"


def test_no_secret_shows_in_a_repr_or_a_dump_and_another_one_makes_another_node(
    load_nodes: LoadNodes, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    headers = "headers_env: {Authorization: TOKEN}, headers_file: {X-Key: key}"
    start = f"start: {{url: 'http://c/on?x=1', {headers}}}"
    text = STANDBY.format(f"model: m, api_key_env: TOKEN, stop: [vm, '${{N}}'], {start}")
    inventory = load_nodes(text, TOKEN="from-variable", N="7")
    assert load_nodes(text, TOKEN="other", N="7") != inventory
    assert inventory == load_nodes(text, TOKEN="from-variable", N="7")
    (spec,) = inventory.nodes
    hook = known(spec.start)
    secrets = {name: secret.get_secret_value() for name, secret in hook.secrets.items()}
    assert secrets == {"Authorization": "from-variable", "X-Key": "from-file"}
    assert known(spec.api_key).get_secret_value() == "from-variable"
    assert (known(spec.stop).command, spec.autoscaled) == (("vm", "7"), True)
    shown = repr(inventory) + str(inventory) + str(inventory.model_dump())
    assert "from-" not in shown + inventory.model_dump_json()


@each_case(
    ("text", "key", "message"),
    [
        ("start: [vm], stop: [vm]", "model", "is missing"),
        ("model: m, start: [vm]", "stop", "is missing"),
        ("model: m, stop: [vm]", "start", "is missing"),
        ("model: m, stop: [vm], start: {}", "start.command", "does nothing"),
        ("model: m, stop: [vm], start: {command: [vm], url: http://c}", "start.url", "beside"),
        ("model: m, stop: [vm], start: {url: ftp://c}", "start.url", "an http or https URL"),
        ("model: m, stop: [vm], start: {url: 'http://u:p@c'}", "start.url", "not hold a user"),
        ("model: m, stop: [vm], start: {url: http://c, headers_env: {A: B}}",
         "start.headers_env", "not set"),
        ("model: m, stop: [vm], start: {url: http://c, secrets: {A: b}}",
         "start.secrets", "must not stand"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_hook_is_reported_with_its_key(
    nodes_problems: Problems, text: str, key: str, message: str
) -> None:
    problem = nodes_problems(STANDBY.format(text))[0]
    assert problem.line == 1
    assert problem.key.startswith(f"nodes[0].{key}")
    assert message in problem.message
