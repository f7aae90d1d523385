"""The lines of output and error files, as OpenAI's and Anthropic's batches have them.

A line ends with a newline and holds no other, nor any character at which Python's `str.splitlines`
would divide it: readers of such files use that.
"""

from __future__ import annotations

import msgspec

from gateway.batches.line_reader import LineError
from gateway.batches.states import RequestState
from gateway.proxy.json_values import JSON_ERRORS, VALUE_DECODER, JsonObject

ANTHROPIC = "anthropic"
"""The API of `/v1/messages/batches`; that of `/v1/batches` is `openai`."""

EXPIRED_CODE, CANCELLED_CODE = "batch_expired", "batch_cancelled"

EXPIRED_MESSAGE = "This request could not be executed before the completion window expired."

CANCELLED_MESSAGE = "This request was not executed because the batch was cancelled."

LOST_CODE = "result_lost"

LOST_MESSAGE = "The result of this request can't be read any more."

_LINE_ENDS = tuple((one.encode(), f"\\u{ord(one):04x}".encode()) for one in "\x85\u2028\u2029")
"""What else `str.splitlines` takes for the end of a line and JSON allows, within strings alone."""

_ANY_JSON = msgspec.json.Decoder(msgspec.Raw)

_ANTHROPIC_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_output(api: str, status: int | None) -> bool:
    """Whether a result belongs into the output file; else into the error file.

    `status`: None: there is no response.
    """
    return api == ANTHROPIC or (status is not None and status < 400)


def response_line(
    id_: str, custom_id: str | None, api: str, *, status: int, request_id: str, content: bytes
) -> bytes:
    """The line of a response, which an error's response is too. `content` is its body."""
    if api != ANTHROPIC:
        response = {"status_code": status, "request_id": request_id, "body": _as_json(content)}
        return _line({"id": id_, "custom_id": custom_id, "response": response, "error": None})
    if status < 400:
        result: JsonObject = {"type": "succeeded", "message": _as_json(content)}
    else:
        result = {"type": "errored", "error": _anthropic_error(status, request_id, content)}
    return _line({"custom_id": custom_id, "result": result})


def broken_line(id_: str, api: str, error: LineError) -> bytes:
    """The line of a line of the input that can't be run."""
    if api == ANTHROPIC:
        inner = {"type": "invalid_request_error", "message": error.message}
        outer = {"type": "error", "error": inner, "request_id": None}
        result = {"type": "errored", "error": outer}
        return _line({"custom_id": error.custom_id, "result": result})
    told = {
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "line": error.number,
    }
    return _line({"id": id_, "custom_id": error.custom_id, "response": None, "error": told})


def unanswered_line(
    id_: str, custom_id: str | None, api: str, number: int | None, state: RequestState
) -> bytes:
    """The line of a request that has no result, and never will."""
    if state is RequestState.EXPIRED:
        code, message, type_ = EXPIRED_CODE, EXPIRED_MESSAGE, "expired"
    elif state is RequestState.CANCELLED:
        code, message, type_ = CANCELLED_CODE, CANCELLED_MESSAGE, "canceled"
    else:
        code, message, type_ = LOST_CODE, LOST_MESSAGE, "errored"
    if api != ANTHROPIC:
        told: JsonObject = {"code": code, "message": message}
        if custom_id is None:
            told["line"] = number
        return _line({"id": id_, "custom_id": custom_id, "response": None, "error": told})
    result: JsonObject = {"type": type_}
    if type_ == "errored":
        inner = {"type": "api_error", "message": message}
        result["error"] = {"type": "error", "error": inner, "request_id": None}
    return _line({"custom_id": custom_id, "result": result})


def _anthropic_error(status: int, request_id: str, content: bytes) -> JsonObject:
    """The error of a response, in Anthropic's form whatever its own is."""
    message = ""
    try:
        found = VALUE_DECODER.decode(content)
    except JSON_ERRORS:
        found = None
    inner = found.get("error") if isinstance(found, dict) else None
    if isinstance(inner, dict):
        message = inner["message"] if isinstance(inner.get("message"), str) else ""
        if found.get("type") == "error" and isinstance(inner.get("type"), str):
            return {"request_id": request_id, **found}
    elif isinstance(inner, str):
        message = inner
    type_ = _ANTHROPIC_ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = {"type": type_, "message": message or f"The request failed with status {status}."}
    return {"type": "error", "error": told, "request_id": request_id}


def _as_json(content: bytes) -> msgspec.Raw:
    """A body as JSON on one line, its numbers as they are; what is no JSON becomes a string."""
    try:
        content.decode()
        _ANY_JSON.decode(content)
        return msgspec.Raw(msgspec.json.format(content, indent=-1))
    except JSON_ERRORS:
        return msgspec.Raw(msgspec.json.encode(content.decode("utf-8", "replace")))


def _line(value: JsonObject) -> bytes:
    line = msgspec.json.encode(value)
    for end, escaped in _LINE_ENDS:
        line = line.replace(end, escaped)
    return line + b"\n"
