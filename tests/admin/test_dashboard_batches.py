"""The page Batches and a batch's own page."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import FilePayload, expect

from tests.admin.browser import confirm, needs_browser, opened_at
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.stored.batch_gateway import CALM, KEY, key, lines

pytestmark = [pytest.mark.slow, needs_browser]

HOSTILE = "<img src=x onerror=alert(1)>\u202e"


async def text_of(download: Any) -> str:
    """What the page has saved."""
    path = await (await download.value).path()
    return await asyncio.to_thread(path.read_text)


async def test_a_batch_is_uploaded_followed_paused_cancelled_and_downloaded(
    tmp_path: Path,
) -> None:
    node = EmulatedNode(slots=1, decode_tps=4, answer_tokens=20)
    content = "".join(json.dumps(one) + "\n" for one in [*lines(40), {"custom_id": HOSTILE}])
    async with (
        running_gateway(tmp_path, [node], {"keys": [key(name=HOSTILE)], **CALM}) as running,
        opened_at(running.admin_url, at="batches") as watched,
    ):
        page = watched.page
        await expect(page.locator("#batches")).to_contain_text("There are no such batches")
        await page.get_by_text("Upload a batch").click()
        async with page.expect_download() as template:
            await page.get_by_role("button", name="Download a template").click()
        sample = json.loads((await text_of(template)).splitlines()[0])
        assert (sample["url"], sample["body"]["model"]) == ("/v1/chat/completions", node.model)
        file: FilePayload = {"name": "in.jsonl", "mimeType": "", "buffer": content.encode()}
        await page.get_by_label("File").set_input_files(file)
        await page.get_by_label("For the key").fill("nobody")
        await page.get_by_role("button", name="Upload", exact=True).click()
        await expect(page.get_by_role("alert")).to_contain_text("There is no key 'nobody'")
        await page.get_by_label("For the key").fill("k1")
        await page.get_by_role("button", name="Upload", exact=True).click()

        batch = page.locator("#batch")
        await expect(batch).to_contain_text(" of 41 lines")
        await expect(batch).to_contain_text("<img src=x onerror=alert(1)>\ufffd")
        await expect(batch.get_by_role("region", name="Table of errors")).to_contain_text("1")
        await expect(batch.locator("dd", has_text="before the deadline")).to_be_visible()
        await batch.get_by_role("button", name="Pause").click()
        await expect(batch).to_contain_text("It waits: paused")
        await batch.get_by_role("button", name="Resume").click()
        await expect(batch).not_to_contain_text("It waits: paused")

        # The list leads back to it, by a filter that the address has.
        await page.get_by_role("link", name="All batches").click()
        await expect(page.locator("#batches tbody tr")).to_have_count(1)
        await page.get_by_label("Show").select_option("ended")
        await expect(page.locator("#batches")).to_contain_text("There are no such batches")
        assert page.url.endswith("#/batches?state=ended")
        await page.get_by_label("Show").select_option("")
        await page.locator("#batches tbody a").click()

        await batch.get_by_role("button", name="Cancel").click()
        await confirm(page, "will never run")
        await expect(batch).to_contain_text("batch_cancelled")
        async with page.expect_download() as saved:
            await batch.get_by_role("button", name="Download errors").click()
        found = (await text_of(saved)).splitlines()
        assert any(json.loads(one)["custom_id"] == "line-39" for one in found)
        assert KEY not in await page.content()
        # Of the key that there is not.
        assert [one.partition(" of ")[2] for one in watched.trouble] == ["404 (Not Found)"]
