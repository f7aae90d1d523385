"""`llama-gateway keys` and `groups` with a store: while a gateway runs, and without one."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import stat
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.callers.keys import KeyRing, new_key
from gateway.config.settings import load_settings
from tests.cli.running import Ran, output, refusal, run, run_beside, run_process
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway
from tests.known import known
from tests.processes import free_port

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}

OWN = new_key("own")

SETTINGS: dict[str, Any] = {"keys": [{"id": OWN.id, "sha256": OWN.sha256, "name": "owner"}]}


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with settings and inventory of a gateway that does not run."""
    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path, {**SETTINGS, "store": {"url": "sqlite:///keys.db"}})
    nodes = {"nodes": [{"name": "a", "url": "http://127.0.0.1:9", "model": "mistral-7b"}]}
    (tmp_path / "config" / "nodes.yaml").write_text(yaml.safe_dump(nodes))
    return tmp_path


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "config").mkdir(exist_ok=True)
    whole = {"admin": {"port": free_port()}, **settings}
    (folder / "config" / "gateway.yaml").write_text(yaml.safe_dump(whole))


def key_of(ran: Ran) -> str:
    assert ran.status == 0, ran.err
    (key,) = [line.strip() for line in ran.out.splitlines() if line.startswith("  lg_")]
    return key


def stored(file: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file)) as reader:
        return reader.execute("SELECT name, revoked_at IS NULL FROM keys ORDER BY name").fetchall()


def test_without_a_gateway_the_store_of_the_settings_is_used_and_named(alone: Path) -> None:
    ran = run("keys", "create", "--name", "alice", "--rpm", "60", "--budget", "20/month")
    key = key_of(ran)
    assert f"store: sqlite:///{alone / 'config' / 'keys.db'} (no gateway answers" in ran.err
    assert stored(alone / "config" / "keys.db") == [("alice", 1)]
    assert key.split("_")[2].encode() not in (alone / "config" / "keys.db").read_bytes()
    listed = run("keys", "list")
    assert "rpm 60, budget 20/month" in listed.out
    assert "owner" in listed.out
    shown = json.loads(run("keys", "show", "alice", "--json").out)
    assert shown["limits"]["rpm"] == 60
    assert "sha256" not in shown
    assert "rpm 60" in run("keys", "show", shown["id"]).out


def test_a_key_is_rotated_and_revoked_in_the_store(alone: Path) -> None:
    first = key_of(run("keys", "create", "--name", "alice"))
    second = key_of(run("keys", "rotate", "alice", "--grace", "1h"))
    assert first.split("_")[1] == second.split("_")[1]
    assert first != second
    assert run("keys", "revoke", "alice").out.endswith("revoked\n")
    assert stored(alone / "config" / "keys.db") == [("alice", 0)]
    assert "alice" not in run("keys", "list").out
    assert "revoked" in run("keys", "list", "--revoked").out
    assert "revoked for good" in refusal("keys", "rotate", "alice", status=1)


def shown(name: str) -> dict[str, Any]:
    """A key's rights: what is left of a minute's limit changes by itself."""
    found: dict[str, Any] = json.loads(run("keys", "show", name, "--json").out)
    return {field: value for field, value in found.items() if field != "standing"}


PRIVATE = (
    *("--cache-hide", "--cache-isolate", "key", "--no-prompt-cache"),
    *("--cache-nodes", "tenant=a, zone=b"),
)


def test_the_rights_of_a_key_are_stored_and_changed_one_by_one(alone: Path) -> None:
    ran = run(
        *("keys", "create", "--name", "alice", "--class", "premium", "--models", "mistral-7b, b"),
        *("--model", "c", "--group", "team", "--expires", "90d", "--trust-user-headers"),
        *("--user-rpm", "6", "--concurrency", "2", "--tpm", "900", *PRIVATE, "--json"),
    )
    key = json.loads(ran.out)
    assert key["key"].startswith(f"lg_{key['id']}_")
    assert "declares the model 'c'" in ran.err
    assert "'mistral-7b'" not in ran.err
    before = shown("alice")
    assert (before["class"], before["max_class"], before["group"]) == (*["premium"] * 2, "team")
    assert (before["models"], before["user_limits"]["rpm"]) == (["c", "mistral-7b", "b"], 6)
    assert (before["limits"]["concurrency"], before["limits"]["tpm"]) == (2, 900)
    whole = {"hide": True, "isolate": "key", "prompt_cache": False}
    assert before["cache"] == {**whole, "nodes": {"tenant": "a", "zone": "b"}}

    ran = run(
        *("keys", "set", "alice", "--name", "b", "--concurrency", "6", "--max-class", "urgent"),
        *("--unset", "tpm,expires,user-rpm", "--cache-nodes", "zone=c", "--no-cache-hide"),
    )
    assert ran.out.startswith(f"b (id {before['id']}): at most class urgent; models c, ")
    assert "; concurrency 6; cache: hide no, isolate key, nodes zone=c, prompt_cache no" in ran.out
    after = shown("b")
    assert (after["id"], after["created_at"]) == (before["id"], before["created_at"])
    assert (after["max_class"], after["expires"], after["user_limits"]) == ("urgent", None, None)
    assert {limit for limit in after["limits"].values() if limit is not None} == {6}
    assert after["cache"] == {**whole, "nodes": {"zone": "c"}, "hide": False}
    assert run("keys", "set", "b", "--cache-nodes", "all", "--unset", "cache-hide").status == 0
    assert shown("b")["cache"] == {**whole, "nodes": {}, "hide": None}
    assert run("keys", "set", "b", "--unset", "models", "--unset", "limits,cache").status == 0
    bare = shown("b")
    assert (bare["models"], bare["limits"], bare["cache"]) == (None, None, None)


@each_case(
    ("words", "said"),
    [
        ("create --rpm 0", "--rpm"),
        ("create --budget -1/day", "--budget"),
        ("create --expires 2020-01-01", "--expires"),
        ("create --models a,,b", "--models"),
        ("create --user-rpm 5", "--user-"),
        ("create --class premium --max-class normal", "is below"),
        ("create --print --rpm 0", "--rpm"),
        ("create --name b --id own", "a key of the settings is called 'own'"),
        ("set a", "say what to change"),
        ("set a --unset limits --rpm 5", "'limits' is set by another flag"),
        ("set a --class premium", "is below the key's class"),
        ("set a --cache-nodes a=1,a=2", "tenant=a,zone=b"),
        ("set a --user-rpm 5", "needs --trust-user-headers"),
        ("hash --id a --read", "has an id already"),
        ("import missing.yaml", "missing.yaml"),
    ],
)
def test_wrong_usage_is_told_and_changes_nothing(words: str, said: str, alone: Path) -> None:
    if not (alone / "config" / "keys.db").exists():
        run("keys", "create", "--name", "a", "--rpm", "5")
    before = (alone / "config" / "keys.db").read_bytes()
    assert said in refusal("keys", *words.split())
    assert (alone / "config" / "keys.db").read_bytes() == before


@each_case(
    ("words", "said"),
    [
        ("create --name alice", "is called 'alice' already"),
        ("create --name b --id alice-id", "another key has the id"),
        ("revoke nobody", "keys list"),
        ("set owner --rpm 5", "a key of the settings"),
    ],
)
def test_what_the_store_can_not_do_is_status_1(words: str, said: str, alone: Path) -> None:
    if not (alone / "config" / "keys.db").exists():
        run("keys", "create", "--name", "alice", "--id", "alice-id")
    assert said in refusal("keys", *words.split(), status=1)
    assert stored(alone / "config" / "keys.db") == [("alice", 1)]


def test_a_store_that_can_not_be_opened_is_an_error_with_a_remedy(alone: Path) -> None:
    (alone / "config" / "keys.db").write_text("no database at all, but long enough" * 100)
    assert "backup" in refusal("keys", "create", "--name", "alice", status=1)


def test_a_named_gateway_that_does_not_answer_is_no_reason_to_open_the_store(alone: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    refusal("keys", "create", "--name", "alice", "--admin-url", url, status=1)
    assert not (alone / "config" / "keys.db").exists()


FILES = {
    "keys.yaml": "- {id: a1, sha256: HASH, name: a}\n- {id: b1, sha256: HASH, limits: {rpm: 5}}\n",
    "keys.json": '{"keys": [{"id": "a1", "sha256": "HASH", "name": "a", "models": ["m"]}]}',
    "keys.csv": "id,sha256,name,models,rpm,budget\na1,HASH,a,m;n,60,20/month\nb1,HASH,,,,\n",
}


@pytest.mark.parametrize("name", FILES)
def test_keys_are_imported_from_a_file(name: str, alone: Path) -> None:
    (alone / name).write_text(FILES[name].replace("HASH", OWN.sha256))
    assert "imported" in output("keys", "import", name)
    assert "a" in [row[0] for row in stored(alone / "config" / "keys.db")]


BAD_FILES = [
    ("x.yaml", "- {id: a1, sha256: HASH}\n- {id: b_1, sha256: HASH}\n- {id: c, sha256: x}\n", 2, 3),
    ("x.yaml", "keys:\n- {id: a1, sha256: HASH}\n- {id: b1, sha256: HASH, limits: {rpm: 0}}\n", 3),
    ("x.yaml", "- {id: a1, sha256: HASH}\n- {id: a2, name: a1, sha256: HASH}\n", 2),
    ("x.yaml", "- {id: own, sha256: HASH}\n", 1),
    ("x.json", '[{"id": "a1", "sha256": "HASH"},\n 5]', 2),
    ("x.csv", "id,sha256,rpm\na1,HASH,60\nb1,HASH,0\nc1,HASH,many\n", 3, 4),
    ("x.csv", "id,name\na1,x\n", 1),
    ("x.yaml", f"- {{id: a, sha256: {OWN.text}}}\n", 1),
    *(("x.yaml", text) for text in ("", "keys: []\n", "a: b\n", "[", "\x00")),
    ("x.csv", "id,sha256\n"),
]


@each_case(("name", "text", "lines"), [(n, t, ls) for n, t, *ls in BAD_FILES])
def test_a_bad_line_is_named_and_nothing_is_imported_or_echoed(
    name: str, text: str, lines: list[int], alone: Path
) -> None:
    (alone / name).write_text(text.replace("HASH", OWN.sha256))
    told = refusal("keys", "import", name)
    assert all(f"{name}:{line}: " in told for line in lines), told
    assert name in told
    assert OWN.text.split("_")[2] not in told
    file = alone / "config" / "keys.db"
    assert not file.exists() or stored(file) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_leaves_no_file_that_the_gateways_user_can_not_open(alone: Path) -> None:
    # The folders above are root's alone.
    folder = Path("/var/tmp") / f"llama-gateway-test-{os.getpid()}"
    folder.mkdir()
    try:
        os.chown(folder, 65534, 65534)
        write_settings(alone, {"store": {"url": f"sqlite:///{folder / 'keys.db'}"}})
        ran = run_process(["keys", "create", "--name", "alice"])
        assert ran.status == 0, ran.err
        for file in folder.iterdir():
            assert (file.stat().st_uid, stat.S_IMODE(file.stat().st_mode)) == (65534, 0o600)
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


# While a gateway runs.


async def status_with(running: Running, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    answer = await running.client.post("/v1/chat/completions", json=CHAT, headers=headers)
    return answer.status_code


async def is_made_rotated_and_revoked(running: Running, node: EmulatedNode) -> None:
    made = await run_beside(running, "keys", "create", "--name", "a/b c", "--models", node.model)
    assert "of the gateway at" in made.err
    assert await status_with(running, key_of(made)) == 200
    assert "a/b c" in (await run_beside(running, "keys", "list")).out
    rotated = await run_beside(running, "keys", "rotate", "a/b c", "--grace", "0")
    assert await status_with(running, key_of(made)) == 401
    assert await status_with(running, key_of(rotated)) == 200
    assert (await run_beside(running, "keys", "revoke", "a/b c")).status == 0
    assert await status_with(running, key_of(rotated)) == 401


async def is_changed(running: Running, _: EmulatedNode) -> None:
    key = key_of(await run_beside(running, "keys", "create", "--name", "a", "--rpm", "1", *PRIVATE))
    assert await status_with(running, key) == 400  # Its pool has no model.
    ran = await run_beside(
        running, "keys", "set", "a", "--cache-nodes", "all", "--unset", "rpm", "--json"
    )
    told = json.loads(ran.out)
    assert (told["limits"], told["cache"]["nodes"], "key" in told) == (None, {}, False)
    assert [await status_with(running, key) for _ in range(2)] == [200, 200]


async def is_refused(running: Running, node: EmulatedNode) -> None:
    for words, said in (
        (("create", "--name", "b", "--models", "nobody"), f"they serve {node.model}"),
        (("create", "--name", "owner"), "a key of the settings is called 'owner'"),
    ):
        ran = await run_beside(running, "keys", *words)
        assert (ran.status, ran.out, said in ran.err) == (2, "", True), words


async def is_imported(running: Running, node: EmulatedNode) -> None:
    key = new_key("bulk")
    file = running.settings_file.with_name("bulk.csv")
    file.write_text(f"id,sha256\nbulk,{key.sha256}\nown,{key.sha256}\n")
    ran = await run_beside(running, "keys", "import", str(file))
    assert (ran.status, "bulk.csv:3: id" in ran.err) == (2, True)
    file.write_text(f"id,sha256\nbulk,{key.sha256}\n")
    assert (await run_beside(running, "keys", "import", str(file))).status == 0
    assert await status_with(running, key.text) == 200


@pytest.mark.parametrize(
    "scene", [is_made_rotated_and_revoked, is_changed, is_refused, is_imported]
)
async def test_while_a_gateway_runs_a_key(
    scene: Callable[[Running, EmulatedNode], Awaitable[None]], tmp_path: Path
) -> None:
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], SETTINGS) as running,
    ):
        await scene(running, node)


# Entries for the settings, of keys that no store has.


def test_a_printed_entry_is_of_its_key_and_is_not_stored(alone: Path) -> None:
    name = 'Team "A": #1 é'
    ran = run(
        *("keys", "create", "--print", "--id", "team-a", "--name", name, "--class", "premium"),
        *("--model", "mistral-7b", "--model", "helper", "--rpm", "5", "--expires", "1d"),
    )
    assert "--print goes with the next release" in ran.err
    key, snippet = key_of(ran), ran.out.partition("For config/gateway.yaml:\n\n")[2]
    (alone / "printed.yaml").write_text(snippet)
    settings = load_settings(alone / "printed.yaml")
    (spec,) = settings.keys
    assert KeyRing(settings.keys).find(key) is not None
    assert key.split("_")[2] not in snippet
    assert (spec.id, spec.name, spec.class_, spec.max_class) == ("team-a", name, *["premium"] * 2)
    assert (spec.models, known(spec.limits).rpm) == (("mistral-7b", "helper"), 5)
    assert not (alone / "config" / "keys.db").exists()


def test_a_hash_is_an_entry_of_a_new_key_or_of_one_that_is_read_and_not_shown() -> None:
    entry = json.loads(run("keys", "hash", "--id", "abc", "--json").out)
    secret = entry["key"].removeprefix("lg_abc_")
    digest = hashlib.sha256(secret.encode()).hexdigest()
    assert entry == {"key": entry["key"], "id": "abc", "sha256": digest}
    ran = run("keys", "hash", "--read", stdin=f"lg_mine_{secret}\n")
    assert ran.status == 0
    assert secret not in ran.out + ran.err
    (entry,) = yaml.safe_load(ran.out.partition("\n\n")[2])["keys"]
    assert entry == {"id": "mine", "sha256": digest}


@each_case("text", ["", "sk-my-secret", "lg_my.id_secret", "x" * 100_000])
def test_a_text_that_is_no_key_is_refused_and_not_quoted(text: str) -> None:
    told = refusal("keys", "hash", "--read", stdin=text)
    assert len(told.splitlines()) == 1
    assert not text or text not in told


# Groups, and what is used of limits.


def test_without_a_gateway_groups_are_made_changed_and_removed_in_the_store(alone: Path) -> None:
    ran = run(
        "groups", "set", "night", "--budget", "20/month", "--user-rpm", "5", "--models", "a,b"
    )
    assert ran.status == 0, ran.err
    assert "store: sqlite:///" in ran.err
    changed = run("groups", "set", "night", "--rpm", "60", "--unset", "budget,user-rpm", "--json")
    assert json.loads(changed.out)["limits"] == {"models": ["a", "b"], "rpm": 60}
    assert json.loads(changed.out)["user_limits"] is None
    made = run("keys", "create", "--name", "alice", "--group", "night")
    assert "warning" not in made.err
    other = run("keys", "set", "alice", "--group", "nigth")
    assert "neither settings nor store define the group 'nigth'" in other.err
    run("keys", "set", "alice", "--group", "night")
    listed = run("groups", "list")
    assert [line.split()[:3] for line in listed.out.splitlines()[1:]] == [["night", "store", "1"]]
    removed = run("groups", "remove", "night")
    assert removed.out == "night: removed\n"
    assert "warning: 1 keys are still of this group" in removed.err
    assert run("groups", "list", "--json").out.count('"undefined"') == 1
    write_settings(
        alone, {**SETTINGS, "store": {"url": "sqlite:///keys.db"}, "groups": {"day": {}}}
    )
    assert "group of the settings" in refusal("groups", "set", "day", "--rpm", "5", status=1)
    assert run("groups", "set", "bad name").status == 2
