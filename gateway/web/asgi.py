"""Replies of the cold paths, whichever listener they stand on: JSON, errors, the request's id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.errors import GatewayError
from gateway.proxy.inbound.routes import api_of_path
from gateway.web.response_heads import error_headers, x_request_id_of

X_REQUEST_ID_KEY = "gateway.tag"
"""Where the scope keeps the request's id."""

LONGEST_ECHO = 200
"""Characters of what a client sent that an error repeats."""


class JsonResponse(Response):
    """A value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def asgi_app(
    routes: Sequence[Route],
    next_id: Callable[[], str],
    middleware: Sequence[Middleware] = (),
    suggest: Callable[[str], str | None] = lambda _: None,
) -> ASGIApp:
    """An application whose every reply has an `X-Request-ID` and whose errors are the contract's.

    `next_id` names requests whose client sent no sane id; `instead` says what to use where there
    is no such path.
    """

    async def refused_by_starlette(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = sorted((error.headers or {})["Allow"].split(", "))
            told = errors.method_not_allowed(request.method, ", ".join(allowed))
        elif error.status_code == 404:
            path = request.scope["path"]
            told = errors.not_found(path, suggest(path))
        else:
            told = GatewayError(error.status_code, "invalid_request", error.detail)
        return error_response(told, request.scope)

    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            GatewayError: _refused,
            HTTPException: refused_by_starlette,
            Exception: _failed,
        },
    )
    app.router.redirect_slashes = False
    return _RequestIdMiddleware(app, next_id)


def error_response(error: GatewayError, scope: Scope) -> Response:
    """The reply to a request that ends with `error`, in the form of the API it was sent to."""
    body = api_of_path(scope["path"]).error_body(error, scope[X_REQUEST_ID_KEY])
    response = Response(body, error.status)
    response.raw_headers = [*error_headers(error), (b"content-length", b"%d" % len(body))]
    return response


def truncate_echo(text: str) -> str:
    """A client's own words, at a length that may be repeated to it."""
    return text if len(text) <= LONGEST_ECHO else text[:LONGEST_ECHO] + "..."


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return error_response(error, request.scope)


async def _failed(request: Request, _: Exception) -> Response:
    # Starlette raises it again behind this answer, so that it is logged.
    error = GatewayError(500, "internal_error", "The gateway itself failed; its log says why.")
    return error_response(error, request.scope)


class _RequestIdMiddleware:
    """Gives each request its id, and each reply that does not tell it yet."""

    def __init__(self, app: ASGIApp, next_id: Callable[[], str]) -> None:
        self._app = app
        self._next_id = next_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tag = scope[X_REQUEST_ID_KEY] = x_request_id_of(scope["headers"]) or self._next_id()

        async def send_tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields = list(message["headers"])
                if all(name != b"x-request-id" for name, _ in fields):
                    fields.append((b"x-request-id", tag.encode()))
                    if api_of_path(scope["path"]).sends_request_id:
                        fields.append((b"request-id", tag.encode()))
                message = {**message, "headers": fields}
            await send(message)

        await self._app(scope, receive, send_tagged)
