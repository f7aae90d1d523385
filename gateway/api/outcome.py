"""What a node's response or failure means: pass it on or try another node, and who is to blame."""

from __future__ import annotations

import enum
import re
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import msgspec

from gateway import errors
from gateway.api.json_values import JSON_ERRORS, InvalidJson, parse_json
from gateway.errors import GatewayError
from gateway.lease import Fault
from gateway.terms import Endpoint, Headers
from gateway.transport.errors import (
    DECLINED,
    ConnectionReset,
    ModelNotLoaded,
    NodeReportedError,
    UpstreamError,
    UpstreamTimeout,
)


class ResponseOutcome(enum.Enum):
    """What to do with a node's response of which nothing has been sent yet."""

    PASS = "pass"  # noqa: S105 - no password
    """A success, or an error that the client has caused."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The prompt is too long: a node with a larger context may take it."""
    REFUSED = "refused"  # This node can never serve the request: try another one
    BUSY = "busy"  # This node can't serve the request now: try another one
    POOL_FULL = "pool_full"
    """The slots of the node have no room left for their tokens together: wait, or go elsewhere."""
    SERVER_ERROR = "server_error"
    """The node failed, or the request makes every node fail: another node shows which."""


LONGEST_RETRY_AFTER = 86_400.0  # Seconds for which a node is believed to want no request
MOST_MESSAGE_CHARACTERS = 1024  # Characters of a node's message that are read

# The message for a prompt that is too long, of llama.cpp before it had an error type for that, of
# vLLM, SGLang and other servers with OpenAI's API.
_CONTEXT = re.compile(
    r"exceeds? the available context size|maximum context length (?:is|of) \d"
    r"|model's context length (?:is only |\()\d|maximum model length of \d"
)

# The message with which llama.cpp ends all that runs when its slots have used up its context.
_POOL_FULL = "Context size has been exceeded"

_TOKENS = re.compile(
    r"^(?:request|(?:The )?input) \((\d{1,9}) tokens\)"
    r"|\b(\d{1,9}) (?:tokens )?(?:in (?:the|your) (?:messages|prompt)|from the input messages)"
    r"|\b(\d{1,9}) (?:input|prompt) tokens"
    r"|messages resulted in (\d{1,9}) tokens"
    r"|prompt \(length (\d{1,9})\)"
)

_MOST = re.compile(
    r"available context size \((\d{1,9})|current batch size: (\d{1,9})"
    r"|maximum context length (?:is|of) (\d{1,9})|context length is only (\d{1,9})"
    r"|model's context length \((\d{1,9})|maximum model length of (\d{1,9})"
)

# Tokens of the prompt, of its limit and of the answer that was asked for, in messages without
# fields for them.
_ANSWER = re.compile(
    r"\b(\d{1,9}) (?:tokens )?(?:in|for) the completion"
    r"|requested (\d{1,9}) output tokens|is too large: (\d{1,9})"
)

# The beginning of the 500 with which llama.cpp refuses messages and tools that it can't read, and
# those for which a chat template raises an error, as of old its engine minja says it.
_REFUSED_REQUESTS = re.compile(
    r"Failed to parse (?:tool call arguments as JSON|messages|tools): "
    r"|\n-+\nWhile executing CallExpression at line \d+, column \d+ in source:\n"
    r"(?s:.{0,500})\nError: Jinja Exception: "
    r"|[^\n]{1,500} at row \d+, column \d+:\n(?s:.{0,500})\braise_exception\("
)

_REFUSED = frozenset({401, 403, 404, 405, 501}) | (DECLINED - {402})
_BUSY = frozenset({402, 408, 429, 502, 503, 504})

# Statuses of the error types of llama.cpp, OpenAI and Anthropic.
_STATUSES = {
    "invalid_request_error": 400,
    "exceed_context_size_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "insufficient_quota": 429,
    "not_supported_error": 501,
    "overloaded_error": 503,
    "unavailable_error": 503,
    "timeout_error": 504,
}


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: object = None
    n_ctx: int | None = None
    n_prompt_tokens: int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None
    message: str = ""
    type: str | None = None
    code: object = None


_BODY = msgspec.json.Decoder(_ErrorBody)


def classify(status: int, content: bytes, endpoint: Endpoint) -> ResponseOutcome:
    """What to do with a response of this status and, for errors, this content."""
    if status < 300:
        return ResponseOutcome.PASS
    if status in _BUSY:
        return ResponseOutcome.BUSY
    if status in _REFUSED or status < 400:
        return ResponseOutcome.REFUSED
    if is_pool_full(status, content):
        return ResponseOutcome.POOL_FULL
    if is_context_overflow(status, content, endpoint):
        return ResponseOutcome.CONTEXT_OVERFLOW
    if status < 500 or is_refused_request(status, content):
        return ResponseOutcome.PASS
    return ResponseOutcome.SERVER_ERROR


def is_refused_request(status: int, content: bytes) -> bool:
    """Whether a 500 says that the request is wrong: each node with its model would say so."""
    error = _error(content) if status == 500 else None
    return (
        error is not None
        and _REFUSED_REQUESTS.match(error.message[:MOST_MESSAGE_CHARACTERS]) is not None
    )


# Outcomes that blame no node: the client left, the gateway or a drain ended the request, it gave up
# its slot to another, this machine had no descriptor left, the slots of the node had no room left
# for their tokens together, its router had not loaded the model, every node would report that
# error, or the node refused to resume a stream.
_BLAMELESS_OUTCOMES = frozenset(
    {
        "client_closed",
        "cancelled",
        "moved",
        "yielded",
        "exhausted",
        "pool_full",
        ModelNotLoaded.outcome,
        "request_error",
        "refused",
    }
)

_UNREACHED_OUTCOMES = frozenset({"connect_failed", "connect_timeout"})


def fault_of(outcome: str, *, request_took_time: bool) -> Fault:
    """Who is to blame for an attempt that ended like this.

    `request_took_time`: if the time for the whole request has passed, that is the request's own
    doing: its client set the limit, or its response had begun.
    """
    if outcome in _BLAMELESS_OUTCOMES or (outcome == "total_timeout" and request_took_time):
        return Fault.NOBODY
    return Fault.NODE if outcome in _UNREACHED_OUTCOMES else Fault.NODE_OR_REQUEST


# What llama.cpp's router writes instead of a response, or behind the beginning of one, when the
# connection to the server of a model breaks or can't be made.
_PROXY_ERROR = b"proxy error: "
_LOST = _PROXY_ERROR + b"Failed to read connection"
LONGEST_ROUTER_ERROR = 4096  # bytes of another error of its own, which holds a model's name at most
_NOT_LOADED = re.compile(r"model is not loaded$|model name=(?s:.*) failed to load$")
_MODEL_GONE = re.compile(r"model '(?s:.*)' not found$")


def router_failure(status: int, content: bytes) -> UpstreamError | None:
    """What an error response of a router shows; None: it comes from the server of the model."""
    if status == 500 and content.startswith(_PROXY_ERROR):
        message = content[len(_PROXY_ERROR) :].decode(errors="replace")[:MOST_MESSAGE_CHARACTERS]
        if message.startswith("Could not establish connection"):
            return ModelNotLoaded("The model's server on the node is not up")
        return ConnectionReset(f"The model's server on the node was lost ({message})")
    if status not in {400, 500, 503} or len(content) > LONGEST_ROUTER_ERROR:
        return None
    message = error_message(content) or ""
    if _NOT_LOADED.match(message) or (status == 503 and message == "Loading model"):
        return ModelNotLoaded("The node has not loaded the model")
    if _MODEL_GONE.match(message):
        return ModelNotLoaded("The node does not have the model any more", is_gone=True)
    return None


def is_cut_by_router(rest: bytes) -> bool:
    """Whether a router has ended a stream whose model's server died; `rest`: behind its events."""
    return rest.endswith(_LOST)


def is_pool_full(status: int, content: bytes) -> bool:
    """Whether the pool of tokens that the node's slots share was full, not one prompt too long."""
    error = _error(content) if status == 500 else None
    return error is not None and error.message.startswith(_POOL_FULL)


def is_context_overflow(status: int, content: bytes, endpoint: Endpoint) -> bool:
    """Whether the prompt was too long: an error of its own, or for embeddings a 500's message."""
    error = _error(content)
    if error is None:
        return False
    if status == 400:
        return (
            error.type == "exceed_context_size_error"
            or error.code == "context_length_exceeded"
            or _CONTEXT.search(error.message[:MOST_MESSAGE_CHARACTERS]) is not None
        )
    return (
        status == 500
        and endpoint in {"embeddings", "rerank"}
        and ("too large to process" in error.message or "context size" in error.message)
    )


class OverflowSizes(NamedTuple):
    """Figures of a context overflow in tokens, as far as the node's error has them."""

    prompt: int | None = None
    context: int | None = None
    answer: int | None = None  # Those that the request asks for


def context_overflow_sizes(content: bytes) -> OverflowSizes:
    """What the error says of the prompt that is too long."""
    error = _error(content)
    if error is None:
        return OverflowSizes()
    message = error.message[:MOST_MESSAGE_CHARACTERS]
    return OverflowSizes(
        error.n_prompt_tokens or _number(_TOKENS, message),
        error.n_ctx or _number(_MOST, message),
        _number(_ANSWER, message),
    )


def _number(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return None if found is None or found.lastindex is None else int(found[found.lastindex])


def error_event_to_body(content: bytes) -> bytes:
    """The data of an error event as an error's body; unchanged if it is one already."""
    try:
        value = parse_json(content)
    except InvalidJson:
        value = {"message": "The node failed.", "type": "server_error", "code": 500}
    if isinstance(value, dict) and value.get("error"):
        return content
    return msgspec.json.encode({"error": value})


def retry_after(headers: Headers, wall_clock: float) -> float | None:
    """Seconds until the node wants the next request, by `Retry-After`; None: it does not say.

    `wall_clock` is in seconds since 1970, since the header may be a date.
    """
    value = next((value for name, value in headers if name == b"retry-after"), b"")
    return retry_after_seconds(value.decode("latin-1"), wall_clock)


def retry_after_seconds(value: str, wall_clock: float) -> float | None:
    """The seconds that a value of `Retry-After` means (RFC 9110, 10.2.3), a day at most."""
    word = value.strip()
    if word.isascii() and word.isdigit() and len(word) <= 9:
        return min(float(word), LONGEST_RETRY_AFTER)
    try:
        left = parsedate_to_datetime(word).timestamp() - wall_clock
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return min(max(0.0, left), LONGEST_RETRY_AFTER)


def error_message(content: bytes) -> str | None:
    """The message of a node's error; None: the content is no error, or has no message."""
    error = _error(content)
    return error.message[:MOST_MESSAGE_CHARACTERS] or None if error is not None else None


def error_status(content: bytes) -> int:
    """The status of an error by its body's `code` or `type`; else 500."""
    error = _error(content)
    if error is None:
        return 500
    code = error.code
    if isinstance(code, int) and 400 <= code < 600:
        return code
    return _STATUSES.get(error.type or "", 500)


def _error(content: bytes) -> _Error | None:
    try:
        body = _BODY.decode(content)
    except JSON_ERRORS:
        return None
    # In a stream of `/v1/messages` llama.cpp sends the error's fields without the object around.
    return body.error or _Error(message=body.message, type=body.type, code=body.code)


# Failures without a response.


class RequestRemoved(UpstreamError):  # noqa: N818 - no error of the node's
    """The gateway takes the request from its node; `error` is for its client."""

    def __init__(self, error: GatewayError) -> None:
        super().__init__(error.message)
        self.error = error


class RequestCancelled(RequestRemoved):
    """The gateway ends the request."""

    outcome = "cancelled"


class RequestEvicted(RequestRemoved):
    """The request must leave its node; it ends if no other one takes it."""

    outcome = "moved"


class RequestYielded(UpstreamError):  # noqa: N818 - no error of the node's
    """The request gives up its slot to one of a higher class, and goes on later."""

    outcome = "yielded"


class LeaseTooOld(UpstreamError):  # noqa: N818 - nobody has failed
    """The request was not sent, as its lease had become too old; it asks for another one."""

    outcome = "late"


def is_resumable(failure: UpstreamError | None) -> bool:
    """Whether a stream that failed like this is worth resuming; None: it ended early."""
    if isinstance(failure, UpstreamTimeout):
        return failure.limit != "total"
    if isinstance(failure, NodeReportedError) and failure.is_request_fault:
        return False
    return not isinstance(failure, RequestCancelled)


# Statuses of a node's error event that the client gets as they are, with their error codes. All
# others concern only the gateway and the node.
_FORWARDED_ERRORS = {
    400: "invalid_request",
    413: "request_too_large",
    422: "invalid_request",
    429: "rate_limit_exceeded",
    503: "node_failed",
    504: "node_timeout",
    529: "node_failed",
}


def to_gateway_error(failure: UpstreamError | None) -> GatewayError:
    """The error for the client; None: the stream ended early."""
    if failure is None:
        return errors.node_failed("The node's stream ended too early.")
    if isinstance(failure, RequestRemoved):
        return failure.error
    if isinstance(failure, RequestYielded):
        return errors.cut_for_others()
    if isinstance(failure, UpstreamTimeout):
        return errors.node_timeout(f"{failure}.")
    if isinstance(failure, ModelNotLoaded):
        return errors.no_node(f"{failure}.", errors.UNREPORTED_RETRY_AFTER)
    if isinstance(failure, NodeReportedError) and failure.client_error is not None:
        return failure.client_error
    if isinstance(failure, NodeReportedError) and failure.status in _FORWARDED_ERRORS:
        status = failure.status
        wait = errors.UNREPORTED_RETRY_AFTER if status in {429, 503, 529} else None
        code = _FORWARDED_ERRORS[status]
        return GatewayError(status, code, f"{failure}", retry_after=wait, retryable=False)
    return errors.node_failed(f"{failure}".rstrip(".") + ".")
