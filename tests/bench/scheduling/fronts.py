"""The fronts: this gateway, nginx `least_conn` and HAProxy `leastconn` with a queue.

Neither peer keeps connections to the nodes: llama.cpp promises to keep a stream's connection and
closes it all the same, and what they send there meanwhile they would answer with 502.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.bench.scheduling.fleet import SLOTS
from tests.bench.targets import HOST, TARGETS, Plan, Target, haproxy, nginx


@dataclass(frozen=True, slots=True)
class Front:
    """One column of the tables."""

    name: str
    title: str
    target: Target
    known: bool = True
    """Whether its clients say in `max_tokens` how long the answer will be. Only a gateway could
    make use of it."""


def _gateway(**settings: object) -> Callable[[str, Plan], list[str]]:
    def command(binary: str, plan: Plan) -> list[str]:
        # JSON is YAML. All other settings are the defaults.
        nodes, config = plan.folder / "nodes.yaml", plan.folder / "gateway.yaml"
        fleet = [
            {"name": f"node{i}", "url": f"http://{HOST}:{port}"}
            for i, port in enumerate(plan.upstreams)
        ]
        nodes.write_text(json.dumps({"nodes": fleet}))
        config.write_text(json.dumps(settings))
        return [
            *(binary, "serve", "--nodes", str(nodes), "--config", str(config)),
            *("--host", HOST, "--port", str(plan.port), "--admin-port", "0"),
        ]

    return command


def _nginx(binary: str, plan: Plan) -> list[str]:
    return nginx(
        binary,
        plan,
        http="  client_body_buffer_size 1m;",
        server="""    proxy_set_header Connection close;
    proxy_buffering off;""",
    )


def _haproxy(binary: str, plan: Plan) -> list[str]:
    return haproxy(
        binary,
        plan,
        defaults="""  option http-server-close
  timeout queue 1h""",
        server=f"maxconn {SLOTS}",
    )


_GATEWAY = replace(TARGETS["gateway"], command=_gateway())
_POLICIES = ("least_loaded", "round_robin", "prefix_hash")

FRONTS = {
    front.name: front
    for front in (
        Front("gateway", "gateway, lengths known", _GATEWAY),
        Front("gateway-unknown", "gateway, lengths unknown", _GATEWAY, known=False),
        Front("nginx", "nginx least_conn", replace(TARGETS["nginx"], command=_nginx)),
        Front(
            "haproxy",
            f"HAProxy leastconn, maxconn {SLOTS}",
            replace(TARGETS["haproxy"], command=_haproxy),
        ),
        *(
            Front(
                policy,
                f"gateway, policy {policy}",
                replace(TARGETS["gateway"], command=_gateway(policy=policy)),
            )
            for policy in _POLICIES
        ),
    )
}
OURS = ("gateway", "gateway-unknown")
PEERS = ("nginx", "haproxy")
USUAL = (*OURS, *PEERS)  # measured by default; the other policies only on demand
