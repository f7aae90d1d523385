"""Optional items in a row of a grammar or a pattern are counted without expanding anything."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.inbound.grammar_optionals import longest_row, longest_row_of_pattern
from tests.each_case import each_case

DOUBLED = "\n".join(f"r{i + 1} ::= r{i} r{i}" for i in range(2000))

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws # with "escapes"?
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@each_case(
    ("grammar", "count"),
    [
        ("", 0),
        ('root ::= "a" [b-z] . root2', 0),
        ("root ::= " + '"a"? ' * 7 + '"b"', 7),
        ("root ::= " + '"a"?' * 7, 7),
        ("root ::= " + '("a" | )' * 7, 7),
        ('x ::= "a" | ""\nroot ::= ' + "x " * 7, 7),
        ("root ::= " + "[a-z]* " * 7, 14),
        ("root ::= " + "[a-z]+ " * 7, 2),  # the rest of each ends before the next one
        ('root ::= ("a"?){7}', 7),
        ('root ::= ("a"?){0,7}', 7),
        ('root ::= ("a"?){7,}', 17),
        ('root ::= ("a"? "b"?){7}', 14),
        ('root ::= (("a"?){7}){9}', 63),
        ("root ::= [a-z]{0,2000}", 10),
        ("root ::= ([a-z]{0,10}){7}", 14),
        ('root ::= "a"? "b"? "c" "d"? "e"?', 2),
        ('root ::= ("c" "a"? "b"?) ("d"? "e"?)', 4),
        ('root ::= "a"? ("b" | "c"? "d"?) "e"?', 4),
        ('root ::= ("a" "b"? "c"?)? ("a" "b"? "c"?)?', 3),
        ("root ::= ([a-z] | [A-Z] | [0-9])? [a-z]?", 4),
        ('root ::= ("one" | "two" | "three" | "four" | "five")?', 2),
        ('root ::= "?*{9}" [?*{}] # ????\n', 0),
        ('root ::= "a"? # ( "b"?\n "c"?', 2),
        ('root ::=\n  "a"?\n  | "b"? (\n "c"? )', 2),
        ('ws ::= [ \\t] ws | ""\nroot ::= ws "a"', 2),
        (f'{DOUBLED}\nr0 ::= "a"?\nroot ::= r3 "b"', 10**9),
        ("a ::= b?\nb ::= a?", 2),
        (JSON, 9),
        ('root ::= ((("a"? "b"?', 2),
        ('"a"? "b"?', 0),
    ],
)
def test_the_longest_row_is_counted(grammar: str, count: int) -> None:
    assert longest_row(grammar) == count


def test_what_is_above_the_limit_is_not_counted_to_its_end() -> None:
    assert 100 < longest_row("root ::= " + '"a"? ' * 5000, 100) <= 110


@each_case(
    ("pattern", "count"),
    [
        ("", 0),
        ("^abc$", 0),
        ("^" + "a?" * 7 + "b$", 7),
        ("(?:a?){7}b", 7),
        (r"^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2})?$", 1),
        (r"^[^@\s]+@[^@\s]+\.[a-z]{2,}$", 2),
        (r"^[a-zA-Z0-9_-]{1,128}$", 5),
        (r"a*?b*?", 4),
        (r"\?\*[?*]{3}[]?]", 0),
        ("(a?b?", 2),
    ],
)
def test_the_longest_row_of_a_pattern_is_counted(pattern: str, count: int) -> None:
    assert longest_row_of_pattern(pattern) == count


_PARTS = st.sampled_from(
    ['"a"', '"', "[a-z]", "[", "(", ")", "|", "?", "*", "+", "{2}", "{0,99999999999}", "{,}",
     "{3,1}", "{", "\n", "#", "x", "y ::=", "x ::= ", "\\", " ", "<", ">", ".", "^", "(?:"]
)  # fmt: skip


@given(st.lists(_PARTS, max_size=60).map("".join) | st.text(max_size=60))
def test_any_text_is_counted(text: str) -> None:
    for enough in (5.0, float("inf")):
        assert longest_row(f"x ::= {text}", enough) >= 0
        assert longest_row_of_pattern(text, enough) >= 0


@each_case(
    "grammar",
    [
        "root ::= " + '"a"? "b" ' * 14_000, "root ::= " + '("a"?) "b" ' * 11_000,
        'root ::= "a"' + "{0,1}" * 25_000, "root ::= " + "x " * 65_000, 'x ::= "a"' + "? " * 65_000,
        "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(6_500)),
        "root ::= [" * 13_000, "root ::= " + "!<" * 60_000, "root ::= " + "{0" * 60_000,
        'root ::= "' + "\\" * 130_000,
    ],
)  # fmt: skip
def test_the_work_is_bounded(grammar: str) -> None:
    began = time.process_time()
    longest_row(grammar, 32)
    assert time.process_time() - began < 1  # 0.04 s on a quiet machine; 4 s if it were not linear
