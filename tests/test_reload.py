"""Edits of the two files while the gateway starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from gateway.app.assembly import Gateway
from gateway.app.startup import Options, load_checked
from gateway.config.errors import ConfigError
from gateway.events import InventoryChanged, SettingsChanged
from gateway.watch.logs import set_up_logging
from tests.gateways import until

DEAD = "http://127.0.0.1:9"


@pytest.fixture
def given(tmp_path: Path) -> Options:
    chosen = Options(
        inventory_file=tmp_path / "nodes.yaml",
        settings_file=tmp_path / "gateway.yaml",
        port=0,
        admin_port=0,
        state_dir=tmp_path / "state",
    )
    write_nodes(chosen, "first")
    write_settings(chosen, "queue: {max: 5}")
    return chosen


def write_nodes(given: Options, *names: str) -> None:
    nodes = [{"name": name, "url": f"{DEAD}/{name}"} for name in names]
    replace(given.inventory_file, yaml.safe_dump({"nodes": nodes}))


def write_settings(given: Options, text: str) -> None:
    assert given.settings_file is not None
    replace(given.settings_file, text)


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


@asynccontextmanager
async def started(given: Options, edit: Callable[[], None]) -> AsyncIterator[Gateway]:
    """A gateway whose files are edited after they were read and before it watches them."""
    settings, inventory = load_checked(given)
    edit()
    with (
        (given.inventory_file.parent / "log").open("ab") as log,
        set_up_logging("info", "json", fd=log.fileno()) as logs,
    ):
        gateway = Gateway(given, settings, logs)
        async with gateway.running(inventory):
            yield gateway


async def test_files_that_are_edited_while_it_starts_are_reloaded(given: Options) -> None:
    def edit() -> None:
        write_nodes(given, "first", "second")
        write_settings(given, "queue: {max: 7}")

    async with started(given, edit) as gateway:
        await until(lambda: set(gateway.fleet.nodes) == {"first", "second"})
        await until(lambda: gateway.settings.queue.max == 7)
    async with started(given, lambda: write_nodes(given, "first", "first")) as gateway:
        await until(lambda: gateway.config_files.inventory_error is not None)
        assert set(gateway.fleet.nodes) == {"first", "second"}


async def test_without_an_edit_nothing_is_reloaded(given: Options) -> None:
    changes: list[object] = []
    async with started(given, lambda: None) as gateway:
        gateway.bus.subscribe(InventoryChanged, changes.append)
        gateway.bus.subscribe(SettingsChanged, changes.append)
        write_settings(given, "queue: {max: 9}")
        await until(lambda: gateway.settings.queue.max == 9)
    assert [type(change) for change in changes] == [SettingsChanged]


async def test_a_requested_reload_reports_the_problems_of_both_files(given: Options) -> None:
    async with started(given, lambda: None) as gateway:
        replace(given.inventory_file, "nodes: 3\n")
        write_settings(given, "queue: {max: many}")
        with pytest.raises(ConfigError) as caught:
            await gateway.reload()
    assert [problem.key for problem in caught.value.problems] == ["queue.max", "nodes"]


PINNED = "models: {m: {pin: [first, second]}}"


async def test_settings_that_do_not_fit_the_nodes_are_reported_until_the_nodes_fit(
    given: Options,
) -> None:
    async with started(given, lambda: None) as gateway:
        write_settings(given, PINNED)
        await until(lambda: "no node of the inventory is named second" in told(gateway)[0])
        assert gateway.settings.queue.max == 5
        # They do not keep nodes from being added.
        write_nodes(given, "first", "third")
        await until(lambda: set(gateway.fleet.nodes) == {"first", "third"})
        assert (told(gateway)[0] != "", told(gateway)[1]) == (True, "")
        write_nodes(given, "first", "second")
        await until(lambda: "m" in gateway.settings.models)
        await until(lambda: set(gateway.fleet.nodes) == {"first", "second"})
        assert told(gateway) == ("", "")
        # A node that a model is pinned to stays until the pin is gone.
        write_nodes(given, "first")
        await until(lambda: "no node of the inventory is named second" in told(gateway)[1])
        assert "gateway.yaml:1: models.m.pin[1]" in told(gateway)[1]
        assert set(gateway.fleet.nodes) == {"first", "second"}
        write_settings(given, "models: {m: {pin: first}}")
        await until(lambda: set(gateway.fleet.nodes) == {"first"})
        assert told(gateway) == ("", "")


async def test_a_requested_reload_takes_both_files_that_fit_each_other(given: Options) -> None:
    async with started(given, lambda: None) as gateway:
        write_settings(given, PINNED)
        write_nodes(given, "second", "first")
        result = await gateway.reload()
        assert result.inventory.added == ["second"]
        assert gateway.settings.models["m"].pin == ("first", "second")


def told(gateway: Gateway) -> tuple[str, str]:
    return gateway.config_files.settings_error or "", gateway.config_files.inventory_error or ""
