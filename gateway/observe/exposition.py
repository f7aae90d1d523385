"""Prometheus' text format 0.0.4, written in steps, and histograms.

A page of 1,000 nodes has some 17,000 lines. Written at once they would hold the event loop, and so
every stream, for tens of milliseconds.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

CHARACTERS_OF_A_STEP = 32 << 10
"""Text that is written at once: about a millisecond."""

OTHER_LABEL = "other"
"""The label of what is counted together, since too many different values have come."""

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def labels(**values: str) -> str:
    """The labels of a sample, with escaped values: `{node="a",state="ready"}`."""
    return "{" + ",".join(f'{name}="{escape_label(value)}"' for name, value in values.items()) + "}"


def escape_label(value: str) -> str:
    """A label's escaped value, without quotes."""
    return value.translate(_ESCAPES)


def format_value(value: float) -> str:
    """A sample's value as text."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


class MetricsPage:
    """The text of one scrape, family by family.

    Samples are taken when they are written, perhaps after other work: an iterable that is given
    here must stay valid while the values in it change.
    """

    __slots__ = ("_parts", "_prefix")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._parts: list[Iterable[str]] = []

    def add_family(
        self, name: str, metric_type: str, help_text: str, samples: Iterable[tuple[str, float]]
    ) -> None:
        """Add a family; a sample is its labels with braces (or an empty text) and its value."""
        full = self._prefix + name
        self._parts.append([f"# HELP {full} {help_text}\n# TYPE {full} {metric_type}\n"])
        self._parts.append(f"{full}{braces} {format_value(value)}\n" for braces, value in samples)

    def add_histogram(
        self,
        name: str,
        help_text: str,
        histograms: Iterable[tuple[Mapping[str, str], Histogram]],
        *,
        prefix: str | None = None,
    ) -> None:
        """Add a family of histograms, each with its labels; `prefix` replaces the page's."""
        full = (self._prefix if prefix is None else prefix) + name
        self._parts.append([f"# HELP {full} {help_text}\n# TYPE {full} histogram\n"])
        self._parts.append(
            _histogram_text(full, labelled, histogram) for labelled, histogram in histograms
        )

    def steps(self) -> Iterator[str]:
        """The text in pieces, each written in about a millisecond."""
        step: list[str] = []
        length = 0
        for text in itertools.chain.from_iterable(self._parts):
            step.append(text)
            length += len(text)
            if length >= CHARACTERS_OF_A_STEP:
                yield "".join(step)
                step.clear()
                length = 0
        yield "".join(step)

    def render(self) -> str:
        """The whole text."""
        return "".join(self.steps())


class Histogram:
    """Counts values up to each bound; bounds are in ascending order."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = [float(bound) for bound in bounds]
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """One with these counts, as many as bounds and one more, and the sum of the values."""
        made = cls(bounds)
        made.counts, made.sum = list(counts), total
        return made

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def _histogram_text(name: str, labelled: Mapping[str, str], histogram: Histogram) -> str:
    """All lines of a histogram, as they are now: its buckets and its count agree."""
    braces = labels(**labelled) if labelled else ""
    inner = f"{braces[1:-1]}," if labelled else ""
    lines = []
    below = 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        below += count
        lines.append(f'{name}_bucket{{{inner}le="{bound!r}"}} {below}\n')
    total = below + histogram.counts[-1]
    lines.append(
        f'{name}_bucket{{{inner}le="+Inf"}} {total}\n'
        f"{name}_sum{braces} {histogram.sum!r}\n{name}_count{braces} {total}\n"
    )
    return "".join(lines)
