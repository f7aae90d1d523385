"""Every kept input of every fuzz target passes, on each Python; atheris is not needed for that."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.fuzz.__main__ import target_of
from tests.fuzz.api import fuzz_api
from tests.fuzz.inputs import read_corpus, timed
from tests.fuzz.modules import MODULES

WITHOUT_TEXT = (b"", b"\0", bytes(6), b"\xff" * 7)


@pytest.mark.parametrize("name", MODULES)
def test_every_seed_and_kept_input_passes(name: str) -> None:
    target = target_of(name)
    assert target.name == name
    check = target.make_check()
    for data in (*target.seeds, *read_corpus(name), *WITHOUT_TEXT):
        check(data)


def test_an_input_that_takes_long_fails() -> None:
    def busy(data: bytes) -> None:
        sum(range(200_000))

    with pytest.raises(AssertionError, match="CPU time"):
        timed(busy, 1e-6)(b"")


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


def _fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
