"""Files of batches: what is told of inputs, the lines that they become, and results."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli import batch_files
from gateway.cli.batch_files import (
    LONGEST_FILE_NAME,
    LONGEST_TEMPLATE,
    PreparedInput,
    Problems,
    file_name_of,
    parse_template,
    prepare,
    result_rows,
    text_of,
    write_whole,
)
from gateway.cli.options import InputFlags
from gateway.cli.terminal import CommandFailed
from tests.each_case import each_case


def read(found: PreparedInput) -> list[dict[str, Any]]:
    found.file.seek(0)
    return [json.loads(line) for line in found.file]


def made(path: Path, template: str, problems: Problems | None = None, **options: Any) -> Any:
    return prepare(str(path), InputFlags(template=template, **options), problems or Problems(20))


def test_broken_rows_are_told_by_the_line_where_they_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.csv"
    file.write_text("id,text\na,one\nb\n,three\na,four\nc,five\n")
    problems = Problems(20)
    with made(file, "{text}", problems, id_column="id") as found:
        lines = read(found)
    assert [line["custom_id"] for line in lines] == ["a", "c"]
    shown = capsys.readouterr().err
    assert "line 3: has 1 columns, and the header 2" in shown
    assert "line 4: the column 'id' is empty" in shown
    assert "line 5 ('a'): An earlier line has the same custom_id" in shown


@each_case(
    ("content", "told"),
    [
        (b"", "its first line must name the columns"),
        (b"a,b\n1,2\n", "line 1: the template names '{text}'"),
        (b"text\n\xff\n", "is not UTF-8"),
        (b'text\n"never ends\n', "line 2: unexpected end of data"),
        (b"text\n" + b"x" * 5000, "line 1: is longer than 1,000 characters"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, told: str
) -> None:
    monkeypatch.setattr(batch_files, "LONGEST_LINE", 1000)
    file = tmp_path / "in.csv"
    file.write_bytes(content)
    with pytest.raises(CommandFailed) as error, made(file, "{text}"):
        pass
    assert (error.value.status, told in str(error.value)) == (2, True), str(error.value)


def test_only_regular_texts_of_a_folder_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "large.txt").write_text("x" * 101)
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "link").symlink_to("a.txt")
    (tmp_path / "below").mkdir()
    os.mkfifo(tmp_path / "pipe")
    strict = Problems(20)
    with made(tmp_path, "{text}", strict, largest_text=100, strict=True) as found:
        assert (found.lines, found.skipped, strict.count) == (2, 0, 5)
    with made(tmp_path, "{text}", largest_text=100) as found:
        assert found.skipped == 5
        assert [line["custom_id"] for line in read(found)] == ["a.txt", "b.txt"]
    shown = capsys.readouterr().err
    for name, told in (
        ("large.txt", "is larger than 100 bytes"), ("binary", "is no text"),
        ("link", "can't be read"),
        ("below", "is no regular file"), ("pipe", "is no regular file"),
    ):  # fmt: skip
        assert f"{name}: skipped: {told}" in shown


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        ("in.jsonl", {"template": "{text}"}, "--template: JSON lines have their own bodies"),
        ("in.csv", {}, "needs --template"),
        ("in.csv", {"template": "{a}", "template_file": Path("b")}, "needs --template"),
        ("in.csv", {"template_file": Path("missing")}, "--template-file missing: can't be read"),
        ("in.csv", {"template": "{a!r}"}, "--template: the template has '{a'"),
        ("in.csv", {"template": "{a}", "delimiter": "--"}, "must be one character"),
        (".", {"template": "{text}", "id_column": "a"}, "a folder has no columns"),
        ("ids.csv", {"template": "{text}", "endpoint": "/v1/messages"}, "--max-tokens"),
        ("ids.csv", {"template": "{text}", "endpoint": "/v1/embeddings", "max_tokens": 5}, "--max"),
        ("pipe", {}, "is no regular file"),
        ("missing", {}, "can't be read"),
        ("ids.csv", {"template": "x" * (LONGEST_TEMPLATE + 1)}, "more than 1,048,576 characters"),
    ],
)
def test_options_that_do_not_fit_are_wrong_usage(
    source: str, options: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("ids.csv").write_text("id,text\na,b\n")
    with (
        pytest.raises(CommandFailed) as error,
        prepare(source, InputFlags(**options), Problems(20)),
    ):
        pass
    assert (error.value.status in {1, 2}, told in str(error.value)) == (True, True), error


# Templates.


def test_fields_are_replaced_by_their_text_and_doubled_braces_are_braces() -> None:
    template = parse_template('Answer as {{"mail": ...}}: {mail} of {mail} and {who is it}')
    filled = template.fill({"mail": "{who is it}", "who is it": "x"})
    assert filled == 'Answer as {"mail": ...}: {who is it} of {who is it} and x'


@each_case("text", ["{text!r}", "{text:>10}", "{text:{width}}", "{}", "{ }", "{text", "text}"])
def test_what_is_no_plain_field_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a field is its name alone|for braces that are text"):
        parse_template(text)


@each_case("name", ["text.__class__", "text[0]", "0"])
def test_a_field_is_a_name_and_no_way_into_an_object(name: str) -> None:
    template = parse_template(f"{{{name}}}")
    with pytest.raises(CommandFailed, match="but there is no such column: there is 'text'"):
        template.check(("text",), "--template", "column")
    assert template.fill({name: "its own text"}) == "its own text"


@given(st.text())
def test_any_text_with_doubled_braces_is_itself(text: str) -> None:
    template = parse_template(text.replace("{", "{{").replace("}", "}}"))
    assert template.fill({}) == text


# Results.


REASONING = {"type": "reasoning", "content": [{"text": "hm"}]}
MESSAGE = {"type": "message", "content": [{"text": "two "}, {"text": "parts"}]}


def answered(body: object) -> dict[str, Any]:
    return {"custom_id": "a", "response": {"status_code": 200, "body": body}, "error": None}


@each_case(
    ("body", "text"),
    [
        ({"choices": [{"message": {"content": None}}]}, ""),
        ({"choices": [{"text": "completion"}]}, "completion"),
        ({"output": [REASONING, MESSAGE]}, "two parts"),
        ({"content": [{"type": "text", "text": "message"}]}, "message"),
        ({"data": [{"embedding": [1]}, {"embedding": [2]}]}, "[[1], [2]]"),
        ("no object", ""),
    ],
)
def test_the_text_of_each_api(body: object, text: str) -> None:
    assert text_of(answered(body)) == text


@pytest.mark.parametrize(
    "text", ["=1+1", "  @SUM(A1)", "\uff1dHYPERLINK()", "one\r=1+1", "one\r\ntwo", "\r"]
)
def test_what_a_model_writes_is_one_cell_that_no_spreadsheet_runs(text: str) -> None:
    body = {"choices": [{"message": {"content": text}}]}
    output = io.BytesIO(json.dumps(answered(body)).encode())
    written = "".join(result_rows(output, io.BytesIO(), None))
    (head, row) = csv.reader(io.StringIO(written, newline=""))
    assert (head, row[0], row[2]) == (["custom_id", "text", "error"], "a", "")
    assert row[1].removeprefix("'") == text
    assert (row[1] != text) is not text.startswith("one")
    # Readers end a row at a carriage return, too, unless it is quoted.
    assert "\r" not in re.sub('"[^"]*"', "", written)


@given(st.text(), st.text())
def test_each_custom_id_has_a_file_name_of_its_own_within_the_folder(one: str, two: str) -> None:
    names = [file_name_of(one), file_name_of(two)]
    for name in names:
        assert len(name.encode()) <= LONGEST_FILE_NAME + 4
        assert not name.startswith(".")
        assert not {"/", "\0"} & set(name)
    if one.removesuffix(".txt") != two.removesuffix(".txt"):
        assert names[0] != names[1]
    assert file_name_of("../../etc/passwd") == "%2E.%2F..%2Fetc%2Fpasswd.txt"
    assert file_name_of("a.txt", is_taken=True) != file_name_of("a.txt") == "a.txt"


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "out"

    def fail() -> Iterator[bytes]:
        yield b"some"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(place, fail(), force=False)
    assert list(tmp_path.iterdir()) == []
    write_whole(place, [b"one"], force=False)
    with pytest.raises(CommandFailed, match="is there already"):
        write_whole(place, [b"two"], force=False)
    assert place.read_bytes() == b"one"
    write_whole(place, [b"two"], force=True)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("out", b"two")]
