from __future__ import annotations

import re
from pathlib import Path

from gateway.config.fields import ConfigModel
from gateway.config.inventory import NodeSpec
from gateway.config.settings import Settings
from gateway.config.yaml_file import keys_of
from tests.config.models import models_below

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()


def models() -> list[type[ConfigModel]]:
    return [*models_below(NodeSpec), *models_below(Settings)]


def test_every_key_has_a_row_and_a_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.*) \|$", PAGE, re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(
        key for model in models() for key in keys_of(model)
    )
    for key, kind, default, meaning in rows:
        assert kind.strip(), key
        assert default.strip(), key
        assert len(meaning) > 10, key


def test_the_tables_keep_their_four_columns() -> None:
    for line in PAGE.splitlines():
        if line.startswith("| `") and "LLAMA_GATEWAY" not in line:
            assert len(re.split(r"(?<!\\)\|", line)) == 6
