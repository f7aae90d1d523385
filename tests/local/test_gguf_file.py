from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.local import ModelFileError
from gateway.local.gguf import model_parts, read_model
from tests.each_case import each_case
from tests.local.gguf_files import gguf_writer

PADDING = 16  # bytes behind the last tensor that `write_gguf` writes


def write_gguf(path: Path, *, context: int | None = 4096) -> Path:
    with gguf_writer(path) as writer:
        writer.add_name("a name")
        writer.add_array("some.numbers", [1, 2, 3])
        writer.add_token_list(["a", "b", "c"])
        writer.add_bool("some.flag", val=True)
        if context is not None:
            writer.add_context_length(context)
        writer.add_tensor("t", np.zeros((2, 2), dtype=np.float32))
    return path


def test_size_name_and_trained_context_are_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mistral-7b.gguf", context=32_768)
    model = read_model(path)
    assert (model.name, model.trained_context) == ("mistral-7b", 32_768)
    assert model.size == path.stat().st_size
    assert read_model(path, "other").name == "other"
    assert read_model(write_gguf(path, context=None)).trained_context is None


def test_all_parts_of_a_split_model_count_whichever_is_named(tmp_path: Path) -> None:
    parts = [write_gguf(tmp_path / f"big-0000{part}-of-00003.gguf") for part in (1, 2, 3)]
    first = parts[0]
    model = read_model(parts[1])
    assert model.path == first
    assert model.name == "big"
    assert model.size == 3 * first.stat().st_size
    assert len(model_parts(first)) == 3


def test_a_name_that_tells_of_no_parts_is_that_of_one_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "big-00001-of-00000.gguf")
    assert model_parts(path) == [path]
    assert read_model(path).name == "big"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "big-00001-of-00002.gguf")
    for path, said in (
        (first, r"big-00002-of-00002\.gguf: no such file"),
        (tmp_path / "gone.gguf", r"gone\.gguf: no such file"),
        (tmp_path, "is a directory"),
    ):
        with pytest.raises(ModelFileError, match=said):
            read_model(path)
    second = write_gguf(tmp_path / "big-00002-of-00002.gguf")
    os.truncate(second, second.stat().st_size - 20)
    with pytest.raises(ModelFileError, match=r"big-00002-of-00002\.gguf: cut short"):
        read_model(first)


@given(st.binary(max_size=200))
def test_other_files_are_refused_with_a_remedy(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="not a GGUF model"):
        read_model(path)


@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_model_cut_short_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, cut: float
) -> None:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")
    os.truncate(path, int((path.stat().st_size - PADDING) * cut))
    with pytest.raises(ModelFileError, match="cut short"):
        read_model(path)


def test_a_model_without_its_last_weights_is_refused_with_its_size(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    needed = path.stat().st_size - PADDING
    os.truncate(path, needed)
    assert read_model(path).size == needed
    os.truncate(path, needed - 1)
    with pytest.raises(ModelFileError) as refused:
        read_model(path)
    assert f"cut short: {needed - 1:,} of at least {needed:,} bytes" in str(refused.value)
    assert "curl -C -" in str(refused.value)


@each_case(
    ("held", "message"),
    [
        ("<!DOCTYPE html><html>404</html>", "web page"),
        ('{"error": "Repository not found"}', "error message"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ("PK\3\4", "does not begin with GGUF"),
    ],
)
def test_another_file_in_place_of_a_model_is_named(tmp_path: Path, held: str, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_text(held)
    with pytest.raises(ModelFileError, match=message):
        read_model(path)
