"""Every kept input of every fuzz target passes, on each Python; atheris is not needed for that."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.__main__ import MODULES, target_of
from tests.fuzz.api import fuzz_api
from tests.fuzz.inputs import Divided, Target, divide, read_corpus, seed, words_of

WITHOUT_TEXT = (b"", b"\0", bytes(6), b"\xff" * 7)


@pytest.mark.parametrize("name", MODULES)
def test_every_seed_and_kept_input_passes(name: str) -> None:
    target = target_of(name)
    assert target.name == name
    for data in (*target.seeds, *read_corpus(name), *WITHOUT_TEXT):
        target.check(divide(data))


def changed(target: Target) -> Any:
    """The text of a seed, in which words and pieces of other seeds stand in place of others."""
    texts = [divide(one).text for one in target.seeds]
    places = st.integers(0, max(map(len, texts)))
    pieces = st.tuples(st.sampled_from(texts), places, places).map(lambda of: of[0][of[1] : of[2]])
    edits = st.tuples(places, st.integers(0, 9), st.sampled_from(words_of(target.name)) | pieces)

    def apply(text: bytes, edited: list[tuple[int, int, bytes]], tail: tuple[int, ...]) -> Divided:
        for at, left_out, put_in in edited:
            text = text[:at] + put_in + text[at + left_out :]
        return divide(seed(text[: target.longest], tail[0], tail[1:]))

    tails = st.tuples(*[st.integers(0, 255)] * 6)
    return st.builds(apply, st.sampled_from(texts), st.lists(edits, max_size=4), tails)


@pytest.mark.parametrize("name", MODULES)
def test_every_changed_seed_passes(name: str) -> None:
    target = target_of(name)
    every: Any = given(changed(target))
    every(target.check)()


def test_an_input_that_takes_long_fails() -> None:
    busy = Target("busy", lambda _: list(range(200_000)).clear(), ())
    with pytest.raises(AssertionError, match="CPU time"):
        busy.try_input(b"", 1e-6)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="no atheris")
def test_a_target_is_fuzzed_for_so_many_inputs() -> None:
    options = ("--only", "chunks", "--runs", "500", "--seed", "1")
    command = [sys.executable, "-m", "tests.fuzz", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout
    assert re.match(r"chunks +500 inputs .* ok$", done.stdout.strip()), done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="no schemathesis")
def test_responses_of_both_listeners_are_as_the_document_says() -> None:
    figures, problems = fuzz_api(cases=400, seconds=120, seed=1)
    assert not problems
    assert figures["cases"] >= 300
