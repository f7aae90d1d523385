"""The demand model: what a request will take, learnt from what earlier ones took.

It predicts tokens (`token_estimates.py`), which nodes have the prompt's beginning cached
(`fleet.prompt_cache`), and which node served the session last (`SessionAffinity`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.fleet.prompt_cache import FleetPromptCache
from gateway.lease import LeaseRequest, PromptKey, Usage
from gateway.scheduling.dispatcher import Dispatcher
from gateway.scheduling.fleet_sync import NodeCandidates
from gateway.scheduling.node_slots import (
    NEGLIGIBLE_COMPLETION,
    NO_ROWS,
    NodeSlots,
    Placement,
    QueuedRequest,
)
from gateway.scheduling.placement_state import PlacementState
from gateway.scheduling.token_estimates import TokenEstimates

LONG_PROMPT_BYTES = 1024
"""Size of a prompt from which on it pays to know at once what earlier ones left in the caches."""

MOST_SESSIONS = 65_536
"""Sessions that are remembered; the one that was quiet longest is forgotten first."""

AFFINITY_BONUS = 1 / 3
"""Head start of the node that served the session last, as a share of the request's time alone:
another node must be one and a half times as fast, a difference that measured speeds can show."""


def has_long_prompt(request: LeaseRequest) -> bool:
    """Whether it pays to know at once which nodes have its prompt cached."""
    return request.prompt_key is not None and request.prompt_key.size >= LONG_PROMPT_BYTES


@dataclass(slots=True, eq=False)
class SessionAffinity:
    """The node of each session's last request, for each model that it uses."""

    most_sessions: int = MOST_SESSIONS
    _rows: OrderedDict[tuple[str, str], NodeSlots] = field(default_factory=OrderedDict)

    def placed(self, session: str, model: str, row: NodeSlots) -> None:
        """A request of the session goes to this row."""
        key = session, model
        self._rows[key] = row
        self._rows.move_to_end(key)
        if len(self._rows) > self.most_sessions:
            self._rows.popitem(last=False)

    def penalties(
        self, session: str, model: str, queued: QueuedRequest, placement_state: PlacementState
    ) -> Mapping[int, float]:
        """The request's penalties, with a bonus for its session's node."""
        row = self._rows.get((session, model))
        if row is None or placement_state.by_name.get(row.name) is not row:
            return queued.penalties
        alone = queued.prompt_tokens / row.prefill_tps + queued.completion_tokens * row.token_base
        penalty = queued.penalties.get(row.index, 0.0)
        return {**queued.penalties, row.index: penalty - AFFINITY_BONUS * alone}


@dataclass(slots=True, eq=False)
class DemandModel:
    """Turns requests into numbers, and learns from their results."""

    dispatcher: Dispatcher
    prompt_cache: FleetPromptCache
    token_estimates: TokenEstimates = field(default_factory=TokenEstimates)
    session_affinity: SessionAffinity = field(default_factory=SessionAffinity)
    learning_pending: bool = False
    """Whether long prompts have ended of which nothing was learnt yet: the next request may
    continue one, and a node's cache depends on the order in which requests start and end there."""

    def __post_init__(self) -> None:
        self.dispatcher.set_cache_refresh(self.refresh_cached)

    def build(
        self,
        request: LeaseRequest,
        candidates: NodeCandidates,
        received_at: float,
        earlier: QueuedRequest | None = None,
    ) -> QueuedRequest:
        """The request in numbers, as predicted now.

        `earlier`: the same request in numbers; its estimate of the tokens still holds.
        """
        key = request.prompt_key
        if earlier is None:
            prompt_tokens, completion_tokens = self.token_estimates.expected_tokens(
                request.model,
                request.fairness_key,
                request.text_bytes,
                request.max_tokens if request.generates else 0,
                request.exact_tokens,
                request.media_tokens,
            )
            if not request.generates:
                completion_tokens = NEGLIGIBLE_COMPLETION
            if key is not None:
                key = PromptKey(key.blocks, prompt_tokens, key.ends, key.size, key.omits_volatile)
        else:
            prompt_tokens, completion_tokens = earlier.prompt_tokens, earlier.completion_tokens
            if isinstance(earlier.prompt_key, PromptKey):
                key = earlier.prompt_key
                prompt_tokens = key.tokens
        # By position, since it is made for each request: keywords cost more.
        queued = QueuedRequest(
            request.id,
            candidates.groups,
            request.priority,
            request.fairness_key,
            received_at,
            request.slots if request.slots < 2 else _slots(request, candidates),
            prompt_tokens,
            completion_tokens,
            NO_ROWS,
            NO_ROWS,
            candidates.excluded,
            candidates.failed,
            candidates.penalties,
        )
        if request.time_limit is not None:
            queued.deadline = received_at + request.time_limit
        if not request.slots:
            queued.slotless_caller = request.caller
        if request.session is not None and request.generates:
            queued.penalties = self.session_affinity.penalties(
                request.session, request.model, queued, self.dispatcher.placement_state
            )
        if key is not None:
            queued.prompt_key = key
            self.refresh_cached(queued)
            if key.blocks:
                queued.affinity_hash = key.blocks[0]
        return queued

    def refresh_cached(self, queued: QueuedRequest) -> None:
        """Look up what the nodes have cached of its prompt by now."""
        prompt_key = queued.prompt_key
        if isinstance(prompt_key, PromptKey):
            found = self.prompt_cache.lookup(prompt_key)
            queued.set_cached(found.tokens, found.cached, found.pending)

    def placed(self, placement: Placement, request: LeaseRequest) -> None:
        """The request starts there."""
        row, prompt_key = placement.row, placement.queued.prompt_key
        if isinstance(prompt_key, PromptKey):
            self.prompt_cache.request_placed(row.index, prompt_key)
        if request.session is not None and request.generates:
            self.session_affinity.placed(request.session, request.model, row)

    def abandoned(self, placement: Placement | None, *, refund: bool) -> None:
        """The request ended there without an answer; `refund`: its caller does not pay for it.

        `placement`: None, if its row is no longer its node's.
        """
        if placement is None:
            return
        if refund:
            self.dispatcher.settled(placement, 0.0, 0.0, 0.0)
        prompt_key = placement.queued.prompt_key
        if isinstance(prompt_key, PromptKey) and self._row_is_current(placement):
            self.prompt_cache.request_dropped(placement.row.index, prompt_key)

    def answer_ended(self, request: LeaseRequest) -> None:
        """Its answer has ended; `learn` follows a little later."""
        if has_long_prompt(request):
            self.learning_pending = True

    def learn(
        self,
        placement: Placement | None,
        request: LeaseRequest,
        reported: Usage | None,
        sent_tokens: float,
        *,
        complete: bool,
        learn_sizes: bool = True,
    ) -> None:
        """Learn from an answer that has ended.

        `reported` is None if its node reported nothing; `sent_tokens` went to the client.
        `complete`: it ended by itself. `learn_sizes`: correct the token estimates by it.
        """
        self.learning_pending = False  # The caller learns of all answers that have ended.
        if placement is None:
            return
        queued = placement.queued
        completion: float = sent_tokens
        if reported is not None:
            completion = reported.completion_tokens
            self.dispatcher.settled(
                placement, reported.prompt_tokens, reported.cached_tokens, completion
            )
        elif sent_tokens:
            cached = queued.cached.get(placement.row.index, 0.0)
            self.dispatcher.settled(placement, queued.prompt_tokens, cached, sent_tokens)
        if learn_sizes and (request.generates or reported is not None):
            self.token_estimates.learn(
                request.model,
                request.fairness_key,
                request.text_bytes,
                0.0 if reported is None else reported.prompt_tokens,
                completion / max(1, queued.slots),
                request.max_tokens,
                request.exact_tokens,
                request.media_tokens,
                complete=complete,
            )
        prompt_key = queued.prompt_key
        if not isinstance(prompt_key, PromptKey) or not self._row_is_current(placement):
            return
        if reported is None:
            self.prompt_cache.request_dropped(placement.row.index, prompt_key)
        else:
            self.prompt_cache.request_finished(
                placement.row.index,
                prompt_key,
                reported.prompt_tokens,
                reported.cached_tokens,
                reported.completion_tokens,
            )

    def _row_is_current(self, placement: Placement) -> bool:
        """Whether its row is still that of a node: another row may have its index by now."""
        row = placement.row
        return self.dispatcher.placement_state.by_name.get(row.name) is row


def _slots(request: LeaseRequest, candidates: NodeCandidates) -> int:
    """Slots that it takes: at most those that any of its nodes has.

    A node that has to learn its endpoint's limit may have fewer just now than the request asks for.
    """
    most = max(node.slots_total for _, nodes in candidates.by_model for node in nodes)
    return min(request.slots, most)
