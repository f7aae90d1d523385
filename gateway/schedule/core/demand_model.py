"""The demand model: what a request will take, learnt from what earlier ones took.

It predicts tokens (`TokenEstimates`), which nodes have the prompt's beginning cached
(`nodes.prompt_cache`), and which node served the session last (`SessionAffinity`).

**Prompts.** Each model has a ratio of tokens to bytes of text. A caller's texts (another language,
code) differ from others', so the caller's own ratio replaces the model's as evidence for it grows.
Sums of tokens and of bytes decay, so that long prompts count for more. The tokens of images and
audio are guessed by their size (`request/media.py`) and corrected by a factor for each model.

**Answers.** Lengths are distributed about exponentially, and `max_tokens` cuts some answers off:
of those only a lower bound of the length is known. The maximum likelihood estimate of the mean
under such censoring is all tokens divided by the number of answers that ended by themselves
(Lawless, Statistical Models and Methods for Lifetime Data, 4.1). So a caller whose answers all run
into their limit gets an estimate at the limit, and one that disconnects early teaches no short
lengths. The caller's own mean has the model's as its prior, and that a constant.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from gateway.lease import GrantedLease, LeaseRequest, PromptKey, RequestSize, UsageReport
from gateway.nodes.prompt_cache import FleetPromptCache
from gateway.schedule.candidates import NodeCandidates, nodes_of
from gateway.schedule.core.dispatcher import Dispatcher
from gateway.schedule.core.requests import NodeSlots, QueuedRequest, alive_rows

# Size of a prompt from which on it pays to know at once what earlier ones left in the caches.
LONG_PROMPT_BYTES = 1024
# Sessions that are remembered; the one that was quiet longest is forgotten first.
MOST_SESSIONS = 65_536
# Head start of the node that served the session last, as a share of the request's time alone:
# another node must be one and a half times as fast, a difference that measured speeds can show.
AFFINITY_BONUS = 1 / 3
# English text has about 4 bytes per token in the tokenizers of today's open models.
TOKENS_PER_BYTE = 0.25
# Tokens per byte outside of which a reported `usage` is taken for wrong, and clamped.
LEAST_TOKENS_PER_BYTE, MOST_TOKENS_PER_BYTE = 1 / 64, 2.0
# Weight of the prior (a constant for a model, the model's ratio for a caller), in bytes of text.
PRIOR_BYTES = 1000.0
TEXT_HALF_LIFE = 100_000.0  # bytes of text after which earlier ones count half
OUTLIER_RATIO = 3.0  # a prompt counts as at most this many times more or fewer tokens than expected
MOST_MEDIA_STEP = 4.0  # one prompt moves the media factor's target by at most this ratio
MOST_MEDIA_FACTOR, LEAST_MEDIA_FACTOR = 16.0, 1 / 16  # bounds of the media factor
DEFAULT_ANSWER_TOKENS = 256.0
# Weight of the prior mean at first, in answers; less with each answer that ends.
PRIOR_ANSWERS = 1.0
ANSWERS_HALF_LIFE = 24.0  # answers after which earlier ones count half
OUTLIER_ANSWER_MEANS = 8.0  # one answer counts as at most this many means
# Room that a shared pool must have for an answer, in its expected lengths, as far as `max_tokens`
# allows: of lengths that are distributed exponentially one in seven is greater.
POOL_ANSWER_MARGIN = 2.0
# Room that it must have for a prompt beyond the estimate, as a share of that, while nothing is
# known of such texts; it becomes less with the evidence. An overflow ends all that runs there.
POOL_PROMPT_DOUBT = 1.25
MOST_TOKENS = float(1 << 20)  # tokens of a prompt or an answer; more is a mistake and is clamped
MOST_TEXT_BYTES = 1e9  # bytes of a prompt; further ones teach nothing


def has_long_prompt(request: LeaseRequest) -> bool:
    """Whether it pays to know at once which nodes have its prompt cached."""
    return request.size.prompt_key is not None and request.size.prompt_key.size >= LONG_PROMPT_BYTES


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

    def penalties(self, session: str, model: str, queued: QueuedRequest) -> Mapping[int, float]:
        """The request's penalties, with a bonus for its session's node."""
        row = self._rows.get((session, model))
        if row is None or not row.is_current:
            return queued.penalties
        alone = queued.prompt_tokens / row.prefill_tps + queued.completion_tokens * row.token_base
        penalty = queued.penalties.get(row.index, 0.0)
        return {**queued.penalties, row.index: penalty - AFFINITY_BONUS * alone}


@dataclass(slots=True)
class TokenStats:
    """Decaying sums over the answers of one model, or of one caller to it."""

    prompt_tokens: float = 0.0
    prompt_bytes: float = 0.0  # bytes of the text of those prompt tokens
    answer_tokens: float = 0.0
    finished_answers: float = 0.0  # how many answers ended by themselves
    media_factor: float = 1.0  # real tokens of images and audio, divided by those guessed

    def aged(self, kept: float) -> TokenStats:
        """These sums with a share of their evidence. Raises: ValueError for impossible figures."""
        sums = self.prompt_tokens, self.prompt_bytes, self.answer_tokens, self.finished_answers
        if min(sums) < 0 or not LEAST_MEDIA_FACTOR <= self.media_factor <= MOST_MEDIA_FACTOR:
            raise ValueError("impossible figures")
        prompt_tokens, prompt_bytes, answer_tokens, finished = (kept * one for one in sums)
        return TokenStats(
            prompt_tokens, prompt_bytes, answer_tokens, finished, self.media_factor**kept
        )

    def mean_answer(self, prior_mean: float) -> float:
        """Mean tokens of an answer that nothing cuts off; `prior_mean` without evidence."""
        prior = PRIOR_ANSWERS / (1 + self.finished_answers)
        mean = (self.answer_tokens + prior * prior_mean) / (self.finished_answers + prior)
        return min(mean, MOST_TOKENS)

    def add_prompt(self, size: float, tokens: float, decayed: float) -> None:
        """A prompt of `size` bytes was `tokens` tokens; `decayed`: what remains of earlier ones."""
        self.prompt_tokens = self.prompt_tokens * decayed + tokens
        self.prompt_bytes = self.prompt_bytes * decayed + size

    def add_answer(self, tokens: float, finished: bool, mean: float) -> None:  # noqa: FBT001
        """An answer had `tokens` tokens; `finished`: it ended by itself, else it was cut off.

        `mean`: the `mean_answer` so far.
        """
        self.answer_tokens = self.answer_tokens * _ANSWER_DECAY + min(
            tokens, OUTLIER_ANSWER_MEANS * mean
        )
        self.finished_answers = self.finished_answers * _ANSWER_DECAY + finished

    def correct_media(self, tokens: float, guessed: float) -> None:
        """Images and audio were `tokens` tokens where `guessed` were expected at a factor of 1."""
        factor = min(
            max(tokens / guessed, self.media_factor / MOST_MEDIA_STEP),
            self.media_factor * MOST_MEDIA_STEP,
        )
        factor = min(max(factor, LEAST_MEDIA_FACTOR), MOST_MEDIA_FACTOR)
        self.media_factor += (factor - self.media_factor) / 4


Key = TypeVar("Key")
_ANSWER_DECAY: Final = 0.5 ** (1 / ANSWERS_HALF_LIFE)
_NO_STATS: Final = TokenStats()


@dataclass(slots=True, eq=False)
class TokenEstimates:
    """Both estimates, corrected by every answer. The least recently used are forgotten."""

    most_models: int = 1024
    most_callers: int = 16_384
    lessons: int = 0  # answers from which something was learnt
    _models: OrderedDict[str, TokenStats] = field(default_factory=OrderedDict)
    _callers: OrderedDict[tuple[str, str], TokenStats] = field(default_factory=OrderedDict)

    def expected_tokens(self, model: str, caller: str, size: RequestSize) -> tuple[float, float]:
        """Expected tokens of the prompt, and of each answer; 0 where nothing is generated.

        Absurd figures are clamped; a `max_tokens` of NaN counts as none.
        """
        max_tokens = size.max_tokens if size.generates else 0
        common = self._models.get(model, _NO_STATS)
        own = self._callers.get((caller, model), _NO_STATS)
        prompt = size.text_bytes * _tokens_per_byte(common, own) + size.exact_tokens
        if size.media_tokens:
            prompt += size.media_tokens * common.media_factor
        if not 0.0 <= prompt <= MOST_TOKENS:
            prompt = min(prompt, MOST_TOKENS) if prompt > 0 else 0.0
        if max_tokens is not None and max_tokens <= 0:
            return prompt, 0.0
        mean = own.mean_answer(common.mean_answer(DEFAULT_ANSWER_TOKENS))
        if max_tokens is None or not max_tokens < MOST_TOKENS:
            return prompt, mean
        # A smooth minimum: at most the limit, at most the mean, less where both are close.
        return prompt, mean * max_tokens / math.hypot(mean, max_tokens)

    def prompt_doubt(self, model: str, caller: str) -> float:
        """By what share of the estimate a prompt may well be longer."""
        common = self._models.get(model, _NO_STATS)
        own = self._callers.get((caller, model), _NO_STATS)
        seen = (own.prompt_bytes + common.prompt_bytes) / 2
        return POOL_PROMPT_DOUBT * PRIOR_BYTES / (seen + PRIOR_BYTES)

    def learn(
        self,
        model: str,
        caller: str,
        size: RequestSize,
        prompt_tokens: float,
        completion_tokens: float,
        *,
        complete: bool = True,
    ) -> None:
        """Learn from an answer; tokens of 0 are unknown.

        `completion_tokens` is of each answer. Not `complete`: its client or a failure cut it short,
        so its length says only that it would have been at least as long.
        """
        self.lessons += 1
        common = _most_recent(self._models, model, self.most_models)
        own = _most_recent(self._callers, (caller, model), self.most_callers)
        known, media = size.text_bytes + size.exact_tokens + size.media_tokens, size.media_tokens
        if 0 < prompt_tokens < math.inf and 0 <= known < math.inf:
            text_bytes = min(size.text_bytes, MOST_TEXT_BYTES)
            left = min(prompt_tokens, MOST_TOKENS) - size.exact_tokens
            expected = text_bytes * _tokens_per_byte(common, own)
            if media > 0:
                common.correct_media(left - expected, media)
            elif text_bytes > 0 and left > 0:
                tokens = min(max(left, expected / OUTLIER_RATIO), expected * OUTLIER_RATIO)
                tokens = min(
                    max(tokens, text_bytes * LEAST_TOKENS_PER_BYTE),
                    text_bytes * MOST_TOKENS_PER_BYTE,
                )
                decayed = 0.5 ** (min(text_bytes, TEXT_HALF_LIFE) / TEXT_HALF_LIFE)
                own.add_prompt(text_bytes, tokens, decayed)
                common.add_prompt(text_bytes, tokens, decayed)
        if 0 < completion_tokens < math.inf:
            most = size.max_tokens
            limited = most is not None and completion_tokens >= most - 1
            ended = complete and not limited
            mean = common.mean_answer(DEFAULT_ANSWER_TOKENS)
            own.add_answer(completion_tokens, ended, own.mean_answer(mean))
            common.add_answer(completion_tokens, ended, mean)

    def latest(self, lessons: int) -> Iterator[tuple[str | None, str, TokenStats]]:
        """What the last so many lessons have changed: caller (None: all of them), model, figures.

        The least recently used first.
        """
        # Copied: the caller may pause between two of them.
        for model, stats in [*islice(reversed(self._models.items()), lessons)][::-1]:
            yield None, model, stats
        for (caller, model), stats in [*islice(reversed(self._callers.items()), lessons)][::-1]:
            yield caller, model, stats

    def restore(self, caller: str | None, model: str, stats: TokenStats, kept: float) -> None:
        """Go on from these figures, with this share of their evidence. Raises: ValueError."""
        aged = stats.aged(kept)
        if caller is None:
            _most_recent(self._models, model, self.most_models)
            self._models[model] = aged
        else:
            _most_recent(self._callers, (caller, model), self.most_callers)
            self._callers[caller, model] = aged

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Forget what was learnt of the callers (fairness keys) that are gone."""
        for key in [key for key in self._callers if is_gone(key[0])]:
            del self._callers[key]


def _tokens_per_byte(common: TokenStats, own: TokenStats) -> float:
    """The caller's ratio, with the model's as its prior, and that a constant."""
    ratio = (common.prompt_tokens + PRIOR_BYTES * TOKENS_PER_BYTE) / (
        common.prompt_bytes + PRIOR_BYTES
    )
    return (own.prompt_tokens + PRIOR_BYTES * ratio) / (own.prompt_bytes + PRIOR_BYTES)


def _most_recent(entries: OrderedDict[Key, TokenStats], key: Key, most: int) -> TokenStats:
    """The entry of `key`, now the most recent; a new one drops the least recent beyond `most`."""
    stats = entries.get(key)
    if stats is None:
        if len(entries) >= most:
            entries.popitem(last=False)
        stats = entries[key] = TokenStats()
    else:
        entries.move_to_end(key)
    return stats


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
        overflows: int = 0,
    ) -> QueuedRequest:
        """The request in numbers, as predicted now.

        `earlier`: the same request in numbers; its estimate of the tokens still holds. `overflows`:
        `Tried.pool_overflows`.
        """
        caller, size = request.caller, request.size
        if earlier is None:
            prompt_tokens, completion_tokens = self._expected_tokens(request)
            key = _with_tokens(size.prompt_key, prompt_tokens)
        else:
            completion_tokens, key = earlier.completion_tokens, earlier.prompt_key
            prompt_tokens = earlier.prompt_tokens if key is None else key.tokens
        queued = QueuedRequest(
            request.id,
            candidates.groups,
            caller.priority,
            caller.fairness_key,
            received_at,
            size.slots if size.slots < 2 else _slots(request, candidates),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        if candidates.excluded or candidates.failed or candidates.penalties:
            queued.excluded, queued.failed = candidates.excluded, candidates.failed
            queued.penalties = candidates.penalties
        if caller.time_limit is not None:
            queued.deadline = received_at + caller.time_limit
        if self.dispatcher.placement_state.pools:
            self.estimate_pool(queued, request, overflows)
        if not size.slots:
            queued.slotless_caller = caller.id
        if caller.session is not None and size.generates:
            queued.penalties = self.session_affinity.penalties(
                caller.session, request.wanted.model, queued
            )
        if key is not None:
            queued.prompt_key = key
            self.refresh_cached(queued)
            if key.blocks:
                queued.affinity_hash = key.blocks[0]
        return queued

    def adopted(
        self, request: LeaseRequest, lease: GrantedLease, received_at: float
    ) -> QueuedRequest:
        """A request that was placed elsewhere, in numbers; it is no candidate for any row."""
        caller, prompt_tokens = request.caller, float(lease.reading.prompt_tokens)
        return QueuedRequest(
            request.id, (), caller.priority, caller.fairness_key, received_at, lease.slots,
            prompt_tokens=prompt_tokens,
            completion_tokens=self._expected_tokens(request)[1],
            prompt_key=_with_tokens(request.size.prompt_key, prompt_tokens),
            slotless_caller="" if lease.slots else caller.id,
        )  # fmt: skip

    def expected_prompt_tokens(self, request: LeaseRequest) -> int:
        """Tokens of its prompt, tools and system prompt included, as they are expected now."""
        return round(max(request.size.prompt_tokens, self._expected_tokens(request)[0]))

    def _expected_tokens(self, request: LeaseRequest) -> tuple[float, float]:
        return self.token_estimates.expected_tokens(
            request.wanted.model, request.caller.fairness_key, request.size
        )

    def estimate_pool(self, queued: QueuedRequest, request: LeaseRequest, overflows: int) -> None:
        """Set the tokens for which a shared pool must have room, by what is known now.

        They are rather too many, since an overflow ends all that runs there. A request that was
        ended twice (`overflows`) runs alone; a response that was cut has room for all that it may
        still write. One that needs a whole pool makes do with what others' work leaves, where that
        goes on everywhere and what is expected fits beside it.
        """
        estimates = self.token_estimates
        prompt, answer = self._expected_tokens(request)
        doubt = estimates.prompt_doubt(request.wanted.model, request.caller.fairness_key)
        prompt += doubt * max(0.0, prompt - request.size.exact_tokens)
        most = math.inf if request.size.max_tokens is None else request.size.max_tokens
        if overflows < 1 or request.wanted.resume_key is None:
            most = min(most, POOL_ANSWER_MARGIN * answer)
        slots = max(1, request.size.slots)
        tokens = math.inf if overflows > 1 else prompt + most * slots
        if 0.0 < max(one.pools()[1] for one in queued.groups[0]) <= tokens:
            left = _most_beside_others(queued)
            if prompt + min(most, answer) * slots <= left < tokens:
                queued.set_pool_tokens(left, beside_others=True)
                return
        queued.set_pool_tokens(tokens)

    def refresh_cached(self, queued: QueuedRequest) -> None:
        """Look up what the nodes have cached of its prompt by now."""
        if queued.prompt_key is not None:
            found = self.prompt_cache.lookup(queued.prompt_key)
            queued.set_cached(found.tokens, found.cached, found.pending)

    def placed(self, placement: QueuedRequest, request: LeaseRequest) -> None:
        """The request starts there."""
        row = placement.row
        if placement.prompt_key is not None:
            self.prompt_cache.request_placed(row.index, placement.prompt_key)
        if request.caller.session is not None and request.size.generates:
            self.session_affinity.placed(request.caller.session, request.wanted.model, row)

    def abandoned(self, placement: QueuedRequest, *, refund: bool) -> None:
        """The request ended there without an answer; `refund`: its caller does not pay for it."""
        if refund:
            self.dispatcher.settled(placement, 0.0, 0.0)
        if placement.prompt_key is not None and placement.row.is_current:
            self.prompt_cache.request_dropped(placement.row.index, placement.prompt_key)

    def answer_ended(self, request: LeaseRequest) -> None:
        """Its answer has ended; `learn` follows a little later."""
        if has_long_prompt(request):
            self.learning_pending = True

    def learn(
        self,
        placement: QueuedRequest,
        request: LeaseRequest,
        report: UsageReport,
        learn_sizes: bool = True,  # noqa: FBT001, FBT002 - this runs for each request
    ) -> None:
        """Learn from an answer that has ended; `learn_sizes`: correct the token estimates by it."""
        self.learning_pending = False  # The caller learns of all answers that have ended.
        reported, completion = report.reported, report.sent_tokens
        if reported is not None:
            completion = reported.completion_tokens
            read = reported.prompt_tokens - reported.cached_tokens
            self.dispatcher.settled(placement, read, completion)
        elif completion:
            cached = placement.cached.get(placement.row.index, 0.0)
            self.dispatcher.settled(placement, placement.prompt_tokens - cached, completion)
        size = request.size
        if learn_sizes and (size.generates or reported is not None):
            self.token_estimates.learn(
                request.wanted.model,
                request.caller.fairness_key,
                size,
                0.0 if reported is None else reported.prompt_tokens,
                completion / (placement.slots or 1),
                complete=report.complete,
            )
        prompt_key = placement.prompt_key
        if prompt_key is None or not placement.row.is_current:
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
                request.caller.id,
            )


def _with_tokens(key: PromptKey | None, tokens: float) -> PromptKey | None:
    """The key of a prompt of which so many tokens are expected."""
    if key is None:
        return None
    return PromptKey(key.blocks, tokens, key.ends, key.size, key.omits_volatile)


def _slots(request: LeaseRequest, candidates: NodeCandidates) -> int:
    """Slots that it takes: at most those that any of its nodes has.

    A node that has to learn its endpoint's limit may have fewer just now than the request asks for.
    """
    most = max(node.slots_total for node in nodes_of(candidates.by_model))
    return min(request.size.slots, most)


def _most_beside_others(queued: QueuedRequest) -> float:
    """The most tokens that others' work leaves of a pool; infinity: it leaves some row alone."""
    rows = list(alive_rows(queued.groups[:1], queued.excluded))
    if not all(row.pool and row.foreign for row in rows):
        return math.inf
    return max([row.pool - row.pool_foreign for row in rows], default=math.inf)
