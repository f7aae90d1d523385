"""What is compared: this gateway, nginx `least_conn` and HAProxy `leastconn` with a queue.

Neither peer keeps connections to the nodes: llama.cpp promises to keep a stream's connection and
closes it all the same, and what they send there meanwhile they would answer with 502.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.bench.scheduling.fleet import SLOTS
from tests.bench.targets import CONNECTIONS, HOST, TARGETS, Plan, Target, free_port


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
        # JSON is YAML. All else is left as an operator finds it.
        nodes, config = plan.folder / "nodes.yaml", plan.folder / "gateway.yaml"
        fleet = [
            {"name": f"node{i}", "url": f"http://{HOST}:{port}"}
            for i, port in enumerate(plan.upstreams)
        ]
        nodes.write_text(json.dumps({"nodes": fleet}))
        config.write_text(json.dumps(settings))
        return [
            *(binary, "serve", "--nodes", str(nodes), "--config", str(config)),
            *("--host", HOST, "--port", str(plan.port), "--admin-port", str(free_port())),
        ]

    return command


def _nginx(binary: str, plan: Plan) -> list[str]:
    servers = "\n".join(f"    server {HOST}:{port} max_fails=0;" for port in plan.upstreams)
    user = "user root;" if os.geteuid() == 0 else ""
    config = plan.folder / "nginx.conf"
    config.write_text(f"""{user}
daemon off;
worker_processes 1;
worker_rlimit_nofile {CONNECTIONS};
pid nginx.pid;
error_log error.log error;
events {{ worker_connections {CONNECTIONS}; }}
http {{
  access_log off;
  client_body_buffer_size 1m;
  client_body_temp_path body;
  proxy_temp_path proxy;
  fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
  upstream nodes {{
    least_conn;
{servers}
  }}
  server {{
    listen {HOST}:{plan.port} backlog=4096;
    proxy_http_version 1.1;
    proxy_set_header Connection close;
    proxy_buffering off;
    proxy_read_timeout 3600s;
    location / {{ proxy_pass http://nodes; }}
  }}
}}
""")
    return [binary, "-p", str(plan.folder), "-c", str(config), "-e", "error.log"]


def _haproxy(binary: str, plan: Plan) -> list[str]:
    servers = "\n".join(
        f"  server node{i} {HOST}:{port} maxconn {SLOTS}" for i, port in enumerate(plan.upstreams)
    )
    config = plan.folder / "haproxy.cfg"
    config.write_text(f"""global
  nbthread 1
  maxconn {CONNECTIONS // 2}
defaults
  mode http
  option http-no-delay
  option http-server-close
  timeout connect 5s
  timeout queue 1h
  timeout client 1h
  timeout server 1h
frontend public
  bind {HOST}:{plan.port} backlog 4096
  default_backend nodes
backend nodes
  balance leastconn
{servers}
""")
    return [binary, "-db", "-f", str(config)]


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
USUAL = (*OURS, *PEERS)
"""Measured unless told otherwise; the other policies only on demand."""
