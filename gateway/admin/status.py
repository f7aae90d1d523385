"""`/admin/status`, the state that `/metrics` reports at each scrape, and `/metrics/nodes`.

`/metrics/nodes` has the metrics of all llama.cpp servers on one page, each with its node's name. A
node is not trusted: its text may be anything. Only samples of llama.cpp's own families pass, with a
number and without labels of their own; `llamacpp:prompt_tokens_total 12` becomes
`llamacpp:prompt_tokens_total{node="a"} 12`.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.configuration import ClusterMember, GatewayControl
from gateway.admin.nodes import differences_json
from gateway.callers.ledger import Ledger
from gateway.callers.windows import time_text
from gateway.config.settings import Settings
from gateway.edges.supervisor import Edges
from gateway.errors import CLIENT_CLOSED_STATUS, GatewayError
from gateway.nodes.fleet import Fleet
from gateway.nodes.health import fetch
from gateway.nodes.lifecycle import ProbeResult
from gateway.nodes.node import Node
from gateway.store.store import Store
from gateway.terms import Priority
from gateway.watch.metrics import (
    CONTENT_TYPE,
    METRIC_PREFIX,
    ROLES,
    ClusterSample,
    EdgeSample,
    Metrics,
    MetricsPage,
    NodeSample,
    labels,
)
from gateway.watch.request_tracing import RequestTracing
from gateway.web.asgi import HealthEndpoints, JsonResponse, in_steps

MOST_LISTED_WAITING = 100  # most queued requests that are listed; `queue` counts them all


@dataclass(frozen=True, slots=True)
class StatusEndpoints:
    """The endpoint of the gateway's status."""

    gateway: GatewayControl
    metrics: Metrics
    health: HealthEndpoints

    async def status(self, _: Request) -> Response:
        gateway, fleet = self.gateway, self.gateway.fleet
        files, keys = gateway.config_files, gateway.key_sync
        states, slots, busy = Counter[str](), 0, 0
        async for node in in_steps([*fleet.nodes.values()]):
            states[node.state.value] += node.router is None
            slots += node.slots_now
            busy += node.slots_busy
        uptime = gateway.clock() - gateway.started_at
        return JsonResponse(
            StatusObject(
                **whole_figures(gateway, self.health),
                started_at=time_text(time.time() - uptime),
                uptime=round(uptime, 3),
                waiting=self._waiting(),
                totals=totals_json(self.metrics),
                nodes=dict(+states),
                slots_total=slots,
                slots_busy=busy,
                models_paused=sorted(fleet.model_index.paused_by_name),
                model_differences=differences_json(fleet.differences()),
                inventory_error=files.inventory_error,
                settings_error=files.settings_error,
                keys_lost=keys.key_ring.lost,
                keys_unsaved=keys.unsaved,
                certificate_error=gateway.certificates.error,
                certificates={
                    key: {
                        "expires_at": time_text(expires),
                        "days_left": round(days_until(expires), 2),
                    }
                    for key, expires in gateway.certificates.listeners.expiry.items()
                },
                store=store_json(gateway.store),
                audit_lost=gateway.audit.lost,
                ledger=ledger_json(gateway.ledger),
            )
        )

    def _waiting(self) -> list[dict[str, Any]]:
        scheduler = self.gateway.scheduler
        now = scheduler.clock()
        return [
            {
                "position": position,
                "seconds": round(now - waiter.queued_at, 3),
                "class": waiter.request.caller.priority.label,
                "model": waiter.request.wanted.model,
                "expected_start": round(wait, 3) if math.isfinite(wait) else None,
            }
            for position, (waiter, wait) in enumerate(
                scheduler.predicted_waits(MOST_LISTED_WAITING), 1
            )
        ]


class StatusObject(msgspec.Struct, kw_only=True):
    """The gateway on one page. Times are in seconds."""

    version: Annotated[str, "of this process"]
    started_at: Annotated[str, "of this process"]
    uptime: Annotated[float, "seconds"]
    ready: Annotated[bool, "whether `/ready` is 200"]
    reason: Annotated[str | None, "else the code that it answers with"]
    in_flight: Annotated[int, "requests that wait or run"]
    queue: Annotated[dict[str, int], "how many wait, by class"]
    waiting: Annotated[list[Any], "the first 100 of them: `position`, `seconds` waited, `class`, "
        "`model`, `expected_start` in seconds from now"]  # fmt: skip
    nodes: Annotated[dict[str, int], "nodes by state"]
    slots_total: Annotated[int, "slots of all nodes"]
    slots_busy: Annotated[int, "of these busy"]
    totals: Annotated[dict[str, Any], "since the start: requests, failures by code, clients that "
        "left, tokens"]  # fmt: skip
    hybrid: Annotated[dict[str, Any] | None, "with GPU nodes: which classes go there first, and "
        "the [budget](../hybrid.md) for the others; else null"]  # fmt: skip
    models_paused: Annotated[list[str], "public names that an operator has paused"]
    model_differences: Annotated[list[Any], "where nodes of one model differ: `model`, `what` "
        "(`quantisation`, `build`, `context` or `template`), `summary`, `values` with the nodes "
        "of each"]  # fmt: skip
    inventory_error: Annotated[str | None, "what is wrong with the inventory on the disk, while an "
        "older one is in force"]  # fmt: skip
    settings_error: Annotated[str | None, "likewise with the settings"]
    certificate_error: Annotated[str | None, "likewise with a renewed certificate, of a listener "
        "or for a node"]  # fmt: skip
    certificates: Annotated[dict[str, Any], "`expires_at` and `days_left` of the certificates in "
        "force, by `listen.tls` and `admin.tls`"]  # fmt: skip
    audit_lost: Annotated[int, "changes that were logged and could not be kept"]
    store: Annotated[dict[str, Any], "`state`, the reason and the remedy, [the "
        "store](../store.md)"]  # fmt: skip
    ledger: Annotated[dict[str, Any] | None, "rows of the [ledger](../usage.md) in this process: "
        "`pending`, `written`, `recovered` for killed processes, `dropped`, and why the last "
        "writing failed (`error`); null without a store"]  # fmt: skip
    edges: Annotated[list[Any] | None, "the [processes that relay](../scaling.md): `name`, `pid`, "
        "`ready`, `streams`, `connections`, `cpu_share` of one processor, `cpu_seconds` and "
        "`uptime_seconds` since their start, `memory_bytes`; null: there are none"]  # fmt: skip
    cluster: Annotated[dict[str, Any] | None, "the [cluster](../scaling.md): its `name`, the "
        "`leader`, its `epoch`, the `member` that answers with its `role` (`leader`, `follower`, "
        "`alone`, `limbo`), and all `members`, each with `name`, `role`, `address`, `version`, "
        "`heard_seconds` since it was heard of, `cores` and `edges`; null: it is a gateway of its "
        "own"]  # fmt: skip
    keys_lost: Annotated[str | None, "why the public listener answers 401 to everybody: a reload "
        "took the last API key away"]  # fmt: skip
    keys_unsaved: Annotated[str | None, "why a gateway that starts without the store would not "
        "know the keys as they are now; it is tried again, at least once a minute"]  # fmt: skip


def whole_figures(gateway: GatewayControl, health: HealthEndpoints) -> dict[str, Any]:
    """What both the status and the live view tell of the whole gateway."""
    scheduler, edges, error = gateway.scheduler, gateway.edges, health.readiness_error()
    depths, has_gpu = scheduler.depths(), scheduler.fleet_sync.has_gpu_tier
    return {
        "version": gateway.version,
        "ready": error is None,
        "reason": None if error is None else error.code,
        "in_flight": len(gateway.registry),
        "queue": {priority.label: depths[priority] for priority in Priority},
        "hybrid": scheduler.tier_policy.view(gateway.clock()) if has_gpu else None,
        "edges": None if edges is None else [edge_json(one) for one in edges.sample()],
        "cluster": cluster_json(gateway.cluster),
    }


def days_until(seconds: float) -> float:
    """Days until this time, in seconds since 1970; negative if it has passed."""
    return (seconds - time.time()) / 86400


def days_left(gateway: GatewayControl) -> dict[str, float]:
    """Days until the certificate of each listener with TLS expires."""
    expiry = gateway.certificates.listeners.expiry
    return {key: days_until(expires) for key, expires in expiry.items()}


def store_json(store: Store | None) -> dict[str, Any]:
    """The state of the store, the reason and the remedy; without a store its state is `off`."""
    if store is None:
        return {"state": "off"}
    status = store.status()
    return asdict(status) | {"since": time_text(status.since)}


def ledger_json(ledger: Ledger | None) -> dict[str, Any] | None:
    """How many rows of the ledger wait, were written and were lost; None without a store."""
    if ledger is None:
        return None
    return {
        "pending": ledger.pending,
        "written": ledger.written,
        "recovered": ledger.recovered,
        "dropped": ledger.dropped,
        "error": ledger.worker.problem,
    }


def edge_json(edge: EdgeSample) -> dict[str, Any]:
    """A process that relays."""
    fields = asdict(edge).items()
    return {name: round(of, 3) if isinstance(of, float) else of for name, of in fields}


def cluster_json(member: ClusterMember | None) -> dict[str, Any] | None:
    """The cluster as a member knows it; None: the gateway belongs to none."""
    if member is None:
        return None
    found = member.sample()
    return {
        "name": found.name,
        "leader": found.leader or None,
        "epoch": found.epoch,
        "member": found.member,
        "role": found.role,
        "members": [
            {
                "name": one.name,
                "role": one.role,
                "address": one.address,
                "version": one.version,
                "heard_seconds": None if one.heard_seconds is None else round(one.heard_seconds, 3),
                "cores": one.cores,
                "edges": [edge_json(edge) for edge in one.edges],
            }
            for one in found.members
        ],
    }


def totals_json(metrics: Metrics) -> dict[str, Any]:
    """Counts of all requests that have ended. A client that disconnected is not a failure."""
    statuses: Counter[int] = Counter()
    prompt = completion = 0
    for status, counts in metrics.counts_by_status():
        statuses[status] += counts.requests
        prompt += counts.prompt
        completion += counts.completion
    failures = {
        str(status): count
        for status, count in sorted(statuses.items())
        if status >= 400 and status != CLIENT_CLOSED_STATUS
    }
    return {
        "requests": statuses.total(),
        "failures": sum(failures.values()),
        "failures_by_code": failures,
        "clients_left": statuses[CLIENT_CLOSED_STATUS],
        "prompt_tokens": prompt,
        "completion_tokens": completion,
    }


def _node_sample(node: Node, fleet: Fleet) -> NodeSample:
    """A node, or a router's model; a router has the slots of its models."""
    slots, busy, left_alone = node.slots_now, node.slots_busy, None
    if node.is_router:
        slots = sum(one.slots_now for one in node.instances.values())
        busy = sum(one.slots_busy for one in node.instances.values())
        left_alone = int(node.router_record.stopped(node.clock()))
    load, router = node.load, node.router
    return NodeSample(
        name=node.name,
        state=node.state.value,
        slots_total=slots,
        slots_busy=busy,
        decode_tps=node.speed.decode_tps,
        prefill_tps=node.speed.prefill_tps,
        differs=bool(node.drift),
        router=None if router is None else router.name,
        model=node.spec.instance or "",
        load_failures=0 if load is None else load.failures,
        left_alone=left_alone,
        used_by_others=router is None and fleet.others_take_slots(node),
    )


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """Reads the state of the gateway for `Metrics`, at each scrape.

    `add_batches` adds what is told of work that callers need not wait for.
    """

    gateway: GatewayControl
    retries_left: Callable[[], int]
    add_batches: Callable[[MetricsPage], None] = lambda _: None
    tracing: RequestTracing | None = None

    def nodes(self) -> Iterator[NodeSample]:
        """Every node, each as it is when it is read."""
        fleet = self.gateway.fleet
        return (_node_sample(node, fleet) for node in list(fleet.nodes.values()))

    def add_to(self, page: MetricsPage) -> None:
        gateway, scheduler = self.gateway, self.gateway.scheduler
        accuracy, now = scheduler.accuracy, scheduler.clock()
        ratios = {"first_token": accuracy.first_token, "completion": accuracy.completion}
        page.histograms("prediction_ratio", [({"of": what}, one) for what, one in ratios.items()])
        cached = {"expected": accuracy.cached_expected, "found": accuracy.cached_found}
        page.counts("predicted_cached_tokens_total", cached, "of")
        depths, oldest = scheduler.depths(), scheduler.waiters.longest_waits(now)
        page.counts("queue_depth", {one.label: depths.get(one, 0) for one in Priority}, "class")
        waited = {one.label: oldest.get(one, 0.0) for one in Priority}
        page.counts("queue_oldest_seconds", waited, "class")
        page.number("queue_places", scheduler.settings.queue.max)
        page.number("spill_money_left", scheduler.tier_policy.money_left(now))
        page.number("in_flight", len(gateway.registry))
        paused = dict.fromkeys(sorted(gateway.fleet.model_index.paused_by_name), 1)
        page.counts("model_paused", paused, "model")
        quotas = {}
        for one in gateway.quotas.used:
            limit, state = one.standing, "spent" if one.spent else "near"
            key = (limit.kind, one.id, limit.limit, limit.period or "", state)
            quotas[key] = round(one.share, 4)
        page.counts("quota_used_ratio", quotas, "of", "id", "limit", "period", "state")
        page.number("inventory_error", int(gateway.config_files.inventory_error is not None))
        page.number("retry_budget", self.retries_left())
        if certificates := days_left(gateway):
            days = {key: round(left, 3) for key, left in certificates.items()}
            page.counts("certificate_days_left", days, "certificate")
        if gateway.store is not None:
            store = gateway.store.status()
            page.number("store_up", int(store.up))
            page.number("store_jobs_waiting", store.waiting)
        if gateway.ledger is not None:
            ledger = gateway.ledger
            page.number("ledger_rows_waiting", ledger.pending)
            page.number("ledger_rows_written_total", ledger.written)
            page.number("ledger_rows_recovered_total", ledger.recovered)
            page.number("ledger_rows_dropped_total", ledger.dropped)
        self.add_batches(page)
        if self.tracing is not None and self.tracing.active:
            counts = self.tracing.counts
            dropped = {"queue_full": counts.not_queued, "not_taken": counts.not_sent}
            page.number("traces_exported_total", counts.exported)
            page.counts("traces_dropped_total", dropped, "reason")
        if gateway.edges is not None:
            _add_edges(page, gateway.edges)
        if gateway.cluster is not None:
            _add_cluster(page, gateway.cluster.sample())


def _add_edges(page: MetricsPage, edges: Edges) -> None:
    running = edges.sample()
    page.number("edges", len(running))
    page.number("edges_configured", edges.brain.edges)
    page.number("edges_died_total", edges.died)
    page.number("edge_late_leases_total", edges.brain.late_leases)
    page.counts("edge_streams", {one.name: one.streams for one in running}, "edge")
    page.counts("edge_connections", {one.name: one.connections for one in running}, "edge")
    page.counts("edge_cpu_seconds_total", {one.name: one.cpu_seconds for one in running}, "edge")
    page.counts("edge_memory_bytes", {one.name: one.memory_bytes for one in running}, "edge")


def _add_cluster(page: MetricsPage, cluster: ClusterSample) -> None:
    page.counts("cluster_role", {role: int(role == cluster.role) for role in ROLES}, "role")
    page.number("cluster_epoch", cluster.epoch)
    page.number("cluster_members", len(cluster.members))
    page.number("cluster_members_lost", len(cluster.lost))
    page.number("late_leases_total", cluster.late)


# `/metrics/nodes`.

# Nodes that are asked together: to read the answers of more in one turn of the event loop would
# hold up requests. The next ones are asked when these have answered, or after `LATE_SECONDS`.
AT_ONCE, LATE_SECONDS = 8, 0.03
# Time for all nodes; Prometheus waits 10 seconds for a page unless told otherwise.
WHOLE_SECONDS = 6.0
FRESH_SECONDS = 5.0  # for so long a page is shown again instead of asking the nodes anew
LARGEST_PAGE = 64 << 10  # bytes of a node's page; llama.cpp's has 4,000


@dataclass(slots=True)
class NodeMetricsEndpoint:
    """Asks all nodes, at most once in `FRESH_SECONDS`, whoever reads the page."""

    fleet: Fleet
    settings: Callable[[], Settings]
    clock: Callable[[], float]
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _text: bytes = b""
    _made_at: float = -math.inf

    async def show(self, _: Request) -> Response:
        """The page. Raises: GatewayError if the settings have switched it off."""
        if not self.settings().telemetry.node_metrics:
            raise GatewayError(
                404, "not_found", "Metrics of nodes are off: set telemetry.node_metrics to true."
            )
        async with self._asking:
            if self.clock() - self._made_at >= FRESH_SECONDS:
                nodes = [one for one in self.fleet.nodes.values() if one.spec.kind == "llama.cpp"]
                found = await self._ask(nodes)
                page = MetricsPage("")
                page.family(
                    f"{METRIC_PREFIX}node_metrics_up",
                    ((labels(node=node.name), int(node.name in found)) for node in nodes),
                    help_text="1 for nodes that have shown their metrics.",
                )
                add_node_metrics(page, found)
                text = bytearray()
                for step in page.steps():
                    text += step.encode()
                    await asyncio.sleep(0)
                self._text = bytes(text)
                self._made_at = self.clock()
        return Response(self._text, headers={"content-type": CONTENT_TYPE})

    async def _ask(self, nodes: list[Node]) -> dict[str, NodeFamilies]:
        """What the nodes say, in their order; those that do not answer in time are missing."""
        up = [one for one in nodes if one.in_service and one.probe_history.up]
        asked = [node for node in up if not node.probe_history.silent]
        tasks: dict[str, asyncio.Task[NodeFamilies | None]] = {}
        try:
            async with asyncio.timeout(WHOLE_SECONDS):
                for at in range(0, len(asked), AT_ONCE):
                    for node in asked[at : at + AT_ONCE]:
                        name = f"metrics of {node.name}"
                        tasks[node.name] = asyncio.create_task(_read(node), name=name)
                    await asyncio.wait([*tasks.values()][at:], timeout=LATE_SECONDS)
                if tasks:
                    await asyncio.wait(tasks.values())
        except TimeoutError:
            pass
        finally:
            for task in tasks.values():
                task.cancel()
            results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        pairs = zip(tasks, results, strict=True)
        return {name: told for name, told in pairs if isinstance(told, dict)}


async def _read(node: Node) -> NodeFamilies | None:
    reply = await fetch(node, "/metrics", largest=LARGEST_PAGE)
    if isinstance(reply, ProbeResult) or reply.status != 200:
        return None
    return read_node_metrics(reply.body)


MOST_SAMPLES = 100  # most samples of one node; llama.cpp has some twenty
MOST_FAMILIES = 200  # most families of all nodes together: builds differ in theirs
LONGEST_HELP = 200  # characters of a family's description

_LINE = re.compile(
    rb"^(?:# (?P<kind>HELP|TYPE) (?P<named>llamacpp:[a-z0-9_]{1,80}) (?P<text>[^\n]*)"
    rb"|(?P<name>llamacpp:[a-z0-9_]{1,80})(?:\{[^}\n]*\})? "
    rb"(?P<value>[+-]?(?:\d{1,30}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?|Inf|NaN|inf|nan)))\s*$",
    re.MULTILINE,
)
_TYPES = frozenset({"counter", "gauge"})


# By the name of a family: a node's value, the family's type and its description.
NodeFamilies = dict[str, tuple[float, str, str]]


def read_node_metrics(text: bytes) -> NodeFamilies | None:
    """What may be shown of a node's page; None: it is no page of llama.cpp's metrics."""
    values: dict[str, float] = {}
    types: dict[str, str] = {}
    helps: dict[str, str] = {}
    for line in _LINE.finditer(text):
        if line["name"] is not None:
            values.setdefault(line["name"].decode(), float(line["value"]))
            if len(values) >= MOST_SAMPLES:
                break
            continue
        name, words = line["named"].decode(), line["text"].decode("utf-8", "replace").strip()
        if line["kind"] == b"HELP":
            helps[name] = re.sub(r"[^ -~]|\\", " ", words)[:LONGEST_HELP]
        elif words in _TYPES:
            types[name] = words
    return {
        name: (value, types.get(name, "untyped"), helps.get(name) or "Of llama.cpp's server.")
        for name, value in values.items()
    } or None


def add_node_metrics(page: MetricsPage, nodes: Mapping[str, NodeFamilies]) -> None:
    """Add the families of all nodes to a page, each family once."""
    by_family: dict[str, NodeFamilies] = {}  # here by the names of nodes
    for node, families in nodes.items():
        for name, sample in families.items():
            if name in by_family or len(by_family) < MOST_FAMILIES:
                by_family.setdefault(name, {})[node] = sample
    for name, samples in by_family.items():
        _, kind, text = next(iter(samples.values()))
        values = [(labels(node=node), value) for node, (value, _, _) in samples.items()]
        page.family(name, values, kind, text)
