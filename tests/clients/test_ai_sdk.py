"""The AI SDK with its default, `/v1/responses`, unmodified, over real servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import npm
from tests.clients.site import Site

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
]

CITIES = ({"city": "paris"}, {"city": "rome"})


@pytest.fixture(scope="module")
def script(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script in a folder where the SDK can be imported."""
    return npm.install_script(pytestconfig, tmp_path_factory.mktemp("npm"), "ai_sdk.mjs")


async def done(script: Path, site: Site, work: str) -> Any:
    return await npm.run_script(script, f"{site.url}/v1", work)


@pytest.mark.smoke
async def test_text_is_streamed(script: Path, site: Site, chat_node: httpx.AsyncClient) -> None:
    body = {"input": "hello there", "max_output_tokens": 24, "temperature": 0}
    direct = (await chat_node.post("/v1/responses", json=body)).json()
    text = direct["output"][0]["content"][0]["text"]
    streamed = await done(script, site, "text")
    parts = streamed.pop("parts")
    assert parts.count("text-delta") > 20
    assert [parts.count(kind) for kind in ("text-start", "text-end", "finish")] == [1, 1, 1]
    # The text was cut off, which today's server does not say.
    assert streamed == {"text": text, "reason": "length", "outputTokens": 24}
    assert await done(script, site, "plain") == streamed


async def test_a_tool_is_called_and_its_result_is_answered(script: Path, site: Site) -> None:
    called = await done(script, site, "tool")
    [call], [result] = called["calls"], called["results"]
    assert call["toolName"] == "weather"
    assert call["input"] in CITIES
    assert result == call["input"] | {"sunny": True}
    assert called["reasons"][0] == "tool-calls"
    assert called["parts"].count("tool-input-delta") > 5
    assert called["text"]


async def test_an_object_obeys_its_schema(script: Path, site: Site) -> None:
    assert await done(script, site, "object") in CITIES
