"""Prompts: random ordinary words, of a wanted length in the server's own tokens.

A prompt is `Text`: its first words are those of a common prefix, the rest is its own. The same seed
gives the same texts, and no two requests of a run have a longer beginning in common than they
should, so that a server's prompt cache helps as much as is wanted, and no more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

_TEXT = """
    the river ran under an old bridge where people used to meet and talk about work weather music
    trade letters from far away what their children had learnt that year while boats went by with
    stone wood salt wool for towns along coast which nobody here seen before one day some of them
    would go there find small house near water then come back home tell how long it was light rain
    fell over green fields every morning men women walked down into city market bread fish were sold
    new road made travel easy but many still took slow way because they liked open sky high hill
"""

WORDS = tuple(dict.fromkeys(_TEXT.split()))

KEPT_PREFIXES = 64
"""Texts of prefixes that are kept; others are made again."""

MOST_PROMPT_TOKENS = 200_000
"""Tokens of a prompt: about a megabyte of text, for each request that is under way."""


@dataclass(frozen=True, slots=True)
class Text:
    """What a prompt says, as far as caches matter. Lengths are tokens."""

    stream: int
    """Number of the text: the same number, the same words, as far as the shorter of two goes."""
    tokens: int
    prefix: int = 0
    """Number of the prefix; 0: none."""
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many tokens the server counts for words: `overhead + words * tokens_per_word`."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0
    """Tokens of a prompt without words: of the chat template."""
    source: str = "guessed: one token a word"

    def words(self, tokens: int) -> int:
        """Words of a prompt of so many tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes prompts."""

    seed: int
    calibration: Calibration

    def write(self, text: Text) -> str:
        """Write a prompt."""
        whole = self.calibration.words(text.tokens)
        shared = 0
        if text.prefix:
            shared = min(whole, round(text.prefix_tokens / self.calibration.tokens_per_word))
        if not shared:
            return random_words(f"{self.seed} stream {text.stream}", whole)
        prefix = _prefix_words(f"{self.seed} prefix {text.prefix}", shared)
        if shared == whole:
            return prefix
        return f"{prefix} {random_words(f'{self.seed} stream {text.stream}', whole - shared)}"


def random_words(seed: str, count: int) -> str:
    """So many words; the same seed and a larger count only add words.

    Each run of `len(WORDS)` words has each word once, so that two texts of a length hardly differ
    in tokens.
    """
    rng = random.Random(seed)
    words: list[str] = []
    while len(words) < count:
        words += rng.sample(WORDS, len(WORDS))
    return " ".join(words[:count])


_prefix_words = lru_cache(maxsize=KEPT_PREFIXES)(random_words)


def fit(short: tuple[int, int], long: tuple[int, int], source: str) -> Calibration:
    """Calibrate by two prompts, each as (words, tokens that the server counted).

    Raises ValueError where the longer one has not more tokens.
    """
    (few, few_tokens), (many, many_tokens) = short, long
    if many <= few or many_tokens <= few_tokens:
        raise ValueError("the longer prompt has not more tokens")
    per_word = (many_tokens - few_tokens) / (many - few)
    return Calibration(per_word, few_tokens - few * per_word, source)
