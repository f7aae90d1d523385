"""What is expected of a request: its size, its answer's, and which nodes know its beginning."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.fleet.lease import Lease
from gateway.fleet.memory import Memory, Prompt
from gateway.request import Request
from gateway.scheduling.ask import NOTHING, Ask
from gateway.scheduling.board import Board
from gateway.scheduling.dispatch import Dispatcher
from gateway.scheduling.eligible import Plan
from gateway.scheduling.estimates import Estimates
from gateway.scheduling.forecast import NO_ANSWER, Placement
from gateway.scheduling.homes import Homes

LONG = 1024
"""Bytes of a prompt from which on it matters that others find what it has left in a cache."""


@dataclass(slots=True)
class Told:
    """Tokens of an answer, as its node told them; of a prompt `cached` is a part."""

    prompt: float
    cached: float
    completion: float


@dataclass(slots=True, eq=False)
class Expectations:
    """Makes requests into numbers, and learns from what they came to."""

    dispatcher: Dispatcher
    memory: Memory
    estimates: Estimates = field(default_factory=Estimates)
    homes: Homes = field(default_factory=Homes)
    behind: bool = False
    """Whether long prompts have ended of which nothing was learnt yet: the next may go on with one,
    and what a node remembers depends on the order in which requests end and begin there."""

    def __post_init__(self) -> None:
        self.dispatcher.recall = self.recall

    def ask(self, request: Request, plan: Plan) -> Ask:
        """The request in numbers, as they stand now."""
        sizes = request.expected
        if sizes is None:
            sizes = request.expected = self.estimates.ask_sizes(
                request.model,
                request.party,
                request.text,
                request.max_tokens if request.writes else 0,
                request.ids,
                request.media,
            )
        tokens, completion = sizes
        # By place, since it is made for each request.
        ask = Ask(
            request.id,
            plan.groups,
            request.priority,
            request.party,
            request.received,
            request.slots if request.slots < 2 else _slots(request, plan),
            tokens,
            completion if request.writes else NO_ANSWER,
            NOTHING,
            NOTHING,
            plan.closed,
            plan.failed,
            plan.doubts,
        )
        ask.deadline = request.deadline
        if not request.slots:
            ask.owner = request.caller.id
        if request.session is not None and request.writes:
            ask.doubts = self.homes.doubts(
                request.session, request.model, ask, self.dispatcher.board
            )
        prompt = request.prompt
        if prompt is not None:
            prompt.tokens = tokens
            ask.key = prompt
            self.recall(ask)
            if prompt.blocks:
                ask.affinity = prompt.blocks[0]
        return ask

    def recall(self, ask: Ask) -> None:
        """Look up what the nodes know of its prompt by now."""
        prompt = ask.key
        if isinstance(prompt, Prompt):
            found = self.memory.recall(prompt)
            ask.prompt, ask.cached, ask.coming = found.tokens, found.cached, found.coming

    def placed(self, lease: Lease, request: Request) -> None:
        """It starts under this lease."""
        row = lease.placement.row
        if request.prompt is not None:
            self.memory.placed(row.index, request.prompt)
        if request.session is not None and request.writes:
            self.homes.placed(request.session, request.model, row)

    def ending(self, request: Request) -> None:
        """Its answer is over; what it teaches comes a little later (`learn`)."""
        if is_long(request):
            self.behind = True

    def dropped(self, lease: Lease, request: Request, *, cost_nothing: bool) -> None:
        """It ended there without an answer; `cost_nothing`: nor is its caller to pay for it."""
        placement: Placement | None = lease.placement
        if placement is None:
            return
        if cost_nothing:
            self.dispatcher.settled(placement, 0.0, 0.0, 0.0)
        if request.prompt is not None and _is_there(self.dispatcher.board, placement):
            self.memory.dropped(placement.row.index, request.prompt)

    def learn(
        self,
        lease: Lease,
        request: Request,
        told: Told | None,
        seen: float,
        *,
        whole: bool,
        sizes: bool = True,
    ) -> None:
        """An answer came to this; `told` None: its node said nothing, but `seen` tokens went out.

        `whole`: it ended by itself. `sizes`: whether later ones are to be guessed by it.
        """
        self.behind = False  # whoever learns learns of all that has ended
        placement: Placement | None = lease.placement
        if placement is None:
            return
        ask, completion = placement.ask, seen
        if told is not None:
            completion = told.completion
            self.dispatcher.settled(placement, told.prompt, told.cached, completion)
        elif seen:
            cached = ask.cached.get(placement.row.index, 0.0)
            self.dispatcher.settled(placement, ask.prompt, cached, seen)
        if sizes and (request.writes or told is not None):
            self.estimates.learn(
                request.model,
                request.party,
                request.text,
                0.0 if told is None else told.prompt,
                completion / max(1, ask.slots),
                request.max_tokens,
                request.ids,
                request.media,
                whole=whole,
            )
        if request.prompt is None:
            return
        if not _is_there(self.dispatcher.board, placement):
            return
        if told is None:
            self.memory.dropped(placement.row.index, request.prompt)
        else:
            self.memory.finished(
                placement.row.index, request.prompt, told.prompt, told.cached, told.completion
            )


def is_long(request: Request) -> bool:
    """Whether it matters what nodes have cached of its prompt."""
    return request.prompt is not None and request.prompt.size >= LONG


def _slots(request: Request, plan: Plan) -> int:
    """Slots that it takes: an endpoint that finds its limit by trying may have fewer just now."""
    most = max(node.slots_total for _, nodes in plan.able for node in nodes)
    return min(request.slots, most)


def _is_there(board: Board, placement: Placement) -> bool:
    """Whether its row is still that of a node: another may have taken its index."""
    return board.by_name.get(placement.row.name) is placement.row
