"""What a request will cost: tokens of its prompt without a tokenizer, and of its answer.

**Prompts.** A model has so many tokens for a byte of text; a caller's texts (another language,
code) differ from others', so that the caller's own ratio stands above the model's as far as there
is evidence for it. Sums of tokens and of bytes decay, so that long prompts count for more.
Pictures and sound are guessed by their size (`relay/peek.py`); a factor for each model corrects it.

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
FEWEST_PER_BYTE, MOST_PER_BYTE = 1 / 64, 2.0
"""Tokens of a byte outside of which `usage` is taken for wrong (bounded)."""
PRIOR_BYTES = 1000.0
"""Bytes of text that the first guess of a model, or the model's ratio for a caller, is worth."""
TEXT_MEMORY = 100_000.0
"""Bytes of text after which earlier ones count half."""
UNEXPECTED_RATIO = 3.0
"""A prompt counts as at most so many times more or fewer tokens than expected."""
MEDIA_STEP = 4.0
MOST_MEDIA, LEAST_MEDIA = 16.0, 1 / 16
"""Bounds of the factor for pictures."""
USUAL_ANSWER = 256.0
"""Tokens of an answer that nothing is known about."""
PRIOR_ANSWERS = 1.0
"""Answers that the mean of the level below is worth at first; less with each that ends."""
ANSWERS_MEMORY = 24.0
"""Answers after which earlier ones count half."""
LONGEST_ANSWERS = 8.0
"""One answer counts as at most so many means."""
MOST_TOKENS = float(1 << 20)
"""Of a prompt or an answer; more is a mistake and is bounded."""
MOST_TEXT = 1e9
"""Bytes of a prompt; more teach nothing more."""


@dataclass(slots=True)
class Learnt:
    """Decaying sums over the answers of one model, or of one caller to it."""

    tokens: float = 0.0
    text: float = 0.0
    """Bytes that those tokens were."""
    length: float = 0.0
    """Tokens of answers."""
    ended: float = 0.0
    """How many of them ended by themselves."""
    media: float = 1.0
    """Tokens of pictures over what was guessed."""

    def ratio(self, below: float) -> float:
        """Tokens of a byte, where `below` is what to think without evidence."""
        return (self.tokens + PRIOR_BYTES * below) / (self.text + PRIOR_BYTES)

    def mean(self, below: float) -> float:
        """Tokens of an answer that nothing cuts off."""
        prior = PRIOR_ANSWERS / (1 + self.ended)
        mean = (self.length + prior * below) / (self.ended + prior)
        return min(mean, MOST_TOKENS)

    def read(self, text: float, tokens: float) -> None:
        """A prompt of so many bytes was so many tokens."""
        kept = 0.5 ** (min(text, TEXT_MEMORY) / TEXT_MEMORY)
        self.tokens = self.tokens * kept + tokens
        self.text = self.text * kept + text

    def wrote(self, tokens: float, ended: bool, below: float) -> None:  # noqa: FBT001
        """An answer had so many tokens, and `ended` by itself or was cut off there."""
        self.length = self.length * _KEPT + min(tokens, LONGEST_ANSWERS * self.mean(below))
        self.ended = self.ended * _KEPT + ended


K = TypeVar("K")

_KEPT: Final = 0.5 ** (1 / ANSWERS_MEMORY)
_NOTHING: Final = Learnt()


@dataclass(slots=True, eq=False)
class Estimates:
    """Both estimates, corrected by every answer. Who was not heard of for long is forgotten."""

    most_models: int = 1024
    most_callers: int = 16_384
    """Pairs of caller and model."""
    _models: OrderedDict[str, Learnt] = field(default_factory=OrderedDict)
    _callers: OrderedDict[tuple[str, str], Learnt] = field(default_factory=OrderedDict)

    def ask_sizes(
        self,
        model: str,
        caller: str,
        text: float,
        max_tokens: float | None,
        ids: float = 0,
        media: float = 0,
    ) -> tuple[float, float]:
        """Expected tokens of the prompt, and of each answer.

        `text` is bytes, `ids` tokens that are known, `media` tokens guessed of pictures and sound.
        Absurd figures are bounded; a `max_tokens` that is no number counts as none.
        """
        common = self._models.get(model, _NOTHING)
        own = self._callers.get((caller, model), _NOTHING)
        # `own.ratio(common.ratio(TOKENS_PER_BYTE))`, spelt out: it is for each request.
        ratio = (common.tokens + PRIOR_BYTES * TOKENS_PER_BYTE) / (common.text + PRIOR_BYTES)
        ratio = (own.tokens + PRIOR_BYTES * ratio) / (own.text + PRIOR_BYTES)
        prompt = text * ratio + ids
        if media:
            prompt += media * common.media
        if not 0.0 <= prompt <= MOST_TOKENS:
            prompt = _tokens(prompt)
        if max_tokens is not None and max_tokens <= 0:
            return prompt, 0.0
        mean = own.mean(common.mean(USUAL_ANSWER))
        if max_tokens is None or not max_tokens < MOST_TOKENS:
            return prompt, mean
        # About what the limit leaves: at most the limit, at most the mean, less where they meet.
        return prompt, mean * max_tokens / math.hypot(mean, max_tokens)

    def learn(
        self,
        model: str,
        caller: str,
        text: float,
        prompt_tokens: float,
        completion_tokens: float,
        max_tokens: float | None,
        ids: float = 0,
        media: float = 0,
        *,
        whole: bool = True,
    ) -> None:
        """Take in what an answer came to; tokens of 0 are unknown.

        `completion_tokens` is of each answer. Not `whole`: it was cut short by its client or by a
        failure, which says nothing of how long it would have been.
        """
        common = _recent(self._models, model, self.most_models)
        own = _recent(self._callers, (caller, model), self.most_callers)
        usual = common.ratio(TOKENS_PER_BYTE)
        if 0 < prompt_tokens < math.inf and 0 <= text + ids + media < math.inf:
            text = min(text, MOST_TEXT)
            left = min(prompt_tokens, MOST_TOKENS) - ids
            expected = text * own.ratio(usual)
            if media > 0:
                _learn_media(common, left - expected, media)
            elif text > 0 and left > 0:
                tokens = min(max(left, expected / UNEXPECTED_RATIO), expected * UNEXPECTED_RATIO)
                tokens = min(max(tokens, text * FEWEST_PER_BYTE), text * MOST_PER_BYTE)
                own.read(text, tokens)
                common.read(text, tokens)
        if 0 < completion_tokens < math.inf:
            limited = max_tokens is not None and completion_tokens >= max_tokens - 1
            ended = whole and not limited
            below = common.mean(USUAL_ANSWER)
            own.wrote(completion_tokens, ended, below)
            common.wrote(completion_tokens, ended, USUAL_ANSWER)


def _learn_media(common: Learnt, tokens: float, guessed: float) -> None:
    """Correct the factor for pictures by what is left when the text's tokens are taken off."""
    factor = min(max(tokens / guessed, common.media / MEDIA_STEP), common.media * MEDIA_STEP)
    factor = min(max(factor, LEAST_MEDIA), MOST_MEDIA)
    common.media += (factor - common.media) / 4


def _tokens(value: float) -> float:
    return min(value, MOST_TOKENS) if value > 0 else 0.0


def _recent(kept: OrderedDict[K, Learnt], key: K, most: int) -> Learnt:
    """What is kept under `key`, now the most recent; the one not heard of for longest goes."""
    found = kept.get(key)
    if found is None:
        if len(kept) >= most:
            kept.popitem(last=False)
        found = kept[key] = Learnt()
    else:
        kept.move_to_end(key)
    return found
