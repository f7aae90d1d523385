"""The emulated language model: a vocabulary, and a next word that depends on all text before it.

Like a real model at temperature 0 it continues a text in the same way wherever it was cut: the
prompt plus a part of the answer leads to the same rest. So tests know the complete text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from zlib import crc32

WORDS = (
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are",
    "with", "as", "his", "they", "be", "at", "one", "have", "this", "from", "or", "had", "by",
    "hot", "but", "some", "what", "there", "we", "can", "out", "other", "were", "all", "your",
    "when", "up", "use", "word", "how", "said", "an", "each", "she", "which", "do", "their",
    "time", "if", "will", "way", "about", "many", "then", "them", "would", "write", "like", "so",
    "these",
)  # fmt: skip

BEGIN_TOKEN = 1  # the token at the beginning of every text

_BYTES = [b" " + word.encode() for word in WORDS]
_WORD_IDS = {piece: 512 + i for i, piece in enumerate(_BYTES)}
# A known word with its space, else up to three bytes.
_PIECE = re.compile(rb" (?:" + "|".join(WORDS).encode() + rb")\b|[^ ]{1,3}| [^ ]{0,2}")


def tokenize(text: str) -> list[int]:
    """Token ids of a text, without the one at its beginning; the same on every node."""
    return [
        _WORD_IDS.get(piece) or len(piece) << 24 | int.from_bytes(piece, "big")
        for piece in _PIECE.findall(text.encode(errors="replace"))
    ]


def detokenize(ids: list[int]) -> str:
    """The text of token ids; unknown ids give no text."""
    return b"".join(_piece(token) for token in ids).decode(errors="replace")


def _piece(token: int) -> bytes:
    if 512 <= token < 512 + len(_BYTES):
        return _BYTES[token - 512]
    length = token >> 24
    return (token & 0xFFFFFF).to_bytes(3, "big")[3 - length :] if 1 <= length <= 3 else b""


def count_tokens(text: str) -> int:
    """Tokens of a prompt, including the one at its beginning."""
    return len(_PIECE.findall(text.encode(errors="replace"))) + 1


def next_words(text: str) -> Iterator[str]:
    """The endless continuation of a text; each word includes the space before it."""
    state = crc32(text.encode(errors="replace"))
    while True:
        piece = _BYTES[_mixed(state) % len(_BYTES)]
        yield piece.decode()
        state = crc32(piece, state)


def _mixed(state: int) -> int:
    """Mix the bits of a CRC, which is linear: without this, words would soon repeat."""
    state = (state ^ state >> 16) * 0x45D9F3B & 0xFFFFFFFF
    return (state ^ state >> 16) * 0x45D9F3B & 0xFFFFFFFF ^ state >> 15


def expected_text(prompt: str, n: int) -> str:
    """A node's answer of `n` tokens to a raw prompt."""
    return "".join(islice(next_words(prompt), n))
