"""An emulated node in a process of its own, and commands for it.

Commands come at a port of their own, since the node's may refuse. A connection brings one line of
JSON, such as `{"do": "next", "kind": "reset", "n": 2}`, and gets one back: `{}`, or the `error`.
`do`: `next`, `set` (both with the fields of a `Fault`), `clear`, `refuse`, `accept`, `kill`,
`revive`, `loading` (`on`: true or false).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.emulator.node import EmulatedNode


class RunningEmulator(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    commands: str  # where it takes them


@contextlib.contextmanager
def emulator_process(*options: str) -> Iterator[RunningEmulator]:
    command = [sys.executable, "-m", "tests.emulator", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url, commands = (process.stdout.readline().strip() for _ in range(2))
            yield RunningEmulator(process, url, commands)
        finally:
            process.kill()


async def serve_commands(node: EmulatedNode) -> str:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = {}
        with contextlib.suppress(OSError):
            try:
                await _execute(node, json.loads(await reader.readline()))
            except (TypeError, ValueError) as error:
                answer["error"] = str(error)
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    server = await asyncio.start_server(serve, node.host)
    return "{}:{}".format(*server.sockets[0].getsockname()[:2])


async def send_command(where: str, **command: Any) -> dict[str, str]:
    """Send a command there; returns the answer. OSError or ValueError: there is none."""
    reader, writer = await asyncio.open_connection(*where.rsplit(":", 1))
    try:
        writer.write(json.dumps(command).encode() + b"\n")
        answer: dict[str, str] = json.loads(await reader.readline())
        return answer
    finally:
        writer.close()


async def _execute(node: EmulatedNode, command: dict[str, Any]) -> None:
    do = command.pop("do")
    if do in {"next", "set", "clear"}:
        getattr(node.faults, do)(**command)
    elif do in {"refuse", "accept", "kill", "revive"}:
        await getattr(node, do)(**command)
    elif do == "loading":
        node.loading = bool(command["on"])
    else:
        raise ValueError(f"no command {do!r}")
