"""The command, against emulated nodes that run in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.local_server import answering
from tests.cli.running import output, refusal, run
from tests.each_case import each_case
from tests.emulator.process import emulator_process
from tests.processes import free_port

SMALL = ("--prompt", "64", "--max-tokens", "8", "--warm-up", "1")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with emulator_process("--slots", "4", "--decode-tps", "400", "--prefill-tps", "5000") as node:
        yield node.url


def test_a_table_for_people_and_json_for_scripts(url: str) -> None:
    loads = ("--concurrency", "1,2", "--requests", "4", *SMALL)
    ran = run("bench", url, *loads)
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert lines[0].split()[:5] == ["LOAD", "REQUESTS", "FAILED", "TTFT", "P50"]
    assert lines[1].startswith("1 at a time  4         0")
    assert "The load generator itself: lag at most" in ran.out
    assert "2 at a time: 4 requests in" in ran.err
    report = json.loads(output("bench", f"{url}/v1/", *loads, "--json"))
    assert [one["label"] for one in report["loads"]] == ["1 at a time", "2 at a time"]
    assert (report["server"]["model"], report["server"]["slots"]) == ("demo", 4)
    for load in report["loads"]:
        assert (load["succeeded"], load["completion_tokens"]) == (4, 8)
        assert load["prompt_tokens"] == pytest.approx(64, rel=0.15)


def test_files_are_written_and_two_reports_compared(url: str, tmp_path: Path) -> None:
    page, table, plot = tmp_path / "a.html", tmp_path / "a.csv", tmp_path / "a.svg"
    arguments = ("bench", url, "--concurrency", "2", "--requests", "6", *SMALL, "--json")
    out = output(*arguments, "--html", str(page), "--csv", str(table), "--plot", str(plot))
    assert "2 at a time" in page.read_text()
    assert len(table.read_text().splitlines()) == 7
    assert "</svg>" in plot.read_text()
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(out)
    after.write_text(run(*arguments).out)
    ran = run("bench", "--compare", str(before), str(after))
    assert ran.status == 0
    assert "completion p50" in ran.out
    assert "95 % INTERVAL" in ran.out
    value = json.loads(run("bench", "--compare", str(before), str(after), "--json").out)
    assert value["confidence"] == 0.95
    assert len(value["differences"]) == 7


@each_case(
    ("words", "message"),
    [
        ("", "name the server's URL"),
        ("http://user:secret@x", "must be like http"),
        ("http://x --concurrency 0", "--concurrency '0': write whole numbers"),
        ("http://x --rate 1 --concurrency 1", "choose one of them"),
        ("http://x --speed-up 2", "--speed-up is for --trace"),
        ("http://x --trace none.jsonl", "can't be read"),
        ("http://x --body []", "--body []: must be a JSON object"),
        ("http://x --html no/such/folder/a.html", "there is no folder"),
        ("http://x --plot a.bmp", "must end in"),
        ("http://x --compare a.json b.json", "leave URL and load out"),
    ],
)
def test_impossible_options_are_wrong_usage(words: str, message: str) -> None:
    assert message in refusal("bench", *words.split())


def test_what_can_not_be_measured_is_told(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 9000000, "output_tokens": 5}\n')
    assert "a request has 9,000,000 tokens" in refusal("bench", url, "--trace", str(trace))
    told = refusal("bench", url, "--prompt", "9000")
    assert "do not fit into a slot of 4096 tokens. Remedy: a shorter --prompt" in told
    away = f"http://127.0.0.1:{free_port()}"
    assert f"{away}: can't be reached" in refusal("bench", away, *SMALL, status=1)
    garbage = b"data: <html>\x1b[31m\xff" * 100
    with answering(lambda *_: (200, {"content-type": "text/event-stream"}, garbage)) as address:
        ran = run("bench", address, "--concurrency", "2", "--requests", "4", *SMALL)
    assert (ran.status, "4 failed with" in ran.out, "\x1b" in ran.out) == (1, True, False)
