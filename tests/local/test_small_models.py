"""Checks the statements of docs/models.md about two models, on files of the same shape."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from gateway.local import ModelFileError
from gateway.local.gguf import read_model
from gateway.local.memory import GIB, server_needs
from gateway.local.plan import DEFAULT_CONTEXT, DEFAULT_SLOTS, plan_servers, server_settings
from gateway.local.topology import read_topology
from tests.local.machine import make_machine
from tests.local.small_models import MODELS, Published, types, weights, write_hollow

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def named(model: Published) -> str:
    return model.name


@pytest.mark.parametrize("model", MODELS, ids=named)
def test_the_fixture_has_the_tensors_that_the_published_file_has(model: Published) -> None:
    assert types(model) == Counter(model.types)
    assert round(weights(model) / 2**20, 2) == pytest.approx(model.weights_mib, abs=0.006)
    head = model.size - weights(model)
    assert 5_000_000 < head < 7_000_000  # 151,936 tokens and 151,387 merges


@pytest.mark.parametrize("model", MODELS, ids=named)
def test_up_reads_the_figures_of_the_page(model: Published, tmp_path: Path) -> None:
    read = read_model(write_hollow(model, tmp_path))
    assert (read.name, read.size, read.trained_context) == (
        model.file.removesuffix(".gguf"),
        model.size,
        32_768,
    )
    machine = read_topology(make_machine(tmp_path / "machine", [[[0], [1]]]))
    (server,) = plan_servers(machine, read)
    assert (server.alias, server.slots, server.context) == (
        read.name,
        DEFAULT_SLOTS,
        DEFAULT_CONTEXT,
    )
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{read.name}`"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:4] == [
        "Apache 2.0",
        f"{model.size:,}",
        f"{server_needs(read, server_settings(server))[0] / GIB:.1f} GiB",
    ]
    assert f"{DEFAULT_SLOTS} slots of {DEFAULT_CONTEXT:,} tokens" in PAGE


@pytest.mark.parametrize("model", MODELS, ids=named)
def test_the_page_fetches_and_checks_the_file(model: Published) -> None:
    command = rf"^\$ curl -fL .*-o {re.escape(model.file)} \\\n +{re.escape(model.url)}$"
    assert re.search(command, PAGE, re.MULTILINE)
    assert f'"{model.sha256}  {model.file}" | sha256sum -c' in PAGE
    assert f"--model {model.file}" in PAGE


def test_half_a_download_is_refused_as_the_page_says(tmp_path: Path) -> None:
    model = MODELS[0]
    path = write_hollow(model, tmp_path)
    with path.open("r+b") as file:
        file.truncate(model.size // 2)
    quoted = re.search(r"cut short: [\d,]+ of at least [\d,]+ bytes are there", PAGE)
    assert quoted
    with pytest.raises(ModelFileError, match=quoted[0]):
        read_model(path)
