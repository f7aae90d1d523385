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
| `x{m,n}` | (n - m) ^ 0.3; if `x` itself may be empty, n times what `x` counts |

Nothing is expanded, so the work is proportional to the grammar's length: 128 KiB take 40 ms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

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

_LONGEST, _WAYS = 4, 5

_ITEM: _Shape = (False, 0.0, 0.0, 0.0, 0.0, 1.0)

_TEXT: _Shape = (False, 0.0, 0.0, 0.0, 0.0, 0.25)
"""Few tokens begin like a certain text: four such ways cost no more than one."""

_NOTHING: _Shape = (True, 0.0, 0.0, 0.0, 0.0, 0.0)

_OPTIONAL: _Shape = (True, 1.0, 1.0, 1.0, 1.0, 1.0)

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
    for name, is_recursive in _in_order(rules):
        shape = _shape_of(rules[name], shapes, enough)
        if is_recursive and shape[0]:
            shape = (True, *(2.0 * figure for figure in shape[1:]))  # type: ignore[assignment]
        shapes[name] = shape = _bounded(shape)
        longest = max(longest, shape[_LONGEST])
        if longest > enough:
            break
    return math.ceil(longest)


def longest_row_of_pattern(pattern: str, enough: float = math.inf) -> int:
    """As `longest_row`, of a regular expression, which llama.cpp makes a grammar of."""
    tokens = [(token.lastgroup, token[0]) for token in _REGEX.finditer(pattern) if token.lastgroup]
    return math.ceil(min(_shape_of(tokens, {}, enough)[_LONGEST], _PLENTY))


def _in_order(rules: dict[str, _Tokens]) -> Iterator[tuple[str, bool]]:
    """The rules, each after those that it names, and whether it names itself, if only by them."""
    begun: set[str] = set()
    ended: set[str] = set()
    recursive: set[str] = set()
    for root, tokens in rules.items():
        path = [root] if root not in begun else []
        left = {root: iter(tokens)}
        begun.add(root)
        while path:
            name = path[-1]
            for kind, named in left[name]:
                if kind != "rule" or named not in rules:
                    continue
                if named not in begun:
                    begun.add(named)
                    path.append(named)
                    left[named] = iter(rules[named])
                    break
                if named not in ended:
                    recursive.add(named)
            else:
                path.pop()
                ended.add(name)
                yield name, name in recursive


def _shape_of(tokens: _Tokens, rules: dict[str, _Shape], enough: float) -> _Shape:
    """The shape of these alternatives; a rule that is not known yet counts as an item."""
    outer: list[tuple[list[_Shape], _Shape]] = []
    alternatives: list[_Shape] = []
    before = last = _NOTHING
    for kind, text in tokens:
        if kind == "operator":
            last = _with_operator(last, text)
            continue
        if last is not _NOTHING:
            before = _joined(before, last)
            if before[_LONGEST] > enough:
                return before
        last = _NOTHING
        if kind == "item":
            last = _ITEM
        elif kind == "text":
            last = _TEXT
        elif kind == "rule":
            last = rules.get(text, _ITEM)
        elif text == "|":
            alternatives.append(before)
            before = _NOTHING
        elif text == ")":
            last = _either([*alternatives, before])
            alternatives, before = outer.pop() if outer else ([], _NOTHING)
        elif kind == "bracket":
            outer.append((alternatives, before))
            alternatives, before = [], _NOTHING
    whole = _either([*alternatives, _joined(before, last)])
    for alternatives, before in reversed(outer):  # some are never closed
        whole = _either([*alternatives, _joined(before, whole)])
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


def _either(shapes: list[_Shape]) -> _Shape:
    """Alternatives."""
    if len(shapes) == 1:
        return shapes[0]
    some = [shape for shape in shapes if shape[_WAYS]]
    if not some:
        return _NOTHING
    empty, through, start, end, longest, _ = map(max, zip(*some, strict=True))
    whole = (bool(empty), through, start, end, longest, sum(shape[_WAYS] for shape in some))
    return whole if len(some) == len(shapes) else _repeated(whole, 0, 1)


def _with_operator(shape: _Shape, operator: str) -> _Shape:
    if operator == "?" and (shape is _ITEM or shape is _TEXT):
        return _OPTIONAL  # nearly always
    counts = _COUNTS.match(_COMMENT.sub("", operator))
    if counts is None:
        kinds = set(operator) & {"?", "*", "+"}
        return _repeated(shape, int(kinds == {"+"}), 1 if kinds == {"?"} else None)
    least = int(counts[1] or 0)
    most = int(counts[3]) if counts[3] else None if counts[2] else least
    return _repeated(shape, least, most)


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
        count = max(1.0, ways) * (copies if empty else copies**COPIES_EXPONENT)
        count = max(count, end / 2)
        inside = max(longest, end + start if copies > 1 else 0.0)
        optional = (True, count, count, max(count, end), max(inside, count), count)
        whole = _joined(whole, optional)
    return whole
