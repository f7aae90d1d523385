"""What is expected of a request: its size, its answer's, and which nodes know its beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.fleet.node import Lease
from gateway.fleet.prompt_cache import FleetPromptCache
from gateway.fleet.prompt_tree import PromptKey
from gateway.request import Request
from gateway.scheduling.candidates import NodeCandidates
from gateway.scheduling.dispatcher import Dispatcher
from gateway.scheduling.forecast import NEGLIGIBLE_COMPLETION
from gateway.scheduling.placement_state import (
    NO_ROWS,
    NodeSlots,
    Placement,
    PlacementState,
    QueuedRequest,
)
from gateway.scheduling.token_estimates import TokenEstimates

LONG_PROMPT_BYTES = 1024
"""Bytes of a prompt from which on it matters that others find what it has left in a cache."""


@dataclass(slots=True)
class ReportedTokens:
    """Tokens of an answer, as its node told them; of a prompt `cached` is a part."""

    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float


def has_long_prompt(request: Request) -> bool:
    """Whether it matters what nodes have cached of its prompt."""
    return request.prompt_key is not None and request.prompt_key.size >= LONG_PROMPT_BYTES


def _slots(request: Request, plan: NodeCandidates) -> int:
    """Slots that it takes: an endpoint that finds its limit by trying may have fewer just now."""
    most = max(node.slots_total for _, nodes in plan.by_model for node in nodes)
    return min(request.slots, most)


def _is_there(board: PlacementState, placement: Placement) -> bool:
    """Whether its row is still that of a node: another may have taken its index."""
    return board.by_name.get(placement.row.name) is placement.row


MOST_SESSIONS = 65_536
"""The one that was quiet longest is forgotten first."""

AFFINITY_BONUS = 1 / 3
"""Share of what a request takes alone by which another node must be quicker to get it: one and a
half times as quick, as far as measured speeds can be told apart."""


@dataclass(slots=True, eq=False)
class SessionAffinity:
    """The node of each conversation's last request, one for each model it speaks to."""

    _rows: OrderedDict[tuple[str, str], NodeSlots] = field(default_factory=OrderedDict)

    def placed(self, session: str, model: str, row: NodeSlots) -> None:
        """A request of it goes there."""
        key = session, model
        self._rows[key] = row
        self._rows.move_to_end(key)
        if len(self._rows) > MOST_SESSIONS:
            self._rows.popitem(last=False)

    def penalties(
        self, session: str, model: str, queued: QueuedRequest, placement_state: PlacementState
    ) -> Mapping[int, float]:
        """The doubts of `ask`, and a trust in its conversation's node."""
        row = self._rows.get((session, model))
        if row is None or placement_state.by_name.get(row.name) is not row:
            return queued.penalties
        alone = queued.prompt_tokens / row.prefill_tps + queued.completion_tokens * row.token_base
        doubt = queued.penalties.get(row.index, 0.0)
        return {**queued.penalties, row.index: doubt - AFFINITY_BONUS * alone}


@dataclass(slots=True, eq=False)
class DemandModel:
    """Makes requests into numbers, and learns from what they came to."""

    dispatcher: Dispatcher
    prompt_cache: FleetPromptCache
    token_estimates: TokenEstimates = field(default_factory=TokenEstimates)
    session_affinity: SessionAffinity = field(default_factory=SessionAffinity)
    learning_pending: bool = False
    """Whether long prompts have ended of which nothing was learnt yet: the next may go on with one,
    and what a node remembers depends on the order in which requests end and begin there."""

    def __post_init__(self) -> None:
        self.dispatcher.refresh_cached = self.refresh_cached

    def build(self, request: Request, candidates: NodeCandidates) -> QueuedRequest:
        """The request in numbers, as they stand now."""
        sizes = request.expected_tokens
        if sizes is None:
            sizes = request.expected_tokens = self.token_estimates.expected_tokens(
                request.model,
                request.fairness_key,
                request.text_bytes,
                request.max_tokens if request.generates else 0,
                request.exact_tokens,
                request.media_tokens,
            )
        tokens, completion = sizes
        # By place, since it is made for each request.
        ask = QueuedRequest(
            request.id,
            candidates.groups,
            request.priority,
            request.fairness_key,
            request.received_at,
            request.slots if request.slots < 2 else _slots(request, candidates),
            tokens,
            completion if request.generates else NEGLIGIBLE_COMPLETION,
            NO_ROWS,
            NO_ROWS,
            candidates.excluded,
            candidates.failed,
            candidates.penalties,
        )
        ask.deadline = request.deadline
        if not request.slots:
            ask.slotless_caller = request.caller.id
        if request.session is not None and request.generates:
            ask.penalties = self.session_affinity.penalties(
                request.session, request.model, ask, self.dispatcher.placement_state
            )
        prompt = request.prompt_key
        if prompt is not None:
            prompt.tokens = tokens
            ask.prompt_key = prompt
            self.refresh_cached(ask)
            if prompt.blocks:
                ask.affinity_hash = prompt.blocks[0]
        return ask

    def refresh_cached(self, queued: QueuedRequest) -> None:
        """Look up what the nodes know of its prompt by now."""
        prompt = queued.prompt_key
        if isinstance(prompt, PromptKey):
            found = self.prompt_cache.lookup(prompt)
            queued.prompt_tokens, queued.cached, queued.pending = (
                found.tokens,
                found.cached,
                found.pending,
            )

    def placed(self, lease: Lease, request: Request) -> None:
        """It starts under this lease."""
        row = lease.placement.row
        if request.prompt_key is not None:
            self.prompt_cache.request_placed(row.index, request.prompt_key)
        if request.session is not None and request.generates:
            self.session_affinity.placed(request.session, request.model, row)

    def answer_ended(self, request: Request) -> None:
        """Its answer is over; what it teaches comes a little later (`learn`)."""
        if has_long_prompt(request):
            self.learning_pending = True

    def abandoned(self, lease: Lease, request: Request, *, refund: bool) -> None:
        """It ended there without an answer; `cost_nothing`: nor is its caller to pay for it."""
        placement: Placement | None = lease.placement
        if placement is None:
            return
        if refund:
            self.dispatcher.settled(placement, 0.0, 0.0, 0.0)
        if request.prompt_key is not None and _is_there(self.dispatcher.placement_state, placement):
            self.prompt_cache.request_dropped(placement.row.index, request.prompt_key)

    def learn(
        self,
        lease: Lease,
        request: Request,
        reported: ReportedTokens | None,
        sent_tokens: float,
        *,
        complete: bool,
        learn_sizes: bool = True,
    ) -> None:
        """An answer came to this; `told` None: its node said nothing, but `seen` tokens went out.

        `whole`: it ended by itself. `sizes`: whether later ones are to be guessed by it.
        """
        self.learning_pending = False  # whoever learns learns of all that has ended
        placement: Placement | None = lease.placement
        if placement is None:
            return
        ask, completion = placement.queued, sent_tokens
        if reported is not None:
            completion = reported.completion_tokens
            self.dispatcher.settled(
                placement, reported.prompt_tokens, reported.cached_tokens, completion
            )
        elif sent_tokens:
            cached = ask.cached.get(placement.row.index, 0.0)
            self.dispatcher.settled(placement, ask.prompt_tokens, cached, sent_tokens)
        if learn_sizes and (request.generates or reported is not None):
            self.token_estimates.learn(
                request.model,
                request.fairness_key,
                request.text_bytes,
                0.0 if reported is None else reported.prompt_tokens,
                completion / max(1, ask.slots),
                request.max_tokens,
                request.exact_tokens,
                request.media_tokens,
                complete=complete,
            )
        if request.prompt_key is None:
            return
        if not _is_there(self.dispatcher.placement_state, placement):
            return
        if reported is None:
            self.prompt_cache.request_dropped(placement.row.index, request.prompt_key)
        else:
            self.prompt_cache.request_finished(
                placement.row.index,
                request.prompt_key,
                reported.prompt_tokens,
                reported.cached_tokens,
                reported.completion_tokens,
            )
