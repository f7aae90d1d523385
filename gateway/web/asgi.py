"""Starlette applications of both listeners: JSON responses, errors, request ids, and health."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeVar
from urllib.parse import unquote

import anyio._backends._asyncio  # noqa: F401 - Starlette would on the event loop: 13 ms
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.api.json_values import InvalidJson, JsonObject, parse_object
from gateway.catalog import FleetCatalog, RequestQueue
from gateway.errors import GatewayError
from gateway.http.heads import error_headers, x_request_id_of
from gateway.request.routes import api_of_path

X_REQUEST_ID_KEY = "gateway.x_request_id"  # key of the request's id in the ASGI scope
T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
# `Retry-After` in seconds while every node is out: about one probe interval.
NOT_READY_RETRY_AFTER = 5.0


class JsonResponse(Response):
    """A value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


async def large_json(make: Callable[[], object]) -> Response:
    """The value that `make` returns as JSON; both are made beside the event loop."""
    content = await asyncio.to_thread(lambda: msgspec.json.encode(make()))
    return Response(content, media_type=JsonResponse.media_type)


Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
"""The pairs that a caller may give to a batch or a response, bounded as in OpenAI's API."""


def named_field(problem: str) -> str | None:
    """The field of a body that msgspec names as wrong, or as missing."""
    place = re.search(r"\$\.(\w+)", problem) or re.search(r"required field `(\w+)`", problem)
    return None if place is None else place[1]


STEP_SECONDS = 0.002  # seconds after which a step lets other work run


async def in_steps(items: Iterable[T]) -> AsyncIterator[T]:
    """These items; other work runs after each `STEP_SECONDS`."""
    until = time.perf_counter() + STEP_SECONDS
    for item in items:
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + STEP_SECONDS
        yield item


async def json_of_rows(
    name: str,
    items: Iterable[T],
    make: Callable[[T], object],
    rest: Mapping[str, object] | None = None,
) -> Response:
    """An object with a list of this name; its rows are made and encoded in steps."""
    return JsonResponse({name: await encoded_rows(map(make, items)), **(rest or {})})


async def encoded_rows(rows: Iterable[object]) -> msgspec.Raw:
    """A list of these rows as JSON, made in steps."""
    pieces = [msgspec.json.encode(row) async for row in in_steps(rows)]
    return msgspec.Raw(b"[%b]" % b",".join(pieces))


def asgi_app(
    routes: Sequence[Route],
    next_id: Callable[[], str],
    middleware: Sequence[Middleware] = (),
    suggest: Callable[[str], str | None] = lambda _: None,
) -> ASGIApp:
    """An application whose responses have an `X-Request-ID` and whose errors an API's form.

    `next_id` makes the id of a request whose client sent none; `suggest` says what to use instead
    of a path that does not exist.
    """

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = sorted((error.headers or {})["Allow"].split(", "))
            own_error = errors.method_not_allowed(request.method, ", ".join(allowed))
        elif error.status_code == 404:
            own_error = errors.not_found(request.scope["path"], suggest(request.scope["path"]))
        else:
            own_error = GatewayError(error.status_code, "invalid_request", error.detail)
        return error_response(own_error, request.scope)

    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            GatewayError: _on_gateway_error,
            HTTPException: on_http_exception,
            Exception: _on_exception,
        },
    )
    app.router.redirect_slashes = False
    return _RequestIdMiddleware(app, next_id)


def routes_by_path(endpoints: Iterable[tuple[str, str, Endpoint]]) -> list[Route]:
    """Routes of these methods and paths: one for each path, so that a 405 names all its methods."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for method, path, endpoint in endpoints:
        paths.setdefault(path, {})[method] = endpoint
    return [Route(path, _by_method(found), methods=list(found)) for path, found in paths.items()]


def _by_method(endpoints: Mapping[str, Endpoint]) -> Endpoint:
    """The endpoint of a path that has one for each method; with GET it answers HEAD alike."""

    async def serve(request: Request) -> Response:
        if _has_encoded_slash(request.scope):
            parameters = request.path_params.items()
            request.scope["path_params"] = {name: unquote(value) for name, value in parameters}
        method = "GET" if request.method == "HEAD" else request.method
        return await endpoints[method](request)

    return serve


def _has_encoded_slash(scope: Scope) -> bool:
    return b"%2f" in scope.get("raw_path", b"").lower()


async def read_fields(
    request: Request, most_bytes: int, seconds: float, *, may_be_empty: bool = False
) -> JsonObject:
    """The fields of a body of JSON that comes within the time.

    Raises: GatewayError (400, 408, 413).
    """
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most_bytes:
                    raise errors.body_too_large(most_bytes)
    except TimeoutError:
        raise errors.request_timeout("The body took too long to arrive.") from None
    if may_be_empty and not body:
        return {}
    try:
        return parse_object(bytes(body))
    except InvalidJson:
        raise errors.invalid_json("it must be an object") from None


_DIGITS = re.compile(r"[0-9]{1,9}")


def page_limit(word: str, most: int) -> int:
    """How many a page may list, by the query's `limit`. Raises: GatewayError 400."""
    if _DIGITS.fullmatch(word) is None or not 1 <= int(word) <= most:
        raise errors.invalid_request(f"'limit' must be 1 to {most}.", "limit")
    return int(word)


def page_order(word: str) -> Literal["asc", "desc"]:
    """How a page is ordered, by the query's `order`. Raises: GatewayError 400."""
    if word not in {"asc", "desc"}:
        raise errors.invalid_request("'order' must be 'asc' or 'desc'.", "order")
    return "asc" if word == "asc" else "desc"


class Identified(Protocol):
    """An object of a list."""

    id: str


def listed(data: Sequence[Identified], *, has_more: bool = False) -> dict[str, Any]:
    """A page of these objects, as the lists of both APIs have it."""
    return {
        "data": data,
        "first_id": data[0].id if data else None,
        "last_id": data[-1].id if data else None,
        "has_more": has_more,
    }


def number_parameter(
    request: Request, name: str, least: float, most: float, meaning: str
) -> float | None:
    """The number that a parameter of the query gives; None: it is not given.

    `meaning` says in an error what the number must be. Raises: GatewayError (400).
    """
    word = request.query_params.get(name)
    if word is None:
        return None
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise errors.invalid_request(f"'{name}' must be {meaning}.", name)
    return number


def store_unavailable(message: str) -> GatewayError:
    """503: the store can't be read or written now; `message` says why."""
    return GatewayError(503, "store_unavailable", message, retry_after=5.0)


def error_response(error: GatewayError, scope: Scope) -> Response:
    """The response to a request that ends with `error`, in the form of the path's API."""
    body = api_of_path(scope["path"]).error_body(error, scope[X_REQUEST_ID_KEY])
    response = Response(body, error.status)
    response.raw_headers = [*error_headers(error), (b"content-length", b"%d" % len(body))]
    return response


async def _on_gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return error_response(error, request.scope)


async def _on_exception(request: Request, _: Exception) -> Response:
    # Starlette raises the exception again after this response, so it is logged.
    error = GatewayError(500, "internal_error", "The gateway itself failed; its log says why.")
    return error_response(error, request.scope)


class _RequestIdMiddleware:
    """Gives each request an id, and adds it to each response that lacks it.

    An encoded slash in a request's path stays encoded until the path has found its endpoint.
    """

    def __init__(self, app: ASGIApp, next_id: Callable[[], str]) -> None:
        self._app = app
        self._next_id = next_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _has_encoded_slash(scope):
            segments = map(unquote, scope["raw_path"].decode("latin-1").split("/"))
            apart = (one.replace("%", "%25").replace("/", "%2F") for one in segments)
            scope["path"] = "/".join(apart)
        request_id = x_request_id_of(scope["headers"]) or self._next_id()
        scope[X_REQUEST_ID_KEY] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                if all(name != b"x-request-id" for name, _ in headers):
                    headers.append((b"x-request-id", request_id.encode()))
                    if api_of_path(scope["path"]).sends_request_id:
                        headers.append((b"request-id", request_id.encode()))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


@dataclass(frozen=True, slots=True)
class HealthEndpoints:
    """`/health` and `/ready`, which are the same on both listeners."""

    fleet: FleetCatalog
    queue: RequestQueue
    is_closing: Callable[[], bool]  # whether the gateway is shutting down
    standing_error: Callable[[], GatewayError | None] = lambda: None
    """Why this process serves nobody now; None: it does."""

    async def health(self, _: Request) -> Response:
        """200 while the process lives."""
        return JsonResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """200 while some node can take or queue a request."""
        error = self.readiness_error()
        if error is not None:
            raise error
        return JsonResponse({"status": "ready"})

    def readiness_error(self) -> GatewayError | None:
        """Why no node can take or queue a request; None: one can.

        Without a queue (length 0) the gateway is ready while a slot is free.
        """
        fleet, queue = self.fleet, self.queue
        if self.is_closing() or queue.closing:
            return errors.shutting_down()
        if (error := self.standing_error()) is not None:
            return error
        if fleet.has_free_slot():
            return None
        if not fleet.has_usable_node():
            if not fleet.is_probed:
                return errors.starting("The nodes are being asked what they serve.")
            return errors.no_node("Every node is out.", NOT_READY_RETRY_AFTER)
        if queue.has_room():
            return None
        return GatewayError(
            503,
            "queue_full",
            "Every slot is taken, and so is every place in the queue.",
            retry_after=queue.retry_after(),
        )
