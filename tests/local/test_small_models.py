"""Checks the statements of docs/models.md about two models, on files of the same shape."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from gateway.local.gguf import read_model
from gateway.local.memory import GIB, server_needs
from gateway.local.plan import DEFAULT_CONTEXT, DEFAULT_SLOTS, plan_servers, server_settings
from gateway.local.topology import read_topology
from tests.local.machine import make_machine
from tests.local.small_models import MODELS, Published, types, weights, write_hollow

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_page_fetches_checks_and_tells_what_up_reads(model: Published, tmp_path: Path) -> None:
    assert types(model) == Counter(model.types), "as the published file"
    assert round(weights(model) / 2**20, 2) == pytest.approx(model.weights_mib, abs=0.006)
    command = rf"^\$ curl -fL .*-o {re.escape(model.file)} \\\n +{re.escape(model.url)}$"
    assert re.search(command, PAGE, re.MULTILINE)
    assert f'"{model.sha256}  {model.file}" | sha256sum -c' in PAGE
    assert f"--model {model.file}" in PAGE
    read = read_model(write_hollow(model, tmp_path))
    assert (f"{read.name}.gguf", read.size) == (model.file, model.size)
    machine = read_topology(make_machine(tmp_path / "machine", [[[0], [1]]]))
    (server,) = plan_servers(machine, read)
    assert (server.slots, server.context) == (DEFAULT_SLOTS, DEFAULT_CONTEXT)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{read.name}`"))
    needs = server_needs(read, server_settings(server))[0] / GIB
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:4] == ["Apache 2.0", f"{model.size:,}", f"{needs:.1f} GiB"]
    assert f"{DEFAULT_SLOTS} slots of {DEFAULT_CONTEXT:,} tokens" in PAGE
