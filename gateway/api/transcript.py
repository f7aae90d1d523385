"""The transcript of a stream, and the splice point in it from which another node continues.

Outgoing events are kept as bytes and parsed only when they have become many or when the node has
failed: nothing is parsed per token while a stream runs well. Even then, only the first of the
events that differ in nothing but their text are parsed as objects. The readers of events and the
requests for token ids are each API's own (`gateway.api`), so this module lies below them.

A text continues exactly only from where it tokenizes as it was written: continuations by text
differ when the text is cut within what the tokenizer would make one token (measured: 5 of 48). So
under greedy sampling the splice point steps back to a token boundary, and the node's repetition of
the overlap is compared and dropped.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from gateway.api import sse
from gateway.api.json_values import JSON_ERRORS, InvalidJson, JsonObject, parse_object

MOST_RAW_BYTES = 32 * 1024  # bytes of events that are kept unparsed: about 150 tokens
# Chunks that are kept unparsed. A slow stream sends one token per chunk and stays open for long;
# thousands of them must take little memory. A fast stream sends fewer, larger chunks.
MOST_RAW_CHUNKS = 64
# Bytes of the newest events that stay unparsed after that: finding the splice point needs their
# tokens one by one.
KEPT_RAW_BYTES = 8 * 1024
# Bytes of text that are compressed together. Smaller blocks compress badly, larger ones leave more
# text uncompressed.
COMPRESSION_BLOCK_BYTES = 4 * 1024
_TEXTS = msgspec.json.Decoder(list[str])
_OBJECTS = msgspec.json.Decoder(list[JsonObject])


@dataclass(slots=True)
class Transcript:
    """A response as the client has it so far."""

    first_event: JsonObject = field(default_factory=dict)
    """The first event with the response's `id`, `created` and `model`."""
    reasoning_pieces: list[str] = field(default_factory=list)
    content_pieces: list[str] = field(default_factory=list)
    """The text of each token, in order; many older tokens may be joined into one piece."""
    token_count: int = 0  # tokens that had text
    token_ids: list[int] = field(default_factory=list)
    """Token ids, where the stream reports them: of all tokens or of none."""
    block_index: int = 0  # index of the newest content block (`/v1/messages`)
    open_blocks: dict[int, str] = field(default_factory=dict)
    """Types of the open content blocks by index; `signed`: reasoning that has its signature."""
    item_types: dict[str, str] = field(default_factory=dict)
    """Types of the output's items by id, in order (`/v1/responses`)."""
    sent_ends: list[str] = field(default_factory=list)
    """Types and items of the events that have ended items or their parts (`/v1/responses`)."""
    last_number: int | None = None  # number of the newest event; None: they have none
    finish_reason: str | None = None
    """Why the response ended, if it has: then only the end of the stream is missing."""
    usage_sent: bool = False  # whether `usage` has been sent
    unresumable: str | None = None  # why no other node may continue it

    @property
    def block_is_open(self) -> bool:
        """Whether the newest content block is open."""
        return self.block_index in self.open_blocks

    @property
    def text(self) -> str:
        """The content so far."""
        return "".join(self.content_pieces)

    @property
    def reasoning_text(self) -> str:
        """The reasoning so far."""
        return "".join(self.reasoning_pieces)

    def begin(self, first_event: JsonObject) -> None:
        """Keep the event that identifies the response."""
        self.first_event = first_event

    def add_reasoning(self, text: object) -> None:
        """Add a token's reasoning; anything but text is ignored."""
        if isinstance(text, str) and text:
            self.reasoning_pieces.append(text)
            self.token_count += 1

    def add_content(self, text: object) -> None:
        """Add a token's content; anything but text is ignored."""
        if isinstance(text, str) and text:
            self.content_pieces.append(text)
            self.token_count += 1

    def add_tokens(self, texts: list[str], *, reasoning: bool) -> None:
        """Add the texts of the next tokens; empty ones are ignored."""
        pieces = self.reasoning_pieces if reasoning else self.content_pieces
        before = len(pieces)
        pieces.extend(filter(None, texts))
        self.token_count += len(pieces) - before

    def add_token_ids(self, ids: Iterable[int]) -> None:
        """Add the ids of the next tokens."""
        self.token_ids += ids

    def open_block(self, index: int, kind: str) -> None:
        """A content block begins, and is the newest."""
        self.block_index = index
        self.open_blocks[index] = kind

    def finish(self, reason: str) -> None:
        """The response has ended for this reason."""
        self.finish_reason = reason

    def mark_usage_sent(self) -> None:
        """`usage` has been sent."""
        self.usage_sent = True

    def mark_unresumable(self, reason: str) -> None:
        """No other node may continue it."""
        self.unresumable = reason


TranscriptReader = Callable[[Transcript, JsonObject], None]  # adds one event's data to a transcript


@dataclass(frozen=True, slots=True)
class EventTemplate:
    """The bytes of an event before and after the JSON string of its token's text.

    A node's events differ in nothing else, as long as it sends text of one kind. So many of them
    are read by a few calls into C, at an eighth of the cost of parsing each.
    """

    before: bytes
    after: bytes
    reasoning: bool  # whether the text is reasoning; else content

    @classmethod
    def of(cls, event: bytes, read: TranscriptReader, first: JsonObject) -> EventTemplate | None:
        """The template of this event; None if it is more than a token's text.

        `first`: the stream's first event. The template is proved by `read`: with any other text in
        it, an event adds that text to a transcript and changes nothing else.
        """
        if len(event) > MOST_TEMPLATE_BYTES:
            return None
        for found in islice(_JSON_STRING.finditer(event), MOST_TEMPLATE_STRINGS):
            before, after = event[: found.start()], event[found.end() :]
            proof = Transcript(first)
            try:
                read(proof, parse_object(sse.payload(before + _PROBE + after)))
            except (InvalidJson, TypeError, AttributeError):
                continue
            for reasoning in (False, True):
                expected = Transcript(first)
                expected.add_tokens([_PROBE_TEXT], reasoning=reasoning)
                if proof == expected:
                    return cls(before, after, reasoning)
        return None

    def texts(self, events: bytes) -> list[str] | None:
        """The texts of events that all have this form; None if one of them has another."""
        before, after = len(self.before), len(self.after)
        strings = [event[before : 2 - after] for event in events.split(b"\n\n")]
        strings.pop()
        # A search for the long bytes between two texts would take five times as long.
        between = (self.after + self.before).join(strings)
        if b"".join((self.before, between, self.after)) != events:
            return None
        try:
            texts = _TEXTS.decode(b"[" + b",".join(strings) + b"]")
        except JSON_ERRORS:
            return None
        return texts if len(texts) == len(strings) else None


_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"(?=[,}\]])')  # a string that is no field's name
_PROBE_TEXT = "\x00"
_PROBE = b'"\\u0000"'
# An event with a token's text has some 300 bytes and 10 strings. Each string is tried in turn, and
# the event parsed each time.
MOST_TEMPLATE_BYTES, MOST_TEMPLATE_STRINGS = 4096, 32
# Templates of one stream. One whose events differ in more than their text has none for long.
MOST_TEMPLATES = 8


@dataclass(slots=True, eq=False, repr=False)
class CompressedText:
    """Older text, compressed to between a third and a half: needed only if the node fails.

    As plain strings, the pieces of thousands of growing responses also waste an eighth of their
    memory in gaps between them.
    """

    _blocks: list[bytes] = field(default_factory=list)
    _tail: bytes = b""  # the newest bytes, too few for a block
    size: int = 0  # bytes of the whole text

    def pack(self, pieces: list[str]) -> None:
        """Move these pieces, the text's next ones, out of their list."""
        more = "".join(pieces).encode(errors="surrogatepass")
        pieces.clear()
        self.size += len(more)
        self._tail += more
        if len(self._tail) >= COMPRESSION_BLOCK_BYTES:
            self._blocks.append(zlib.compress(self._tail, 1))
            self._tail = b""

    def unpack(self, pieces: list[str]) -> None:
        """Put the whole text back in front of these pieces, as one piece."""
        if self.size:
            text = b"".join([*map(zlib.decompress, self._blocks), self._tail])
            pieces.insert(0, text.decode(errors="surrogatepass"))
            self._blocks, self._tail, self.size = [], b"", 0


@dataclass(slots=True, eq=False, repr=False)
class TranscriptRecorder:
    """Records the events that one stream sends.

    Most streams end without more than their raw chunks.
    """

    _read: TranscriptReader
    _max_bytes: int  # of text; a longer response can't be resumed
    _made: Transcript | None = None
    _raw_chunks: list[bytes] = field(default_factory=list)
    raw_bytes: int = 0  # bytes of the events that are kept unparsed
    _reasoning: CompressedText = field(init=False)
    _content: CompressedText = field(init=False)
    """The text before that in the transcript; made with it."""
    _template: EventTemplate | None = None
    _templates_left: int = MOST_TEMPLATES

    def add(self, events: bytes) -> None:
        """Record whole events that are being sent."""
        self._raw_chunks.append(events)
        self.raw_bytes += len(events)
        if self.raw_bytes > MOST_RAW_BYTES or len(self._raw_chunks) > MOST_RAW_CHUNKS:
            self._compact()

    def add_token_ids(self, ids: Iterable[int]) -> None:
        """Record the ids of the next tokens, where the events sent don't hold them."""
        self._transcript.add_token_ids(ids)

    def transcript(self) -> Transcript:
        """All that was sent. Call it when the stream has failed."""
        transcript = self._transcript
        self._parse(b"".join(self._raw_chunks))
        self._raw_chunks, self.raw_bytes = [], 0
        self._reasoning.unpack(transcript.reasoning_pieces)
        self._content.unpack(transcript.content_pieces)
        return transcript

    @property
    def _transcript(self) -> Transcript:
        if self._made is None:
            self._made = Transcript()
            self._reasoning, self._content = CompressedText(), CompressedText()
        return self._made

    def _compact(self) -> None:
        transcript = self._transcript
        if transcript.unresumable is not None:
            self._raw_chunks, self.raw_bytes = [], 0
            return
        raw = b"".join(self._raw_chunks)
        if len(raw) <= 2 * KEPT_RAW_BYTES:
            self._raw_chunks = [raw]
            return
        end = raw.rfind(b"\n\n", 0, len(raw) - KEPT_RAW_BYTES) + 2
        if end < 2:
            end = len(raw)  # one event larger than all that may be kept
        self._parse(raw[:end])
        self._reasoning.pack(transcript.reasoning_pieces)
        self._content.pack(transcript.content_pieces)
        if self._reasoning.size + self._content.size > self._max_bytes:
            transcript.mark_unresumable("the response is longer than 'limits.resume_bytes'")
            self._reasoning, self._content = CompressedText(), CompressedText()
        self._raw_chunks = [raw[end:]]
        self.raw_bytes = len(raw) - end

    def _parse(self, events: bytes) -> None:
        """Parse whole events: those of the template at its cost, all others as objects."""
        if not self._transcript.first_event:
            end = events.find(b"\n\n") + 2
            if end < 2:
                end = len(events)
            self._parse_objects(events[:end])
            events = events[end:]
        template = self._template or self._learn_template(events)
        start = -1 if template is None else events.find(template.before)
        if template is not None and (not start or events.endswith(b"\n\n", 0, max(0, start))):
            texts = template.texts(events[start:])
            if texts is not None:
                self._parse_objects(events[:start])
                self._transcript.add_tokens(texts, reasoning=template.reasoning)
                return
        self._template = None
        self._parse_objects(events)

    def _learn_template(self, events: bytes) -> EventTemplate | None:
        """The template of the last of these events, if there are many and it has one."""
        if self._templates_left and len(events) >= KEPT_RAW_BYTES:
            self._templates_left -= 1
            last = sse.last_events(events, len(b"\n\n"))
            self._template = EventTemplate.of(last, self._read, self._transcript.first_event)
        return self._template

    def _parse_objects(self, events: bytes) -> None:
        """Parse whole events in one go: one by one takes three times as long."""
        payloads = [line[5:] for line in events.split(b"\n") if line.startswith(b"data:")]
        if len(payloads) != events.count(b"\n\n"):
            # An event has several lines of data, or none, or lines end in another way.
            payloads = [sse.payload(event) for event in sse.split(events)]
        objects = [data for data in payloads if data.strip() not in _NOT_OBJECTS]
        if len(events) > sse.MOST_DENSE_OBJECTS and any(map(sse.is_dense, objects)):
            self._transcript.mark_unresumable("an event that was sent is too large to be read")
            return
        try:
            for value in _OBJECTS.decode(b"[" + b",".join(objects) + b"]"):
                self._read(self._transcript, value)
        except (*JSON_ERRORS, TypeError, AttributeError):
            self._transcript.mark_unresumable("an event that was sent can't be read")


_NOT_OBJECTS = frozenset({b"", b"[DONE]", b"null"})
# Posts JSON to a path of the replacement node and returns its JSON. Raises: UpstreamError.
PostToNode = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
MOST_STEP_BACKS = 4  # positions that are tried before the splice point is the end of the text
MIN_AGREEING_TOKENS = 3  # tokens before the splice point that must be those that were sent


@dataclass(frozen=True, slots=True)
class SplicePoint:
    """Where the replacement node takes over."""

    prefix: str  # the text that it is given as written
    overlap: str  # the text behind `prefix` that it must repeat, and that is not sent a second time
    prompt_tokens: int  # tokens of the client's own prompt
    sent_tokens: int  # tokens of all text that was sent
    prefix_tokens: int  # tokens of `prefix`


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

    outcome = "mismatch"


@dataclass(slots=True, eq=False, repr=False)
class OverlapFilter:
    """Drops the overlap from the text of the replacement node while both agree."""

    _expected: str

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
