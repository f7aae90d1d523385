"""A caller's own page in a real browser: what it shows, to whom, and what it keeps to itself."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.async_api import Page, expect

from gateway.callers.keys import new_key
from tests.admin.browser import WatchedPage, needs_browser, open_with, opened_at
from tests.callers.metered_gateway import recorded
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

pytestmark = [pytest.mark.slow, needs_browser]

ALICE, OTHER = new_key("alice"), new_key("other")
LIMITS = {"rpm": 100, "tokens_per_day": 2000, "budget": "5/month"}
SETTINGS: dict[str, Any] = {
    "listen": {"caller_page": True},
    "keys": [
        {"id": "alice", "sha256": ALICE.sha256, "name": "Alice", "group": "team", "limits": LIMITS},
        {"id": "other", "sha256": OTHER.sha256},
    ],
    "groups": {"team": {"limits": {"concurrency": 4}}},
}  # fmt: skip
GUIDE = (Path(__file__).parents[2] / "docs/clients.md").read_text()


@contextlib.asynccontextmanager
async def a_gateway(folder: Path) -> AsyncIterator[Running]:
    """A gateway over a node with a price, of which Alice has had three chats and somebody one."""
    async with EmulatedNode(model="mistral-7b", answer_tokens=8) as node:
        spec = {"name": "node-0", "url": node.url, "cost_per_hour": 3.0}
        async with running_gateway(folder, [spec], SETTINGS) as running:
            for number, key in enumerate((ALICE, ALICE, ALICE, OTHER)):
                words = [{"role": "user", "content": "words-nobody-knows"}]
                await running.chat(key, {"x-request-id": f"mine-{number}"}, messages=words)
            await recorded(running, 4)
            yield running


@contextlib.asynccontextmanager
async def own_page(running: Running, key: str | None, **context: Any) -> AsyncIterator[WatchedPage]:
    """The page, opened with this key; nothing of it may go wrong."""
    async with opened_at(running.url, path="/me", **context) as own:
        if key is not None:
            await open_with(own.page, key, "API key")
        yield own
        assert own.trouble == []


async def test_a_caller_sees_its_use_its_limits_and_its_requests(tmp_path: Path) -> None:
    async with a_gateway(tmp_path) as running, own_page(running, ALICE.text) as watched:
        page = watched.page
        await expect(page.locator("#requests tbody tr")).to_have_count(3)
        await expect(page.locator("#use")).to_contain_text("3 requests")
        await expect(page.locator("#use")).to_contain_text("cost")
        await expect(page.locator("#use svg.columns")).to_have_count(2)
        await expect(page.locator("#use tbody")).to_contain_text("mistral-7b")
        limits = page.locator("#limits")
        await expect(limits).to_contain_text("3 of 100 used, 97 left")
        await expect(limits.get_by_role("meter")).to_have_count(4)
        # Where it ran and what was asked is told to nobody, and no request of another.
        text = await page.content()
        assert not [word for word in ("node-0", "words-nobody-knows", "mine-3") if word in text]
        # The key is in no address and in no store, and goes with the page.
        assert ALICE.text not in text + page.url
        stored = "[localStorage.length, sessionStorage.length, document.cookie]"
        assert await page.evaluate(stored) == [0, 0, ""]
        assert await page.context.cookies() == []
        await page.get_by_role("button", name="Forget the key").click()
        await expect(page.get_by_label("API key")).to_be_focused()
        assert "mine-1" not in await page.content()


async def test_a_wrong_key_is_refused_and_a_revoked_one_shows_nothing_more(tmp_path: Path) -> None:
    async with a_gateway(tmp_path) as running, own_page(running, "lg_alice_wrong") as watched:
        page = watched.page
        await expect(page.get_by_role("alert")).to_have_text("This key is not valid.")
        await open_with(page, OTHER.text, "API key")
        await expect(page.locator("#requests tbody tr")).to_have_count(1)
        keys = [key for key in SETTINGS["keys"] if key["id"] != "other"]
        running.write_settings(SETTINGS | {"keys": keys})
        await until(lambda: len(running.gateway.settings.keys) == 1)
        await page.get_by_role("button", name="Refresh").click()
        await expect(page.get_by_role("alert")).to_have_text("This key is not valid.")
        assert "mine-3" not in await page.content()
        await open_with(page, ALICE.text, "API key")
        await expect(page.locator("#requests tbody tr")).to_have_count(3)


async def test_settings_of_clients_are_the_guides_and_have_the_key_only_where_that_is_wished(
    tmp_path: Path,
) -> None:
    async with a_gateway(tmp_path) as running, own_page(running, ALICE.text) as watched:
        page = watched.page
        connect = page.locator("#connect")
        await expect(connect).to_contain_text(f"{running.url}/v1")
        snippet = connect.locator("pre")
        await expect(snippet).to_contain_text("Authorization: Bearer KEY")
        await expect(snippet).to_contain_text('"model":"mistral-7b"')
        await connect.get_by_label("with my key").check()
        await expect(snippet).to_contain_text(ALICE.text)
        await connect.get_by_label("Client").select_option("Claude Code")
        await expect(snippet).to_contain_text(f"ANTHROPIC_BASE_URL={running.url} ")
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await connect.get_by_role("button", name="Copy").click()
        await expect(page.get_by_role("status").first).to_contain_text("Copied.")
        copied = await page.evaluate("navigator.clipboard.readText()")
        assert copied == await snippet.inner_text()
        found = await snippets(page, "http://HOST:PORT", "KEY", "NAME")
        quoted = await snippets(page, "http://h", "k$(id)", "a'b$(id)")
    # They are those of the guide.
    blocks = dict(re.findall(r"```(toml|json|yaml)\n(.*?)```", agents(), re.DOTALL))
    assert tomllib.loads(found["Codex"]) == tomllib.loads(blocks["toml"])
    assert json.loads(found["opencode"]) == json.loads(blocks["json"])
    assert yaml.safe_load(found["Continue"]) == yaml.safe_load(blocks["yaml"])
    assert [f"$ {line}" for line in found["Claude Code"].splitlines()] == re.findall(
        r"```console\n(.*?)```", agents(), re.DOTALL
    )[0].splitlines()
    for name in ("qwen-code", "cline", "aider"):
        row = next(line for line in agents().splitlines() if line.startswith(f"| {name}"))
        told = re.findall(r"`([^`]+)`", row.split("|")[2])
        assert told, name
        assert [words for words in told if words not in found[name]] == [], name
    # Nothing of a name or a key is run by a shell.
    assert "'Authorization: Bearer k$(id)'" in quoted["curl"]
    assert "'a'\\''b$(id)'" in quoted["Claude Code"]


async def snippets(page: Page, *words: str) -> dict[str, str]:
    """What the page's module makes of an address, a key and a model, by client."""
    module = "import(new URL('me/connect.js', location.href))"
    made = await page.evaluate(f"(words) => {module}.then((m) => m.snippetsOf(...words))", words)
    return {name: text for name, _, text in made}


def agents() -> str:
    return GUIDE[GUIDE.index("## Coding agents") : GUIDE.index("### Evaluations")]
