from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import fields
from gateway.config.errors import ConfigError, Problem
from gateway.config.listeners import ListenSettings
from tests.config.conftest import LoadNodes, Problems

ONE = "nodes:\n  - {{name: a, url: 'http://h:80', {}}}\n"


@pytest.mark.parametrize(("key", "value", "meant"), [("tier", "CPU", "cpu"), ("Slots", 2, "slots")])
def test_near_words_are_found_whatever_their_case(
    nodes_problems: Problems, key: str, value: object, meant: str
) -> None:
    (problem,) = nodes_problems(ONE.format(f"{key}: {value}"))
    assert f"did you mean {meant}?" in problem.remedy


def test_an_unknown_key_is_reported_with_the_nearest_and_all_known(
    nodes_problems: Problems,
) -> None:
    (problem,) = nodes_problems(ONE.format("slot: 2"))
    assert problem.message == "unknown key"
    assert "did you mean slots?" in problem.remedy
    assert "api_key_env, api_key_file, calibrate, context" in problem.remedy
    assert "api_key," not in problem.remedy


def test_variables_stand_for_numbers_booleans_and_texts(load_nodes: LoadNodes) -> None:
    (node,) = load_nodes(
        """
        nodes:
          - name: ${NUMBER}
            url: http://${HOST}:${PORT}
            slots: "${NUMBER}"
            model: {a: "${NUMBER}"}
            enabled: ${FLAG}
            context: ${MISSING:-}
            tier: ${MISSING:-gpu}
        """,
        NUMBER="42",
        HOST="h",
        PORT="80",
        FLAG="false",
    ).nodes
    assert (node.name, node.url, node.slots) == ("42", "http://h:80", 42)
    assert (node.models, node.enabled, node.context, node.tier) == ({"a": "42"}, False, None, "gpu")


def test_a_value_from_a_variable_is_never_shown(nodes_problems: Problems) -> None:
    problems = nodes_problems(
        "nodes: [{name: '${S}', url: '${S}', tier: '${S}', slots: '${S}', host: '${S}'}]",
        S="top/secret",
    )
    assert len(problems) == 5
    assert "secret" not in "\n".join(map(str, problems))


def test_all_problems_come_at_once_in_the_order_of_the_file(nodes_problems: Problems) -> None:
    problems = nodes_problems(
        """\
        nodes:
          - name: a
            url: ${URL}
            slot: 3
          - url: http://b
            tier: cpuu
          - name: a
            name: c
            url: nonsense
        node: []
        """
    )
    assert [(p.line, p.key) for p in problems] == [
        (3, "nodes[0].url"), (4, "nodes[0].slot"), (5, "nodes[1].name"), (6, "nodes[1].tier"),
        (7, "nodes[2].name"), (8, "nodes[2].name"), (9, "nodes[2].url"), (10, "node"),
    ]  # fmt: skip


def test_an_error_reads_as_file_line_key_message_remedy(
    load_nodes: LoadNodes, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_nodes("nodes:\n  - name: a\n    url: http://a/v1\n")
    assert str(caught.value) == (
        f"{tmp_path}/nodes.yaml:3: nodes[0].url: must not end in /v1 "
        "(leave /v1 out; the gateway adds it)"
    )


FILE = Path("config/nodes.yaml")


def test_a_problem_is_one_line_and_unknown_parts_are_left_out() -> None:
    problem = Problem(FILE, 3, "nodes[0].url", "is missing", "add it")
    assert str(problem) == "config/nodes.yaml:3: nodes[0].url: is missing (add it)"
    assert str(Problem(FILE, 0, "", "can't be read")) == "config/nodes.yaml: can't be read"
    assert str(Problem(FILE, 3, "", "bad", column=7)) == "config/nodes.yaml:3:7: bad"


@given(st.text(max_size=1000))
def test_nothing_in_a_file_can_break_the_line(text: str) -> None:
    shown = str(Problem(FILE, 1, text, "m", text))
    assert shown.isprintable()
    assert len(shown.splitlines()) == 1
    assert len(str(Problem(FILE, 1, "k" * 10_000, "m"))) < 500


def test_an_error_lists_its_problems_and_counts_the_rest() -> None:
    error = ConfigError(Problem(FILE, line, "k", "bad") for line in range(1, 61))
    lines = str(error).splitlines()
    assert len(error.problems) == 60
    assert lines[0] == "config/nodes.yaml:1: k: bad"
    assert lines[50:] == ["... and 10 more"]


@pytest.mark.parametrize("source", [OSError, TypeError, SyntaxError, "class KeySpec(", "\0"])
def test_a_key_has_no_description_where_the_source_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, source: type[Exception] | str
) -> None:
    """An upgrade may be writing the files, and some installations have none."""

    def getsource(_: object) -> str:
        if isinstance(source, str):
            return source
        raise source

    monkeypatch.setattr(inspect, "getsource", getsource)
    fields._docstrings.cache_clear()
    try:
        assert fields.description_of(ListenSettings, "port") == ""
    finally:
        fields._docstrings.cache_clear()
