"""Runs the hooks that start and stop nodes, limited in time and output, with secrets masked."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpcore  # noqa: F401 - httpx would import it on the event loop: 30 ms
import httpx

from gateway.config.autoscaling import Hook
from gateway.config.inventory import NodeSpec

MOST_OUTPUT = 4096
"""Bytes that are kept of a command's output (the last ones) or of an HTTP answer (the first)."""

KILL_AFTER = 2.0
"""Seconds between SIGTERM and SIGKILL."""

MASK = "****"


@dataclass(frozen=True, slots=True)
class HookResult:
    """How a hook ended; `detail` is for an operator."""

    outcome: str
    """`ok`, `failed`, `timeout` or `error`."""
    detail: str
    seconds: float
    output: str = ""

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.outcome == "ok"


async def run_hook(
    hook: Hook,
    spec: NodeSpec,
    timeout: float,
    clock: Callable[[], float],
    *,
    kill_after: float = KILL_AFTER,
) -> HookResult:
    """Run it to its end, or for `timeout` seconds. Cancelled, it leaves no process behind.

    A command that does not end gets SIGTERM, and SIGKILL `kill_after` seconds later.
    """
    began = clock()
    output = bytearray()
    try:
        async with asyncio.timeout(timeout):
            if hook.url is None:
                outcome, detail = await _run(hook.command, spec, output, kill_after)
            else:
                outcome, detail = await _call(hook, output)
    except TimeoutError:
        outcome, detail = "timeout", f"it had not ended after {timeout:g} s and was stopped"
    except (OSError, ValueError) as error:
        outcome, detail = "error", f"it can't be run: {_why(error)}"
    secrets = [secret.get_secret_value() for secret in hook.secrets.values()]
    if spec.api_key is not None:
        secrets.append(spec.api_key.get_secret_value())
    return HookResult(outcome, _shown(detail, secrets), clock() - began, _shown(output, secrets))


async def _run(
    command: Iterable[str], spec: NodeSpec, output: bytearray, kill_after: float
) -> tuple[str, str]:
    """Run a command in a session of its own, so that all its processes can be ended.

    The output is read from a pipe that this function closes: a server that the command leaves
    behind may keep the other end open.
    """
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    try:
        os.set_blocking(reader, False)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                start_new_session=True,
                env={
                    **os.environ,
                    "LLAMA_GATEWAY_NODE": spec.name,
                    "LLAMA_GATEWAY_NODE_URL": spec.url,
                },
            )
        finally:
            os.close(writer)
        loop.add_reader(reader, _keep_last, loop, reader, output)
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            await _kill(process, kill_after)
            raise
        finally:
            _keep_last(loop, reader, output)
            loop.remove_reader(reader)
    finally:
        os.close(reader)
    if status == 0:
        return "ok", "exit status 0"
    what = f"signal {-status}" if status < 0 else f"exit status {status}"
    return "failed", f"it ended with {what}"


def _keep_last(loop: asyncio.AbstractEventLoop, reader: int, output: bytearray) -> None:
    """Read the output that has come, up to a limit for each call, and keep its end."""
    try:
        part = os.read(reader, 1 << 16)
    except BlockingIOError:
        return
    if not part:
        loop.remove_reader(reader)
    output += part
    del output[:-MOST_OUTPUT]


async def _kill(process: asyncio.subprocess.Process, kill_after: float) -> None:
    """End its whole session, within twice `kill_after` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), kill_after)
            break
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _call(hook: Hook, output: bytearray) -> tuple[str, str]:
    """Make an HTTP call; redirects are not followed, since they would take the secrets along."""
    assert hook.url is not None
    headers = {
        **hook.headers,
        **{name: secret.get_secret_value() for name, secret in hook.secrets.items()},
    }
    parts = urlsplit(hook.url)
    call = f"{hook.method} {parts.scheme}://{parts.netloc}{parts.path}"
    # Reading the authorities takes 15 ms.
    context = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
    try:
        async with (
            httpx.AsyncClient(timeout=None, trust_env=False, verify=context) as client,  # noqa: S113 - the caller's
            client.stream(hook.method, hook.url, headers=headers, content=hook.body) as response,
        ):
            async for part in response.aiter_bytes():
                output += part
                if len(output) > MOST_OUTPUT:
                    del output[MOST_OUTPUT:]
                    break
            status = response.status_code
    except httpx.HTTPError as error:
        return "error", f"{call}: {_why(error)}"
    if response.is_success:
        return "ok", f"{call} answered {status}"
    return "failed", f"{call} answered {status}"


def _shown(text: str | bytearray, secrets: Iterable[str]) -> str:
    """Printable, on one line, without secrets."""
    if isinstance(text, bytearray):
        text = text.decode("utf-8", "replace")
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    return " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )


def _why(error: Exception) -> str:
    return str(error).strip()[:200] or type(error).__name__
