"""`llama-gateway batch` against a server of files and batches."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.batch_api import BatchApi, batch_api
from tests.cli.running import LIMIT, output, refusal, run
from tests.emulator import EmulatedNode
from tests.gateway_processes import serving
from tests.known import known

CHAT = "/v1/chat/completions"


def line(custom_id: str, content: str = "hello", model: str = "m") -> str:
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchApi]:
    with batch_api() as served:
        monkeypatch.setenv("LLAMA_GATEWAY_URL", served.url)
        yield served


@pytest.fixture(autouse=True)
def _looks_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cli.client.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("gateway.cli.batch.FIRST_POLL", 0.01)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f"{line(str(number))}\n" for number in range(5)))
    return file


def test_submit_prints_the_id_and_says_how_to_follow(api: BatchApi, lines: Path) -> None:
    checked = json.loads(output("batch", "submit", "lines.jsonl", "--check", "--json"))
    assert (checked["lines"], checked["problems"], checked["models"]) == (5, 0, ["m"])
    assert api.requests == []
    api.lines_per_look = 0
    ran = run("batch", "submit", "lines.jsonl", "--window", "2h", "--metadata", "a=b")
    assert (ran.status, ran.out) == (0, "batch_0\n")
    assert "5 lines for /v1/chat/completions (m)" in ran.err
    assert "llama-gateway batch show batch_0" in ran.err
    batch = api.batches["batch_0"]
    assert batch["completion_window"] == "2h"
    assert batch["metadata"] == {"a": "b"}
    assert api.files[batch["input_file_id"]][1] == lines.read_bytes()
    assert "batch_0" in run("batch", "list").out
    shown = run("batch", "show", "batch_0").out
    assert "metadata:       a=b" in shown
    assert "cost:           0.25" in shown
    assert "paused (by its owner)" in output("batch", "pause", "batch_0")
    assert "paused" not in output("batch", "resume", "batch_0")
    assert output("batch", "cancel", "batch_0").startswith("batch_0: cancelled, ")
    told = refusal("batch", "cancel", "batch_0", status=1)
    assert "Cannot cancel a batch with status 'cancelled'" in told


def test_waiting_writes_the_output_and_shows_progress(api: BatchApi, lines: Path) -> None:
    api.lines_per_look = 3
    ran = run("batch", "submit", "lines.jsonl", "--wait")
    assert (ran.status, ran.out) == (0, "batch_0\n")
    assert "batch_0: in progress, 3 of 5 done, 55 tokens/s, ends about" in ran.err
    assert "batch_0: completed, 5 of 5 done" in ran.err
    written = [json.loads(one) for one in Path("lines.out.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in written] == list("01234")
    assert not Path("lines.errors.jsonl").exists()


def test_lines_from_stdin_are_waited_for_and_a_script_is_told_where_the_results_are(
    api: BatchApi, lines: Path
) -> None:
    told = json.loads(output("batch", "submit", "-", "--wait", "--json", stdin=lines.read_text()))
    assert (told["output"], told["errors"]) == ("stdin.out.jsonl", None)
    assert (told["done"], told["failed"], told["batch"]["status"]) == (5, 0, "completed")


def test_failed_lines_end_with_status_1_and_a_file_of_errors(api: BatchApi, lines: Path) -> None:
    lines.write_text(f"{line('good')}\n{line('bad', 'FAIL')}\n")
    ran = run("batch", "submit", "lines.jsonl", "--wait")
    assert ran.status == 1
    assert "1 errors: lines.errors.jsonl" in ran.err
    assert "error: 1 of 2 lines failed" in ran.err
    assert json.loads(Path("lines.errors.jsonl").read_text())["custom_id"] == "bad"
    assert json.loads(Path("lines.out.jsonl").read_text())["custom_id"] == "good"


def test_nothing_that_exists_is_overwritten_unless_it_is_asked_for(
    api: BatchApi, lines: Path
) -> None:
    mine = lines.with_name("lines.out.jsonl")
    mine.write_text("mine")
    assert "lines.out.jsonl is there already" in refusal("batch", "submit", "lines.jsonl", "--wait")
    assert not api.batches, "it is told before the work"
    assert run("batch", "submit", "lines.jsonl", "--wait", "--force").status == 0
    assert mine.read_text() != "mine"


def test_each_broken_line_is_told_with_its_number_and_nothing_is_sent(
    api: BatchApi, lines: Path
) -> None:
    lines.write_text(f"{line('a')}\nno json\n{line('a')}\n{line('b').replace('POST', 'GET')}\n")
    told = refusal("batch", "submit", "lines.jsonl")
    assert "line 2: " in told
    assert "line 3 ('a'): An earlier line has the same custom_id" in told
    assert "line 4 ('b'): The method of each line must be 'POST'." in told
    assert "3 problems: mend them, or --anyway" in told
    assert not api.requests
    assert run("batch", "submit", "lines.jsonl", "--anyway").status == 0
    assert api.files["file-0"][1] == lines.read_bytes()


def test_a_table_of_results_has_the_columns_and_the_order_of_the_input(
    api: BatchApi, lines: Path
) -> None:
    table = "text,n\nhello,3\nFAIL,1\nbroken\n-x,2\n"
    Path("in.csv").write_text(table)
    submit = ("batch", "submit", "in.csv", "--template", "{text}", "--anyway")
    ran = run(*submit, "--wait", "--format", "csv")
    assert ran.status == 1, "a line failed"
    expected = [
        ["text", "n", "result_text", "error"],
        ["hello", "3", "re: hello", ""],
        ["FAIL", "1", "", "node_failed: It failed."],
        ["broken", "", "", "was not submitted: has 1 columns, and the header 2: check its quotes"],
        # What the user has written stays; what the model has written runs nowhere.
        ["-x", "2", "re: -x", ""],
    ]
    with Path("in.out.csv").open(newline="") as file:
        assert list(csv.reader(file)) == expected

    fetch = ("batch", "fetch", "batch_0", "--format", "csv", "--output", "-")
    assert list(csv.reader(output(*fetch, "--table", "in.csv").splitlines())) == expected
    Path("other.csv").write_text("text,n\nhello,3\n")
    wrong = run(*fetch, "--table", "other.csv")
    assert (wrong.status, "has no row for the result 'row-2'" in wrong.err) == (2, True)
    assert run(*fetch, "--id-column", "n").status == 2
    assert run(*fetch[:-4], "--table", "in.csv").status == 2


def test_a_lost_answer_makes_no_second_batch_and_no_second_upload(
    api: BatchApi, lines: Path
) -> None:
    api.lost_answers = ["POST /v1/files", "POST /v1/batches"]
    ran = run("batch", "submit", "lines.jsonl")
    assert (ran.status, ran.out) == (0, "batch_0\n")
    assert (len(api.batches), len(api.files)) == (1, 1)
    assert "the gateway answers again" in ran.err


def test_a_repeated_command_with_the_same_idempotency_key_finds_its_batch(
    api: BatchApi, lines: Path
) -> None:
    command = ("batch", "submit", "lines.jsonl", "--idempotency-key", "mine")
    api.lost_answers = ["POST /v1/batches"]
    told = refusal(*command, "--retry-for", "0", status=1)
    assert "--idempotency-key mine makes no second one" in told
    assert run(*command).out == "batch_0\n"
    assert (len(api.batches), len(api.files)) == (1, 1)
    lines.write_text(f"{line('another')}\n")
    assert "answers 409: Another request had this key" in refusal(*command, status=1)


def test_ctrl_c_leaves_the_batch_running_and_says_how_to_come_back(
    api: BatchApi, lines: Path
) -> None:
    api.lines_per_look = 0
    looked = threading.Event()
    api.on_look = looked.set
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "batch", "submit", "lines.jsonl", "--wait"],
        env={**os.environ, "LLAMA_GATEWAY_URL": api.url},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert looked.wait(LIMIT)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, "batch_0\n")
    assert "batch_0 goes on without this command" in err
    assert "'llama-gateway batch show batch_0 --wait' follows it again" in err
    assert "Traceback" not in err
    assert not any("cancel" in request for request in api.requests)


def test_fetch_before_the_end_needs_partial(api: BatchApi, lines: Path) -> None:
    api.lines_per_look = 2
    run("batch", "submit", "lines.jsonl")
    assert "--partial fetches what there is" in refusal("batch", "fetch", "batch_0", status=1)
    out = output("batch", "fetch", "batch_0", "--partial", "--output", "-")
    assert [json.loads(one)["custom_id"] for one in out.splitlines()] == list("0123")
    assert run("batch", "fetch", "batch_0").status == 0
    assert len(Path("batch_0.out.jsonl").read_text().splitlines()) == 5


def test_errors_have_remedies(api: BatchApi, lines: Path, tmp_path: Path) -> None:
    for id_ in ("../files", "batch 1", "", "b" * 129):
        assert "is no batch's id" in refusal("batch", "fetch", id_)
    assert "'llama-gateway batch list' shows" in refusal("batch", "show", "batch_9", status=1)
    api.key = "sk-right"
    assert "--key-file" in refusal("batch", "list", status=1)
    key_file = tmp_path / "key"
    key_file.write_text("sk-right\n")
    assert run("batch", "list", "--key-file", str(key_file)).status == 0
    away = run("batch", "list", "--url", "http://127.0.0.1:9")
    assert (away.status, "is it running? --url names its address" in away.err) == (1, True)
    assert "must be like http://127.0.0.1:8000" in refusal("batch", "list", "--url", "ftp://there")


def test_the_key_of_the_environment_is_used_and_never_shown(
    api: BatchApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.key = "sk-right"
    monkeypatch.setenv("LLAMA_GATEWAY_KEY", "sk-right")
    monkeypatch.setenv("LLAMA_GATEWAY_URL", f"{api.url}/v1")
    assert run("batch", "list").status == 0
    monkeypatch.setenv("LLAMA_GATEWAY_KEY", "sk-wrong")
    assert "sk-wrong" not in refusal("batch", "list", status=1)


# Over a real gateway.


async def until_told(process: Process, words: str) -> None:
    """Read what a command tells up to these words."""
    told = ""
    async with asyncio.timeout(LIMIT):
        while words not in told:
            one = await known(process.stderr).readline()
            assert one, f"it has ended without '{words}':\n{told}"
            told += one.decode()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_gateway_that_is_killed_and_restarted_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = [f"line {number}" for number in range(60)]
    (tmp_path / "lines.jsonl").write_text(
        "".join(f"{line(one, model='demo')}\n" for one in expected)
    )
    async with EmulatedNode(slots=2, decode_tps=100.0, answer_tokens=20) as node:
        async with serving(tmp_path, node) as gateway:
            url = gateway.url
            waiting = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", "batch", "submit", "lines.jsonl", "--wait",
                "--retry-for", "100", stdin=DEVNULL, stdout=PIPE, stderr=PIPE,
                env={**os.environ, "LLAMA_GATEWAY_URL": url},
            )  # fmt: skip
            await until_told(waiting, "in progress")
            await gateway.kill()
        again = {"listen": {"port": int(url.rpartition(":")[2])}}
        try:
            await until_told(waiting, "trying again for up to 100 s")
            async with serving(tmp_path, node, settings=again):
                await until_told(waiting, "the gateway answers again")
                out, err = await asyncio.wait_for(waiting.communicate(), LIMIT)
                id_ = out.decode().strip()
                await asyncio.to_thread(output, "batch", "fetch", id_, "--url", url)
        finally:
            with contextlib.suppress(ProcessLookupError):
                waiting.kill()
    assert (waiting.returncode, b"60 of 60 done" in err) == (0, True), err
    written = (tmp_path / "lines.out.jsonl").read_text()
    found = [json.loads(one)["custom_id"] for one in written.splitlines()]
    assert sorted(found) == sorted(expected)
    assert (tmp_path / f"{id_}.out.jsonl").read_text() == written
