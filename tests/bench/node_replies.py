"""The responses of an emulated llama.cpp node, encoded once and sent many times.

They have the fields of llama.cpp's own server, and events have them in its order, so that a gateway
that reads streams finds the same as in production.
"""

from __future__ import annotations

import json
import time
from typing import Any

from tests.emulator import EmulatedNode, info_endpoints

MODEL = "demo"
CONTEXT = 4096  # context of a slot, in tokens, that the emulated node reports
EMBEDDING_BYTES = 400
STAMP_DIGITS = 16  # digits of the microseconds in a stamped event
_WORDS = ("copper ", "window ", "bridge ", "garden ", "silver ", "marble ", "violin ", "summit ")
_ID = "chatcmpl-Vb0pXy3kQzN7uTfL2mRaWc9sHdEgJiKo"
_CREATED = 1767225600


def _timing(what: str, tokens: int, each: float, speed: float) -> dict[str, float]:
    ms = 1000 * tokens / speed
    per = {f"{what}_per_token_ms": each, f"{what}_per_second": speed}
    return {f"{what}_n": tokens, f"{what}_ms": ms, **per}


_TIMINGS = {
    "timings": {
        "cache_n": 0,
        **_timing("prompt", 12, 1.667, 600.0),
        **_timing("predicted", 200, 20.0, 50.0),
    }
}


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def http_chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def plain_response(body: bytes, status: str = "200 OK") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
        f"Content-Type: application/json; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        "Keep-Alive: timeout=5, max=100\r\n\r\n"
    ).encode() + body


def _completion(kind: str, choices: list[object], more: dict[str, Any]) -> bytes:
    """A chat completion, or a chunk of one."""
    return compact(
        {
            "choices": choices,
            "created": _CREATED,
            "id": _ID,
            "model": MODEL,
            "system_fingerprint": "b0-unknown",
            "object": kind,
            **more,
        }
    )


def _event(choices: list[object], more: dict[str, Any]) -> bytes:
    return b"data: " + _completion("chat.completion.chunk", choices, more) + b"\n\n"


def _chunk(delta: dict[str, object], finish: str | None = None, **more: Any) -> bytes:
    return _event([{"finish_reason": finish, "index": 0, "delta": delta}], more)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
    b"X-Accel-Buffering: no\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
)
ROLE = _chunk({"role": "assistant", "content": None})
TOKENS = tuple(_chunk({"content": word}) for word in _WORDS)
FINAL = _chunk({}, "stop", **_TIMINGS)
_USED = {"completion_tokens": 200, "prompt_tokens": 12, "total_tokens": 212}
USAGE = _event([], {"usage": _USED | {"prompt_tokens_details": {"cached_tokens": 0}}, **_TIMINGS})
DONE = b"data: [DONE]\n\n"
END_OF_BODY = b"0\r\n\r\n"
_STAMP_BEFORE, _STAMP_AFTER = _chunk({"content": "t=@"}).split(b"@")
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
    message = {"role": "assistant", "content": text(tokens)}
    used = {"completion_tokens": tokens, "prompt_tokens": 12, "total_tokens": tokens + 12}
    choice = {"finish_reason": "stop", "index": 0, "message": message}
    return _completion("chat.completion", [choice], {"usage": used, **_TIMINGS})


def _embedding(size: int) -> bytes:
    vector = [0.015625 * (i % 7 - 3) for i in range(31)]
    body = compact(
        {
            "model": MODEL,
            "object": "list",
            "usage": {"prompt_tokens": 8, "total_tokens": 8},
            "data": [{"embedding": vector, "index": 0, "object": "embedding"}],
        }
    )
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
