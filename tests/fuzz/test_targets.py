"""Every kept input of every fuzz target passes, on each Python; atheris is not needed for that."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import NAMES, target_of
from tests.fuzz.api import fuzz_api
from tests.fuzz.inputs import (
    CORPUS,
    Divided,
    divide,
    read_corpus,
    seed,
    timed,
    write_corpus,
)
from tests.fuzz.modules import MODULES

MOST_CORPUS_BYTES = 600_000


@pytest.mark.parametrize("name", MODULES)
def test_every_seed_and_kept_input_passes(name: str) -> None:
    target = target_of(name)
    assert target.name == name
    check = target.make_check()
    for data in (*target.seeds, *read_corpus(name)):
        check(data)


@pytest.mark.parametrize("name", MODULES)
def test_inputs_without_text_pass(name: str) -> None:
    check = target_of(name).make_check()
    for data in (b"", b"\0", bytes(6), b"\xff" * 7):
        check(data)


def test_the_kept_inputs_are_few() -> None:
    assert sum(file.stat().st_size for file in CORPUS.iterdir()) < MOST_CORPUS_BYTES
    assert {file.stem for file in CORPUS.iterdir()} == set(MODULES)


def test_an_input_is_cut_where_its_end_says() -> None:
    assert divide(seed(b"abcdefghij", 3, (0, 51, 127, 255, 127))) == Divided(
        b"abcdefghij", 3, (0, 2, 4, 4, 10)
    )
    pieces = divide(seed(b"abcdefghij", 0, (51, 51, 51, 51, 127))).pieces([9])
    assert pieces == [b"ab", b"cd", b"efghi", b"j"]
    assert divide(b"").pieces() == []


def test_a_corpus_holds_each_input_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.fuzz.inputs.CORPUS", tmp_path)
    write_corpus("some", [b"\xff\n", b"", b"\xff\n", b"a" * 500])
    assert read_corpus("some") == [b"\xff\n", b"a" * 500]


def test_an_input_that_takes_long_fails() -> None:
    def busy(data: bytes) -> None:
        sum(range(200_000))

    with pytest.raises(AssertionError, match="CPU time"):
        timed(busy, 1e-6)(b"")


@pytest.mark.parametrize("arguments", [["--only", "nothing", "--runs", "1"], ["--only", "head"]])
def test_a_wrong_option_is_explained(arguments: list[str]) -> None:
    done = _fuzz(*arguments)
    assert done.returncode == 2
    assert "--runs N" in done.stderr


needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed"
)


@pytest.mark.slow
@needs_atheris
def test_a_target_is_fuzzed_for_so_many_inputs() -> None:
    done = _fuzz("--only", "chunks", "--runs", "500", "--seed", "1")
    assert done.returncode == 0, done.stdout
    assert re.match(r"chunks +500 inputs .* ok$", done.stdout.strip()), done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="no schemathesis")
def test_responses_of_both_listeners_are_as_the_document_says() -> None:
    figures, problems = fuzz_api(cases=400, seconds=120, jobs=1, seed=1)
    assert not problems
    assert figures["cases"] >= 300


def test_all_targets_have_a_module() -> None:
    assert set(NAMES) == {*MODULES, "api"}


def _fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
