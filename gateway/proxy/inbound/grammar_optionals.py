"""How many optional items a node keeps in mind at once for a grammar, or for a schema's pattern.

llama.cpp follows every way through a grammar at once, for each token of its vocabulary. Where
optional items follow each other, each is such a way, and each next letter of a token leads from it
into all the later ones: a row of 32 `[a-z ]?` takes the demo model up to half a second for one
token, a row of 64 more than 20 s, and all slots stand still meanwhile. What can't be left out ends
the row: 1,000 optional items with a letter after each 50th cost nothing. docs/security.md has the
measurements. So the longest row is counted, through parentheses, repeats and rules:

| item | counts |
| --- | --- |
| `x?`, `(x | )` | 1, or half of what `x` ends with; of alternatives each, a text a quarter |
| `x*`, `x{m,}`, a rule that may be empty and names itself | 2 |
| `("text" x)?`, of four letters or more | a quarter of that |
| `x{m,n}` | (n - m) ^ 0.3; if `x` itself may be empty, n times what `x` counts |

A rule that names itself may double the ways with each letter: where it does so three times in a
row, or twice before something else, that is above all limits.

Nothing is expanded, so the work is proportional to the grammar's length: 128 KiB take 40 ms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

ENDLESS = 10
"""Copies of `x` that cost as much as `x*`."""

COPIES_EXPONENT = 0.3
"""Measured in rows of `[a-z ]{0,n}`, with n from 1 to 100: so many fewer of them cost a second."""

_GBNF = re.compile(
    r"""\s+|\#[^\r\n]*
    |(?P<operator>[?*+](?:\s*+[?*+])*+|\{(?:[\s\d,]|\#[^\r\n]*+)*+\})
    |(?P<bracket>[()|])
    |(?P<empty>"")
    |(?P<text>"(?:[^"\\]|\\.)*+(?:"|\\?\Z))
    |(?P<item>\[(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)|!?<[^<>]*+>|\.)
    |(?P<rule>[A-Za-z0-9_-]+)(?:\s*+(?P<definition>::=))?
    |.""",
    re.VERBOSE | re.DOTALL,
)

_REGEX = re.compile(
    r"""(?P<operator>[?*+]++|\{[\s\d,]*\}\??)
    |(?P<bracket>\((?:\?[:=!])?|[)|])
    |(?P<item>\[\^?\]?(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)|\\[A-Za-z]|\.)
    |(?P<text>\\.|[^\^$])
    |.""",
    re.VERBOSE | re.DOTALL,
)

_COMMENT = re.compile(r"#[^\r\n]*")

_COUNTS = re.compile(r"\{\s*(\d{0,9})\d*\s*(,?)\s*(\d{0,9})")

_Tokens = list[tuple[str, str]]
"""Kinds, by the groups of the pattern, and texts."""


_Shape = tuple[bool, float, float, float, float, float]
"""A part of a grammar: whether it may be empty; its optional items in a row: all of them if it may,
at its start, at its end, the longest row; the ways into it, which it counts once it is optional.

Plain tuples: named ones would double the time."""

_END, _LONGEST, _WAYS = 3, 4, 5

_ITEM: _Shape = (False, 0.0, 0.0, 0.0, 0.0, 1.0)

_TEXT: _Shape = (False, 0.0, 0.0, 0.0, 0.0, 0.25)
"""Few tokens begin like a certain text: four such ways cost no more than one."""

_LONG_TEXT: _Shape = (False, 0.0, 0.0, 0.0, 0.0, 0.24)
"""Hardly a token has it twice: optional parts that begin with it cost what this figure says."""

LONG_TEXT = len('"four"')
"""128 of `("a" [a-z ])?` take 10 s, of `("then" [a-z ])?` 0.06 s, of `("aaaa" [a-z ])?` 0.05 s."""

_NOTHING: _Shape = (True, 0.0, 0.0, 0.0, 0.0, 0.0)

_OPTIONAL: _Shape = (True, 1.0, 1.0, 1.0, 1.0, 1.0)

_REFERENCE = _OPTIONAL
"""To a rule that may be empty or end with such a one: the next may begin at any letter."""

_CLOSED: _Shape = (False, 0.0, 0.4, 0.0, 0.4, 1.0)
"""Of one that ends with something else."""

_BETWEEN: _Shape = (False, 0.0, 0.4, 0.0, 0.4, 1e-6)
"""Anything else: it ends a row, and makes two references before it too many: more than 2.1."""

_PLENTY = 1e9
"""No figure gets higher: rules that name each other twice would soon pass the largest float."""


def longest_row(grammar: str, enough: float = math.inf) -> int:
    """Optional items in a row of a GBNF grammar. One above `enough` is not counted to its end."""
    rules: dict[str, _Tokens] = {}
    tokens: _Tokens = []
    for token in _GBNF.finditer(grammar):
        kind = token.lastgroup
        if kind == "definition":
            tokens = rules[token["rule"]] = []
        elif kind is not None:
            tokens.append((kind, token[0]))
    shapes: dict[str, _Shape] = {}
    longest = 0.0
    for cycle, recursive in _in_order(rules):
        for name in cycle:
            shape = _shape_of(rules[name], shapes, enough)
            if name in recursive and shape[0]:
                shape = (True, *(2.0 * figure for figure in shape[1:]))  # type: ignore[assignment]
            shapes[name] = shape = _bounded(shape)
            longest = max(longest, shape[_LONGEST])
        if cycle[-1] in recursive and _doubles(cycle, rules, shapes):
            longest = _PLENTY
        if longest > enough:
            break
    return math.ceil(longest)


def longest_row_of_pattern(pattern: str, enough: float = math.inf) -> int:
    """As `longest_row`, of a regular expression, which llama.cpp makes a grammar of."""
    tokens = [(token.lastgroup, token[0]) for token in _REGEX.finditer(pattern) if token.lastgroup]
    return math.ceil(min(_shape_of(tokens, {}, enough)[_LONGEST], _PLENTY))


def _in_order(rules: dict[str, _Tokens]) -> Iterator[tuple[list[str], set[str]]]:
    """The rules, each after those that it names, those that name each other together.

    With them, those that name themselves, if only by the ones before.
    """
    reached: dict[str, int] = {}
    lowest: dict[str, int] = {}
    ended: dict[str, int] = {}
    known: set[str] = set()
    recursive: set[str] = set()
    waiting: list[str] = []
    for root in ("root", *rules):  # as a node, from the root
        path = [root] if root in rules and root not in reached else []
        left = {root: iter(rules.get(root, ()))}
        while path:
            name = path[-1]
            if name not in reached:
                reached[name] = lowest[name] = len(reached)
                waiting.append(name)
            for kind, named in left[name]:
                if kind != "rule" or named not in rules:
                    continue
                if named not in reached:
                    path.append(named)
                    left[named] = iter(rules[named])
                    break
                if named not in ended:
                    recursive.add(named)
                if named not in known:
                    lowest[name] = min(lowest[name], lowest[named])
            else:
                path.pop()
                ended[name] = len(ended)
                if path:
                    lowest[path[-1]] = min(lowest[path[-1]], lowest[name])
                if lowest[name] == reached[name]:
                    cycle = [waiting.pop()]
                    while cycle[-1] != name:
                        cycle.append(waiting.pop())
                    known.update(cycle)
                    yield sorted(cycle, key=ended.__getitem__), recursive


def _doubles(cycle: list[str], rules: dict[str, _Tokens], shapes: dict[str, _Shape]) -> bool:
    """Whether each letter may double the ways: as in `a ::= [a-z] a? a? a?`.

    References to rules of the cycle are counted, and whether anything comes after them: the ways
    double where a letter may be in either of two, and for each something else is left to come.
    Letters are not compared, so that alternatives are not: `a ::= [a-z] a "x" | [a-z] a "y"`.
    """
    known = dict.fromkeys(cycle, _REFERENCE)
    others = {True: (True, *_BETWEEN[1:]), False: _BETWEEN}
    for name in cycle:
        for kind, text in rules[name]:
            if kind == "rule" and text not in known:
                known[text] = others[shapes.get(text, _ITEM)[0]]
    longest = 0.0
    for _ in range(3):  # until those that end with something else are found, or nearly all
        longest, before = 0.0, known.copy()
        for name in cycle:
            shape = _shape_of(rules[name], known, math.inf, references=True)
            count = max(1.0, min(shape[1], 3.0)) if shape[0] else 1.0
            is_open = shape[0] or shape[_END] >= 0.5
            known[name] = (True, count, count, count, count, count) if is_open else _CLOSED
            longest = max(longest, shape[_LONGEST])
        if known == before:
            break
    return longest > 2.1


def _with_operator_on_references(shape: _Shape, operator: str) -> _Shape:
    """`a?` is one reference, `a*` one and a half: it is harmless before something else (0.4)."""
    least, most = _copies(operator)
    empty, through, start, end, longest, ways = shape
    through = min(through, 3.0) if empty else 0.0
    whole = _repeated((empty, through, start, end, longest, ways), least, least)
    if most is not None and most <= least:
        return whole
    copies = 1.5 if most is None else float(most - least) if through >= 0.5 else 1.0
    count = max(through, min(ways, 1.0)) * copies
    inside = longest if through >= 0.5 or most == least + 1 else max(longest, end + start)
    return _joined(
        whole,
        (True, count, max(count, start), max(count, end), max(count, inside), count),
    )


def _shape_of(
    tokens: _Tokens, rules: dict[str, _Shape], enough: float, *, references: bool = False
) -> _Shape:
    """The shape of these alternatives; a rule that is not known yet counts as an item.

    `references`: of references to rules of a cycle alone.
    """
    with_operator = _with_operator_on_references if references else _with_operator
    item, short_text, long_text = (_BETWEEN,) * 3 if references else (_ITEM, _TEXT, _LONG_TEXT)
    outer: list[tuple[list[_Shape], _Shape]] = []
    alternatives: list[_Shape] = []
    before = last = _NOTHING
    for kind, text in tokens:
        if kind == "operator":
            last = with_operator(last, text)
            continue
        if last is not _NOTHING:
            before = _joined(before, last)
            if before[_LONGEST] > enough:
                return before
        last = _NOTHING
        if kind == "item":
            last = item
        elif kind == "text":
            last = short_text if len(text) < LONG_TEXT or "\\" in text else long_text
        elif kind == "rule":
            last = rules.get(text, item)
        elif text == "|":
            alternatives.append(before)
            before = _NOTHING
        elif text == ")":
            last = _either([*alternatives, before], with_operator)
            alternatives, before = outer.pop() if outer else ([], _NOTHING)
        elif kind == "bracket":
            outer.append((alternatives, before))
            alternatives, before = [], _NOTHING
    whole = _either([*alternatives, _joined(before, last)], with_operator)
    for alternatives, before in reversed(outer):  # some are never closed
        whole = _either([*alternatives, _joined(before, whole)], with_operator)
    return whole


def _bounded(shape: _Shape) -> _Shape:
    empty, *figures = shape
    return (empty, *(min(figure, _PLENTY) for figure in figures))  # type: ignore[return-value]


def _joined(one: _Shape, two: _Shape) -> _Shape:
    """One behind the other."""
    empty, through, start, end, longest, ways = one
    empty2, through2, start2, end2, longest2, ways2 = two
    return (
        empty and empty2,
        through + through2,
        max(start, through + start2) if empty else start,
        max(end2, through2 + end) if empty2 else end2,
        max(longest, longest2, end + start2),
        ways + ways2 if empty else ways,
    )


def _either(shapes: list[_Shape], with_operator: Callable[[_Shape, str], _Shape]) -> _Shape:
    """Alternatives."""
    if len(shapes) == 1:
        return shapes[0]
    some = [shape for shape in shapes if shape[_WAYS]]
    if not some:
        return _NOTHING
    empty, through, start, end, longest, _ = map(max, zip(*some, strict=True))
    whole = (bool(empty), through, start, end, longest, sum(shape[_WAYS] for shape in some))
    return whole if len(some) == len(shapes) else with_operator(whole, "?")


def _with_operator(shape: _Shape, operator: str) -> _Shape:
    if operator == "?" and (shape is _ITEM or shape is _TEXT or shape is _LONG_TEXT):
        return _OPTIONAL  # nearly always
    return _repeated(shape, *_copies(operator))


def _copies(operator: str) -> tuple[int, int | None]:
    """The least and the most that it asks for; None: any number."""
    counts = _COUNTS.match(_COMMENT.sub("", operator))
    if counts is None:
        kinds = set(operator) & {"?", "*", "+"}
        return int(kinds == {"+"}), 1 if kinds == {"?"} else None
    least = int(counts[1] or 0)
    most = int(counts[3]) if counts[3] else None if counts[2] else least
    return least, most


def _repeated(shape: _Shape, least: int, most: int | None) -> _Shape:
    """From `least` to `most` copies; None: any number."""
    empty, through, start, end, longest, ways = _bounded(shape)
    copies = ENDLESS if most is None else max(0, most - least)
    whole = _NOTHING
    if least:
        again = through * (least - 1)
        whole = (
            empty,
            through * least,
            start + again,
            end + again,
            max(longest, end + through * (least - 2) + start) if least > 1 else longest,
            ways * least if empty else ways,
        )
    if copies:
        # The copies are nested, so only their number of ways is kept in mind.
        led = 0.0 < ways <= _LONG_TEXT[_WAYS]
        count = (ways if led else max(1.0, ways)) * (copies if empty else copies**COPIES_EXPONENT)
        count = max(count, end / 2)
        inside = max(longest, end + start if copies > 1 else 0.0)
        optional = (True, count, count, max(count, end), max(inside, count), count)
        whole = _joined(whole, optional)
    return whole
