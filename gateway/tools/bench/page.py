"""The report as one page of HTML that needs nothing else: no script, no picture, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from gateway.tools.bench.report import (
    DEFINITIONS,
    BenchReport,
    milliseconds,
    remarks,
    table_columns,
    table_rows,
)

WIDTH, HEIGHT, MARGIN = 520, 260, 46
"""Of a drawing, in pixels."""

POINTS = 200
"""Of a curve, at most."""

COLOURS = ("#0b6e75", "#c2571a", "#4b4ba8", "#8a6d00", "#a3195b", "#3f7d20", "#555555", "#1d63b8")

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
thead th { border-bottom: 1px solid; }
figure { display: inline-block; margin: 0 1rem 1rem 0; }
svg text { fill: currentColor; font-size: 11px; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; }
"""


def render_page(report: BenchReport) -> str:
    """The page."""
    loads = [one.figures for one in report.loads]
    labels = [one.load.label for one in loads]
    request = ", ".join(f"{name} {value}" for name, value in report.request.items())
    client = ", ".join(f"{name} {value}" for name, value in report.client.items())
    facts = [
        ("Server", report.url),
        ("Model", report.server.model or "not named"),
        ("Slots", "not told" if report.server.slots is None else str(report.server.slots)),
        ("Endpoint", report.endpoint),
        ("Started", report.started_at),
        ("Requests", request),
        ("Load from", client),
    ]
    if report.baseline.ttft is not None:
        facts.append(("TTFT of a request alone", milliseconds(report.baseline.ttft)))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(report.title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{_text(report.title)}</h1>",
            _definitions(facts),
            "<h2>Results</h2>",
            _table(table_columns(report), table_rows(report)),
            "<ul>",
            *(f"<li>{_text(line)}</li>" for line in remarks(report)),
            "</ul>",
            "<h2>Distributions</h2>",
            _curves("TTFT, seconds", labels, [one.samples.ttft for one in loads]),
            _curves("Completion, seconds", labels, [one.samples.completion for one in loads]),
            _bars("Tokens/s, all requests", labels, [one.total_tokens_per_second for one in loads]),
            "<h2>What the figures mean</h2>",
            _definitions(DEFINITIONS),
            "</body></html>\n",
        ]
    )


def _text(value: str) -> str:
    return escape("".join(char if char.isprintable() else "\ufffd" for char in value))


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    lines = (f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in pairs)
    return f"<dl>{''.join(lines)}</dl>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | None]]) -> str:
    head = "".join(f'<th scope="col">{_text(one)}</th>' for one in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell or '-')}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _curves(title: str, labels: Sequence[str], series: Sequence[Sequence[float]]) -> str:
    """Share of the requests by seconds."""
    most = max((max(values) for values in series if values), default=0.0) or 1.0
    parts = [_axes(title, most)]
    for place, (label, values) in enumerate(zip(labels, series, strict=True)):
        if not values:
            continue
        ranked, colour = sorted(values), COLOURS[place % len(COLOURS)]
        steps = min(POINTS, len(ranked))
        points = []
        for step in range(1, steps + 1):
            value = ranked[-(-step * len(ranked) // steps) - 1]
            points.append(f"{_x(value / most):.1f},{_y(step / steps):.1f}")
        start = f"{_x(ranked[0] / most):.1f},{_y(0):.1f}"
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" '
            f'points="{start} {" ".join(points)}"><title>{_text(label)}</title></polyline>'
        )
        parts.append(_legend(place, label, colour))
    return _figure(title, parts)


def _bars(title: str, labels: Sequence[str], values: Sequence[float]) -> str:
    most = max(values, default=0.0) or 1.0
    parts = [f'<text x="{MARGIN}" y="14">{_text(title)}</text>']
    room = (WIDTH - MARGIN) / max(1, len(values))
    for place, (label, value) in enumerate(zip(labels, values, strict=True)):
        height = (HEIGHT - 2 * MARGIN) * value / most
        left, top = MARGIN + place * room, HEIGHT - MARGIN - height
        colour = COLOURS[place % len(COLOURS)]
        size = f'width="{room * 0.7:.1f}" height="{height:.1f}"'
        parts += [
            f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{colour}"/>',
            f'<text x="{left:.1f}" y="{top - 4:.1f}">{value:.4g}</text>',
            f'<text x="{left:.1f}" y="{HEIGHT - MARGIN + 16}">{_text(label)}</text>',
        ]
    return _figure(title, parts)


def _axes(title: str, most: float) -> str:
    lines = [f'<text x="{MARGIN}" y="14">{_text(title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        ends = f'x1="{_x(0):.1f}" x2="{_x(1):.1f}" y1="{_y(share):.1f}" y2="{_y(share):.1f}"'
        lines += [
            f'<line {ends} stroke="currentColor" stroke-opacity=".2"/>',
            f'<text x="4" y="{_y(share) + 4:.1f}">{share:.0%}</text>',
            f'<text x="{_x(share) - 8:.1f}" y="{HEIGHT - MARGIN + 16}">{share * most:.3g}</text>',
        ]
    return "".join(lines)


def _legend(place: int, label: str, colour: str) -> str:
    top = HEIGHT - MARGIN - 14 * (place + 1)
    return (
        f'<rect x="{WIDTH - 130}" y="{top}" width="10" height="10" fill="{colour}"/>'
        f'<text x="{WIDTH - 115}" y="{top + 9}">{_text(label)}</text>'
    )


def _figure(title: str, parts: Sequence[str]) -> str:
    return (
        f'<figure><svg role="img" aria-label="{_text(title)}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg></figure>'
    )


def _x(share: float) -> float:
    return MARGIN + share * (WIDTH - 2 * MARGIN)


def _y(share: float) -> float:
    return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)
