"""Inputs of `batch submit`: what is told of them, and the lines that they become."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.tools.cli import batch_input
from gateway.tools.cli.batch_input import (
    CHAT,
    FolderOptions,
    PreparedInput,
    Problems,
    RequestShape,
    TableOptions,
    kind_of,
    prepare_folder,
    prepare_lines,
    prepare_table,
)
from gateway.tools.cli.batch_options import InputKind
from gateway.tools.cli.batch_templates import parse_template
from gateway.tools.cli.terminal import CommandFailed


def read(found: PreparedInput) -> list[dict[str, Any]]:
    with found.file as file:
        file.seek(0)
        return [json.loads(line) for line in file]


def table(path: Path, template: str, problems: Problems | None = None, **options: Any) -> Any:
    chosen = TableOptions(parse_template(template), RequestShape(CHAT), **options)
    return prepare_table(str(path), chosen, problems or Problems(20))


def folder(path: Path, problems: Problems | None = None, **options: Any) -> PreparedInput:
    chosen = FolderOptions(parse_template("{text}"), RequestShape(CHAT), **options)
    return prepare_folder(str(path), chosen, problems or Problems(20))


def test_the_form_is_told_by_the_name(tmp_path: Path) -> None:
    assert kind_of(str(tmp_path), None) is InputKind.FOLDER
    assert kind_of("a.CSV", None) is kind_of("a.tsv", None) is InputKind.CSV
    assert kind_of("a.txt", None) is kind_of("-", None) is InputKind.JSONL
    assert kind_of("-", InputKind.CSV) is InputKind.CSV


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        (
            RequestShape(CHAT, "m", "be brief", 5),
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": "hi"},
                ],
                "max_tokens": 5,
            },
        ),
        (RequestShape("/v1/completions", max_tokens=5), {"prompt": "hi", "max_tokens": 5}),
        (
            RequestShape("/v1/responses", "m", "be brief", 5),
            {"model": "m", "input": "hi", "instructions": "be brief", "max_output_tokens": 5},
        ),
        (
            RequestShape("/v1/messages", "m", "be brief", 5),
            {
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "system": "be brief",
                "max_tokens": 5,
            },
        ),
        (RequestShape("/v1/embeddings", "m"), {"model": "m", "input": "hi"}),
    ],
    ids=lambda value: value.endpoint if isinstance(value, RequestShape) else "",
)
def test_each_endpoint_has_its_own_body(shape: RequestShape, body: dict[str, Any]) -> None:
    shape.check()
    assert shape.body("hi") == body


@pytest.mark.parametrize(
    "shape",
    [
        RequestShape("/v1/moderations"),
        RequestShape("/v1/messages"),
        RequestShape("/v1/embeddings", max_tokens=5),
        RequestShape("/v1/completions", system="be brief"),
    ],
)
def test_what_an_endpoint_cannot_have_is_refused(shape: RequestShape) -> None:
    with pytest.raises(CommandFailed) as error:
        shape.check()
    assert error.value.status == 2


def test_the_endpoint_of_lines_is_that_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    one = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}
    file.write_text("no json\n" + json.dumps(one))
    problems = Problems(20)
    found = prepare_lines(str(file), None, problems)
    found.file.close()
    assert (found.endpoint, found.lines, problems.count) == ("/v1/embeddings", 1, 1)
    assert (found.size, found.stem) == (file.stat().st_size, "in")


def test_problems_beyond_the_most_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    problems = Problems(2)
    for number in range(5):
        problems.add(f"line {number}", "broken")
    assert problems.count == 5
    shown = capsys.readouterr().err
    assert ("line 1: broken" in shown, "line 2" in shown, "--check" in shown) == (True, False, True)


def test_rows_without_an_id_column_are_numbered(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text('﻿text\none\n\n"two\nlines"\n')
    lines = read(table(file, "<{text}>"))
    assert [line["custom_id"] for line in lines] == ["row-1", "row-2"]
    assert lines[1]["body"]["messages"][0]["content"] == "<two\nlines>"


def test_broken_rows_are_told_by_the_line_where_they_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.csv"
    file.write_text("id,text\na,one\nb\n,three\na,four\nc,five\n")
    problems = Problems(20)
    lines = read(table(file, "{text}", problems, id_column="id"))
    assert [line["custom_id"] for line in lines] == ["a", "c"]
    shown = capsys.readouterr().err
    assert "line 3: has 1 columns, and the header 2" in shown
    assert "line 4: the column 'id' is empty" in shown
    assert "line 5 ('a'): An earlier line has the same custom_id" in shown


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "its first line must name the columns"),
        (b"a,a\n1,2\n", "two columns are called 'a'"),
        (b"a,b\n1,2\n", "line 1: the template names '{text}'"),
        (b"text\n\xff\n", "is not UTF-8"),
        (b'text\n"never ends\n', "line 2: unexpected end of data"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "in.csv"
    file.write_bytes(content)
    with pytest.raises(CommandFailed) as error:
        table(file, "{text}")
    assert (error.value.status, told in str(error.value)) == (2, True), str(error.value)


def test_an_endless_line_of_a_table_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_input, "LONGEST_LINE", 1000)
    file = tmp_path / "in.csv"
    file.write_text("text\n" + "x" * 5000 + "\n")
    with pytest.raises(CommandFailed, match=r"line 1: is longer than 1,000 characters"):
        table(file, "{text}")


def test_an_unknown_id_column_is_told_with_those_there_are(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("id,text\na,b\n")
    with pytest.raises(CommandFailed, match=r"there is 'id', 'text'"):
        table(file, "{text}", id_column="name")


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
    found = folder(tmp_path, largest=100)
    assert found.skipped == 5
    assert [line["custom_id"] for line in read(found)] == ["a.txt", "b.txt"]
    shown = capsys.readouterr().err
    for told in (
        "large.txt: skipped: is larger than 100 bytes", "binary: skipped: is no text",
        "link: skipped: is a link", "below: skipped: is a folder",
        "pipe: skipped: is no regular file",
    ):  # fmt: skip
        assert told in shown


def test_a_strict_folder_has_a_problem_for_each_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "below").mkdir()
    problems = Problems(20)
    found = folder(tmp_path, problems, strict=True)
    found.file.close()
    assert (found.lines, found.skipped, problems.count) == (1, 0, 1)


def test_a_pipe_or_a_missing_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, told in (("pipe", "is no regular file"), ("missing", "can't be read")):
        with pytest.raises(CommandFailed, match=told):
            prepare_lines(str(tmp_path / name), None, Problems(20))
