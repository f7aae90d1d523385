"""The settings of webhooks: receivers, their secrets, and what is wrong with them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from gateway.config.settings import changed_restart_keys, masked_settings
from gateway.config.stored import EVENTS, secret_bytes
from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
SECOND = "whsec_" + base64.b64encode(b"t" * 24).decode()


def test_secrets_come_from_a_file_or_a_variable(load_gateway: LoadSettings, tmp_path: Path) -> None:
    (tmp_path / "hooks.secret").write_text(f"{SECRET}\n{SECOND}\n")
    by_file = "{url: 'https://Hooks.example.org:443/a', secret_file: hooks.secret}"
    by_name = "{url: 'https://other.example', secret_env: S, keys: ci, events: batch.completed}"
    settings = load_gateway(f"webhooks: {{targets: [{by_file}, {by_name}]}}", S=SECRET)
    first, second = settings.webhooks.targets
    assert [one.get_secret_value() for one in first.secrets] == [SECRET, SECOND]
    assert [one.get_secret_value() for one in second.secrets] == [SECRET]
    assert first.url == "https://hooks.example.org/a"
    assert (second.keys, second.events) == (("ci",), ("batch.completed",))
    assert changed_restart_keys(load_gateway("{}"), settings) == ()


def test_a_target_is_for_all_keys_or_for_those_that_it_names(load_gateway: LoadSettings) -> None:
    everyone = "{url: 'https://a.example', secret_env: S}"
    some = "{url: 'https://b.example', secret_env: S, keys: [ci], groups: [night]}"
    settings = load_gateway(f"webhooks: {{targets: [{everyone}, {some}]}}", S=SECRET)
    for_all, for_some = settings.webhooks.targets
    assert for_all.is_for("anyone", None)
    assert for_some.is_for("ci", None)
    assert for_some.is_for("x", "night")
    assert not for_some.is_for("x", None)
    assert not for_some.is_for("x", "day")
    assert all(for_all.wants(event) != event.startswith("quota.") for event in EVENTS)


@each_case(
    ("text", "key", "words"),
    [
        ("{url: 'https://h'}", "secret_file", "no secret"),
        ("{url: 'http://h', secret_env: S}", "url", "must begin with https"),
        ("{url: 'http://8.8.8.8', secret_env: S, allow_private: true}", "url", "is public"),
        ("{url: 'https://u:hidden@h', secret_env: S}", "url", "no user"),
        ("{url: 'https://h/a/../hidden', secret_env: S}", "url", "dot segment"),
        ("{url: 'https://h', secret_env: NONE}", "secret_env", "is not set"),
        ("{url: 'https://h', secret_env: EMPTY}", "secret_env", "holds 0 secrets"),
        ("{url: 'https://h', secret_env: BARE}", "secret_env", "does not begin with whsec_"),
        ("{url: 'https://h', secret_env: SHORT}", "secret_env", "has 4 bytes"),
        ("{url: 'https://h', secret_env: UNPADDED}", "secret_env", "no base64"),
        ("{url: 'https://h', secret_file: missing}", "secret_file", "no such file"),
        ("{url: 'https://h', secret_env: S, secret_file: f}", "secret_file", "beside secret_env"),
        ("{url: 'https://h', secrets: [hidden]}", "secrets", "must not stand in this file"),
        ("{url: 'https://h', secret_env: S, events: [batch.started]}", "events", "one of"),
        ("{secret_env: S}", "url", "is missing"),
    ],
)
def test_what_is_wrong_with_a_target_is_told_without_its_secrets(
    gateway_problems: Problems, tmp_path: Path, text: str, key: str, words: str
) -> None:
    (tmp_path / "f").write_text(SECRET)
    hidden = base64.b64encode(b"hiddenhiddenhiddenhiddenhidden!!").decode()
    problems = gateway_problems(
        f"webhooks:\n  targets:\n    - {text}\n",
        S=SECRET,
        EMPTY=" ",
        BARE=hidden,
        SHORT="whsec_" + base64.b64encode(b"abcd").decode(),
        UNPADDED="whsec_" + base64.b64encode(b"x" * 25).decode().rstrip("="),
    )
    found = [one for one in problems if one.key.startswith(f"webhooks.targets[0].{key}")]
    assert found, problems
    assert words in found[0].message
    shown = " ".join(f"{one.message} {one.remedy}" for one in problems)
    assert hidden not in shown
    assert "hidden" not in shown


def test_a_receiver_with_a_private_address_may_be_called_by_http(
    load_gateway: LoadSettings,
) -> None:
    text = "webhooks: {targets: [{url: 'http://10.0.0.7:8080', secret_env: S, %s: true}]}"
    for allowed in ("allow_private", "allow_http"):
        (target,) = load_gateway(text % allowed, S=SECRET).webhooks.targets
        assert target.url == "http://10.0.0.7:8080/"


def test_no_secret_is_shown(load_gateway: LoadSettings) -> None:
    urls = ("https://a.example/services/T0/hidden?k=hidden", "https://b.example")
    targets = ", ".join(f"{{url: '{url}', secret_env: S}}" for url in urls)
    settings = load_gateway(f"webhooks: {{targets: [{targets}]}}", S=SECRET)
    shown = masked_settings(settings)
    found = [target["url"] for target in shown["webhooks"]["targets"]]
    assert found == ["https://a.example/********", "https://b.example"]
    for text in (json.dumps(shown), repr(settings)):
        assert "hidden" not in text
        assert SECRET not in text


def test_a_secret_stands_for_its_bytes() -> None:
    assert secret_bytes(SECRET) == b"s" * 32
    with pytest.raises(ValueError, match="65 bytes"):
        secret_bytes("whsec_" + base64.b64encode(b"x" * 65).decode())
