"""The rules of Prometheus: what they name exists, and alerts are raised in time."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from gateway.tools.cli import app
from tests.monitoring.prometheus import needs_promtool
from tests.monitoring.rules import RENDERED, ROOT, alerts, rules, written_rules

ALERTS = Path(__file__).with_name("alerts.yml")

REFERENCE = ROOT / "docs" / "reference" / "http.md"

RUNBOOK = ROOT / "docs" / "runbook.md"


def test_the_written_rules_are_those_of_the_template() -> None:
    pytest.importorskip("jinja2", reason="`make dev` installs it")
    assert RENDERED.read_text() == rules(), "run: python -m tests.monitoring.rules --write"


def test_every_rule_uses_metrics_of_the_gateway_that_exist() -> None:
    told = set(re.findall(r"`llama_gateway_(\w+)`", REFERENCE.read_text()))
    expressions = " ".join(rule["expr"] for rule in written_rules())
    named = set(re.findall(r"\bllama_gateway_(\w+)", expressions))
    assert {"certificate_days_left", "node_state"} <= named
    assert {re.sub(r"_(bucket|count)$", "", name) for name in named} <= told


def test_every_rule_that_another_uses_is_recorded() -> None:
    recorded = {rule["record"] for rule in written_rules() if "record" in rule}
    used = {
        name
        for rule in written_rules()
        for name in re.findall(r"\b(gateway(?:_\w+)?:[\w:]+)", rule["expr"])
    }
    assert used <= recorded


def test_every_remedy_names_commands_that_exist() -> None:
    commands = set(getattr(get_command(app), "commands", ()))
    for alert in alerts():
        for word in re.findall(r"(?<!-u )llama-gateway (\w+)", alert["annotations"]["remedy"]):
            assert word in commands, alert["alert"]


def test_every_alert_names_its_place_and_links_to_its_section_of_the_runbook() -> None:
    headings = set(re.findall(r"^### (\w+)$", RUNBOOK.read_text(), re.MULTILINE))
    for alert in alerts():
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        link = alert["annotations"]["runbook_url"]
        assert link == f"docs/runbook.md#{alert['alert'].lower()}"
        if alert["alert"] != "LlamaGatewayQueue":
            assert "{{ $labels." in alert["annotations"]["summary"], alert["alert"]
    assert headings == {alert["alert"] for alert in alerts()}


@needs_promtool
def test_alerts_are_raised_in_time(tmp_path: Path) -> None:
    text = ALERTS.read_text().replace("/etc/prometheus/llama-gateway-rules.yml", str(RENDERED))
    (tmp_path / "alerts.yml").write_text(text)
    ran = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "alerts.yml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
