"""Grafana's dashboard: every query runs against a real Prometheus that scrapes a real gateway."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.emulator import EmulatedNode
from tests.gateway_processes import serving
from tests.gateways import NO_TLS
from tests.monitoring.prometheus import needs_prometheus, running_prometheus
from tests.monitoring.rules import ROOT, recorded
from tests.openapi.test_reference import metrics_made
from tests.polling import eventually

GRAFANA = ROOT / "deploy" / "monitoring" / "grafana"

VARIABLES = {"$gateway": ".*", "$model": ".*", "$__rate_interval": "30s"}
"""What Grafana puts in place of them."""


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "llama-gateway.json").read_text())
    return found


def queries() -> list[str]:
    """Every query of the panels, the variables and the annotations, as Prometheus gets it."""
    made = dashboard()
    found = [target["expr"] for panel in made["panels"] for target in panel["targets"]]
    found += [one["expr"] for one in made["annotations"]["list"]]
    asked = (one["query"] for one in made["templating"]["list"] if one["type"] == "query")
    found += [query.removeprefix("label_values(").partition(",")[0] for query in asked]
    for name, value in VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    return found


def test_panels_have_titles_units_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        across, down = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        cells = set(product(across, down))
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def metrics_of(query: str) -> set[str]:
    """The series that a query reads: all names but functions, labels and words of PromQL."""
    bare = re.sub(r"\{.*?\}|\[.*?\]|\b(?:by|without|on|ignoring) \(.*?\)", "", query)
    return set(re.findall(r"\b[a-zA-Z_][\w:]*\b(?! *\()", bare)) - {"by", "or", "and", "unless"}


def test_every_query_reads_series_that_the_gateway_exports() -> None:
    exported = {f"llama_gateway_{name}" for name in metrics_made()}
    exported |= {f"{name}_{part}" for name in exported for part in ("bucket", "count", "sum")}
    exported |= {"process_cpu_seconds_total", "process_resident_memory_bytes"}
    for query in queries():
        assert metrics_of(query)
        assert metrics_of(query) <= exported | recorded() | {"ALERTS"}, query
    query = 'sum by (node) (rate(llama_attempts{node=~"a|b"}[5m])) > 2 * a:b or vector(0)'
    assert metrics_of(query) == {"llama_attempts", "a:b"}


def test_provisioning_names_the_folder_to_which_the_playbooks_copy_the_dashboard() -> None:
    folder = GRAFANA / "provisioning" / "dashboards" / "llama-gateway.yml"
    path = yaml.safe_load(folder.read_text())["providers"][0]["options"]["path"]
    tasks = ROOT / "deploy" / "ansible" / "roles" / "monitoring" / "tasks" / "grafana.yml"
    assert path in tasks.read_text()


@pytest.mark.slow
@needs_prometheus
async def test_every_query_runs_against_a_real_prometheus(tmp_path: Path) -> None:
    settings = {"telemetry": {"gen_ai_metrics": True}}
    async with (
        EmulatedNode(model="demo") as node,
        serving(tmp_path / "gateway", node, settings=settings) as gateway,
        running_prometheus(tmp_path / "prometheus", gateway.admin_url) as prometheus,
        httpx.AsyncClient(base_url=gateway.url, trust_env=False, verify=NO_TLS) as client,
    ):

        async def counted(expression: str) -> bool | None:
            found = await prometheus.query(expression)
            return bool(found and float(found[0]["value"][1]) > 0) or None

        async def all_recorded() -> bool | None:
            found = [await prometheus.query(name) for name in recorded()]
            return all(found) or None

        async def ask() -> None:
            messages = [{"role": "user", "content": "Hello"}]
            body = {"messages": messages, "max_tokens": 4, "stream": True}
            response = await client.post("/v1/chat/completions", json=body, timeout=60.0)
            assert response.text.endswith("[DONE]\n\n")

        # A rate takes two scrapes of a series.
        await ask()
        await eventually(lambda: counted("llama_gateway_requests_total"))
        await ask()
        rate = 'rate(llama_gateway_tokens_total{kind="prompt"}[30s])'
        await eventually(lambda: counted(rate))
        await eventually(all_recorded)
        answers = await asyncio.gather(*(prometheus.query(query) for query in queries()))
        # Without a cluster there are no such metrics.
        clusters = re.compile("llama_gateway_cluster_|llama_gateway_late_leases")
        pairs = zip(queries(), answers, strict=True)
        empty = [query for query, found in pairs if not found and not clusters.search(query)]
        assert empty == [dashboard()["annotations"]["list"][0]["expr"]], "nothing fires"
        assert await prometheus.query("llama_gateway_node_metrics_up") == []
