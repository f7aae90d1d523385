from __future__ import annotations

import json
from ipaddress import ip_network
from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.config.settings import (
    MASK,
    RESTART_KEYS,
    Settings,
    changed_restart_keys,
    load_settings,
    masked_settings,
)
from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case

HASH = "0123456789abcdef" * 4


def test_without_a_file_every_key_has_its_default(load_gateway: LoadSettings) -> None:
    settings = load_settings(None)
    assert settings == Settings() == load_gateway("") == load_gateway("# nothing\n")


def test_a_key_with_nothing_below_it_counts_as_unset(load_gateway: LoadSettings) -> None:
    text = "listen:\nkeys:\nlimits: ~\nmodels:\n  m:\nclasses:\n  batch:\nqueue:\n  max:\n"
    assert load_gateway(text).model_copy(update={"models": {}, "classes": {}}) == Settings()


def test_values_are_read_in_their_units(load_gateway: LoadSettings) -> None:
    settings = load_gateway(
        """
        listen: {port: 0, trusted_proxies: [10.0.0.0/8, "::1"], expose_node: on}
        limits: {body_bytes: 1 GiB, header_bytes: 1000, body_timeout: 1m, media_hosts: h.example}
        queue: {max: 0, max_wait: 1h30m}
        retries: {budget: 1, backoff: 100ms}
        logging: {level: DEBUG, access: off}
        """
    )
    assert settings.listen.trusted_proxies == (ip_network("10.0.0.0/8"), ip_network("::1"))
    assert settings.listen.expose_node is True
    assert (settings.limits.body_bytes, settings.limits.header_bytes) == (1 << 30, 1000)
    assert settings.limits.body_timeout == 60.0
    assert settings.limits.media_hosts == ("h.example",)
    assert (settings.queue.max, settings.queue.max_wait) == (0, 5400.0)
    assert (settings.retries.budget, settings.retries.backoff) == (1.0, 0.1)
    assert (settings.logging.level, settings.logging.access) == ("debug", False)


@each_case("written", ["off", "false", "0", "no", "'off'", "0s"])
def test_the_heartbeat_can_be_switched_off(load_gateway: LoadSettings, written: str) -> None:
    assert load_gateway(f"heartbeat: {written}").heartbeat == 0.0


@each_case(
    ("written", "meant"), [("text", "text"), ("EXACT", "exact"), ("off", "off"), ("'off'", "off")]
)
def test_resume_is_one_of_three(load_gateway: LoadSettings, written: str, meant: str) -> None:
    assert load_gateway(f"resume: {written}").resume == meant


@each_case(
    ("wrong", "key"),
    [
        ("- 1", ""),
        ("text", ""),
        ("listn: {}", "listn"),
        ("listen: 8000", "listen"),
        ('listen: {port: "80"}', "listen.port"),
        ("listen: {port: true}", "listen.port"),
        ("listen: {host: http://h}", "listen.host"),
        ("listen: {host: ''}", "listen.host"),
        ("listen: {trusted_proxies: [10.0.0.1/8]}", "listen.trusted_proxies[0]"),
        ("listen: {trusted_proxies: [3]}", "listen.trusted_proxies[0]"),
        ("listen: {tls: {cert: c}}", "listen.tls.cert"),
        ("listen: {keep_alive: 0}", "listen.keep_alive"),
        ("admin: {key_file: none}", "admin.key_file"),
        ("admin: {hosts: ['a:80']}", "admin.hosts[0]"),
        ("keys: {a: b}", "keys"),
        (f"keys: [{{id: a_b, sha256: {HASH}}}]", "keys[0].id"),
        ("keys: [{id: a, sha256: lg_a_secret}]", "keys[0].sha256"),
        (f"keys: [{{sha256: {HASH}}}]", "keys[0].id"),
        (
            f"keys: [{{id: a, sha256: {HASH}, class: urgent, max_class: normal}}]",
            "keys[0].max_class",
        ),
        ("allow_anonymous: perhaps", "allow_anonymous"),
        ("cors: {origins: []}", "cors.origins"),
        ("cors: {origins: ['https://h/']}", "cors.origins[0]"),
        ("cors: {origins: ['*'], credentials: true}", "cors.credentials"),
        ("cors: {origins: ['*'], headers: ['a b']}", "cors.headers[0]"),
        ("limits: {body_bytes: 2TiB}", "limits.body_bytes"),
        ("limits: {media_hosts: ['https://h']}", "limits.media_hosts[0]"),
        ("models: [a]", "models"),
        ("models: {'': {}}", "models"),
        ("models: {a: b}", "models.a"),
        ("classes: {batch: false}", "classes.batch"),
        ("models: {a: {use: 3}}", "models.a.use"),
        ("models: {a: {use: ['']}}", "models.a.use[0]"),
        ("models: {a: {set: {x: .nan}}}", "models.a.set.x"),
        ("models: {a: {set: {x: [{y: .inf}]}}}", "models.a.set.x"),
        ("models: {a: {set: {x: 99999999999999999999}}}", "models.a.set.x"),
        ("models: {a: {set: {model: b}}}", "models.a.set"),
        ("models: {a: {strip: [messages]}}", "models.a.strip"),
        ("classes: {vip: {max_wait: 1}}", "classes.vip"),
        ("classes: {batch: {max_wait: 0}}", "classes.batch.max_wait"),
        ("classes: {normal: {reserve_slots: 0.5}}", "classes"),
        ("prompts: {strip: ['.*']}", "prompts.strip[0]"),
        ("prompts: {volatile: ['Today (']}", "prompts.volatile[0]"),
        ("identity: {user_headers: ['a b']}", "identity.user_headers[0]"),
        ("health: {open: 60, open_max: 30}", "health.open_max"),
        ("timeouts: {total: 0}", "timeouts.total"),
        ("timeouts: {total: 8d}", "timeouts.total"),
        ("retries: {backoff: 3s}", "retries.backoff_max"),
        *((f"resume: {word}", "resume") for word in ("on", "true", "0", "ids", "[text]")),
        ("heartbeat: on", "heartbeat"),
        ("heartbeat: true", "heartbeat"),
        ("batches: {keep: 0}", "batches.keep"),
        ("batches: {keep: 400d}", "batches.keep"),
        ("batches: {file_bytes: 3GiB}", "batches.bytes_per_key"),
        ("batches: {windows: {shortest: 2h, longest: 1h}}", "batches.windows.longest"),
        ("batches: {windows: {default: 1s}}", "batches.windows.default"),
        ("batches: {windows: {longest: 8d}}", "batches.windows.longest"),
        ("batches: {folder: 3}", "batches.folder"),
        *((f"webhooks: {{timeout: {time}}}", "webhooks.timeout") for time in ("0", "2m")),
        *((f"webhooks: {{give_up: {time}}}", "webhooks.give_up") for time in ("0", "2000d")),
        ("shutdown: {grace: soon}", "shutdown.grace"),
    ],
)
def test_a_wrong_value_is_reported_with_its_key_and_nothing_secret(
    gateway_problems: Problems, wrong: str, key: str
) -> None:
    """Bounds of numbers and words of a choice are held by the schema, which tells them."""
    problem = gateway_problems(wrong)[0]
    assert (problem.line, problem.key) == (1, key)
    assert problem.message
    assert "lg_a_secret" not in str(problem)


def test_an_unknown_policy_is_reported_with_the_known_ones(gateway_problems: Problems) -> None:
    (problem,) = gateway_problems("policy: least_finsh")
    for name in ("least_finish", "least_loaded", "round_robin", "prefix_hash"):
        assert name in problem.message
    assert problem.remedy == "did you mean least_finish?"


@each_case("text", ["", "\n", "# a comment\n", "null", "~", "---\n"])
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


def test_all_problems_come_at_once(gateway_problems: Problems) -> None:
    problems = gateway_problems(
        """\
        listen: {port: -1}
        queue:
          max: many
          max_wait: ${WAIT}
        models:
          a: {use: b}
          b: {use: a}
        store: {url: x}
        """
    )
    assert [(p.line, p.key) for p in problems] == [
        (1, "listen.port"),
        (3, "queue.max"),
        (4, "queue.max_wait"),
        (5, "models"),
        (8, "store.url"),
    ]


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().heartbeat = 3.0  # type: ignore[misc]


@each_case(
    ("text", "expected"),
    [
        ("listen: {port: 80800}", "port: must be less than or equal to 65535 (it is 80800)"),
        (
            "port: 80800",
            "1: port: unknown key (it is a key of listen and of admin: indent it below)",
        ),
        ("- listen", "1: must be a mapping (write keys with values, such as queue: {max: 100})"),
    ],
)
def test_a_common_mistake_is_reported_with_the_remedy(
    gateway_problems: Problems, text: str, expected: str
) -> None:
    (problem,) = gateway_problems(text)
    assert str(problem).endswith(expected)


def test_hashes_are_masked_and_the_rest_is_shown(load_gateway: LoadSettings) -> None:
    settings = load_gateway(
        f"""
        keys: [{{id: a, sha256: {HASH}, name: Team A}}]
        listen: {{trusted_proxies: [10.0.0.0/8]}}
        models: {{m: {{set: {{temperature: 0.2}}}}}}
        """
    )
    shown = masked_settings(settings)
    assert set(shown) == set(Settings.model_fields)
    assert HASH not in json.dumps(shown)
    [key] = shown["keys"]
    assert {name: value for name, value in key.items() if value} == {
        "id": "a",
        "sha256": MASK,
        "name": "Team A",
    }
    assert {"class", "max_class", "models", "group", "limits", "user_limits", "expires"} <= set(key)
    assert shown["listen"]["trusted_proxies"] == ["10.0.0.0/8"]
    assert shown["models"]["m"]["set"] == {"temperature": 0.2}
    assert settings.keys[0].sha256 == HASH


@each_case(
    ("changed", "keys"),
    [
        ({}, ()),
        ({"queue": {"max": 3}, "heartbeat": 0, "default_model": "m"}, ()),
        ({"limits": {"body_bytes": 1}, "batches": {"file_bytes": 10}}, ()),
        ({"hybrid": {"gpu_first": ["urgent"], "wait": 0, "spill": {"share": 0.5}}}, ()),
        ({"listen": {"port": 9000}}, ("listen.port",)),
        ({"admin": {"hosts": ["h"]}, "queue": {"max": 3}}, ("admin.hosts",)),
        ({"limits": {"connections": 5, "n": 2}}, ("limits.connections",)),
        ({"limits": {"header_bytes": 9}}, ("limits.header_bytes",)),
        ({"listen": {"tls": {"cert": "c", "key": "k"}}}, ("listen.tls",)),
        ({"batches": {"folder": "/srv/kept"}}, ("batches.folder",)),
        ({"store": {"url": "sqlite:////a.db"}}, ("store.url",)),
    ],
)
def test_only_keys_of_open_listeners_and_of_places_need_a_restart(
    changed: dict[str, object], keys: tuple[str, ...]
) -> None:
    old, new = Settings(), Settings.model_validate(changed)
    assert changed_restart_keys(old, new) == keys
    assert changed_restart_keys(new, old) == keys


def test_a_changed_certificate_is_reported_by_its_key() -> None:
    old, new = (
        Settings.model_validate({"listen": {"tls": {"cert": cert, "key": "k"}}}) for cert in "ab"
    )
    assert changed_restart_keys(old, new) == ("listen.tls.cert",)


def test_the_keys_that_need_a_restart_exist() -> None:
    for key in RESTART_KEYS:
        found: object = Settings()
        for part in key.split("."):
            found = getattr(found, part)
