from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.config.errors import ConfigError, Problem
from gateway.config.inventory import Inventory, load_inventory
from gateway.config.settings import Settings, load_settings

LoadNodes = Callable[..., Inventory]
LoadSettings = Callable[..., Settings]
Problems = Callable[..., list[Problem]]


def load(read: Callable[..., Any], path: Path, text: str, **env: str) -> Any:
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return read(path, env)


def problems(read: Callable[..., Any], path: Path, text: str, **env: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(read, path, text, **env)
    return list(caught.value.problems)


@pytest.fixture
def load_nodes(tmp_path: Path) -> LoadNodes:
    return partial(load, load_inventory, tmp_path / "nodes.yaml")


@pytest.fixture
def load_gateway(tmp_path: Path) -> LoadSettings:
    return partial(load, load_settings, tmp_path / "gateway.yaml")


@pytest.fixture
def nodes_problems(tmp_path: Path) -> Problems:
    return partial(problems, load_inventory, tmp_path / "nodes.yaml")


@pytest.fixture
def gateway_problems(tmp_path: Path) -> Problems:
    return partial(problems, load_settings, tmp_path / "gateway.yaml")
