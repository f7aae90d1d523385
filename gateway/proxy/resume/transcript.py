"""What of a stream has gone out to the client.

Events are kept as they went by, and read only when there are many of them or when the node has
failed: nothing is parsed for each token of a stream that goes well.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gateway.proxy import sse
from gateway.proxy.json_values import InvalidJson, JsonObject, parse_objects

MOST_RAW_BYTES = 48 * 1024
"""Bytes of events that are kept unread: some 240 tokens."""

MOST_RAW_CHUNKS = 64
"""Pieces that are kept unread: a stream that comes token by token is open for long, and thousands
of such are to cost little memory. A fast one comes in fewer, larger ones, and is soon over."""

KEPT_RAW_BYTES = 8 * 1024
"""Bytes of the newest events that stay unread then: the seam wants them token by token."""

COMPRESSION_BLOCK_BYTES = 4 * 1024
"""Bytes of text that are packed together: less packs badly, more is plain for longer."""


@dataclass(slots=True)
class Transcript:
    """The client's view of an answer so far."""

    first_event: JsonObject = field(default_factory=dict)
    """The first event that tells the answer's `id`, `created` and `model`."""
    reasoning_pieces: list[str] = field(default_factory=list)
    content_pieces: list[str] = field(default_factory=list)
    """Of each token the text, in order, but for older ones: many of them may be one piece."""
    token_count: int = 0
    """Tokens that had text."""
    token_ids: list[int] = field(default_factory=list)
    """Their ids, where the stream tells them: of all tokens or of none."""
    block_index: int = 0
    """Number of the content block that is open (`/v1/messages`)."""
    open_blocks: dict[int, str] = field(default_factory=dict)
    """Content blocks that are open, and what they hold; `signed`: a thought with its signature."""
    finish_reason: str | None = None
    """Why it ended, if it has; only the end of the stream itself is missing."""
    usage_sent: bool = False
    """Whether `usage` has gone out."""
    unresumable: str | None = None
    """Why nothing may follow from another node."""

    @property
    def block_is_open(self) -> bool:
        """Whether the newest content block is open."""
        return self.block_index in self.open_blocks

    @property
    def text(self) -> str:
        """The answer's text so far."""
        return "".join(self.content_pieces)

    @property
    def reasoning_text(self) -> str:
        """The reasoning so far."""
        return "".join(self.reasoning_pieces)


TranscriptReader = Callable[[Transcript, JsonObject], None]
"""Adds what one event says."""


class CompressedText:
    """Older text, which is wanted only if the node fails: a third to a half of its size.

    Plain, the pieces of thousands of answers that grow side by side also waste an eighth of their
    memory in gaps between them.
    """

    __slots__ = ("_blocks", "_ends", "size")

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._ends = b""
        """Of the text the last bytes, too few for a block."""
        self.size = 0
        """Bytes of the whole text."""

    def pack(self, pieces: list[str]) -> None:
        """Take these pieces out of their list: the next ones of the text."""
        more = "".join(pieces).encode(errors="surrogatepass")
        pieces.clear()
        self.size += len(more)
        self._ends += more
        if len(self._ends) >= COMPRESSION_BLOCK_BYTES:
            self._blocks.append(zlib.compress(self._ends, 1))
            self._ends = b""

    def unpack(self, pieces: list[str]) -> None:
        """Put the whole text back in front of these pieces, as one of them."""
        if self.size:
            text = b"".join([*map(zlib.decompress, self._blocks), self._ends])
            pieces.insert(0, text.decode(errors="surrogatepass"))
            self._blocks, self._ends, self.size = [], b"", 0


class TranscriptRecorder:
    """Keeps what goes out of one stream. `most`: bytes of text; past it there is no way back."""

    __slots__ = ("_content", "_most", "_raw", "_read", "_reasoning", "_said", "_size")

    def __init__(self, read: TranscriptReader, max_bytes: int) -> None:
        self._read = read
        self._most = max_bytes
        self._said = Transcript()
        self._raw: list[bytes] = []
        self._size = 0
        self._reasoning = CompressedText()
        self._content = CompressedText()
        """The text ahead of that in `_said`."""

    def add(self, events: bytes) -> None:
        """These whole events go out."""
        self._raw.append(events)
        self._size += len(events)
        if self._size > MOST_RAW_BYTES or len(self._raw) > MOST_RAW_CHUNKS:
            self._compact()

    def add_token_ids(self, ids: Iterable[int]) -> None:
        """The ids of the next tokens, where what goes out does not tell them."""
        self._said.token_ids += ids

    def transcript(self) -> Transcript:
        """All that has gone out: to be asked for when the stream has failed."""
        self._take(b"".join(self._raw))
        self._raw, self._size = [], 0
        self._reasoning.unpack(self._said.reasoning_pieces)
        self._content.unpack(self._said.content_pieces)
        return self._said

    def _compact(self) -> None:
        if self._said.unresumable is not None:
            self._raw, self._size = [], 0
            return
        raw = b"".join(self._raw)
        if len(raw) <= 2 * KEPT_RAW_BYTES:
            self._raw = [raw]
            return
        end = raw.rfind(b"\n\n", 0, len(raw) - KEPT_RAW_BYTES) + 2
        if end < 2:
            end = len(raw)  # one event larger than all that is kept
        self._take(raw[:end])
        said = self._said
        self._reasoning.pack(said.reasoning_pieces)
        self._content.pack(said.content_pieces)
        if self._reasoning.size + self._content.size > self._most:
            said.unresumable = "the answer is longer than what is kept for a continuation"
            self._reasoning, self._content = CompressedText(), CompressedText()
        self._raw = [raw[end:]]
        self._size = len(raw) - end

    def _take(self, events: bytes) -> None:
        """Read these whole events, all in one go: one by one they cost three times as much."""
        lines = [line[5:] for line in events.split(b"\n") if line.startswith(b"data:")]
        if len(lines) != events.count(b"\n\n"):
            # Data of several lines, none, or other line ends.
            lines = [sse.payload(event) for event in sse.split(events)]
        found = [line for line in lines if line.strip() not in _NO_VALUES]
        try:
            for value in parse_objects(b"[" + b",".join(found) + b"]"):
                self._read(self._said, value)
        except (InvalidJson, TypeError, AttributeError):
            self._said.unresumable = "an event that went out can't be read"


_NO_VALUES = frozenset({b"", b"[DONE]", b"null"})


def read_chat(transcript: Transcript, value: JsonObject) -> None:
    """A chunk of a chat."""
    transcript.first_event = transcript.first_event or value
    transcript.usage_sent = transcript.usage_sent or bool(value.get("usage"))
    for choice in value.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("index"):
            transcript.unresumable = "the request asks for several answers"
        if delta.get("tool_calls") or delta.get("function_call"):
            transcript.unresumable = "a tool call has begun"
        if choice.get("logprobs") is not None:
            transcript.unresumable = "the client asked for probabilities"
        _add(transcript.reasoning_pieces, transcript, delta.get("reasoning_content"))
        _add(transcript.content_pieces, transcript, delta.get("content"))
        transcript.finish_reason = choice.get("finish_reason") or transcript.finish_reason


def read_completions(transcript: Transcript, value: JsonObject) -> None:
    """A chunk of a completion."""
    transcript.first_event = transcript.first_event or value
    transcript.usage_sent = transcript.usage_sent or bool(value.get("usage"))
    for choice in value.get("choices") or ():
        if choice.get("index"):
            transcript.unresumable = "the request asks for several answers"
        if choice.get("logprobs") is not None:
            transcript.unresumable = "the client asked for probabilities"
        _add(transcript.content_pieces, transcript, choice.get("text"))
        transcript.finish_reason = choice.get("finish_reason") or transcript.finish_reason


def read_native(transcript: Transcript, value: JsonObject) -> None:
    """An event of llama.cpp's own completion, which tells its tokens' ids."""
    transcript.first_event = transcript.first_event or value
    if value.get("index"):
        transcript.unresumable = "the request asks for several answers"
    if value.get("completion_probabilities"):
        transcript.unresumable = "the client asked for probabilities"
    transcript.token_ids += [token for token in value.get("tokens") or () if isinstance(token, int)]
    _add(transcript.content_pieces, transcript, value.get("content"))
    if value.get("stop"):
        transcript.finish_reason = str(value.get("stop_type") or "eos")


def read_messages(transcript: Transcript, value: JsonObject) -> None:
    """An event of Anthropic's messages."""
    match value.get("type"):
        case "message_start":
            transcript.first_event = value.get("message") or {}
        case "content_block_start":
            kind = (value.get("content_block") or {}).get("type")
            transcript.block_index = value.get("index") or 0
            transcript.open_blocks[transcript.block_index] = str(kind)
            if kind not in {"text", "thinking"}:
                transcript.unresumable = "a tool call has begun"
        case "content_block_delta":
            delta = value.get("delta") or {}
            if delta.get("type") == "input_json_delta":
                transcript.unresumable = "a tool call has begun"
            if delta.get("type") == "signature_delta":
                transcript.open_blocks[value.get("index") or 0] = "signed"
            _add(transcript.reasoning_pieces, transcript, delta.get("thinking"))
            _add(transcript.content_pieces, transcript, delta.get("text"))
        case "content_block_stop":
            transcript.open_blocks.pop(value.get("index") or 0, None)
        case "message_delta":
            transcript.finish_reason = (value.get("delta") or {}).get(
                "stop_reason"
            ) or transcript.finish_reason
        case _:
            pass


def _add(pieces: list[str], said: Transcript, text: object) -> None:
    if isinstance(text, str) and text:
        pieces.append(text)
        said.token_count += 1


TRANSCRIPT_READERS: dict[str, TranscriptReader] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completions,
    "/v1/messages": read_messages,
    "/completion": read_native,
}
"""Of each path that can be carried on, who reads its events."""
