"""`llama-gateway batch` over a gateway."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from gateway.cli.client import GatewayAway, GatewayRefused, Patience, PublicFlags
from gateway.cli.terminal import CommandFailed
from tests.cli.local_server import Answer, answering
from tests.cli.running import LIMIT, output, refusal, run
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.emulator.language_model import expected_text
from tests.emulator.request_body import render_chat
from tests.stored.batch_gateway import KEY, gateway_over

CHAT = "/v1/chat/completions"
TOO_LONG = "word " * 5000


def line(custom_id: str, content: str = "hello") -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}) + "\n"


class Relay:
    """Stands before a gateway, counts its requests, and loses the answers that it is told to."""

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway
        self.url = ""
        self.requests: list[str] = []
        self.lost_answers: list[str] = []
        """Beginnings of requests (`POST /v1/batches`) that are done and not answered, each once."""
        self.looked = threading.Event()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer | None:
        called = f"{request.command} {request.path}"
        self.requests.append(called)
        url, headers = self.gateway + request.path, dict(request.headers)
        answer = httpx.request(request.command, url, headers=headers, content=body, timeout=LIMIT)
        if called.startswith("GET /v1/batches/"):
            self.looked.set()
        for lost in self.lost_answers:
            if called.startswith(lost):
                self.lost_answers.remove(lost)
                return None
        return answer.status_code, {}, answer.content

    def sent(self, called: str) -> int:
        return self.requests.count(called)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """A gateway over a node whose answers to what is slow take some 20 seconds."""
    tokens = {True: 1000, False: 5}
    node = EmulatedNode(
        slots=3, decode_tps=50, clock=time.monotonic,
        answer_tokens=lambda prompt: tokens["slow" in prompt],
    )  # fmt: skip
    (folder := tmp_path / "gateway").mkdir()
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(gateway_over(folder, node)) as running,
    ):
        relay = Relay(running.url)
        with answering(relay.answer) as relay.url:
            monkeypatch.setenv("LLAMA_GATEWAY_URL", relay.url)
            monkeypatch.setenv("LLAMA_GATEWAY_KEY", KEY)
            monkeypatch.setattr("gateway.cli.client.FIRST_PAUSE", 0.01)
            monkeypatch.setattr("gateway.cli.batch.FIRST_POLL", 0.01)
            yield relay


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(line(str(number)) for number in range(5)))
    return file


def custom_ids(text: str) -> list[str]:
    return sorted(json.loads(one)["custom_id"] for one in text.splitlines())


def test_submit_prints_the_id_and_says_how_to_follow(api: Relay, lines: Path) -> None:
    checked = json.loads(output("batch", "submit", "lines.jsonl", "--check", "--json"))
    assert (checked["lines"], checked["problems"], checked["models"]) == (5, 0, ["demo"])
    assert api.requests == []
    lines.write_text(line("1", "slow"))
    ran = run("batch", "submit", "lines.jsonl", "--window", "2h", "--metadata", "a=b")
    id_ = ran.out.strip()
    assert ran.status == 0, ran.err
    assert "1 lines for /v1/chat/completions (demo)" in ran.err
    assert f"llama-gateway batch show {id_}" in ran.err
    batch = json.loads(output("batch", "show", id_, "--json"))
    assert (batch["completion_window"], batch["metadata"]) == ("2h", {"a": "b"})
    assert id_ in run("batch", "list").out
    shown = run("batch", "show", id_).out
    assert "metadata:       a=b" in shown
    assert "cost:           0" in shown
    assert "paused" in output("batch", "pause", id_)
    assert "paused" not in output("batch", "resume", id_)
    assert output("batch", "cancel", id_).startswith(f"{id_}: cancel")


def test_waiting_goes_on_writes_the_output_and_shows_progress(api: Relay, lines: Path) -> None:
    api.lost_answers = ["GET /v1/batches/", "GET /v1/files/"]
    ran = run("batch", "submit", "lines.jsonl", "--wait")
    assert ran.status == 0, ran.err
    id_ = ran.out.strip()
    assert re.search(rf"{id_}: in progress, \d of 5 done.*, ends about", ran.err)
    assert f"{id_}: completed, 5 of 5 done" in ran.err
    assert (ran.err.count("trying again for up to"), api.lost_answers) == (2, [])
    assert custom_ids(Path("lines.out.jsonl").read_text()) == list("01234")
    assert not Path("lines.errors.jsonl").exists()
    told = refusal("batch", "cancel", id_, status=1)
    assert "Cannot cancel a batch with status 'completed'" in told


def test_lines_from_stdin_are_waited_for_and_a_script_is_told_where_the_results_are(
    api: Relay, lines: Path
) -> None:
    told = json.loads(output("batch", "submit", "-", "--wait", "--json", stdin=lines.read_text()))
    assert (told["output"], told["errors"]) == ("stdin.out.jsonl", None)
    assert (told["done"], told["failed"], told["batch"]["status"]) == (5, 0, "completed")


def test_failed_lines_end_with_status_1_and_a_file_of_errors_and_nothing_is_overwritten(
    api: Relay, lines: Path
) -> None:
    lines.write_text(line("good") + line("bad", TOO_LONG))
    mine = lines.with_name("lines.out.jsonl")
    mine.write_text("mine")
    assert "lines.out.jsonl is there already" in refusal("batch", "submit", "lines.jsonl", "--wait")
    assert not api.requests, "it is told before the work"
    ran = run("batch", "submit", "lines.jsonl", "--wait", "--force")
    assert ran.status == 1
    assert "1 errors: lines.errors.jsonl" in ran.err
    assert "error: 1 of 2 lines failed" in ran.err
    assert custom_ids(Path("lines.errors.jsonl").read_text()) == ["bad"]
    assert custom_ids(mine.read_text()) == ["good"]


def test_each_broken_line_is_told_with_its_number_and_nothing_is_sent(
    api: Relay, lines: Path
) -> None:
    lines.write_text(f"{line('a')}no json\n{line('a')}{line('b').replace('POST', 'GET')}")
    told = refusal("batch", "submit", "lines.jsonl")
    assert "line 2: " in told
    assert "line 3 ('a'): An earlier line has the same custom_id" in told
    assert "line 4 ('b'): The method of each line must be 'POST'." in told
    assert "3 problems: mend them, or --anyway" in told
    assert not api.requests
    ran = run("batch", "submit", "lines.jsonl", "--anyway", "--wait")
    assert (ran.status, "3 of 4 lines failed" in ran.err) == (1, True), ran.err


def test_a_table_of_results_has_the_columns_and_the_order_of_the_input(
    api: Relay, lines: Path
) -> None:
    table = f"text,n\nhello,3\n{TOO_LONG},1\nbroken\n-x,2\n"
    Path("in.csv").write_text(table)
    submit = ("batch", "submit", "in.csv", "--template", "{text}", "--anyway")
    ran = run(*submit, "--wait", "--format", "csv")
    assert ran.status == 1, "a line failed"

    def answer(prompt: str) -> str:
        return expected_text(render_chat([{"role": "user", "content": prompt}]), 5)

    def check(rows: list[list[str]]) -> None:
        head, hello, failed, broken, last = rows
        assert head == ["text", "n", "result_text", "error"]
        assert hello == ["hello", "3", answer("hello"), ""]
        assert failed[:3] == [TOO_LONG, "1", ""]
        assert failed[3].startswith("context_length_exceeded: prompt is too long")
        unread = "was not submitted: has 1 columns, and the header 2: check its quotes"
        assert broken == ["broken", "", "", unread]
        # What the user has written stays; what the model has written runs nowhere.
        assert last == ["-x", "2", answer("-x"), ""]

    with Path("in.out.csv").open(newline="") as file:
        check(list(csv.reader(file)))
    fetch = ("batch", "fetch", ran.out.strip(), "--format", "csv", "--output", "-")
    check(list(csv.reader(output(*fetch, "--table", "in.csv").splitlines())))
    Path("other.csv").write_text("text,n\nhello,3\n")
    wrong = run(*fetch, "--table", "other.csv")
    assert (wrong.status, "has no row for the result 'row-2'" in wrong.err) == (2, True)
    assert run(*fetch, "--id-column", "n").status == 2
    assert run(*fetch[:-4], "--table", "in.csv").status == 2


def test_a_lost_answer_makes_no_second_batch_and_no_second_upload(api: Relay, lines: Path) -> None:
    api.lost_answers = ["POST /v1/files", "POST /v1/batches"]
    ran = run("batch", "submit", "lines.jsonl")
    assert ran.status == 0, ran.err
    assert "the gateway answers again" in ran.err
    assert (api.sent("POST /v1/batches"), api.sent("POST /v1/files")) == (2, 1)
    (batch,) = json.loads(output("batch", "list", "--json"))["batches"]
    assert ran.out == f"{batch['id']}\n"


def test_a_repeated_command_with_the_same_idempotency_key_finds_its_batch(
    api: Relay, lines: Path
) -> None:
    command = ("batch", "submit", "lines.jsonl", "--idempotency-key", "mine")
    api.lost_answers = ["POST /v1/batches"]
    told = refusal(*command, "--retry-for", "0", status=1)
    assert "--idempotency-key mine makes no second one" in told
    assert run(*command).out == run(*command).out != ""
    (_,) = json.loads(output("batch", "list", "--json"))["batches"]
    assert api.sent("POST /v1/files") == 1
    lines.write_text(line("another"))
    assert "This Idempotency-Key was sent before with another" in refusal(*command, status=1)


def test_ctrl_c_leaves_the_batch_running_and_says_how_to_come_back(api: Relay, lines: Path) -> None:
    lines.write_text(line("1", "slow"))
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "batch", "submit", "lines.jsonl", "--wait"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert api.looked.wait(LIMIT)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert f"{out.strip()} goes on without this command" in err
    assert f"'llama-gateway batch show {out.strip()} --wait' follows it again" in err
    assert "Traceback" not in err
    assert not any("cancel" in request for request in api.requests)


def test_fetch_before_the_end_needs_partial(api: Relay, lines: Path) -> None:
    lines.write_text(line("0") + line("1") + line("2", "slow"))
    id_ = output("batch", "submit", "lines.jsonl").strip()
    assert "--partial fetches what there is" in refusal("batch", "fetch", id_, status=1)
    fetch = ("batch", "fetch", id_, "--partial", "--output", "-")
    while len(out := custom_ids(output(*fetch))) < 2:
        time.sleep(0.05)
    assert out == ["0", "1"]


def test_errors_have_remedies_and_keys_are_used_and_never_shown(
    api: Relay, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id_ in ("../files", "batch 1", "", "b" * 129):
        assert "is no batch's id" in refusal("batch", "fetch", id_)
    assert "'llama-gateway batch list' shows" in refusal("batch", "show", "batch_9", status=1)
    monkeypatch.setenv("LLAMA_GATEWAY_URL", f"{api.url}/v1")
    assert run("batch", "list").status == 0
    wrong = f"{KEY[:-1]}x"
    monkeypatch.setenv("LLAMA_GATEWAY_KEY", wrong)
    assert wrong not in refusal("batch", "list", status=1)
    monkeypatch.delenv("LLAMA_GATEWAY_KEY")
    assert "--key-file" in refusal("batch", "list", status=1)
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    assert run("batch", "list", "--key-file", str(key_file)).status == 0
    away = run("batch", "list", "--url", "http://127.0.0.1:9")
    assert (away.status, "is it running? --url names its address" in away.err) == (1, True)
    assert "must be like http://127.0.0.1:8000" in refusal("batch", "list", "--url", "ftp://there")


# A gateway that is away.


class Time:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.notes: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, seconds: float) -> Patience:
        return Patience(seconds, lambda: self.now, self.sleep, note=self.notes.append)


def failing(times: int, retry_after: float | None = None) -> Callable[[], str]:
    left = [times]

    def job() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise GatewayAway("nobody answers", retry_after)
        return "done"

    return job


def test_a_gateway_that_is_away_is_asked_again_at_growing_intervals() -> None:
    time = Time()
    assert time.patience(600.0).call(failing(6)) == "done"
    assert 10.0 < time.now < 25.0
    assert time.notes == [
        "nobody answers; trying again for up to 600 s",
        f"the gateway answers again after {time.now:.0f} s",
    ]


def test_patience_waits_as_long_as_the_gateway_says_and_ends() -> None:
    time = Time()
    assert time.patience(600.0).call(failing(1, retry_after=42.0)) == "done"
    assert time.now == 42.0
    time = Time()
    with pytest.raises(GatewayAway):
        time.patience(30.0).call(failing(10_000))
    assert time.now == pytest.approx(30.0)
    with pytest.raises(GatewayAway):
        time.patience(0.0).call(failing(1))


@each_case(
    ("status", "headers", "error"),
    [
        (503, {"retry-after": "7"}, GatewayAway),
        (429, {}, GatewayAway),
        (429, {"x-should-retry": "false"}, GatewayRefused),
        (507, {}, GatewayRefused),
        (404, {}, GatewayRefused),
    ],
)
def test_which_errors_are_worth_another_try(
    status: int, headers: dict[str, str], error: type[Exception]
) -> None:
    no = {"error": {"message": "no", "type": "invalid_request_error", "code": None}}
    answers: list[Answer] = [(status, headers, no), (200, {}, b"<html>")]
    with (
        answering(lambda *_: answers.pop(0)) as url,
        PublicFlags(url=url).connect() as client,
    ):
        with pytest.raises(error) as raised:
            client.batch("batch_1")
        assert f"answers {status}: no" in str(raised.value)
        with pytest.raises(CommandFailed, match="is no gateway with /v1/batches"):
            client.batch("batch_1")
        if isinstance(raised.value, GatewayAway):
            assert raised.value.retry_after == (7.0 if headers else None)
