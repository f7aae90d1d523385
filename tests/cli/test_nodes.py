"""`llama-gateway nodes`, and where commands find the admin API."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trustme

from tests.cli.admin_api import AdminApi, admin_api
from tests.cli.local_server import answering
from tests.cli.running import Ran, refusal, run, run_on_terminal
from tests.each_case import each_case


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AdminApi]:
    monkeypatch.chdir(tmp_path)  # no config/ of the project here
    with admin_api() as api:
        yield api


@pytest.fixture
def fleet(api: AdminApi) -> AdminApi:
    """Two hosts of two nodes each, in two racks; all serve one model."""
    for name, rack in (("a0", "a"), ("a1", "b"), ("b0", "b"), ("b1", "b")):
        api.add(name, host=f"epyc-{name[0]}", labels={"rack": rack, "numa": name[1]})
    return api


DRAIN = ("nodes", "drain", "a", "--wait")


def run_nodes(api: AdminApi, *arguments: str) -> Ran:
    return run("nodes", *arguments, "--admin-url", api.url)


def test_the_fleet_is_a_table_that_a_pipe_does_not_fold(api: AdminApi) -> None:
    empty = run_nodes(api)
    assert (empty.status, empty.out, "no nodes" in empty.err) == (0, "", True)
    guess = {"prefill_tps": 210.5, "decode_tps": 14.25, "in_use": True, "outcome": "done"}
    pool = {"tokens": 2048, "reserved": 1100, "foreign": 100}
    reason = "connection refused: " + "x" * 200
    api.add("a" * 60, models=["mistral-7b", "helper"], prefill_tps=None, calibration=guess)
    api.add("b", state="down", reason=reason, slots_busy=0, context=2048, pool=pool)
    ran = run_nodes(api, "list")
    assert (ran.status, ran.err, "\x1b" in ran.out) == (0, "", False)
    head, first, second = ran.out.splitlines()
    assert head.split()[:4] == ["NAME", "STATE", "SLOTS", "RUNNING"]
    assert first.split()[:6] == ["a" * 60, "ready", "1/2", "1", "mistral-7b,", "helper"]
    assert ("answers its probes" in first, "~210.5" in first, "~" in second) == (False, True, False)
    assert second.split()[:2] == ["b", "down"]
    assert reason in second
    assert "1200/2048 shared" in second
    assert json.loads(run_nodes(api, "--json").out) == {"nodes": list(api.nodes.values())}


def test_text_from_a_node_can_t_control_the_terminal(api: AdminApi) -> None:
    api.add("a", models=["evil\x1b[2J\nname"], reason="[red]not markup[/]", state="down")
    ran = run_nodes(api)
    assert ("\x1b" in ran.out, len(ran.out.splitlines())) == (False, 2)
    assert "[red]not markup[/]" in ran.out
    evil = "x\x9b2J\x7f\u202e\u2028\U000e0041\ud800"
    api.add("a", models=[evil], reason="ä", state="down")
    ran = run_nodes(api, "--json")
    assert all(line.isprintable() for line in ran.out.split("\n"))
    assert "ä" in ran.out
    assert json.loads(ran.out)["nodes"][0]["models"] == [evil]


@pytest.mark.parametrize(
    ("node", "arguments", "shown", "sent"),
    [
        ({"in_flight": 2}, ("drain",), "draining (drained by an operator), 2 running", "drain"),
        ({"in_flight": 0}, ("drain", "--deadline", "90"), "draining", "drain?deadline=90"),
        ({"in_flight": 3}, ("drain", "--wait"), "draining (drained by an operator)\n", "drain"),
        ({"state": "draining", "in_flight": 0}, ("resume",), "ready (answers its p", "resume"),
    ],
)
def test_a_node_is_drained_and_resumed(
    api: AdminApi, node: dict[str, Any], arguments: tuple[str, ...], shown: str, sent: str
) -> None:
    api.add("a", **node)
    api.drains_end = "--wait" in arguments
    ran = run_nodes(api, arguments[0], "a", *arguments[1:])
    assert (ran.status, ran.err, api.requests[0]) == (0, "", f"POST /admin/nodes/a/{sent}")
    assert ran.out.startswith(f"a: {shown}")
    assert api.nodes["a"]["in_flight"] == (0 if api.drains_end else node["in_flight"])


def test_waiting_ends_at_its_limit_or_when_somebody_resumes_the_node(api: AdminApi) -> None:
    api.add("a", in_flight=2)
    api.drains_end = False
    told = refusal(*DRAIN, "--timeout", "0.1", "--admin-url", api.url, status=1)
    assert "a still runs 2 after 0.1 s; it stays drained" in told
    api.act = lambda found, *_: found.update(state="ready")  # type: ignore[method-assign]
    assert "no longer drained" in refusal(*DRAIN, "--admin-url", api.url, status=1)


@each_case(
    ("arguments", "status", "words"),
    [
        (("drain",), 2, "--host, --label or --all-but"),
        (("resume", "a0", "--wait"), 2, "only a drain has it"),
        (("--admin-url", "10.0.0.1:8001"), 2, "--admin-url"),
        (("drain", "a0", "--host", "epyc-a"), 2, "name the nodes, or choose"),
        (("drain", "--label", "rack"), 2, "must be like rack=b"),
        (("drain", "--all-but", "typo"), 1, "there is no node 'typo'"),
        (("list", "--admin-url", "http://127.0.0.1:1"), 1, "no gateway answers at http://127.0"),
        (("list", "--admin-key-file", "missing"), 2, "missing"),
        (("--admin-url", "https://127.0.0.1:1", "--admin-ca", "missing.pem"), 2, "missing.pem"),
    ],
)
def test_a_wrong_choice_is_an_error_and_touches_nothing(
    fleet: AdminApi, arguments: tuple[str, ...], status: int, words: str
) -> None:
    own = () if "--admin-url" in arguments else ("--admin-url", fleet.url)
    assert words in refusal("nodes", *arguments, *own, status=status)
    assert posted(fleet) == []


@each_case(
    ("answer", "told"),
    [
        (b"<html>", "no gateway's admin API"),
        (b'{"a":' * 100_000, "no gateway's admin API"),
        (b"\xff", "no gateway's admin API"),
        (b" " * 600_000, "is too long"),
    ],
)
def test_an_answer_that_is_of_no_gateway_is_told(
    answer: bytes, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.cli.client.LARGEST_ANSWER", 550_000)
    with answering(lambda *_: (200, {}, answer)) as url:
        assert told in refusal("nodes", "--admin-url", url, status=1)


@each_case("content", [b"", b"\n", b"\xff\xfe", b"two\nlines", "kéy".encode()])
def test_a_key_file_without_a_key_is_reported(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    for command in (("nodes", "--admin-key-file"), ("batch", "list", "--key-file")):
        assert str(file) in refusal(*command, str(file)), command


def test_the_address_and_the_key_are_in_the_settings_too(
    api: AdminApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # is not used
    api.key = "secret"
    assert "--admin-key-file" in refusal("nodes", "--admin-url", api.url, status=1)
    (tmp_path / "admin.key").write_text("secret\n")
    assert run_nodes(api, "--admin-key-file", "admin.key").status == 0
    port = api.url.rpartition(":")[2]
    config = tmp_path / "config"
    config.mkdir()
    settings = f"admin: {{host: 0.0.0.0, port: {port}, key_file: ../admin.key}}\n"
    (config / "gateway.yaml").write_text(settings)
    assert run("nodes").status == 0
    # The environment beats the file.
    monkeypatch.setenv("LLAMA_GATEWAY_ADMIN_PORT", "1")
    assert "http://127.0.0.1:1 " in run("nodes").err


BROKEN = {
    "an unknown key": "nonsense: 1\n{admin}",
    "a wrong value": "queue: {{max: many}}\n{admin}",
    "a missing variable": "{admin}\nstore: {{url: '${{NO_SUCH_VARIABLE}}'}}\n",
    "a key of admin that no command needs": "{admin}\n  keys: [{{id: a}}]\n  hosts: 7\n",
    "a missing variable of admin": "{admin}\n  hosts: ['${{NO_SUCH_VARIABLE}}']\n",
}


@each_case("name", BROKEN)
def test_invalid_settings_do_not_keep_an_operator_from_the_gateway(name: str) -> None:
    with TemporaryDirectory() as folder, admin_api() as api:
        api.key = "secret"
        (Path(folder) / "admin.key").write_text("secret")
        port = api.url.rpartition(":")[2]
        admin = f"admin:\n  # of this machine\n  port: {port}\n  key_file: admin.key"
        config = Path(folder) / "gateway.yaml"
        config.write_text(BROKEN[name].format(admin=admin))
        ran = run("nodes", "--json", "--config", str(config))
        assert ran.status == 0, ran.err
        assert json.loads(ran.out) == {"nodes": []}
        assert ran.err.startswith(f"warning: {config}:")
        assert ran.err.count("\n") == 1


@pytest.mark.parametrize("name", ["other", "address"])
def test_the_certificate_of_the_settings_is_trusted_whatever_its_names_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not even another of the same authority, for the right address."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for file, name_given in (("other", "gateway.example.org"), ("address", "127.0.0.1")):
        issued = authority.issue_cert(name_given)
        issued.private_key_pem.write_to_path(tmp_path / f"{file}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{file}.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    with admin_api(context) as api:
        tls, port = "{cert: ../other.pem, key: ../other.key}", api.url.rpartition(":")[2]
        text = f"admin: {{host: 0.0.0.0, port: {port}, tls: {tls}}}\n"
        (tmp_path / "config/gateway.yaml").write_text(text)
        ran = run("nodes", "--json")
        if name == "other":
            assert (ran.status, ran.err) == (0, "")
            return
        assert (ran.status, "--admin-ca" in ran.err) == (1, True)
        assert api.requests == []
        # An authority, or the certificate itself, can be named.
        for ca in ("ca.pem", "address.pem"):
            assert run("nodes", "--admin-url", api.url, "--admin-ca", ca).status == 0


# Groups of nodes: by host, by label, all but some.


def posted(api: AdminApi) -> list[str]:
    return [one.removeprefix("POST /admin/nodes/") for one in api.requests if "POST" in one]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--host", "epyc-a"), ["a0", "a1"]),
        (("--host", "epyc-a", "--host", "epyc-b", "--all-but", "b1"), ["a0", "a1", "b0"]),
        (("--label", "rack=b", "--label", "numa=1"), ["a1", "b1"]),
        (("--label", "rack=b", "--host", "epyc-b"), ["b0", "b1"]),
        (("--all-but", "a0", "--all-but", "b0"), ["a1", "b1"]),
        (("b0", "a0"), ["a0", "b0"]),
    ],
)
def test_a_group_is_drained_and_resumed(
    fleet: AdminApi, arguments: tuple[str, ...], names: list[str]
) -> None:
    ran = run_nodes(fleet, "drain", *arguments)
    assert (ran.status, ran.err) == (0, "")
    assert posted(fleet) == [f"{name}/drain" for name in names]
    head, *_ = ran.out.splitlines()
    assert head.startswith("NAME"), "what it touches comes first"
    for name in names:
        assert f"{name}: draining (drained by an operator)" in ran.out
    fleet.requests.clear()
    assert run_nodes(fleet, "resume", *arguments).status == 0
    assert posted(fleet) == [f"{name}/resume" for name in names]


def test_all_nodes_of_a_model_are_not_drained_without_yes(fleet: AdminApi) -> None:
    fleet.add("b1", host="epyc-b", labels={"rack": "b"}, models=["only-here", "mistral-7b"])
    fleet.add("a0", host="epyc-a", labels={"rack": "a"}, state="down")
    ran = run_nodes(fleet, "drain", "--label", "rack=b")
    assert ran.status == 1
    assert "no other node serves mistral-7b, only-here" in ran.err
    assert "--yes" in ran.err
    assert posted(fleet) == []
    assert run_nodes(fleet, "drain", "--label", "rack=b", "--yes").status == 0
    assert len(posted(fleet)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 1)])
def test_on_a_terminal_it_asks(fleet: AdminApi, answer: str, status: int) -> None:
    command = ("nodes", "drain", "a0", "a1", "b0", "b1", "--admin-url", fleet.url)
    ended, shown = run_on_terminal(*command, question=b"all the same?", typed=answer)
    assert (ended, "no other node serves mistral-7b" in shown) == (status, True)
    assert bool(posted(fleet)) is (status == 0)


def test_a_failure_stops_no_other_and_is_told(fleet: AdminApi) -> None:
    fleet.refused = {"a1"}
    ran = run_nodes(fleet, "drain", "--all-but", "b1")
    assert ran.status == 1
    assert "a0: draining" in ran.out
    assert "b0: draining" in ran.out
    assert "1 of 3 nodes failed: a1: the gateway" in ran.err
    ran = run_nodes(fleet, "resume", "--all-but", "b1", "--json")
    assert ran.status == 1
    answer = json.loads(ran.out)
    assert [one["name"] for one in answer["nodes"]] == ["a0", "b0"]
    (failed,) = answer["failed"]
    assert (failed["name"], "It broke." in failed["error"]) == ("a1", True)
