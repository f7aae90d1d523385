"""Draws how soon requests are answered, from the table of docs/scheduling-results.md."""

from __future__ import annotations

import re

from tests.pictures.frame import MARGIN, WIDTH, box, document, text

LOAD = "capacity"
ROWS = (
    ("llama-gateway", "gateway, lengths unknown", "c0"),
    ("nginx", "nginx least_conn", "other"),
    ("HAProxy", "HAProxy leastconn, maxconn 2", "other"),
)  # A bar's name, its row in the table, and its look; the first is compared with the second
LEFT, RIGHT = 130, WIDTH - 190  # pixels between which the bars are
TOP, BAR, STEP = 70, 26, 36
STYLE = """\
.other { fill: var(--soft); fill-opacity: 0.55 }
.value { font-size: 15px; font-weight: 600 }"""


def answered(page: str, row: str) -> tuple[float, float]:
    """The mean seconds of a row of the table for a full fleet, and their ratio to nginx's."""
    table = page.partition(f"| load: {LOAD},")[2].partition("\n\n")[0]
    cells = re.search(rf"^\| {re.escape(row)} \| ([\d.]+) \(([\d.]+)", table, re.MULTILINE)
    assert cells, f"docs/scheduling-results.md has no row '{row}' for {LOAD}"
    return float(cells[1]), float(cells[2])


def picture(page: str) -> str:
    bars = [(name, *answered(page, row), look) for name, row, look in ROWS]
    across = (RIGHT - LEFT) / max(seconds for _, seconds, _, _ in bars)
    what = "Mean time from a request to the end of its answer, on a full fleet"
    body = [
        text(MARGIN, 30, f"Answered in {bars[0][2]:g} of the time behind nginx", "head"),
        text(MARGIN, 52, what, "soft"),
    ]
    for number, (name, seconds, _, look) in enumerate(bars):
        y = TOP + number * STEP
        width, middle = round(seconds * across, 1), y + BAR / 2 + 5
        body += [
            text(LEFT - 12, middle, name, "end"),
            box(LEFT, y, width, BAR, look, 'rx="3"'),
            text(LEFT + width + 10, middle, f"{seconds:g} s", "value"),
        ]
    low = TOP + len(bars) * STEP + 16
    about = "Six emulated CPU nodes of two speeds, returning conversations. Shorter is better."
    body.append(text(MARGIN, low, about, "soft"))
    title = "; ".join(f"{name}: {seconds:g} seconds" for name, seconds, _, _ in bars)
    return document(low + 18, f"Mean time to a whole answer. {title}", STYLE, body)
