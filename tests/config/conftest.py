from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.config.errors import ConfigError, Problem
from gateway.config.inventory import Inventory, load_inventory
from gateway.config.settings import Settings, load_settings

LoadNodes = Callable[..., Inventory]
LoadSettings = Callable[..., Settings]
Problems = Callable[..., list[Problem]]


@pytest.fixture
def load_nodes(tmp_path: Path) -> LoadNodes:
    def load(text: str, **env: str) -> Inventory:
        path = tmp_path / "nodes.yaml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return load_inventory(path, env)

    return load


@pytest.fixture
def load_gateway(tmp_path: Path) -> LoadSettings:
    def load(text: str, **env: str) -> Settings:
        path = tmp_path / "gateway.yaml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return load_settings(path, env)

    return load


@pytest.fixture
def nodes_problems(load_nodes: LoadNodes) -> Problems:
    def problems(text: str, **env: str) -> list[Problem]:
        with pytest.raises(ConfigError) as caught:
            load_nodes(text, **env)
        return list(caught.value.problems)

    return problems


@pytest.fixture
def gateway_problems(load_gateway: LoadSettings) -> Problems:
    def problems(text: str, **env: str) -> list[Problem]:
        with pytest.raises(ConfigError) as caught:
            load_gateway(text, **env)
        return list(caught.value.problems)

    return problems
