"""Parsers of arguments that the benchmarks' command lines share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names, each of which must be `known`."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)} (there are {', '.join(known)})"
            )
        return chosen

    return parse


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"not a positive whole number: {text}")
    return int(text)
