"""The alert rules of the monitoring role: what they name exists, and alerts are raised in time.

`promtool` tries them where it is installed; the deployment's tests do so on a host.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from gateway.tools.cli import app

jinja2 = pytest.importorskip("jinja2", reason="`make dev` installs it")

ROLE = Path(__file__).parents[2] / "deploy" / "ansible" / "roles" / "monitoring"

ALERTS = Path(__file__).with_name("alerts.yml")

METRICS = Path(__file__).parents[2] / "gateway" / "observe" / "metrics.py"


def rules() -> str:
    defaults = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
    template = (ROLE / "templates" / "llama-gateway-rules.yml.j2").read_text()
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    return str(made.from_string(template).render(defaults))


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(rules())["groups"] for rule in group["rules"]]


def test_every_alert_uses_metrics_of_the_gateway_that_exist() -> None:
    made = set(re.findall(r'"([a-z_]+)"', METRICS.read_text()))
    named = set(re.findall(r"\bllama_gateway_(\w+)", " ".join(one["expr"] for one in alerts())))
    assert {"certificate_days_left", "node_state"} <= named
    assert {name.removesuffix("_bucket") for name in named} <= made


def test_every_remedy_names_commands_that_exist() -> None:
    commands = set(getattr(get_command(app), "commands", ()))
    for alert in alerts():
        for word in re.findall(r"llama-gateway (\w+)", alert["annotations"]["remedy"]):
            assert word in commands | {"on"}, alert["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
def test_alerts_are_raised_in_time(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(rules())
    text = ALERTS.read_text().replace("/etc/prometheus/llama-gateway-rules.yml", "rules.yml")
    (tmp_path / "alerts.yml").write_text(text)
    ran = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "alerts.yml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
