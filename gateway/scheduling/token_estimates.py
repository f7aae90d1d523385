"""What a request will cost: tokens of its prompt without a tokenizer, and of its answer.

**Prompts.** A model has so many tokens for a byte of text; a caller's texts (another language,
code) differ from others', so that the caller's own ratio stands above the model's as far as there
is evidence for it. Sums of tokens and of bytes decay, so that long prompts count for more.
The tokens of images and audio are guessed by their size (`proxy/inbound/media.py`); a factor for
each model corrects it.

**Answers.** Lengths scatter about as an exponential distribution does, and `max_tokens` cuts some
off: those tell only that the answer would have been at least so long. The mean of such a
distribution is all tokens over the number of answers that ended by themselves (its maximum
likelihood under censoring; Lawless, Statistical Models and Methods for Lifetime Data, 4.1). A
caller whose answers all run to their limit gets an estimate at the limit, and one who leaves early
teaches no short lengths. The caller's own mean stands above the model's, and that above a constant.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, TypeVar

TOKENS_PER_BYTE = 0.25
"""English text has about 4 bytes a token in the tokenizers of today's open models."""

LEAST_TOKENS_PER_BYTE, MOST_TOKENS_PER_BYTE = 1 / 64, 2.0
"""Tokens of a byte outside of which `usage` is taken for wrong (bounded)."""

PRIOR_BYTES = 1000.0
"""Bytes of text that the first guess of a model, or the model's ratio for a caller, is worth."""

TEXT_HALF_LIFE = 100_000.0
"""Bytes of text after which earlier ones count half."""

OUTLIER_RATIO = 3.0
"""A prompt counts as at most so many times more or fewer tokens than expected."""

MOST_MEDIA_STEP = 4.0

MOST_MEDIA_FACTOR, LEAST_MEDIA_FACTOR = 16.0, 1 / 16
"""Bounds of the factor for pictures."""

DEFAULT_ANSWER_TOKENS = 256.0
"""Tokens of an answer that nothing is known about."""

PRIOR_ANSWERS = 1.0
"""Answers that the mean of the level below is worth at first; less with each that ends."""

ANSWERS_HALF_LIFE = 24.0
"""Answers after which earlier ones count half."""

OUTLIER_ANSWER_MEANS = 8.0
"""One answer counts as at most so many means."""

MOST_TOKENS = float(1 << 20)
"""Of a prompt or an answer; more is a mistake and is bounded."""

MOST_TEXT_BYTES = 1e9
"""Bytes of a prompt; more teach nothing more."""


@dataclass(slots=True)
class TokenStats:
    """Decaying sums over the answers of one model, or of one caller to it."""

    prompt_tokens: float = 0.0
    prompt_bytes: float = 0.0
    """Bytes that those tokens were."""
    answer_tokens: float = 0.0
    """Tokens of answers."""
    finished_answers: float = 0.0
    """How many of them ended by themselves."""
    media_factor: float = 1.0
    """Tokens of pictures over what was guessed."""

    def tokens_per_byte(self, prior_ratio: float) -> float:
        """Tokens of a byte, where `below` is what to think without evidence."""
        return (self.prompt_tokens + PRIOR_BYTES * prior_ratio) / (self.prompt_bytes + PRIOR_BYTES)

    def mean_answer(self, prior_mean: float) -> float:
        """Tokens of an answer that nothing cuts off."""
        prior = PRIOR_ANSWERS / (1 + self.finished_answers)
        mean = (self.answer_tokens + prior * prior_mean) / (self.finished_answers + prior)
        return min(mean, MOST_TOKENS)

    def add_prompt(self, size: float, tokens: float) -> None:
        """A prompt of so many bytes was so many tokens."""
        kept = 0.5 ** (min(size, TEXT_HALF_LIFE) / TEXT_HALF_LIFE)
        self.prompt_tokens = self.prompt_tokens * kept + tokens
        self.prompt_bytes = self.prompt_bytes * kept + size

    def add_answer(self, tokens: float, finished: bool, prior_mean: float) -> None:  # noqa: FBT001
        """An answer had so many tokens, and `ended` by itself or was cut off there."""
        self.answer_tokens = self.answer_tokens * _KEPT + min(
            tokens, OUTLIER_ANSWER_MEANS * self.mean_answer(prior_mean)
        )
        self.finished_answers = self.finished_answers * _KEPT + finished


K = TypeVar("K")

_KEPT: Final = 0.5 ** (1 / ANSWERS_HALF_LIFE)

_NOTHING: Final = TokenStats()


@dataclass(slots=True, eq=False)
class TokenEstimates:
    """Both estimates, corrected by every answer. Who was not heard of for long is forgotten."""

    most_models: int = 1024
    most_callers: int = 16_384
    """Pairs of caller and model."""
    _models: OrderedDict[str, TokenStats] = field(default_factory=OrderedDict)
    _callers: OrderedDict[tuple[str, str], TokenStats] = field(default_factory=OrderedDict)

    def expected_tokens(
        self,
        model: str,
        caller: str,
        text_bytes: float,
        max_tokens: float | None,
        exact_tokens: float = 0,
        media_tokens: float = 0,
    ) -> tuple[float, float]:
        """Expected tokens of the prompt, and of each answer.

        `text` is bytes, `ids` tokens that are known, `media` tokens guessed of pictures and sound.
        Absurd figures are bounded; a `max_tokens` that is no number counts as none.
        """
        common = self._models.get(model, _NOTHING)
        own = self._callers.get((caller, model), _NOTHING)
        # `own.ratio(common.ratio(TOKENS_PER_BYTE))`, spelt out: it is for each request.
        ratio = (common.prompt_tokens + PRIOR_BYTES * TOKENS_PER_BYTE) / (
            common.prompt_bytes + PRIOR_BYTES
        )
        ratio = (own.prompt_tokens + PRIOR_BYTES * ratio) / (own.prompt_bytes + PRIOR_BYTES)
        prompt = text_bytes * ratio + exact_tokens
        if media_tokens:
            prompt += media_tokens * common.media_factor
        if not 0.0 <= prompt <= MOST_TOKENS:
            prompt = _tokens(prompt)
        if max_tokens is not None and max_tokens <= 0:
            return prompt, 0.0
        mean = own.mean_answer(common.mean_answer(DEFAULT_ANSWER_TOKENS))
        if max_tokens is None or not max_tokens < MOST_TOKENS:
            return prompt, mean
        # About what the limit leaves: at most the limit, at most the mean, less where they meet.
        return prompt, mean * max_tokens / math.hypot(mean, max_tokens)

    def learn(
        self,
        model: str,
        caller: str,
        text_bytes: float,
        prompt_tokens: float,
        completion_tokens: float,
        max_tokens: float | None,
        exact_tokens: float = 0,
        media_tokens: float = 0,
        *,
        complete: bool = True,
    ) -> None:
        """Take in what an answer came to; tokens of 0 are unknown.

        `completion_tokens` is of each answer. Not `whole`: it was cut short by its client or by a
        failure, which says nothing of how long it would have been.
        """
        common = _recent(self._models, model, self.most_models)
        own = _recent(self._callers, (caller, model), self.most_callers)
        usual = common.tokens_per_byte(TOKENS_PER_BYTE)
        if (
            0 < prompt_tokens < math.inf
            and 0 <= text_bytes + exact_tokens + media_tokens < math.inf
        ):
            text_bytes = min(text_bytes, MOST_TEXT_BYTES)
            left = min(prompt_tokens, MOST_TOKENS) - exact_tokens
            expected = text_bytes * own.tokens_per_byte(usual)
            if media_tokens > 0:
                _learn_media(common, left - expected, media_tokens)
            elif text_bytes > 0 and left > 0:
                tokens = min(max(left, expected / OUTLIER_RATIO), expected * OUTLIER_RATIO)
                tokens = min(
                    max(tokens, text_bytes * LEAST_TOKENS_PER_BYTE),
                    text_bytes * MOST_TOKENS_PER_BYTE,
                )
                own.add_prompt(text_bytes, tokens)
                common.add_prompt(text_bytes, tokens)
        if 0 < completion_tokens < math.inf:
            limited = max_tokens is not None and completion_tokens >= max_tokens - 1
            ended = complete and not limited
            below = common.mean_answer(DEFAULT_ANSWER_TOKENS)
            own.add_answer(completion_tokens, ended, below)
            common.add_answer(completion_tokens, ended, DEFAULT_ANSWER_TOKENS)


def _learn_media(common: TokenStats, tokens: float, guessed: float) -> None:
    """Correct the factor for pictures by what is left when the text's tokens are taken off."""
    factor = min(
        max(tokens / guessed, common.media_factor / MOST_MEDIA_STEP),
        common.media_factor * MOST_MEDIA_STEP,
    )
    factor = min(max(factor, LEAST_MEDIA_FACTOR), MOST_MEDIA_FACTOR)
    common.media_factor += (factor - common.media_factor) / 4


def _tokens(value: float) -> float:
    return min(value, MOST_TOKENS) if value > 0 else 0.0


def _recent(kept: OrderedDict[K, TokenStats], key: K, most: int) -> TokenStats:
    """What is kept under `key`, now the most recent; the one not heard of for longest goes."""
    found = kept.get(key)
    if found is None:
        if len(kept) >= most:
            kept.popitem(last=False)
        found = kept[key] = TokenStats()
    else:
        kept.move_to_end(key)
    return found
