"""Calibrates idle nodes: two tiny requests show how fast a node is before anyone needs it.

The first one pages the model in and is thrown away; the second is measured. What it shows is a
weak first guess (`Speed.calibrate`), which the first real answer replaces. A node whose speed is
known gets the first one alone, after it has loaded its model.

No request waits for a calibration: its slot counts as free, and each lease on the node calls it in
(`SlotOccupancy.lend_slot`). Then the connection is closed, which ends the node's work within a
batch; until its `/slots` shows that, the node looks slower by the time of a batch, so that
requests go elsewhere where they can. It counts against nobody: no caller, no circuit.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec

from gateway.events import EventBus, NodeCalibrated
from gateway.nodes.fleet import Fleet
from gateway.nodes.health import ProbeResponse, fetch, probe_slots
from gateway.nodes.lifecycle import ProbeResult
from gateway.nodes.node import SLOT_LINGER, Node
from gateway.terms import Endpoint
from gateway.transport.errors import UpstreamError

log = logging.getLogger(__name__)
MOST_AT_ONCE = 8
MOST_SECONDS = 20.0  # most seconds for both requests
LOOK_SECONDS = 1.0  # seconds between two looks at all nodes, if no calibration has ended
BUSY_PAUSE = 5.0  # seconds until a node is looked at again that proved to be busy
BLIND_PAUSE = 60.0  # seconds until a node is looked at again whose `/slots` could not be read
# Readings of `/slots` after which the slot counts as free, whatever they show.
MOST_SETTLING_POLLS = 8
LARGEST_REPLY = 1 << 20  # bytes
READ_LINES = 8
# Words read and tokens written by the request that is thrown away.
WARM_UP_WORDS, WARM_UP_TOKENS = 16, 2
# Words and tokens of the request that is measured; such a word is a token in most vocabularies.
READ_WORDS, WRITE_TOKENS = 100, 8

# In random order no cache has more than the first few.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are"),
    *("with", "as", "his", "they", "be", "at", "one", "have", "this", "from", "or", "had", "by"),
    *("not", "but", "what", "all", "were", "when", "we", "there", "can", "an", "your", "which"),
)

# By the endpoint that it shows; tried in this order, since a server for embeddings may die of a
# completion, and one for chats refuses embeddings at once.
_PATHS: tuple[tuple[Endpoint, str], ...] = (
    ("embeddings", "/v1/embeddings"),
    ("chat", "/completion"),
    ("rerank", "/v1/rerank"),
)


def due(nodes: Iterable[Node], running: Collection[Node], now: float) -> list[Node]:
    """The nodes to calibrate from now on, beside those that run: the least tried first."""
    room, busy = MOST_AT_ONCE - len(running), {node.host for node in running}
    by_host: dict[str, Node] = {}
    waiting = [node for node in nodes if node.calibration_due(now)] if room > 0 else []
    for node in sorted(waiting, key=lambda one: one.calibration.tries):
        by_host.setdefault(node.host, node)
    return [node for host, node in by_host.items() if host not in busy][:room]


def paths_to_try(node: Node) -> list[str]:
    """The paths of which the first that the node serves shows its speed; empty: none does."""
    declared = node.spec.endpoints
    if declared is not None and "chat" in declared:
        return ["/completion"]
    return [
        path
        for endpoint, path in _PATHS
        if node.supports(endpoint) and (endpoint != "chat" or node.is_for_chat)
    ]


def request_body(path: str, text: str, tokens: int) -> dict[str, object]:
    """A request that reads the text and, if the path can, writes so many tokens."""
    if path == "/v1/embeddings":
        return {"input": text}
    if path == "/v1/rerank":
        return {"query": "a", "documents": [text]}
    return {
        "prompt": text,
        "n_predict": tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        # Without it a server goes on to the prompt's end when the connection closes.
        "return_progress": True,
    }


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Reply(msgspec.Struct):
    timings: dict[str, object] | None = None
    usage: _Usage | None = None


def shown_timings(reply: bytes, seconds: float) -> dict[str, object] | None:
    """The last `timings` in a reply; of one without, by our own clock."""
    for line in reversed(reply.rsplit(b"\n", READ_LINES)):
        try:
            found = msgspec.json.decode(line.removeprefix(b"data: "), type=_Reply)
        except msgspec.MsgspecError:
            continue
        if found.timings is not None:
            return found.timings
        if found.usage is not None:
            return {"prompt_n": found.usage.prompt_tokens, "prompt_ms": seconds * 1000}
    return None


@dataclass(slots=True, eq=False)
class _Run:
    """The requests of one calibration, which end as soon as a slot of the node is wanted."""

    node: Node
    rng: random.Random
    limit: asyncio.Timeout
    sending: bool = False
    needed: bool = False  # whether a request has called it in
    warm: bool = False  # whether the first request has been answered
    asked_at: float = 0.0  # when the last request was sent

    def call_in(self) -> None:
        """A request wants a slot of the node."""
        if self.sending and not (self.needed or self.limit.expired()):
            self.needed = True
            self.limit.reschedule(asyncio.get_running_loop().time())

    async def work(self, paths: list[str], *, measure: bool) -> bytes:
        """Send both requests; returns the last reply.

        Raises: UpstreamError; TimeoutError, also when it is called in.
        """
        path, reply = "", ProbeResponse(HTTPStatus.NOT_IMPLEMENTED, b"")
        async with self.limit:
            self.sending = True
            try:
                for path in paths:
                    reply = await self._ask(path, WARM_UP_WORDS, WARM_UP_TOKENS)
                    if reply.status != HTTPStatus.NOT_IMPLEMENTED:
                        break
                self.warm = reply.status == HTTPStatus.OK
                if self.warm and measure:
                    reply = await self._ask(path, READ_WORDS, WRITE_TOKENS)
            finally:
                self.sending = False
        if reply.status != HTTPStatus.OK:
            raise UpstreamError(f"{path} answers {reply.status}")
        return reply.body

    async def _ask(self, path: str, words: int, tokens: int) -> ProbeResponse:
        node = self.node
        if node.context is not None:
            words = min(words, node.context // 4)
        fields = request_body(path, " ".join(self.rng.choices(WORDS, k=words)), tokens)
        if node.spec.instance is not None:
            fields["model"] = node.spec.instance
        self.asked_at, body = node.clock(), msgspec.json.encode(fields)
        # Its own limit passes before.
        reply = await fetch(node, path, body=body, largest=LARGEST_REPLY, limit=2 * MOST_SECONDS)
        if isinstance(reply, ProbeResult):
            raise UpstreamError(reply.detail)
        return reply


@dataclass(slots=True, eq=False)
class Calibrator:
    """Calibrates a fleet's idle nodes, each in a task of its own."""

    fleet: Fleet
    bus: EventBus
    clock: Callable[[], float]
    rng: random.Random
    _running: dict[Node, asyncio.Task[None]] = field(default_factory=dict)
    _stopped: bool = False

    async def run(self) -> None:
        """Run until cancelled; it may run again."""
        try:
            while not self._stopped:
                now = self.clock()
                for node, task in self._running.items():
                    if not node.capacity(now):
                        task.cancel()
                for node in due(self.fleet.nodes.values(), self._running, now):
                    task = asyncio.create_task(self._calibrate(node), name=f"calibrate {node.name}")
                    self._running[node] = task
                    task.add_done_callback(functools.partial(self._ended, node))
                if running := [*self._running.values()]:
                    await asyncio.wait(running, timeout=LOOK_SECONDS, return_when="FIRST_COMPLETED")
                else:
                    await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._end_all()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def stop(self) -> None:
        """End all calibrations, and begin none any more."""
        self._stopped = True
        self._end_all()

    def _end_all(self) -> None:
        for task in self._running.values():
            task.cancel()

    def _ended(self, node: Node, task: asyncio.Task[None]) -> None:
        del self._running[node]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("Calibrating %s failed", node.name, exc_info=error)

    async def _calibrate(self, node: Node) -> None:
        """Calibrate this node, if `/slots` shows it idle."""
        record, clock, paths = node.calibration, node.clock, paths_to_try(node)
        with node.occupancy.slots_query(clock()) as query:
            busy = await probe_slots(node)
        if busy is not None:
            node.occupancy.record_busy(busy, query, clock())
        if busy != () or not paths or not node.calibration_due(clock()):
            self.fleet.refresh_state(node)
            pause = BLIND_PAUSE if busy is None else BUSY_PAUSE
            record.postpone(clock() + pause if paths else math.inf)
            return
        began, speed = clock(), node.speed
        measure = not speed.samples and speed.calibrated is None
        lease = node.take_calibration_lease(began)
        run = _Run(node, self.rng, asyncio.timeout(MOST_SECONDS))
        record.delay(READ_WORDS / speed.expected_prefill_tps)
        try:
            with node.occupancy.lend_slot(run.call_in):
                self.fleet.refresh_state(node)
                outcome, detail, timings, shown = "done" if measure else "warmed", "", None, None
                try:
                    reply = await run.work(paths, measure=measure)
                    timings = shown_timings(reply, clock() - run.asked_at)
                except TimeoutError:
                    outcome = "given_up" if run.needed else "timed_out"
                    if not run.needed:
                        # It is slow, even if it is not known how slow.
                        took = clock() - run.asked_at
                        timings = {"prompt_n": READ_WORDS, "prompt_ms": took * 1000}
                except UpstreamError as error:
                    outcome, detail = "failed", str(error)
                if measure and run.warm and timings is not None and not speed.samples:
                    shown = speed.calibrate(timings)
                if measure and shown is None and outcome == "done":
                    outcome, detail = "failed", "its reply shows no speed"
                again = shown is None if measure else not run.warm
                record.end(outcome, clock(), warm=run.warm, again=again, shown=shown)
                read, wrote = shown or (None, None)
                self.bus.publish(
                    NodeCalibrated(node.name, outcome, clock() - began, read, wrote, detail)
                )
                self.fleet.refresh_state(node)
                for _ in range(MOST_SETTLING_POLLS):  # Until the slot is shown free.
                    await asyncio.sleep(SLOT_LINGER)
                    busy = await probe_slots(node)
                    if busy is None or len(busy) <= node.leased:
                        break
        finally:
            record.delay(0.0)
            lease.release()
            self.fleet.refresh_state(node)
