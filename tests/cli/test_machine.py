from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from tests.cli.running import output, refusal
from tests.each_case import each_case
from tests.local.gguf_files import gguf_writer
from tests.local.machine import make_machine, two_sockets_with_smt
from tests.local.small_models import LARGER, write_hollow
from tests.workshop.fit.random_models import Recipe, write

GIB = 1 << 30
PAGE = Path(__file__).parents[2] / "docs/fit.md"
PAGE_OPTIONS = (
    *("--memory", "8GiB", "--cores", "4", "--instructions", "avx2"),
    *("--channels", "2", "--mt-per-s", "3200"),
)
RECIPE = Recipe("some-model", 8, 1024, 16, 4, 4096, vocabulary=4096, weights=Type.Q4_0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(RECIPE, tmp_path_factory.mktemp("models"), hollow=True))


def test_a_script_gets_json(model: str) -> None:
    found = json.loads(output("fit", model, "--memory", "4GiB", "--cores", "8", "--json"))
    server = found["server"]
    assert found["fits"] is True
    assert found["model"]["architecture"] == "llama"
    assert server["kv_cache"] == 2 * server["kv_cache_per_slot"] == 2 * 8 * 2 * 256 * 2 * 4096
    assert server["weights"] == sum(found["model"]["weights_by_type"].values())
    parts = ("weights", "kv_cache", "states", "compute", "checkpoints", "prompt_cache")
    assert server["needed"] == sum(server[p] for p in (*parts, "vocabulary", "process"))
    assert found["places"][0]["left"] == 4 * GIB - server["needed"]
    assert found["speed"] is None


def test_the_page_shows_what_is_written_and_what_is_missing_is_told(
    model: str, tmp_path: Path
) -> None:
    path = write_hollow(LARGER, tmp_path)
    out = output("fit", str(path), *PAGE_OPTIONS)
    page = PAGE.read_text()
    assert f"llama-gateway fit {path.name} {' '.join(PAGE_OPTIONS)}" in page
    assert not [line for line in out.splitlines() if line.rstrip() not in page]
    out = output("fit", model, "--memory", "2GiB")
    assert "does not fit  the machine: 1 server needs" in out
    assert "stay free, 2.0 GiB must" in out
    assert "are missing" in output("fit", model, "--memory", "64MiB")


@each_case(
    ("arguments", "message"),
    [
        (("--memory", "much"), "--memory much: no size. Remedy: such as 32GiB"),
        (("--kv-type", "q9"), "--kv-type q9: there is no such type; known: f32"),
        (("--channels", "2"), "--channels and --mt-per-s: only both"),
        (("--measure", "--channels", "2", "--mt-per-s", "1600"), "only one of them"),
        (("--instructions", "mmx"), "--instructions mmx: there is no such set; known: amx"),
    ],
)
def test_wrong_usage_is_refused(model: str, arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal("fit", model, *arguments)


def test_a_truncated_model_is_refused_with_the_byte(model: str, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(Path(model).read_bytes()[:1000])
    told = refusal("fit", str(short), status=1)
    assert "short.gguf: not a GGUF model, or cut short: it ends early, at byte 1,000" in told
    os.truncate(short, 0)
    assert "does not begin with GGUF" in refusal("fit", str(short), status=1)
    assert "no such file" in refusal("fit", str(tmp_path / "gone.gguf"), status=1)
    with gguf_writer(short, "rwkv7") as writer:
        writer.add_block_count(1)
    message = refusal("fit", str(short), status=1)
    assert "its architecture is 'rwkv7', whose memory is not known here" in message
    assert "(1.5 x file)" in message


# The topology of a machine.


def test_two_sockets_are_shown_with_the_command_for_each(tmp_path: Path) -> None:
    root = str(make_machine(tmp_path, two_sockets_with_smt()))
    shown = output("topology", "--root", root)
    assert "8 in 2 sockets and 2 NUMA nodes, 2 threads each" in shown
    assert "numactl --physcpubind=0-3,8-11 --membind=0 llama-server --threads 4 --no-mmap" in shown
    found = json.loads(output("topology", "--json", "--root", root))
    assert (found["sockets"], found["cores"], found["cpus"]) == (2, 8, 16)
    assert [node["cores"][0] for node in found["numa_nodes"]] == [[0, 8], [4, 12]]
    assert found["servers"][1] == {
        "numa": 1,
        "threads": 4,
        "cpus": "4-7,12-15",
        "pin": True,
        "bind_memory": True,
        "no_mmap": True,
    }


def test_a_folder_without_proc_and_sys_is_refused_with_the_remedy(tmp_path: Path) -> None:
    assert "--root" in refusal("topology", "--root", str(tmp_path))
