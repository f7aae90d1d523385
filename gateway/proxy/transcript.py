"""What the client has received of a stream, kept so that another node can continue it.

Outgoing events are kept as bytes and parsed only when they have become many or when the node has
failed: nothing is parsed per token while a stream runs well. The readers of events and the
requests for token ids are each API's own (`gateway.proxy.api`), so this module lies below them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from gateway.proxy import sse
from gateway.proxy.json_values import InvalidJson, JsonObject, parse_object, parse_objects
from gateway.transport.errors import InvalidResponse

MOST_RAW_BYTES = 48 * 1024
"""Bytes of events that are kept unparsed: about 240 tokens."""

MOST_RAW_CHUNKS = 64
"""Chunks that are kept unparsed. A slow stream sends one token per chunk and stays open for long;
thousands of them must take little memory. A fast stream sends fewer, larger chunks."""

KEPT_RAW_BYTES = 8 * 1024
"""Bytes of the newest events that stay unparsed after that: finding the splice point needs their
tokens one by one."""

COMPRESSION_BLOCK_BYTES = 4 * 1024
"""Bytes of text that are compressed together. Smaller blocks compress badly, larger ones leave
more text uncompressed."""


@dataclass(slots=True)
class Transcript:
    """A response as the client has it so far."""

    first_event: JsonObject = field(default_factory=dict)
    """The first event with the response's `id`, `created` and `model`."""
    reasoning_pieces: list[str] = field(default_factory=list)
    content_pieces: list[str] = field(default_factory=list)
    """The text of each token, in order; many older tokens may be joined into one piece."""
    token_count: int = 0
    """Tokens that had text."""
    token_ids: list[int] = field(default_factory=list)
    """Token ids, where the stream reports them: of all tokens or of none."""
    block_index: int = 0
    """Index of the newest content block (`/v1/messages`)."""
    open_blocks: dict[int, str] = field(default_factory=dict)
    """Types of the open content blocks by index; `signed`: reasoning that has its signature."""
    finish_reason: str | None = None
    """Why the response ended, if it has: then only the end of the stream is missing."""
    usage_sent: bool = False
    """Whether `usage` has been sent."""
    unresumable: str | None = None
    """Why no other node may continue it."""

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
        """Add a token's reasoning text, if that is what it is."""
        if isinstance(text, str) and text:
            self.reasoning_pieces.append(text)
            self.token_count += 1

    def add_content(self, text: object) -> None:
        """Add a token's text, if that is what it is."""
        if isinstance(text, str) and text:
            self.content_pieces.append(text)
            self.token_count += 1

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


TranscriptReader = Callable[[Transcript, JsonObject], None]
"""Adds one event's data to a transcript."""


class CompressedText:
    """Older text, compressed to between a third and a half: needed only if the node fails.

    As plain strings, the pieces of thousands of growing responses also waste an eighth of their
    memory in gaps between them.
    """

    __slots__ = ("_blocks", "_tail", "size")

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._tail = b""
        """The newest bytes, too few for a block."""
        self.size = 0
        """Bytes of the whole text."""

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


class TranscriptRecorder:
    """Records the events that one stream sends.

    `max_bytes`: bytes of text; a longer response can't be resumed.
    """

    __slots__ = (
        "_content",
        "_max_bytes",
        "_raw_chunks",
        "_read",
        "_reasoning",
        "_transcript",
        "raw_bytes",
    )

    def __init__(self, read: TranscriptReader, max_bytes: int) -> None:
        self._read = read
        self._max_bytes = max_bytes
        self._transcript = Transcript()
        self._raw_chunks: list[bytes] = []
        self.raw_bytes = 0
        """Bytes of the events that are kept unparsed."""
        self._reasoning = CompressedText()
        self._content = CompressedText()
        """The text before that in `_transcript`."""

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
        self._parse(b"".join(self._raw_chunks))
        self._raw_chunks, self.raw_bytes = [], 0
        self._reasoning.unpack(self._transcript.reasoning_pieces)
        self._content.unpack(self._transcript.content_pieces)
        return self._transcript

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
            transcript.mark_unresumable("the answer is longer than what is kept for a continuation")
            self._reasoning, self._content = CompressedText(), CompressedText()
        self._raw_chunks = [raw[end:]]
        self.raw_bytes = len(raw) - end

    def _parse(self, events: bytes) -> None:
        """Parse whole events in one go: one by one takes three times as long."""
        payloads = [line[5:] for line in events.split(b"\n") if line.startswith(b"data:")]
        if len(payloads) != events.count(b"\n\n"):
            # An event has several lines of data, or none, or lines end in another way.
            payloads = [sse.payload(event) for event in sse.split(events)]
        objects = [data for data in payloads if data.strip() not in _NOT_OBJECTS]
        try:
            for value in parse_objects(b"[" + b",".join(objects) + b"]"):
                self._read(self._transcript, value)
        except (InvalidJson, TypeError, AttributeError):
            self._transcript.mark_unresumable("an event that went out can't be read")


_NOT_OBJECTS = frozenset({b"", b"[DONE]", b"null"})

_LOGPROBS = b'"logprobs"'


class TokenIdExtractor:
    """Removes logprobs from events and reports the token ids in them, for `resume: exact`.

    llama.cpp reports token ids of chats and completions only with `logprobs`. The client gets its
    stream as if nobody had asked for them, at the price of parsing and encoding each event.
    """

    __slots__ = ("_inner_filter", "_on_token_ids", "_take_token_ids")

    def __init__(
        self,
        take_token_ids: Callable[[JsonObject], list[int]],
        on_token_ids: Callable[[Iterable[int]], None],
        inner_filter: sse.EventFilter | None = None,
    ) -> None:
        """`take_token_ids`: the API's. `inner_filter` is applied to the events first."""
        self._take_token_ids = take_token_ids
        self._on_token_ids = on_token_ids
        self._inner_filter = inner_filter

    def __call__(self, events: bytes) -> bytes:
        """The events without logprobs. Raises: InvalidResponse."""
        if self._inner_filter is not None:
            events = self._inner_filter(events)
        return sse.edit_matching(events, _LOGPROBS, self._without_logprobs)

    def _without_logprobs(self, event: bytes) -> bytes:
        try:
            value = parse_object(sse.payload(event))
            if ids := self._take_token_ids(value):
                self._on_token_ids(ids)
        except (InvalidJson, KeyError, TypeError):
            raise InvalidResponse("An event of the node's stream can't be read") from None
        return b"data: " + msgspec.json.encode(value) + b"\n\n"
