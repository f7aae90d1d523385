"""Real llama.cpp servers for tests: the demo model in processes of their own on free ports.

    with demo_servers(2) as urls: ...
    async with start_demo_servers(2) as urls: ...

It is the wheel's server, or, with `pytest --llama-server binary`, the program that
`make llama-server` fetches (`tests/server_kind.py`).

Both may be used in any number of pytest workers at once. The servers die with the process
that started them (on Linux with its thread: start them from the main one).
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gateway.local.demo_model import DemoSize, ensure_demo_model
from gateway.local.embedded import PROMPT_CACHE_MIB
from gateway.local.memory import memlock_limit
from gateway.local.server import (
    MIB,
    ServerBinary,
    ServerSpec,
    find_binary,
    server_command,
    server_environment,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

START_LIMIT = 60.0  # seconds until a server must answer
STOP_LIMIT = 60.0
LOG_SHOWN = 4000  # characters
LOCKED = 4 << 20  # bytes that a server of the small demo model must be allowed to lock
BINARY_VARIABLE = "TESTS_LLAMA_SERVER"
"""The environment variable that names the binary; unset: the wheel's server."""
# Both say where they listen once they have loaded their model.
_LISTENING = re.compile(r"listening on (http://\S+)\n")
_AS_BINARY = {"--exact": ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")}


@functools.cache
def server_binary() -> ServerBinary | None:
    """The llama-server that takes the place of the wheel's server; None: none does."""
    named = os.environ.get(BINARY_VARIABLE)
    return find_binary(Path(named)) if named else None


def server_path() -> str:
    """A PATH by which commands find the server of this run, and no other one of this machine."""
    binary = server_binary()
    return "/nowhere" if binary is None else str(binary.path.parent)


def may_lock() -> bool:
    """Whether this machine lets a server lock the demo model in memory."""
    limit = memlock_limit()
    return limit is None or limit >= LOCKED


@functools.cache
def demo_model(size: DemoSize = "small") -> Path:
    """The demo model in a folder of this process, removed at its end."""
    return ensure_demo_model(_folder(), size)


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="llama-gateway-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@dataclass
class DemoServer:
    """One running server."""

    process: subprocess.Popen[bytes]
    log: IO[bytes] = field(repr=False)
    url: str = ""

    @property
    def pid(self) -> int:
        """The id of the server's process."""
        return self.process.pid

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(STOP_LIMIT)

    def logged(self) -> str:
        """What the server has logged so far."""
        # Not by seek and read: both share the file position at which the server writes.
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).decode(errors="replace")

    def log_end(self) -> str:
        """The end of what the server logged."""
        return self.logged()[-LOG_SHOWN:]

    def log_with(self, words: str, limit: float = START_LIMIT) -> str:
        """All that it logged, once `words` stand there: a thread writes it, behind the answers."""
        until = time.monotonic() + limit
        while words not in self.logged():
            assert time.monotonic() < until, f"no '{words}' in:\n{self.log_end()}"
            time.sleep(0.01)
        return self.logged()


def spawn_demo_server(
    *,
    slots: int = 2,
    context: int = 4096,
    embedding: bool = False,
    size: DemoSize = "small",
    model: Path | None = None,
    threads: int = 1,
    host: str = "127.0.0.1",
    port: int = 0,
    alias: str = "demo",
    extra: tuple[str, ...] = (),
    binary: ServerBinary | None = None,
) -> DemoServer:
    """Start a server without waiting for it; `context` is tokens of one slot.

    `model`: this file in place of the demo model.

    `binary`: this program, whatever the kind of server of this run.
    """
    binary = binary or server_binary()
    spec = ServerSpec(
        name="demo",
        model=model or demo_model(size),
        alias=alias,
        slots=slots,
        context=context,
        threads=threads,
        numa_node=0,
        prompt_cache_bytes=PROMPT_CACHE_MIB * MIB,
        embedding=embedding,
    )
    command = server_command(spec, port, parent=os.getpid(), binary=binary)
    for word in ("--host", host, *extra):  # the last one counts
        command += (word,) if binary is None else _AS_BINARY.get(word, (word,))
    return _spawned(command)


def _spawned(command: Sequence[str]) -> DemoServer:
    log = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=server_environment()
    )
    return DemoServer(process, log)


def spawn_router(
    models: Path, *, slots: int = 2, context: int = 4096, port: int = 0, extra: tuple[str, ...] = ()
) -> DemoServer:
    """Start a router without waiting for it: over a folder of models, or of a preset file."""
    binary = server_binary()
    assert binary is not None, "mark the test binary_only"
    source = "--models-preset" if models.suffix == ".ini" else "--models-dir"
    sizes = () if models.suffix == ".ini" else ("-np", str(slots), "-c", str(slots * context))
    return _spawned(
        [
            *(sys.executable, "-P", "-m", "gateway.local.launch", "--parent", str(os.getpid())),
            *("--", str(binary.path), source, str(models), "--port", str(port), "--metrics"),
            *(*sizes, "-t", "1", *extra),
        ]
    )


def stop_router(router: DemoServer) -> None:
    """End a router: killed, it would leave its models' servers behind for a while."""
    router.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        router.process.wait(STOP_LIMIT)
    stop_demo_server(router)


@contextmanager
def running_router(models: Path, **options: Any) -> Iterator[DemoServer]:
    """A router that answers, which the wheel does not have; `options`: of `spawn_router`."""
    router = spawn_router(models, **options)
    try:
        wait_for_demo_server(router)
        yield router
    finally:
        stop_router(router)


def wait_for_demo_server(server: DemoServer, limit: float = START_LIMIT) -> str:
    """Wait until the server logs its address; AssertionError with its log if it does not."""
    until = time.monotonic() + limit
    while (found := _LISTENING.search(server.logged())) is None:
        assert server.process.poll() is None, f"the server ended:\n{server.log_end()}"
        assert time.monotonic() < until, f"no server after {limit} s:\n{server.log_end()}"
        time.sleep(0.01)
    server.url = found[1]
    return server.url


def stop_demo_server(server: DemoServer) -> None:
    """End the server, whatever state it is in."""
    server.kill()
    server.log.close()


@contextmanager
def running_demo_servers(n: int = 1, **options: Any) -> Iterator[list[DemoServer]]:
    """`n` servers that answer, started side by side; `options` are those of `spawn_demo_server`."""
    servers: list[DemoServer] = []
    try:
        servers.extend(spawn_demo_server(**options) for _ in range(n))
        for server in servers:
            wait_for_demo_server(server)
        yield servers
    finally:
        for server in servers:
            stop_demo_server(server)


@contextmanager
def demo_servers(n: int = 1, **options: Any) -> Iterator[list[str]]:
    """The base URLs of `n` servers that answer."""
    with running_demo_servers(n, **options) as servers:
        yield [server.url for server in servers]


@asynccontextmanager
async def start_demo_servers(n: int = 1, **options: Any) -> AsyncIterator[list[str]]:
    """The same for asynchronous tests; the event loop is not blocked."""
    servers: list[DemoServer] = []
    try:
        servers.extend(spawn_demo_server(**options) for _ in range(n))
        yield [await asyncio.to_thread(wait_for_demo_server, server) for server in servers]
    finally:
        for server in servers:
            stop_demo_server(server)
