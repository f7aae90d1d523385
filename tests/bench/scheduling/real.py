"""The same with two real llama.cpp servers and the larger demo model.

What counts is the share of prompt tokens that the servers had in their caches. The servers
compute, so the fronts are measured one after the other, each with servers started anew, and the
times are those of this machine. A small trace of its own: three tenants, six sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from tests.bench.report import number
from tests.bench.scheduling.fronts import FRONTS, Front
from tests.bench.scheduling.play import Answer, Player
from tests.bench.scheduling.report import FIGURES, Figure, Outcome, Played, Results, brief, figures
from tests.bench.scheduling.trace import Shape, Turn, make
from tests.bench.targets import running
from tests.servers import demo_servers

USUAL = ("gateway", "nginx")
MARKS = ("<!-- bench-scheduling-real: begin -->", "<!-- bench-scheduling-real: end -->")
SERVERS = 2
SLOTS = 2
CONTEXT = 4096
SHAPE = Shape(sessions=6, turns=3, tenants=3, system_tokens=600)
RATE = 0.25  # sessions a second
LIMIT = 240.0  # seconds a request may take
LOAD = "two real servers"


def measure(
    fronts: Sequence[Front],
    seeds: int,
    folder: Path,
    progress: Console,
    command: str,
    facts: dict[str, str],
) -> Outcome:
    """Play the trace against each front, another one first for each seed."""
    played = []
    for seed in range(1, seeds + 1):
        turn = seed % len(fronts)
        for front in (*fronts[turn:], *fronts[:turn]):
            one = _played(front, seed, folder)
            share = FIGURES[-1].of([one.records])
            progress.print(f"seed {seed}, {front.name}: {share:.0%} of the prompts cached")
            played.append(one)
    results = Results(played)
    tables = _tables(results, [front.name for front in fronts])
    return brief(played, tables, seeds, command, facts, MARKS)


def _played(front: Front, seed: int, folder: Path) -> Played:
    own = folder / f"{front.name}-real-{seed}"
    own.mkdir()
    with demo_servers(SERVERS, slots=SLOTS, context=CONTEXT, size="medium") as urls:
        ports = tuple(urlsplit(url).port or 0 for url in urls)
        return asyncio.run(_asked(front, seed, own, ports))


async def _asked(front: Front, seed: int, folder: Path, ports: tuple[int, ...]) -> Played:
    trace = make(f"real {seed}", RATE, SHAPE)
    async with running(front.target, folder, ports, 0) as proxy:
        player = Player(proxy.address, 1.0, known=True, check=_as_asked, limit=LIMIT)
        return Played(front.name, LOAD, seed, await player.play(trace))


def _as_asked(messages: list[dict[str, Any]], turn: Turn, answer: Answer) -> str:
    """Check the length alone: with half-precision weights the text may depend on the cache."""
    if answer.completion_tokens != turn.answer_tokens or not answer.text:
        return f"{answer.completion_tokens} tokens, not {turn.answer_tokens}"
    return ""


def _tables(results: Results, fronts: Sequence[str]) -> str:
    def cell(front: str, figure: Figure) -> str:
        value = results.value(front, LOAD, figure)
        if value is None:
            return "-"
        return f"{value:.0%}" if figure.name == "cached" and value else number(value)

    titles = {front: FRONTS[front].title for front in fronts}
    parts = [figures(LOAD, titles, cell)]
    parts += [
        f"{one.front}, seed {one.seed}: {len(one.problems)} failed, the first: {one.problems[0]}"
        for one in results.played
        if one.problems
    ]
    return "\n\n".join(parts) + "\n"
