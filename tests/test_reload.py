"""Edits of the two files while the gateway starts and runs, and reloads that are requested."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.app.startup import Options, load_checked
from gateway.config.errors import ConfigError
from gateway.config.inventory import Inventory
from gateway.config.settings import Settings
from gateway.events import InventoryChanged, SettingsChanged
from tests import gateways
from tests.gateways import Running, running_gateway, until


def nodes(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "url": f"http://127.0.0.1:9/{name}"} for name in names]


@asynccontextmanager
async def started(folder: Path, *names: str) -> AsyncIterator[Running]:
    given, settings = nodes(*(names or ("first",))), {"queue": {"max": 5}}
    async with running_gateway(folder, given, settings, wait_ready=False) as running:
        yield running


async def test_files_that_are_edited_while_it_starts_are_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = nodes("first", "second")

    def load(options: Options) -> tuple[Settings, Inventory]:
        """Edit the files after they were read and before they are watched."""
        loaded = load_checked(options)
        assert options.settings_file is not None
        options.inventory_file.write_text(yaml.safe_dump({"nodes": edited}))
        options.settings_file.write_text("queue: {max: 7}")
        return loaded

    monkeypatch.setattr(gateways, "load_checked", load)
    async with started(tmp_path) as running:
        fleet = running.gateway.fleet
        await until(lambda: set(fleet.nodes) == {"first", "second"})
        await until(lambda: running.gateway.settings.queue.max == 7)
    edited = nodes("first", "first")
    async with started(tmp_path, "first", "second") as running:
        await until(lambda: running.gateway.config_files.inventory_error is not None)
        assert set(running.gateway.fleet.nodes) == {"first", "second"}


async def test_without_an_edit_nothing_is_reloaded(tmp_path: Path) -> None:
    changes: list[object] = []
    async with started(tmp_path) as running:
        running.gateway.bus.subscribe(InventoryChanged, changes.append)
        running.gateway.bus.subscribe(SettingsChanged, changes.append)
        running.write_settings({"queue": {"max": 9}})
        await until(lambda: running.gateway.settings.queue.max == 9)
    assert [type(change) for change in changes] == [SettingsChanged]


async def test_a_requested_reload_reports_the_problems_of_both_files(tmp_path: Path) -> None:
    async with started(tmp_path) as running:
        running.nodes_file.write_text("nodes: 3\n")
        running.write_settings({"queue": {"max": "many"}})
        with pytest.raises(ConfigError) as caught:
            await running.gateway.reload()
    assert [problem.key for problem in caught.value.problems] == ["queue.max", "nodes"]


PINNED = {"models": {"m": {"pin": ["first", "second"]}}}
UNKNOWN = "no node of the inventory is named second"


async def test_settings_that_do_not_fit_the_nodes_are_reported_until_the_nodes_fit(
    tmp_path: Path,
) -> None:
    async with started(tmp_path) as running:
        gateway = running.gateway

        def told() -> tuple[str, str]:
            files = gateway.config_files
            return files.settings_error or "", files.inventory_error or ""

        running.write_settings(PINNED)
        await until(lambda: UNKNOWN in told()[0])
        assert gateway.settings.queue.max == 5
        # They do not keep nodes from being added.
        running.write_nodes(nodes("first", "third"))
        await until(lambda: set(gateway.fleet.nodes) == {"first", "third"})
        assert (told()[0] != "", told()[1]) == (True, "")
        running.write_nodes(nodes("first", "second"))
        await until(lambda: "m" in gateway.settings.models)
        await until(lambda: set(gateway.fleet.nodes) == {"first", "second"})
        assert told() == ("", "")
        # A node that a model is pinned to stays until the pin is gone.
        running.write_nodes(nodes("first"))
        await until(lambda: UNKNOWN in told()[1])
        assert "gateway.yaml:7: models.m.pin[1]" in told()[1]
        assert set(gateway.fleet.nodes) == {"first", "second"}
        running.write_settings({"models": {"m": {"pin": "first"}}})
        await until(lambda: set(gateway.fleet.nodes) == {"first"})
        assert told() == ("", "")


async def test_a_requested_reload_takes_both_files_that_fit_each_other(tmp_path: Path) -> None:
    async with started(tmp_path) as running:
        running.write_settings(PINNED)
        running.write_nodes(nodes("second", "first"))
        result = await running.gateway.reload()
        assert result.inventory.added == ["second"]
        assert running.gateway.settings.models["m"].pin == ("first", "second")
