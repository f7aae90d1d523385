from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.each_case import each_case
from tests.house.reference import nodes_schema, settings_schema, write_schemas

CONFIG = Path(__file__).parents[2] / "config"
NODES = jsonschema.Draft202012Validator(nodes_schema())
GATEWAY = jsonschema.Draft202012Validator(settings_schema())
HASH = "0123456789abcdef" * 4


def node(text: str) -> str:
    return f"nodes: [{{name: a, url: 'http://h', {text}}}]"


@pytest.mark.parametrize("validator", [NODES, GATEWAY])
def test_the_schemas_are_schemas(validator: jsonschema.Draft202012Validator) -> None:
    validator.check_schema(validator.schema)


def test_the_schemas_in_the_tree_are_up_to_date(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    for name in ("nodes.schema.json", "gateway.schema.json"):
        assert (CONFIG / name).read_text() == (tmp_path / name).read_text(), (
            "run: python -m tests.house.reference"
        )


@each_case(
    "text",
    [
        "nodes: []\ndefaults:",
        *(node(f"slots: {slots}") for slots in ("2", "auto", "'${SLOTS:-2}'")),
        *(node(f"model: {model}") for model in ("m", "[m, n]", "{a: b}")),
        *(node(f"endpoints: {names}") for names in ("chat", "[chat, '${E}']")),
        node("timeouts: {connect: 3, total: 1h30m, silence: '${S}', first_byte: ~}"),
        node("tls: ~, labels: {numa: '0'}, enabled: '${E}'"),
        "defaults: {slots: auto, tier: gpu, timeouts: {connect: 1}}\nnodes: []",
        "nodes: [{name: '${N}', url: '${U}'}]",
    ],
)
def test_an_inventory_as_it_is_written_is_valid(text: str) -> None:
    NODES.validate(yaml.safe_load(text))


@each_case(
    "text",
    [
        "{}", "nodes: [{name: a}]", node("slot: 2"), node("slots: many"), node("models: {a: b}"),
        node("api_key: secret"), node("kind: vllm"), node("timeouts: {conect: 1}"),
        node("endpoints: [talk]"), "defaults: {name: a}\nnodes: []", "nodes: []\nmore: 1",
    ],
)  # fmt: skip
def test_a_wrong_inventory_is_marked(text: str) -> None:
    assert not NODES.is_valid(yaml.safe_load(text))


@each_case(
    "text",
    [
        "listen:\nqueue:\nkeys:\nmodels: {m: }",
        "listen: {port: '${PORT:-8000}', trusted_proxies: 10.0.0.0/8}",
        "limits: {body_bytes: 1 GiB, header_bytes: 9000, body_timeout: 30s}",
        "models: {a: {use: b}, b: {use: [c, d], set: {x: 1}, strip: y}}",
        "classes: {batch: {max_wait: 1h}}",
        'heartbeat: "off"',
        "heartbeat: false",
        f"keys: [{{id: a, sha256: {HASH}}}]\ncors: {{origins: '*'}}\nallow_anonymous: '${{ANON}}'",
    ],
)
def test_settings_as_they_are_written_are_valid(text: str) -> None:
    GATEWAY.validate(yaml.safe_load(text))


@each_case(
    "text",
    [
        "listn: {}", "listen: {port: 70000}", "listen: {port: eighty}", "limits: {body_bytes: 64M}",
        "classes: {vip: {}}", "heartbeat: often", "keys: [{id: a, sha256: abc}]", "resume: always",
    ],
)  # fmt: skip
def test_wrong_settings_are_marked(text: str) -> None:
    assert not GATEWAY.is_valid(yaml.safe_load(text))
