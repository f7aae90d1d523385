"""The pages of the settings and of one node."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import FilePayload, Page, expect

from gateway.callers.keys import AdminRole, hash_key, new_key
from tests.admin.browser import confirm, needs_browser, opened_at, press
from tests.admin.test_dashboard import HOSTILE, a_fleet, opened
from tests.emulator import EmulatedNode
from tests.emulator.routed_model import HostMemory, ModelFile
from tests.emulator.router import EmulatedRouter
from tests.gateways import Running, answered, running_gateway, until
from tests.stored.batch_gateway import CALM, KEY, key, lines
from tests.web.test_route_tables import ADMIN
from tests.web.test_route_tables import ADMIN_KEYS as KEYS

pytestmark = [pytest.mark.slow, needs_browser]

SETTINGS: dict[str, Any] = {
    "admin": ADMIN,
    "queue": {"max": 7},
    "models": {HOSTILE: {"use": "emulated"}},
    "webhooks": {
        "targets": [{"url": "https://hooks.example.org/T0/secret-path",
                     "secret_env": "HOOK"}]
    },
}  # fmt: skip


async def written(running: Running, settings: dict[str, Any], versions: int) -> None:
    """Edit the settings, and wait until so many versions of them are kept."""
    running.write_settings(settings)
    history = running.gateway.config_files.histories["gateway"]
    await until(lambda: len(history.versions()) == versions)


async def test_an_edit_is_compared_rolled_back_once_confirmed_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    async with a_fleet(tmp_path, hosts="a", settings=SETTINGS) as (running, _):
        await written(running, {**SETTINGS, "queue": {"max": 9}}, 2)
        async with opened(running, AdminRole.ADMIN, at="settings") as page:
            value = page.locator("#values tr", has=page.get_by_text("queue.max", exact=True))
            await expect(value).to_contain_text("9")
            await expect(value).to_contain_text("gateway.yaml:")
            await page.locator("#values input[type=search]").fill("models.")
            # A name is a text, whatever it is.
            await expect(page.locator("#values")).to_contain_text("<img src=x onerror=alert(1)>")
            assert await page.locator("#values img").count() == 0
            rows = page.get_by_role("region", name="Versions of").first.locator("tbody tr")
            await expect(rows).to_have_count(2)
            await expect(rows.first).to_contain_text("in force, on the disk")
            await rows.last.get_by_role("link", name="Compare").click()
            shown = page.locator("#compared")
            await expect(shown).to_contain_text("-  max: 7")
            await expect(shown).to_contain_text("+  max: 9")
            body = await page.locator("body").inner_text()
            assert "secret-path" not in body
            await press(shown, "Roll back…")
            await page.get_by_role("dialog").get_by_role("button", name="Leave it").click()
            assert running.gateway.settings.queue.max == 9
            await press(shown, "Roll back…")
            await confirm(page, "Roll back to gateway-")
            await until(lambda: running.gateway.settings.queue.max == 7)
            await expect(shown).to_contain_text("the file is that version")
            await expect(page.locator("#reload")).to_contain_text("Both are valid")
            await expect(rows).to_have_count(3)


async def test_the_errors_of_a_reload_are_listed_one_by_one(tmp_path: Path) -> None:
    async with a_fleet(tmp_path, hosts="a", settings={"admin": ADMIN}) as (running, _):
        key = KEYS[AdminRole.ADMIN].text
        async with opened_at(running.admin_url, key=key, at="settings") as watched:
            page = watched.page
            await expect(page.locator("#values")).to_be_visible()
            running.write_settings({"admin": ADMIN, "queue": {"max": "many"}, "retrise": {}})
            running.write_nodes([{"name": "a", "url": "ftp://x"}])
            await press(page, "Read both again")
            faults = page.locator("#reload li")
            await expect(faults).to_have_count(3)
            await expect(faults.nth(0)).to_contain_text("queue.max")
            await expect(faults.nth(1)).to_contain_text("did you mean retries?")
            await expect(faults.nth(2)).to_contain_text("nodes[0].url")
            assert [one for one in watched.trouble if "status of 422" not in one] == []
        # Whoever comes later sees them too, if it is an admin.
        async with opened(running, AdminRole.ADMIN, at="settings") as page:
            await expect(page.locator("#reload li")).to_have_count(3)
        key = KEYS[AdminRole.OPERATOR].text
        async with opened_at(running.admin_url, key=key, at="settings") as watched:
            await expect(watched.page.locator("#page")).to_contain_text("the key of an admin")


def a_day(running: Running, name: str) -> None:
    """Let the gateway have seen a node at work for a day, but for an hour."""
    history, node = running.gateway.live.view.node_history, running.gateway.fleet.nodes[name]
    now = time.time()
    for minutes in (*range(24 * 60, 180, -5), *range(120, 0, -5)):
        history.read(name, now - 60 * minutes, minutes // 5 % 3, 2, node.speed)


HOSTILE_NAME = "<img src=x onerror=alert(1)>'\"</script>/x"
GIB = 1 << 30


def a_router(files: Mapping[str, ModelFile]) -> EmulatedRouter:
    return EmulatedRouter(files, models_max=0, memory=HostMemory(64 * GIB), slots=2, decode_tps=20)


def sizes(files: Mapping[str, ModelFile]) -> dict[str, Any]:
    """What the settings say of these files."""
    return {name: {"memory": f"{file.memory}"} for name, file in files.items()}


async def order(running: Running, verb: str, model: str, node: str = "r1") -> None:
    body = {"order": verb, "model": model, "node": node}
    await answered(running.admin, "/admin/placements", "POST", json=body)


async def test_the_memory_of_a_host_fills_with_models_whatever_their_names(tmp_path: Path) -> None:
    name, files = (
        f"r1/{HOSTILE_NAME}",
        {
            "small": ModelFile(memory=2 * GIB),
            HOSTILE_NAME: ModelFile(memory=4 * GIB, load_seconds=2.0),
            "large": ModelFile(memory=9 * GIB, load_seconds=60.0),
        },
    )
    async with a_router(files) as router:
        spec = {"name": "r1", "url": router.url, "host": "big", "memory": "16GiB"}
        chosen = {"models": sizes(files)}
        async with (
            running_gateway(tmp_path, [spec], chosen, wait_ready=False) as running,
            opened(running, at="models") as page,
        ):
            nodes, picture = running.gateway.fleet.nodes, page.locator("#models")
            await expect(picture).to_contain_text("big 0 MiB of 16.0 GiB taken")
            await order(running, "pin", "small")
            await order(running, "load", HOSTILE_NAME)
            row = picture.locator("li[data-model]").filter(has_text=name)
            await expect(row).to_contain_text("ready, 4.0 GiB, 0 of 2 slots busy")
            small = "r1/small ready, 2.0 GiB, 0 of 2 slots busy, pinned"
            await expect(picture).to_contain_text(small)
            await expect(picture).to_contain_text("big 6.0 GiB of 16.0 GiB taken")
            bars = await picture.locator("rect.filled").all()
            assert [await bar.get_attribute("width") for bar in bars] == ["248", "123"]
            # One that is being loaded tells how far it is.
            await order(running, "load", "large")
            loading = picture.locator("li[data-model]").filter(has_text="r1/large")
            await expect(loading).to_contain_text(re.compile(r"loading, \d+ %, 9.0 GiB"))
            await row.get_by_role("link").click()
            shown = page.locator("#node")
            await press(shown, "Drain")
            await confirm(page, HOSTILE_NAME)
            await expect(shown.locator(".state")).to_contain_text("draining")
            assert nodes[name].draining
            assert await page.locator("#page img, #page script").count() == 0


HOSTILE_KEY = "<img src=x onerror=alert(1)>\u202e"


async def test_a_batch_is_uploaded_followed_paused_cancelled_and_downloaded(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=4, answer_tokens=20)
    content = "".join(json.dumps(one) + "\n" for one in [*lines(40), {"custom_id": HOSTILE_KEY}])
    async with (
        running_gateway(tmp_path, [node], {"keys": [key(name=HOSTILE_KEY)], **CALM}) as running,
        opened_at(running.admin_url, at="batches") as watched,
    ):
        page = watched.page
        await page.get_by_text("Upload a batch").click()
        file: FilePayload = {"name": "in.jsonl", "mimeType": "", "buffer": content.encode()}
        await page.get_by_label("File").set_input_files(file)
        for name in ("nobody", "k1"):
            await page.get_by_label("For the key").fill(name)
            await page.get_by_role("button", name="Upload", exact=True).click()
            if name == "nobody":
                alert = page.get_by_role("alert")
                await expect(alert).to_contain_text("There is no key 'nobody'")

        batch = page.locator("#batch")
        await expect(batch).to_contain_text(" of 41 lines")
        await expect(batch).to_contain_text("<img src=x onerror=alert(1)>\ufffd")
        await expect(batch.locator("dd", has_text="before the deadline")).to_be_visible()
        await press(batch, "Pause")
        await expect(batch).to_contain_text("It waits: paused")
        await press(batch, "Resume")
        await expect(batch).not_to_contain_text("It waits: paused")

        # The list leads back to it, by a filter that the address has.
        await page.get_by_role("link", name="All batches").click()
        await expect(page.locator("#batches tbody tr")).to_have_count(1)
        await page.get_by_label("Show").select_option("ended")
        await expect(page.locator("#batches")).to_contain_text("There are no such batches")
        assert page.url.endswith("#/batches?state=ended")
        await page.get_by_label("Show").select_option("")
        await page.locator("#batches tbody a").click()

        await press(batch, "Cancel")
        await confirm(page, "will never run")
        await expect(batch).to_contain_text("batch_cancelled")
        async with page.expect_download() as saved:
            await press(batch, "Download errors")
        found = await asyncio.to_thread((await (await saved.value).path()).read_text)
        assert any(json.loads(one)["custom_id"] == "line-39" for one in found.splitlines())
        assert KEY not in await page.content()
        # Of the key that there is not.
        assert [one.partition(" of ")[2] for one in watched.trouble] == ["404 (Not Found)"]


OWN = {"id": "owner", "sha256": new_key("owner").sha256, "name": "Owner", "limits": {"rpm": 10}}
KEYED: dict[str, Any] = {"admin": ADMIN, "keys": [OWN]}


async def status_with(running: Running, key: str) -> int:
    return (await running.chat(key, max_tokens=8)).status_code


async def secret_of(page: Page) -> str:
    key = await page.locator(".secret code").inner_text()
    await press(page, "I have it")
    await expect(page.locator(".secret")).to_have_count(0)
    return key


async def test_a_key_is_made_limited_rotated_and_revoked_and_its_secret_goes_with_the_page(
    tmp_path: Path,
) -> None:
    admin = KEYS[AdminRole.ADMIN].text
    async with (
        running_gateway(tmp_path, [EmulatedNode()], KEYED) as running,
        opened_at(running.admin_url, key=admin, at="keys") as watched,
    ):
        page = watched.page
        await expect(page.locator("#keys tbody tr")).to_have_count(1)
        await press(page, "Make a key")
        form = page.get_by_role("form", name="A new key")
        await expect(form.get_by_label("Name", exact=True)).to_be_focused()
        await form.get_by_label("Name", exact=True).fill("alice")
        await form.get_by_label("Requests a minute").fill("20")
        await page.keyboard.press("Enter")
        made = await secret_of(page)
        assert await status_with(running, made) == 200
        await page.get_by_role("link", name="alice").click()
        await expect(page).to_have_url(re.compile(r"#/keys/alice$"))
        own = page.locator("#key")
        await expect(own).to_contain_text("1 of 20 used, 19 left")
        # The secret is nowhere any more.
        assert hash_key(made).id in await page.content()
        assert made not in await page.content()

        await press(own, "Change")
        form = page.get_by_role("form", name="Change alice")
        await expect(form.get_by_label("Requests a minute")).to_have_value("20")
        await form.get_by_label("Requests a minute").fill("30")
        await form.get_by_label("Money").fill("2/day")
        await form.get_by_label("Highest class").select_option("premium")
        await press(form, "Change it")
        await expect(own).to_contain_text("of 30 used")
        await expect(own).to_contain_text("at most premium")
        await expect(own.get_by_role("meter", name="Money a day")).to_be_visible()

        await press(own, "Rotate")
        await press(page, "Rotate it")
        fresh = await secret_of(page)
        await expect(own).to_contain_text("Old secret")
        assert (await status_with(running, made), await status_with(running, fresh)) == (200, 200)

        await press(own, "Revoke")
        await press(page, "Leave it")
        await expect(own.get_by_role("button", name="Revoke")).to_be_focused()
        assert await status_with(running, fresh) == 200
        await press(own, "Revoke")
        await press(page, "Revoke it")
        await expect(own.get_by_role("heading", name="alice")).to_contain_text("revoked")
        await expect(own.get_by_role("button", name="Revoke")).to_have_count(0)
        assert await status_with(running, fresh) == 401

        await page.locator("#rail").get_by_role("link", name="Keys").click()
        await press(page, "Make a key")
        form = page.get_by_role("form", name="A new key")
        await form.get_by_label("Name", exact=True).fill("Owner")
        await press(form, "Make it")
        await expect(page.locator("#toasts")).to_contain_text("called 'Owner' already")
        await form.get_by_label("Name", exact=True).fill("bob")
        await press(form, "Make it")
        key = await page.locator(".secret code").inner_text()
        assert await status_with(running, key) == 200
        await page.locator("#rail").get_by_role("link", name="Overview").click()
        await page.go_back()
        await expect(page.get_by_role("link", name="bob")).to_be_visible()
        assert key not in await page.content()
        # A key of the settings is changed there.
        await page.get_by_role("link", name="Owner").click()
        await expect(page.locator("#key")).to_contain_text("It stands in the settings")
        await expect(page.get_by_role("button", name="Revoke")).to_have_count(0)
        # The browser, too, tells of a form that was refused.
        assert [one for one in watched.trouble if "status of 400" not in one] == []
