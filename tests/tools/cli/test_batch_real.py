"""`llama-gateway batch` against real gateway processes over an emulated node."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.emulator import EmulatedNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT = 120.0
"""Seconds for each wait."""

CHAT = "/v1/chat/completions"
TOKENS = 20


@dataclass
class GatewayOnOnePort:
    """A gateway that is started again on the port and the state of before."""

    folder: Path
    port: int = 0
    process: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, and return when it listens."""
        settings = {
            "listen": {"port": self.port},
            "admin": {"port": 0},
            "health": {"interval": 0.2, "timeout": 30},
        }
        (self.folder / "gateway.yaml").write_text(yaml.safe_dump(settings))
        files = ("--nodes", "nodes.yaml", "--config", "gateway.yaml")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "serve", *files,
            stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, cwd=self.folder,
            env={**os.environ, "XDG_STATE_HOME": str(self.folder / "state")},
        )  # fmt: skip
        assert self.process.stderr is not None
        async with asyncio.timeout(LIMIT):
            while line := await self.process.stderr.readline():
                entry = json.loads(line) if line.startswith(b"{") else {}
                if entry.get("event") == "listening":
                    self.port = int(entry["public"].rpartition(":")[2])
                    break
            else:
                raise AssertionError("it has ended")
        self.reading = asyncio.create_task(self._read(self.process.stderr))

    async def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it is gone."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self.reading

    async def _read(self, log: asyncio.StreamReader) -> None:
        while await log.read(65536):
            pass


@contextlib.asynccontextmanager
async def gateway(folder: Path, node: EmulatedNode) -> AsyncIterator[GatewayOnOnePort]:
    (folder / "nodes.yaml").write_text(
        yaml.safe_dump({"nodes": [{"name": "one", "url": node.url}]})
    )
    one = GatewayOnOnePort(folder)
    await one.start()
    try:
        yield one
    finally:
        await one.kill()


async def command(*arguments: str, url: str, folder: Path) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "batch", *arguments,
        stdin=DEVNULL, stdout=PIPE, stderr=PIPE, cwd=folder,
        env={**os.environ, "LLAMA_GATEWAY_URL": url},
    )  # fmt: skip


async def ended(process: Process) -> tuple[int | None, str, str]:
    """Its status, its output and what it told."""
    try:
        out, err = await asyncio.wait_for(process.communicate(), LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return process.returncode, out.decode(), err.decode()


async def until_told(process: Process, words: str) -> str:
    """What it tells up to these words."""
    assert process.stderr is not None
    told = ""
    async with asyncio.timeout(LIMIT):
        while words not in told:
            line = await process.stderr.readline()
            assert line, f"it has ended without '{words}':\n{told}"
            told += line.decode()
    return told


def write_lines(file: Path, count: int, **more: object) -> None:
    with file.open("w") as lines:
        for number in range(count):
            messages = [{"role": "user", "content": f"hello {number}"}]
            body = {"model": "demo", "messages": messages, "max_tokens": TOKENS, **more}
            line = {"custom_id": f"line {number}", "method": "POST", "url": CHAT, "body": body}
            lines.write(json.dumps(line) + "\n")


async def test_a_table_is_answered_and_errors_end_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "mails.csv").write_text("id,mail\na,hello\nb,good day\n")
    async with EmulatedNode() as node, gateway(tmp_path, node) as running:
        submitted = await command(
            "submit", "mails.csv", "--template", "Answer: {mail}", "--id-column", "id",
            "--model", "demo", "--max-tokens", "5", "--wait", "--format", "csv",
            url=running.url, folder=tmp_path,
        )  # fmt: skip
        status, out, err = await ended(submitted)
        assert status == 0, err
        with (tmp_path / "mails.out.csv").open(newline="") as file:
            rows = {row["custom_id"]: row["text"] for row in csv.DictReader(file)}
        assert rows.keys() == {"a", "b"}
        assert all(rows.values())
        shown = await command("show", out.strip(), "--json", url=running.url, folder=tmp_path)
        batch = json.loads((await ended(shown))[1])
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}

        write_lines(tmp_path / "wrong.jsonl", 3, model="nobody-serves-it")
        wrong = await command("submit", "wrong.jsonl", "--wait", url=running.url, folder=tmp_path)
        status, _, err = await ended(wrong)
        assert status == 1
        assert "3 of 3 lines failed" in err
        assert len((tmp_path / "wrong.errors.jsonl").read_text().splitlines()) == 3


async def test_a_gateway_that_is_killed_and_restarted_is_waited_for(tmp_path: Path) -> None:
    count = 60
    write_lines(tmp_path / "lines.jsonl", count)
    async with (
        EmulatedNode(slots=2, decode_tps=100.0) as node,
        gateway(tmp_path, node) as running,
    ):
        waiting = await command(
            "submit", "lines.jsonl", "--wait", "--retry-for", "100",
            url=running.url, folder=tmp_path,
        )  # fmt: skip
        try:
            await until_told(waiting, "in progress")
            await running.kill()
            told = await until_told(waiting, "trying again for up to 100 s")
            assert "is it running?" in told or "did not answer" in told
            await running.start()
            await until_told(waiting, "the gateway answers again")
        finally:
            status, out, err = await ended(waiting)
        assert status == 0, err
        assert f"{count} of {count} done" in err
        written = (tmp_path / "lines.out.jsonl").read_text().splitlines()
        ids = [json.loads(line)["custom_id"] for line in written]
        assert sorted(ids) == sorted(f"line {number}" for number in range(count))
        again = await command("fetch", out.strip(), url=running.url, folder=tmp_path)
        assert (await ended(again))[0] == 0
        assert (tmp_path / f"{out.strip()}.out.jsonl").read_text().splitlines() == written


async def test_pause_partial_results_resume_and_cancel(tmp_path: Path) -> None:
    write_lines(tmp_path / "lines.jsonl", 200)
    async with (
        EmulatedNode(slots=2, decode_tps=100.0) as node,
        gateway(tmp_path, node) as running,
    ):

        async def batch(*arguments: str) -> tuple[int | None, str, str]:
            return await ended(await command(*arguments, url=running.url, folder=tmp_path))

        _, out, _ = await batch("submit", "lines.jsonl")
        id_ = out.strip()
        async with asyncio.timeout(LIMIT):
            while True:
                status, partial, err = await batch("fetch", id_, "--partial", "--output", "-")
                assert status == 0, err
                if partial:
                    break
        first = [json.loads(line)["custom_id"] for line in partial.splitlines()]
        assert len(set(first)) == len(first) < 200
        assert "paused" in (await batch("pause", id_))[1]
        assert "paused" in (await batch("list"))[1]
        assert "paused" not in (await batch("resume", id_))[1]
        assert "cancel" in (await batch("cancel", id_))[1]
        status, _, err = await batch("show", id_, "--wait")
        assert (status, "cancelled" in err) == (1, True), err
        status, _, err = await batch("fetch", id_)
        assert status == 0, err
        done = [
            json.loads(line)["custom_id"]
            for name in (f"{id_}.out.jsonl", f"{id_}.errors.jsonl")
            for line in (tmp_path / name).read_text().splitlines()
        ]
        assert set(first) <= set(done)
        assert sorted(done) == sorted(f"line {number}" for number in range(200))
