from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.config.fields import ConfigModel
from gateway.config.inventory import load_inventory
from gateway.config.settings import Settings, load_settings
from gateway.config.yaml_file import keys_of
from tests.house.reference import nodes_schema, settings_schema, write_schemas

CONFIG = Path(__file__).parents[2] / "config"

# A comment that is a key or an item of YAML, not prose: `# port: 8000`, `#   - name: x`.
COMMENTED = re.compile(r"^(?P<indent> *)# (?P<yaml> *(- )?[a-z0-9_-]+:( .*)?)$")


def uncommented(name: str, *, unset: str) -> str:
    """Uncomment every key that is shown in a comment."""
    lines = []
    for line in (CONFIG / name).read_text().splitlines()[1:]:
        found = COMMENTED.match(line)
        text = found["indent"] + found["yaml"] if found else line
        # `key: []` stands for the list that follows it in comments.
        lines.append(re.sub(unset, "", text) if unset else text)
    return "\n".join(lines)


def test_the_sample_inventory_has_one_local_node_and_works_as_it_is() -> None:
    (node,) = load_inventory(CONFIG / "nodes.yaml", {}).nodes
    assert (node.url, node.slots, node.enabled) == ("http://127.0.0.1:8080", None, True)


def test_the_sample_settings_are_the_defaults() -> None:
    assert load_settings(CONFIG / "gateway.yaml", {}) == Settings()


@pytest.mark.parametrize("name", ["nodes", "gateway"])
def test_the_samples_name_their_schema_and_fit_it(name: str) -> None:
    text = (CONFIG / f"{name}.yaml").read_text()
    assert text.splitlines()[0] == f"# yaml-language-server: $schema={name}.schema.json"
    schema = {"nodes": nodes_schema, "gateway": settings_schema}[name]()
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(text))


def test_the_examples_in_the_sample_inventory_work(tmp_path: Path) -> None:
    (tmp_path / "nodes.yaml").write_text(uncommented("nodes.yaml", unset=""))
    (tmp_path / "ca.pem").write_text("certificate")
    (tmp_path / "elsewhere.key").write_text("key\n")
    nodes = load_inventory(
        tmp_path / "nodes.yaml", {"GPU_1_KEY": "key", "CLOUD_AUTHORIZATION": "Bearer x"}
    ).nodes
    assert [node.name for node in nodes] == [
        "local", "epyc-a-numa0", "epyc-a-numa1", "gpu-1", "elsewhere", "epyc-b-numa0", "swap-1",
        "spare-1", "cloud-1",
    ]  # fmt: skip


def unlike(shown: dict[str, Any], defaults: dict[str, Any]) -> Iterator[str]:
    """The keys that are shown with another value than their default, unless that is nothing."""
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(shown[key], dict):
            yield from unlike(shown[key], default)
        elif default not in (None, (), "") and shown[key] != default:
            yield key


def test_the_examples_in_the_sample_settings_work(tmp_path: Path) -> None:
    text = uncommented("gateway.yaml", unset=r"(?<=^keys:) \[\]")
    (tmp_path / "gateway.yaml").write_text(text)
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).write_text("x")
    (tmp_path / "hooks.secret").write_text(f"whsec_{'A' * 32}\n")
    (tmp_path / "otlp-header").write_text("Authorization: Bearer x")
    settings = load_settings(tmp_path / "gateway.yaml", {})
    assert list(unlike(settings.model_dump(), Settings().model_dump())) == []
    assert (len(settings.keys), len(settings.models), len(settings.classes)) == (1, 4, 1)
    assert settings.cors is not None
    assert settings.hybrid.spill is not None
    assert settings.store.url == f"sqlite:///{tmp_path}/gateway.db"
    assert settings.batches.folder == tmp_path / "batches"
    (target,) = settings.webhooks.targets
    assert target.url == "https://hooks.example.org/llama"


def test_the_sample_settings_show_every_key() -> None:
    shown = yaml.safe_load(uncommented("gateway.yaml", unset=r"(?<=^keys:) \[\]"))

    def assert_shown(model: type[ConfigModel], keys: dict[str, object]) -> None:
        assert set(keys) == set(keys_of(model))

    assert_shown(Settings, shown)
    for key, field in keys_of(Settings).items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigModel):
            assert_shown(field.annotation, shown[key])


def test_the_schemas_in_the_tree_are_up_to_date(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    for name in ("nodes.schema.json", "gateway.schema.json"):
        assert (CONFIG / name).read_text() == (tmp_path / name).read_text(), (
            "run: python -m tests.house.reference"
        )


def test_every_key_has_a_meaning() -> None:
    page = (CONFIG.parent / "docs/reference/configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+? \| .+? \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 100
    assert [key for key, meaning in rows if len(meaning) <= 10] == []
