"""The operator's drill: seven faults, each seen on the dashboard, in top, in the log and as alert.

One gateway process, one Prometheus, one page in Chromium and one screen of `llama-gateway top` stay
open for the whole drill. Each fault is made, seen in all four places, mended, and seen to go away.
`pytest tests/monitoring/test_drill.py -n 0 -s` prints the seconds that each took.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from textual.widgets import Static

from gateway.callers.keys import ApiKey, new_key
from gateway.cli.client import AdminClient
from gateway.cli.top.app import Top
from tests.admin.browser import WatchedPage, a_browser, a_page, needs_browser
from tests.emulator import EmulatedNode
from tests.gateway_processes import Succession, serving
from tests.gateways import NO_TLS
from tests.monitoring.prometheus import Prometheus, needs_prometheus, running_prometheus
from tests.polling import eventually

SOON = 10.0  # seconds within which a fault shows
SLOWNESS = 30.0  # the same of a node that is slow: only requests tell
PATIENCE = 100.0  # seconds for all other waits
SPEED, SLOW_SPEED = 40.0, 8.0  # tokens a second

Look = Callable[[], Awaitable[bool]]

DESKS = [new_key(f"desk{number}") for number in range(5)]
CROWD = [new_key(f"crowd{number}") for number in range(12)]
FLOODER, BATCHER = new_key("flooder"), new_key("batcher")

SETTINGS: dict[str, Any] = {
    "keys": [
        *({"id": key.id, "sha256": key.sha256} for key in (*DESKS, *CROWD, BATCHER)),
        {"id": FLOODER.id, "sha256": FLOODER.sha256, "limits": {"rpm": 5}},
    ],
    "queue": {"max": 100, "max_wait": "1h"},
    # A machine that stands still for seconds is no fault of this drill.
    "health": {"timeout": 30},
}


def spill(money: float) -> dict[str, Any]:
    return {"hybrid": {"spill": {"after": 0, "money_per_hour": money}}}


@dataclass(frozen=True)
class Sign:
    fault: str
    problem: str  # the problem's id
    words: tuple[str, ...]  # of title, cause, remedy and command
    alert: str
    labels: dict[str, str] = field(default_factory=dict)
    limit: float = SOON
    alert_lasts: bool = False  # whether the alert looks minutes back

    def is_among(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts has all words."""
        return any(all(word in " ".join(text.split()) for word in self.words) for text in texts)


KILLED = Sign(
    "node killed", "down:epyc-a:cpu-a",
    ("cpu-a is down", "refused", "Look at the machine", "llama-gateway nodes probe cpu-a"),
    "LlamaNodeOut", {"node": "cpu-a", "state": "down"},
)  # fmt: skip
SWAPPED = Sign(
    "model swapped", "drift:cpu-b",
    ("cpu-b differs from the inventory", "serves tiny", "nodes.yaml", "llama-gateway check"),
    "LlamaNodeDiffers", {"node": "cpu-b"},
)  # fmt: skip
QUEUE = Sign(
    "queue flood", "queue",
    ("More work than slots", "of at most 100 requests wait", "add one", "llama-gateway nodes"),
    "LlamaGatewayQueueFull",
)  # fmt: skip
BUDGET = Sign(
    "GPU budget spent", "gpu_budget",
    ("The GPU budget is spent", "paid", "raise hybrid.spill.money_per_hour",
     "llama-gateway usage --by tier"),
    "LlamaGpuBudgetSpent",
)  # fmt: skip
DISK = Sign(
    "disk full", "storage",
    ("no room for files and results", "Free space on the disk", "batches.folder", "df -h"),
    "LlamaGatewayDiskFull",
)  # fmt: skip
SLOW = Sign(
    "node slow", "degraded:cpu-a",
    ("cpu-a is far slower", "of its usual speed", "swapping", "llama-gateway nodes drain cpu-a"),
    "LlamaNodeDegraded", {"node": "cpu-a"}, SLOWNESS,
)  # fmt: skip
FLOOD = Sign(
    "one key flooding", "flood",
    ("sends more than its limits allow", "flooder", "raise the limit in gateway.yaml, at its entry",
     "llama-gateway keys show flooder"),
    "LlamaCallerRefused", {"caller": "flooder", "reason": "rate_limit_exceeded"}, alert_lasts=True,
)  # fmt: skip


@dataclass
class Drill:
    gateway: Succession
    page: WatchedPage
    top: Top
    prometheus: Prometheus
    meanwhile: asyncio.TaskGroup
    rows: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    began: float = 0.0
    lines_before: int = 0

    async def begin(self, sign: Sign) -> None:
        """A fault is about to be made: nothing shows it yet."""
        for look in (self._on_page, self._in_top, self._as_alert):
            assert not await look(sign), f"{sign.fault}, before it was made: {look.__name__}"
        self.began, self.lines_before = time.monotonic(), len(self.gateway.lines)

    async def sees(self, sign: Sign) -> None:
        """Wait until the fault, which was made since `begin`, shows everywhere."""
        began = self.began
        limit = sign.limit - (time.monotonic() - began)
        places: dict[str, Look] = {
            "dashboard": lambda: self._on_page(sign),
            "top": lambda: self._in_top(sign),
            "log": lambda: self._in_log(sign),
            "alert": lambda: self._as_alert(sign),
        }
        waits = (
            _seconds_until(look, began, limit, f"{sign.fault}: {place}")
            for place, look in places.items()
        )
        try:
            took = await asyncio.gather(*waits)
        except AssertionError as error:
            raise AssertionError(f"{error}; {await self._what_shows()}") from None
        self.rows.append((sign.fault, dict(zip(places, took, strict=True))))

    async def sees_no_more(self, sign: Sign) -> None:
        """Wait until it is gone from the dashboard; `meanwhile` waits for the other places."""
        mended = time.monotonic()
        self.meanwhile.create_task(self._is_over(sign, mended))

        async def is_gone() -> bool:
            return not await self._on_page(sign)

        await _seconds_until(is_gone, mended, PATIENCE, f"{sign.fault} leaves the dashboard")

    async def _is_over(self, sign: Sign, mended: float) -> None:
        async def is_over() -> bool:
            over = any(one["id"] == sign.problem for one in self.gateway.logged("problem is over"))
            shows = await self._on_page(sign) or await self._in_top(sign)
            raised = not sign.alert_lasts and await self._as_alert(sign)
            return over and not shows and not raised

        took = await _seconds_until(is_over, mended, PATIENCE, f"{sign.fault} is over")
        next(row for fault, row in self.rows if fault == sign.fault)["gone"] = took

    async def _on_page(self, sign: Sign) -> bool:
        # A problem is a line: cause and remedy are what it unfolds.
        return sign.is_among(await self.page.page.locator(".problem").all_text_contents())

    async def _in_top(self, sign: Sign) -> bool:
        shown = str(self.top.query_one("#all-problems", Static).visual)
        return sign.is_among(shown.splitlines())

    async def _in_log(self, sign: Sign) -> bool:
        lines = self.gateway.lines[self.lines_before :]
        problems = (one for one in lines if one["event"] == "problem" and one["id"] == sign.problem)
        return sign.is_among(map(json.dumps, problems))

    async def _as_alert(self, sign: Sign) -> bool:
        wanted = {"alertname": sign.alert, **sign.labels}
        return any(wanted.items() <= one.items() for one in await self.prometheus.alerts())

    async def requests_of_nodes(self) -> dict[str, int]:
        async with httpx.AsyncClient(trust_env=False, verify=NO_TLS) as admin:
            nodes = (await admin.get(f"{self.gateway.admin_url}/admin/nodes")).json()["nodes"]
        return {one["name"]: one["requests"] for one in nodes}

    async def _what_shows(self) -> str:
        texts = await self.page.page.locator(".problem").all_text_contents()
        return (
            f"the page: {texts}, the log: {self.gateway.logged('problem')}, "
            f"alerts: {await self.prometheus.alerts()}, requests: {await self.requests_of_nodes()}"
        )

    def table(self) -> str:
        titles = ("dashboard", "top", "log", "alert", "gone")
        lines = [f"{'fault':<18}" + "".join(f"{title:>11}" for title in titles)]
        for fault, row in self.rows:
            lines.append(f"{fault:<18}" + "".join(f"{row[title]:>9.1f} s" for title in titles))
        return "\n".join(lines)


async def _seconds_until(look: Look, began: float, limit: float, what: str) -> float:
    async def found() -> float | None:
        return time.monotonic() - began if await look() else None

    try:
        return await eventually(found, limit)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


# The gateway, and those who ask it.


@contextlib.asynccontextmanager
async def a_drill(
    folder: Path, disk: Path, nodes: Sequence[dict[str, Any]]
) -> AsyncIterator[Drill]:
    """The gateway with a disk of its own, and all who look at it."""
    mount = 'mount -t tmpfs -o size=128m none "$1" && shift && exec "$@"'
    command = ("unshare", "-rm", "sh", "-c", mount, "sh", str(disk))
    settings = SETTINGS | {"batches": {"folder": str(disk / "kept")}}
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        python = (sys.executable, "-m", "gateway")
        gateway = await enter(serving(folder, nodes, *command, *python, settings=settings))
        prometheus = await enter(running_prometheus(folder / "prometheus", gateway.admin_url))
        page = await enter(a_page(await enter(a_browser()), gateway.admin_url))
        admin = stack.enter_context(AdminClient(gateway.admin_url, None))
        top = Top(admin, time.monotonic)
        # Its thread ends with the event after the screen's end.
        stack.push_async_callback(asyncio.to_thread, top.following.join, PATIENCE)
        pilot = await enter(top.run_test(size=(120, 40)))
        await pilot.press("4")
        async with asyncio.TaskGroup() as meanwhile:
            yield Drill(gateway, page, top, prometheus, meanwhile)
        assert page.trouble == []


class Clients:
    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(
            base_url=url, trust_env=False, verify=NO_TLS, timeout=PATIENCE,
            limits=httpx.Limits(max_connections=None),
        )  # fmt: skip

    async def post(self, key: ApiKey, path: str, **request: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key.text}"}
        return await self.http.post(path, headers=headers, **request)

    async def chat(self, key: ApiKey, tokens: int = 16) -> int:
        body = {"messages": [{"role": "user", "content": f"Hello {key.id}"}], "max_tokens": tokens}
        return (await self.post(key, "/v1/chat/completions", json=body)).status_code

    @contextlib.asynccontextmanager
    async def asking(
        self, keys: Sequence[ApiKey], tokens: int = 16, pause: float = 0.0
    ) -> AsyncIterator[None]:
        """Each key asks, and asks again when it has an answer."""

        async def ask(key: ApiKey) -> None:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    await self.chat(key, tokens)
                await asyncio.sleep(pause)

        tasks = [asyncio.create_task(ask(key)) for key in keys]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def upload(self, lines: int) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}], "model": "demo", "max_tokens": 16}
        one = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        text = "\n".join(json.dumps({"custom_id": f"{n}", **one}) for n in range(lines))
        files = {"file": ("in.jsonl", text.encode())}
        return await self.post(BATCHER, "/v1/files", data={"purpose": "batch"}, files=files)

    async def batch(self, lines: int) -> str:
        file = (await self.upload(lines)).json()["id"]
        made = {"input_file_id": file, "endpoint": "/v1/chat/completions"}
        asked = made | {"completion_window": "24h"}
        return str((await self.post(BATCHER, "/v1/batches", json=asked)).json()["id"])

    async def until(self, batch: str, holds: Callable[[dict[str, Any]], bool]) -> None:
        headers = {"authorization": f"Bearer {BATCHER.text}"}

        async def look() -> bool | None:
            found = await self.http.get(f"/v1/batches/{batch}", headers=headers)
            return holds(found.json()) or None

        await eventually(look, PATIENCE)


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass


def _may_mount(disk: Path) -> bool:
    tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(disk)]
    return shutil.which("unshare") is not None and not subprocess.run(tried, check=False).returncode


@pytest.mark.slow
@needs_browser
@needs_prometheus
async def test_each_of_seven_faults_shows_everywhere_in_time_and_goes_away(tmp_path: Path) -> None:
    disk, folder = tmp_path / "disk", tmp_path / "gateway"
    disk.mkdir()
    if not _may_mount(disk):
        pytest.skip("this machine lets us mount no file system")
    speed: dict[str, Any] = {"decode_tps": SPEED, "answer_tokens": 2000}
    async with (
        EmulatedNode(slots=3, **speed) as cpu_a,
        EmulatedNode(slots=3, **speed) as cpu_b,
        EmulatedNode(slots=2, **speed) as gpu,
    ):
        price = {"prompt": 1e5, "completion": 1e5}
        nodes: list[dict[str, Any]] = [
            {"name": "cpu-a", "url": cpu_a.url, "model": "demo", "host": "epyc-a"},
            {"name": "cpu-b", "url": cpu_b.url, "model": "demo", "host": "epyc-b"},
            {"name": "gpu", "url": gpu.url, "model": "demo", "tier": "gpu",
             "cost_per_million_tokens": price},
        ]  # fmt: skip
        async with a_drill(folder, disk, nodes) as drill:
            clients = Clients(drill.gateway.url)
            async with clients.http, clients.asking(DESKS, pause=0.05):
                await _drill(drill, clients, cpu_a, cpu_b, disk, folder)
    print(f"\n{drill.table()}")


async def _drill(
    drill: Drill,
    clients: Clients,
    cpu_a: EmulatedNode,
    cpu_b: EmulatedNode,
    disk: Path,
    folder: Path,
) -> None:
    async def reload(settings: dict[str, Any]) -> None:
        kept = yaml.safe_load((folder / "gateway.yaml").read_text())
        (folder / "gateway.yaml").write_text(yaml.safe_dump(kept | settings))
        async with httpx.AsyncClient(trust_env=False, verify=NO_TLS) as admin:
            done = await admin.post(f"{drill.gateway.admin_url}/admin/reload")
        assert done.status_code == 200, done.text

    await drill.begin(FLOOD)
    # The last minute counts: it is over by the end of the drill.
    async with clients.asking([FLOODER] * 4, tokens=1, pause=0.05):
        await drill.sees(FLOOD)
    flood_ends = drill.meanwhile.create_task(drill.sees_no_more(FLOOD))

    await drill.begin(KILLED)
    await cpu_a.kill()
    await drill.sees(KILLED)
    await cpu_a.revive()
    await drill.sees_no_more(KILLED)

    await drill.begin(SWAPPED)
    for model, seen in (("tiny", drill.sees), ("demo", drill.sees_no_more)):
        await cpu_b.kill()
        cpu_b.engine.model = model
        await cpu_b.revive()
        await seen(SWAPPED)

    await drill.begin(QUEUE)
    async with clients.asking(CROWD * 7, tokens=2000):
        await drill.sees(QUEUE)
    await drill.sees_no_more(QUEUE)

    batch = await clients.batch(lines=60)

    await clients.until(batch, lambda found: bool(found["request_counts"]["completed"]))
    await drill.begin(DISK)
    # The gateway's own view of its files.
    ballast = Path(f"/proc/{drill.gateway.first.pid}/root{disk}/ballast")
    _fill(ballast)
    assert (await clients.upload(lines=1)).status_code == 507
    await drill.sees(DISK)
    ballast.unlink()  # noqa: ASYNC240 - it takes no time
    await drill.sees_no_more(DISK)

    await clients.until(batch, lambda found: bool(found["status"] == "completed"))

    # With fewer clients than that, each would rather wait for the other node.
    async with clients.asking(CROWD):
        before = await drill.requests_of_nodes()

        async def have_a_usual_speed() -> bool | None:
            now = await drill.requests_of_nodes()
            return all(now[name] - before[name] >= 40 for name in ("cpu-a", "cpu-b")) or None

        await eventually(have_a_usual_speed, PATIENCE)
        await drill.begin(SLOW)
        cpu_a.engine.decode_tps = SLOW_SPEED
        await drill.sees(SLOW)
        cpu_a.engine.decode_tps = SPEED
        await drill.sees_no_more(SLOW)

    await drill.begin(BUDGET)
    await reload(spill(money=10.0))
    async with clients.asking(CROWD):
        await drill.sees(BUDGET)
    await reload(spill(money=1e6))
    await drill.sees_no_more(BUDGET)
    await flood_ends
