from __future__ import annotations

import errno
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gateway.local.memory import MIB, ServerSettings, file_memory
from gateway.local.plan import ModelFolder
from tests.known import known
from tests.local.gguf_files import gguf_writer
from tests.servers import demo_model
from tests.workshop.fit.random_models import Recipe, write

GIB = 1 << 30
SETTINGS = ServerSettings(slots=2, context=4096)
WIDE = Recipe("wide", layers=8, width=1024, heads=8, kv_heads=8, feed_forward=4096)


def put(path: Path) -> Path:
    """The demo model under another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(demo_model(), path)
    return path


def put_other(path: Path, architecture: str, kind: str | None = None) -> Path:
    """A file that is no model of texts, with a tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gguf_writer(path, architecture) as writer:
        if kind is not None:
            writer.add_type(kind)
        writer.add_tensor("any.weight", np.zeros((32, 32), dtype=np.float32))
    return path


def put_split(folder: Path, name: str) -> None:
    """A model in two parts: metadata and half of the tensors in the first."""
    whole = gguf.GGUFReader(demo_model())
    half = len(whole.tensors) // 2
    for number, tensors in enumerate((whole.tensors[:half], whole.tensors[half:]), start=1):
        with gguf_writer(folder / f"{name}-{number:05}-of-00002.gguf") as writer:
            if number == 1:
                writer.add_context_length(2048)
            for tensor in tensors:
                writer.add_tensor(tensor.name, tensor.data)


def reader(folder: Path, room: int = 20 * GIB, **options: Any) -> ModelFolder:
    """The folder, read once."""
    found = ModelFolder(
        folder, folder / "models.ini", options.pop("settings", SETTINGS), room, **options
    )
    found.refresh()
    return found


def test_models_are_named_by_their_files_in_the_folder_and_those_within(tmp_path: Path) -> None:
    for name in ("a.gguf", "b 2.Q4_K_M.gguf", "inner/c.gguf", "inner/d.gguf"):
        put(tmp_path / name)
    for other in ("notes.txt", ".hidden.gguf", "inner/deeper/e.gguf", "f.gguf.part"):
        put(tmp_path / other)
    put_split(tmp_path, "split")
    found = reader(tmp_path)
    assert list(found.models) == ["a", "b 2.Q4_K_M", "c", "d", "split"]
    assert found.passed_over == {}
    split = found.models["split"]
    assert split.file.path == tmp_path / "split-00001-of-00002.gguf"
    assert split.settings.context == 2048  # it was trained for less than the others get
    assert found.models["a"].settings.context == 4096


def test_what_can_not_be_served_is_told_with_the_reason(tmp_path: Path) -> None:
    put(tmp_path / "good.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "cut.gguf").write_bytes(demo_model().read_bytes()[:1_000_000])
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nothing")
    (tmp_path / "long.gguf").symlink_to("x" * 300)  # whatever it is, the system may not say
    os.mkfifo(tmp_path / "pipe.gguf")  # it is not even opened
    put(tmp_path / "inner/good.gguf")
    put(tmp_path / "no#te.gguf")
    put(tmp_path / "we:ird.gguf")
    put(tmp_path / "half-00002-of-00003.gguf")
    put_other(tmp_path / "vision.gguf", "clip")
    put_other(tmp_path / "lora.gguf", "llama", "adapter")
    put(tmp_path / "mmproj-liar.gguf")
    found = reader(tmp_path)
    assert list(found.models) == ["good"]
    words = {
        "text.gguf": "not a GGUF model",
        "cut.gguf": "cut short",
        "gone.gguf": "no such file",
        "long.gguf": "file name too long",
        "inner/good.gguf": "good.gguf has this name too",
        "no#te.gguf": "rename",
        "we:ird.gguf": "rename",
        "half-00002-of-00003.gguf": "00001-of-00003.gguf: no such file",
        "vision.gguf": "projector of images",
        "lora.gguf": "an adapter",
        "mmproj-liar.gguf": "but not by both",
    }
    assert found.passed_over.keys() == words.keys()
    for name, word in words.items():
        assert word in found.passed_over[name], (name, found.passed_over[name])


def test_a_projector_goes_to_the_one_model_beside_it(tmp_path: Path) -> None:
    for name in ("gemma", "plain", "own/any-model"):
        put(tmp_path / f"{name}.gguf")
    for name in ("mmproj-gemma", "own/any-mmproj-model-f16", "own/mmproj-model-f16"):
        put_other(tmp_path / f"{name}.gguf", "clip")
    found = reader(tmp_path)
    projectors = {name: model.projector for name, model in found.models.items()}
    projector = tmp_path / "own/any-mmproj-model-f16.gguf"
    assert projectors == {"gemma": None, "plain": None, "any-model": projector}
    assert found.passed_over.keys() == {"mmproj-gemma.gguf", "own/mmproj-model-f16.gguf"}
    assert all("folder of their own" in why for why in found.passed_over.values())
    plain, seeing = found.models["plain"], found.models["any-model"]
    size = projector.stat().st_size
    assert seeing.memory - plain.memory == size


def test_a_model_that_has_no_room_alone_is_told_unless_forced(tmp_path: Path) -> None:
    put(tmp_path / "small.gguf")
    write(WIDE, tmp_path, hollow=True)
    found = reader(tmp_path, room=300 * MIB)
    assert list(found.models) == ["small"]
    assert "needs 0.6 GiB (weights" in found.passed_over["wide.gguf"]
    assert "less --context" in found.passed_over["wide.gguf"]
    forced = reader(tmp_path, room=300 * MIB, force=True)
    assert forced.passed_over == {}
    assert forced.models["wide"].memory == 300 * MIB  # so that it is loaded alone


def test_prompts_get_memory_but_never_so_much_that_a_model_has_no_room(tmp_path: Path) -> None:
    put(tmp_path / "small.gguf")
    write(WIDE, tmp_path, hollow=True)
    roomy = reader(tmp_path, room=20 * GIB).models
    caches = {name: one.settings.prompt_cache_bytes for name, one in roomy.items()}
    assert caches == {"small": 20 * GIB // 16, "wide": 20 * GIB // 16}
    tight = reader(tmp_path, room=800 * MIB).models["wide"]
    assert tight.memory <= 800 * MIB
    assert tight.settings.prompt_cache_bytes % MIB == 0


def test_the_preset_says_how_each_model_is_started(tmp_path: Path) -> None:
    put(tmp_path / "a.gguf")
    put_other(tmp_path / "mmproj-a.gguf", "clip")
    settings = replace(SETTINGS, slots=3)
    found = reader(tmp_path, room=300 * MIB, settings=settings, embedding=True)
    preset = tmp_path / "models.ini"
    assert preset.read_text() == (
        f"[a]\nmodel = {tmp_path}/a.gguf\nmmproj = {tmp_path}/mmproj-a.gguf\n"
        "parallel = 3\nctx-size = 12288\ncache-ram = 18\npooling = mean\n"
    )
    assert len(list(tmp_path.iterdir())) == 3  # no draft is left
    told = found.memory(tmp_path / "a.gguf", 3, 4096)
    cache, projector = 18 * MIB, (tmp_path / "mmproj-a.gguf").stat().st_size
    assert told == file_memory(tmp_path / "a.gguf", 3, 4096) + cache + projector
    with pytest.raises(ValueError, match="is not served"):
        found.memory(tmp_path / "gone.gguf", 3, 4096)


def test_what_comes_and_goes_changes_no_other_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "a.gguf")
    found, preset = reader(tmp_path), tmp_path / "models.ini"
    first = preset.read_text()
    assert found.refresh() is None
    (tmp_path / "b.gguf").write_bytes(demo_model().read_bytes()[:1_000_000])  # it is being copied
    changed = known(found.refresh())
    assert (changed["added"], changed["removed"]) == ([], [])
    (why,) = changed["not_served"]
    assert re.fullmatch("b.gguf: .*cut short.*", why)
    assert preset.read_text() == first
    put(tmp_path / "b.gguf")
    assert found.refresh() == {"added": ["b"], "removed": [], "not_served": []}
    assert preset.read_text().startswith(first)
    assert "[b]" in preset.read_text()
    (tmp_path / "b.gguf").unlink()
    assert found.refresh() == {"added": [], "removed": ["b"], "not_served": []}
    assert preset.read_text() == first
    # A file that has not changed is not read again.
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("it was read again"))
    assert found.refresh() is None


def test_a_copy_that_keeps_size_and_time_is_read_again_when_it_is_whole(tmp_path: Path) -> None:
    path, content = tmp_path / "a.gguf", demo_model().read_bytes()
    path.write_bytes(bytes(len(content)))  # a program that makes room first
    os.utime(path, (1, 1))
    found = reader(tmp_path)
    assert "not a GGUF model" in found.passed_over["a.gguf"]
    path.write_bytes(content)
    os.utime(path, (1, 1))
    assert found.refresh() == {"added": ["a"], "removed": [], "not_served": []}


def test_a_full_disk_leaves_the_preset_as_it_is_and_one_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "a.gguf")
    found, preset = reader(tmp_path), tmp_path / "models.ini"
    first, replaced = preset.read_text(), Path.replace
    put(tmp_path / "b.gguf")

    def fail(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    for _ in range(3):
        with pytest.raises(OSError, match="no space"):
            found.refresh()
    assert preset.read_text() == first
    assert len(list(tmp_path.iterdir())) == 4  # two models, the preset, the draft
    monkeypatch.setattr(Path, "replace", replaced)
    assert found.refresh() == {"added": ["b"], "removed": [], "not_served": []}
