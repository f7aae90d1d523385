"""`GET /metrics`: counters fed by events, and the current state, which is read at each scrape.

An event costs a few microseconds on the hot path, in plain dictionaries; text is made at the
scrape. The number of series is bounded: nodes by the inventory, models by a cap; a histogram has at
most `MOST_LABEL_SETS` combinations of labels that name a model, and counts the rest as `other`.

The text is Prometheus' format 0.0.4. A scrape runs on the event loop, and prometheus_client renders
some 130,000 samples a second: a page of 1,000 nodes, some 17,000 lines, would block every stream
for 80 ms. So only the process's own metrics come from there, and all others are written in steps.
"""

from __future__ import annotations

import itertools
import math
import operator
import platform
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from gateway import __version__
from gateway.errors import CLIENT_CLOSED_STATUS
from gateway.events import (
    CALIBRATION_OUTCOMES,
    PROMPT_ACTIONS,
    WEBHOOK_OUTCOMES,
    AttemptEnded,
    EndedKind,
    EventBus,
    HookEnded,
    LimitReached,
    ModelLoadChanged,
    NodeCalibrated,
    PromptsKept,
    RequestRecord,
    SlotYielded,
    StreamResumed,
    WebhookAttempted,
)
from gateway.nodes.node import NodeState
from gateway.schedule.decision_log import RatioCounts
from gateway.terms import Priority

T = TypeVar("T")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CHARACTERS_OF_A_STEP = 32 << 10  # Text that is written at once: about a millisecond
# The label of what is counted together, since too many different values have come.
OTHER_LABEL = "other"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def labels(**values: str) -> str:
    """The labels of a sample, with escaped values: `{node="a",state="ready"}`."""
    return "{" + ",".join(f'{name}="{escape_label(value)}"' for name, value in values.items()) + "}"


def escape_label(value: str) -> str:
    """A label's escaped value, without quotes."""
    return value.translate(_ESCAPES)


def format_value(value: float) -> str:
    """A sample's value as text."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


class MetricsPage:
    """The text of one scrape, family by family; `HELP` tells of those without a text of their own.

    Samples are taken when they are written, perhaps after other work: an iterable that is given
    here must stay valid while the values in it change.
    """

    __slots__ = ("_parts", "_prefix")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._parts: list[Iterable[str]] = []

    def family(
        self, name: str, samples: Iterable[tuple[str, float]], kind: str = "", help_text: str = ""
    ) -> None:
        """Add a family; a sample is its labels with braces (or an empty text) and its value.

        `kind`: that of its name, if it is not given.
        """
        full = self._prefix + name
        kind = kind or ("counter" if name.endswith("_total") else "gauge")
        self._parts.append([f"# HELP {full} {help_text or HELP[name]}\n# TYPE {full} {kind}\n"])
        self._parts.append(f"{full}{braces} {format_value(value)}\n" for braces, value in samples)

    def number(self, name: str, value: float | None) -> None:
        """Add a family of one sample without labels, if the value is known."""
        if value is not None:
            self.family(name, [("", value)])

    def samples(
        self, name: str, samples: Iterable[tuple[tuple[str, ...], float]], *names: str
    ) -> None:
        """Add a family of samples with these labels."""
        self.family(
            name,
            ((labels(**dict(zip(names, values, strict=True))), value) for values, value in samples),
        )

    def counts(self, name: str, counts: Mapping[Any, float], *names: str) -> None:
        """Add a family of the values in a table, whose keys are one label or several."""
        of_one = ((key if isinstance(key, tuple) else (key,), n) for key, n in [*counts.items()])
        self.samples(name, of_one, *names)

    def nodes(
        self,
        name: str,
        nodes: Sequence[NodeSample],
        read: Callable[[NodeSample], float | None],
    ) -> None:
        """Add a family with a sample of each node for which the value is known."""
        known = ((node.name, value) for node in nodes if (value := read(node)) is not None)
        self.family(name, ((labels(node=node), value) for node, value in known), "gauge")

    def histograms(
        self,
        name: str,
        histograms: Iterable[tuple[Mapping[str, str], AnyHistogram]],
        *,
        prefix: str | None = None,
        help_text: str = "",
    ) -> None:
        """Add a family of histograms, each with its labels; `prefix` replaces the page's."""
        full = (self._prefix if prefix is None else prefix) + name
        self._parts.append([f"# HELP {full} {help_text or HELP[name]}\n# TYPE {full} histogram\n"])
        self._parts.append(
            _histogram_text(full, labelled, histogram) for labelled, histogram in histograms
        )

    def steps(self) -> Iterator[str]:
        """The text in pieces, each written in about a millisecond."""
        step: list[str] = []
        length = 0
        for text in itertools.chain.from_iterable(self._parts):
            step.append(text)
            length += len(text)
            if length >= CHARACTERS_OF_A_STEP:
                yield "".join(step)
                step.clear()
                length = 0
        yield "".join(step)


class Histogram:
    """Counts values up to each bound; bounds are in ascending order."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = [float(bound) for bound in bounds]
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


AnyHistogram = Histogram | RatioCounts


def _histogram_text(name: str, labelled: Mapping[str, str], histogram: AnyHistogram) -> str:
    """All lines of a histogram, as they are now: its buckets and its count agree."""
    braces = labels(**labelled) if labelled else ""
    inner = f"{braces[1:-1]}," if labelled else ""
    lines = []
    below = 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        below += count
        lines.append(f'{name}_bucket{{{inner}le="{bound!r}"}} {below}\n')
    total = below + histogram.counts[-1]
    lines.append(
        f'{name}_bucket{{{inner}le="+Inf"}} {total}\n'
        f"{name}_sum{braces} {histogram.sum!r}\n{name}_count{braces} {total}\n"
    )
    return "".join(lines)


METRIC_PREFIX = "llama_gateway_"

# What each metric tells, by its name without `METRIC_PREFIX`.
HELP = {
    "attempts_total": "Attempts on a node that are over.",
    "batch_lines_claimed": "Lines that are claimed and go next.",
    "batch_lines_deferred_total": "Runs that a limit, or a lack of room, has put off.",
    "batch_lines_retried_total": "Runs that nodes have failed.",
    "batch_lines_running": "Lines that run or wait for a slot.",
    "batch_lines_total": "Lines that have ended.",
    "batch_oldest_seconds": "Age of the oldest batch with lines that wait.",
    "batch_results_blocked": "1 while results wait, since the disk or the store takes none.",
    "batches": "Batches that are kept, by state.",
    "build_info": "The version that runs.",
    "calibrations_total": (
        "Tiny requests by which idle nodes of unknown speed were measured, by how they ended."
    ),
    "certificate_days_left": "Days until the certificate of a listener expires.",
    "cluster_epoch": "Number of the leadership that this member has seen last.",
    "cluster_members": "Members of the cluster, as the store lists them.",
    "cluster_members_lost": "Those of them that this member, the leader, does not hear of.",
    "cluster_role": "1 for the role that this member of the cluster has.",
    "cost_total": "Cost of requests that ended, in the settings' currency.",
    "edge_connections": "Connections of clients at each edge.",
    "edge_cpu_seconds_total": "Processor time of each edge since its start.",
    "edge_late_leases_total": "Leases that edges gave back, since they came too late to be used.",
    "edge_memory_bytes": "Most memory that each edge has had.",
    "edge_streams": "Requests that wait or run at each edge.",
    "edges": "Processes that relay, and run.",
    "edges_configured": "Processes that relay, as the settings want them.",
    "edges_died_total": "Processes that relay that have ended by themselves.",
    "first_token_seconds": "From arrival to the first content.",
    "folder_full": "1 while the folder of files and results has no room for what came of late.",
    "folder_refusals_total": "Files for which the folder of files and results had no room.",
    "hooks_total": "Hooks that have started or stopped a standby node, or failed to.",
    "in_flight": "Requests that wait or run.",
    "key_info": "1 for each API key that has sent requests: its id and its name.",
    "inventory_error": "1 while the inventory on disk is invalid and an older one is in force.",
    "late_leases_total": (
        "Requests that were not sent to a node, since their member did not lead any more."
    ),
    "ledger_rows_dropped_total": "Rows that were lost.",
    "ledger_rows_recovered_total": "Rows written for requests of killed processes.",
    "ledger_rows_waiting": "Rows of the ledger that wait.",
    "ledger_rows_written_total": "Rows that were written.",
    "kept_prompts_total": (
        "Prompts of routers' models that were saved before an unload, or restored after a load; "
        "and how often that failed, or gave something else and was erased."
    ),
    "limits_reached_total": "Requests that a limit on use refused.",
    "model_instances": "Models of routers, by their state.",
    "model_load_failures": "Loads in a row of a router's model that failed.",
    "model_load_seconds": "Time that loads of models on demand took.",
    "model_loads_total": "Loads of models on demand that ended.",
    "model_unloads_total": "Models that a router has no more, by the reason.",
    "model_paused": "1 for each model that an operator has paused.",
    "node_decode_tokens_per_second": "Measured speed of writing, for one request.",
    "node_differs": "1 while a node differs from what the inventory declares.",
    "node_prefill_tokens_per_second": "Measured speed of reading a prompt.",
    "node_slots_busy": "Slots in use.",
    "node_slots_total": "Slots a node has.",
    "node_state": "1 for the state a node is in, 0 for the others.",
    "nodes_used_by_others": "Nodes of which others take slots all the time, as a gateway does.",
    "overhead_seconds": "From arrival to dispatch, less the wait.",
    "predicted_cached_tokens_total": (
        "Tokens of prompts that their nodes were expected, and found, to have cached."
    ),
    "prediction_ratio": (
        "Actual time of complete responses, divided by that expected at the grant of a slot."
    ),
    "quota_used_ratio": (
        "Share of a limit of money or tokens for a day or month that is used, from 0.8 on; state "
        "spent: a request was refused for it, or nothing is left."
    ),
    "queue_depth": "Requests that wait for a slot.",
    "queue_oldest_seconds": (
        "How long the request has waited that waits longest for a slot; 0: none waits."
    ),
    "queue_places": "Requests that may wait at once.",
    "queue_seconds": "Time spent waiting for a slot.",
    "refused_requests_total": "Requests that were refused with 429, by their caller.",
    "request_duration_seconds": "From arrival to the last byte.",
    "requests_total": "Requests that have ended, by their true status; 499: the client left.",
    "response_seconds": "From arrival to the last byte.",
    "resumed_streams_total": "Streams that went on elsewhere when their node failed.",
    "retry_budget": "Retries that could be made now.",
    "router_left_alone": "1 while a router gets no commands, since others command it too.",
    "slot_wait_seconds": "Time spent waiting for a slot.",
    "spill_money_left": "What spill-over to GPUs may still cost in its window.",
    "store_jobs_waiting": "Jobs that wait for the store.",
    "store_up": "1 while the store can be read and written.",
    "stored_requests_waiting": "Stored requests that wait and may run.",
    "time_to_first_token_seconds": "From arrival to the first content.",
    "tokens_total": "Tokens of requests that ended.",
    "traces_dropped_total": (
        "Traces that were lost: too many waited, or the collector did not take them."
    ),
    "traces_exported_total": "Traces that the collector has taken.",
    "webhook_attempts_total": "Attempts to deliver an event to a webhook, by their outcome.",
    "webhook_deliveries_waiting": (
        "Events in the store that are still to be delivered, of all processes."
    ),
    "yielded_slots_total": "Slots that batch requests gave up to requests of higher classes.",
    "gen_ai_server_request_duration_seconds": "Duration of requests.",
    "gen_ai_server_time_to_first_token_seconds": "From arrival to the first content.",
    "gen_ai_server_time_per_output_token_seconds": "Time for each token after the first.",
    "gen_ai_client_token_usage": "Tokens of a request.",
}

# Every state that a node can be in.
_OF_MODELS = {NodeState.UNLOADED, NodeState.UNLOADING, NodeState.FAILED}  # of routers alone
NODE_STATES = tuple(one.value for one in NodeState if one not in _OF_MODELS)

MOST_MODELS = 1000  # Most distinct model labels; further models are counted as `other`
NODES_OF_A_STEP = 200  # Nodes whose state is read at once: about a millisecond
# Most pairs of a caller and a reason of refusals; further ones are counted as `other`.
MOST_REFUSED = 200
MOST_KEYS = 1000  # Most keys whose names are told
MOST_NODES = 10_000  # Most distinct node labels; further nodes are counted as `other`
MOST_INSTANCES = 5000  # Most pairs of a router and a model; further ones are counted as `other`

_OVERHEAD = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(1, 60, 3600),
)


@dataclass(slots=True)
class RequestCounts:
    """Counts of requests, and of their tokens."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def add(self, other: RequestCounts | EndedKind) -> None:
        """Add the counts of `other`."""
        self.requests += other.requests
        self.prompt += other.prompt
        self.cached += other.cached
        self.completion += other.completion


@dataclass(slots=True)
class NodeSample:
    """A node at the time of a scrape. Speeds in tokens per second, None until measured."""

    name: str
    state: str
    slots_total: int
    slots_busy: int
    decode_tps: float | None = None
    prefill_tps: float | None = None
    differs: bool = False  # Whether it differs from what the inventory declares
    router: str | None = None  # Of a router's model: the router, which has its slots here
    model: str = ""  # Likewise: its name there
    load_failures: int = 0  # Likewise: loads in a row that failed
    left_alone: int | None = None
    """Of a router: 1 if it gets no commands, since others command it too."""
    used_by_others: bool = False  # Whether others take slots of it again and again


@dataclass(frozen=True, slots=True)
class EdgeSample:
    """A process that relays for the gateway, as it has told of itself last."""

    name: str
    pid: int
    ready: bool  # whether it gets connections
    streams: int  # requests that wait or run there
    connections: int  # of clients
    cpu_share: float  # processors that it uses, over the last seconds
    cpu_seconds: float  # that it has used since its start
    memory_bytes: int  # the most so far
    uptime_seconds: float


# What a member of a cluster may be.
ROLES = ("leader", "follower", "alone", "limbo")


@dataclass(frozen=True, slots=True)
class MemberSample:
    """A member of the cluster, as this one knows it."""

    name: str
    role: str  # one of `ROLES`, `draining`, or `unknown`
    address: str  # where other members reach it
    version: str
    heard_seconds: float | None = None  # since it was heard of last; None: never
    cores: int = 0
    folder: str = ""  # the id of the folder of callers' files; empty: unknown
    edges: Sequence[EdgeSample] = ()


@dataclass(frozen=True, slots=True)
class ClusterSample:
    """The cluster that this gateway is a member of, as far as it knows."""

    name: str
    member: str  # this one
    role: str  # one of `ROLES`
    role_seconds: float  # for which it has had it
    epoch: int
    leader: str  # empty: none is known
    members: Sequence[MemberSample]
    lost: Sequence[str]  # members that this one, the leader, does not hear of
    apart: Sequence[str]  # members whose files are in another folder than those of this one
    late: int  # requests that were not sent to a node, since this member did not lead any more


class Metrics:
    """Counts the events of `bus`, and writes the counts and the gateway's state at each scrape.

    `nodes` are read once for each scrape, in steps. `add_state` adds the other families of the
    state and must be fast. `name_of`: the name of the key with this id, if it is to be told.
    """

    def __init__(
        self,
        bus: EventBus,
        nodes: Callable[[], Iterable[NodeSample]],
        add_state: Callable[[MetricsPage], None] = lambda _: None,
        name_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._nodes, self._add_state, self._name_of = nodes, add_state, name_of
        self._bus = bus
        self._requests: dict[tuple[Priority, str, int], RequestCounts] = {}
        self._models: set[str] = set()
        self._attempts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._hooks: Counter[tuple[str, str, str]] = Counter()
        self._cost: dict[str, float] = {}
        self._streams = Counter(resumed=0, yielded=0)
        # From 0: Prometheus sees no increase in a series that begins with its first event.
        self._webhooks = Counter(dict.fromkeys(WEBHOOK_OUTCOMES, 0))
        self._calibrations = Counter(dict.fromkeys(CALIBRATION_OUTCOMES, 0))
        self._prompts_kept = Counter(dict.fromkeys(PROMPT_ACTIONS, 0))
        self._loads: Counter[tuple[str, str, str]] = Counter()
        self._unloads: Counter[tuple[str, str, str]] = Counter()
        self._load_seconds = LabelledHistogram("model")
        self._limits_reached: Counter[tuple[str, str]] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._keys: set[str] = set()  # Ids of keys that have sent requests
        self._overhead = Histogram(_OVERHEAD)
        self._response = LabelledHistogram("model", "class", "tier", "outcome")
        self._first_token = LabelledHistogram("model", "class", "tier")
        self._wait = LabelledHistogram("model", "class", "tier")
        self._gen_ai = GenAiHistograms()
        self._with_gen_ai = False
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        bus.ended.read_by(self._times_of, self._add)
        bus.subscribe(AttemptEnded, self._attempted)
        bus.subscribe(ModelLoadChanged, self._model_load_changed)
        bus.subscribe(HookEnded, lambda e: self._hooks.update([(e.node, e.hook, e.outcome)]))
        bus.subscribe(
            StreamResumed, lambda e: self._streams.update(resumed=e.resumed_on is not None)
        )
        bus.subscribe(SlotYielded, lambda _: self._streams.update(yielded=1))
        bus.subscribe(LimitReached, lambda e: self._limits_reached.update([(e.limit, e.scope)]))
        bus.subscribe(WebhookAttempted, lambda e: self._webhooks.update([e.outcome]))
        bus.subscribe(NodeCalibrated, lambda e: self._calibrations.update([e.outcome]))
        bus.subscribe(PromptsKept, lambda e: self._prompts_kept.update({e.action: e.prompts}))

    def configure(self, *, gen_ai: bool) -> None:
        """Count requests under OpenTelemetry's names too, or stop it."""
        if gen_ai != self._with_gen_ai:
            self._with_gen_ai = gen_ai
            self._bus.ended.forget_kinds()

    def _times_of(self, kind: EndedKind) -> Callable[[RequestRecord], None]:
        """What counts the times of the requests of this kind."""
        labelled = (kind.model, kind.priority.label, kind.tier or "none")
        response = self._response.of(*labelled, outcome_of(kind.status))
        first_token = self._first_token.of(*labelled) if kind.timed else None
        count_gen_ai = self._gen_ai.count if self._with_gen_ai else None
        wait: Histogram | None = None  # Looked up for the first that has waited

        def observe(record: RequestRecord) -> None:
            nonlocal wait
            response.observe(record.duration_seconds)
            if first_token is not None and record.ttft is not None:
                first_token.observe(record.ttft)
            waited = record.queue_seconds
            if record.attempts or waited:
                if wait is None:
                    wait = self._wait.of(*labelled)
                if waited:
                    wait.observe(waited)
                else:
                    wait.counts[0] += 1
            if record.overhead_seconds is not None:
                self._overhead.observe(record.overhead_seconds)
            if count_gen_ai is not None:
                count_gen_ai(record)

        return observe

    def _add(self, kind: EndedKind) -> None:
        """Add the requests of this kind; models above the cap count as `other`."""
        model = _within(self._models, kind.model, MOST_MODELS, OTHER_LABEL)
        self._models.add(model)
        self._requests.setdefault((kind.priority, model, kind.status), RequestCounts()).add(kind)
        if kind.tier is not None:
            self._cost[kind.tier] = self._cost.get(kind.tier, 0.0) + kind.cost
        # Callers without a key have an address.
        if len(self._keys) < MOST_KEYS and ":" not in kind.caller:
            self._keys.add(kind.caller)
        if kind.status == 429:
            reason = kind.reason or "unknown"
            further = (OTHER_LABEL, reason)
            key = _within(self._refused, (kind.caller, reason), MOST_REFUSED, further)
            self._refused[key] += kind.requests

    def counts_by_status(self) -> Iterator[tuple[int, RequestCounts]]:
        """Counts of requests that have ended, by status; a status may come several times."""
        self._bus.catch_up()
        for (_, _, status), counts in self._requests.items():
            yield status, counts

    def _attempted(self, event: AttemptEnded) -> None:
        node = _within(self._attempts, event.node, MOST_NODES, OTHER_LABEL)
        self._attempts[node][event.outcome] += 1

    def _model_load_changed(self, event: ModelLoadChanged) -> None:
        """Count a load that has ended, or an unload."""
        if event.change == "loading" or (event.change == "loaded" and event.seconds is None):
            return  # What was loaded before the gateway looked is no load of now.
        if event.change in {"loaded", "failed"}:
            counts, word = self._loads, "ok" if event.change == "loaded" else "failed"
        else:
            counts, word = self._unloads, event.cause
        further = OTHER_LABEL, OTHER_LABEL, word
        counts[_within(counts, (event.node, event.model, word), MOST_INSTANCES, further)] += 1
        if event.seconds is not None:
            self._load_seconds.of(event.model).observe(event.seconds)

    def steps(self, *, key_names: bool = True) -> Iterator[bytes]:
        """The text for Prometheus, of type `CONTENT_TYPE`; other work may go on between two pieces.

        The state is that of the first steps, and counts are those at the time of their piece.
        `key_names`: with those of keys.
        """
        self._bus.catch_up()
        nodes, measured = list[NodeSample](), list[NodeSample]()  # models of known speed
        states = Counter[tuple[str, str, str]]()  # of routers' models: model, router and state
        failures: dict[tuple[str, str], int] = {}
        for number, node in enumerate(self._nodes()):
            if node.router is None:
                nodes.append(node)
            else:
                known = len(states) < MOST_INSTANCES
                of = (node.model, node.router) if known else (OTHER_LABEL, OTHER_LABEL)
                states[(*of, node.state)] += 1
                if node.load_failures and len(failures) < MOST_INSTANCES:
                    failures[node.router, node.model] = node.load_failures
                if node.decode_tps is not None and len(measured) < MOST_INSTANCES:
                    measured.append(node)
            if number % NODES_OF_A_STEP == NODES_OF_A_STEP - 1:
                yield b""
        page = MetricsPage(METRIC_PREFIX)
        self._add_requests(page)
        self._add_fleet(page, nodes, measured)
        page.counts("model_loads_total", self._loads, "node", "model", "result")
        page.counts("model_unloads_total", self._unloads, "node", "model", "reason")
        page.histograms("model_load_seconds", self._load_seconds.samples())
        page.counts("model_instances", states, "model", "node", "state")
        page.counts("model_load_failures", failures, "node", "model")
        self._add_state(page)
        if key_names:
            named = ((key, self._name_of(key)) for key in self._keys)
            page.counts("key_info", {one: 1 for one in named if one[1] is not None}, "key", "name")
        page.counts("webhook_attempts_total", self._webhooks, "outcome")
        build = {(__version__, platform.python_version()): 1}
        page.counts("build_info", build, "version", "python")
        if self._with_gen_ai:
            self._gen_ai.add_to(page)
        for text in page.steps():
            yield text.encode()
        yield generate_latest(self._process)

    def _add_requests(self, page: MetricsPage) -> None:
        by_labels = (
            ((priority.label, model, str(status)), counts.requests)
            for (priority, model, status), counts in list(self._requests.items())
        )
        page.samples("requests_total", by_labels, "class", "model", "code")
        models: dict[str, RequestCounts] = {}
        for (_, model, _), counts in self._requests.items():
            models.setdefault(model, RequestCounts()).add(counts)
        tokens = [
            ((model, kind), getattr(counts, kind))
            for model, counts in models.items()
            for kind in ("prompt", "cached", "completion")
        ]
        page.samples("tokens_total", tokens, "model", "kind")
        page.number("resumed_streams_total", self._streams["resumed"])
        page.number("yielded_slots_total", self._streams["yielded"])
        page.counts("calibrations_total", self._calibrations, "outcome")
        page.counts("kept_prompts_total", self._prompts_kept, "action")
        page.counts("limits_reached_total", self._limits_reached, "limit", "scope")
        page.counts("refused_requests_total", self._refused, "caller", "reason")
        page.counts("cost_total", self._cost, "tier")
        page.histograms("request_duration_seconds", self._response.sum())
        page.histograms("time_to_first_token_seconds", self._first_token.sum())
        page.histograms("queue_seconds", self._wait.sum())
        page.histograms("overhead_seconds", [({}, self._overhead)])
        page.histograms("response_seconds", self._response.samples())
        page.histograms("first_token_seconds", self._first_token.samples())
        page.histograms("slot_wait_seconds", self._wait.samples())

    def _add_fleet(
        self, page: MetricsPage, nodes: Sequence[NodeSample], models: Sequence[NodeSample]
    ) -> None:
        # Nodes that have left are forgotten, with what has ended after that.
        kept = {*(node.name for node in nodes), OTHER_LABEL}
        for node in [node for node in self._attempts if node.partition("/")[0] not in kept]:
            del self._attempts[node]
        for counts in (self._hooks, self._loads, self._unloads):
            for key in [key for key in counts if key[0] not in kept]:
                del counts[key]
        everything = [*nodes, *models]
        attempts = (
            ((node, outcome), count)
            for node, outcomes in list(self._attempts.items())
            for outcome, count in list(outcomes.items())
        )
        page.samples("attempts_total", attempts, "node", "outcome")
        page.counts("hooks_total", self._hooks, "node", "hook", "outcome")
        page.family(
            "node_state",
            (
                (f'{{node="{name}",state="{state}"}}', int(state == current))
                for name, current in ((escape_label(node.name), node.state) for node in nodes)
                for state in NODE_STATES
            ),
        )
        page.nodes("node_slots_total", nodes, operator.attrgetter("slots_total"))
        page.nodes("node_slots_busy", nodes, operator.attrgetter("slots_busy"))
        page.nodes("node_differs", nodes, lambda node: int(node.differs))
        page.number("nodes_used_by_others", sum(node.used_by_others for node in nodes))
        page.nodes("router_left_alone", nodes, operator.attrgetter("left_alone"))
        page.nodes("node_decode_tokens_per_second", everything, operator.attrgetter("decode_tps"))
        page.nodes("node_prefill_tokens_per_second", everything, operator.attrgetter("prefill_tps"))


def _within(known: Collection[T], key: T, most: int, further: T) -> T:
    """The key, or the one of all further keys if so many others are known."""
    return key if key in known or len(known) < most else further


# A CPU node may take an hour for a response; a refusal takes a millisecond.
SECONDS_UP_TO_AN_HOUR = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60),
    *(120, 300, 600, 1200, 1800, 3600),
)

MOST_LABEL_SETS = 300  # Most combinations of labels of one histogram that name a model


def outcome_of(status: int) -> str:
    """`ok`, `rejected` (the request's fault, or a limit), `client_closed`, or `failed`."""
    if status < 400:
        return "ok"
    if status == CLIENT_CLOSED_STATUS:
        return "client_closed"
    return "rejected" if status < 500 else "failed"


class LabelledHistogram:
    """Histograms with the same bounds, by labels; the first label is the model."""

    __slots__ = ("_bounds", "_by_labels", "_names")

    def __init__(self, *names: str, bounds: Sequence[float] = SECONDS_UP_TO_AN_HOUR) -> None:
        self._bounds = bounds
        self._names = names
        self._by_labels: dict[tuple[str, ...], Histogram] = {}

    def of(self, *values: str) -> Histogram:
        """The histogram of these labels; beyond the bound that of all further models."""
        histogram = self._by_labels.get(values)
        if histogram is None:
            if len(self._by_labels) >= MOST_LABEL_SETS:
                values = (OTHER_LABEL, *values[1:])
            histogram = self._by_labels.setdefault(values, Histogram(self._bounds))
        return histogram

    def samples(self) -> list[tuple[Mapping[str, str], Histogram]]:
        """All histograms with their labels."""
        return [
            (dict(zip(self._names, values, strict=True)), histogram)
            for values, histogram in self._by_labels.items()
        ]

    def sum(self) -> Iterator[tuple[Mapping[str, str], Histogram]]:
        """All of them as one without labels, added up when it is written."""
        total = Histogram(self._bounds)
        for one in self._by_labels.values():
            total.sum += one.sum
            total.counts = list(map(operator.add, total.counts, one.counts))
        yield {}, total


# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/ advises these bounds; those
# above it are for CPUs.
_DURATION = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68, 655.36, 1310.72, 3600),
)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1800.0),
)
_OUTPUT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304)

# The operations that OpenTelemetry names; other requests are not generative.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/completions": "text_completion",
    "/completion": "text_completion",
    "/infill": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/embeddings": "embeddings",
    "/embedding": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}

# `gen_ai.provider.name`: OpenTelemetry has no word for it, and allows others.
PROVIDER = "llama.cpp"


class GenAiHistograms:
    """Requests under the names that OpenTelemetry's semantic conventions give."""

    def __init__(self) -> None:
        names = ("gen_ai_request_model", "gen_ai_operation_name", "gen_ai_provider_name")
        self._duration = LabelledHistogram(*names, "error_type", bounds=_DURATION)
        self._first_token = LabelledHistogram(*names, bounds=_FIRST_TOKEN)
        self._output_token = LabelledHistogram(*names, bounds=_OUTPUT_TOKEN)
        self._tokens = LabelledHistogram(*names, "gen_ai_token_type", bounds=_TOKENS)

    def count(self, event: RequestRecord) -> None:
        """Count a request that has ended."""
        operation = OPERATIONS.get(event.path)
        if operation is None:
            return
        labelled = (event.model, operation, PROVIDER)
        failed = "" if event.status < 400 else str(event.status)
        self._duration.of(*labelled, failed).observe(event.duration_seconds)
        if event.ttft is not None:
            self._first_token.of(*labelled).observe(event.ttft)
            if event.completion_tokens > 1:
                decode = max(0.0, event.duration_seconds - event.ttft)
                output = self._output_token.of(*labelled)
                output.observe(decode / (event.completion_tokens - 1))
        if event.prompt_tokens:
            self._tokens.of(*labelled, "input").observe(event.prompt_tokens)
        if event.completion_tokens:
            self._tokens.of(*labelled, "output").observe(event.completion_tokens)

    def add_to(self, page: MetricsPage) -> None:
        """Add the families to a page."""
        for name, histogram in (
            ("gen_ai_server_request_duration_seconds", self._duration),
            ("gen_ai_server_time_to_first_token_seconds", self._first_token),
            ("gen_ai_server_time_per_output_token_seconds", self._output_token),
            ("gen_ai_client_token_usage", self._tokens),
        ):
            page.histograms(name, histogram.samples(), prefix="")
