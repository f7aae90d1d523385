"""The rules of Prometheus, rendered from the playbooks' template with their defaults.

`python -m tests.monitoring.rules --write` renews deploy/monitoring/llama-gateway-rules.yml, for
those who use no playbooks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "deploy" / "ansible" / "roles" / "monitoring"
RENDERED = ROOT / "deploy" / "monitoring" / "llama-gateway-rules.yml"
HEADER = """\
# Recording and alert rules for Prometheus, for those who do not use the playbooks. Written by
# `python -m tests.monitoring.rules --write` from the template of the role `monitoring`.
"""


def rules() -> str:
    import jinja2

    defaults = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
    template = (ROLE / "templates" / "llama-gateway-rules.yml.j2").read_text()
    made = jinja2.Environment(
        undefined=jinja2.StrictUndefined, autoescape=False, keep_trailing_newline=True
    )
    return HEADER + str(made.from_string(template).render(defaults))


def written_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RENDERED.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in written_rules() if "alert" in rule]


def recorded() -> set[str]:
    return {rule["record"] for rule in written_rules() if "record" in rule}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    RENDERED.write_text(rules())
