"""A real Prometheus of the distribution's package, on a free port, that scrapes every second."""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import DEVNULL, STDOUT
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.gateways import NO_TLS
from tests.monitoring.rules import RENDERED
from tests.polling import eventually
from tests.processes import free_port


def _needs(program: str) -> pytest.MarkDecorator:
    reason = f"{program} is not installed here (apt-get install prometheus)"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


needs_prometheus, needs_promtool = _needs("prometheus"), _needs("promtool")


@dataclass(slots=True)
class Prometheus:
    client: httpx.AsyncClient

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now. Raises: AssertionError, if it is wrong."""
        response = await self.client.get("/api/v1/query", params={"query": expression})
        answer = response.json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        found = answer["data"]["result"]
        return found if isinstance(found, list) else [found]

    async def alerts(self) -> list[dict[str, str]]:
        """The labels of alerts that are pending or firing."""
        answer = (await self.client.get("/api/v1/alerts")).json()
        return [one["labels"] for one in answer["data"]["alerts"]]


@asynccontextmanager
async def running_prometheus(folder: Path, admin_url: str) -> AsyncIterator[Prometheus]:
    """Scrapes the admin listener of a gateway `gw`, and evaluates the written rules each second."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    config, url = folder / "prometheus.yml", f"http://127.0.0.1:{free_port()}"
    targets = [{"targets": [urlsplit(admin_url).netloc], "labels": {"gateway": "gw"}}]
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RENDERED)],
        "scrape_configs": [{"job_name": "llama-gateway", "static_configs": targets}],
    }
    config.write_text(yaml.safe_dump(settings))
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
            f"--web.listen-address={urlsplit(url).netloc}",
            stdin=DEVNULL, stdout=log, stderr=STDOUT,
        )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=NO_TLS) as client:

            async def ready() -> bool | None:
                if process.returncode is not None:
                    raise AssertionError((folder / "log").read_text())
                try:
                    return (await client.get("/-/ready")).status_code == 200 or None
                except httpx.TransportError:
                    return None

            await eventually(ready)
            yield Prometheus(client)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
