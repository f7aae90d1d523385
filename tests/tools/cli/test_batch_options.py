from __future__ import annotations

import pytest

from tests.tools.cli.running import run


@pytest.mark.parametrize(
    "command", ["submit", "list", "show", "cancel", "pause", "resume", "fetch"]
)
def test_each_command_names_the_gateway_in_the_same_way(command: str) -> None:
    told = run("batch", command, "--help").out
    for option in ("--url URL", "--key-file FILE", "--ca FILE", "LLAMA_GATEWAY_KEY", "Examples:"):
        assert option in told


def test_an_unknown_form_is_wrong_usage() -> None:
    ran = run("batch", "fetch", "batch_1", "--format", "xml")
    assert (ran.status, "--format" in ran.err) == (2, True)


@pytest.mark.parametrize("id_", ["../files", "batch 1", "", "b" * 129])
def test_what_is_no_id_is_refused_here(id_: str) -> None:
    ran = run("batch", "fetch", id_)
    assert (ran.status, "is no batch's id" in ran.err) == (2, True), ran.err
