from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.app.startup import Options, check_startup
from gateway.config.errors import Problem
from tests.each_case import each_case

Check = Callable[[str, str], tuple[Problem, ...]]

FLEET = """\
defaults:
  memory: 64GiB
nodes:
  - {name: a0, url: http://a:1, preload: small}
  - {name: a1, url: http://a:2}
  - {name: b, url: http://b, memory: 16GiB, model: [small, big]}
  - {name: swap, url: http://c, kind: openai, models_on_demand: true}
  - {name: cloud, url: http://d, kind: openai}
  - {name: own, url: http://e, models_on_demand: false}
  - {name: off, url: http://f, enabled: false}
"""


@pytest.fixture
def check(tmp_path: Path) -> Check:
    def problems(nodes: str, settings: str) -> tuple[Problem, ...]:
        (tmp_path / "nodes.yaml").write_text(textwrap.dedent(nodes))
        (tmp_path / "gateway.yaml").write_text(textwrap.dedent(settings))
        options = Options(
            inventory_file=tmp_path / "nodes.yaml", settings_file=tmp_path / "gateway.yaml"
        )
        return check_startup(options).problems

    return problems


def test_what_fits_is_no_problem(check: Check) -> None:
    assert check(FLEET, "{}") == ()
    fitting = """
    models:
      big: {replicas: {min: 1, max: 2}, pin: [a0, swap, ], memory: 60GiB}
      small: {replicas: {min: 5, max: 7}, memory: 1GiB}
      night: {pin: off, memory: 64GiB}
      qwen-14b: {replicas: {min: 0, max: 2}, pin: [b], idle_unload: 30m}
    """
    assert check(FLEET.replace("model: [small, big]", "calibrate: false"), fitting) == ()
    assert check("nodes: []", "models: {a: {pin: [x], replicas: {min: 3}, memory: 1TiB}}") == ()
    nodes = "\n".join(
        f"  - {{name: n{number}, url: 'http://h{number // 2}:{8000 + number}', memory: 64GiB}}"
        for number in range(1000)
    )
    models = "\n".join(
        f"  m{number}: {{memory: 9GiB, pin: [n{number}], replicas: {{min: 2}}}}"
        for number in range(100)
    )
    began = time.thread_time()
    assert check(f"nodes:\n{nodes}\n", f"models:\n{models}\n") == ()
    assert time.thread_time() - began < 20  # Reading takes most of it.


@each_case(
    ("rule", "key", "words", "remedy"),
    [
        ("pin: [a0, swab]", "pin[1]", "of the inventory is named swab", "did you mean swap?"),
        ("pin: c", "pin", "no node of the inventory is named c", "own"),
        ("pin: [b]", "pin[0]", "the node b has no huge", "small, big"),
        ("pin: [cloud]", "pin[0]", "the node cloud is told to load nothing", "models_on_demand"),
        ("pin: [own]", "pin[0]", "the node own is told to load nothing", "models_on_demand"),
        ("replicas: {min: 5}", "replicas.min", "is 5, but 4 nodes can hold huge", "lower it"),
        ("memory: 65GiB", "memory", "is 65GiB, and no host that may hold huge has more", ""),
        (
            *("memory: 33GiB, replicas: {min: 4}", "replicas.min"),
            *("is 4, but 3 nodes can hold huge", "and have the memory"),
        ),
    ],
)
def test_what_can_not_be_is_reported_with_line_and_remedy(
    check: Check, rule: str, key: str, words: str, remedy: str
) -> None:
    text = f"# two\nmodels:\n  small: {{}}\n  huge: {{{rule}}}\n"
    (problem,) = check(FLEET, text)
    assert problem.file.name == "gateway.yaml"
    assert (problem.line, problem.key) == (4, f"models.huge.{key}")
    assert words in problem.message
    assert remedy in problem.remedy


def test_preloads_and_pins_beyond_the_most_replicas_are_refused(check: Check) -> None:
    (problem,) = check(FLEET, "models:\n  small: {replicas: {max: 1}, pin: [a1]}\n")
    assert problem.key == "models.small.replicas.max"
    assert "is 1, but 2 nodes always hold small" in problem.message


def test_a_host_is_refused_that_can_not_hold_what_must_always_be_there(check: Check) -> None:
    settings = """
    models:
      small: {memory: 8GiB}
      big: {memory: 30GiB, pin: [a0, a1]}
    """
    (problem,) = check(FLEET, settings)
    assert (problem.file.name, problem.line, problem.key) == ("nodes.yaml", 4, "nodes[0]")
    assert problem.message == (
        "a has 64GiB, and always to be loaded there are big (60GiB), small (8GiB): 68GiB in all"
    )
    assert check(FLEET, settings.replace("8GiB", "4GiB")) == ()
    # What is not known counts nothing.
    assert check(FLEET, settings.replace("{memory: 8GiB}", "{}")) == ()


def test_two_memories_of_one_host_are_reported(check: Check) -> None:
    nodes = """\
    defaults:
      memory: 64GiB
    nodes:
      - {name: a0, url: http://a:1}
      - name: a1
        url: http://10.0.0.1
        host: a
        memory: 32GiB
      - {name: b, url: http://b, memory: 32GiB}
      - {name: c, url: "http://a:2", memory: 65536MiB}
    """
    (problem,) = check(nodes, "{}")
    assert (problem.line, problem.key) == (8, "nodes[1].memory")
    assert problem.message == "another node of the host a says 64GiB"
    assert "share its memory" in problem.remedy
