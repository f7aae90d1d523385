from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.cli.batch_templates import LONGEST_TEMPLATE, TemplateError, parse_template


def test_fields_are_replaced_by_their_text_and_doubled_braces_are_braces() -> None:
    template = parse_template('Answer as {{"mail": ...}}: {mail} of {mail} and {who is it}')
    assert template.fields == ("mail", "who is it")
    filled = template.fill({"mail": "{who is it}", "who is it": "x"})
    assert filled == 'Answer as {"mail": ...}: {who is it} of {who is it} and x'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{text!r}", "a field is its name alone"),
        ("{text:>10}", "a field is its name alone"),
        ("{text:{width}}", "a field is its name alone"),
        ("{}", "'{}' without a name"),
        ("{ }", "'{}' without a name"),
        ("{text", "write {{ and }} for braces that are text"),
        ("text}", "write {{ and }} for braces that are text"),
        ("x" * (LONGEST_TEMPLATE + 1), "more than 1,048,576 characters"),
    ],
)
def test_what_is_no_plain_field_is_refused(text: str, told: str) -> None:
    with pytest.raises(TemplateError) as error:
        parse_template(text)
    assert told in str(error.value)


@pytest.mark.parametrize("name", ["text.__class__", "text[0]", "0", "text.real"])
def test_a_field_is_a_name_and_no_way_into_an_object(name: str) -> None:
    template = parse_template(f"{{{name}}}")
    with pytest.raises(TemplateError) as error:
        template.check(("text",))
    assert f"'{{{name}}}', but there is no such column: there is 'text'" in str(error.value)
    assert template.fill({name: "its own text"}) == "its own text"


@given(st.text())
def test_any_text_with_doubled_braces_is_itself(text: str) -> None:
    template = parse_template(text.replace("{", "{{").replace("}", "}}"))
    assert (template.fill({}), template.fields) == (text, ())
