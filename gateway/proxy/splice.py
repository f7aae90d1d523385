"""Splice points: where in a response the next node takes over.

A text continues exactly only from where it tokenizes as it was written: continuations by text
differ when the text is cut within what the tokenizer would make one token (measured: 5 of 48). So
under greedy sampling the splice point steps back to a token boundary, and the node's repetition of
the overlap is compared and dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.proxy.transcript import Transcript

PostToNode = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Posts JSON to a path of the replacement node and returns its JSON. Raises: UpstreamError."""

MOST_STEP_BACKS = 4
"""Positions that are tried before the splice point is the end of the text."""

MIN_AGREEING_TOKENS = 3
"""Tokens before the splice point that must be those that were sent."""


@dataclass(frozen=True, slots=True)
class SplicePoint:
    """Where the replacement node takes over."""

    prefix: str
    """The text that it is given as written."""
    overlap: str
    """The text that it is to write again, and that is not sent a second time."""
    prompt_tokens: int
    """Tokens of the client's own prompt."""
    sent_tokens: int
    """Tokens of all text that was sent."""
    prefix_tokens: int
    """Tokens of `prefix`."""


async def find_splice_point(
    post: PostToNode,
    prompt: str,
    transcript: Transcript,
    *,
    greedy: bool,
    has_stop_words: bool = False,
) -> SplicePoint:
    """Find the splice point of this transcript. Raises: UpstreamError.

    `prompt`: the request as the node's template renders it, up to the beginning of the response.
    `has_stop_words`: the last token may have been sent only in part.
    """
    text, sent = transcript.text, transcript.content_pieces
    prompt_tokens = len(await tokenize_pieces(post, prompt))
    pieces_of_all = await tokenize_pieces(post, prompt + text)
    # Tokenized anew, broken words make fewer tokens than were written. An event is one token,
    # except for the bytes of a single character.
    total = (
        transcript.token_count
        if text.isascii()
        else max(len(pieces_of_all) - prompt_tokens, transcript.token_count)
    )
    if not greedy:
        return SplicePoint(text, "", prompt_tokens, total, total)
    for back in step_back_offsets(sent, pieces_of_all)[:MOST_STEP_BACKS]:
        if has_stop_words and not back:
            continue
        prefix = text[: len(text) - back] if back else text
        pieces = pieces_of_all if not back else await tokenize_pieces(post, prompt + prefix)
        end = tokens_before(sent, back)
        start = max(0, end - MIN_AGREEING_TOKENS)
        packed = start == 0 and transcript.token_count > len(sent)
        if tokenizes_as_sent(pieces, sent[start:end], packed=packed):
            overlap_tokens = len(sent) - end
            return SplicePoint(
                prefix, text[len(prefix) :], prompt_tokens, total, total - overlap_tokens
            )
    return SplicePoint(text, "", prompt_tokens, total, total)


async def tokenize_pieces(post: PostToNode, text: str) -> list[str]:
    """The texts of a text's tokens, in order; for a token of incomplete UTF-8, its bytes' list."""
    reply = await post(
        "/tokenize",
        {"content": text, "with_pieces": True, "add_special": True, "parse_special": True},
    )
    pieces = []
    for token in reply.get("tokens") or ():
        piece = token.get("piece") if isinstance(token, dict) else token
        pieces.append(piece if isinstance(piece, str) else repr(piece))
    return pieces


def step_back_offsets(sent: Sequence[str], pieces: Sequence[str]) -> list[int]:
    """Characters to step back, least first: where a sent token and a token of the text both end."""
    ends = set()
    distance = 0
    for piece in reversed(pieces):
        ends.add(distance)
        distance += len(piece)
    offsets = []
    distance = 0
    for piece in reversed(sent):
        if distance in ends:
            offsets.append(distance)
        distance += len(piece)
    return offsets


def tokens_before(sent: Sequence[str], back: int) -> int:
    """How many tokens were sent before the position so many characters back."""
    distance, end = 0, len(sent)
    while end and distance < back:
        end -= 1
        distance += len(sent[end])
    return end


def tokenizes_as_sent(pieces: Sequence[str], sent: Sequence[str], *, packed: bool = False) -> bool:
    """Whether the text's last tokens are those that were sent.

    `packed`: the oldest piece joins many tokens; the end of it must be the end of a token.
    """
    left = len(sent)
    for written, found in zip(reversed(sent), reversed(pieces), strict=False):
        left -= 1
        if written == found:
            continue
        return packed and not left and len(written) > len(found) and written.endswith(found)
    return True


class OverlapMismatch(Exception):  # noqa: N818 - not an error: another way is tried
    """The replacement node wrote something else than had been sent."""


class OverlapFilter:
    """Drops the overlap from the text of the replacement node while both agree."""

    __slots__ = ("_expected",)

    def __init__(self, overlap: str) -> None:
        self._expected = overlap

    @property
    def done(self) -> bool:
        """Whether the whole overlap has been repeated."""
        return not self._expected

    def feed(self, text: str) -> str:
        """The part of `text` behind the overlap. Raises: OverlapMismatch."""
        repeated = self._expected[: len(text)]
        if not text.startswith(repeated):
            raise OverlapMismatch
        self._expected = self._expected[len(repeated) :]
        return text[len(repeated) :]
