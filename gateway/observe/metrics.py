"""`GET /metrics`: counters fed by events, and the current state, which is read at each scrape.

An event costs a few microseconds on the hot path, in plain dictionaries; text is made at the
scrape. The number of series is bounded: nodes by the inventory, models by a cap.

A scrape runs on the event loop, and prometheus_client renders some 130,000 samples a second: a
fleet of 1,000 nodes with nine states each would block every stream for 80 ms. So only the
process's own metrics come from there.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from gateway import __version__
from gateway.events import (
    CALIBRATION_OUTCOMES,
    WEBHOOK_OUTCOMES,
    AttemptEnded,
    EventBus,
    HookEnded,
    LimitReached,
    NodeCalibrated,
    NodeChanged,
    RequestFinished,
    SlotYielded,
    StreamResumed,
    WebhookAttempted,
)
from gateway.observe.exposition import OTHER_LABEL, Histogram, MetricsPage, escape_label, labels
from gateway.observe.request_histograms import (
    SECONDS_UP_TO_AN_HOUR,
    GenAiHistograms,
    RequestHistograms,
)
from gateway.observe.snapshot import (
    BatchSample,
    LedgerSample,
    MetricsSnapshot,
    NodeSample,
    TraceSample,
)
from gateway.request import Priority

METRIC_PREFIX = "llama_gateway_"

NODE_STATES = (
    "standby",
    "draining",
    "down",
    "sleeping",
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

NODES_OF_A_STEP = 200
"""Nodes whose state is read at once: about a millisecond."""

MOST_REFUSED = 200
"""Most pairs of a caller and a reason of refusals; further ones are counted as `other`."""

MOST_NODES = 10_000
"""Most distinct node labels; further nodes are counted as `other`."""

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


REFUSED_STATUS = 429


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
        # From 0: Prometheus sees no increase in a series that begins with its first event.
        self._webhooks: dict[str, int] = dict.fromkeys(WEBHOOK_OUTCOMES, 0)
        self._calibrations: dict[str, int] = dict.fromkeys(CALIBRATION_OUTCOMES, 0)
        self._limits_reached: dict[tuple[str, str], int] = {}
        self._refused: dict[tuple[str, str], int] = {}
        self._duration = Histogram(SECONDS_UP_TO_AN_HOUR)
        self._ttft = Histogram(SECONDS_UP_TO_AN_HOUR)
        self._queue = Histogram(SECONDS_UP_TO_AN_HOUR)
        self._overhead = Histogram(_OVERHEAD)
        self._labelled = RequestHistograms()
        self._gen_ai = GenAiHistograms()
        self._with_gen_ai = False
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        bus.subscribe(RequestFinished, self.finished)
        bus.subscribe(AttemptEnded, self.attempted)
        bus.subscribe(HookEnded, self.hook_ended)
        bus.subscribe(StreamResumed, self.resumed)
        bus.subscribe(SlotYielded, self.yielded)
        bus.subscribe(LimitReached, self.limit_reached)
        bus.subscribe(WebhookAttempted, self.webhook_attempted)
        bus.subscribe(NodeCalibrated, self.calibrated)
        bus.subscribe(NodeChanged, self.node_changed)

    def configure(self, *, gen_ai: bool) -> None:
        """Count requests under OpenTelemetry's names too, or stop it."""
        self._with_gen_ai = gen_ai

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
        if event.status == REFUSED_STATUS:
            self._count_refusal(event.caller, event.reason or "unknown")
        self._labelled.count(event)
        if self._with_gen_ai:
            self._gen_ai.count(event)

    def _counts_for(self, event: RequestFinished) -> RequestCounts:
        """The counts for the first event of its kind; those of `other` if there are too many."""
        model = event.model
        if model not in self._models:
            if len(self._models) < MOST_MODELS:
                self._models.add(model)
            else:
                model = OTHER_LABEL
        return self._requests.setdefault((event.priority, model, event.status), RequestCounts())

    def _count_refusal(self, caller: str, reason: str) -> None:
        key = (caller, reason)
        if key not in self._refused and len(self._refused) >= MOST_REFUSED:
            key = (OTHER_LABEL, reason)
        self._refused[key] = self._refused.get(key, 0) + 1

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

    def calibrated(self, event: NodeCalibrated) -> None:
        """Count a calibration."""
        self._calibrations[event.outcome] += 1

    def node_changed(self, event: NodeChanged) -> None:
        """Forget a node that has left the fleet."""
        if event.new_state is None:
            self._attempts.pop(event.node, None)

    def render(self) -> bytes:
        """The text for Prometheus, of type `CONTENT_TYPE`."""
        return b"".join(self.steps())

    def steps(self) -> Iterator[bytes]:
        """The text in pieces; other work may go on between two of them.

        The state is that of the first steps, and counts are those at the time of their piece.
        """
        self._flush()
        snapshot = self._snapshot()
        nodes = []
        for node in snapshot.nodes:
            nodes.append(node)
            if len(nodes) % NODES_OF_A_STEP == 0:
                yield b""
        page = MetricsPage(METRIC_PREFIX)
        self._add_requests(page)
        self._add_predictions(page, snapshot)
        self._add_fleet(page, nodes)
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
            "queue_oldest_seconds",
            "gauge",
            "How long the request has waited that waits longest for a slot; 0: none waits.",
            [
                (labels(**{"class": priority.label}), snapshot.oldest.get(priority, 0.0))
                for priority in Priority
            ],
        )
        page.add_family(
            "queue_places",
            "gauge",
            "Requests that may wait at once.",
            [("", snapshot.queue_places)],
        )
        if snapshot.spill_money_left is not None:
            page.add_family(
                "spill_money_left",
                "gauge",
                "What spill-over to GPUs may still cost in its window.",
                [("", snapshot.spill_money_left)],
            )
        page.add_family(
            "in_flight", "gauge", "Requests that wait or run.", [("", snapshot.in_flight)]
        )
        page.add_family(
            "model_paused",
            "gauge",
            "1 for each model that an operator has paused.",
            [(labels(model=name), 1) for name in snapshot.paused_models],
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
        if snapshot.traces is not None:
            _add_traces(page, snapshot.traces)
        build = labels(version=__version__, python=platform.python_version())
        page.add_family("build_info", "gauge", "The version that runs.", [(build, 1)])
        if self._with_gen_ai:
            self._gen_ai.add_to(page)
        for text in page.steps():
            yield text.encode()
        yield generate_latest(self._process)

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
                for (priority, model, status), counts in list(self._requests.items())
            ),
        )
        page.add_family(
            "tokens_total", "counter", "Tokens of requests that ended.", list(self._token_samples())
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
            "calibrations_total",
            "counter",
            "Tiny requests by which idle nodes of unknown speed were measured, by how they ended.",
            [(labels(outcome=one), count) for one, count in self._calibrations.items()],
        )
        page.add_family(
            "limits_reached_total",
            "counter",
            "Requests that a limit on use refused.",
            (
                (labels(limit=limit, scope=scope), count)
                for (limit, scope), count in list(self._limits_reached.items())
            ),
        )
        page.add_family(
            "refused_requests_total",
            "counter",
            "Requests that were refused with 429, by their caller.",
            [
                (labels(caller=caller, reason=reason), count)
                for (caller, reason), count in self._refused.items()
            ],
        )
        page.add_family(
            "cost_total",
            "counter",
            "Cost of requests that ended, in the settings' currency.",
            [(labels(tier=tier), cost) for tier, cost in self._cost.items()],
        )
        for name, meaning, histogram in (
            ("request_duration_seconds", "From arrival to the last byte.", self._duration),
            ("time_to_first_token_seconds", "From arrival to the first content.", self._ttft),
            ("queue_seconds", "Time spent waiting for a slot.", self._queue),
            ("overhead_seconds", "From arrival to dispatch, less the wait.", self._overhead),
        ):
            page.add_histogram(name, meaning, [({}, histogram)])
        self._labelled.add_to(page)

    def _add_predictions(self, page: MetricsPage, snapshot: MetricsSnapshot) -> None:
        page.add_histogram(
            "prediction_ratio",
            "Actual time of complete responses, divided by that expected at the grant of a slot.",
            [({"of": what}, histogram) for what, histogram in snapshot.predictions.items()],
        )
        page.add_family(
            "predicted_cached_tokens_total",
            "counter",
            "Tokens of prompts that their nodes were expected, and found, to have cached.",
            [
                (labels(of="expected"), snapshot.cached_expected),
                (labels(of="found"), snapshot.cached_found),
            ],
        )

    def _add_webhooks(self, page: MetricsPage, waiting: int) -> None:
        page.add_family(
            "webhook_attempts_total",
            "counter",
            "Attempts to deliver an event to a webhook, by their outcome.",
            [(labels(outcome=outcome), count) for outcome, count in self._webhooks.items()],
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
                for node, outcomes in list(self._attempts.items())
                for outcome, count in list(outcomes.items())
            ),
        )
        page.add_family(
            "hooks_total",
            "counter",
            "Hooks that have started or stopped a standby node, or failed to.",
            (
                (labels(node=node, hook=hook, outcome=outcome), count)
                for (node, hook, outcome), count in list(self._hooks.items())
            ),
        )
        page.add_family(
            "node_state",
            "gauge",
            "1 for the state a node is in, 0 for the others.",
            (
                (f'{{node="{name}",state="{state}"}}', int(state == current))
                for name, current in ((escape_label(node.name), node.state) for node in nodes)
                for state in NODE_STATES
            ),
        )
        for family, meaning, read in (
            ("node_slots_total", "Slots a node has.", attrgetter("slots_total")),
            ("node_slots_busy", "Slots in use.", attrgetter("slots_busy")),
            (
                "node_differs",
                "1 while a node differs from what the inventory declares.",
                lambda node: int(node.differs),
            ),
            (
                "node_decode_tokens_per_second",
                "Measured speed of writing, for one request.",
                attrgetter("decode_tps"),
            ),
            (
                "node_prefill_tokens_per_second",
                "Measured speed of reading a prompt.",
                attrgetter("prefill_tps"),
            ),
        ):
            page.add_family(family, "gauge", meaning, _known(nodes, read))

    def _forget_others(self, names: Iterable[str]) -> None:
        """Drop nodes that have left; attempts that ended after that have added them again."""
        kept = {*names, OTHER_LABEL}
        for node in [node for node in self._attempts if node not in kept]:
            del self._attempts[node]
        for key in [key for key in self._hooks if key[0] not in kept]:
            del self._hooks[key]


def _known(
    nodes: Sequence[NodeSample], read: Callable[[NodeSample], float | None]
) -> Iterator[tuple[str, float]]:
    """A sample of each node for which the value is known."""
    for node in nodes:
        value = read(node)
        if value is not None:
            yield labels(node=node.name), value


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


def _add_traces(page: MetricsPage, traces: TraceSample) -> None:
    text = "Traces that the collector has taken."
    page.add_family("traces_exported_total", "counter", text, [("", traces.exported)])
    page.add_family(
        "traces_dropped_total",
        "counter",
        "Traces that were lost: too many waited, or the collector did not take them.",
        [(labels(reason=reason), count) for reason, count in traces.dropped.items()],
    )


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
        (
            "batch_results_blocked",
            "gauge",
            "1 while results wait, since the disk or the store takes none.",
            int(batches.results_blocked),
        ),
        (
            "folder_refusals_total",
            "counter",
            "Files for which the folder of files and results had no room.",
            batches.folder_refusals,
        ),
        (
            "folder_full",
            "gauge",
            "1 while the folder of files and results has no room for what came of late.",
            int(batches.folder_full),
        ),
    ):
        page.add_family(name, kind, text, [("", number)])
