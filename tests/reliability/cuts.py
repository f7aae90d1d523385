"""Cuts streams of real servers at random tokens: `python -m tests.reliability.cuts --streams 1000`.

Two servers of the F32 demo model with one slot each run behind proxies that cut a stream; the
client is OpenAI's own, unmodified. Each text is compared with the uninterrupted one, and if it
differs, with the bytes that were sent plus the second server's own continuation of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from gateway.api import sse
from gateway.events import StreamResumed
from tests.gateways import running_gateway
from tests.reliability.cutting_proxy import CutPlan, cutting_proxies
from tests.servers import start_demo_servers

WORDS = [
    *("tell", "me", "about", "the", "sea", "and", "stones", "in", "winter", "with", "songs", "of"),
    *("birds", "that", "fly", "far", "away", "over", "green", "hills"),
]
FRAGMENTS = ("a", "s", "ing", "er", "e", " s", " w", "t")
"""Texts that tokenize differently when they are read as a prompt."""
PATHS = ("/v1/chat/completions", "/v1/completions")
SETTINGS: dict[str, Any] = {
    "health": {"interval": 0.5, "timeout": 60, "failures": 1_000_000, "slow_start": 0.0},
    "timeouts": {"connect": 60, "silence": 120, "first_byte": 120},
    "retries": {"backoff": 0.0},
}


@dataclass(slots=True)
class Outcome:
    streams: int = 0
    identical: int = 0
    other_continuation: int = 0
    """Not identical, but the second server's own continuation of the bytes sent."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of all other results."""
    usage_equal: int = 0
    """Streams with the same usage as the uninterrupted run."""
    resumed: int = 0

    @property
    def line(self) -> str:
        return (
            f"{self.streams} streams cut, {self.resumed} resumed: {self.identical} identical, "
            f"{self.other_continuation} another continuation of the bytes sent, "
            f"{len(self.wrong)} wrong; usage adds up in {self.usage_equal}"
        )


@dataclass(slots=True)
class StreamCase:
    path: str
    body: dict[str, Any]
    after: int
    within: int


def random_stream(rng: random.Random, *, fragments: bool) -> StreamCase:
    """A random stream; `fragments`: its words tokenize differently when they are read again."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(3, 12)))
    tokens = rng.randint(20, 120)
    path = rng.choice(PATHS)
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": text}]} if path == PATHS[0] else {"prompt": text}
    )
    body = {"model": "demo", "temperature": 0, "max_tokens": tokens, **prompt}
    if fragments:
        body["logit_bias"] = [[fragment, 4.0] for fragment in FRAGMENTS]
    # The first event of a chat has the role.
    return StreamCase(path, body, rng.randint(2, tokens - 1), rng.choice((0, 0, 7, 90)))


async def run_cuts(
    streams: int,
    seed: int,
    resume: str,
    *,
    fragments: bool = False,
    progress: bool = False,
    rounding: bool = False,
) -> Outcome:
    """Cut so many streams; `rounding`: of servers whose prefill rounds differently than decode."""
    rng = random.Random(seed)
    outcome = Outcome()
    plan = CutPlan()
    async with (
        start_demo_servers(2, slots=1, extra=() if rounding else ("--exact",)) as urls,
        cutting_proxies(urls, plan) as proxies,
        httpx.AsyncClient(base_url=urls[0], timeout=300, trust_env=False) as server,
    ):
        with tempfile.TemporaryDirectory() as folder:
            async with running_gateway(
                Path(folder), proxies, {**SETTINGS, "resume": resume}
            ) as running:
                running.gateway.bus.subscribe(StreamResumed, lambda event: _count(outcome, event))
                client = AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
                async with client:
                    for number in range(streams):
                        case = random_stream(rng, fragments=fragments)
                        await cut_one(case, plan, client, server, outcome)
                        if progress and number % 100 == 99:
                            print(outcome.line, flush=True)
                running.gateway.bus.flush()
    return outcome


def _count(outcome: Outcome, event: StreamResumed) -> None:
    outcome.resumed += event.resumed_on is not None


async def cut_one(
    case: StreamCase,
    plan: CutPlan,
    client: AsyncOpenAI,
    server: httpx.AsyncClient,
    outcome: Outcome,
) -> None:
    """Get one answer uninterrupted from the server itself, then as a cut stream via the gateway."""
    whole, count = await direct(server, case.path, case.body)
    plan.arm(case.after, case.within)
    try:
        text, usage, ids, reason = await via_gateway(client, case)
    except Exception as error:  # noqa: BLE001 - any error of the client is a failure
        outcome.streams += 1
        outcome.wrong.append(f"{case.path}: {type(error).__name__}: {error}")
        return
    if plan.after is not None:
        plan.after = None
        return  # it ended before its cut
    outcome.streams += 1
    sent, tokens = text_and_tokens(plan.passed)
    if len(ids) != 1:
        outcome.wrong.append(f"{case.path}: {len(ids)} ids in one stream")
    elif text == whole:
        outcome.identical += 1
    elif text == sent + await continuation(server, case, sent, tokens):
        outcome.other_continuation += 1
    else:
        outcome.wrong.append(f"{case.path}: {text!r} is not {whole!r}, sent {sent!r}")
    outcome.usage_equal += usage == count
    if reason not in {"length", "stop"}:
        outcome.wrong.append(f"{case.path}: ended by {reason}")


async def via_gateway(
    client: AsyncOpenAI, case: StreamCase
) -> tuple[str, int | None, set[str], str | None]:
    text, ids, usage, reason = "", set(), None, None
    body = dict(case.body)
    extra = {"logit_bias": body.pop("logit_bias")} if "logit_bias" in body else {}
    create: Any = client.chat.completions.create
    if case.path == PATHS[1]:
        create = client.completions.create
    stream = await create(
        **body, stream=True, stream_options={"include_usage": True}, extra_body=extra
    )
    async for chunk in stream:
        ids.add(chunk.id)
        for choice in chunk.choices:
            text += (choice.delta.content if case.path == PATHS[0] else choice.text) or ""
            reason = choice.finish_reason or reason
        if chunk.usage is not None:
            usage = chunk.usage.completion_tokens
    return text, usage, ids, reason


async def direct(
    server: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[str, int | None]:
    reply = await server.post(path, json=body)
    reply.raise_for_status()
    value = reply.json()
    choice = value["choices"][0]
    text = choice["message"]["content"] if path == PATHS[0] else choice["text"]
    return text, value["usage"]["completion_tokens"]


async def continuation(server: httpx.AsyncClient, case: StreamCase, sent: str, tokens: int) -> str:
    """The server's own continuation of the text that was sent, which had `tokens` tokens."""
    body = dict(case.body, max_tokens=case.body["max_tokens"] - tokens)
    if case.path == PATHS[1]:
        return (await direct(server, case.path, dict(body, prompt=body["prompt"] + sent)))[0]
    body["messages"] = [*body["messages"], {"role": "assistant", "content": sent}]
    return (await direct(server, case.path, body))[0].removeprefix(sent)


def text_and_tokens(stream: bytes) -> tuple[str, int]:
    """The text and its number of tokens in a cut response, given with head and chunk framing."""
    _, _, body = stream.partition(b"\r\n\r\n")
    plain = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        try:
            length = int(size, 16)
        except ValueError:
            break
        plain, body = plain + body[:length], body[length + 2 :]
    whole = plain[: plain.rfind(b"\n\n") + 2]
    texts = []
    for event in sse.split(whole):
        data = sse.payload(event)
        if data and data != b"[DONE]":
            for choice in json.loads(data)["choices"]:
                delta = choice.get("delta") or {}
                texts.append(delta.get("content") or choice.get("text") or "")
    return "".join(texts), sum(bool(text) for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", choices=("text", "exact"), default="text")
    parser.add_argument("--fragments", action="store_true", help="answers of word fragments")
    parser.add_argument("--rounding", action="store_true", help="servers with flash attention")
    options = parser.parse_args()
    began = time.monotonic()
    outcome = asyncio.run(
        run_cuts(
            options.streams,
            options.seed,
            options.resume,
            fragments=options.fragments,
            progress=True,
            rounding=options.rounding,
        )
    )
    print(*outcome.wrong[:20], sep="\n")
    print(f"resume: {options.resume}, seed {options.seed}: {outcome.line}")
    print(f"{time.monotonic() - began:.0f} s")
    raise SystemExit(bool(outcome.wrong))


if __name__ == "__main__":
    main()
