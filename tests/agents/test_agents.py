"""Coding agents, unmodified, through a gateway: a turn with a tool call, a cancel, a long wait.

Their turns are those of a real server. Its model is smaller still than the demo model, since a
first prompt is up to 20,000 of its tokens, ends its answers, and by its template calls a tool first
of all. What it calls and says means nothing. The wait and the cancel are the emulator's, whose
silence can be told to begin and to end.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.local.demo_model import CHAT_TEMPLATE, DemoShape, write_model
from gateway.local.plan import plan_local_fleet
from gateway.local.server import LocalFleet
from tests.agents.agents import AGENTS, CONTEXT, IDLE, MODEL, Agent, install, output_of, running
from tests.clients.site import Site, running_site
from tests.emulator import EmulatedNode
from tests.gateways import until
from tests.servers import server_binary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64",
        reason="the agents' programs are those for Linux on x86-64",
    ),
]

SHAPE = DemoShape(width=32, layers=1, heads=1, feed_forward=32, half_precision=False)
TOOL_FIRST = CHAT_TEMPLATE.replace(
    "{%- if tools and messages and messages[-1].role == 'user' %}",
    "{%- if tools and not (messages | selectattr('role', 'equalto', 'tool') | list) %}",
)
ENDS = {"<|im_end|>": -6.0}
WAIT = 20.0
SETTINGS: dict[str, Any] = {"heartbeat": IDLE / 3, "health": {"timeout": 30.0}}


@pytest.fixture(scope="module")
def modules(pytestconfig: pytest.Config) -> Path:
    """The agents, where npm and pip can fetch them; in the gate they must."""
    try:
        return install(pytestconfig)
    except AssertionError as failure:
        if os.environ.get("TESTS_UNDER_GATE") == "yes":
            raise
        pytest.skip(str(failure)[:300])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A gateway over a server as `up --context` starts it."""
    folder = tmp_path_factory.mktemp("agents")
    model = folder / f"{MODEL}.gguf"
    write_model(model, SHAPE, more_penalties=ENDS, chat_template=TOOL_FIRST)
    plan = plan_local_fleet(model, servers=1, slots=4, context=CONTEXT, cache=folder)
    async with (
        LocalFleet(plan.specs, folder, binary=server_binary(), base_port=0) as fleet,
        running_site(folder, fleet.inventory(), SETTINGS) as running_site_,
    ):
        yield running_site_


@pytest.mark.real
@pytest.mark.wheel_only("it is about the agents, and takes a minute")
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_an_agent_calls_a_tool_if_it_has_any_and_ends_its_turn(
    agent: Agent, modules: Path, tmp_path: Path, site: Site
) -> None:
    before = len(site.records)
    async with running(agent, modules, tmp_path, site.url) as process:
        printed = await output_of(agent, process, tmp_path)
    await site.until_idle()
    found = [one for one in site.records[before:] if one.path == agent.path]
    # A tool's result is another request.
    assert len(found) >= (2 if agent.calls_tools else 1), printed[-2000:]
    assert all(one.stream for one in found)
    # Codex leaves as soon as it has read the last event.
    assert {one.status for one in found} <= {200, 499}
    assert all(one.completion_tokens for one in found)
    assert printed.strip()


async def test_a_wait_of_twenty_seconds_and_a_cancel_lose_nothing(
    modules: Path, tmp_path: Path
) -> None:
    """The silence is longer than what Codex is told to bear: heartbeats count.

    No other agent gives a stream up so soon: Claude Code takes less than 300 s for 300 s.
    """
    (tmp_path / "wait").mkdir()
    (tmp_path / "cancel").mkdir()
    async with (
        EmulatedNode(slots=32, model=MODEL, context=1 << 20, answer_tokens=8) as node,
        running_site(tmp_path, [node.url], SETTINGS) as site,
        AsyncExitStack() as stack,
    ):
        node.faults.set("hang", after_events=0)
        waiting, leaving = [
            [
                await stack.enter_async_context(
                    running(agent, modules, tmp_path / folder, site.url)
                )
                for agent in AGENTS
            ]
            for folder in ("wait", "cancel")
        ]
        first = sum(agent.first_requests for agent in AGENTS)
        await until(lambda: node.busy >= 2 * first, limit=90.0)
        asked = node.requests
        assert {seen.path for seen in node.seen} == {agent.path for agent in AGENTS}
        for process in leaving:
            os.killpg(process.pid, signal.SIGINT)
        await until(lambda: node.busy == first, limit=30.0)
        await asyncio.sleep(WAIT)
        assert node.requests == asked, "nobody has asked again"
        node.faults.release()
        node.faults.clear()
        for agent, process in zip(AGENTS, waiting, strict=True):
            assert await output_of(agent, process, tmp_path / "wait")
        assert not [one for one in site.records if one.status not in {200, 499}]
