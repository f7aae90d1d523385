"""Draws README's picture of how soon requests are answered: `python -m tests.bars_picture`.

Its figures are those of docs/scheduling-results.md; a test says when they are not. Nothing in it is
loaded from elsewhere, and nothing runs: its colours follow the reader's system, light or dark.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS, PICTURE = DOCS / "scheduling-results.md", DOCS / "images" / "answered-sooner.svg"

LOAD = "capacity"
ROWS = (
    ("llama-gateway", "gateway, lengths unknown", "own"),
    ("nginx", "nginx least_conn", "other"),
    ("HAProxy", "HAProxy leastconn, maxconn 2", "other"),
)  # A bar's name, its row in the table, and its look; the first is compared with the second
LEFT, RIGHT = 130, 670  # pixels between which the bars are
TOP, BAR, STEP = 70, 26, 36
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 212" width="860" height="212" role="img">
<title>Mean time to a whole answer. {title}</title>
<style>
svg {{ --panel: #ffffff; --edge: #d1d9e0; --ink: #1f2328; --soft: #59636e; --own: #0969da }}
@media (prefers-color-scheme: dark) {{
svg {{ --panel: #0d1117; --edge: #3d444d; --ink: #f0f6fc; --soft: #9198a1; --own: #58a6ff }}
}}
text {{ font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink) }}
.panel {{ fill: var(--panel); stroke: var(--edge) }}
.head {{ font-size: 16px; font-weight: 600 }}
.soft {{ fill: var(--soft) }}
.end {{ text-anchor: end }}
.own {{ fill: var(--own) }}
.other {{ fill: var(--soft); fill-opacity: 0.55 }}
.value {{ font-size: 15px; font-weight: 600 }}
</style>
<rect class="panel" x="0.5" y="0.5" width="859" height="211" rx="9"/>
<text x="18" y="30" class="head">Answered in {ratio:g} of the time behind nginx</text>
<text x="18" y="52" class="soft">Mean time from a request to the end of its answer, on a full fleet</text>
{bars}
<text x="18" y="194" class="soft">Six emulated CPU nodes of two speeds, returning conversations. Shorter is better.</text>
</svg>
"""  # noqa: E501 - a rule and an element a line


def answered(page: str, row: str) -> tuple[float, float]:
    """The mean seconds of a row of the table for a full fleet, and their ratio to nginx's."""
    table = page.partition(f"| load: {LOAD},")[2].partition("\n\n")[0]
    cells = re.search(rf"^\| {re.escape(row)} \| ([\d.]+) \(([\d.]+)", table, re.MULTILINE)
    assert cells, f"docs/scheduling-results.md has no row '{row}' for {LOAD}"
    return float(cells[1]), float(cells[2])


def picture(page: str) -> str:
    found = [(name, *answered(page, row), look) for name, row, look in ROWS]
    most = max(seconds for _, seconds, _, _ in found)
    bars = []
    for number, (name, seconds, _, look) in enumerate(found):
        y, width = TOP + number * STEP, round((RIGHT - LEFT) * seconds / most, 1)
        middle, end = y + BAR / 2 + 5, LEFT + width + 10
        bars.append(
            f'<text x="118" y="{middle:g}" class="end">{name}</text>\n'
            f'<rect class="{look}" x="{LEFT}" y="{y}" width="{width:g}" height="{BAR}" rx="3"/>\n'
            f'<text x="{end:g}" y="{middle:g}" class="value">{seconds:g} s</text>'
        )
    title = "; ".join(f"{name}: {seconds:g} seconds" for name, seconds, _, _ in found)
    return SVG.format(title=title, ratio=found[0][2], bars="\n".join(bars))


if __name__ == "__main__":
    PICTURE.write_text(picture(RESULTS.read_text()))
