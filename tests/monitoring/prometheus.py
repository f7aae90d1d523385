"""A real Prometheus of the distribution's package, on a free port, that scrapes every second.

async with running_prometheus(folder, {"gw": admin_url}, rules) as prometheus:
    await prometheus.pending("LlamaNodeOut")
"""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import DEVNULL, STDOUT
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.gateways import NO_TLS
from tests.polling import eventually
from tests.processes import free_port

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="Prometheus is not installed here (apt-get install prometheus)",
)

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed here (apt-get install prometheus)",
)

LIMIT = 60.0
"""Seconds for each wait."""


@dataclass(slots=True)
class Prometheus:
    """A server that runs."""

    client: httpx.AsyncClient

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now. Raises: AssertionError, if it is wrong."""
        response = await self.client.get("/api/v1/query", params={"query": expression})
        answer = response.json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        found = answer["data"]["result"]
        return found if isinstance(found, list) else [found]

    async def alerts(self) -> list[dict[str, Any]]:
        """Alerts that are pending or firing."""
        answer = (await self.client.get("/api/v1/alerts")).json()
        return list(answer["data"]["alerts"])

    async def raised(self, name: str, limit: float = LIMIT) -> dict[str, Any]:
        """The alert of this name, once it is pending or firing."""

        async def look() -> dict[str, Any] | None:
            found = (one for one in await self.alerts() if one["labels"]["alertname"] == name)
            return next(found, None)

        return await eventually(look, limit)


@asynccontextmanager
async def running_prometheus(
    folder: Path, gateways: Mapping[str, str], rules: str
) -> AsyncIterator[Prometheus]:
    """Scrapes the admin listeners, by the gateway's name, and evaluates `rules` each second."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    (folder / "rules.yml").write_text(rules)
    targets = [
        {"targets": [urlsplit(url).netloc], "labels": {"gateway": name}}
        for name, url in gateways.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": [{"job_name": "llama-gateway", "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdin=DEVNULL, stdout=log, stderr=STDOUT,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=NO_TLS) as client:
            prometheus = Prometheus(client)

            async def ready() -> bool | None:
                if process.returncode is not None:
                    raise AssertionError((folder / "log").read_text())
                try:
                    return (await client.get("/-/ready")).status_code == 200 or None
                except httpx.TransportError:
                    return None

            await eventually(ready, LIMIT)
            yield prometheus
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
