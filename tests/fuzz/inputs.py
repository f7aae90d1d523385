"""The inputs of the fuzz targets: how one is divided, and the corpus of each target.

The last six bytes of an input are no text: one chooses a variant of the target (an API, a route),
five say where the text is cut. So the fuzzer learns which cuts matter, as it does for the text.
"""

from __future__ import annotations

import ast
import base64
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
"""Two files for each target: a line of base64 for each input, so that Git shows what was added, and
a dictionary of words of its language in libFuzzer's own form."""

TAIL_BYTES = 6

MOST_CPU_SECONDS = 1.0
"""CPU time of one input of some kilobytes; usual ones take a thousandth of that."""


@dataclass(frozen=True, slots=True)
class Divided:
    """An input, divided."""

    text: bytes
    choice: int
    """0 to 255."""
    cuts: tuple[int, ...]
    """Offsets in the text, ascending."""

    def pieces(self, more_cuts: Iterable[int] = ()) -> list[bytes]:
        """The text in pieces; some may be empty."""
        edges = sorted({0, *self.cuts, *more_cuts, len(self.text)})
        return [self.text[begin:end] for begin, end in pairwise(edges)]

    def bytewise(self) -> list[bytes]:
        """The text in pieces of a byte."""
        return [self.text[at : at + 1] for at in range(len(self.text))]


def divide(data: bytes) -> Divided:
    """Divide an input; a short one is filled up."""
    data = data.ljust(TAIL_BYTES, b"\0")
    text, tail = data[:-TAIL_BYTES], data[-TAIL_BYTES:]
    return Divided(text, tail[0], tuple(sorted(byte * len(text) // 255 for byte in tail[1:])))


def seed(text: bytes, choice: int = 0, cuts: tuple[int, ...] = (20, 90, 130, 180, 240)) -> bytes:
    """An input of this text."""
    return text + bytes((choice, *cuts))


@dataclass(frozen=True, slots=True)
class Target:
    """Code to be fuzzed."""

    name: str
    check: Callable[[Divided], None]
    """Tries one input. Raises what is wrong: AssertionError, or an exception nobody declared."""
    seeds: tuple[bytes, ...]
    longest: int = 2048
    """Bytes of the longest input."""

    def try_input(self, data: bytes, most: float = MOST_CPU_SECONDS) -> None:
        """Check an input, which must not take longer than `most` seconds of CPU time."""
        began = time.thread_time()
        self.check(divide(data))
        took = time.thread_time() - began
        assert took < most, f"{len(data)} bytes took {took:.2f} s of CPU time"


def dictionary_of(name: str) -> Path:
    """The dictionary of a target."""
    return CORPUS / f"{name}.dict"


def words_of(name: str) -> list[bytes]:
    """The words of the dictionary of a target."""
    lines = dictionary_of(name).read_text().splitlines()
    return [ast.literal_eval(f"b{line}") for line in lines]


def read_corpus(name: str) -> list[bytes]:
    """The kept inputs of a target."""
    file = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in file.read_text().split()] if file.exists() else []


def write_corpus(name: str, inputs: Iterable[bytes]) -> None:
    """Keep these inputs, each once."""
    lines = sorted({base64.b64encode(data).decode() for data in inputs}, key=lambda x: (len(x), x))
    (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
