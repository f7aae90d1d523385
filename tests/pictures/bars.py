"""Draws how soon requests are answered, from the table of docs/scheduling-results.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.pictures.frame import MARGIN, WIDTH, box, document, text

LOAD = "capacity"
ROWS = (
    ("llama-gateway", "gateway, lengths unknown", "c0"),
    ("nginx", "nginx least_conn", "other"),
    ("HAProxy", "HAProxy leastconn, maxconn 2", "other"),
)
"""A bar's name, its row in the table, and its look; the first is compared with the second."""
LEFT, RIGHT = 130, WIDTH - 190  # pixels between which the bars are
TOP, BAR, STEP = 70, 26, 36
STYLE = """\
.other { fill: var(--soft); fill-opacity: 0.55 }
.value { font-size: 15px; font-weight: 600 }"""


@dataclass(frozen=True, slots=True)
class Answered:
    """How soon requests were answered behind a front."""

    name: str
    seconds: float
    ratio: float
    """To nginx's, as the table has it."""
    look: str


def answered(page: str) -> list[Answered]:
    """Return the means of the table for a full fleet, in the order of the bars."""
    _, _, part = page.partition(f"| load: {LOAD},")
    table = part.partition("\n\n")[0]
    found = []
    for name, row, look in ROWS:
        cells = re.search(rf"^\| {re.escape(row)} \| ([\d.]+) \(([\d.]+)", table, re.MULTILINE)
        assert cells, f"docs/scheduling-results.md has no row '{row}' for {LOAD}"
        found.append(Answered(name, float(cells[1]), float(cells[2]), look))
    return found


def picture(page: str) -> str:
    """Return the bars as an SVG; `page` is the text of docs/scheduling-results.md."""
    bars = answered(page)
    ratio = bars[0].ratio
    across = (RIGHT - LEFT) / max(bar.seconds for bar in bars)
    what = "Mean time from a request to the end of its answer, on a full fleet"
    body = [
        text(MARGIN, 30, f"Answered in {ratio:g} of the time behind nginx", "head"),
        text(MARGIN, 52, what, "soft"),
    ]
    for number, bar in enumerate(bars):
        y = TOP + number * STEP
        width = round(bar.seconds * across, 1)
        body += [
            text(LEFT - 12, y + BAR / 2 + 5, bar.name, "end"),
            box(LEFT, y, width, BAR, bar.look, 'rx="3"'),
            text(LEFT + width + 10, y + BAR / 2 + 5, f"{bar.seconds:g} s", "value"),
        ]
    low = TOP + len(bars) * STEP + 16
    about = "Six emulated CPU nodes of two speeds, returning conversations. Shorter is better."
    body.append(text(MARGIN, low, about, "soft"))
    title = "; ".join(f"{bar.name}: {bar.seconds:g} seconds" for bar in bars)
    return document(low + 18, f"Mean time to a whole answer. {title}", STYLE, body)
