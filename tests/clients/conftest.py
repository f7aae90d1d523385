"""One gateway over two real servers, shared by all tests of a worker that disturb neither."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from gateway.config.scheduling import RepairSettings
from tests.clients.site import Site, running_site
from tests.gateways import NO_TLS
from tests.servers import DemoServer, demo_servers, running_demo_servers

CONTEXT = 2048

SETTINGS: dict[str, Any] = {
    "default_model": "demo",
    "ollama": True,
    "models": {
        "gpt-4o-mini": {"use": "demo"},
        "org/demo": {"use": "demo"},
        "helper": {"use": ["absent", "demo"]},
        "short": {"use": "demo", "max_tokens": 4},
        "brief": {"use": "demo", "default": {"max_tokens": 3}},
        # Ollama's API has no way to require a tool, and the demo model calls none by itself.
        "caller": {"use": "demo", "set": {"tool_choice": "required"}},
        "steady": {"use": "demo", "set": {"temperature": 0, "seed": 7}, "strip": ["logit_bias"]},
    },
}


@pytest.fixture(scope="session")
def servers() -> Iterator[tuple[DemoServer, DemoServer]]:
    """A server for chats and one for embeddings."""
    with (
        running_demo_servers(1, slots=4, context=CONTEXT) as [chat],
        running_demo_servers(1, slots=2, context=512, embedding=True, alias="demo-embed") as [
            embedder
        ],
    ):
        yield chat, embedder


@pytest.fixture(scope="session")
def narrow_url() -> Iterator[str]:
    """A server with a single slot and room for answers that take seconds."""
    with demo_servers(1, slots=1, context=16_384) as (url,):
        yield url


@pytest.fixture(scope="session")
def chat_url(servers: tuple[DemoServer, DemoServer]) -> str:
    return servers[0].url


@pytest.fixture(scope="session")
def embedder_url(servers: tuple[DemoServer, DemoServer]) -> str:
    return servers[1].url


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_site(
    chat_url: str, embedder_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    nodes = [{"name": "chat", "url": chat_url}, {"name": "embed", "url": embedder_url}]
    async with running_site(tmp_path_factory.mktemp("site"), nodes, SETTINGS) as site:
        yield site


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def unrepaired(
    chat_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    """A gateway over the chat server with all repairs switched off."""
    off = dict.fromkeys(RepairSettings.model_fields, False)
    folder = tmp_path_factory.mktemp("unrepaired")
    async with running_site(folder, [chat_url], {"repairs": off}) as site:
        yield site


@pytest_asyncio.fixture(loop_scope="session")
async def site(shared_site: Site) -> AsyncIterator[Site]:
    """The shared gateway; after the test all its counters must return to zero."""
    shared_site.records.clear()
    yield shared_site
    await shared_site.until_idle()


@pytest_asyncio.fixture(loop_scope="session")
async def openai(site: Site) -> AsyncIterator[AsyncOpenAI]:
    async with site.openai() as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def anthropic(site: Site) -> AsyncIterator[AsyncAnthropic]:
    async with site.anthropic() as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def chat_node(chat_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the chat server itself, without the gateway."""
    async with httpx.AsyncClient(
        base_url=chat_url, trust_env=False, verify=NO_TLS, timeout=60
    ) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def embed_node(embedder_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the embedding server itself."""
    async with httpx.AsyncClient(
        base_url=embedder_url, trust_env=False, verify=NO_TLS, timeout=60
    ) as client:
        yield client
