"""Optional items in a row of a grammar or a pattern are counted without expanding anything."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.inbound.request_limits import longest_row, longest_row_of_pattern
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
        ('root ::= "a"? # "b"?\r "c"?', 2),
        ("root ::= " + "[a-z]{0#,9}\n,#\r1} " * 7, 7),
        ('root ::= "x? y? z? \\', 0),
        ("root ::= [x? y? z? \\", 0),
        ("root ::= " + " ".join(f'("field{n}=" [a-z]+ ",")?' for n in range(40)) + '"end"', 10),
        ("root ::= " + '("the" [a-z])? ' * 40, 40),
        ("root ::= " + r'("\x61\x62" [a-z])? ' * 40, 40),
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
        (r"a?[x?y?z?" + "\\", 1),
        (r"^[a-zA-Z0-9._%+-]+@([a-zA-Z0-9-]+\.)+[a-zA-Z]{2,}$", 2),
        (r"^((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)$", 3),
        (r"^P(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+(\.\d+)?S)?)?$", 5),
    ],
)
def test_the_longest_row_of_a_pattern_is_counted(pattern: str, count: int) -> None:
    assert longest_row_of_pattern(pattern) == count


@each_case(
    "rules",
    [
        "a ::= [a-z ] a? a? a?",
        "a ::= [a-z ] a{0,3}",
        "a ::= [a-z ] (a a?)*",
        "a ::= [a-z ] a+ | [a-z ]",
        "a ::= [a-z ] a a a | [a-z ] a a | [a-z ] a | [a-z ]",
        "a ::= [a-z ] b b b b b b b b\nb ::= a |",
        "a ::= [a-z ] b b b\nb ::= [a-z ] a?",
        "a ::= [a-z ] b b\nb ::= a a |",
        'a ::= [a-z ] a? a? "!" a? a?',
        "a ::= [a-z ] a? a? ws\nws ::= [ ]*",
    ],
)
def test_references_of_a_rule_to_itself_in_a_row_are_above_all_limits(rules: str) -> None:
    for grammar in (rules, f'root ::= a "."\n{rules}', "\n".join(rules.split("\n")[::-1])):
        assert longest_row(grammar) == 10**9


ARITHMETIC = r"""
root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "-" term | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
"""

C = r"""
root ::= (declaration)*
declaration ::= type identifier "(" parameter? ")" "{" statement* "}"
type ::= "int" ws | "float" ws | "char" ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= type identifier
statement ::= ( type identifier ws "=" ws expression ";" ) |
    ( identifier ws "=" ws expression ";" ) |
    ( identifier ws "(" arguments? ")" ";" ) | ( "return" ws expression ";" ) |
    ( "while" "(" condition ")" "{" statement* "}" ) |
    ( "if" "(" condition ")" "{" statement* "}" ("else" "{" statement* "}")? )
condition ::= expression ("==" | "!=" | "<=" | "<") expression
expression ::= term (("+" | "-") term)*
term ::= factor (("*" | "/") factor)*
factor ::= identifier | number | "-" factor | identifier "(" arguments? ")" |
    "(" ws expression ws ")"
arguments ::= expression ("," ws expression)*
number ::= [0-9]+
ws ::= ([ \t\n]+)
"""

CHESS = r"""
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""

ENGLISH = r"""
root ::= en-char+ ([ \t\n] en-char+)*
en-char ::= letter | digit | punctuation
letter ::= [a-zA-Z]
digit ::= [0-9]
punctuation ::= [!"'(),-./:;?]
"""

INLINE = r"""
root ::= (text | bold | slanted)*
text ::= [a-z ]+
bold ::= "*" root "*"
slanted ::= "_" root "_"
"""

JAPANESE = r"""
root ::= jp-char+ ([ \t\n] jp-char+)*
jp-char ::= hiragana | katakana | punctuation | cjk
hiragana ::= [ぁ-ゟ]
katakana ::= [ァ-ヿ]
punctuation ::= [、-〾]
cjk ::= [一-鿿]
"""


@each_case(
    "grammar",
    [
        ARITHMETIC, C, CHESS, ENGLISH, INLINE, JAPANESE,
        "root ::= [a-z ] root? root?",
        'root ::= "(" root{0,9} ")" | [a-z]',
        'root ::= "(" ws item+ ")" ws\nitem ::= root | [a-z]+ ws\nws ::= [ ]*',
        'root ::= "<" [a-z]+ ">" (root | [^<]+)* "</" [a-z]+ ">"',
    ],
)  # fmt: skip
def test_grammars_of_every_day_count_little(grammar: str) -> None:
    upside_down = "\n".join(grammar.replace("|\n", "|").split("\n")[::-1])
    assert max(longest_row(grammar), longest_row(upside_down)) <= 12


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
        'root ::= "' + "\\" * 130_000, "root ::= " + '"\\' * 65_533, "root ::= " + "[\\" * 65_533,
        "root ::= " + "{#\r" * 43_000, "root ::= x " + '("a" | ) "b" ' * 9_000,
        "\n".join(f"r{i} ::= r{(i + 1) % 5_000} r{(i + 1) % 5_000}" for i in range(5_000)),
    ],
)  # fmt: skip
def test_the_work_is_bounded(grammar: str) -> None:
    began = time.process_time()
    longest_row(grammar, 32)
    assert time.process_time() - began < 1  # 0.04 s on a quiet machine; 4 s if it were not linear


@pytest.mark.slow
def test_no_pair_of_fragments_takes_long() -> None:
    for pair in itertools.product(['"', "[", "\\", "(", "{", "#", "!<", "x ", "?", "\r"], repeat=2):
        grammar = "".join(pair) * ((128 << 10) // len("".join(pair)))
        began = time.process_time()
        longest_row(f"root ::= {grammar}", 32)
        longest_row(f"root ::= {grammar}\\", 32)
        longest_row_of_pattern(grammar[: 16 << 10] + "\\", 32)
        assert time.process_time() - began < 2, pair  # 0.1 s on a quiet machine
