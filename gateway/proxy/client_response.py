"""What the client gets of a node's response: rewritten by its API, and errors in its API's form.

For every kind of client alike, whether it waits on a connection or reads a stored result.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from gateway import errors
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.proxy.api.base import Api, ResponseRewriter
from gateway.proxy.cache_figures import CacheFigureHider
from gateway.proxy.forwarded_headers import without_times
from gateway.proxy.inbound.body import LARGE_BODY_BYTES
from gateway.proxy.inbound.request import Request
from gateway.proxy.json_values import InvalidJson, parse_json
from gateway.proxy.response_stream import ProxyResponse
from gateway.transport.errors import InvalidResponse


def for_client(
    request: Request,
    response: ProxyResponse,
    api: Api,
    settings: Settings,
    translator: ResponseRewriter | None = None,
    *,
    hides_cache: bool,
) -> tuple[ProxyResponse, ResponseRewriter | None]:
    """The response for a client of `api`, and what rewrites its body; None: nothing does.

    `translator`: of a request that was translated for nodes. `hides_cache`: what tells of nodes'
    prompt caches is hidden, in header fields too.
    """
    rewriter, node = translator, response.node
    if api.rewrites_responses and rewriter is None and node is not None:
        bodies, model = request.bodies.values(), request.lease_request.wanted.model
        rewriter = api.response_rewriter(bodies, model, node, settings, stream=request.stream)
    if hides_cache:
        rewriter = CacheFigureHider(rewriter)
        response = replace(response, header_lines=without_times(response.header_lines))
    return response, rewriter


def rewrite_body(rewriter: ResponseRewriter, content: bytes) -> bytes:
    """A plain response as the client gets it. Raises: GatewayError 502."""
    try:
        return rewriter.rewrite_body(content)
    except InvalidResponse as failure:
        raise errors.node_failed(f"{failure}.") from None


def is_slow_to_rewrite(response: ProxyResponse) -> bool:
    """Whether a plain response is to be rewritten in steps."""
    return len(response.content) >= LARGE_BODY_BYTES and response.status < 300


def rewrite_in_steps(rewriter: ResponseRewriter, content: bytes) -> Generator[None, None, bytes]:
    """As `rewrite_body`, for a large response, in short steps. Raises: GatewayError 502."""
    try:
        return (yield from rewriter.rewrite_in_steps(content))
    except InvalidResponse as failure:
        raise errors.node_failed(f"{failure}.") from None


class EventsForClient:
    """The events of one stream as its client gets them."""

    __slots__ = ("_record", "_rewriter", "api")

    def __init__(self, rewriter: ResponseRewriter, api: Api, record: RequestFinished) -> None:
        self._rewriter: ResponseRewriter | None = rewriter
        """None once the stream has ended with an error."""
        self.api = api
        """The API that the client uses."""
        self._record = record

    @property
    def failed(self) -> bool:
        """Whether the stream has ended with an error, since its events were invalid."""
        return self._rewriter is None

    def rewrite(self, events: bytes) -> bytes:
        """The events as the client gets them; an error in place of invalid ones."""
        if self._rewriter is None:
            return b""
        try:
            return self._rewriter.rewrite_events(events)
        except InvalidResponse as failure:
            self._rewriter = None
            error = errors.node_failed(f"{failure}.")
            self._record.fail(error.status, error.code)
            return self.api.error_event(error, self._record.x_request_id)


_NODE_ERROR_CODES = {400: "invalid_request", 413: "request_too_large", 422: "invalid_request"}

_OTHER_NODE_ERROR = "node_error"


def node_error(response: ProxyResponse) -> GatewayError:
    """The error that a node's response of status 400 or more contains."""
    try:
        message = str(parse_json(response.content)["error"]["message"])
    except (InvalidJson, KeyError, TypeError):
        message = f"The node answered with status {response.status}."
    return GatewayError(response.status, node_error_code(response.status), message)


def node_error_body(response: ProxyResponse, api: Api, x_request_id: str) -> bytes:
    """The node's body as it is, unless it is empty or not in the API's error form."""
    if response.content and api.is_own_error(response.content):
        return response.content
    return api.error_body(node_error(response), x_request_id)


def node_error_code(status: int) -> str:
    """The error code of a node's response of this status."""
    return _NODE_ERROR_CODES.get(status, _OTHER_NODE_ERROR)
