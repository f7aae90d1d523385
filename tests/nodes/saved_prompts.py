"""A gateway over real routers that hold one model at a time and save prompts before an unload.

    TESTS_LLAMA_SERVER=PROGRAM python -m tests.nodes.saved_prompts [--words N] [--times N]

tells the seconds until the first token of a long prompt after its model was unloaded and loaded
again, with `slot_save` and without: for the medium demo model, on two routers of three models.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gateway.events import PromptsKept
from gateway.local.demo_model import DemoSize
from tests.gateways import Running, running_gateway
from tests.servers import DemoServer, demo_model, running_router

EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
WORDS = ("river", "stone", "light", "wheat", "garden", "winter", "letter", "bridge", "house")


def prompt(seed: int, words: int = 700) -> str:
    """A prompt of so many words."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@dataclass(slots=True)
class SavingModels:
    """The gateway, and what it told of saved prompts."""

    running: Running
    _told: list[PromptsKept] = field(default_factory=list)

    @property
    def told(self) -> list[tuple[str, str, int]]:
        """Node, action and prompts, of each event since the last time."""
        self.running.gateway.bus.flush()
        told = [(one.node, one.action, one.prompts) for one in self._told]
        self._told.clear()
        return told

    async def ask(self, model: str, text: str, tokens: int = 24) -> tuple[str, int]:
        """An answer, and the tokens of the prompt that were cached."""
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        reply = await self.running.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], cached

    def is_loaded(self, model: str) -> bool:
        """Whether a router has this model."""
        nodes = self.running.gateway.fleet.nodes.values()
        return any(node.load.loaded for node in nodes if node.load and model in node.public_models)


@asynccontextmanager
async def saving_models(
    folder: Path, urls: Iterable[str], *, slot_save: bool = True
) -> AsyncIterator[SavingModels]:
    """A gateway over these routers, `r1` and so on."""
    specs = [
        {"name": f"r{number}", "url": url, "host": f"r{number}", "slot_save": slot_save}
        for number, url in enumerate(urls, 1)
    ]
    async with running_gateway(folder, specs, {"model_placement": {"hysteresis": 0}}) as running:
        found = SavingModels(running)
        running.gateway.bus.subscribe(PromptsKept, found._told.append)
        yield found
    log = (folder / "gateway.log").read_text()
    assert "Traceback" not in log, log


@asynccontextmanager
async def saving_routers(
    folder: Path,
    count: int = 1,
    models: str = "ab",
    size: DemoSize = "small",
    extra: tuple[str, ...] = EXACT,
) -> AsyncIterator[list[DemoServer]]:
    """Real routers of these models, each with a folder for what is saved."""
    (folder / "models").mkdir()
    for name in models:
        (folder / "models" / f"{name}.gguf").write_bytes(demo_model(size).read_bytes())
    async with AsyncExitStack() as stack:
        routers = []
        for number in range(1, count + 1):
            saved = folder / f"saved{number}"
            saved.mkdir()
            options = ("--models-max", "1", "--slot-save-path", f"{saved}/", *extra)
            router = running_router(folder / "models", slots=2, context=4096, extra=options)
            routers.append(stack.enter_context(router))
        yield routers


async def measure(words: int, times: int) -> None:
    """Print the seconds with and without."""
    for slot_save in (False, True):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            async with (
                saving_routers(folder, 2, "abc", "medium", extra=()) as routers,
                saving_models(folder, [one.url for one in routers], slot_save=slot_save) as models,
            ):
                await models.ask("a", prompt(0, words))
                for _ in range(times):
                    while models.is_loaded("a"):
                        await asyncio.gather(*(models.ask(one, "Hello.") for one in "bc"))
                    began = time.monotonic()
                    _, cached = await models.ask("a", prompt(0, words), 1)
                    seconds = time.monotonic() - began
                    print(f"slot_save {slot_save}: {seconds:.2f} s, {cached} tokens cached")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", type=int, default=1380)
    parser.add_argument("--times", type=int, default=5)
    chosen = parser.parse_args()
    asyncio.run(measure(chosen.words, chosen.times))
