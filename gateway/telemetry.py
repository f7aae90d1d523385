"""Builds what tells operators how the gateway does: metrics, traces and the log of events."""

from __future__ import annotations

from collections.abc import Callable

from gateway.config.settings import Settings
from gateway.events import EventBus
from gateway.observe.event_log import log_events
from gateway.observe.logs import Logs
from gateway.observe.metrics import Metrics, MetricsSnapshot
from gateway.tracing.request_tracing import RequestTracing


class Telemetry:
    """What one gateway tells its operators; `snapshot` is called at each scrape."""

    def __init__(
        self,
        settings: Settings,
        bus: EventBus,
        logs: Logs,
        snapshot: Callable[[], MetricsSnapshot],
        tracing: RequestTracing,
    ) -> None:
        self.metrics = Metrics(bus, snapshot)
        self._event_log = log_events(bus, logs)
        self._logs = logs
        self._tracing = tracing
        self._configure_events(settings)

    def configure(self, settings: Settings) -> None:
        """Put these settings in force."""
        self._configure_events(settings)
        self._logs.configure(settings.logging.level)
        self._tracing.configure(settings.telemetry.traces)

    def _configure_events(self, settings: Settings) -> None:
        self.metrics.configure(gen_ai=settings.telemetry.gen_ai_metrics)
        logging = settings.logging
        self._event_log.configure(logging.access_share if logging.access else 0.0)
