from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.config.autoscaling import Hook
from gateway.config.inventory import NodeSpec
from gateway.scheduling.autoscaler import MOST_OUTPUT, HookResult, run_hook
from tests.gateways import until

SPEC = NodeSpec(name="spare", url="http://127.0.0.1:9")


def python(code: str, *arguments: str) -> Hook:
    return Hook(command=(sys.executable, "-c", code, *arguments))


async def ran(hook: Hook, timeout: float = 120.0, **options: Any) -> HookResult:
    return await run_hook(hook, SPEC, timeout, time.monotonic, **options)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def pid_in(path: Path) -> int:
    return int(path.read_text() or 0) if path.exists() else 0


@asynccontextmanager
async def answering(status: int, body: str = "") -> AsyncIterator[tuple[str, list[bytes]]]:
    """An HTTP server that records its requests."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (
                int(line[15:])
                for line in head.lower().split(b"\r\n")
                if line[:15] == b"content-length:"
            ),
            0,
        )
        asked.append(head + await reader.readexactly(length))
        response = (
            f"HTTP/1.1 {status} X\r\nlocation: /x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        )
        writer.write(response.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/start?token=abc", asked


async def test_a_command_is_run_without_a_shell_and_knows_its_node() -> None:
    code = "import os, sys; print(sys.argv[1], os.environ['LLAMA_GATEWAY_NODE'])"
    result = await ran(python(code, "$HOME; *"))
    assert (result.outcome, result.output) == ("ok", "$HOME; * spare")


async def test_a_failed_command_shows_its_status_and_last_output() -> None:
    result = await ran(python("import sys; sys.exit('no such machine')"))
    assert (result.outcome, result.detail) == ("failed", "it ended with exit status 1")
    assert result.output == "no such machine"


async def test_a_missing_command_is_an_error() -> None:
    result = await ran(Hook(command=("/no/such/program",)))
    assert result.outcome == "error"
    assert "No such file" in result.detail


async def test_output_is_bounded_and_its_end_is_kept() -> None:
    result = await ran(python("print('x' * 1000000, 'end')"))
    assert result.ok
    assert len(result.output) <= MOST_OUTPUT
    assert result.output.endswith("end")


async def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    # A shell, which is quick to start: the child must run within the timeout.
    code = f"trap '' TERM; sleep 600 & echo $! >{child}; wait"
    result = await ran(Hook(command=("sh", "-c", code)), timeout=1.0, kill_after=0.2)
    assert result.outcome == "timeout"
    assert result.seconds < 300  # the child's 600 are not waited for
    pid = pid_in(child)
    await until(lambda: not alive(pid))


async def test_a_cancelled_command_leaves_no_process_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    task = asyncio.create_task(ran(python(code), timeout=600.0))
    await until(lambda: pid_in(pid_file))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pid_in(pid_file))


async def test_a_server_that_a_command_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
    )
    assert (await ran(python(code))).ok
    pid = pid_in(pid_file)
    try:
        assert alive(pid)
    finally:
        os.kill(pid, 9)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_no_descriptor_is_left_open() -> None:
    await ran(python("print(1)"))
    before = open_files()
    for _ in range(3):
        await ran(python("print(1)"))
        await ran(Hook(command=("/no/such/program",)))
    await until(lambda: open_files() <= before)


def secret_hook(url: str, **keys: Any) -> Hook:
    return Hook(url=url, secrets={"Authorization": SecretStr("Bearer swordfish")}, **keys)


async def test_a_call_has_method_headers_secrets_and_body() -> None:
    async with answering(204) as (url, asked):
        hook = secret_hook(url, method="PUT", headers={"X-Zone": "b"}, body='{"on": true}')
        result = await ran(hook)
    assert result.ok
    head = asked[0].lower()
    assert head.startswith(b"put /start?token=abc http/1.1")
    assert b"x-zone: b" in head
    assert b"authorization: bearer swordfish" in head
    assert asked[0].endswith(b'{"on": true}')


async def test_a_refused_call_shows_status_and_url_without_secrets() -> None:
    async with answering(403, "not with Bearer swordfish") as (url, _):
        result = await ran(secret_hook(url))
    assert result.outcome == "failed"
    assert result.detail.endswith("/start answered 403")
    assert "token" not in result.detail
    assert result.output == "not with ****"


async def test_a_redirect_is_no_success_and_is_not_followed() -> None:
    async with answering(307) as (url, asked):
        assert (await ran(secret_hook(url))).outcome == "failed"
    assert len(asked) == 1


async def test_a_call_without_a_listener_is_an_error() -> None:
    assert (await ran(Hook(url="http://127.0.0.1:1/start"))).outcome == "error"
