"""The errors that end a request: one exception, and one function for each cause.

A `GatewayError` does not know its form on the wire. Each API renders it as its official client
expects (`gateway.api`).
"""

from __future__ import annotations

import difflib
import heapq
import math
import os.path
from collections.abc import Iterable, Sequence
from typing import Self

# Seconds. Official SDKs repeat 429 and 5xx by themselves; with a longer wait they should not.
LONGEST_RETRYABLE_WAIT = 60.0
# `Retry-After` in seconds while a node has not reported its models: about one probe interval.
UNREPORTED_RETRY_AFTER = 5.0
LONGEST_ECHO = 200  # most characters of a client's own text that an error message repeats
PAUSED_RETRY_SECONDS = 30.0  # seconds after which a request for a paused model is worth another try


class GatewayError(Exception):
    """The request ends with this status instead of a response.

    `code` is the machine-readable word of the contract, also sent as `X-Gateway-Reason`.
    `retry_after` is in seconds. `retryable=False` sends `x-should-retry: false`.
    `message_with_nodes` replaces the message where clients may see node names.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        retryable: bool = True,
        details: dict[str, int] | None = None,
        allow: str | None = None,
        message_with_nodes: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.retryable = retryable and (retry_after or 0.0) <= LONGEST_RETRYABLE_WAIT
        self.details = details or {}
        self.allow = allow
        self.message_with_nodes = message_with_nodes

    def reveal_nodes(self) -> Self:
        """Use the message that names nodes and reasons; call only where clients may see them."""
        self.message = self.message_with_nodes or self.message
        return self

    def append(self, text: str) -> None:
        """Add `text` to the message."""
        self.message += text

    @property
    def type(self) -> str:
        """OpenAI's error type for this status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 403:
            return "permission_error"
        if self.status == 429:
            return "insufficient_quota" if self.code == "insufficient_quota" else "rate_limit_error"
        if self.status < 500:
            return "invalid_request_error"
        if self.status == 501:
            return "not_supported_error"
        return "server_error"


MOST_CAUSES = 16  # most chained errors whose tracebacks are dropped


def drop_traceback(error: BaseException) -> None:
    """Drop the tracebacks of a handled error and of its causes.

    A traceback holds the frames that it passed, and one of them usually holds the error: a cycle
    that keeps the request and its body in memory, uncounted, until the garbage collector runs.
    """
    cause: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if cause is None:
            break
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


# In logs, metrics and records only: the client left before its response was complete. nginx's.
CLIENT_CLOSED_STATUS = 499
# Codes of requests that a limit of their caller refused.
LIMIT_CODES = frozenset({"rate_limit_exceeded", "insufficient_quota"})


class ClientClosed(Exception):  # noqa: N818 - not an error: nobody is left to read one
    """The client disconnected before the response was complete: `CLIENT_CLOSED_STATUS`."""


def invalid_http() -> GatewayError:
    """400: the bytes are not HTTP."""
    return GatewayError(400, "invalid_request", "This is not a valid HTTP request.")


def invalid_json(detail: str) -> GatewayError:
    """400: the body is not JSON."""
    return GatewayError(400, "invalid_json", f"The body is not valid JSON: {detail}.")


def invalid_request(message: str, param: str | None = None) -> GatewayError:
    """400: the request is well-formed, but no node could serve it."""
    return GatewayError(400, "invalid_request", message, param=param)


def invalid_field(name: str, problem: str) -> GatewayError:
    """400 for a field; `problem` goes on behind its name."""
    return invalid_request(f"'{name}' {problem}", name)


def nested_too_deeply(limit: int) -> GatewayError:
    """400: `limit` is in levels."""
    return invalid_request(f"The body is nested deeper than {limit} levels ('limits.json_depth').")


ANSWER_ROOM = 1024  # tokens for the answer in the context that an error advises


def context_length_exceeded(
    prompt_tokens: int | None,
    context: int | None,
    param: str | None = "messages",
    answer_tokens: int | None = None,
    *,
    started_by_up: bool = False,
) -> GatewayError:
    """400: the prompt is longer than the context (tokens of one slot) of any node.

    `answer_tokens`: those asked for, on a server that wants room for all of them. Clients
    recognise the error by its wording and then compact their prompt. Anthropic's and
    LangChain's look for `prompt is too long: N tokens > M maximum`, with numbers where they are
    known (LangChain, within a stream, for `exceeds the context window`); LiteLLM looks for
    `exceeds the available context size`, its older versions for OpenAI's `This model's maximum
    context length is`. `started_by_up`: who reads it can start the servers with more.
    """
    least = prompt_tokens or (context + 1 if context else None)
    size = f"{least} tokens" if least else "it"
    # A prompt that just fills the context leaves no room for an answer.
    most = min(context - (answer_tokens or 0), least - 1) if context and least else context
    limit = f"{most} maximum" if most else "the maximum of every node"
    guess = " (it may be longer)" if context and not prompt_tokens else ""
    wanted = f" and {answer_tokens} for the answer" if answer_tokens else ""
    known = f" ({prompt_tokens} tokens{wanted})" if prompt_tokens else ""
    room = f" ({context} tokens)" if context else " of every node"
    begin = f"prompt is too long: {size} > {limit}{guess}."
    if context and answer_tokens and answer_tokens >= context:
        # No shorter prompt would help: no client is to try.
        begin, param = f"'max_tokens' is too large: {answer_tokens} tokens.", "max_tokens"
    more = f"{1 << (prompt_tokens + ANSWER_ROOM).bit_length()}" if prompt_tokens else "N"
    hint = f" Or start 'llama-gateway up' with '--context {more}'." if started_by_up else ""
    details = {}
    if prompt_tokens:
        details["n_prompt_tokens"] = prompt_tokens
    if context:
        details["n_ctx"] = context
    return GatewayError(
        400,
        "context_length_exceeded",
        f"{begin} The request{known} exceeds the available context size{room}. "
        f"This model's maximum context length is {f'{context} tokens' if context else 'exceeded'}: "
        f"what exceeds the context window must be shortened.{hint}",
        param=param,
        details=details,
    )


def invalid_api_key() -> GatewayError:
    """401: no API key, or an unknown one."""
    return _bad_key(
        "No valid API key was sent. Send one as 'Authorization: Bearer lg_...', "
        "'x-api-key' or 'api-key'."
    )


def _bad_key(message: str) -> GatewayError:
    return GatewayError(401, "invalid_api_key", message, retryable=False)


def expired_api_key() -> GatewayError:
    """401: a key whose time is over; only the holder of its secret is told."""
    return _bad_key("This API key has expired. Ask for a new one.")


def owner_gone() -> GatewayError:
    """401: the key that sent a stored request is revoked or has expired."""
    return _bad_key(
        "The API key that sent this request has been revoked or has expired. Send it again with "
        "a valid key."
    )


def keys_unknown(retry_after: float = 2.0) -> GatewayError:
    """503: the store's keys have not been read yet, so nobody can be told from a stranger."""
    return GatewayError(
        503,
        "starting",
        "The store of the API keys can't be reached yet, so no key can be checked.",
        retry_after=retry_after,
    )


def too_many_keys(limit: int) -> GatewayError:
    """401: more different keys than one request may present."""
    return _bad_key(f"More than {limit} different API keys were sent. Send one.")


def keys_of_different_callers() -> GatewayError:
    """401: two valid keys of different callers."""
    return _bad_key(
        "API keys of different callers were sent in one request ('Authorization', 'x-api-key', "
        "'api-key'). Send one of them."
    )


def model_not_allowed(model: str) -> GatewayError:
    """403: the API key may not use this model."""
    return GatewayError(
        403,
        "model_not_allowed",
        f"This API key may not use the model '{truncate_echo(model)}'.",
        param="model",
    )


def host_not_allowed(host: str) -> GatewayError:
    """403: a request without a key whose `Host` is not a name of the listener."""
    return GatewayError(
        403,
        "host_not_allowed",
        f"Without an API key this gateway does not answer to the host '{truncate_echo(host)}': use "
        "localhost or its address, add the name to listen.hosts in the settings, or use a key.",
    )


def origin_not_allowed(origin: str) -> GatewayError:
    """403: a web page of another origin posted without a key."""
    return GatewayError(
        403,
        "origin_not_allowed",
        f"Pages of '{truncate_echo(origin)}' may not use this gateway without an API key: add the "
        "origin to cors.origins in the settings, or use a key.",
    )


def model_not_found(model: str, known: list[str], targets: Sequence[str] = ()) -> GatewayError:
    """404: no node that the caller may use serves this model, now or when last seen.

    `targets`: the models that the name stands for.
    """
    some = ", ".join(f"'{name}'" for name in known[:8])
    hint = f" Known here: {some}{', ...' if len(known) > 8 else ''}." if known else ""
    return GatewayError(
        404,
        "model_not_found",
        f"The model {_named_model(model, targets)} does not exist here.{hint}",
        param="model",
    )


def _named_model(model: str, targets: Sequence[str]) -> str:
    """The name, and what it stands for, if that is something else."""
    others = ", ".join(f"'{truncate_echo(name)}'" for name in targets[:8] if name != model)
    return f"'{truncate_echo(model)}'" + (f" (it stands for {others})" if others else "")


def model_missing(known: Sequence[str]) -> GatewayError:
    """400: the request names no model, and there are several."""
    some = ", ".join(f"'{name}'" for name in known[:8])
    return invalid_request(
        f"'model' is missing, and the gateway's settings have no default_model. There are: {some}"
        f"{', ...' if len(known) > 8 else ''}.",
        "model",
    )


def not_found(path: str, suggestion: str | None = None) -> GatewayError:
    """404: no such path; `suggestion` says what to use instead."""
    hint = f" {suggestion}" if suggestion else ""
    return GatewayError(404, "not_found", f"There is nothing at '{truncate_echo(path)}'.{hint}")


def method_not_allowed(method: str, allow: str) -> GatewayError:
    """405: the path exists, but not with this method."""
    return GatewayError(
        405, "method_not_allowed", f"{method} is not allowed here, use {allow}.", allow=allow
    )


def request_timeout(message: str) -> GatewayError:
    """408: the client was too slow to send its request."""
    return GatewayError(408, "request_timeout", message)


def superseded() -> GatewayError:
    """409: the same editor session has sent a newer request."""
    return GatewayError(
        409,
        "superseded",
        "A newer request of the same session has replaced this one.",
        retryable=False,
    )


def body_too_large(limit: int) -> GatewayError:
    """413: `limit` is in bytes."""
    return GatewayError(413, "request_too_large", f"The body is larger than {limit} bytes.")


def headers_too_large(limit: int) -> GatewayError:
    """431: `limit` is in bytes."""
    return GatewayError(431, "headers_too_large", f"The headers are larger than {limit} bytes.")


def too_many_headers(limit: int) -> GatewayError:
    """431: `limit` is the most header fields of a head."""
    return GatewayError(431, "headers_too_large", f"There are more than {limit} header fields.")


def compressed_body() -> GatewayError:
    """415: the body has a `Content-Encoding`."""
    return GatewayError(
        415,
        "unsupported_media_type",
        "Compressed bodies are not supported: send it plain, without 'Content-Encoding'.",
        retryable=False,
    )


def queue_full(message: str, retry_after: float) -> GatewayError:
    """429: the queue, or what stands for one, has no room."""
    return GatewayError(429, "queue_full", message, retry_after=retry_after)


def rate_limit_exceeded(limit: str, retry_after: float) -> GatewayError:
    """429: a limit of the caller, its group, its end user or all callers is reached for now."""
    wait = max(1, math.ceil(retry_after))
    return GatewayError(
        429,
        "rate_limit_exceeded",
        f"Rate limit reached for {limit}. Try again in {wait} s.",
        retry_after=wait,
    )


def insufficient_quota(limit: str, retry_after: float) -> GatewayError:
    """429: the tokens of the day, or the money of the day or month, are used up."""
    return GatewayError(
        429,
        "insufficient_quota",
        f"The quota is used up of {limit}. It is renewed in {_in_words(retry_after)}.",
        retry_after=max(1.0, retry_after),
        retryable=False,
    )


def prompt_limit_exceeded(prompt_tokens: int, limit: int, who: str) -> GatewayError:
    """400: the prompt is longer than a limit of the caller allows; worded as a context's end."""
    error = context_length_exceeded(prompt_tokens, limit)
    error.append(f" This is the limit 'prompt_tokens' of {who}.")
    return error


def larger_than_limit(prompt: int, completion: int | None, limit: str) -> GatewayError:
    """400: one request needs more tokens than a limit has at all, so that no wait helps."""
    answer = "" if completion is None else f" and {completion} for the answer"
    remedy = "Shorten the prompt." if completion is None else "Shorten it, or lower 'max_tokens'."
    return GatewayError(
        400,
        "invalid_request",
        f"The request is too large for {limit}. It asks for {prompt} tokens of prompt{answer}, so "
        f"that it could never be admitted. {remedy}",
        param=None if completion is None else "max_tokens",
    )


def _in_words(seconds: float) -> str:
    if seconds < 120:
        return f"{max(1, math.ceil(seconds))} s"
    if seconds < 7200:
        return f"{math.ceil(seconds / 60)} minutes"
    return f"{math.ceil(seconds / 3600)} hours"


def queue_timeout(message: str, retry_after: float) -> GatewayError:
    """503: it waited for a slot for as long as it may, or could never meet its deadline."""
    return GatewayError(503, "queue_timeout", message, retry_after=retry_after, retryable=False)


def cut_for_others() -> GatewayError:
    """503: it gave up its slot to other requests, and no node could resume it."""
    return queue_timeout(
        "It gave up its slot to other requests and could not go on later. Try again.",
        UNREPORTED_RETRY_AFTER,
    )


def no_node(message: str, retry_after: float) -> GatewayError:
    """503: every node that could serve it is out of service."""
    return GatewayError(503, "no_node", message, retry_after=retry_after)


def load_failed(
    models: str, failures: Sequence[tuple[str, str]], retry_after: float
) -> GatewayError:
    """503: every node that has the model has failed to load it. `failures`: nodes, with reasons."""
    message = f"No node could load {models}"
    named = "; ".join(f"'{name}': {reason}" for name, reason in failures[:3])
    return GatewayError(
        503,
        "no_node",
        f"{message}. It is tried again later.",
        retry_after=retry_after,
        message_with_nodes=f"{message}: {named}. It is tried again later.",
    )


def model_paused(model: str) -> GatewayError:
    """503: an operator has paused this model; nobody knows for how long."""
    return GatewayError(
        503,
        "model_paused",
        f"An operator has paused the model '{truncate_echo(model)}'. Try again later.",
        param="model",
        retry_after=PAUSED_RETRY_SECONDS,
        retryable=False,
    )


def no_node_reported(
    model: str | None,
    unreported: Sequence[tuple[str, str, str]],
    node_count: int,
    targets: Sequence[str] = (),
) -> GatewayError:
    """503: no node is known to serve this model, but `unreported` ones never said what they serve.

    `unreported`: name, state and reason of each such node; `node_count`: of all nodes.
    """
    target = "any model" if model is None else f"the model {_named_model(model, targets)}"
    begin = f"No node has said that it serves {target}"
    count = f"{len(unreported)} of {node_count} node{'' if node_count == 1 else 's'}"
    states = ", ".join(sorted({state for _, state, _ in unreported}))
    named = "; ".join(f"'{name}' is {state} ({reason})" for name, state, reason in unreported[:3])
    more = f"; and {len(unreported) - 3} more" if len(unreported) > 3 else ""
    remedy = "'llama-gateway nodes' on the gateway's machine"
    return GatewayError(
        503,
        "no_node",
        f"{begin}, but {count} never said what it serves ({states}). {remedy} tells more.",
        retry_after=UNREPORTED_RETRY_AFTER,
        message_with_nodes=f"{begin}, but {count} never said what it serves: {named}{more}. "
        f"{remedy} shows all.",
    )


def starting(message: str, retry_after: float = 2.0) -> GatewayError:
    """503: a node that might serve it has not been probed yet."""
    return GatewayError(503, "starting", message, retry_after=retry_after)


def shutting_down(retry_after: float = 5.0) -> GatewayError:
    """503: the gateway is shutting down."""
    return GatewayError(
        503, "shutting_down", "The gateway is shutting down.", retry_after=retry_after
    )


def no_leader(retry_after: float = 2.0) -> GatewayError:
    """503: this machine of a cluster knows of none that leads."""
    return GatewayError(
        503,
        "no_leader",
        "This machine can't reach the one that leads the cluster; another one leads in seconds.",
        retry_after=retry_after,
    )


def not_supported(endpoint: str, path: str, model: str, hint: str | None) -> GatewayError:
    """501: no node that serves the model has this feature; `hint` is a node's own text."""
    feature, remedy = _FEATURES.get(endpoint, (f"'{path}'", "Use another path, or another model."))
    advice = f"A node says: {hint[:LONGEST_ECHO]}" if hint else remedy
    return GatewayError(
        501,
        "not_supported",
        f"No node that serves '{truncate_echo(model)}' supports {feature}. {advice}",
        retryable=False,
    )


# By endpoint: its name in a sentence, and the remedy where no node has given a hint.
_FEATURES = {
    "embeddings": ("embeddings", "Start a node's server with `--embeddings`."),
    "rerank": ("reranking", "Start a node's server with `--reranking`."),
    "infill": ("infill", "It needs a model that was trained to fill in the middle."),
    "audio": ("audio", "It needs a model that hears; llama.cpp's server wants its `--mmproj`."),
}


def node_failed(message: str) -> GatewayError:
    """502: every permitted attempt failed."""
    return GatewayError(502, "node_failed", message, retryable=False)


def node_timeout(message: str) -> GatewayError:
    """504: a node took longer than its timeout."""
    return GatewayError(504, "node_timeout", message, retryable=False)


def truncate_echo(text: str) -> str:
    """A client's own text, cut to `LONGEST_ECHO`."""
    return text if len(text) <= LONGEST_ECHO else text[:LONGEST_ECHO] + "..."


# Names that are compared letter by letter; with a thousand, that would take the loop 50 ms.
MOST_COMPARED = 64


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """A sentence for an error's end: the names that are similar, or `otherwise`."""
    name = truncate_echo(name)
    near = heapq.nlargest(MOST_COMPARED, known, key=lambda one: _in_common(name, one))
    similar = difflib.get_close_matches(name, near, n=3)
    quoted = ", ".join(f"'{one}'" for one in similar)
    return f"Did you mean {quoted}?" if similar else otherwise


def _in_common(one: str, other: str) -> int:
    """How many letters their beginnings or their ends share."""
    ends = (one, other), (one[::-1], other[::-1])
    return max(len(os.path.commonprefix(pair)) for pair in ends)  # noqa: RUF071 - it is meant so
