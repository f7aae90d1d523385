"""Measures one setting on this machine: starts the servers, benchmarks them, ends them.

Of each idle server: prefill, decode alone, decode with all slots busy, stall, energy. Prompts are
ordinary words as token ids, so that their length is exact; nothing is cached.

Other work would distort the figures, so it is measured from `/proc`: the time that CPUs were not
idle, `nice` work and time stolen by a hypervisor included.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx

from gateway.local import LocalFleetError
from gateway.local.energy import EnergyMeter
from gateway.local.memory import MEMORY_RESERVE, check_memory, format_gib
from gateway.local.plan import LocalFleetPlan, placed_servers
from gateway.local.server import LocalFleet
from gateway.local.topology import Topology, read_fields, read_text, read_topology
from gateway.workshop.bench.exchange import random_words
from gateway.workshop.tune.search import (
    BenchmarkRequest,
    BenchmarkResult,
    Figures,
    Setting,
    SettingFailedError,
    combine_servers,
    median_figures,
    server_spec,
)

FIGURE_REPEATS = 3  # of all figures, on one start of a server
REPEATS_SECONDS = 15.0  # no repeat begins after this time
SHORT_PROMPT = 32  # tokens of a prompt where only decode is measured
SETTLED_TOKENS = 8  # tokens after which a stream's speed is steady
WARM_UP_TOKENS = 16  # decoded first, so that the model's pages are in memory
IDLE_TIMEOUT = 30.0  # seconds until the slots of closed streams must be idle
IDLE_POLL_INTERVAL = 0.02
PROMPT_SEED = "5"
T = TypeVar("T")


class BenchmarkError(Exception):
    """The server's response can't be measured. The text says why."""


@dataclass(frozen=True, slots=True)
class StreamSample:
    """Tokens of a stream at a time, and its speed by the server's own clock."""

    at: float
    tokens: int
    tokens_per_second: float


@dataclass(slots=True)
class ServerBenchmark:
    """Benchmarks the server at `url`."""

    url: str
    client: httpx.AsyncClient
    request: BenchmarkRequest
    slots: int
    context: int  # of one slot, in tokens
    read_joules: Callable[[], float | None] = lambda: None
    """The energy of the whole machine since some moment; None where that is not known."""
    servers: int = 1  # benchmarked at the same time; each is taken to use its share of the energy
    _text: list[int] = field(default_factory=list)
    _prompts_made: int = 0

    async def run(self) -> Figures:
        """Measure all figures but the memory: medians of a few repeats.

        Raises BenchmarkError, and httpx.HTTPError when the server goes away.
        """
        self._text = await self._tokens()
        await self._alone(SHORT_PROMPT, WARM_UP_TOKENS)
        began, repeats = time.monotonic(), list[Figures]()
        for number in range(FIGURE_REPEATS):
            if number and time.monotonic() - began >= REPEATS_SECONDS:
                break
            alone = await self._alone(self.request.prompt, self.request.answer)
            if self.slots > 1:
                busy, joules = await self._all_busy()
                stall = await self._stall()
                alone = replace(alone, decode_busy=busy, decode_joules=joules, stall=stall)
            repeats.append(alone)
        return median_figures(repeats)

    async def _alone(self, prompt: int, answer: int) -> Figures:
        """Measure one request; tokens/s by the server's own clock."""
        first = last = dict[str, Any]()
        joules_at_send, joules_at_first = self.read_joules(), None
        async with aclosing(self._stream(prompt, answer)) as chunks:
            async for chunk in chunks:
                if not first:
                    first, joules_at_first = chunk, self.read_joules()
                last = chunk
        joules_at_end = self.read_joules()
        timings = last.get("timings") or {}
        prefill, decode = timings.get("prompt_per_second"), timings.get("predicted_per_second")
        if not prefill or not decode or timings.get("prompt_n", 0) < prompt:
            raise BenchmarkError(f"{self.url}: the end of an answer has no usable `timings`")
        written = timings.get("predicted_n", 0) - (first.get("timings") or {}).get("predicted_n", 0)
        return Figures(
            float(prefill),
            float(decode),
            decode_busy=float(decode),
            stall=None,
            memory=None,
            prefill_joules=self._joules_per_token(joules_at_send, joules_at_first, prompt),
            decode_joules=self._joules_per_token(joules_at_first, joules_at_end, written),
        )

    async def _all_busy(self) -> tuple[float, float | None]:
        """Return tokens/s of decode in all slots together, and joules for a token."""
        joules_at_first: list[float | None] = []

        async def one() -> list[StreamSample]:
            samples = []
            async for sample in self._samples(SHORT_PROMPT, self.request.answer):
                if not joules_at_first:
                    joules_at_first.append(self.read_joules())
                samples.append(sample)
            return samples

        streams = await run_concurrently([one() for _ in range(self.slots)])
        joules_at_end = self.read_joules()
        throughput = combined_throughput(streams)
        written = sum(stream[-1].tokens - stream[0].tokens for stream in streams)
        return throughput, self._joules_per_token(joules_at_first[0], joules_at_end, written)

    def _joules_per_token(
        self, before: float | None, after: float | None, tokens: int
    ) -> float | None:
        if before is None or after is None or tokens <= 0:
            return None
        return (after - before) / (tokens * self.servers)

    async def _stall(self) -> float:
        """Return the longest silence of a stream during another slot's prefill, in seconds."""
        neighbour: asyncio.Task[Figures] | None = None
        times: list[float] = []
        sent = 0.0
        room = self.context - SHORT_PROMPT - 1
        try:
            async with aclosing(self._samples(SHORT_PROMPT, room)) as samples:
                async for sample in samples:
                    times.append(sample.at)
                    if neighbour is None and sample.tokens >= SETTLED_TOKENS:
                        sent = sample.at
                        neighbour = asyncio.create_task(self._alone(self.request.prompt, 2))
                    elif neighbour is not None and neighbour.done():
                        break
            if neighbour is None:
                raise BenchmarkError(f"{self.url}: a stream ended after {len(times)} tokens")
            await neighbour
        finally:
            if neighbour is not None and not neighbour.done():
                neighbour.cancel()
                await asyncio.gather(neighbour, return_exceptions=True)
        await self._wait_until_idle()
        # Between two tokens of which the second came after the prompt was sent.
        return max((after - before for before, after in pairwise(times) if after > sent), default=0)

    async def _samples(self, prompt: int, answer: int) -> AsyncGenerator[StreamSample, None]:
        async with aclosing(self._stream(prompt, answer)) as chunks:
            async for chunk in chunks:
                timings = chunk.get("timings") or {}
                if not isinstance(timings.get("predicted_n"), int):
                    raise BenchmarkError(f"{self.url}: a chunk without `timings.predicted_n`")
                speed = float(timings.get("predicted_per_second") or 0.0)
                yield StreamSample(time.monotonic(), timings["predicted_n"], speed)

    async def _stream(self, prompt: int, answer: int) -> AsyncGenerator[dict[str, Any], None]:
        body = {
            "prompt": self._prompt(prompt),
            "n_predict": answer,
            "stream": True,
            "ignore_eos": True,
            "cache_prompt": False,
            "timings_per_token": True,
            "temperature": 0,
        }
        async with self.client.stream("POST", f"{self.url}/completion", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread())[:500].decode(errors="replace")
                raise BenchmarkError(f"{self.url}: HTTP {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                chunk = _json(self.url, line[6:])
                if "error" in chunk:
                    raise BenchmarkError(f"{self.url}: {chunk['error']}")
                yield chunk

    def _prompt(self, length: int) -> list[int]:
        """Return a prompt of this length that differs from all earlier ones."""
        self._prompts_made += 1
        at = self._prompts_made * 7 % len(self._text)
        return (self._text[at:] + self._text[:at])[:length]

    async def _tokens(self) -> list[int]:
        words = random_words(PROMPT_SEED, self.request.prompt + SHORT_PROMPT)
        response = await self.client.post(f"{self.url}/tokenize", json={"content": words})
        found = _json(self.url, response.text).get("tokens")
        if not isinstance(found, list) or len(found) < self.request.prompt:
            raise BenchmarkError(f"{self.url}: /tokenize answered {response.text[:200]}")
        return found

    async def _wait_until_idle(self) -> None:
        """Wait until the slots of closed streams are idle."""
        until = time.monotonic() + IDLE_TIMEOUT
        while time.monotonic() < until:
            response = await self.client.get(f"{self.url}/slots")
            if response.status_code != 200:
                return  # `/slots` is switched off: the stream's end may distort the next figure
            if not any(slot.get("is_processing") for slot in response.json()):
                return
            await asyncio.sleep(IDLE_POLL_INTERVAL)
        raise BenchmarkError(
            f"{self.url}: a slot is still busy {IDLE_TIMEOUT:.0f} s after its stream"
        )


async def run_concurrently(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; when one fails, cancel the others and raise its error."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def combined_throughput(streams: list[list[StreamSample]]) -> float:
    """Return tokens/s of concurrent streams: all their tokens over all their time.

    Tokens that arrive in bunches make it too high, so the server's own speeds bound it.
    """
    if any(len(stream) < 2 for stream in streams):
        raise BenchmarkError("an answer came in one piece, so its speed is not known")
    took = max(stream[-1].at for stream in streams) - min(stream[0].at for stream in streams)
    tokens = sum(stream[-1].tokens - stream[0].tokens for stream in streams)
    server_speeds = sum(stream[-1].tokens_per_second for stream in streams)
    return min(tokens / took, server_speeds) if took > 0 else server_speeds


def _json(url: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BenchmarkError(f"{url}: not JSON: {text[:200]}") from error
    if not isinstance(found, dict):
        raise BenchmarkError(f"{url}: not an object: {text[:200]}")
    return found


@dataclass(slots=True)
class MachineBenchmark:
    """Measures settings on this machine: one server on each NUMA node, all under the same load."""

    plan: LocalFleetPlan
    request: BenchmarkRequest
    context: int  # tokens of one slot
    force_memory: bool = False
    known_memory: tuple[Setting, int] | None = None
    """A setting, and the bytes that a server took with it in an earlier run."""
    meter: EnergyMeter | None = None  # None: the machine shows no energy
    read_machine: Callable[[], Topology] = read_topology  # before each start

    async def measure(self, setting: Setting, seconds: float) -> BenchmarkResult:
        """Start, benchmark and end the servers within `seconds`.

        Raises SettingFailedError, OSError where a log or a port can't be opened, and TimeoutError
        when the time is over.
        """
        topology = self.read_machine()
        specs = [server_spec(setting, spec, topology, self.context) for spec in self.plan.specs]
        try:
            if not self.force_memory:
                check_memory(topology, placed_servers([self.plan.model] * len(specs), specs))
                self._check_growth(setting, topology)
            fleet = LocalFleet(
                specs,
                self.plan.log_folder,
                binary=self.plan.binary,
                start_timeout=seconds + 60,  # the limit of the whole applies first
            )
            async with asyncio.timeout(seconds), fleet:
                return await self._run(fleet, setting, topology)
        except (LocalFleetError, BenchmarkError) as error:
            raise SettingFailedError(str(error)) from error
        except httpx.HTTPError as error:
            raise SettingFailedError(
                f"a server went away: {type(error).__name__} {error}"
            ) from error

    async def _run(
        self, fleet: LocalFleet, setting: Setting, topology: Topology
    ) -> BenchmarkResult:
        cpus = [cpu for node in topology.nodes for cpu in node.cpus]
        before = read_cpu_times(cpus)
        meter = self.meter
        sampling = nullcontext() if meter is None else meter.sampling()
        # A server is silent throughout a prefill, so only the whole has a limit.
        client = httpx.AsyncClient(timeout=None, trust_env=False, limits=_NO_REUSE)  # noqa: S113
        async with client, sampling:
            results = await run_concurrently(
                [
                    ServerBenchmark(
                        url,
                        client,
                        self.request,
                        slots=setting.slots,
                        context=self.context,
                        read_joules=lambda: None if meter is None else meter.joules(),
                        servers=len(fleet.urls),
                    ).run()
                    for url in fleet.urls
                ]
            )
        pids = [pid for pid in fleet.pids if pid is not None]
        busy, _ = other_work_between(before, read_cpu_times(cpus), own={os.getpid(), *pids})
        shown = [read_fields(Path(f"/proc/{pid}/status")) for pid in pids]
        memories = [int(one["VmHWM"].split()[0]) * 1024 for one in shown if one.get("VmHWM")]
        if memories and self.known_memory is None:
            self.known_memory = (setting, max(memories))
        figures = replace(combine_servers(results), memory=sum(memories) if memories else None)
        return figures, (busy if before.cpus else None)

    def _check_growth(self, setting: Setting, topology: Topology) -> None:
        """Refuse a setting whose memory may not fit.

        Beyond the model, memory grows no faster than the slots and the micro-batch do.
        """
        if self.known_memory is None:
            return
        known, taken = self.known_memory
        size = self.plan.model.size
        growth = max(setting.slots / known.slots, setting.micro_batch / known.micro_batch, 1.0)
        needed = int(size + max(0, taken - size) * growth)
        servers = len(self.plan.specs)
        headrooms = [topology.memory_available - needed * servers]
        if len(topology.nodes) > 1:
            headrooms += [n.memory_available - needed for n in topology.nodes if n.memory_allowed]
        if min(headrooms) < MEMORY_RESERVE:
            raise SettingFailedError(
                f"not enough memory: each of {servers} servers may take {format_gib(needed)}, and "
                f"{format_gib(MEMORY_RESERVE)} must stay free"
            )


def measurement_subject(
    plan: LocalFleetPlan, topology: Topology, request: BenchmarkRequest, context: int
) -> dict[str, Any]:
    """Return all that figures depend on besides the setting, as JSON values."""
    if plan.binary is None:
        server = f"embedded server of xllamacpp {version('xllamacpp')}"
    else:
        stat = plan.binary.path.stat()
        server = f"{plan.binary.path} ({stat.st_size} bytes, {stat.st_mtime_ns})"
    return {
        "model": plan.model.path.name,
        "model_bytes": plan.model.size,
        "server": server,
        "processor": topology.processor.name or topology.processor.architecture,
        "cores": [len(node.performance_cores) for node in topology.nodes],
        "quota": topology.cpu_quota,
        "prompt": request.prompt,
        "answer": request.answer,
        "context": context,
    }


# A new connection for each request: llama.cpp may close an idle one at any time.
_NO_REUSE = httpx.Limits(max_keepalive_connections=0)
# CPUs' worth of other work that is tolerated: llama.cpp's threads wait for the slowest one.
MOST_OTHER_WORK = 0.25
SAMPLE_SECONDS = 3.0  # between the two readings of a sample
MOST_NAMED_PROCESSES = 3


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Ticks since the machine booted."""

    busy: int
    total: int
    cpus: int
    processes: dict[int, tuple[str, int]]  # name and ticks by PID


def read_cpu_times(cpus: Collection[int], root: Path = Path("/")) -> CpuTimes:
    """Read the times of these CPUs; zeros where the system has no `/proc/stat`."""
    busy = total = found = 0
    for line in read_text(root / "proc/stat").splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus:
            # Of user, nice, system, idle, iowait, irq, softirq and steal two are no work.
            ticks = [int(word) for word in words[:8]]
            total += sum(ticks)
            busy += sum(ticks) - sum(ticks[3:5])
            found += 1
    processes: dict[int, tuple[str, int]] = {}
    for path in (root / "proc").glob("[0-9]*/stat"):
        # `4711 (any (name)) R ...`: the fields follow the last bracket.
        head, _, rest = read_text(path).rpartition(")")
        words = rest.split()
        if head and len(words) > 12:
            ticks_of = int(words[11]) + int(words[12])
            processes[int(path.parent.name)] = head.partition("(")[2], ticks_of
    return CpuTimes(busy, total, found, processes)


def other_work_between(
    before: CpuTimes, after: CpuTimes, own: Collection[int] = ()
) -> tuple[float, str]:
    """Return the CPUs' worth of all work but that of `own` processes, and the busiest in words.

    Processes count as `own` if they still ran at the second reading.
    """
    ticks = (after.total - before.total) / max(1, after.cpus)  # of one CPU
    if ticks <= 0:
        return 0.0, ""
    spent = {
        pid: (used - before.processes.get(pid, ("", 0))[1]) / ticks
        for pid, (_, used) in after.processes.items()
    }
    busy = (after.busy - before.busy) / ticks - sum(spent[pid] for pid in own if pid in spent)
    others = sorted(spent.keys() - set(own), key=lambda pid: -spent[pid])
    names = ", ".join(
        f"{after.processes[pid][0]} ({pid}) {spent[pid]:.0%}"
        for pid in others[:MOST_NAMED_PROCESSES]
        if spent[pid] >= 0.05
    )
    words = f"{busy:.1f} of {after.cpus} CPUs are busy"
    return max(0.0, busy), f"{words}: {names}" if names else words
