"""The two files: `config/yaml_file.py`, `inventory.py`, `settings.py` and what validates them.

Oracles: any file is a model or a ConfigError whose problems name the file, a line of it and a
remedy in one line; what is valid is valid again when written back, and equal; no secret of the
environment shows in a problem.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from gateway.config.errors import ConfigError
from gateway.config.inventory import Inventory, load_inventory
from gateway.config.settings import Settings, changed_restart_keys, load_settings, masked_settings
from tests.fuzz.inputs import Divided, Target, seed

SECRET = "s3cr3t-of-a-node"

ENV = {"N": "42", "T": "text", "B": "true", "E": "", "J": "{a: [1", "NODE_KEY": SECRET}

_LINES = b"\r\n\x0b\x0c\x1c\x1d\x1e\x85"


class Files:
    """Loads files of any bytes."""

    def __init__(self) -> None:
        # A file in memory, whose name is that of its descriptor.
        self._descriptor = os.memfd_create("fuzz")
        self.file = Path(f"/proc/self/fd/{self._descriptor}")

    def load(self, load: Callable[..., Any], data: bytes) -> Any:
        """The model; None if there is an error, which is checked."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)
        try:
            return load(self.file, ENV)
        except ConfigError as error:
            self._check_problems(error, data)
            return None

    def _check_problems(self, error: ConfigError, data: bytes) -> None:
        assert error.problems
        most = 2 + sum(data.count(byte) for byte in _LINES) + data.count("\u2028".encode())
        most += data.count("\u2029".encode()) + len(data) * data.startswith(
            (b"\xff\xfe", b"\xfe\xff")
        )
        for problem in error.problems:
            assert problem.file == self.file
            assert problem.message
            assert 0 <= problem.line <= most, problem
            text = str(problem)
            assert len(text.splitlines()) == 1
            assert text.isprintable()
            assert SECRET not in text


_FILES = Files()


def check(one: Divided) -> None:
    """Check one file, as an inventory or as settings."""
    if one.choice % 2:
        settings = _FILES.load(load_settings, one.text)
        if settings is None:
            return
        assert isinstance(settings, Settings)
        assert masked_settings(settings)
        assert changed_restart_keys(settings, settings) == ()
        assert _FILES.load(load_settings, one.text) == settings
    else:
        inventory = _FILES.load(load_inventory, one.text)
        if inventory is None:
            return
        assert isinstance(inventory, Inventory)
        names = [node.name for node in inventory.nodes]
        assert len(set(names)) == len(names)
        assert _FILES.load(load_inventory, one.text) == inventory
        for warning in inventory.warnings:
            assert SECRET not in str(warning)


_INVENTORIES: tuple[Any, ...] = (
    {"nodes": [{"name": "a", "url": "http://10.0.0.1:8080", "slots": 2, "model": "m", "tier": "gpu"}]},
    {"defaults": {"slots": "auto", "timeouts": {"connect": 3}, "labels": {"numa": "0"}},
     "nodes": [{"name": "a", "url": "http://h:1/p", "model": {"x": "y"}, "endpoints": ["chat"]},
               {"name": "b", "url": "https://[::1]:8", "kind": "openai", "api_key_env": "NODE_KEY",
                "cost_per_million_tokens": {"prompt": 0.1, "completion": 0.4}, "standby": True}]},
    {"nodes": []},
)  # fmt: skip

_SETTINGS: tuple[Any, ...] = (
    {"listen": {"host": "0.0.0.0", "port": 8000, "trusted_proxies": ["127.0.0.1"]},
     "keys": [{"id": "abc", "sha256": "0" * 64, "name": "n", "class": "premium", "models": ["m"]}],
     "limits": {"body_bytes": "64MiB", "header_timeout": "15s"}, "queue": {"max": 24}},
    {"models": {"gpt": {"use": "m", "set": {"temperature": 0.2}, "max_tokens": 5}, "*": {"use": "m"}},
     "default_model": "m", "classes": {"batch": {"reserve_slots": 1}}, "resume": "off",
     "hybrid": {}, "health": {}, "cors": {"origins": ["https://a"]}, "heartbeat": "15s"},
    {"headers": {"to_nodes": ["X-A"]}, "identity": {"user_headers": ["X-User"]}, "ollama": True,
     "prompts": {"volatile": ["^Date: .*$"]}, "elastic": {}, "logging": {"level": "debug"}},
)  # fmt: skip

_TEXTS = (
    b"nodes:\n  - &a {name: a, url: 'http://a'}\n  - <<: *a\n    name: ${T}\n",
    b'nodes: [{name: ${N}, url: "http://${X:-h}", slots: ${N}}] # $$\n',
    b"%YAML 1.1\n---\nnodes: !!seq [{? name : a, url: http://a}]\n...\n",
    b"nodes:\n- name: |\n    a\n  url: >-\n    http://a\n",
)

CONFIG = Target(
    "config",
    check,
    (
        *(seed(yaml.safe_dump(value).encode(), 0) for value in _INVENTORIES),
        *(seed(yaml.safe_dump(value).encode(), 1) for value in _SETTINGS),
        *(seed(text, number % 2) for number, text in enumerate(_TEXTS)),
        seed(_TEXTS[0], 0),
    ),
    longest=1024,
)  # fmt: skip
