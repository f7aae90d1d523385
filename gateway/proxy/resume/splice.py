"""Where the next node takes over.

A text continues exactly only from where it tokenizes as it was written: the misses of a
continuation by text are those cut within what the tokenizer would make one token (measured: 5 of
48). So under greedy sampling the seam steps back to such a place, and what stood behind it is
written again and compared.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.proxy.resume.transcript import Transcript

PostToNode = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Posts to a path of the next node and gives its answer's JSON. Raises: UpstreamError."""

MOST_STEP_BACKS = 4
"""Places that are tried before the seam is where the text ends."""

MIN_AGREEING_TOKENS = 3
"""Tokens before the seam that must be those that were sent."""


@dataclass(frozen=True, slots=True)
class SplicePoint:
    """How the next node is set on."""

    prefix: str
    """The text that it is given as written."""
    overlap: str
    """What it is to write again, and what then is not sent a second time."""
    prompt_tokens: int
    """Tokens of the client's own prompt."""
    sent_tokens: int
    """Tokens of all text that was sent."""
    prefix_tokens: int
    """Tokens of `kept`."""


async def find_splice_point(
    post: PostToNode,
    prompt: str,
    transcript: Transcript,
    *,
    greedy: bool,
    has_stop_words: bool = False,
) -> SplicePoint:
    """The seam behind this rendered prompt and what was said. Raises: UpstreamError.

    `prompt` is what the node's template makes of the request, up to the answer's beginning.
    `stops`: it ends at certain words, so that of the last token perhaps only a part was sent.
    """
    text = transcript.text
    before = len(await tokenize_pieces(post, prompt))
    whole = await tokenize_pieces(post, prompt + text)
    # Read again, broken words make fewer tokens than they were written in; an event is a token but
    # for the bytes of one character.
    total = (
        transcript.token_count
        if text.isascii()
        else max(len(whole) - before, transcript.token_count)
    )
    if not greedy:
        return SplicePoint(text, "", before, total, total)
    for back in step_back_offsets(transcript.content_pieces, whole)[:MOST_STEP_BACKS]:
        if has_stop_words and not back:
            continue
        kept = text[: len(text) - back] if back else text
        pieces = whole if not back else await tokenize_pieces(post, prompt + kept)
        earlier = tokens_before(transcript.content_pieces, back)
        first = max(0, earlier - MIN_AGREEING_TOKENS)
        packed = first == 0 and transcript.token_count > len(transcript.content_pieces)
        if tokenizes_as_sent(pieces, transcript.content_pieces[first:earlier], packed=packed):
            again = len(transcript.content_pieces) - earlier
            return SplicePoint(kept, text[len(kept) :], before, total, total - again)
    return SplicePoint(text, "", before, total, total)


async def tokenize_pieces(post: PostToNode, text: str) -> list[str]:
    """The tokens' texts, in order; one that is no whole text counts as its bytes in brackets."""
    told = await post(
        "/tokenize",
        {"content": text, "with_pieces": True, "add_special": True, "parse_special": True},
    )
    pieces = []
    for token in told.get("tokens") or ():
        piece = token.get("piece") if isinstance(token, dict) else token
        pieces.append(piece if isinstance(piece, str) else repr(piece))
    return pieces


def step_back_offsets(sent: Sequence[str], pieces: Sequence[str]) -> list[int]:
    """Characters to step back, least first: ends of sent tokens that end tokens of the text."""
    ends = set()
    distance = 0
    for piece in reversed(pieces):
        ends.add(distance)
        distance += len(piece)
    places = []
    distance = 0
    for piece in reversed(sent):
        if distance in ends:
            places.append(distance)
        distance += len(piece)
    return places


def tokens_before(sent: Sequence[str], back: int) -> int:
    """How many tokens were sent before the place so many characters back."""
    distance, end = 0, len(sent)
    while end and distance < back:
        end -= 1
        distance += len(sent[end])
    return end


def tokenizes_as_sent(pieces: Sequence[str], sent: Sequence[str], *, packed: bool = False) -> bool:
    """Whether the text tokenizes at its end as it was sent.

    `packed`: the oldest piece is many tokens in one, whose end must be a token's end.
    """
    left = len(sent)
    for written, told in zip(reversed(sent), reversed(pieces), strict=False):
        left -= 1
        if written == told:
            continue
        return packed and not left and len(written) > len(told) and written.endswith(told)
    return True


class OverlapMismatch(Exception):  # noqa: N818 - not an error: another way is tried
    """The next node wrote something else than what had been sent."""


class OverlapFilter:
    """Holds back what is written again, until it has turned out to be the same."""

    __slots__ = ("_expected",)

    def __init__(self, expected: str) -> None:
        self._expected = expected

    @property
    def done(self) -> bool:
        """Whether all of it has come again."""
        return not self._expected

    def feed(self, text: str) -> str:
        """What of `text` is new. Raises: Mismatch."""
        known = self._expected[: len(text)]
        if not text.startswith(known):
            raise OverlapMismatch
        self._expected = self._expected[len(known) :]
        return text[len(known) :]
