"""Compares two runs: which differences are more than chance.

For each figure of each load that both runs have, requests are drawn again and again from those that
were measured (bootstrap): the middle 95 % of the differences between such draws are the interval.
A difference counts where the interval leaves out 0, and it is at least 1 %. It speaks of these two
runs: what made one run as a whole faster (a warmer cache, other work on the machine) is not in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.tools.bench.report import FORMAT

if TYPE_CHECKING:
    from numpy.typing import NDArray

DRAWS = 2000

CONFIDENCE = 0.95

LEAST_CHANGE = 0.01
"""A smaller change is of no interest, however certain it is."""

LEAST_REQUESTS = 5
"""Requests of a load, below which nothing is said of chance."""

LARGEST_FILE = 256 << 20

DRAWN_AT_ONCE = 4_000_000
"""Figures that are in memory at a time."""

SAME = ("endpoint", "request")
"""What should be the same in both runs."""


class ComparisonError(Exception):
    """A report can't be compared. The text says why."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How one figure of one load differs."""

    load: str
    figure: str
    before: float
    after: float
    change: float
    """Relative: 0.1 is 10 % more."""
    low: float
    high: float
    """Interval of the change."""
    less_is_better: bool

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `same` (less than 1 % apart), or `no difference shown`."""
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return "no difference shown"
        if max(abs(self.low), abs(self.high)) < LEAST_CHANGE:
            return "same"
        if self.low <= 0 <= self.high:
            return "no difference shown"
        if abs(self.change) < LEAST_CHANGE:
            return "same"
        return "better" if (self.change < 0) == self.less_is_better else "worse"


def read_report(path: Path) -> dict[str, Any]:
    """Read a report of `--json`. Raises ComparisonError, OSError."""
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ComparisonError(f"{path}: larger than {LARGEST_FILE >> 20} MiB")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ComparisonError(f"{path}: no JSON. Write it by: bench URL --json > FILE") from None
    if not isinstance(value, dict) or not isinstance(value.get("loads"), list):
        raise ComparisonError(f"{path}: no report of `llama-gateway bench --json`")
    if value.get("format") != FORMAT:
        raise ComparisonError(
            f"{path}: has format {value.get('format')!r}, this program reads {FORMAT}"
        )
    return value


def compare(
    before: dict[str, Any], after: dict[str, Any], seed: int = 1
) -> tuple[list[Difference], list[str]]:
    """The differences of two reports, and notes about what makes them hard to compare.

    Raises ComparisonError where they have no load in common, or are broken.
    """
    notes = [
        f"The runs differ in `{name}`: {_differing(before.get(name), after.get(name))}."
        for name in SAME
        if before.get(name) != after.get(name)
    ]
    try:
        earlier, later = _by_label(before), _by_label(after)
        common = [label for label in earlier if label in later]
        if not common:
            raise ComparisonError(
                f"the runs have no load in common: {', '.join(earlier) or 'none'}; "
                f"{', '.join(later) or 'none'}"
            )
        differences = []
        for label in common:
            one, two = _Measured.of(earlier[label]), _Measured.of(later[label])
            fewest = min(len(one.completion), len(two.completion))
            if fewest < LEAST_REQUESTS:
                notes.append(
                    f"{label}: only {fewest} requests succeeded in one run, too few to compare."
                )
                continue
            differences += _differences(label, one, two, seed)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ComparisonError(f"a report is broken ({type(error).__name__}: {error})") from None
    return differences, notes


@dataclass(frozen=True, slots=True)
class _Measured:
    """The requests of a load."""

    ttft: NDArray[Any]
    inter_token: NDArray[Any]
    completion: NDArray[Any]
    tokens: NDArray[Any]
    under_way: float | None
    """Of a closed loop: requests at a time."""

    @classmethod
    def of(cls, load: dict[str, Any]) -> _Measured:
        import numpy as np

        samples, kind = load["samples"], load["load"]
        names = ("ttft", "inter_token", "completion", "tokens")
        ttft, inter_token, completion, tokens = (
            np.array(samples[name], dtype=float) for name in names
        )
        for column in (ttft, inter_token, completion, tokens):
            if column.ndim != 1 or not np.isfinite(column).all() or (column < 0).any():
                raise ValueError("samples must be finite numbers of at least 0")
        if len(completion) != len(tokens):
            raise ValueError("completion and tokens differ in length")
        level = float(kind["level"]) if kind["loop"] == "closed" else None
        return cls(ttft, inter_token, completion, tokens, level)


def _differences(label: str, one: _Measured, two: _Measured, seed: int) -> list[Difference]:
    import numpy as np

    def percentile(share: float) -> Callable[[NDArray[Any]], NDArray[Any]]:
        return lambda drawn: np.quantile(drawn, share, axis=-1)

    found = [
        _difference(label, f"{name} {shown}", values[0], values[1], percentile(share), seed)
        for name, values in (
            ("TTFT", (one.ttft, two.ttft)),
            ("inter-token", (one.inter_token, two.inter_token)),
            ("completion", (one.completion, two.completion)),
        )
        for shown, share in (("p50", 0.5), ("p95", 0.95))
        if min(len(values[0]), len(values[1])) >= LEAST_REQUESTS
    ]
    if one.under_way is not None and two.under_way is not None:
        levels = one.under_way, two.under_way
        found.append(
            _throughput(label, (one.tokens, one.completion), (two.tokens, two.completion),
                        levels, seed)
        )  # fmt: skip
    return found


def _difference(
    label: str,
    figure: str,
    one: NDArray[Any],
    two: NDArray[Any],
    statistic: Callable[[NDArray[Any]], NDArray[Any]],
    seed: int,
) -> Difference:
    import numpy as np

    rng = np.random.default_rng(seed)
    changes = []
    for draws in _portions(max(len(one), len(two))):
        drawn_before = statistic(one[rng.integers(len(one), size=(draws, len(one)))])
        drawn_after = statistic(two[rng.integers(len(two), size=(draws, len(two)))])
        changes.append(_change(drawn_before, drawn_after))
    before, after = float(statistic(one)), float(statistic(two))
    low, high = _interval(np.concatenate(changes))
    change = float(_change(np.array([before]), np.array([after]))[0])
    return Difference(label, figure, before, after, change, low, high, less_is_better=True)


def _throughput(
    label: str,
    one: tuple[NDArray[Any], NDArray[Any]],
    two: tuple[NDArray[Any], NDArray[Any]],
    levels: tuple[float, float],
    seed: int,
) -> Difference:
    """Tokens per second of all: by Little's law those under way times tokens by seconds of each."""
    import numpy as np

    rng = np.random.default_rng(seed)

    def drawn(values: tuple[NDArray[Any], NDArray[Any]], level: float, draws: int) -> NDArray[Any]:
        tokens, seconds = values
        chosen = rng.integers(len(tokens), size=(draws, len(tokens)))
        per: NDArray[Any] = np.maximum(seconds[chosen].sum(axis=1), 1e-9)
        rates: NDArray[Any] = level * tokens[chosen].sum(axis=1) / per
        return rates

    def whole(values: tuple[NDArray[Any], NDArray[Any]], level: float) -> float:
        return float(level * values[0].sum() / max(values[1].sum(), 1e-9))

    changes = [
        _change(drawn(one, levels[0], draws), drawn(two, levels[1], draws))
        for draws in _portions(max(len(one[0]), len(two[0])))
    ]
    before, after = whole(one, levels[0]), whole(two, levels[1])
    low, high = _interval(np.concatenate(changes))
    change = float(_change(np.array([before]), np.array([after]))[0])
    return Difference(
        label, "tokens/s of all", before, after, change, low, high, less_is_better=False
    )


def _change(before: NDArray[Any], after: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore"):
        change: NDArray[Any] = after / before - 1.0
    return change


def _interval(changes: NDArray[Any]) -> tuple[float, float]:
    import numpy as np

    finite = changes[np.isfinite(changes)]
    if not len(finite):
        return math.nan, math.nan
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(finite, [tail, 1 - tail])
    return float(low), float(high)


def _portions(size: int) -> list[int]:
    """Draws in portions that fit into memory."""
    at_once = max(1, min(DRAWS, DRAWN_AT_ONCE // size))
    return [min(at_once, DRAWS - done) for done in range(0, DRAWS, at_once)]


def _by_label(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {str(one["label"]): one for one in report["loads"]}


def _differing(one: object, two: object) -> str:
    if isinstance(one, dict) and isinstance(two, dict):
        names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        pairs = [f"{name} {one.get(name)!r} and {two.get(name)!r}" for name in names[:5]]
        return ", ".join(pairs)
    return f"{one!r} and {two!r}"
