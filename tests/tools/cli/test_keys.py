from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from gateway.access.keys import KeyRing
from gateway.config.settings import load_settings
from tests.tools.cli.running import Ran, run


def parts(ran: Ran) -> tuple[str, str]:
    """Return the key and the settings in an output."""
    assert ran.status == 0, ran.err
    before, _, snippet = ran.out.partition("For config/gateway.yaml:\n\n")
    (key,) = [line.strip() for line in before.splitlines() if line.startswith("  ")]
    return key, snippet


@pytest.mark.parametrize("command", [("hash",), ("create", "--print")])
def test_a_new_key_is_accepted_with_the_printed_settings(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    key, snippet = parts(run("keys", *command))
    file = tmp_path / "gateway.yaml"
    file.write_text(snippet)
    settings = load_settings(file)
    assert KeyRing(settings.keys).find(key) is not None
    assert key not in snippet
    assert key.split("_")[2] not in snippet


def test_a_key_has_the_rights_of_its_flags(tmp_path: Path) -> None:
    name = 'Team "A": #1 é'
    ran = run(
        *("keys", "create", "--print", "--id", "team-a", "--name", name, "--max-class", "premium"),
        *("--model", "mistral-7b", "--model", "helper", "--trust-user-headers"),
    )
    key, snippet = parts(ran)
    assert key.startswith("lg_team-a_")
    (entry,) = yaml.safe_load(snippet)["keys"]
    assert entry["name"] == name
    assert entry["max_class"] == "premium"
    assert entry["models"] == ["mistral-7b", "helper"]
    file = tmp_path / "gateway.yaml"
    file.write_text(snippet)
    (spec,) = load_settings(file).keys
    assert (spec.id, spec.name, spec.trust_user_headers) == ("team-a", name, True)


def test_a_key_s_class_is_also_its_highest_by_default(tmp_path: Path) -> None:
    for flags, best in (([], "premium"), (["--max-class", "urgent"], "urgent")):
        _, snippet = parts(run("keys", "create", "--print", "--class", "premium", *flags))
        (tmp_path / "gateway.yaml").write_text(snippet)
        (spec,) = load_settings(tmp_path / "gateway.yaml").keys
        assert (spec.class_, spec.max_class) == ("premium", best)


def test_json_for_scripts() -> None:
    entry = json.loads(run("keys", "hash", "--id", "abc", "--json").out)
    secret = entry["key"].removeprefix("lg_abc_")
    assert entry == {
        "key": entry["key"],
        "id": "abc",
        "sha256": hashlib.sha256(secret.encode()).hexdigest(),
    }


def test_a_key_that_exists_is_read_from_stdin_and_not_shown() -> None:
    ran = run("keys", "hash", "--read", stdin="lg_mine_some-secret\n")
    assert ran.status == 0
    assert "some-secret" not in ran.out + ran.err
    (entry,) = yaml.safe_load(ran.out.partition("\n\n")[2])["keys"]
    assert entry == {"id": "mine", "sha256": hashlib.sha256(b"some-secret").hexdigest()}
    again = json.loads(run("keys", "hash", "--read", "--json", stdin="lg_mine_some-secret").out)
    assert again == entry


@pytest.mark.parametrize("text", ["", "sk-my-secret", "lg_my.id_secret", "x" * 100_000])
def test_a_text_that_is_no_key_is_refused_and_not_quoted(text: str) -> None:
    ran = run("keys", "hash", "--read", stdin=text)
    assert (ran.status, ran.out) == (2, "")
    assert len(ran.err.splitlines()) == 1
    assert not text or text not in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("hash", "--id", "with_underscore"),
        ("hash", "--id", ""),
        ("hash", "--id", "a", "--read"),
        ("create", "--id", "x" * 65),
        ("create", "--max-class", "vip"),
        ("create", "--class", "premium", "--max-class", "normal"),
        ("rotate",),
        (),
    ],
)
def test_wrong_usage_is_2(arguments: tuple[str, ...]) -> None:
    ran = run("keys", *arguments)
    assert ran.status == 2
    assert "Traceback" not in ran.err
