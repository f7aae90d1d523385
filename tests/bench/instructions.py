"""User instructions for each request, counted by callgrind: `python -m tests.bench.instructions`.

How they are counted: docs/performance.md. Each checkout serves with its own `.venv`; they are
counted alternately, and the minimum of each round's counts is compared. Of three counts of as many
requests the least is taken: what other work adds, a checkpoint of SQLite for one, comes in bursts.

    python -m tests.bench.instructions                     this checkout
    python -m tests.bench.instructions ../before .         two, and the second's ratio to the first
    python -m tests.bench.instructions .+key .+key-limits  with a key, and with one of every limit
    python -m tests.bench.instructions .+off .             without a store, and with its ledger
    python -m tests.bench.instructions .+silent .+telemetry .+telemetry-all
                                       without telemetry, with 5 % of traces, and with all traces

Exit status: 0 counted; 1 some answer was wrong or a gateway did not start; 2 usage error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gateway.callers.keys import hash_key
from gateway.local.server import claim_port, claimed_port
from tests.bench.load import Address, Load, LoadConnection
from tests.bench.machine import positive
from tests.bench.node_replies import MODEL
from tests.bench.scenarios import chat_load, plain_load, stream_load
from tests.bench.targets import HOST, Plan, gateway, status_of
from tests.bench.upstream import Script, Upstream

WARM_UP = 300
"""Requests before the counted ones: they fill caches, and CPython specialises its code."""
START_LIMIT = 900.0
LIMIT = 600.0  # seconds; valgrind slows the gateway down some fifty times
TOKENS = 20
LONG_TOKENS = 120
"""Tokens of a longer stream: what it takes more than the short one is the cost of its chunks."""
STREAMS = 25
"""Streams of either length that are counted, whose chunks come one by one. The ledger writes their
rows at once."""
WINDOWS = 3  # counts of as many requests, of which the least counts
WINDOW_SECONDS = 1.0
"""Between the last request and the count: log and store have done their part by then."""

RATE = 100  # requests a second by which work of the clock is shared out
FLUSH_ROWS = RATE // 4  # rows that the ledger writes at once at that rate
DEFERRED = 2 * RATE // 20
"""Deferred work that is done at once at that rate: two pieces for each request, 20 times a
second."""
SETTLE_SECONDS = 5.0
"""Seconds after the last request of an idle gateway: its row is written by then. So long also after
clocks have been stopped: most waits are over by then."""
IDLE_SECONDS = 30.0  # seconds for which an idle gateway is counted
STOPPED = 1e6
TIMERS = {
    "gateway.events": {"DEFER_SECONDS": STOPPED, "MOST_DEFERRED": DEFERRED},
    "gateway.callers.ledger": {
        **dict.fromkeys(("FLUSH_SECONDS", "RECOVERY_SECONDS", "HEARTBEAT_SECONDS"), STOPPED),
        "JOURNALED_WITHIN": 10 * STOPPED,  # the time until the next flush is subtracted
    },
    "gateway.schedule.lease_service": {"SPEED_SAMPLE_INTERVAL": 0.0},  # each request is a sample
}
"""Constants by which work is done so many times a second, and what they are while requests are
counted."""
TIMER_DEFAULTS = {
    "gateway.store.store": ("Store", "check_seconds", "look_seconds"),
    "gateway.transport.connection": ("TurnLimit", "seconds"),
}  # the same, of constants that are the defaults of a class
SHORTEST_STOPPED = 0.1  # seconds from which on sleeps and time limits never end
STOP_CLOCKS = f"""
import asyncio, contextlib, importlib, signal, sys
sleep, timeout = asyncio.sleep, asyncio.timeout
def stop(*_):
    asyncio.sleep = lambda delay, *result: sleep(
        delay if delay < {SHORTEST_STOPPED} else {STOPPED}, *result)
    asyncio.timeout = lambda delay: timeout(
        delay if delay is not None and delay < {SHORTEST_STOPPED} else None)
    with contextlib.suppress(ImportError):
        from gateway.store.store import StoreWorker
        rest = StoreWorker._rest
        StoreWorker._rest = lambda worker, seconds: rest(
            worker, seconds if seconds < {SHORTEST_STOPPED} else {STOPPED})
signal.signal(signal.SIGUSR1, stop)  # by then the gateway is ready, for which it must wait
for module, values in {TIMERS!r}.items():
    with contextlib.suppress(ImportError):  # a checkout may be without it
        found = importlib.import_module(module)
        for name in values.keys() & vars(found).keys():
            setattr(found, name, values[name])
for module, (owner, *names) in {TIMER_DEFAULTS!r}.items():
    with contextlib.suppress(ImportError, AttributeError):
        defaults = getattr(importlib.import_module(module), owner).__init__.__kwdefaults__
        defaults.update(dict.fromkeys(defaults.keys() & names, {STOPPED}))
with contextlib.suppress(ImportError):
    from gateway.callers.ledger import Ledger
    make = Ledger.__init__
    Ledger.__init__ = lambda self, *values, **named: make(
        self, *values, flush_rows={FLUSH_ROWS}, **named)
"""
LAUNCH = """
import sys
from gateway.cli import main
sys.argv[0] = "llama-gateway"
main()
"""


KEY = hash_key("lg_bench_0123456789abcdefghijklmnopqrstuvwxyzABCDEFG")

EVERY_LIMIT = {
    **dict.fromkeys(("rpm", "tpm", "tokens_per_day"), 1_000_000_000),
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "concurrency"), 100_000),
    "budget": "1000000/month",
    "max_class": "normal",
    "models": [MODEL],
}
TELEMETRY = {"silent": 0.0, "telemetry": 0.05, "telemetry-all": 1.0}
"""Shares of requests that are traced. `silent`: no telemetry but the metrics, which are always on;
else also an access log, OpenTelemetry's names, metrics of nodes, and traces."""

TRACE_SECONDS = 5  # seconds whose traces are one message to the collector

EVEN_TRACES = """
import itertools
from gateway.watch.request_tracing import TraceExporter
from gateway.watch.request_tracing import Sampler
TraceExporter.__init__.__kwdefaults__.update(batch_seconds={seconds}, batch_traces={traces})
draws = itertools.cycle([number / 20 for number in range(20)])
make_sampler = Sampler.__init__
def make_even_sampler(self, *values, **named):
    make_sampler(self, *values, **{{**named, "draw": lambda: next(draws)}})
Sampler.__init__ = make_even_sampler
"""
"""Every twentieth request is traced, or every one, and each message has as many traces as it would
at that rate, 250 at most: `--requests 500` counts whole messages."""


CALLERS = ("", "+off", "+key", "+key-limits", *(f"+{name}" for name in TELEMETRY))


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkout, and who sends the requests."""

    checkout: Path
    caller: str = ""
    """Empty: nobody known; `off`: the same without a store; `key`: the holder of a key;
    `key-limits`: one of a key with every limit; or one of `TELEMETRY`, nobody known."""
    python: str = ".venv/bin/python"  # the interpreter that serves, by its path from the checkout

    @property
    def traced_share(self) -> float:
        return TELEMETRY.get(self.caller, 0.0)

    def launcher(self) -> str:
        if not self.traced_share:
            return STOP_CLOCKS + LAUNCH
        traces = min(250, round(RATE * TRACE_SECONDS * self.traced_share))
        return STOP_CLOCKS + EVEN_TRACES.format(seconds=STOPPED, traces=traces) + LAUNCH

    def settings(self, collector: int) -> dict[str, Any]:
        """The settings that the caller needs; `collector`: the port of one for traces."""
        if self.caller == "silent":
            return {"logging": {"access": False}, "telemetry": {"node_metrics": False}}
        if self.traced_share:
            url = f"http://{HOST}:{collector}"
            traces = {"endpoint": url, "share": self.traced_share, "beyond_share": 0}
            return {"telemetry": {"gen_ai_metrics": True, "traces": traces}}
        if self.caller == "off":
            return {"store": {"url": "off"}}
        if not self.caller:
            return {}
        key: dict[str, Any] = {"id": KEY.id, "sha256": KEY.sha256}
        return {"keys": [key if self.caller == "key" else key | {"limits": EVERY_LIMIT}]}

    def send(self, load: Load) -> Load:
        """The load, sent by the caller."""
        if self.caller in {"key", "key-limits"}:
            lines = f"Authorization: Bearer {KEY.text}\r\n".encode()
            head, _, body = load.request.partition(b"\r\n\r\n")
            load.request = head + b"\r\n" + lines + b"\r\n" + body
        return load


class InstructionScenario(NamedTuple):
    """One scenario: a load over one connection."""

    option: str
    name: str
    load: Callable[[Address], Load]


class ChunkCountingConnection(LoadConnection):
    """Counts the HTTP chunks that have arrived: the gateway writes one for each that it reads.

    With each one it asks the node for the next, so that each is read alone.
    """

    node: Upstream
    chunks = 0

    def on_chunk_header(self) -> None:
        type(self).chunks += 1
        for connection in self.node.connections:
            if connection.stream:
                connection.stream.resume()


_STREAM, _CHAT = partial(stream_load, tokens=TOKENS), partial(chat_load, tokens=TOKENS)
SCENARIOS = (
    InstructionScenario("embedding", "plain embeddings", plain_load),
    InstructionScenario("stream", f"chat stream of {TOKENS} tokens", _STREAM),
    InstructionScenario("plain", f"plain chat of {TOKENS} tokens", _CHAT),
)

COUNTED = (*(scenario.option for scenario in SCENARIOS), "chunk", "idle")
CHUNK = "one more chunk of a stream"
IDLE = "a second of an idle gateway"
OF_LOOP = ", event loop's thread"
"""Ends the name of a count of that thread alone; the others are of all threads."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("checkouts", nargs="*", type=_subject, default=[Subject(Path())])
    add("--only", nargs="+", choices=COUNTED, default=COUNTED, help="what is counted")
    requests = "in each scenario: so many, and twice as many"
    add("--requests", type=positive, default=100, help=requests)
    add("--rounds", type=positive, default=3, help="the minimum of them is compared")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed (apt-get install valgrind)")
    for subject in options.checkouts:
        if not (subject.checkout / subject.python).exists():
            parser.error(f"{subject.checkout} has no .venv (make install there)")
    rows: list[list[dict[str, int]]] = [[] for _ in options.checkouts]
    for _ in range(options.rounds):
        for row, subject in zip(rows, options.checkouts, strict=True):
            try:
                row.append(asyncio.run(count(subject, options.requests, options.only)))
            except RuntimeError as error:
                print(f"{subject.checkout}: {error}", file=sys.stderr)
                return 1
    print(*report(rows), sep="\n")
    return 0


def report(rows: Sequence[Sequence[dict[str, int]]]) -> Iterator[str]:
    """Lines about the counts of each subject's rounds, with ratios to the first subject's."""
    found = rows[0][0]
    names = [scenario.name for scenario in SCENARIOS if scenario.name in found]
    for name in found:
        counts = [[counted[name] for counted in row] for row in rows]
        spans = [f"{min(some):,} to {max(some):,}" for some in counts]
        if not name.startswith(IDLE):
            ratios = [min(some) / min(counts[0]) for some in counts]
            spans = [f"{span} ({ratio:.3f} x)" for span, ratio in zip(spans, ratios, strict=True)]
        yield f"{name}: {', '.join(spans)}"
    if IDLE not in found:
        return
    yield f"With their share of the work by the clock, at {RATE} requests a second:"
    idle = [min(counted[IDLE] for counted in row) for row in rows]
    for name in names:
        sums = [
            min(counted[name] for counted in row) + by_clock // RATE
            for row, by_clock in zip(rows, idle, strict=True)
        ]
        yield f"{name}: {', '.join(f'{one:,} ({one / sums[0]:.3f} x)' for one in sums)}"


def _subject(text: str) -> Subject:
    checkout, plus, caller = text.partition("+")
    if plus + caller not in CALLERS:
        words = f"behind the checkout: {', '.join(CALLERS[1:])} or nothing"
        raise argparse.ArgumentTypeError(words)
    return Subject(Path(checkout), caller)


async def count(
    subject: Subject, requests: int = 100, only: Collection[str] = COUNTED
) -> dict[str, int]:
    """Instructions for each request, by scenario, and of an idle second, of all threads and of the
    event loop's. Raises: RuntimeError.
    """
    found: dict[str, Instructions] = {}
    if set(only) != {"idle"}:
        async with _served(subject, subject.launcher()) as served:
            served.process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(SETTLE_SECONDS)
            for one in SCENARIOS:
                if one.option in only:
                    load = subject.send(one.load(served.address))
                    found[one.name] = await _count_request(load, served, requests)
            if "chunk" in only:
                found[CHUNK] = await _count_chunk(subject, served)
    if "idle" in only:
        async with _served(subject, LAUNCH) as served:
            found[IDLE] = await _count_idle(subject.send(plain_load(served.address)), served)
    return {
        f"{name}{suffix}": number
        for name, one in found.items()
        for suffix, number in (("", one.threads), (OF_LOOP, one.loop))
    }


@dataclass(frozen=True, slots=True)
class Served:
    address: Address
    node: Upstream
    process: subprocess.Popen[bytes]
    folder: Path


@asynccontextmanager
async def _served(subject: Subject, launcher: str) -> AsyncIterator[Served]:
    folder = Path(tempfile.mkdtemp(prefix="llama-gateway-instructions-"))
    async with (
        Upstream(1, 64, Script(tokens=TOKENS, interval=0.0, burst=TOKENS)) as node,
        await asyncio.start_server(_collect, HOST, 0) as collector,
    ):
        collector_port = collector.sockets[0].getsockname()[1]
        # Held all the time: the gateway may need minutes until it listens.
        with claim_port(HOST) as claim:
            address = (HOST, claimed_port(claim))
            ports = (node.ports[0], collector_port)
            process = _start_gateway(subject, launcher, folder, address, *ports)
            try:
                async with asyncio.timeout(START_LIMIT):  # 401: it knows its keys
                    while await status_of(address, "/v1/models") not in {200, 401}:
                        if process.poll() is not None:
                            raise RuntimeError(f"the gateway ended; see {folder}/log")
                        await asyncio.sleep(0.2)
                yield Served(address, node, process, folder)
            finally:
                process.kill()  # it would wait by clocks that stand still
                process.wait()


async def _collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take traces, and let them be."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            assert length is not None
            await reader.readexactly(int(length[1]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    writer.close()


def _start_gateway(
    subject: Subject, launcher: str, folder: Path, address: Address, node: int, collector: int
) -> subprocess.Popen[bytes]:
    # In a folder of their own: the gateway watches theirs, and would see each line of the log.
    watched = folder / "config"
    watched.mkdir()
    # Probes and the watching of files must not count.
    settings = {"health": {"interval": 3600}} | subject.settings(collector)
    served = gateway("", Plan(watched, address[1], (node,)), settings)
    command = [
        *("setpriv", "--pdeathsig", "TERM", "valgrind", "--tool=callgrind"),
        *(f"--callgrind-out-file={folder}/counted", "--separate-threads=yes"),
        *(subject.python, "-c", launcher, *served[1:]),
    ]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=subject.checkout.resolve(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Equal dictionary layouts in all runs.
            env=os.environ | {"PYTHONHASHSEED": "0", "XDG_STATE_HOME": str(folder / "state")},
        )


class Instructions(NamedTuple):
    """Instructions of the event loop's thread, and of all threads."""

    loop: int
    threads: int

    def each(self, fewer: Instructions, number: float) -> Instructions:
        """What these are more than fewer ones, by the number of requests that they had more."""
        return Instructions(*(round((a - b) / number) for a, b in zip(self, fewer, strict=True)))


async def _count_request(load: Load, served: Served, requests: int) -> Instructions:
    async with load.connected(1):
        await load.run(WARM_UP, LIMIT)
        await asyncio.sleep(WINDOW_SECONDS)
        few = await _least(load, served, requests)
        many = await _least(load, served, 2 * requests)
    return many.each(few, requests)


async def _count_chunk(subject: Subject, served: Served) -> Instructions:
    found = []
    for tokens in (TOKENS, LONG_TOKENS):
        served.node.script = Script(tokens, interval=0.0, held=True)
        load = subject.send(stream_load(served.address, tokens))
        load.connection = ChunkCountingConnection
        ChunkCountingConnection.node = served.node
        async with load.connected(1):
            await load.run(STREAMS, LIMIT)
            await asyncio.sleep(WINDOW_SECONDS)
            ChunkCountingConnection.chunks = 0
            counted = await _least(load, served, STREAMS)
        found.append((counted, ChunkCountingConnection.chunks / WINDOWS))
    (few, few_chunks), (many, many_chunks) = found
    return many.each(few, many_chunks - few_chunks)


async def _least(load: Load, served: Served, requests: int) -> Instructions:
    """The least instructions of as many requests, of either kind by itself."""
    found = []
    for _ in range(WINDOWS):
        await _control("--zero", served.process.pid)
        outcome = await load.run(requests, LIMIT)
        await asyncio.sleep(WINDOW_SECONDS)
        found.append(await _dumped(served))
        if outcome.errors:
            raise RuntimeError(f"{outcome.errors} wrong answers, the first: {outcome.first_error}")
    return Instructions(*(min(values) for values in zip(*found, strict=True)))


async def _count_idle(load: Load, served: Served) -> Instructions:
    async with load.connected(1):
        await load.run(WARM_UP, LIMIT)
    await asyncio.sleep(SETTLE_SECONDS)
    await _control("--zero", served.process.pid)
    began = time.monotonic()
    await asyncio.sleep(IDLE_SECONDS)
    seconds = time.monotonic() - began
    return (await _dumped(served)).each(Instructions(0, 0), seconds)


async def _dumped(served: Served) -> Instructions:
    before = set(served.folder.glob("counted*"))
    await _control("--dump", served.process.pid)
    return instructions_of(set(served.folder.glob("counted*")) - before)


def instructions_of(dumps: Collection[Path]) -> Instructions:
    """The sums of callgrind's dumps, one for each thread. Raises: RuntimeError."""
    loop = threads = 0
    for dump in dumps:
        text = dump.read_text(errors="replace")
        found = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"{dump} has no sum")
        threads += int(found[1])
        if dump.name.endswith("-01"):  # the first thread: a gateway's loop runs in the main one
            loop += int(found[1])
    if not loop:
        raise RuntimeError("callgrind counted nothing of the event loop's thread")
    return Instructions(loop, threads)


async def _control(what: str, pid: int) -> None:
    control = await asyncio.create_subprocess_exec(
        *("callgrind_control", what, str(pid)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if await asyncio.wait_for(control.wait(), 60):
        raise RuntimeError("callgrind_control failed")


if __name__ == "__main__":
    sys.exit(main())
