"""What of two responses must be equal: the names and types of values, and some headers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx

# Fields that depend on the model or on the machine, or that the emulator has in part only.
SET_ASIDE = {"generation_settings", "params", "chat_template_caps", "speculative.types"}
HEADERS = {"content-type", "connection", "keep-alive", "transfer-encoding", "server"}


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: ... if k in SET_ASIDE else shape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]] if len(value) < 2 else [shape(value[0]), "more"]
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value)
    )


def stream_shape(body: str) -> list[Any]:
    """The names and shapes of events; equal ones in a row count once."""
    shapes: list[Any] = []
    for block in body.split("\n\n")[:-1]:
        *names, data = block.split("\n")
        value = data.removeprefix("data: ")
        found = [
            *names,
            value if value == "[DONE]" else shape(httpx.Response(200, text=value).json()),
        ]
        if not shapes or shapes[-1] != found:
            shapes.append(found)
    return shapes


async def alike(
    pair: Iterable[httpx.AsyncClient], method: str, path: str, **options: Any
) -> httpx.Response:
    """Send a request to both servers, compare the responses, and return the real one, the first."""
    first, second = [await client.request(method, path, **options) for client in pair]
    assert (second.status_code, heads(second)) == (first.status_code, heads(first)), path
    if "json" in first.headers["content-type"]:
        assert shape(second.json()) == shape(first.json()), path
    if first.status_code >= 400:
        assert second.json() == first.json(), path
    return first


def heads(reply: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name in HEADERS}
