from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from pathlib import Path

import pytest
import trustme

from tests.emulator import EmulatedNode
from tests.servers import spawn_demo_server, stop_demo_server, wait_for_demo_server
from tests.tools.cli.running import Ran, run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/nodes.yaml").write_text("nodes: [{name: a, url: http://127.0.0.1:1}]\n")
    return tmp_path


async def check_nodes(folder: Path, inventory: str, *arguments: str) -> Ran:
    (folder / "config/nodes.yaml").write_text(inventory)
    settings = folder / "config/gateway.yaml"
    if not settings.exists():
        settings.write_text("health: {timeout: 60}\n")
    return await asyncio.to_thread(run, "check", "--probe", *arguments)


async def test_every_node_is_check_nodes(folder: Path) -> None:
    async with EmulatedNode(slots=3, context=2048, model="mistral-7b") as node:
        ran = await check_nodes(folder, f"nodes: [{{name: a, url: '{node.url}'}}]\n")
    assert ran.status == 0, ran.err
    head, row = ran.out.splitlines()[-2:]
    assert head.split()[:2] == ["NAME", "ANSWER"]
    assert row.split()[:5] == ["a", "up", "3", "2048", "mistral-7b"]


async def test_a_node_that_differs_from_the_inventory_is_reported(folder: Path) -> None:
    async with EmulatedNode(slots=3, model="mistral-7b") as node:
        inventory = f"nodes: [{{name: a, url: '{node.url}', slots: 2, model: phi}}]\n"
        ran = await check_nodes(folder, inventory)
        as_json = await check_nodes(folder, inventory, "--json")
    assert ran.status == 0
    assert "the inventory says 2, the server has 3" in ran.out
    assert "the inventory says phi" in ran.out
    (answer,) = json.loads(as_json.out)["nodes"]
    assert (answer["answer"], answer["slots"], len(answer["drift"])) == ("up", 3, 2)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
    writer.close()


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
            server = await asyncio.start_server(_answer, "127.0.0.1", 0, ssl=tls)
            port: int = (await stack.enter_async_context(server)).sockets[0].getsockname()[1]
            return port

        own, foreign, plain = await serve("127.0.0.1"), await serve("a.example"), await serve(None)
        cases = {
            "none": (f"https://127.0.0.1:{own}", "", "name the authority behind it in tls.ca"),
            "wrong": (
                f"https://127.0.0.1:{own}",
                "tls: {ca: ../other.pem}",
                "other.pem, is not the authority behind it",
            ),
            "name": (
                f"https://127.0.0.1:{foreign}",
                "tls: {ca: ../ca.pem}",
                "use a name of its certificate in the url, or give it in tls.server_name",
            ),
            "http": (f"http://127.0.0.1:{own}", "", "it speaks TLS: write https:// in its url"),
            "https": (
                f"https://127.0.0.1:{plain}",
                "",
                "it speaks plain HTTP: write http:// in its url",
            ),
        }
        (folder / "config/gateway.yaml").write_text("health: {timeout: 3}\n")
        inventory = "nodes:\n" + "".join(
            f"- {{name: {name}, url: '{url}/{name}', {tls}}}\n"
            for name, (url, tls, _) in cases.items()
        )
        ran = await check_nodes(folder, inventory, "--json")
        assert ran.status == 1
        told = {node["name"]: node["detail"] for node in json.loads(ran.out)["nodes"]}
        for name, (_, _, remedy) in cases.items():
            assert remedy in told[name], name
            assert "_ssl" not in told[name]
        # The commands that ask a gateway say it, too.
        for wrong, right in (
            (f"http://127.0.0.1:{own}", f"write https://127.0.0.1:{own}\n"),
            ("http://::1:8001", "needs brackets: http://[::1]:8001\n"),
        ):
            for command in (("nodes", "--admin-url"), ("batch", "list", "--url")):
                ran = await asyncio.to_thread(run, *command, wrong)
                assert ran.status != 0
                assert ran.err.endswith(right), command


async def test_nodes_of_one_model_that_differ_are_a_warning(folder: Path) -> None:
    async with EmulatedNode(build="b1-one") as one, EmulatedNode(build="b2-two") as other:
        inventory = f"nodes:\n- {{name: a, url: '{one.url}'}}\n- {{name: b, url: '{other.url}'}}\n"
        ran = await check_nodes(folder, inventory)
        as_json = await check_nodes(folder, inventory, "--json")
    assert ran.status == 0
    assert (
        "nodes of one model differ: demo: build of llama.cpp: b1-one on a; b2-two on b" in ran.err
    )
    assert json.loads(as_json.out)["differences"] == [
        "demo: build of llama.cpp: b1-one on a; b2-two on b"
    ]


async def test_a_mix_of_purposes_under_one_name_is_a_warning(folder: Path) -> None:
    async with EmulatedNode() as one, EmulatedNode(embeddings=True) as other:
        nodes = [f"{{name: {name}, url: '{node.url}'" for name, node in (("a", one), ("b", other))]
        inventory = f"nodes:\n- {nodes[0]}}}\n- {nodes[1]}}}\n"
        warned = await check_nodes(folder, inventory)
        settled = await check_nodes(
            folder, f"nodes:\n- {nodes[0]}}}\n- {nodes[1]}, endpoints: embeddings}}\n"
        )
    assert "demo: purpose: chat on a; embeddings on b: say the `endpoints`" in warned.err
    assert settled.err == ""


async def test_a_server_that_runs_tools_is_named(folder: Path) -> None:
    async with EmulatedNode() as node:
        names = ["read_file", "exec_shell_command", "get_info", "grep_search"]
        body = json.dumps([{"tool": name, "permissions": {}} for name in names])
        node.faults.set("status", path="/tools", status=200, body=body)
        inventory = f"nodes: [{{name: a, url: '{node.url}'}}]\n"
        ran = await check_nodes(folder, inventory, "--json")
    (answer,) = json.loads(ran.out)["nodes"]
    assert answer["tools"] == ["exec_shell_command", "read_file", "get_info", "grep_search"]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.binary_only("the wheel's server has no option for it")
async def test_a_real_server_that_runs_tools_is_named(folder: Path) -> None:
    for options in (("--tools", "get_info"), ("--agent",), ()):
        server = spawn_demo_server(slots=1, context=512, extra=options)
        try:
            url = await asyncio.to_thread(wait_for_demo_server, server)
            ran = await check_nodes(folder, f"nodes: [{{name: a, url: '{url}'}}]\n")
        finally:
            stop_demo_server(server)
        assert ran.status == 0, ran.err
        assert ("--tools or --agent" in " ".join(ran.out.split())) == bool(options)


async def test_a_node_that_does_not_answer_is_status_1_and_hides_no_other(folder: Path) -> None:
    async with EmulatedNode() as node, EmulatedNode(api_key="secret") as locked:
        inventory = (
            "nodes:\n"
            f"- {{name: up, url: '{node.url}'}}\n"
            f"- {{name: locked, url: '{locked.url}'}}\n"
            "- {name: gone, url: 'http://127.0.0.1:1'}\n"
            "- {name: off, url: 'http://127.0.0.1:1', enabled: false}\n"
        )
        ran = await check_nodes(folder, inventory)
        as_json = await check_nodes(folder, inventory, "--json")
    assert ran.status == 1
    answers = {one["name"]: one["answer"] for one in json.loads(as_json.out)["nodes"]}
    assert answers == {"up": "up", "locked": "locked", "gone": "refused", "off": "standby"}
    assert "api_key_env" in ran.out


async def test_a_disabled_node_is_no_failure(folder: Path) -> None:
    ran = await check_nodes(
        folder, "nodes: [{name: a, url: 'http://127.0.0.1:1', enabled: false}]\n"
    )
    assert ran.status == 0
    assert "not asked" in ran.out


async def test_a_node_that_hangs_is_given_up_after_the_health_timeout(folder: Path) -> None:
    (folder / "config/gateway.yaml").write_text("health: {timeout: 0.2}\n")

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ran = await check_nodes(folder, f"nodes: [{{name: a, url: 'http://127.0.0.1:{port}'}}]\n")
    server.close()
    await asyncio.wait_for(server.wait_closed(), 60)
    assert ran.status == 1
    assert "timed out" in ran.out


async def test_a_server_whose_slots_may_share_one_pool_is_hinted_at(folder: Path) -> None:
    async with EmulatedNode(slots=4, context=2048, unified=True) as node:
        for kv, hints in (("auto", 1), ("shared", 0), ("split", 0)):
            inventory = f"nodes: [{{name: a, url: '{node.url}', kv: {kv}}}]\n"
            ran = await check_nodes(folder, inventory, "--json")
            (answer,) = json.loads(ran.out)["nodes"]
            assert len(answer["hints"]) == hints
        ran = await check_nodes(folder, f"nodes: [{{name: a, url: '{node.url}'}}]\n")
    assert "4 slots of 2048 tokens each" in ran.out
    assert "kv: shared" in ran.out
