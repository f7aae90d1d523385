"""Leases for requests: at once while a slot is free, else in turn, within limits.

No node gets more requests than it has slots: the rest wait here, oldest first. A request that
no free node can take does not hold up one behind it that another node can.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from gateway import errors
from gateway.config.settings import Settings
from gateway.fleet.fleet import Fleet
from gateway.fleet.lease import Lease
from gateway.fleet.node import Node
from gateway.fleet.states import State
from gateway.request import Priority, Request
from gateway.scheduling.choice import least_loaded, narrowed, to_avoid, to_hold
from gateway.scheduling.rate import CompletionRate
from gateway.scheduling.ticket import Shape, Ticket, Waiting, shape_of

TICK = 0.5
"""Seconds between two looks at the limits of what waits."""

UNMEASURED_PREFILL = 25.0
"""Prompt tokens/s to expect of a node that has not shown its speed: slow on purpose, since it
bounds a wait (one busy thread read 140 tokens/s of a 768 wide model when measured)."""

ALIVE = frozenset({State.READY, State.DEGRADED, State.MUTE})
"""States of a node that is worth the ordinary wait; for any other, `wait_for_node` holds."""


@dataclass(slots=True, eq=False)
class Scheduler:
    """Gives out leases on the slots of a fleet."""

    fleet: Fleet
    settings: Settings
    clock: Callable[[], float]
    rng: random.Random
    rate: CompletionRate = field(default_factory=CompletionRate)
    closing: bool = False
    _queue: list[Ticket] = field(default_factory=list)
    _held: set[str] = field(default_factory=set)
    """Nodes whose free slots are kept for wide requests in the queue."""
    _matching: asyncio.Handle | None = None
    _ticking: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.fleet.on_capacity = self.capacity_changed

    async def lease(self, request: Request) -> tuple[Lease, str]:
        """A lease for `request`, and the public model name that it was given for.

        Waits while all nodes that could serve it are busy or out. Raises: GatewayError, when it
        can't be served, there is no place to wait, or it has waited too long.
        """
        return self.lease_now(request) or await self.wait(request)

    def lease_now(self, request: Request) -> tuple[Lease, str] | None:
        """The same without waiting: None where it would have to."""
        now = self.clock()
        able = self._able(request)
        chosen = self._chosen(request, able, now)
        if chosen is not None and self._queue and request.slots:
            # Who came before goes first, if there is anything for them.
            self._match()
            chosen = self._chosen(request, able, now)
        if chosen is not None:
            return _taken(chosen[0], request, now), chosen[1]
        return None

    def elsewhere(self, request: Request, node: Node) -> bool:
        """Whether another node than `node` is in that could take `request`."""
        return any(
            other is not node and other.name not in request.failed and other.state in ALIVE
            for _, nodes in self._able(request)
            for other in nodes
        )

    def larger(self, request: Request) -> bool:
        """Whether a node has the context that `request` is now known to need."""
        return any(
            node.context is not None and node.context >= request.smallest_context
            for _, nodes in self._able(request)
            for node in nodes
        )

    def waiting(self) -> list[Waiting]:
        """What waits, in its order."""
        now = self.clock()
        return [
            Waiting(ticket.request, place, now - ticket.entered)
            for place, ticket in enumerate(self._queue, 1)
        ]

    def depths(self) -> dict[Priority, int]:
        """How many requests of each class wait."""
        depths = dict.fromkeys(Priority, 0)
        for ticket in self._queue:
            depths[ticket.request.priority] += 1
        return depths

    def has_room(self) -> bool:
        """Whether one more request could be taken: at once, or into the queue."""
        return not self.closing and len(self._queue) < self.settings.queue.max

    def capacity_changed(self) -> None:
        """Look again who can go, soon; called for each slot that comes free."""
        if self._queue and self._matching is None:
            self._matching = asyncio.get_running_loop().call_soon(self._match)

    def completed(self, now: float) -> None:
        """A request has been answered: the queue moves at this rate."""
        self.rate.completed(now)

    def refuse(self, request_id: str, error: errors.GatewayError) -> bool:
        """End the wait of one request, by its own id; whether it was waiting."""
        for ticket in self._queue:
            if ticket.request.id == request_id:
                self._refuse(ticket, error)
                self.capacity_changed()  # for those it may have held up
                return True
        return False

    def refuse_all(self, error: Callable[[], errors.GatewayError]) -> None:
        """End everything that waits with an error of its own."""
        for ticket in self._queue:
            if not ticket.granted.done():
                ticket.granted.set_exception(error())
        self._queue.clear()

    def close(self) -> None:
        """Stop the timers; nothing may wait any more."""
        self.refuse_all(errors.shutting_down)
        for handle in (self._matching, self._ticking):
            if handle is not None:
                handle.cancel()
        self._matching = self._ticking = None

    # Who can serve it at all.

    def _able(self, request: Request) -> Sequence[tuple[str, Sequence[Node]]]:
        """The nodes that can serve it, for each name it stands for that some node serves.

        Raises: GatewayError when there is none, or none that could ever hold it.
        """
        if len(request.candidates) == 1 and not request.refused:
            # Nearly always: one name, and every node that serves it will do.
            all_ = self.fleet.catalogue.offering(
                request.candidates[0], request.endpoint, vision=request.vision,
                native=request.native,
            )  # fmt: skip
            needed = max(request.prompt_tokens, request.smallest_context)
            if all_.nodes and request.slots <= all_.slots and needed <= all_.context:
                return all_.able
        return self._selected(request)

    def _selected(self, request: Request) -> Sequence[tuple[str, Sequence[Node]]]:
        offered = False
        able: list[tuple[str, Sequence[Node]]] = []
        widest = 0
        needed = max(request.prompt_tokens, request.smallest_context)
        for name in request.candidates:
            offering = self.fleet.catalogue.offering(
                name, request.endpoint, vision=request.vision, native=request.native
            )
            nodes: Sequence[Node] = offering.nodes
            offered = offered or bool(nodes) or self.fleet.catalogue.known(name)
            if request.refused:
                nodes = [node for node in nodes if node.name not in request.refused]
            if not nodes:
                continue
            if offering.slots < request.slots:
                widest = max(widest, *(node.slots_total for node in nodes))
                nodes = [node for node in nodes if node.slots_total >= request.slots]
            if nodes and offering.context < needed:
                nodes = narrowed(nodes, request)
            if nodes:
                able.append((name, nodes))
        if able:
            return able
        if widest:
            raise errors.invalid_request(
                f"This request takes {request.slots} slots at once, more than any node has "
                f"({widest}). Ask for fewer answers or prompts.",
                "n",
            )
        if offered:
            if request.vision and not request.refused:
                raise errors.invalid_request(
                    f"No node that serves '{request.model}' reads images.", "messages"
                )
            raise errors.node_failed(
                f"No node serves '{request.endpoint}' requests for '{request.model}'."
            )
        if self.fleet.catalogue.undecided():
            raise errors.starting("The nodes are being asked what they serve.")
        raise errors.model_not_found(request.model, list(self.fleet.catalogue.model_names()))

    def _chosen(
        self, request: Request, able: Sequence[tuple[str, Sequence[Node]]], now: float
    ) -> tuple[Node, str] | None:
        """A node with room for it that serves the first of its names that some node can."""
        if self.closing:
            raise errors.shutting_down()
        closed: Collection[str] = self._held if self._queue and request.slots else ()
        avoided: Collection[str] = ()
        if request.failed:
            avoided = to_avoid(able, request.failed)
            closed = {*closed, *avoided}
        for name, nodes in able:
            node = least_loaded(nodes, request, now, self.rng, closed)
            if node is not None:
                return node, name
            if _any_alive(nodes, avoided):
                break
        return None

    # Waiting.

    async def wait(self, request: Request) -> tuple[Lease, str]:
        """A lease in its turn, where `lease_now` had none. Raises: GatewayError, as `lease`."""
        settings, now = self.settings, self.clock()
        if self.closing:
            raise errors.shutting_down()
        waiting = len(self._queue)
        # What has been let in once is not turned away because its node failed it.
        if waiting >= settings.queue.max and not request.failed:
            raise errors.queue_full(
                f"{waiting} requests wait already. Try again later.",
                self.rate.retry_after(1, now),
            )
        rule = settings.classes.get(request.priority.label)  # type: ignore[call-overload]
        limit = settings.queue.max_wait
        if rule is not None and rule.max_wait is not None:
            limit = rule.max_wait
        until = now + limit
        if request.deadline is not None:
            ahead = bisect_right(self._queue, request.received, key=lambda ticket: ticket.position)
            expected = self.rate.wait(ahead + 1, now)
            if expected is not None and ahead and now + expected > request.deadline:
                raise errors.queue_timeout(
                    f"{ahead} requests wait already, about {expected:.0f} s: longer than this "
                    "client will wait.",
                    self.rate.retry_after(ahead + 1, now),
                )
            until = min(until, request.deadline)
        ticket = Ticket(request, now, until, asyncio.get_running_loop().create_future())
        if not any(_any_alive(nodes) for _, nodes in self._able(request)):
            ticket.out_since = now
        insort(self._queue, ticket, key=lambda ticket: ticket.position)
        self._arm(until - now)
        try:
            return await ticket.granted
        except asyncio.CancelledError:
            granted = ticket.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result()[0].give_back()
            raise
        finally:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self.capacity_changed()

    def _arm(self, seconds: float = TICK) -> None:
        """Look at the limits of what waits within `seconds`, and within a tick."""
        loop = asyncio.get_running_loop()
        due = loop.time() + min(TICK, max(0.0, seconds))
        if self._ticking is not None and due < self._ticking.when():
            self._ticking.cancel()
            self._ticking = None
        if self._ticking is None and self._queue:
            self._ticking = loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        now = self.clock()
        smallest = self._smallest_context()
        alive: dict[Shape, bool] = {}
        for ticket in list(self._queue):
            if not ticket.granted.done():
                self._expire(ticket, now, shape_of(ticket.request, smallest), alive)
        self._match()
        self._arm(min((ticket.until for ticket in self._queue), default=now) - now)

    def _expire(self, ticket: Ticket, now: float, shape: Shape, alive: dict[Shape, bool]) -> None:
        """End a wait that has lasted long enough, or that has become hopeless.

        `alive` remembers of each shape whether one of its nodes is in.
        """
        if shape not in alive:
            try:
                alive[shape] = any(_any_alive(nodes) for _, nodes in self._able(ticket.request))
            except errors.GatewayError as error:
                self._refuse(ticket, error)
                return
        if alive[shape]:
            ticket.out_since = None
        elif ticket.out_since is None:
            ticket.out_since = now
        retry_after = self.rate.retry_after(len(self._queue), now)
        if (
            ticket.out_since is not None
            and now - ticket.out_since >= self.settings.retries.wait_for_node
        ):
            names = ", ".join(repr(name) for name in ticket.request.candidates)
            self._refuse(ticket, errors.no_node(f"Every node for {names} is out.", retry_after))
        elif now >= ticket.until:
            waited = now - ticket.entered
            self._refuse(
                ticket, errors.queue_timeout(f"No slot came free in {waited:.0f} s.", retry_after)
            )

    def _refuse(self, ticket: Ticket, error: errors.GatewayError) -> None:
        self._queue.remove(ticket)
        if not ticket.granted.done():
            ticket.granted.set_exception(error)

    def _smallest_context(self) -> float:
        return min((node.context or math.inf for node in self.fleet.nodes.values()), default=0.0)

    def _match(self) -> None:
        """Give free slots to those who wait, oldest first."""
        if self._matching is not None:
            self._matching.cancel()
            self._matching = None
        now = self.clock()
        self._held = set()
        smallest = self._smallest_context()
        in_vain: set[Shape] = set()
        for ticket in list(self._queue):
            request = ticket.request
            shape = shape_of(request, smallest)
            # Where one found no room, nobody of its shape does.
            if ticket.granted.done() or shape in in_vain:
                continue
            try:
                able = self._able(request)
                chosen = self._chosen(request, able, now)
            except errors.GatewayError as error:
                self._refuse(ticket, error)
                continue
            if chosen is not None:
                self._queue.remove(ticket)
                ticket.granted.set_result((_taken(chosen[0], request, now), chosen[1]))
                continue
            in_vain.add(shape)
            if request.slots > 1:
                self._held.update(to_hold(nodes, request, now) for _, nodes in able[:1])


def _any_alive(nodes: Sequence[Node], avoided: Collection[str] = ()) -> bool:
    return any(_is_alive(node) and node.name not in avoided for node in nodes)


def _is_alive(node: Node) -> bool:
    """Whether it is worth the ordinary wait; a trial that is out may be the end of its ejection."""
    return node.state in ALIVE or node.circuit.trial is not None


def _taken(node: Node, request: Request, now: float) -> Lease:
    """The lease, with what it should take: it bounds how long the node may be silent."""
    speed = node.speed
    prefill = request.prompt_tokens / (speed.prefill_tps or UNMEASURED_PREFILL)
    total = None
    if request.max_tokens is not None and (decode_tps := speed.decode_tps) is not None:
        total = prefill + request.max_tokens / decode_tps
    return node.take(
        request.slots,
        request.id,
        request.priority,
        now,
        stream=request.stream,
        expected_prefill=prefill,
        expected_total=total,
    )
