"""`python -m tests.stored.kills`: a batch over a gateway that is killed again and again.

A real gateway serves emulated nodes that count what they run. Every few seconds it is killed
(SIGKILL) and started again on its store and folder; a PostgreSQL server is restarted twice besides.
At the end

- every `custom_id` is in the output or the error file, once, with the text that a node makes of its
  own prompt;
- `request_counts` and `usage` of the batch are those of its files;
- the ledger has one row for each result, with the tokens that the line tells its caller.

What nodes have run beyond the lines was lost with a killed gateway: it costs the operator, not the
caller. Nodes run in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.local.server import claim_port, claimed_port
from tests.callers.kills import HOST, LIMIT, Site, rows_of
from tests.emulator import EmulatedNode
from tests.emulator.request_body import expected_chat_text
from tests.gateways import NO_TLS, until
from tests.postgres import PostgresServer, running_postgres
from tests.stored.batch_gateway import HEADERS, key

CHAT = "/v1/chat/completions"
NODES = 3
SLOTS = 12
PREFIXES = 20
"""Beginnings that prompts have in common."""
BROKEN_EVERY = 100
"""One line in so many can't be answered: its result is an error of the node."""
WEEK = 7 * 86_400.0  # the run itself ends before
ENDED = frozenset({"completed", "failed", "cancelled", "expired"})


@dataclass(slots=True)
class Findings:
    """What one run has shown."""

    store: str
    lines: int
    seconds: float = 0.0
    status: str = ""
    kills: int = 0
    store_restarts: int = 0
    output: int = 0
    errors: int = 0
    missing: int = 0
    doubles: int = 0
    ledger_rows: int = 0
    executions: int = 0
    """Requests that the nodes have begun, those of lost runs included."""
    wrong: list[str] = field(default_factory=list)


def messages_of(number: int) -> list[dict[str, str]]:
    """The prompt of a line; some begin alike."""
    rules = f"You are clerk {number % PREFIXES}. " + "Sort what comes by its kind. " * 10
    return [
        {"role": "system", "content": rules},
        {"role": "user", "content": f"Sort item {number}."},
    ]


def a_line(number: int) -> dict[str, Any]:
    """A line of the input."""
    body = {"model": "demo", "messages": messages_of(number), "max_tokens": 4 + number % 13}
    if number % BROKEN_EVERY == 0:
        body["messages"] = f"no list of messages: {number}"
    return {"custom_id": f"line {number}", "method": "POST", "url": CHAT, "body": body}


@contextlib.asynccontextmanager
async def a_site(
    folder: Path,
    nodes: list[EmulatedNode],
    store_url: str,
    settings: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> AsyncIterator[tuple[Site, httpx.AsyncClient]]:
    """A gateway that can be killed, and is not started yet; and a client of it."""
    with claim_port(HOST) as claim:
        site = Site(folder, nodes, store_url, claimed_port(claim), nice=0)
        file = folder / "gateway.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | (settings or {})))
        async with httpx.AsyncClient(
            base_url=f"http://{HOST}:{site.port}", headers=headers, timeout=60.0, trust_env=False,
            verify=NO_TLS, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        ) as client:  # fmt: skip
            try:
                yield site, client
            finally:
                await site.stop()


@dataclass(slots=True)
class Run:
    """One batch, and what happens to the gateway meanwhile."""

    site: Site
    http: httpx.AsyncClient
    found: Findings
    server: PostgresServer | None
    batch: dict[str, Any] = field(default_factory=dict)
    """As last seen."""
    restart: asyncio.Task[None] | None = None
    """The last one, which goes on when the batch has ended meanwhile."""

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request, again and again if it breaks or is refused for a while."""
        async with asyncio.timeout(LIMIT):
            while True:
                await self.site.up.wait()
                with contextlib.suppress(httpx.HTTPError):
                    response = await self.http.request(method, path, **options)
                    if response.status_code < 500 and response.status_code != 429:
                        assert response.status_code == 200, response.text
                        return response
                await asyncio.sleep(0.1)

    async def create(self) -> str:
        """Upload the input and create the batch; its id."""
        lines = (a_line(number) for number in range(1, self.found.lines + 1))
        content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        uploaded = await self.ask(
            "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}
        )
        request = {
            "input_file_id": uploaded.json()["id"], "endpoint": CHAT, "completion_window": "24h",
        }  # fmt: skip
        headers = {"Idempotency-Key": "the one batch"}
        created = await self.ask("POST", "/v1/batches", json=request, headers=headers)
        return str(created.json()["id"])

    async def content(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file of the batch."""
        if self.batch.get(name) is None:
            return []
        response = await self.ask("GET", f"/v1/files/{self.batch[name]}/content")
        return [json.loads(line) for line in response.text.split("\n") if line]

    async def play(self, kill_every: float, seconds: float) -> None:
        """Create the batch, and kill the gateway until the batch has ended."""
        id_ = await self.create()
        began = time.monotonic()
        troubles = [asyncio.create_task(one) for one in (self._kill(kill_every), self._restart())]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while self.batch.get("status") not in ENDED:
                        await asyncio.sleep(0.5)
                        self.batch = (await self.ask("GET", f"/v1/batches/{id_}")).json()
        finally:
            self.found.seconds = round(time.monotonic() - began, 1)
            for task in troubles:
                task.cancel()
            ends = await asyncio.gather(*troubles, return_exceptions=True)
            if self.restart is not None:
                # A second process beside one that starts would have no port.
                await self.restart
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _kill(self, every: float) -> None:
        async def kill() -> None:
            await self.site.kill()
            self.found.kills += 1
            await self.site.start()

        while True:
            await asyncio.sleep(every)
            self.restart = asyncio.create_task(kill())
            await asyncio.shield(self.restart)

    async def _restart(self) -> None:
        """Restart PostgreSQL when a third of the lines have ended, and two thirds."""
        if self.server is None:
            return
        lines = self.found.lines
        for third in (1, 2):
            await until(lambda share=third / 3: self._ended_lines() >= lines * share, WEEK)
            await asyncio.to_thread(self.server.stop)
            await asyncio.sleep(1.0)
            await asyncio.to_thread(self.server.start)
            self.found.store_restarts += 1

    def _ended_lines(self) -> int:
        counts = self.batch.get("request_counts") or {}
        return int(counts.get("completed", 0)) + int(counts.get("failed", 0))

    async def compare(self) -> None:
        """Compare the files with the input, the batch and the ledger."""
        found, batch = self.found, self.batch
        found.status = str(batch.get("status"))
        output, errors = await self.content("output_file_id"), await self.content("error_file_id")
        found.output, found.errors = len(output), len(errors)
        seen = Counter(line["custom_id"] for line in (*output, *errors))
        wanted = {f"line {number}" for number in range(1, found.lines + 1)}
        found.missing = len(wanted - set(seen))
        found.doubles = sum(count - 1 for count in seen.values())
        if unknown := set(seen) - wanted:
            found.wrong.append(f"unknown lines: {sorted(unknown)[:3]}")
        counts = {"total": found.lines, "completed": len(output), "failed": len(errors)}
        if batch.get("request_counts") != counts:
            found.wrong.append(f"request_counts: {batch.get('request_counts')}, not {counts}")
        rows, left_open = await asyncio.to_thread(rows_of, self.site.store_url)
        found.ledger_rows = len(rows)
        if left_open:
            found.wrong.append(f"{left_open} requests are open still")
        ledger = {row["id"]: row for row in rows}
        tokens = [0, 0]
        for line in output:
            used = self._compare_line(line, ledger.pop(line["id"], None))
            tokens = [tokens[0] + used[0], tokens[1] + used[1]]
        for line in errors:
            status = (line["response"] or {}).get("status_code")
            if status != 400:
                found.wrong.append(f"{line['custom_id']}: {status} {line['error']}")
            ledger.pop(line["id"], None)
        if ledger:
            found.wrong.append(f"rows of the ledger are of no line: {sorted(ledger)[:3]}")
        usage = batch.get("usage") or {}
        if [usage.get("input_tokens"), usage.get("output_tokens")] != tokens:
            found.wrong.append(f"usage of the batch: {usage}, not {tokens}")

    def _compare_line(self, line: dict[str, Any], row: dict[str, Any] | None) -> tuple[int, int]:
        """Compare a line of the output with its prompt and its row; returns its tokens."""
        body, name, wrong = line["response"]["body"], line["custom_id"], self.found.wrong
        used = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
        prompt = messages_of(int(name.removeprefix("line ")))
        if body["choices"][0]["message"]["content"] != expected_chat_text(prompt, used[1]):
            wrong.append(f"{name}: not the answer to its prompt")
        if row is None:
            wrong.append(f"{name}: no row in the ledger")
        elif (row["prompt_tokens"], row["completion_tokens"]) != used:
            wrong.append(f"{name}: the ledger has other tokens than {used}")
        return used


async def run_once(
    store_url: str,
    *,
    lines: int,
    kill_every: float,
    seconds: float,
    server: PostgresServer | None = None,
    decode_tps: float = 100.0,
) -> Findings:
    """One run on an empty store; `server`: the PostgreSQL server that is to be restarted."""
    found = Findings("sqlite" if server is None else "postgresql", lines)
    settings = {"keys": [key(limits={"rpm": 10_000_000, "tpm": 1_000_000_000})]}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = [
            EmulatedNode(slots=SLOTS, decode_tps=decode_tps, answer_tokens=500)
            for _ in range(NODES)
        ]
        for node in nodes:
            await stack.enter_async_context(node)
        site, http = await stack.enter_async_context(
            a_site(folder, nodes, store_url, settings, HEADERS)
        )
        await site.start()
        run = Run(site, http, found, server)
        try:
            await run.play(kill_every, seconds)
            await run.compare()
        except BaseException:
            print(site.log(), file=sys.stderr)
            raise
        found.executions = sum(one.requests for one in nodes)
    return found


@contextlib.contextmanager
def a_store(kind: str) -> Iterator[tuple[str, PostgresServer | None]]:
    """The URL of an empty store, and its server."""
    if kind == "postgresql":
        with running_postgres() as server:
            yield server.new_database(), server
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/gateway.db", None


def main() -> int:
    """Run once, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.stored.kills", description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=600.0, help="for the whole batch")
    parser.add_argument("--decode-tps", type=float, default=100.0, help="of each slot")
    given = vars(parser.parse_args())
    with a_store(given.pop("store")) as (url, server):
        found = asyncio.run(run_once(url, server=server, **given))
    print(json.dumps(asdict(found) | {"wrong": found.wrong[:10]}, indent=1))
    return int(found.status != "completed" or bool(found.missing or found.doubles or found.wrong))


if __name__ == "__main__":
    sys.exit(main())
