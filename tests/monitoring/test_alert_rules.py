"""The rules of Prometheus: what they name exists, and alerts are raised in time."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_lines import calls, unknown
from tests.monitoring.prometheus import needs_promtool
from tests.monitoring.rules import RENDERED, ROLE, ROOT, alerts, recorded, rules, written_rules
from tests.monitoring.test_grafana import queries

ALERTS = Path(__file__).with_name("alerts.yml")
REFERENCE = ROOT / "docs" / "reference" / "http.md"
RUNBOOK = ROOT / "docs" / "runbook.md"
OF_THE_SYSTEM = {"curl", "df", "journalctl", "openssl", "ss", "systemctl", "top", "vmstat"}
"""Commands of the machine, beside the gateway's own."""


def test_the_written_rules_are_those_of_the_template() -> None:
    pytest.importorskip("jinja2", reason="`make dev` installs it")
    assert RENDERED.read_text() == rules(), "run: python -m tests.monitoring.rules --write"


def test_every_rule_uses_metrics_of_the_gateway_that_exist() -> None:
    told = set(re.findall(r"`llama_gateway_(\w+)`", REFERENCE.read_text()))
    expressions = " ".join(rule["expr"] for rule in written_rules())
    named = set(re.findall(r"\bllama_gateway_(\w+)", expressions))
    assert {"certificate_days_left", "node_state"} <= named
    assert {re.sub(r"_(bucket|count)$", "", name) for name in named} <= told


def test_what_is_recorded_is_what_alerts_and_panels_use() -> None:
    expressions = [*(rule["expr"] for rule in written_rules()), *queries()]
    used = set(re.findall(r"\b(gateway(?:_\w+)?:[\w:]+)", " ".join(expressions)))
    assert used
    assert used == recorded()


def wrong_commands(remedy: str) -> list[str]:
    """What is wrong with the commands of a remedy, which stand in backticks."""
    typed = re.findall(r"`([^`]+)`", remedy)
    outside = re.sub(r"`[^`]+`", "", remedy)
    wrong = [] if typed else ["no command"]
    wrong += [word for word in ("llama-gateway", "journalctl") if word in outside]
    programs = (line.split()[0] for line in typed)
    wrong += [word for word in programs if word not in {"llama-gateway", *OF_THE_SYSTEM}]
    return wrong + [word for words in calls(remedy) for word in unknown(words)]


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_every_remedy_names_a_command_that_exists(alert: dict[str, Any]) -> None:
    # Each branch of a template is a remedy.
    for remedy in re.split(r"{{ else }}", alert["annotations"]["remedy"]):
        assert wrong_commands(remedy) == []


def test_a_remedy_with_a_command_that_does_not_exist_is_found() -> None:
    wrong = {
        "Look at its machine": ["no command"],
        "llama-gateway nodes, or `top`": ["llama-gateway"],
        "`llama-gateway check --prob` or `htop`": ["htop", "--prob"],
        "`llama-gateway keys mend` and `llama-gateway nodes fix a`": ["mend", "fix"],
    }
    assert {remedy: wrong_commands(remedy) for remedy in wrong} == wrong


def test_every_alert_names_its_place_and_links_to_its_section_of_the_runbook() -> None:
    headings = set(re.findall(r"^### (\w+)$", RUNBOOK.read_text(), re.MULTILINE))
    for alert in alerts():
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        link = alert["annotations"]["runbook_url"]
        assert link == f"docs/runbook.md#{alert['alert'].lower()}"
        assert "{{ $labels." in alert["annotations"]["summary"], alert["alert"]
    assert headings == {alert["alert"] for alert in alerts()}


def test_alerts_that_leave_the_machine_must_link_to_a_url() -> None:
    jinja2 = pytest.importorskip("jinja2", reason="`make dev` installs it")
    tasks = yaml.safe_load((ROLE / "tasks" / "preflight.yml").read_text())
    (that,) = (task["ansible.builtin.assert"]["that"] for task in tasks if "link" in task["name"])
    made = jinja2.Environment(autoescape=False)
    made.tests["match"] = lambda text, pattern: re.match(pattern, text) is not None
    accepts = made.compile_expression(that)
    page, url = "docs/runbook.md", "https://wiki.example/runbook"
    assert accepts(monitoring_alertmanagers=[], monitoring_runbook=page)
    assert accepts(monitoring_alertmanagers=["10.0.0.9:9093"], monitoring_runbook=url)
    assert not accepts(monitoring_alertmanagers=["10.0.0.9:9093"], monitoring_runbook=page)


@needs_promtool
def test_every_alert_is_raised_in_time_and_not_without_cause(tmp_path: Path) -> None:
    text = ALERTS.read_text().replace("/etc/prometheus/llama-gateway-rules.yml", str(RENDERED))
    checks = [one for case in yaml.safe_load(text)["tests"] for one in case["alert_rule_test"]]
    names = {alert["alert"] for alert in alerts()}
    for fires in (True, False):
        assert {one["alertname"] for one in checks if bool(one["exp_alerts"]) is fires} == names
    (tmp_path / "alerts.yml").write_text(text)
    ran = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "alerts.yml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
