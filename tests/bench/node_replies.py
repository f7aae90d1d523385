"""The responses of an emulated llama.cpp node, encoded once and sent many times.

They have the fields of llama.cpp's own server, and events have them in its order, so that a gateway
that reads streams finds the same as in production.
"""

from __future__ import annotations

import time
from dataclasses import replace

from tests.emulator import EmulatedNode, info_endpoints
from tests.emulator.apis import DONE as LAST
from tests.emulator.apis import Answer, Chat, ResponseState, to_json
from tests.emulator.request_body import read_generation_request

MODEL = "demo"
CONTEXT = 4096  # context of a slot, in tokens, that the emulated node reports
EMBEDDING_BYTES = 400
STAMP_DIGITS = 16  # digits of the microseconds in a stamped event
_WORDS = ("copper ", "window ", "bridge ", "garden ", "silver ", "marble ", "violin ", "summit ")
_ANSWER = Answer(0, "", prompt_tokens=12, slot=0, tokens=200, prefill=0.02, decode=3.98)


def _chat(answer: Answer, **options: object) -> Chat:
    request = read_generation_request("chat", {"messages": [], **options}, 1)
    return Chat(ResponseState(request, MODEL, created=1767225600, number=1, answers=[answer]))


def compact(value: object) -> bytes:
    """JSON without spaces, as llama.cpp writes it."""
    return to_json(value)


def http_chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def plain_response(body: bytes, status: str = "200 OK") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
        f"Content-Type: application/json; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        "Keep-Alive: timeout=5, max=100\r\n\r\n"
    ).encode() + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
    b"X-Accel-Buffering: no\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
)
_CHAT = _chat(_ANSWER)
[ROLE], [FINAL] = _CHAT.start(_ANSWER), _CHAT.finish(_ANSWER)
TOKENS = tuple(_CHAT.delta(_ANSWER, word) for word in _WORDS)
USAGE, _ = _chat(_ANSWER, stream_options={"include_usage": True}).end()
DONE = LAST
END_OF_BODY = b"0\r\n\r\n"
_STAMP_BEFORE, _STAMP_AFTER = _CHAT.delta(_ANSWER, "t=@").split(b"@")
STAMP_MARK = b'"t='


def token(index: int) -> bytes:
    """The content event of token `index`."""
    return TOKENS[index % len(TOKENS)]


def text(tokens: int) -> str:
    """The text of an answer of so many tokens."""
    return "".join(_WORDS[i % len(_WORDS)] for i in range(tokens))


def stamped_token(microseconds: int) -> bytes:
    """A content event that contains the time of sending (monotonic clock)."""
    return b"%b%0*d%b" % (_STAMP_BEFORE, STAMP_DIGITS, microseconds, _STAMP_AFTER)


def stamps(events: bytes) -> list[int]:
    """The times in complete stamped events, in microseconds; other events are ignored."""
    found: list[int] = []
    at = events.find(STAMP_MARK)
    while at >= 0:
        start = at + len(STAMP_MARK)
        found.append(int(events[start : start + STAMP_DIGITS]))
        at = events.find(STAMP_MARK, start)
    return found


def stream_body(tokens: int) -> bytes:
    """The body of a stream of so many tokens, as the client must receive it."""
    return ROLE + b"".join(token(i) for i in range(tokens)) + FINAL + DONE


def stamped_length(tokens: int) -> int:
    """Bytes of a stream body whose content events are all stamped."""
    return len(ROLE) + tokens * len(stamped_token(0)) + len(FINAL) + len(DONE)


def plain_chat(tokens: int) -> bytes:
    """The body of a plain (stream: false) chat answer."""
    return to_json(_chat(replace(_ANSWER, text=text(tokens), tokens=tokens)).plain())


def _embedding(size: int) -> bytes:
    vector = [0.015625 * (i % 7 - 3) for i in range(31)]
    usage = {"prompt_tokens": 8, "total_tokens": 8}
    data = [{"embedding": vector, "index": 0, "object": "embedding"}]
    body = compact({"model": MODEL, "object": "list", "usage": usage, "data": data})
    # Blanks, which JSON allows before its end, fill the body up to exactly `size` bytes.
    return body[:-1] + b" " * (size - len(body)) + body[-1:]


EMBEDDING = _embedding(EMBEDDING_BYTES)
NOT_FOUND = plain_response(
    compact({"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}),
    "404 Not Found",
)


def info_responses(slots: int) -> dict[bytes, bytes]:
    """Responses to a gateway's requests for the node's state and properties, by path."""
    node = EmulatedNode(
        slots=slots, context=CONTEXT, context_train=CONTEXT, model=MODEL, clock=time.monotonic
    )
    return {
        path.encode(): plain_response(compact(answer(node, "")))
        for path, answer in info_endpoints.GETS.items()
    }
