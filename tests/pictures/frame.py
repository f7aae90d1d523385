"""What the pictures share: a frame that is readable on light pages and on dark ones.

Nothing in them is loaded from elsewhere, and nothing runs: colours follow the reader's system.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

WIDTH = 860  # about as wide as a page of GitHub shows its text
MARGIN = 18
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>{title}</title>
<style>
{style}
</style>
<rect class="panel" x="0.5" y="0.5" width="{inner_width}" height="{inner_height}" rx="9"/>
{body}
</svg>
"""  # noqa: E501 - attributes of one element
STYLE = """\
svg { --panel: #ffffff; --edge: #d1d9e0; --track: #eff2f5; --ink: #1f2328; --soft: #59636e; --bad: #cf222e;
--c0: #0969da; --c1: #bc4c00; --c2: #8250df; --c3: #1a7f37; --on: #ffffff }
@media (prefers-color-scheme: dark) {
svg { --panel: #0d1117; --edge: #3d444d; --track: #1c222a; --ink: #f0f6fc; --soft: #9198a1; --bad: #ff7b72;
--c0: #58a6ff; --c1: #f0883e; --c2: #bc8cff; --c3: #3fb950; --on: #0d1117 }
}
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink) }
.panel { fill: var(--panel); stroke: var(--edge) }
.head { font-size: 16px; font-weight: 600 }
.soft { fill: var(--soft) }
.on { font-size: 12px; fill: var(--on) }
.end { text-anchor: end }
.middle { text-anchor: middle }
.c0 { fill: var(--c0) } .c1 { fill: var(--c1) } .c2 { fill: var(--c2) } .c3 { fill: var(--c3) }"""  # noqa: E501 - a rule a line


def document(height: int, title: str, style: str, body: list[str]) -> str:
    """Return the whole picture; `title` is what a reader who can't see it is told."""
    return SVG.format(
        width=WIDTH,
        height=height,
        inner_width=WIDTH - 1,
        inner_height=height - 1,
        title=escape(title),
        style=f"{STYLE}\n{style}".rstrip("\n"),
        body="\n".join(body),
    )


def text(x: float, y: float, words: str, class_: str = "") -> str:
    """Return a line of text whose left end, or whose end by its class, is at x."""
    look = f' class="{class_}"' if class_ else ""
    return f'<text x="{x:g}" y="{y:g}"{look}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, class_: str, more: str = "") -> str:
    more = f" {more}" if more else ""
    return (
        f'<rect class="{class_}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{more}/>'
    )
