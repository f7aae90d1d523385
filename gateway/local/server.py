"""llama.cpp servers of this machine as child processes, and the fleet of them.

Each is the embedded server or a llama-server binary, with a command line, a port and a log. Both
are started through `gateway.local.launch`, which pins them and ends them with their parent.

`async with LocalFleet(specs, log_folder) as fleet:` waits until every server is ready. A server
that exits later is restarted on its port, after a backoff that doubles while it keeps exiting.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Self

import httpx

import gateway
from gateway.config.inventory import STARTED_BY, UP
from gateway.local import LocalFleetError, ServerStartError
from gateway.local.cache import cache_folder
from gateway.local.embedded import batch_sizes, openmp_folder

MIB = 1 << 20
HOST = "127.0.0.1"  # of all servers
BINARY_NAME = "llama-server"
# How a model that was not made for embeddings makes them; without any, a server refuses texts.
MEAN = "mean"
HELP_TIMEOUT = 30.0  # seconds for --help, and for --version
VERSION_PATTERN = re.compile(r"^version: (.+)$", re.MULTILINE)
FLAG_PATTERN = re.compile(r"(?<![\w-])(--?[a-z][a-z0-9-]*)")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One llama.cpp server to start."""

    name: str
    model: Path
    alias: str  # the model's name as the server reports it
    slots: int
    context: int  # tokens of one slot
    threads: int
    numa_node: int  # the node that it is planned for
    cpus: tuple[int, ...] | None = None  # None: any
    memory_node: int | None = None  # None: any
    no_mmap: bool = False
    mlock: bool = False
    prompt_cache_bytes: int = 0  # of evicted prompts
    embedding: bool = False
    own_pooling: bool = False  # the model says how its embeddings are made
    batch: int | None = None  # tokens of one step; None: by its context
    micro_batch: int | None = None  # tokens of one computation
    is_router: bool = False
    """`model` is a preset file, whose models a llama-server loads on demand (`ModelFolder`)."""
    memory: int | None = None  # that its host has for these models, in bytes


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A llama-server, the flags that its own help lists, and its version with the build."""

    path: Path
    flags: frozenset[str]
    version: str | None = None


def find_binary(named: Path | None, search_path: str | None = None) -> ServerBinary | None:
    """Find the llama-server named, else the one on PATH, else None for the embedded server.

    Its `--help` is read for the flags, and its `--version`. Raises LocalFleetError when the named
    one is no program, or when the help is not a llama-server's.
    """
    found = shutil.which(str(named) if named else BINARY_NAME, path=search_path)
    if found is None:
        if named is None:
            return None
        raise LocalFleetError(f"{named}: no such program; name a llama-server with --server-bin")
    path = Path(found).absolute()
    try:
        status, help_text = _output(path, "--help")
        flags = frozenset(FLAG_PATTERN.findall(help_text))
        if not {"--model", "--port", "--parallel"} <= flags:
            raise LocalFleetError(
                f"{path}: its --help (exit status {status}) is not a llama-server's; name "
                "one with --server-bin, or take it off PATH to have the embedded server used"
            )
        version = VERSION_PATTERN.search(_output(path, "--version")[1])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalFleetError(f"{path}: {error}; it must be a llama-server") from error
    return ServerBinary(path, flags, version[1] if version else None)


def _output(program: Path, flag: str) -> tuple[int, str]:
    """Exit status and output of a program with one flag. Raises OSError and TimeoutExpired."""
    done = subprocess.run(
        [str(program), flag],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=HELP_TIMEOUT,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


def server_command(
    spec: ServerSpec, port: int, *, parent: int, binary: ServerBinary | None = None
) -> list[str]:
    """Return the command of a server. It dies with the process `parent`, which must start it."""
    launch = [sys.executable, "-P", "-m", "gateway.local.launch", "--parent", str(parent)]
    if spec.cpus is not None:
        launch += ["--cpus", ",".join(map(str, spec.cpus))]
    if spec.memory_node is not None:
        launch += ["--memory-node", str(spec.memory_node)]
    if spec.mlock:
        launch.append("--mlock")
    return [*launch, "--", *_server(spec, port, binary)]


def server_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which a server finds this package and the OpenMP runtime.

    Raises OSError when the cache folder must be written for that, and can't be.
    """
    result = dict(os.environ if env is None else env)
    root = str(Path(gateway.__file__).parent.parent)
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [root, result.get("PYTHONPATH")]))
    if openmp := openmp_folder(cache_folder(result)):
        folders = [result.get("LD_LIBRARY_PATH"), str(openmp)]
        result["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return result


# The embedded server's names of flags, and those of the others that it has.
_EMBEDDED = {"-m": "--model", "-np": "--slots", "-c": "--ctx", "-t": "--threads"}
_EMBEDDED |= {"-b": "--batch", "-ub": "--ubatch"}
_EMBEDDED_FLAGS = frozenset({"--cache-ram", "--embedding", "--mlock", "--no-mmap", "--pooling"})


def _server(spec: ServerSpec, port: int, binary: ServerBinary | None) -> list[str]:
    batch, micro_batch = batch_sizes(spec.context, embedding=spec.embedding)
    sizes = {"-t": spec.threads, "-tb": spec.threads}
    sizes |= {"-b": spec.batch or batch, "-ub": spec.micro_batch or micro_batch}
    if spec.is_router:  # slots and context stand in the preset, of which flags would take the place
        served = {"--models-preset": str(spec.model), "--models-max": "0"}
    else:
        served = {"-m": str(spec.model), "--alias": spec.alias}
        sizes = {"-np": spec.slots, "-c": spec.slots * spec.context, **sizes}
    given = {**served, "--host": HOST, "--port": port, **sizes}
    if binary is None:
        program, flags = [sys.executable, "-P", "-m", "gateway", "node-server"], _EMBEDDED_FLAGS
        del given["-tb"]
        given = {_EMBEDDED.get(flag, flag): value for flag, value in given.items()}
    else:
        program, flags = [str(binary.path)], binary.flags
    command = [*program, *(str(word) for pair in given.items() for word in pair)]
    # Flags change between versions: of each row the first one that this binary has.
    rows: list[list[list[str]]] = [
        [["--metrics"]],
        [["--slots"]],
        [["--jinja"]],
        [["--no-ui"], ["--no-webui"]],
        [["--cors-origins", f"http://{HOST}:{port}"]],
    ]
    if not spec.is_router:
        rows.append([["--cache-ram", str(spec.prompt_cache_bytes // MIB)]])
    if spec.mlock and "--load-mode" in flags:
        rows.append([["--load-mode", "mlock" if spec.no_mmap else "mmap+mlock"]])
    elif spec.mlock:
        rows += [[["--mlock"]], [["--no-mmap"]] if spec.no_mmap else []]
    elif spec.no_mmap:
        rows.append([["--load-mode", "none"], ["--no-mmap"]])
    if spec.embedding:
        rows.append([["--embeddings"], ["--embedding"]])
        rows += [] if spec.own_pooling or spec.is_router else [[["--pooling", MEAN]]]
    for row in rows:
        command += next((words for words in row if words[0] in flags), [])
    return command


READY_POLL_INTERVAL = 0.1  # seconds between two health checks of a starting server
LOG_CHECK_INTERVAL = 10.0  # seconds between two checks of a log's size


@dataclass(slots=True, eq=False)
class ServerProcess:
    """The process of one spec, which may be started again after its end.

    It dies with the thread that starts it.
    """

    spec: ServerSpec
    port: int
    log: Path
    binary: ServerBinary | None
    clock: Callable[[], float]
    started_at: float = 0.0
    _process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Its address, which stays the same."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The PID of the process while it runs."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def start(self) -> None:
        """Start the process. Raises OSError when the log or the process can't be created."""
        self.started_at = self.clock()
        command = server_command(self.spec, self.port, parent=os.getpid(), binary=self.binary)
        with open_log(self.log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=server_environment(),
                # Ctrl-C must reach the gateway only, which drains before it ends its servers.
                start_new_session=True,
            )

    async def wait_until_ready(
        self, client: httpx.AsyncClient, timeout: float, on_loading: Callable[[], None]
    ) -> None:
        """Wait until `/health` gives 200; call `on_loading` once if it gives 503 first.

        Raises ServerStartError when the process ends, or is not ready after `timeout` seconds.
        """
        loading, problem = False, f"was not ready after {timeout:.0f} s"
        while self.clock() - self.started_at < timeout:
            if self.pid is None:
                problem = f"ended ({self.exit_description()}) before it was ready"
                break
            with suppress(httpx.HTTPError):
                status = (await client.get(f"{self.url}/health")).status_code
                if status == 200:
                    return
                if status == 503 and not loading:
                    loading = True
                    on_loading()
            await self._ended_within(READY_POLL_INTERVAL)
        lines = "".join(f"\n  {line}" for line in last_lines(self.log))
        raise ServerStartError(
            f"{self.spec.name}: the llama.cpp server {problem}; the end of its log {self.log}:"
            f"{lines or ' nothing'}"
        )

    async def wait(self) -> None:
        """Wait until the process has ended, and bound the size of its log meanwhile."""
        while not await self._ended_within(LOG_CHECK_INTERVAL):
            await asyncio.to_thread(truncate_log, self.log)

    async def stop(self, timeout: float) -> None:
        """End the process: SIGTERM, and SIGKILL after `timeout` seconds or when cancelled."""
        if self._process is None or self.pid is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await self._ended_within(timeout)
        finally:
            if self.pid is not None:
                with suppress(ProcessLookupError):
                    self._process.kill()
        await self._process.wait()

    def exit_description(self) -> str:
        """Describe how the process ended."""
        status = self._process.returncode if self._process else None
        if status is None:
            return "not started"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    async def _ended_within(self, limit: float) -> bool:
        if self._process is None:
            return True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), limit)
        return self._process.returncode is not None


BASE_PORT = 8081
MOST_PORTS_TRIED = 1000


def claim_port(host: str, port: int = 0) -> socket.socket:
    """Bind `port` (0: any free one) for a server that sets SO_REUSEADDR or SO_REUSEPORT.

    Raises OSError when the port is taken. The options are set after the bind: set before, the bind
    would succeed although another process has claimed the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    claim = socket.socket(family, socket.SOCK_STREAM)
    try:
        claim.bind((host, port))
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        claim.close()
        raise
    return claim


def claim_free_port(host: str, base: int = BASE_PORT) -> socket.socket:
    """Claim the first free port from `base` upwards, else any.

    Raises OSError when the host isn't an address of this machine.
    """
    for port in range(base, min(base + MOST_PORTS_TRIED, 65536)):
        try:
            return claim_port(host, port)
        except OSError as error:
            if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
                raise
    return claim_port(host)


def claimed_port(claim: socket.socket) -> int:
    """Return the number of a claimed port."""
    port: int = claim.getsockname()[1]
    return port


MOST_LOG_BYTES = 8 << 20  # of a log, and of the older one beside it
TAIL_BYTES = 64 << 10


def open_log(path: Path) -> BinaryIO:
    """Begin a new log; the log of the previous run stays as `<name>.1`.

    It is opened for appending, so that it can be truncated while a server writes to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(_older(path))
    return path.open("ab", buffering=0)


def truncate_log(path: Path, limit: int = MOST_LOG_BYTES) -> None:
    """Copy a log larger than `limit` bytes to `<name>.1`, and empty it.

    Lines written during the copy are lost.
    """
    if path.exists() and path.stat().st_size > limit:
        shutil.copyfile(path, _older(path))
        os.truncate(path, 0)


def last_lines(path: Path, count: int = 20) -> list[str]:
    """Return the last lines of a log; none where there is no log."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-count:]
    return []


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


# The fleet.

START_TIMEOUT = 600.0  # seconds; a large model on a slow disk takes minutes
STOP_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL
HEALTH_TIMEOUT = 2.0  # seconds for a response
FIRST_BACKOFF = 0.5  # seconds before a restart
LONGEST_BACKOFF = 30.0
BACKOFF_RESET_AFTER = 60.0  # seconds of uptime after which the backoff begins anew


class ServerEvent(NamedTuple):
    """What happened to a server. One that exited will be restarted."""

    name: str
    kind: Literal["started", "loading", "ready", "exited"]
    detail: str = ""  # started: its address; exited: how, such as `killed by SIGKILL`
    seconds: float = 0.0  # ready: since its process was started; exited: until its restart


def inventory_entry(spec: ServerSpec, url: str) -> dict[str, Any]:
    """Return a server as a node of an inventory.

    All have one `host`, since they fail together with this machine, but for routers that are bound
    to a NUMA node: its memory is what their models share.
    """
    labels = {"numa": str(spec.numa_node), STARTED_BY: UP}
    entry: dict[str, Any] = {"name": spec.name, "url": url, "host": "localhost", "labels": labels}
    if spec.memory is not None:
        entry["memory"] = spec.memory
        if spec.memory_node is not None:
            entry["host"] = f"localhost-numa{spec.memory_node}"
    return entry


def restart_backoff(last: float | None, uptime: float) -> float:
    """Return the seconds before a restart, after a backoff of `last` and `uptime` seconds."""
    if last is None or uptime >= BACKOFF_RESET_AFTER:
        return FIRST_BACKOFF
    return min(last * 2, LONGEST_BACKOFF)


@dataclass(slots=True, eq=False)
class LocalFleet:
    """Runs one process per spec while its context is open.

    The processes die with the thread that entered the context, so enter it in the main thread.
    Ports are the first free ones from `base_port` (0: any). Timeouts are in seconds.
    """

    specs: Sequence[ServerSpec]
    log_folder: Path
    _: KW_ONLY
    binary: ServerBinary | None = None
    on_event: Callable[[ServerEvent], None] = lambda _: None
    base_port: int = BASE_PORT
    start_timeout: float = START_TIMEOUT
    stop_timeout: float = STOP_TIMEOUT
    clock: Callable[[], float] = time.monotonic
    servers: list[ServerProcess] = field(default_factory=list)
    _claims: list[socket.socket] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _client: httpx.AsyncClient = field(init=False)

    async def __aenter__(self) -> Self:
        """Start all servers and wait until each is ready.

        Raises ServerStartError when one ends before that or takes longer than `start_timeout`, and
        OSError when the log folder can't be written or no port is free.
        """
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=HEALTH_TIMEOUT, trust_env=False, limits=limits)
        try:
            for spec in self.specs:
                self._claims.append(claim_free_port(HOST, self.base_port))
                port = claimed_port(self._claims[-1])
                # Two gateways of one user share the folder, but never a port.
                log = self.log_folder / f"{spec.name}-{port}.log"
                self.servers.append(ServerProcess(spec, port, log, self.binary, self.clock))
            self._tasks = [asyncio.create_task(self._start(server)) for server in self.servers]
            await asyncio.gather(*self._tasks)
            self._tasks = [asyncio.create_task(self._supervise(server)) for server in self.servers]
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all servers: SIGTERM, and SIGKILL to those that take too long."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop(self.stop_timeout) for server in self.servers))
        await self._client.aclose()
        for claim in self._claims:
            claim.close()

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' addresses, which stay the same after a restart."""
        return tuple(server.url for server in self.servers)

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The PIDs of the servers; None for one that is down."""
        return tuple(server.pid for server in self.servers)

    def inventory(self) -> list[dict[str, Any]]:
        """Return the servers as nodes of an inventory, in the form of `config/nodes.yaml`."""
        return [inventory_entry(server.spec, server.url) for server in self.servers]

    async def _start(self, server: ServerProcess) -> None:
        name = server.spec.name
        await server.start()
        self.on_event(ServerEvent(name, "started", server.url))
        await server.wait_until_ready(
            self._client, self.start_timeout, lambda: self.on_event(ServerEvent(name, "loading"))
        )
        seconds = self.clock() - server.started_at
        self.on_event(ServerEvent(name, "ready", seconds=seconds))

    async def _supervise(self, server: ServerProcess) -> None:
        backoff: float | None = None
        while True:
            await server.wait()
            backoff = restart_backoff(backoff, self.clock() - server.started_at)
            how = server.exit_description()
            self.on_event(ServerEvent(server.spec.name, "exited", how, backoff))
            await asyncio.sleep(backoff)
            try:
                await self._start(server)
            except (ServerStartError, OSError):
                await server.stop(self.stop_timeout)
