"""Histograms of requests by model, class, tier and outcome, and under OpenTelemetry's names.

Labels are bounded: a histogram has at most `MOST_LABEL_SETS` combinations with the names of models;
what comes later is counted with the model `other`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.errors import CLIENT_CLOSED_STATUS
from gateway.events import RequestFinished
from gateway.observe.exposition import OTHER_LABEL, Histogram, MetricsPage

# A CPU node may take an hour for a response; a refusal takes a millisecond.
SECONDS_UP_TO_AN_HOUR = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60),
    *(120, 300, 600, 1200, 1800, 3600),
)

MOST_LABEL_SETS = 300
"""Most combinations of labels of one histogram that name a model."""

NO_TIER = "none"
"""The tier of a request that no node has seen."""


def outcome_of(status: int) -> str:
    """`ok`, `rejected` (the request's fault, or a limit), `client_closed`, or `failed`."""
    if status < 400:
        return "ok"
    if status == CLIENT_CLOSED_STATUS:
        return "client_closed"
    return "rejected" if status < 500 else "failed"


class LabelledHistogram:
    """Histograms with the same bounds, by labels; the first label is the model."""

    __slots__ = ("_by_labels", "_names", "bounds")

    def __init__(self, names: Sequence[str], bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._names = tuple(names)
        self._by_labels: dict[tuple[str, ...], Histogram] = {}

    def observe(self, value: float, values: tuple[str, ...]) -> None:
        """Count a value under these labels."""
        histogram = self._by_labels.get(values)
        if histogram is None:
            if len(self._by_labels) >= MOST_LABEL_SETS:
                values = (OTHER_LABEL, *values[1:])
            histogram = self._by_labels.setdefault(values, Histogram(self.bounds))
        histogram.observe(value)

    def samples(self) -> list[tuple[Mapping[str, str], Histogram]]:
        """All histograms with their labels."""
        return [
            (dict(zip(self._names, values, strict=True)), histogram)
            for values, histogram in self._by_labels.items()
        ]


class RequestHistograms:
    """Times of requests by model, class, tier and outcome."""

    def __init__(self) -> None:
        names = ("model", "class", "tier")
        self._response = LabelledHistogram((*names, "outcome"), SECONDS_UP_TO_AN_HOUR)
        self._first_token = LabelledHistogram(names, SECONDS_UP_TO_AN_HOUR)
        self._wait = LabelledHistogram(names, SECONDS_UP_TO_AN_HOUR)

    def count(self, event: RequestFinished) -> None:
        """Count a request that has ended."""
        labelled = (event.model, event.priority.label, event.tier or NO_TIER)
        self._response.observe(event.duration_seconds, (*labelled, outcome_of(event.status)))
        if event.ttft is not None:
            self._first_token.observe(event.ttft, labelled)
        if event.attempts or event.queue_seconds:
            self._wait.observe(event.queue_seconds, labelled)

    def add_to(self, page: MetricsPage) -> None:
        """Add the families to a page."""
        for name, meaning, histogram in (
            ("response_seconds", "From arrival to the last byte.", self._response),
            ("first_token_seconds", "From arrival to the first content.", self._first_token),
            ("slot_wait_seconds", "Time spent waiting for a slot.", self._wait),
        ):
            page.add_histogram(name, meaning, histogram.samples())


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
"""The operations that OpenTelemetry names; other requests are not generative."""

PROVIDER = "llama.cpp"
"""`gen_ai.provider.name`: OpenTelemetry has no word for it, and allows others."""


class GenAiHistograms:
    """Requests under the names that OpenTelemetry's semantic conventions give."""

    def __init__(self) -> None:
        names = ("gen_ai_request_model", "gen_ai_operation_name", "gen_ai_provider_name")
        self._duration = LabelledHistogram((*names, "error_type"), _DURATION)
        self._first_token = LabelledHistogram(names, _FIRST_TOKEN)
        self._output_token = LabelledHistogram(names, _OUTPUT_TOKEN)
        self._tokens = LabelledHistogram((*names, "gen_ai_token_type"), _TOKENS)

    def count(self, event: RequestFinished) -> None:
        """Count a request that has ended."""
        operation = OPERATIONS.get(event.path)
        if operation is None:
            return
        labelled = (event.model, operation, PROVIDER)
        failed = "" if event.status < 400 else str(event.status)
        self._duration.observe(event.duration_seconds, (*labelled, failed))
        if event.ttft is not None:
            self._first_token.observe(event.ttft, labelled)
            if event.completion_tokens > 1:
                decode = max(0.0, event.duration_seconds - event.ttft)
                self._output_token.observe(decode / (event.completion_tokens - 1), labelled)
        if event.prompt_tokens:
            self._tokens.observe(event.prompt_tokens, (*labelled, "input"))
        if event.completion_tokens:
            self._tokens.observe(event.completion_tokens, (*labelled, "output"))

    def add_to(self, page: MetricsPage) -> None:
        """Add the families to a page."""
        for name, meaning, histogram in (
            ("gen_ai_server_request_duration_seconds", "Duration of requests.", self._duration),
            (
                "gen_ai_server_time_to_first_token_seconds",
                "From arrival to the first content.",
                self._first_token,
            ),
            (
                "gen_ai_server_time_per_output_token_seconds",
                "Time for each token after the first.",
                self._output_token,
            ),
            ("gen_ai_client_token_usage", "Tokens of a request.", self._tokens),
        ):
            page.add_histogram(name, meaning, histogram.samples(), prefix="")
