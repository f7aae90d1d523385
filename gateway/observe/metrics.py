"""`GET /metrics`: counters fed by events, and the current state, which is read at each scrape.

An event costs about a microsecond on the hot path, in plain dictionaries; text is made at the
scrape. The number of series is bounded: nodes by the inventory, models by a cap.

The text is Prometheus' format 0.0.4. A scrape runs on the event loop, and prometheus_client renders
some 130,000 samples a second: a fleet of 1,000 nodes with nine states each would block every
stream for 80 ms. So only the process's own metrics come from there.
"""

from __future__ import annotations

import math
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from gateway import __version__
from gateway.events import (
    AttemptEnded,
    EventBus,
    HookEnded,
    LimitReached,
    NodeChanged,
    RequestFinished,
    SlotYielded,
    StreamResumed,
    WebhookAttempted,
)
from gateway.request import Priority

METRIC_PREFIX = "llama_gateway_"

NODE_STATES = (
    "standby",
    "draining",
    "down",
    "loading",
    "starting",
    "ejected",
    "mute",
    "degraded",
    "ready",
)
"""Every state a node can be in, as the admin API names them."""

MOST_MODELS = 1000
"""Most distinct model labels; further models are counted as `other`."""

MOST_NODES = 10_000
"""Most distinct node labels; further nodes are counted as `other`."""

OTHER_LABEL = "other"

# A CPU node may take an hour for a response; a refusal takes a millisecond.
_UP_TO_AN_HOUR = (1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, *_UP_TO_AN_HOUR)

_OVERHEAD = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1,
    60,
    3600,
)


@dataclass(slots=True)
class NodeSample:
    """A node at the time of a scrape. Speeds in tokens per second, None until measured."""

    name: str
    state: str
    slots_total: int
    slots_busy: int
    decode_tps: float | None = None
    prefill_tps: float | None = None


@dataclass(slots=True)
class StoreSample:
    """The store at the time of a scrape."""

    up: bool
    """Whether it can be read and written."""
    waiting: int
    """Jobs that wait for it."""


@dataclass(slots=True)
class LedgerSample:
    """The ledger of requests at the time of a scrape; counts are of this process."""

    pending: int
    """Rows that wait to be written."""
    written: int
    recovered: int
    """Of them, rows of requests whose process was killed."""
    dropped: int
    """Rows that were lost, since too many waited or none could store them."""


@dataclass(slots=True)
class BatchSample:
    """Work that can wait, at the time of a scrape; counts are of this process."""

    batches: Mapping[str, int]
    """By state."""
    lines: Mapping[str, int]
    """Lines whose result was recorded, by outcome."""
    waiting: Mapping[str, int]
    """Stored requests that may run, by kind."""
    running: int
    """Lines that were offered to the scheduler."""
    claimed: int
    """Lines that are to be offered next."""
    deferred: int
    retried: int
    oldest_seconds: float


@dataclass(slots=True)
class MetricsSnapshot:
    """The gateway's state at the time of a scrape."""

    nodes: Sequence[NodeSample] = ()
    queue: Mapping[Priority, int] = field(default_factory=dict)
    """Queued requests by class; a missing class has none."""
    in_flight: int = 0
    """Requests that are queued or run."""
    inventory_error: bool = False
    """The inventory on disk is invalid; an older one is in force."""
    retry_budget: float | None = None
    """Retries that the budget allows now."""
    certificate_days_left: Mapping[str, float] = field(default_factory=dict)
    """Days until the certificate of each listener with TLS expires."""
    store: StoreSample | None = None
    """None: there is no store."""
    ledger: LedgerSample | None = None
    batches: BatchSample | None = None
    webhooks_waiting: int = 0
    """Deliveries that wait in the store."""


@dataclass(slots=True)
class RequestCounts:
    """Counts of requests, and of their tokens."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def count(self, event: RequestFinished) -> None:
        """Count a request."""
        self.requests += 1
        self.prompt += event.prompt_tokens
        self.cached += event.cached_tokens
        self.completion += event.completion_tokens

    def add(self, other: RequestCounts) -> None:
        """Add the counts of `other`."""
        self.requests += other.requests
        self.prompt += other.prompt
        self.cached += other.cached
        self.completion += other.completion


class Metrics:
    """Counts the events of `bus`; `snapshot` is called at each scrape and must be fast."""

    def __init__(self, bus: EventBus, snapshot: Callable[[], MetricsSnapshot]) -> None:
        self._snapshot = snapshot
        self._flush = bus.flush
        self._requests: dict[tuple[Priority, str, int], RequestCounts] = {}
        self._models: set[str] = set()
        self._attempts: dict[str, dict[str, int]] = {}
        self._hooks: dict[tuple[str, str, str], int] = {}
        self._cost: dict[str, float] = {}
        self._resumed = 0
        self._yielded = 0
        self._webhooks: dict[str, int] = {}
        self._limits_reached: dict[tuple[str, str], int] = {}
        self._duration = Histogram(_SECONDS)
        self._ttft = Histogram(_SECONDS)
        self._queue = Histogram(_SECONDS)
        self._overhead = Histogram(_OVERHEAD)
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        bus.subscribe(RequestFinished, self.finished)
        bus.subscribe(AttemptEnded, self.attempted)
        bus.subscribe(HookEnded, self.hook_ended)
        bus.subscribe(StreamResumed, self.resumed)
        bus.subscribe(SlotYielded, self.yielded)
        bus.subscribe(LimitReached, self.limit_reached)
        bus.subscribe(WebhookAttempted, self.webhook_attempted)
        bus.subscribe(NodeChanged, self.node_changed)

    def finished(self, event: RequestFinished) -> None:
        """Count a request that has ended."""
        counts = self._requests.get((event.priority, event.model, event.status))
        if counts is None:
            counts = self._counts_for(event)
        counts.count(event)
        self._duration.observe(event.duration_seconds)
        if event.ttft is not None:
            self._ttft.observe(event.ttft)
        if event.overhead_seconds is not None:
            self._overhead.observe(event.overhead_seconds)
        if event.attempts or event.queue_seconds:
            self._queue.observe(event.queue_seconds)
        if event.tier is not None:
            self._cost[event.tier] = self._cost.get(event.tier, 0.0) + event.cost

    def _counts_for(self, event: RequestFinished) -> RequestCounts:
        """The counts for the first event of its kind; those of `other` if there are too many."""
        model = event.model
        if model not in self._models:
            if len(self._models) < MOST_MODELS:
                self._models.add(model)
            else:
                model = OTHER_LABEL
        return self._requests.setdefault((event.priority, model, event.status), RequestCounts())

    def counts_by_status(self) -> Iterator[tuple[int, RequestCounts]]:
        """Counts of requests that have ended, by status; a status may come several times."""
        self._flush()
        for (_, _, status), counts in self._requests.items():
            yield status, counts

    def attempted(self, event: AttemptEnded) -> None:
        """Count an attempt on a node."""
        outcomes = self._attempts.get(event.node)
        if outcomes is None:
            node = event.node if len(self._attempts) < MOST_NODES else OTHER_LABEL
            outcomes = self._attempts.setdefault(node, {})
        outcomes[event.outcome] = outcomes.get(event.outcome, 0) + 1

    def hook_ended(self, event: HookEnded) -> None:
        """Count a hook of a standby node."""
        key = (event.node, event.hook, event.outcome)
        self._hooks[key] = self._hooks.get(key, 0) + 1

    def resumed(self, event: StreamResumed) -> None:
        """Count a stream that was resumed on another node."""
        self._resumed += event.resumed_on is not None

    def yielded(self, _: SlotYielded) -> None:
        """Count a slot that a batch request gave up."""
        self._yielded += 1

    def limit_reached(self, event: LimitReached) -> None:
        """Count a request that a limit refused."""
        key = (event.limit, event.scope)
        self._limits_reached[key] = self._limits_reached.get(key, 0) + 1

    def webhook_attempted(self, event: WebhookAttempted) -> None:
        """Count an attempt to deliver an event."""
        self._webhooks[event.outcome] = self._webhooks.get(event.outcome, 0) + 1

    def node_changed(self, event: NodeChanged) -> None:
        """Forget a node that has left the fleet."""
        if event.new_state is None:
            self._attempts.pop(event.node, None)

    def render(self) -> bytes:
        """The text for Prometheus, of type `CONTENT_TYPE`."""
        self._flush()
        snapshot = self._snapshot()
        page = MetricsPage(METRIC_PREFIX)
        self._add_requests(page)
        self._add_fleet(page, snapshot.nodes)
        page.add_family(
            "queue_depth",
            "gauge",
            "Requests that wait for a slot.",
            (
                (labels(**{"class": priority.label}), snapshot.queue.get(priority, 0))
                for priority in Priority
            ),
        )
        page.add_family(
            "in_flight", "gauge", "Requests that wait or run.", [("", snapshot.in_flight)]
        )
        page.add_family(
            "inventory_error",
            "gauge",
            "1 while the inventory on disk is invalid and an older one is in force.",
            [("", int(snapshot.inventory_error))],
        )
        if snapshot.retry_budget is not None:
            page.add_family(
                "retry_budget",
                "gauge",
                "Retries that could be made now.",
                [("", snapshot.retry_budget)],
            )
        if snapshot.certificate_days_left:
            page.add_family(
                "certificate_days_left",
                "gauge",
                "Days until the certificate of a listener expires.",
                (
                    (labels(certificate=key), round(days, 3))
                    for key, days in snapshot.certificate_days_left.items()
                ),
            )
        if snapshot.store is not None:
            page.add_family(
                "store_up",
                "gauge",
                "1 while the store can be read and written.",
                [("", int(snapshot.store.up))],
            )
            page.add_family(
                "store_jobs_waiting",
                "gauge",
                "Jobs that wait for the store.",
                [("", snapshot.store.waiting)],
            )
        if snapshot.ledger is not None:
            _add_ledger(page, snapshot.ledger)
        if snapshot.batches is not None:
            _add_batches(page, snapshot.batches)
        self._add_webhooks(page, snapshot.webhooks_waiting)
        build = labels(version=__version__, python=platform.python_version())
        page.add_family("build_info", "gauge", "The version that runs.", [(build, 1)])
        return page.render().encode() + generate_latest(self._process)

    def _add_requests(self, page: MetricsPage) -> None:
        page.add_family(
            "requests_total",
            "counter",
            "Requests that have ended, by their true status; 499: the client left.",
            (
                (
                    labels(**{"class": priority.label}, model=model, code=str(status)),
                    counts.requests,
                )
                for (priority, model, status), counts in self._requests.items()
            ),
        )
        page.add_family(
            "tokens_total", "counter", "Tokens of requests that ended.", self._token_samples()
        )
        page.add_family(
            "resumed_streams_total",
            "counter",
            "Streams that went on elsewhere when their node failed.",
            [("", self._resumed)],
        )
        page.add_family(
            "yielded_slots_total",
            "counter",
            "Slots that batch requests gave up to requests of higher classes.",
            [("", self._yielded)],
        )
        page.add_family(
            "limits_reached_total",
            "counter",
            "Requests that a limit on use refused.",
            (
                (labels(limit=limit, scope=scope), count)
                for (limit, scope), count in self._limits_reached.items()
            ),
        )
        page.add_family(
            "cost_total",
            "counter",
            "Cost of requests that ended, in the settings' currency.",
            ((labels(tier=tier), cost) for tier, cost in self._cost.items()),
        )
        for name, meaning, histogram in (
            ("request_duration_seconds", "From arrival to the last byte.", self._duration),
            ("time_to_first_token_seconds", "From arrival to the first content.", self._ttft),
            ("queue_seconds", "Time spent waiting for a slot.", self._queue),
            ("overhead_seconds", "From arrival to dispatch, less the wait.", self._overhead),
        ):
            page.add_histogram(name, meaning, histogram)

    def _add_webhooks(self, page: MetricsPage, waiting: int) -> None:
        page.add_family(
            "webhook_attempts_total",
            "counter",
            "Attempts to deliver an event to a webhook, by their outcome.",
            ((labels(outcome=outcome), count) for outcome, count in self._webhooks.items()),
        )
        page.add_family(
            "webhook_deliveries_waiting",
            "gauge",
            "Events in the store that are still to be delivered, of all processes.",
            [("", waiting)],
        )

    def _token_samples(self) -> Iterator[tuple[str, float]]:
        models: dict[str, RequestCounts] = {}
        for (_, model, _), counts in self._requests.items():
            models.setdefault(model, RequestCounts()).add(counts)
        for model, counts in models.items():
            for kind in ("prompt", "cached", "completion"):
                yield labels(model=model, kind=kind), getattr(counts, kind)

    def _add_fleet(self, page: MetricsPage, nodes: Sequence[NodeSample]) -> None:
        self._forget_others(node.name for node in nodes)
        page.add_family(
            "attempts_total",
            "counter",
            "Attempts on a node that are over.",
            (
                (labels(node=node, outcome=outcome), count)
                for node, outcomes in self._attempts.items()
                for outcome, count in outcomes.items()
            ),
        )
        page.add_family(
            "hooks_total",
            "counter",
            "Hooks that have started or stopped a standby node, or failed to.",
            (
                (labels(node=node, hook=hook, outcome=outcome), count)
                for (node, hook, outcome), count in self._hooks.items()
            ),
        )
        page.add_family(
            "node_state",
            "gauge",
            "1 for the state a node is in, 0 for the others.",
            (
                (f'{{node="{name}",state="{state}"}}', int(state == current))
                for name, current in [(escape_label(node.name), node.state) for node in nodes]
                for state in NODE_STATES
            ),
        )
        braces = [labels(node=node.name) for node in nodes]
        for family, meaning, values in (
            ("node_slots_total", "Slots a node has.", [n.slots_total for n in nodes]),
            ("node_slots_busy", "Slots in use.", [n.slots_busy for n in nodes]),
            (
                "node_decode_tokens_per_second",
                "Measured speed of writing, for one request.",
                [n.decode_tps for n in nodes],
            ),
            (
                "node_prefill_tokens_per_second",
                "Measured speed of reading a prompt.",
                [n.prefill_tps for n in nodes],
            ),
        ):
            known = [
                (brace, value)
                for brace, value in zip(braces, values, strict=True)
                if value is not None
            ]
            page.add_family(family, "gauge", meaning, known)

    def _forget_others(self, names: Iterable[str]) -> None:
        """Drop nodes that have left; attempts that ended after that have added them again."""
        kept = {*names, OTHER_LABEL}
        for node in [node for node in self._attempts if node not in kept]:
            del self._attempts[node]
        for key in [key for key in self._hooks if key[0] not in kept]:
            del self._hooks[key]


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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
    """The text of one scrape, family by family."""

    __slots__ = ("_lines", "_prefix")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lines: list[str] = []

    def add_family(
        self, name: str, metric_type: str, help_text: str, samples: Iterable[tuple[str, float]]
    ) -> None:
        """Add a family; a sample is its labels with braces (or an empty text) and its value."""
        full = self._prefix + name
        self._lines.append(f"# HELP {full} {help_text}\n# TYPE {full} {metric_type}\n")
        self._lines.extend(f"{full}{braces} {format_value(value)}\n" for braces, value in samples)

    def add_histogram(self, name: str, help_text: str, histogram: Histogram) -> None:
        """Add a histogram without labels."""
        full = self._prefix + name
        self._lines.append(f"# HELP {full} {help_text}\n# TYPE {full} histogram\n")
        below = 0
        for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
            below += count
            self._lines.append(f'{full}_bucket{{le="{bound!r}"}} {below}\n')
        total = below + histogram.counts[-1]
        self._lines.append(
            f'{full}_bucket{{le="+Inf"}} {total}\n'
            f"{full}_sum {histogram.sum!r}\n{full}_count {total}\n"
        )

    def render(self) -> str:
        """The whole text."""
        return "".join(self._lines)


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


def _add_ledger(page: MetricsPage, ledger: LedgerSample) -> None:
    for name, kind, text, value in (
        ("ledger_rows_waiting", "gauge", "Rows of the ledger that wait.", ledger.pending),
        ("ledger_rows_written_total", "counter", "Rows that were written.", ledger.written),
        (
            "ledger_rows_recovered_total",
            "counter",
            "Rows written for requests of killed processes.",
            ledger.recovered,
        ),
        ("ledger_rows_dropped_total", "counter", "Rows that were lost.", ledger.dropped),
    ):
        page.add_family(name, kind, text, [("", value)])


def _add_batches(page: MetricsPage, batches: BatchSample) -> None:
    for name, kind, text, label, values in (
        ("batches", "gauge", "Batches that are kept, by state.", "state", batches.batches),
        ("batch_lines_total", "counter", "Lines that have ended.", "outcome", batches.lines),
        (
            "stored_requests_waiting",
            "gauge",
            "Stored requests that wait and may run.",
            "kind",
            batches.waiting,
        ),
    ):
        samples = [(labels(**{label: value}), count) for value, count in values.items()]
        page.add_family(name, kind, text, samples)
    for name, kind, text, number in (
        ("batch_lines_running", "gauge", "Lines that run or wait for a slot.", batches.running),
        ("batch_lines_claimed", "gauge", "Lines that are claimed and go next.", batches.claimed),
        (
            "batch_lines_deferred_total",
            "counter",
            "Runs that a limit, or a lack of room, has put off.",
            batches.deferred,
        ),
        ("batch_lines_retried_total", "counter", "Runs that nodes have failed.", batches.retried),
        (
            "batch_oldest_seconds",
            "gauge",
            "Age of the oldest batch with lines that wait.",
            batches.oldest_seconds,
        ),
    ):
        page.add_family(name, kind, text, [("", number)])
