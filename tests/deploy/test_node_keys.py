"""The key of a host: made once, and renewed so that no server ever refuses the gateway."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FILES = Path(__file__).parents[2] / "deploy/ansible/roles/llama_node/files"


@pytest.fixture(scope="module")
def keys() -> ModuleType:
    spec = importlib.util.spec_from_file_location("node_keys", FILES / "keys.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_renewed_key_is_known_to_every_server_before_the_gateway_sends_it(
    keys: ModuleType,
) -> None:
    """The play may stop after each of two servers; the gateway sends the first key of the file."""
    file = keys.wanted([], rotate=False, running=[])
    servers = [file, file]

    def play(*, rotate: bool, restarted: int) -> None:
        nonlocal file
        running = [keys.fingerprint(known) for known in servers]
        file = keys.wanted(file, rotate=rotate, running=running)
        for number in range(len(servers)):
            assert file[0] in servers[number]
            if number < restarted:
                servers[number] = file

    (old,) = file
    play(rotate=True, restarted=1)  # it stopped after the first server
    play(rotate=False, restarted=1)
    assert file[0] == old
    play(rotate=True, restarted=2)
    assert len(file) == 2  # a renewal begins once, however often it is requested
    play(rotate=False, restarted=1)
    assert file[0] != old
    play(rotate=False, restarted=2)
    assert servers == [file, file]
    assert len(file) == 1
    assert old not in file
