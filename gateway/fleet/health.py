"""One node's watch: probes it when it is due and wakes when time alone changes its state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.fleet.evidence import sign_of_life
from gateway.fleet.probes import check_alive, discover, read_slots
from gateway.fleet.probing import Answer, Outcome
from gateway.fleet.schedule import SOON, next_gap

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from gateway.fleet.node import Node

OF_NO_USE = frozenset({Answer.LOCKED, Answer.NAMELESS})
"""What a discovery may end with though the node lives."""
LONGEST_SLEEP = 3600.0


class Watch:
    """Keeps one node's state true, in a task of its own.

    `settle` is called whenever the state may have changed. `gate` bounds how many nodes are
    probed at the same moment.
    """

    def __init__(
        self,
        node: Node,
        settle: Callable[[Node], None],
        gate: asyncio.Semaphore,
        rng: random.Random,
    ) -> None:
        self._node = node
        self._settle = settle
        self._gate = gate
        self._rng = rng
        self._wake = asyncio.Event()
        self._busy = asyncio.Lock()
        self._task = asyncio.create_task(self._run(), name=f"watch {node.name}")

    def cancel(self) -> asyncio.Task[None]:
        """Stop watching; the task is to be awaited."""
        self._task.cancel()
        return self._task

    def wake(self) -> None:
        """Look again at what is due."""
        self._wake.set()

    def hurry(self) -> None:
        """Something looks wrong: probe soon."""
        probing = self._node.probing
        soon = (probing.last or 0.0) + SOON
        if soon < probing.next:
            probing.next = soon
            self._wake.set()

    def reschedule(self) -> None:
        """The interval has changed: find a place in it."""
        probing, interval = self._node.probing, self._node.rules.health.interval
        probing.next = min(probing.next, self._node.clock() + self._rng.uniform(0.0, interval))
        self._wake.set()

    async def probe(self) -> Outcome:
        """Probe now, and take in the answer; what the node is and refuses is asked anew."""
        async with self._busy:
            self._node.probing.discovered = None
            return await self._cycle()

    async def _run(self) -> None:
        node = self._node
        while True:
            if self._is_due():
                async with self._busy, self._gate:
                    # An operator's probe may have come first.
                    if self._is_due():
                        await self._cycle()
            self._settle(node)
            now = node.clock()
            due = node.probing.next if node.wanted else now + LONGEST_SLEEP
            await self._sleep(min(due, node.next_change(now)) - now)

    def _is_due(self) -> bool:
        return self._node.wanted and self._node.clock() >= self._node.probing.next

    async def _sleep(self, seconds: float) -> None:
        self._wake.clear()
        timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    async def _cycle(self) -> Outcome:
        """Ask for life, for what the node is if that is due, and for what it is busy with."""
        node, probing, health = self._node, self._node.probing, self._node.rules.health
        first = not probing.probed
        probing.last = node.clock()
        outcome = await check_alive(node)
        comes_up = not probing.up
        if outcome.up and self._discovery_is_due():
            outcome = await self._discover(outcome)
        if outcome.up and comes_up:
            # Known before it gets work: the load that others have put on it.
            await self._observe()
        now = node.clock()
        sign = sign_of_life(node, now) if outcome.answer is Answer.TIMED_OUT else None
        probing.note(outcome, rise=health.rise, fall=health.fall, sign_of_life=sign)
        if comes_up and probing.up:
            node.circuit.came_back(now)
            node.pace.restarted()
        probing.next = now + next_gap(
            health.interval, self._rng, first=first, unsettled=probing.unsettled
        )
        self._settle(node)
        if outcome.up and not comes_up:
            await self._observe()
            self._settle(node)
        return outcome

    def _discovery_is_due(self) -> bool:
        node, said = self._node, self._node.probing.discovered
        return said is None or node.clock() - said >= node.rules.health.discover_interval

    async def _discover(self, alive: Outcome) -> Outcome:
        node = self._node
        outcome = alive if node.spec.kind == "openai" else await discover(node)
        if outcome.up:
            node.probing.discovered = node.clock()
            return alive
        # Whatever else went wrong: it lives, as /health has just said, and is asked again with
        # the next probe.
        return outcome if outcome.answer in OF_NO_USE else alive

    async def _observe(self) -> None:
        """Read how many slots are busy."""
        node = self._node
        if not node.tells_slots:
            node.occupancy.foreign = 0
            return
        with node.occupancy.reading(node.clock()) as reading:
            busy = await read_slots(node)
        if busy is not None:
            node.occupancy.saw(busy, reading, node.clock())
