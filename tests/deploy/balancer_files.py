"""HAProxy's configuration for those who use no playbooks, rendered from the playbooks' template.

`python -m tests.deploy.balancer_files --write` renews deploy/cluster/haproxy.cfg.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
ROLE = DEPLOY / "ansible/roles/balancer"
RENDERED = DEPLOY / "cluster/haproxy.cfg"
HEADER = """\
# For two gateways that are called gw-a and gw-b, on ports 8000. Change their names or addresses in
# both backends and the ports after `bind` (443 and 80 need root); llama-gateway.pem is a
# certificate with its chain and its key. Written by
# `python -m tests.deploy.balancer_files --write` from the template of the role `balancer`.
"""
CHANGED = {"balancer_port": 8443, "balancer_http_port": 0}


def configuration() -> str:
    """The configuration with the role's defaults, but for the ports."""
    import jinja2

    variables: dict[str, Any] = {}
    for name in ("defaults", "vars"):
        variables |= yaml.safe_load((ROLE / name / "main.yml").read_text())
    made = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    made.filters["to_json"] = json.dumps
    gateways = [{"name": name, "address": f"{name}:8000"} for name in ("gw-a", "gw-b")]
    variables |= CHANGED | {"balancer_gateways": gateways, "balancer_named": True}
    lookup = made.from_string(variables["balancer_lookup"]).render(variables)
    template = made.from_string((ROLE / "templates/haproxy.cfg.j2").read_text())
    return HEADER + str(template.render(variables | {"balancer_lookup": lookup}))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    RENDERED.write_text(configuration())
