"""`llama-gateway serve` and `check`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

import gateway.app.assembly
from gateway.app.startup import Options
from tests.cli.running import Ran, refusal, run
from tests.emulator import EmulatedNode
from tests.servers import start_demo_servers
from tests.transport.raw import once, raw_server


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Options]:
    """The options that the gateway would run with; it does not run."""
    seen: list[Options] = []

    def start(options: Options) -> int:
        seen.append(options)
        return 3

    monkeypatch.setattr(gateway.app.assembly, "run", start)
    monkeypatch.chdir(tmp_path)
    return seen


def test_edges_are_a_number_or_auto(given: list[Options]) -> None:
    for word, edges in (("0", 0), ("64", 64), ("auto", "auto")):
        run("serve", "--edges", word)
        assert given.pop().edges == edges
    for word in ("-1", "65", "1.5"):
        for command in ("serve", "check"):
            assert "a number up to 64, or auto" in refusal(command, "--edges", word)
    assert not given


def test_a_flag_beats_the_environment(
    given: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("NODES", "CONFIG", "HOST", "PORT", "ADMIN_HOST", "ADMIN_PORT", "ADMIN_KEY_FILE")
    values = ("n.yaml", "s.yaml", "10.0.0.1", "9000", "10.0.0.2", "9001", "env.key")
    for name, value in zip(names, values, strict=True):
        monkeypatch.setenv(f"LLAMA_GATEWAY_{name}", value)
    run("serve", "--port", "9100", "--admin-host", "::1", "--allow-anonymous")
    # A successor is started by the same command.
    assert given[0].restart_command[-6:-3] == ("serve", "--port", "9100")
    assert [replace(one, restart_command=()) for one in given] == [
        Options(
            inventory_file=Path("n.yaml"),
            settings_file=Path("s.yaml"),
            host="10.0.0.1",
            port=9100,
            admin_host="::1",
            admin_port=9001,
            admin_key_file=Path("env.key"),
            allow_anonymous=True,
        )
    ]


# check.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/nodes.yaml").write_text("nodes: [{name: a, url: http://127.0.0.1:1}]\n")
    return tmp_path


def test_valid_files_are_reported_as_valid(folder: Path) -> None:
    missing = "config/gateway.yaml: not there, every setting has its default\n"
    assert run("check") == Ran(0, f"config/nodes.yaml: valid, 1 node\n{missing}", "")
    for text in ("queue: {max: 5}\n", "# all defaults\n", "{}\n", "listen:\n", "null\n"):
        (folder / "config/gateway.yaml").write_text(text)
        assert "config/gateway.yaml: valid" in run("check").out
    assert run("check", "--config", "/dev/null").status == 0
    for text in ("", " \n\n", "\ufeff"):
        (folder / "config/gateway.yaml").write_text(text)
        for command in ("check", "serve"):
            assert "config/gateway.yaml: the file is empty" in refusal(command)


def test_every_problem_of_both_files_is_reported_with_its_line(folder: Path) -> None:
    (folder / "config/nodes.yaml").write_text(
        "nodes:\n  - name: a\n    url: http://127.0.0.1:1/v1\n    sluts: 2\n"
    )
    (folder / "config/gateway.yaml").write_text("queue:\n  max: many\n")
    for command in ("serve", "check"):
        told = refusal(command)
        for place in ("config/nodes.yaml:3", "config/nodes.yaml:4", "config/gateway.yaml:2"):
            assert place in told
        assert all(line.startswith("error: config/") for line in told.splitlines())

    ran = run("check", "--json")
    answer = json.loads(ran.out)
    assert (ran.status, answer["valid"]) == (2, False)
    places = {(problem["file"], problem["line"]) for problem in answer["problems"]}
    assert {("config/nodes.yaml", 4), ("config/gateway.yaml", 2)} <= places
    assert all(problem["message"] and problem["key"] for problem in answer["problems"])


def test_a_file_that_is_not_there_is_an_error(folder: Path) -> None:
    for flag in ("--nodes", "--config"):
        assert "missing.yaml" in refusal("check", flag, "missing.yaml")
    (folder / "config/nodes.yaml").unlink()
    for command in ("serve", "check"):
        told = refusal(command)
        assert "config/nodes.yaml: there is no such file" in told
        assert "--nodes" in told
        assert "llama-gateway up" in told


BEHIND_PROXY = "listen: {trusted_proxies: [10.0.0.1]}\n"
REFUSED = {
    ("--host", "0.0.0.0"): "--allow-anonymous",
    ("--admin-host", "::"): "--admin-key-file",
    ("--port", "8001"): "both listeners would use port 8001",
    ("--admin-key-file", "missing"): "missing: the admin key can't be read",
    ("--admin-key-file", "binary"): "it is not a text",
    ("--host", "a/b", "--allow-anonymous"): "listen.host",
    ("--nodes", "tls.yaml"): "the TLS files of the node 'secure' can't be used",
    ("--config", "tls-settings.yaml"): "listen.tls: ",
    ("--config", "proxy.yaml"): "listen.trusted_proxies",
}


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_a_configuration_that_serve_refuses_is_invalid(
    folder: Path, flags: tuple[str, ...]
) -> None:
    (folder / "binary").write_bytes(b"\xff")
    (folder / "junk.pem").write_text("junk")
    (folder / "tls.yaml").write_text(
        "nodes: [{name: secure, url: 'https://127.0.0.1:1', tls: {ca: junk.pem}}]\n"
    )
    (folder / "tls-settings.yaml").write_text("listen: {tls: {cert: junk.pem, key: junk.pem}}\n")
    (folder / "proxy.yaml").write_text(BEHIND_PROXY)
    checked, served = run("check", *flags), run("serve", *flags)
    assert (checked.status, checked.out) == (2, "")
    assert REFUSED[flags] in checked.err
    assert (served.status, served.err) == (2, checked.err)
    (problem,) = json.loads(run("check", "--json", *flags).out)["problems"]
    assert problem["key"]
    assert REFUSED[flags] in problem["message"]


def test_what_lets_serve_start_makes_the_files_valid(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = folder / "config/gateway.yaml"
    for text in ("listen: {host: 0.0.0.0}\n", BEHIND_PROXY):
        settings.write_text(text)
        told = refusal("check")
        assert "keys create" in told
        assert "--allow-anonymous" in told
        assert run("check", "--allow-anonymous").status == 0
        for more in ("allow_anonymous: true\n", f"keys: [{{id: a, sha256: {'0' * 64}}}]\n"):
            settings.write_text(text + more)
            assert run("check").status == 0
    settings.write_text("listen: {host: 0.0.0.0}\n")
    assert run("check", "--host", "127.0.0.1").status == 0
    monkeypatch.setenv("LLAMA_GATEWAY_HOST", "127.0.0.1")
    assert run("check").status == 0


def test_problems_of_a_file_do_not_hide_those_of_the_listeners(folder: Path) -> None:
    (folder / "config/nodes.yaml").write_text("nodes: 3\n")
    for command in ("serve", "check"):
        told = refusal(command, "--host", "0.0.0.0")
        assert ("config/nodes.yaml:1: nodes" in told, "--allow-anonymous" in told) == (True, True)


# check --probe.


async def check_nodes(folder: Path, inventory: str, *arguments: str) -> Ran:
    (folder / "config/nodes.yaml").write_text(inventory)
    settings = folder / "config/gateway.yaml"
    if not settings.exists():
        settings.write_text("health: {timeout: 60}\n")
    return await asyncio.to_thread(run, "check", "--probe", *arguments)


async def test_every_node_is_asked_and_one_that_does_not_answer_hides_no_other(
    folder: Path,
) -> None:
    async with (
        EmulatedNode(slots=3, context=2048) as node,
        EmulatedNode(api_key="secret") as locked,
    ):
        inventory = (
            f"nodes:\n- {{name: up, url: '{node.url}', slots: 2, model: phi}}\n"
            f"- {{name: locked, url: '{locked.url}'}}\n"
            "- {name: gone, url: 'http://127.0.0.1:1'}\n"
            "- {name: off, url: 'http://127.0.0.1:1', enabled: false}\n"
        )
        ran = await check_nodes(folder, inventory)
        as_json = await check_nodes(folder, inventory, "--json")
    assert ran.status == 1
    assert "api_key_env" in ran.out
    assert "the inventory says 2, the server has 3" in ran.out
    assert "the inventory says phi" in ran.out
    nodes = {one["name"]: one for one in json.loads(as_json.out)["nodes"]}
    answers = {name: one["answer"] for name, one in nodes.items()}
    assert answers == {"up": "up", "locked": "locked", "gone": "refused", "off": "standby"}
    assert (nodes["up"]["slots"], len(nodes["up"]["drift"])) == (3, 2)


async def test_nodes_of_one_model_that_differ_are_a_warning(folder: Path) -> None:
    async with EmulatedNode(build="b1-one") as one, EmulatedNode(embeddings=True) as other:
        inventory = f"nodes:\n- {{name: a, url: '{one.url}'}}\n- {{name: b, url: '{other.url}'}}\n"
        ran = await check_nodes(folder, inventory)
    assert ran.status == 0
    assert "nodes of one model differ: demo: build of llama.cpp: b1-one on a; " in ran.err
    assert "demo: purpose: chat on a; embeddings on b: say the `endpoints`" in ran.err


async def test_a_failure_of_tls_names_what_mends_it(folder: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    other.cert_pem.write_to_path(folder / "other.pem")
    async with contextlib.AsyncExitStack() as stack:

        async def serve(name: str | None) -> int:
            tls = None
            if name is not None:
                tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                authority.issue_cert(name).configure_cert(tls)
            answer = once(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            return (await stack.enter_async_context(raw_server(answer, tls))).port

        own, foreign, plain = await serve("127.0.0.1"), await serve("a.example"), await serve(None)
        by_name = "use a name of its certificate in the url, or give it in tls.server_name"
        cases = [
            ("https", own, "", "tls.ca must name the authority behind its certificate"),
            ("https", own, "tls: {ca: ../other.pem}", "tls.ca must name the authority behind its"),
            ("https", foreign, "tls: {ca: ../ca.pem}", by_name),
            ("http", own, "", "if it speaks TLS, write https:// in its url"),
            ("https", plain, "", "if it speaks plain HTTP, write http:// in its url"),
        ]
        (folder / "config/gateway.yaml").write_text("health: {timeout: 3}\n")
        inventory = "nodes:\n" + "".join(
            f"- {{name: n{number}, url: '{scheme}://127.0.0.1:{port}/{number}', {tls}}}\n"
            for number, (scheme, port, tls, _) in enumerate(cases)
        )
        ran = await check_nodes(folder, inventory, "--json")
        assert ran.status == 1
        told = {node["name"]: node["detail"] for node in json.loads(ran.out)["nodes"]}
        for number, (*_, remedy) in enumerate(cases):
            assert remedy in told[f"n{number}"]
            assert "_ssl" not in told[f"n{number}"]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.binary_only("the wheel's server has no option for it")
async def test_a_real_server_that_runs_tools_is_named(folder: Path) -> None:
    for options in (("--tools", "get_info"), ("--agent",), ()):
        async with start_demo_servers(1, slots=1, context=512, extra=options) as (url,):
            ran = await check_nodes(folder, f"nodes: [{{name: a, url: '{url}'}}]\n")
        assert ran.status == 0, ran.err
        assert ("--tools or --agent" in " ".join(ran.out.split())) == bool(options)


async def test_a_server_whose_slots_may_share_one_pool_is_hinted_at(folder: Path) -> None:
    async with EmulatedNode(slots=4, context=2048, unified=True) as node:
        for kv, hints in (("auto", 1), ("shared", 0), ("split", 0)):
            inventory = f"nodes: [{{name: a, url: '{node.url}', kv: {kv}}}]\n"
            ran = await check_nodes(folder, inventory, "--json")
            (answer,) = json.loads(ran.out)["nodes"]
            assert len(answer["hints"]) == hints
