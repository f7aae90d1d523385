"""Any file becomes a model or a ConfigError, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config.errors import ConfigError, Problem
from gateway.config.inventory import Inventory, NodeSpec, load_inventory
from gateway.config.settings import Settings, load_settings, masked_settings
from gateway.config.yaml_file import keys_of
from tests.config.models import models_below

ENV = {"N": "42", "T": "text", "B": "true", "E": "", "J": "{a: [1"}

KEYS = sorted(
    {key for model in (*models_below(NodeSpec), *models_below(Settings)) for key in keys_of(model)}
    | {"nodes", "defaults", "api_key", "resume", "<<", ""}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["auto", "off", "30s", "64MiB", "http://h", "${N}", "${T}", "${B}", "${E}", "${J}", "${X}"]
    ),
    st.sampled_from(
        ["${X:-7}", "$$", "${", "chat", "gpu", "normal", "*", "m", "../..", "/dev/null"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)


def mapping(*models: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings with mostly valid keys, so that their values are validated."""
    keys = sorted({key for model in models for key in keys_of(model)})
    return st.dictionaries(st.sampled_from(keys), VALUES, max_size=6)


INVENTORIES = VALUES | st.fixed_dictionaries(
    {"nodes": st.lists(mapping(NodeSpec) | VALUES, max_size=4)},
    optional={"defaults": mapping(NodeSpec)},
)
SETTINGS = VALUES | st.dictionaries(
    st.sampled_from(sorted(keys_of(Settings))),
    VALUES | mapping(*models_below(Settings)),
    max_size=6,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.yaml"


def loaded(load: Callable[..., Any], file: Path, text: str) -> Any:
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    problems: Sequence[Problem] = ()
    try:
        return load(file, ENV)
    except ConfigError as error:
        problems = error.problems
    assert problems
    for problem in problems:
        assert problem.file == file
        assert problem.message
        assert 0 <= problem.line <= text.count("\n") + 2
        assert len(str(problem).splitlines()) == 1
    return None


fuzzed = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@fuzzed
@given(INVENTORIES)
def test_any_yaml_is_an_inventory_or_a_config_error(file: Path, value: object) -> None:
    found = loaded(load_inventory, file, yaml.safe_dump(value))
    assert found is None or isinstance(found, Inventory)


@fuzzed
@given(SETTINGS)
def test_any_yaml_is_settings_or_a_config_error(file: Path, value: object) -> None:
    found = loaded(load_settings, file, yaml.safe_dump(value))
    if found is not None:
        assert isinstance(found, Settings)
        assert masked_settings(found)
