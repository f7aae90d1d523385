from __future__ import annotations

import json
import socket
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from gateway.config.errors import ConfigError
from gateway.config.keys import (
    LARGEST_BUDGET,
    Budget,
    CachePolicy,
    CacheSpec,
    LimitSpec,
    cache_policy,
    parse_budget,
)
from gateway.config.scheduling import ModelRule, find_alias_loop
from gateway.config.settings import (
    MASK,
    Address,
    Settings,
    changed_restart_keys,
    load_settings,
    masked_settings,
)
from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case
from tests.known import known

HASH = "0123456789abcdef" * 4
HEADER = "Authorization: Bearer s3cret"
TLS = "tls: {cert: x.pem, key: x.pem, ca: x.pem}"


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    """Files that settings may name: `x.pem` holds no secret, no header and no key."""
    (tmp_path / "x.pem").write_text("s3cret")
    (tmp_path / "header").write_text("X-Api-Key:  s3cret\n")


def test_without_a_file_every_key_has_its_default(load_gateway: LoadSettings) -> None:
    settings = load_settings(None)
    assert settings == Settings() == load_gateway("") == load_gateway("# nothing\n")


def test_values_are_read_in_their_units(load_gateway: LoadSettings, tmp_path: Path) -> None:
    settings = load_gateway(
        """
        listen: {port: 0, trusted_proxies: [10.0.0.0/8, "::1"], tls: {cert: x.pem, key: x.pem}}
        admin: {key_file: x.pem}
        limits: {body_bytes: 1 GiB, header_bytes: 1000, body_timeout: 1m, media_hosts: h.example}
        queue: {max: 0, max_wait: 1h30m}
        retries: {budget: 1, backoff: 100ms}
        logging: {level: DEBUG, access: off}
        headers: {to_nodes: X-Team, to_clients: [X-A, x-b]}
        heartbeat: off
        resume: EXACT
        hybrid: {gpu_first: urgent, spill: {share: 0.1}}
        """
    )
    assert settings.listen.trusted_proxies == (ip_network("10.0.0.0/8"), ip_network("::1"))
    assert known(settings.listen.tls).cert == settings.admin.key_file == tmp_path / "x.pem"
    assert (settings.limits.body_bytes, settings.limits.header_bytes) == (1 << 30, 1000)
    assert settings.limits.body_timeout == 60.0
    assert settings.limits.media_hosts == ("h.example",)
    assert (settings.queue.max, settings.queue.max_wait) == (0, 5400.0)
    assert (settings.retries.budget, settings.retries.backoff) == (1.0, 0.1)
    assert (settings.logging.level, settings.logging.access) == ("debug", False)
    assert (settings.headers.to_nodes, settings.headers.to_clients) == (("X-Team",), ("X-A", "x-b"))
    assert (settings.heartbeat, settings.resume) == (0.0, "exact")
    assert settings.hybrid.gpu_first == ("urgent",)
    spill = known(settings.hybrid.spill)
    assert (spill.classes, spill.after, spill.window) == (("normal",), 10.0, 3600.0)


@each_case(
    ("wrong", "key"),
    [
        ("- 1", ""),
        ("listn: {}", "listn"),
        ("listen: {port: true}", "listen.port"),
        ("listen: {host: http://h}", "listen.host"),
        ("listen: {trusted_proxies: [10.0.0.1/8]}", "listen.trusted_proxies[0]"),
        ("listen: {tls: {cert: c}}", "listen.tls.cert"),
        ("admin: {key_file: none}", "admin.key_file"),
        ("admin: {hosts: ['a:80']}", "admin.hosts[0]"),
        (f"keys: [{{id: a_b, sha256: {HASH}}}]", "keys[0].id"),
        ("keys: [{id: a, sha256: lg_a_s3cret}]", "keys[0].sha256"),
        (f"keys: [{{id: a, sha256: {HASH}, class: urgent, max_class: normal}}]",
         "keys[0].max_class"),
        (f"admin: {{keys: [{{id: a, sha256: {HASH}}}]}}", "admin.keys[0].role"),
        ("cors: {origins: ['https://h/']}", "cors.origins[0]"),
        ("cors: {origins: ['*'], credentials: true}", "cors.credentials"),
        ("limits: {media_hosts: ['https://h']}", "limits.media_hosts[0]"),
        ("models: {a: {set: {x: [{y: .inf}]}}}", "models.a.set.x"),
        ("models: {a: {set: {x: 99999999999999999999}}}", "models.a.set.x"),
        ("models: {a: {set: {model: b}}}", "models.a.set"),
        ("models: {a: {strip: [messages]}}", "models.a.strip"),
        ("models: {a: {replicas: {min: 3, max: 2}}}", "models.a.replicas.max"),
        ("models: {a: {pin: 3}}", "models.a.pin"),
        ("models: {a: {use: b, pin: x}}", "models"),
        ("classes: {vip: {max_wait: 1}}", "classes.vip"),
        ("classes: {normal: {reserve_slots: 0.5}}", "classes"),
        ("prompts: {strip: ['.*']}", "prompts.strip[0]"),
        ("prompts: {volatile: ['Today (']}", "prompts.volatile[0]"),
        ("identity: {user_headers: ['a b']}", "identity.user_headers[0]"),
        ("health: {open: 60, open_max: 30}", "health.open_max"),
        ("elastic: {min: 3, max: 2}", "elastic.max"),
        ("retries: {backoff: 3s}", "retries.backoff_max"),
        ("hybrid: {spill: {after: 5s}}", "hybrid.spill.share"),
        ("hybrid: {spill: {share: 1, classes: [premium]}}", "hybrid.spill"),
        ("batches: {file_bytes: 3GiB}", "batches.bytes_per_key"),
        ("batches: {windows: {shortest: 2h, longest: 1h}}", "batches.windows.longest"),
        ("batches: {windows: {default: 1s}}", "batches.windows.default"),
        ("batches: {folder: x.pem}", "batches.folder"),
        ("cluster: {TLS}", "cluster.listen"),
        ("cluster: {listen: 1.2.3.4:1}", "cluster.tls"),
        ("cluster: {listen: ':8090', TLS}", "cluster.listen"),
        ("cluster: {listen: 1.2.3.4:1, advertise: '[::]:1', TLS}", "cluster.advertise"),
        ("cluster: {listen: 1.2.3.4:1, allow: 10.0.0.1/24, TLS}", "cluster.allow"),
        ("telemetry: {traces: {endpoint: 'collector:4318'}}", "telemetry.traces.endpoint"),
        ("telemetry: {traces: {endpoint: 'http://me:s3cret@c/'}}", "telemetry.traces.endpoint"),
        ("telemetry: {traces: {endpoint: 'http://c/?key=s3cret'}}", "telemetry.traces.endpoint"),
        ("telemetry: {traces: {header: 'Authorization: s3cret'}}", "telemetry.traces.header"),
        ("telemetry: {traces: {header_env: ABSENT}}", "telemetry.traces.header_env"),
        ("telemetry: {traces: {header_file: x.pem}}", "telemetry.traces.header_file"),
        ("telemetry: {traces: {header_env: HEADER, header_file: header}}",
         "telemetry.traces.header_file"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_reported_with_its_key_and_nothing_secret(
    gateway_problems: Problems, wrong: str, key: str
) -> None:
    """Bounds of numbers and words of a choice are held by the schema, which tells them."""
    problem = gateway_problems(wrong.replace("TLS", TLS), HEADER=HEADER)[0]
    assert (problem.line, problem.key) == (1, key)
    assert problem.message
    assert "s3cret" not in str(problem)


@each_case("text", ["", "# a comment\n", "~", "---\n"])
def test_a_file_without_settings_is_refused_where_it_would_replace_settings(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is empty") as caught:
        load_settings(file, {}, rejected="empty")
    assert "{}" in caught.value.problems[0].remedy
    file.write_text("{}")
    assert load_settings(file, {}, rejected="empty") == Settings()


@each_case(
    ("text", "expected"),
    [
        ("listen: {port: 80800}", "port: must be less than or equal to 65535 (it is 80800)"),
        ("port: 80", "1: port: unknown key (it is a key of listen and of admin: indent it below)"),
        ("- listen", "1: must be a mapping (write keys with values, such as queue: {max: 100})"),
        ("elastic: {start_abov: 3}", "did you mean start_above? Allowed: "),
        ("policy: least_finsh", "(did you mean least_finish?)"),
        ("preload: [a]", "in the inventory"),
        ("models: {a: {keep_alive: 5m}}", "idle_unload"),
    ],
)
def test_a_common_mistake_is_reported_with_the_remedy(
    gateway_problems: Problems, text: str, expected: str
) -> None:
    (problem,) = gateway_problems(text)
    assert expected in str(problem)


def test_hashes_are_masked_and_the_rest_is_shown(load_gateway: LoadSettings) -> None:
    settings = load_gateway(
        f"""
        keys: [{{id: a, sha256: {HASH.upper()}, name: Team A, models: m}}]
        admin: {{keys: [{{id: a, sha256: {HASH}, role: Operator}}]}}
        listen: {{trusted_proxies: [10.0.0.0/8]}}
        models: {{m: {{set: {{temperature: 0.2}}}}}}
        """
    )
    shown = masked_settings(settings)
    assert set(shown) == set(Settings.model_fields)
    assert HASH not in json.dumps(shown) + repr(settings)
    [key] = shown["keys"]
    told = {name: value for name, value in key.items() if value}
    assert told == {"id": "a", "sha256": MASK, "name": "Team A", "models": ["m"]}
    assert {"class", "max_class", "models", "group", "limits", "user_limits", "expires"} <= set(key)
    assert shown["listen"]["trusted_proxies"] == ["10.0.0.0/8"]
    assert shown["models"]["m"]["set"] == {"temperature": 0.2}
    assert settings.keys[0].sha256 == settings.admin.keys[0].sha256 == HASH
    assert settings.admin.keys[0].role == "operator"


def tls(cert: str) -> dict[str, Any]:
    return {"listen": {"tls": {"cert": cert, "key": "k"}}}


def cluster(**keys: Any) -> dict[str, Any]:
    files = {"cert": "c", "key": "k", "ca": "a"}
    return {"cluster": {"listen": "1.2.3.4:1", "tls": files, **keys}}


@each_case(
    ("before", "after", "keys"),
    [
        ({}, {}, ()),
        ({}, {"queue": {"max": 3}, "heartbeat": 0, "default_model": "m"}, ()),
        ({}, {"limits": {"body_bytes": 1}, "batches": {"file_bytes": 10}}, ()),
        ({}, {"hybrid": {"gpu_first": ["urgent"], "wait": 0, "spill": {"share": 0.5}}}, ()),
        ({}, {"listen": {"port": 9000}}, ("listen.port",)),
        ({}, {"admin": {"hosts": ["h"]}, "queue": {"max": 3}}, ("admin.hosts",)),
        ({}, {"limits": {"connections": 5, "n": 2}}, ("limits.connections",)),
        ({}, {"limits": {"header_bytes": 9}}, ("limits.header_bytes",)),
        ({}, {"batches": {"folder": "/srv/kept"}}, ("batches.folder",)),
        ({}, {"store": {"url": "sqlite:////a.db"}}, ("store.url",)),
        ({}, tls("a"), ("listen.tls",)),
        (tls("b"), tls("a"), ("listen.tls.cert",)),
        ({}, cluster(), ("cluster",)),
        (cluster(), cluster(term=3), ("cluster.term",)),
    ],
)
def test_only_keys_of_open_listeners_and_of_places_need_a_restart(
    before: dict[str, object], after: dict[str, object], keys: tuple[str, ...]
) -> None:
    old, new = Settings.model_validate(before), Settings.model_validate(after)
    assert changed_restart_keys(old, new) == keys
    assert changed_restart_keys(new, old) == keys


# Traces, and the header that goes with them.


def test_a_header_of_traces_comes_from_a_variable_or_a_file(load_gateway: LoadSettings) -> None:
    settings = load_gateway("telemetry: {traces: {header_env: OTLP}}", OTLP=HEADER)
    assert settings.telemetry.traces.header_fields() == {"Authorization": "Bearer s3cret"}
    other = load_gateway("telemetry: {traces: {header_file: header}}")
    assert other.telemetry.traces.header_fields() == {"X-Api-Key": "s3cret"}
    assert "s3cret" not in json.dumps(masked_settings(other)) + repr(other)
    assert settings != other
    assert changed_restart_keys(settings, other) == ()


# The cluster.


def test_what_is_not_said_of_a_member_comes_from_its_host(load_gateway: LoadSettings) -> None:
    def load(text: str) -> Any:
        return load_gateway(f"cluster: {{{text}, {TLS}}}").cluster

    made, host = load("listen: 0.0.0.0:8090"), socket.gethostname()
    assert (made.name, made.member_name, made.term) == ("llama-gateway", host, 2.0)
    assert made.advertised == Address(host, 8090)
    assert load("listen: 10.0.0.1:8090").advertised == Address("10.0.0.1", 8090)
    given = load("listen: '[::]:1', advertise: '[fd00::1]:8090', member: gw-a")
    assert (str(given.advertised), given.member_name) == ("[fd00::1]:8090", "gw-a")


# Keys and headers.


def test_two_keys_of_one_name_are_refused(gateway_problems: Problems) -> None:
    one, other = (f"{{id: {name}, name: alice, sha256: {HASH}}}" for name in "ab")
    problems = gateway_problems(f"keys: [{one}, {other}]")
    assert any("alice" in problem.message for problem in problems)


def test_a_duplicate_id_is_reported_with_both_lines(gateway_problems: Problems) -> None:
    for above, place in (("", "keys"), ("admin:\n  ", "admin.keys")):
        entry = f"{{id: a, sha256: {HASH}{', role: viewer' if above else ''}}}"
        problems = gateway_problems(f"{above}keys:\n    - {entry}\n    - {entry}\n")
        (problem,) = [one for one in problems if one.key == f"{place}[1].id"]
        assert f"line {problem.line - 1}" in problem.message


RESERVED = (
    *("Host", "content-length", "Connection", "Transfer-Encoding", "TE", "Upgrade"),
    *("content-encoding", "Authorization", "X-API-Key", "Cookie", "Set-Cookie"),
    *("Proxy-Authorization", "X-Request-ID", "X-Priority", "X-Gateway-Node"),
    *("Access-Control-Allow-Origin", "X-Accel-Redirect"),
)


@each_case(
    ("name", "remedy"),
    [
        *((name, "a node's own key is named by its api_key_env") for name in RESERVED),
        *((name, "each name") for name in ("X-Custom-*", "*")),
        *((name, "such as") for name in ("two words", "colon:", "line\nbreak", "", "x" * 200)),
    ],
)
def test_headers_that_may_never_pass_are_refused_with_the_remedy(
    gateway_problems: Problems, name: str, remedy: str
) -> None:
    listed = f"[X-Fine, {json.dumps(name)}]"
    problems = gateway_problems(f"headers: {{to_nodes: {listed}, to_clients: {listed}}}")
    assert [problem.key for problem in problems] == ["headers.to_nodes[1]", "headers.to_clients[1]"]
    assert all(remedy in problem.remedy for problem in problems)


@each_case(
    ("wrong", "expected"),
    [
        ('{"*": {set: {temperature: 0}}}', '"*" names no model (write "*": {use: NAME}'),
        ('{"*": }', '"*" names no model'),
        ('{"*": {use: [a, "*"]}}', '* uses "*", which is no model (name'),
        ('{"*": {use: a}, b: {use: ["*"]}}', 'b uses "*", which is no model (name'),
        ("{a: {use: [x, b]}, b: {use: c}, c: {use: a}}", "for each other: a -> b -> c -> a"),
    ],
)
def test_names_that_lead_nowhere_are_refused(
    gateway_problems: Problems, wrong: str, expected: str
) -> None:
    (problem,) = gateway_problems(f"models: {wrong}")
    assert problem.key == "models"
    assert expected in str(problem)


def test_a_long_chain_of_names_is_no_loop_and_no_recursion() -> None:
    chain = {f"m{i}": ModelRule(use=(f"m{i + 1}",)) for i in range(20_000)}
    assert find_alias_loop(chain) == []
    assert len(find_alias_loop({**chain, "m20000": ModelRule(use=("m0",))})) == 20_002


PLACES = {
    "keys[0].limits": f"keys:\n- id: alice\n  sha256: {HASH}\n  limits: {{LIMIT}}\n",
    "keys[0].user_limits": (
        f"keys:\n- id: alice\n  sha256: {HASH}\n  trust_user_headers: true\n"
        "  user_limits: {LIMIT}\n"
    ),
    "groups.team.limits": "groups:\n  team:\n\n    limits: {LIMIT}\n",
    "limits.total": "limits:\n\n\n  total: {LIMIT}\n",
}
"""Where limits stand, each in the fourth line of a file at the latest."""


@each_case("place", PLACES)
@each_case(
    "written",
    [
        "rpm: 0", "rpm: 1.5", "rpm: true", "tokens_per_day: -100", "concurrency: 0",
        "budget: 0/month", "budget: 20", "budget: 20/week", "budget: .nan/day", "max_class: best",
        "budget: 0.0000000001/day", "budget: 1000000001/day", "budget: 1e3/day",
    ],
)  # fmt: skip
def test_a_limit_of_nothing_or_less_is_refused_with_its_line(
    place: str, written: str, gateway_problems: Problems
) -> None:
    text = PLACES[place].replace("LIMIT", written)
    (problem,) = gateway_problems(text)
    assert problem.key == f"{place}.{written.partition(':')[0]}"
    assert problem.line == text[: text.index(written)].count("\n") + 1
    assert problem.message


@each_case(
    ("written", "budget"),
    [
        ("20/month", Budget(20.0, "month")),
        (" .5 / DAY ", Budget(0.5, "day")),
        ("0.00002/day", Budget(0.00002, "day")),
        ("0.000000001/month", Budget(1e-9, "month")),
        (f"{LARGEST_BUDGET:.0f}/day", Budget(LARGEST_BUDGET, "day")),
    ],
)
def test_a_budget_is_what_was_written(
    written: str, budget: Budget, load_gateway: LoadSettings
) -> None:
    assert parse_budget(written) == budget
    settings = load_gateway(f"limits: {{total: {{budget: '{written}'}}}}")
    assert settings.limits.total is not None
    assert settings.limits.total.budget_limit == budget
    # It is kept as text, and read again from there.
    text = settings.limits.total.budget
    assert LimitSpec.model_validate({"budget": text}).budget == text


def test_each_field_is_the_most_specific_ones() -> None:
    key = CacheSpec(hide=False, prompt_cache=False)
    group = CacheSpec(hide=True, isolate="group", nodes={"b": "2", "a": "1"})
    everybody = CacheSpec(isolate="key", nodes={"c": "3"}, prompt_cache=True)
    assert cache_policy((key, group, everybody), "alice", "team") == CachePolicy(
        hide=False, scope="group team", node_labels=(("a", "1"), ("b", "2")), prompt_cache=False
    )


@each_case(
    ("isolate", "group", "scope"),
    [
        ("group", "team", "group team"),
        ("group", None, "caller alice"),
        ("key", "team", "caller alice"),
        ("off", "team", ""),
    ],
)
def test_the_scope_is_a_group_or_a_caller(isolate: str, group: str | None, scope: str) -> None:
    spec = CacheSpec.model_validate({"isolate": isolate})
    assert cache_policy((spec,), "alice", group).scope == scope


def test_what_no_node_may_have_cached_has_a_scope_of_its_own() -> None:
    policy = cache_policy((CacheSpec(isolate="group", prompt_cache=False),), "alice", "team")
    assert policy.scope_of("req_1") != policy.scope_of("req_2")
    assert CachePolicy(scope="group team").scope_of("req_1") == "group team"
