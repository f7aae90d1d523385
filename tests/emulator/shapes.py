"""What of two responses must be equal: the names and types of values, and some headers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx

# Fields that depend on the model or on the machine, or that the emulator has in part only.
SET_ASIDE = {"generation_settings", "params", "chat_template_caps", "speculative.types"}
HEADERS = {"content-type", "connection", "keep-alive", "transfer-encoding", "server"}
Pair = tuple[httpx.AsyncClient, httpx.AsyncClient]


@asynccontextmanager
async def clients(real: str, emulated: str) -> AsyncIterator[Pair]:
    """A client of each, which keep no connection."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=real, timeout=60, limits=limits) as first,
        httpx.AsyncClient(base_url=emulated, timeout=60, limits=limits) as second,
    ):
        yield first, second


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: ... if k in SET_ASIDE else shape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]] + (["more"] if len(value) > 1 else [])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if is_number else type(value)


def stream_shape(body: str) -> list[Any]:
    """The names and shapes of events; equal ones in a row count once."""
    shapes: list[Any] = []
    for block in body.split("\n\n")[:-1]:
        *names, data = block.split("\n")
        value = data.removeprefix("data: ")
        found = [*names, value if value == "[DONE]" else shape(json.loads(value))]
        if shapes[-1:] != [found]:
            shapes.append(found)
    return shapes


async def alike(
    pair: Iterable[httpx.AsyncClient],
    method: str,
    path: str,
    *,
    exact: bool = True,
    in_order: bool = True,
    **options: Any,
) -> httpx.Response:
    """Send a request to both servers, compare the responses, and return the real one, the first.

    Errors are equal; where not `exact`, of the same shape and type. Answers to several prompts come
    as they like: not `in_order`.
    """
    first, second = [await client.request(method, path, **options) for client in pair]
    assert (second.status_code, heads(second)) == (first.status_code, heads(first)), path
    kind = first.headers["content-type"]
    if "json" in kind:
        assert shape(second.json()) == shape(first.json()), path
    if "event-stream" in kind:
        told = [stream_shape(one.text) for one in (first, second)]
        if not in_order:
            told = [sorted(set(map(str, one))) for one in told]
        assert told[1] == told[0], path
    if first.status_code >= 400:
        errors = [one.json() if exact else one.json()["error"]["type"] for one in (first, second)]
        assert errors[1] == errors[0], path
    return first


def heads(reply: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name in HEADERS}
