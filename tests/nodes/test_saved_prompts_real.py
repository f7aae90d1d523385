"""Saved prompts of a real router (`llama-server --models-dir DIR --slot-save-path DIR`)."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.events import PromptsKept
from tests.gateways import Running, running_gateway, until
from tests.servers import demo_model, running_router

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.binary_only("the wheel's server has no router mode"),
]
EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
WORDS = "river stone light wheat garden winter letter bridge".split()


def prompt(seed: int, words: int = 700) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of two models of the same file."""
    models = tmp_path / "models"
    models.mkdir()
    (tmp_path / "saved").mkdir()
    for name in "ab":
        (models / f"{name}.gguf").write_bytes(demo_model().read_bytes())
    return tmp_path


@dataclass(slots=True)
class Router:
    """A gateway over a router that holds one model at a time."""

    running: Running
    saved: Path  # the folder of the files
    _told: list[PromptsKept] = field(default_factory=list)

    @property
    def told(self) -> list[tuple[str, str, int]]:
        """What was told of saved prompts since the last time."""
        self.running.gateway.bus.flush()
        told = [(one.node, one.action, one.prompts) for one in self._told]
        self._told.clear()
        return told

    async def ask(self, model: str, text: str) -> tuple[str, int]:
        """An answer, and the tokens of the prompt that were cached."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 24,
            "temperature": 0,
        }
        reply = await self.running.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], cached


@asynccontextmanager
async def router(folder: Path, **node: Any) -> AsyncIterator[Router]:
    saved = folder / "saved"
    extra = ("--models-max", "1", "--slot-save-path", f"{saved}/", *EXACT)
    with running_router(folder / "models", slots=2, context=8192, extra=extra) as server:
        async with over(folder, server.url, **node) as found:
            yield found


@asynccontextmanager
async def over(folder: Path, url: str, **node: Any) -> AsyncIterator[Router]:
    spec = {"name": "r1", "url": url, "slot_save": True, **node}
    async with running_gateway(folder, [spec], {"model_placement": {"hysteresis": 0}}) as running:
        found = Router(running, folder / "saved")
        running.gateway.bus.subscribe(PromptsKept, found._told.append)
        yield found
    assert "Traceback" not in (folder / "gateway.log").read_text()


async def test_a_model_that_is_loaded_again_has_its_prompts(folder: Path) -> None:
    async with router(folder) as models:
        first = [await models.ask("a", prompt(n)) for n in (1, 2)]
        assert [cached for _, cached in first] == [0, 0]
        await models.ask("b", "short")
        print(models.told)
        for n in (1, 2):
            text, cached = await models.ask("a", prompt(n))
            print(n, cached, text == first[n - 1][0])
        print(models.told, os.listdir(models.saved))
        await models.ask("b", "short")
        print(models.told)
        for n in (1, 2):
            text, cached = await models.ask("a", prompt(n))
            print(n, cached, text == first[n - 1][0])
        print(models.told)
        print((folder/"gateway.log").read_text()[-3000:])
        assert 0
