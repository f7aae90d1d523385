"""`llama-gateway batch` against real gateway processes over an emulated node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import pytest

from tests.cli.running import Ran, run
from tests.emulator import EmulatedNode
from tests.gateway_processes import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT = 120.0
"""Seconds for each wait."""

CHAT = "/v1/chat/completions"


async def batch(url: str, *arguments: str) -> Ran:
    return await asyncio.to_thread(run, "batch", *arguments, "--url", url)


async def until_told(process: Process, words: str) -> str:
    """What a command tells up to these words."""
    assert process.stderr is not None
    told = ""
    async with asyncio.timeout(LIMIT):
        while words not in told:
            line = await process.stderr.readline()
            assert line, f"it has ended without '{words}':\n{told}"
            told += line.decode()
    return told


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def write_lines(name: str, count: int, **more: object) -> None:
    with Path(name).open("w") as lines:
        for number in range(count):
            messages = [{"role": "user", "content": f"hello {number}"}]
            body = {"model": "demo", "messages": messages, "max_tokens": 20, **more}
            line = {"custom_id": f"line {number}", "method": "POST", "url": CHAT, "body": body}
            lines.write(json.dumps(line) + "\n")


def ids_of(text: str) -> list[str]:
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


async def test_a_gateway_that_is_killed_and_restarted_is_waited_for(tmp_path: Path) -> None:
    write_lines("lines.jsonl", 60)
    async with EmulatedNode(slots=2, decode_tps=100.0) as node:
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
            told = await until_told(waiting, "trying again for up to 100 s")
            assert "is it running?" in told or "did not answer" in told
            async with serving(tmp_path, node, settings=again):
                await until_told(waiting, "the gateway answers again")
                out, err = await asyncio.wait_for(waiting.communicate(), LIMIT)
                fetched = await batch(url, "fetch", out.decode().strip())
        finally:
            with contextlib.suppress(ProcessLookupError):
                waiting.kill()
    assert waiting.returncode == 0, err
    assert b"60 of 60 done" in err
    written = (tmp_path / "lines.out.jsonl").read_text()
    assert sorted(ids_of(written)) == sorted(f"line {number}" for number in range(60))
    assert fetched.status == 0
    assert (tmp_path / f"{out.decode().strip()}.out.jsonl").read_text() == written


async def test_pause_partial_results_resume_and_cancel(tmp_path: Path) -> None:
    write_lines("lines.jsonl", 200)
    async with EmulatedNode(slots=2, decode_tps=100.0) as node, serving(tmp_path, node) as gateway:
        id_ = (await batch(gateway.url, "submit", "lines.jsonl")).out.strip()
        async with asyncio.timeout(LIMIT):
            while True:
                partial = await batch(gateway.url, "fetch", id_, "--partial", "--output", "-")
                assert partial.status == 0, partial.err
                if partial.out:
                    break
        first = ids_of(partial.out)
        assert len(set(first)) == len(first) < 200
        assert "paused" in (await batch(gateway.url, "pause", id_)).out
        assert "paused" in (await batch(gateway.url, "list")).out
        assert "paused" not in (await batch(gateway.url, "resume", id_)).out
        assert "cancel" in (await batch(gateway.url, "cancel", id_)).out
        ran = await batch(gateway.url, "show", id_, "--wait")
        assert (ran.status, "cancelled" in ran.err) == (1, True), ran.err
        assert (await batch(gateway.url, "fetch", id_)).status == 0
    files = (tmp_path / f"{id_}.{kind}.jsonl" for kind in ("out", "errors"))
    done = ids_of("".join(file.read_text() for file in files))
    assert set(first) <= set(done)
    assert sorted(done) == sorted(f"line {number}" for number in range(200))
