"""No damage to the settings file of a running gateway admits callers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.callers.keys import new_key
from tests.emulator import EmulatedNode
from tests.gateways import Running, answered, running_gateway, until

KEY = new_key("team")
OTHER = new_key("other")


def keyed(*keys: Any, **settings: Any) -> dict[str, Any]:
    return {"keys": [{"id": key.id, "sha256": key.sha256} for key in keys], **settings}


async def doors(running: Running, key: str = "") -> set[int]:
    """The response of every path that needs a key."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    got = [await running.client.get(path, headers=headers) for path in ("/v1/models", "/props")]
    return {one.status_code for one in (*got, await running.chat(key, max_tokens=1))}


async def status(running: Running) -> Any:
    return await answered(running.admin, "/admin/status")


async def logged(folder: Path, words: str) -> None:
    await until(lambda: words in (folder / "gateway.log").read_text())


def half_written(file: Path) -> None:
    text = file.read_text()
    file.write_text(text[: text.index("sha256") + 10])


def replaced_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def linked_to_nowhere(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.with_name("nowhere"))


ACCIDENTS: dict[str, str | Callable[[Path], None]] = {
    "truncated": "",
    "comments": "# keys:\n#   - id: team\n",
    "null": "null\n",
    "zeros": "\0" * 200,
    "half a key": half_written,
    "a bad hash": yaml.safe_dump(keyed(KEY)).replace(KEY.sha256, "x"),
    "deleted": Path.unlink,
    "a folder": replaced_by_a_folder,
    "a dead link": linked_to_nowhere,
}


async def by_watching(running: Running) -> None:
    await until(lambda: running.gateway.config_files.settings_error is not None)


async def by_signal(running: Running) -> None:
    running.gateway.schedule_reload()
    await until(lambda: running.gateway.config_files.settings_error is not None)


async def by_request(running: Running) -> None:
    assert (await running.admin.post("/admin/reload")).status_code == 422


@pytest.mark.parametrize(
    ("accident", "reload"),
    [
        *((accident, by_watching) for accident in ACCIDENTS),
        ("truncated", by_signal),
        ("truncated", by_request),
    ],
)
async def test_damaged_settings_leave_the_old_ones_in_force(
    accident: str, reload: Callable[[Running], Awaitable[None]], tmp_path: Path
) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url], keyed(KEY)) as running:
        assert await doors(running) == {401}
        damage = ACCIDENTS[accident]
        if isinstance(damage, str):
            running.settings_file.write_text(damage)
        else:
            damage(running.settings_file)
        await reload(running)
        assert await doors(running) == {401}
        assert await doors(running, KEY.text) == {200}
        result = await status(running)
        assert str(running.settings_file) in result["settings_error"]
        assert result["keys_lost"] is None
        await logged(tmp_path, "settings are invalid")
        if running.settings_file.is_dir():
            running.settings_file.rmdir()
        running.write_settings(keyed(KEY, OTHER))
        await until(lambda: len(running.gateway.settings.keys) == 2)
        assert (await status(running))["settings_error"] is None


@pytest.mark.parametrize("without", [{}, {"allow_anonymous": True}])
async def test_without_the_last_key_nobody_is_admitted_until_there_is_one(
    without: dict[str, Any], tmp_path: Path
) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url], keyed(KEY)) as running:
        running.write_settings(without)
        await until(lambda: not running.gateway.settings.keys)
        for key in ("", KEY.text, "anything"):
            assert await doors(running, key) == {401}
        result = await status(running)
        assert result["settings_error"] is None
        assert "restart" in result["keys_lost"]
        await logged(tmp_path, "the last API key is gone")
        assert (await running.client.get("/health")).status_code == 200

        running.write_settings({"allow_anonymous": True, "queue": {"max": 7}})
        await until(lambda: running.gateway.settings.queue.max == 7)
        assert await doors(running) == {401}

        running.write_settings(keyed(OTHER))
        await until(lambda: bool(running.gateway.settings.keys))
        assert await doors(running) == {401}
        assert await doors(running, OTHER.text) == {200}
        assert (await status(running))["keys_lost"] is None


async def test_anonymous_callers_that_were_admitted_beside_keys_still_are(tmp_path: Path) -> None:
    beside = {"allow_anonymous": True}
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], keyed(KEY, **beside)) as running,
    ):
        assert await doors(running) == {200}
        running.write_settings(beside)
        await until(lambda: not running.gateway.settings.keys)
        assert await doors(running) == {200}
        running.write_settings({})
        await until(lambda: not running.gateway.settings.allow_anonymous)
        assert await doors(running) == {401}
