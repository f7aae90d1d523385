"""Results of batches as files: what is in them, and what is never overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.cli.batch_results import (
    LONGEST_FILE_NAME,
    custom_id_of,
    error_of,
    file_name_of,
    places_for,
    stem_of,
    text_of,
    write_whole,
)
from gateway.tools.cli.options import Form
from gateway.tools.cli.terminal import CommandFailed


def answered(body: object, status: int = 200) -> dict[str, Any]:
    return {"custom_id": "a", "response": {"status_code": status, "body": body}, "error": None}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"choices": [{"message": {"content": "chat"}}]}, "chat"),
        ({"choices": [{"message": {"content": None}}]}, ""),
        ({"choices": [{"text": "completion"}]}, "completion"),
        ({"choices": []}, ""),
        (
            {
                "output": [
                    {"type": "reasoning", "content": [{"text": "hm"}]},
                    {"type": "message", "content": [{"text": "two "}, {"text": "parts"}]},
                ]
            },
            "two parts",
        ),
        ({"content": [{"type": "text", "text": "message"}]}, "message"),
        ({"data": [{"embedding": [1.5, 2]}]}, "[1.5, 2]"),
        ({"data": [{"embedding": [1]}, {"embedding": [2]}]}, "[[1], [2]]"),
        ("no object", ""),
    ],
)
def test_the_text_of_each_api(body: object, text: str) -> None:
    assert text_of(answered(body)) == text
    assert error_of(answered(body)) == ""


def test_why_a_line_has_no_result() -> None:
    refused = answered({"error": {"code": "model_not_found", "message": "No such."}}, 404)
    assert (text_of(refused), error_of(refused)) == ("", "model_not_found: No such.")
    assert error_of(answered("?", 502)) == "status 502"
    never_run = {"custom_id": None, "response": None, "error": {"code": "broken", "line": 7}}
    assert (error_of(never_run), custom_id_of(never_run)) == ("broken", "line 7")


def test_where_results_go() -> None:
    lines = places_for(stem_of("in/lines.jsonl"), Form.JSONL, None, force=False)
    assert (str(lines.output), str(lines.errors)) == ("in/lines.out.jsonl", "in/lines.errors.jsonl")
    named = places_for("x", Form.JSONL, Path("to/done.jsonl"), force=False)
    assert str(named.errors) == "to/done.errors.jsonl"
    assert places_for(stem_of("a.csv"), Form.CSV, None, force=False).output == Path("a.out.csv")
    assert places_for("a", Form.FOLDER, None, force=False).output == Path("a.out")
    with pytest.raises(CommandFailed):
        places_for("a", Form.FOLDER, Path("-"), force=False)


@given(st.text(), st.text())
def test_each_custom_id_has_a_file_name_of_its_own_within_the_folder(one: str, two: str) -> None:
    names = [file_name_of(one), file_name_of(two)]
    for name in names:
        assert len(name.encode()) <= LONGEST_FILE_NAME + 4
        assert not name.startswith(".")
        assert not {"/", "\0"} & set(name)
    if one.removesuffix(".txt") != two.removesuffix(".txt"):
        assert names[0] != names[1]


def test_names_that_would_be_the_same_are_told_apart() -> None:
    assert file_name_of("a") == file_name_of("a.txt") == "a.txt"
    assert file_name_of("a.txt", is_taken=True) != "a.txt"
    assert file_name_of("../../etc/passwd") == "%2E.%2F..%2Fetc%2Fpasswd.txt"


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
