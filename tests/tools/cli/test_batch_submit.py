from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from gateway.tools.cli.batch_input import CHAT, PreparedInput, Problems
from gateway.tools.cli.batch_submit import InputOptions, create_fields, prepare, upload_name
from gateway.tools.cli.terminal import CommandFailed


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        ("in.jsonl", {"template": "{text}"}, "--template: JSON lines have their own bodies"),
        ("in.jsonl", {"model": "m"}, "--model: JSON lines have their own bodies"),
        ("in.csv", {}, "needs --template"),
        ("in.csv", {"template": "{a}", "template_file": Path("b")}, "needs --template"),
        ("in.csv", {"template_file": Path("missing")}, "--template-file missing: can't be read"),
        ("in.csv", {"template": "{a!r}"}, "--template: the template's '{a'"),
        ("in.csv", {"template": "{a}", "delimiter": "--"}, "must be one character"),
        (".", {"template": "{text}", "id_column": "a"}, "a folder has no columns"),
        (".", {"template": "{other}"}, "there is 'text', 'name'"),
        ("in.csv", {"template": "{a}", "endpoint": "/v1/audio"}, "prompts can be made for"),
    ],
)
def test_options_that_do_not_fit_are_wrong_usage(
    source: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(CommandFailed) as error:
        prepare(source, InputOptions(**options), Problems(20))
    assert (error.value.status, told in str(error.value)) == (2, True), str(error.value)


def test_a_template_of_a_file_and_columns_with_tabs(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("<{a}>")
    (tmp_path / "in.tsv").write_text("a\tb\n1,2\t3\n")
    chosen = InputOptions(template_file=tmp_path / "template")
    with prepare(str(tmp_path / "in.tsv"), chosen, Problems(20)).file as file:
        file.seek(0)
        assert b"<1,2>" in file.read()


def test_metadata_is_pairs() -> None:
    assert create_fields("2h", ["a=b=c", "d="]) == {
        "completion_window": "2h",
        "metadata": {"a": "b=c", "d": ""},
    }
    assert create_fields("2h", []) == {"completion_window": "2h"}
    for pairs in (["a"], ["=b"], ["a=b", "a=c"]):
        with pytest.raises(CommandFailed):
            create_fields("2h", pairs)


def test_an_upload_is_called_by_its_bytes() -> None:
    found = PreparedInput(io.BytesIO(), 'my "lines"\n', CHAT, sha256="0123456789abcdef0000")
    assert upload_name(found) == "my _lines__-0123456789abcdef.jsonl"
