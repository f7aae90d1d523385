"""Draws a recorded run: a lane for each slot, who waits beside it, a node that dies and comes back.

The picture is whole without its motion, which a reader's system may switch off: a cover moves off
it from left to right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tests.pictures.frame import MARGIN, WIDTH, box, document, text
from tests.pictures.recording import Life, Recording, Spell

LEFT, RIGHT = 84, WIDTH - MARGIN  # pixels between which time passes
TOP = 84  # where the first lane begins
LANE, LANE_STEP, NODE_GAP = 24, 27, 9
WAIT, WAIT_STEP = 9, 12
LETTER, SMALL_LETTER = 7.2, 6.6  # pixels that a letter of 13 and of 12 pixels takes at most
SWEEP, REST = 12, 9  # seconds of motion, and of standing still after it
TICK = 5  # seconds
HEAD = "A node dies in mid-sentence, and its streams go on elsewhere"
STYLE = """\
.track {{ fill: var(--track) }}
.wait {{ fill-opacity: 0.25; stroke-width: 1.2 }}
.s0 {{ stroke: var(--c0) }} .s1 {{ stroke: var(--c1) }} .s2 {{ stroke: var(--c2) }} .s3 {{ stroke: var(--c3) }}
.halo {{ stroke: var(--panel); stroke-width: 5; fill: none }}
.move {{ stroke: var(--ink); stroke-width: 2; fill: none }}
.dot {{ fill: var(--ink); stroke: var(--panel) }}
.grid {{ stroke: var(--edge); stroke-dasharray: 2 4 }}
.away {{ fill: url(#away) }}
.dash {{ stroke: var(--soft); stroke-width: 1.5 }}
.bad {{ fill: var(--bad); font-weight: 600 }}
.kill {{ stroke: var(--bad); stroke-width: 3; fill: none }}
.cover {{ fill: var(--panel) }}
.now {{ stroke: var(--soft) }}
.sweep {{ display: none }}
@media (prefers-reduced-motion: no-preference) {{
.sweep {{ display: inline; animation: sweep {period}s linear infinite }}
}}
@keyframes sweep {{ from {{ transform: translateX(0) }} {moved:.1f}%, to {{ transform: translateX({way}px) }} }}"""  # noqa: E501 - a rule a line
STRIPES = """\
<pattern id="r{n}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<rect class="c{n}" width="7" height="7" fill-opacity="0.18"/><rect class="c{n}" width="3" height="7"/></pattern>"""  # noqa: E501 - attributes of one element
AWAY = """\
<pattern id="away" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">\
<path class="dash" d="M0 0V6"/></pattern>"""  # noqa: E501 - attributes of one element


X = Callable[[float], float]  # where a moment is, in pixels


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a request's life in its lane; `y` is the lane's top, `number` the life's."""

    number: int
    begin: float
    end: float
    y: float
    spell: Spell | None  # none: it waits


def picture(run: Recording) -> str:
    heights = [slots * LANE_STEP + NODE_GAP for slots in run.slots.values()]
    *tops, queue_top = accumulate(heights, initial=float(TOP))
    starts, queue_top = dict(zip(run.slots, tops, strict=True)), queue_top + 2
    waits, depth = _waits(run, queue_top)
    bars = [*_slots(run, starts), *waits]
    bottom = queue_top + depth * WAIT_STEP + 4
    across = (RIGHT - LEFT) / run.seconds

    def x(at: float) -> float:
        return round(LEFT + at * across, 1)

    colour = {caller: number for number, caller in enumerate(run.callers)}
    lanes = [tops + n * LANE_STEP for node, tops in starts.items() for n in range(run.slots[node])]
    tracks = [box(LEFT, y, RIGHT - LEFT, LANE, "track", 'rx="3"') for y in lanes]
    plot = (LEFT, TOP - 4, RIGHT - LEFT, bottom - TOP + 6)
    stripes = "".join(STRIPES.format(n=number) for number in colour.values())
    body = [
        f'<defs>{stripes}{AWAY}<clipPath id="plot">{box(*plot, "")}</clipPath></defs>',
        text(MARGIN, 30, HEAD, "head"),
        *_legend(run.callers),
        *(
            text(MARGIN, y + run.slots[name] * LANE_STEP / 2 + 3, name)
            for name, y in starts.items()
        ),
        text(MARGIN, queue_top + WAIT, "queue"),
        *tracks,
        *_axis(run, bottom, x),
        *_away(run, starts, x),
        *(_bar(bar, run.lives[bar.number], colour, x) for bar in bars),
        *_moves(run, bars, x),
        *_kill(run, starts, x),
        '<g clip-path="url(#plot)"><g class="sweep">',
        box(*plot, "cover"),
        *tracks,
        f'<path class="now" d="M{LEFT} {TOP - 4}V{bottom:g}"/>',
        "</g></g>",
        *_words(run, bottom + 44),
    ]
    style = STYLE.format(
        period=SWEEP + REST, moved=100 * SWEEP / (SWEEP + REST), way=RIGHT - LEFT + 1
    )
    title = (
        f"What {sum(run.slots.values())} slots of {len(run.slots)} nodes do in {run.seconds:.0f} "
        f"seconds. {run.away.node} is killed; other nodes continue its streams, and requests wait "
        "in the gateway until a slot is free."
    )
    return document(round(bottom + 44 + 2 * 18 + 16), title, style, body)


def _slots(run: Recording, tops: dict[str, float]) -> Iterator[Bar]:
    """Yield what each slot did: a request takes the first lane of its node that is free."""
    spells = sorted(
        ((spell, number) for number, life in enumerate(run.lives) for spell in life.spells),
        key=lambda each: each[0].begin,
    )
    for node, slots in run.slots.items():
        free = [0.0] * slots
        for spell, number in spells:
            if spell.node == node:
                lane = min(range(slots), key=lambda one: (free[one] > spell.begin, one))
                free[lane] = spell.end
                y = tops[node] + lane * LANE_STEP
                yield Bar(number, spell.begin, spell.end, y, spell)


def _waits(run: Recording, top: float) -> tuple[list[Bar], int]:
    """Return who waited, each in the first lane that is free, and the number of lanes."""
    waits = sorted(
        (begin, end, number) for number, life in enumerate(run.lives) for begin, end in life.waits
    )
    bars: list[Bar] = []
    free: list[float] = []
    for begin, end, number in waits:
        lane = next((one for one, until in enumerate(free) if until <= begin), len(free))
        free[lane : lane + 1] = [end]
        bars.append(Bar(number, begin, end, top + lane * WAIT_STEP, None))
    return bars, len(free)


def _legend(callers: Sequence[str]) -> Iterator[str]:
    """Yield what the kinds of bars and the colours mean."""
    x = float(MARGIN)
    for words, y, height, class_, more in (
        ("reads the prompt", 46, 16, "", 'rx="3" fill="url(#r0)"'),
        ("writes", 46, 16, "c0", 'rx="3"'),
        ("waits in the gateway", 50, WAIT, "c0 s0 wait", 'rx="2"'),
    ):
        yield box(x, y, 26, height, class_, more)
        yield text(x + 33, 59, words)
        x += 33 + LETTER * len(words) + 14
    x = RIGHT - sum(LETTER * len(caller) + 30 for caller in callers)
    yield text(x - 8, 59, "callers:", "soft end")
    for number, caller in enumerate(callers):
        yield box(x, 47, 14, 14, f"c{number}", 'rx="7"')
        yield text(x + 20, 59, caller)
        x += LETTER * len(caller) + 32


def _axis(run: Recording, bottom: float, x: X) -> Iterator[str]:
    for second in range(0, int(run.seconds) + 1, TICK):
        yield f'<path class="grid" d="M{x(second):g} {TOP - 4}V{bottom:g}"/>'
        if x(second) < RIGHT - 30:
            yield text(x(second), bottom + 16, f"{second} s", "soft middle")


def _away(run: Recording, tops: dict[str, float], x: X) -> Iterator[str]:
    begin, end = x(run.away.begin), x(run.away.end)
    for lane in range(run.slots[run.away.node]):
        y = tops[run.away.node] + lane * LANE_STEP
        yield box(begin, y, round(end - begin, 1), LANE, "away", 'rx="3"')


def _bar(bar: Bar, life: Life, colour: dict[str, int], x: X) -> str:
    n, begin, end = colour[life.caller], x(bar.begin), x(bar.end)
    if bar.spell is None:
        width = round(max(1.5, end - begin), 1)
        return box(begin, bar.y, width, WAIT, f"c{n} s{n} wait", 'rx="2"')
    writing = end if bar.spell.writing is None else x(bar.spell.writing)
    parts = [box(begin, bar.y, round(writing - begin, 1), LANE, "", f'rx="3" fill="url(#r{n})"')]
    if bar.spell.writing is not None:
        parts.append(box(writing, bar.y, round(end - writing, 1), LANE, f"c{n}", 'rx="3"'))
        goes_on = life.was_moved and bar.spell is life.spells[-1]
        words = [f"{life.caller} goes on", "goes on"] if goes_on else [life.caller]
        room = (end - writing - 8) / SMALL_LETTER
        if fits := [one for one in words if len(one) <= room]:
            parts.append(text(writing + 6, bar.y + LANE / 2 + 4.5, fits[0], "on"))
    return "".join(parts)


def _moves(run: Recording, bars: Sequence[Bar], x: X) -> Iterator[str]:
    """Yield a line from each part of a stream's life that moved to the next one."""
    kills = 0
    for number, life in enumerate(run.lives):
        if not life.was_moved:
            continue
        own = sorted((bar for bar in bars if bar.number == number), key=lambda bar: bar.begin)
        first = next(bar for bar in own if bar.spell is not None)
        for before, after in pairwise(own[own.index(first) :]):
            at = x(after.begin) + (4 * kills if before is first else 0)
            height = [WAIT if bar.spell is None else LANE for bar in (before, after)]
            y = [bar.y + tall / 2 for bar, tall in zip((before, after), height, strict=True)]
            path = f"M{at:g} {y[0]:g}V{y[1]:g}"
            yield f'<path class="halo" d="{path}"/><path class="move" d="{path}"/>' + "".join(
                f'<circle class="dot" cx="{at:g}" cy="{one:g}" r="4"/>' for one in y
            )
        kills += 1


def _kill(run: Recording, tops: dict[str, float], x: X) -> Iterator[str]:
    away, top = run.away, tops[run.away.node]
    at, low = x(away.begin), top + run.slots[away.node] * LANE_STEP - (LANE_STEP - LANE)
    yield f'<path class="kill" d="M{at:g} {top - 3:g}V{low + 3:g}"/>'
    slots = [spell for life in run.lives for spell in life.spells if spell.node == away.node]
    ends = [spell.end for spell in slots if spell.begin < away.begin]
    killed, again = x(max([away.begin, *ends])) + 12, x(away.end) - 12
    for words, y, left in (
        ("killed", top, killed),
        ("started again", top + LANE_STEP, again - SMALL_LETTER * len("started again")),
    ):
        middle, class_ = y + LANE / 2, "bad" if left == killed else ""
        yield box(left - 5, middle - 9, SMALL_LETTER * len(words) + 8, 18, "cover", 'rx="3"')
        yield text(left, middle + 4.5, words, class_)


def _words(run: Recording, y: float) -> Iterator[str]:
    """Yield what the run shows, in words that its figures bear out."""
    streams = [life for life in run.lives if life.was_moved]
    gaps = [life.spells[1].begin - life.spells[0].end for life in streams]
    went = [f"one after {gap:.0f} s in the queue" if gap > 0.5 else "one at once" for gap in gaps]
    same = " The streams that moved have the text of an undisturbed run." if run.same_text else ""
    whole = sum(life.outcome == "whole" for life in run.lives)
    killed = f"{run.away.node} is killed at {run.away.begin:.0f} s, amid {len(streams)} streams."
    servers = f"{len(run.slots)} llama.cpp servers with two slots each"
    lines = (
        f"{killed} Other nodes continue them, {', '.join(sorted(went, reverse=True))}.",
        f"Each client sees one stream.{same}",
        f"A real run of {run.date}: {servers}, {len(run.lives)} requests, {whole} whole answers.",
    )
    for number, line in enumerate(lines):
        yield text(MARGIN, y + 18 * number, line, "soft" if number == 2 else "")
