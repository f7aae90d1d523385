"""Builds and runs what callers need not wait for: their files, and the work in them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from gateway.batches.background_requests import BackgroundRequests
from gateway.batches.background_runner import BackgroundRunner
from gateway.batches.disk_threads import DiskThreads
from gateway.batches.event_log import EventLogs
from gateway.batches.files import FileRegistry
from gateway.batches.folder import Folder
from gateway.batches.runner import Runner
from gateway.batches.webhook_events import WebhookEvents
from gateway.batches.webhook_post import WebhookPoster
from gateway.batches.webhook_targets import WebhookTargets
from gateway.batches.webhooks import WebhookSender
from gateway.catalog import RequestQueue, ServedModels
from gateway.config.settings import Settings
from gateway.events import EventBus
from gateway.metering import NamedLoop
from gateway.startup import Options, batches_folder
from gateway.store.store import Store
from gateway.transport.resolver import Resolver
from gateway.usage.ledger import Ledger
from gateway.web.storing import Storing


class BackgroundWork:
    """What one gateway keeps and does for callers that need not wait; nothing without a store.

    `settings` gives those in force.
    """

    def __init__(
        self,
        options: Options,
        settings: Callable[[], Settings],
        store: Store | None,
        bus: EventBus,
    ) -> None:
        self.files: FileRegistry | None = None
        """None: there is no store."""
        self.webhook_targets = WebhookTargets(lambda: settings().webhooks)
        self.webhook_events = WebhookEvents(self.webhook_targets, time.time)
        self.webhook_sender: WebhookSender | None = None
        self.requests: BackgroundRequests | None = None
        """Stored responses and deferred requests; None: there is no store."""
        self._settings = settings
        self._threads = DiskThreads()
        self._request_runner: BackgroundRunner | None = None
        # Not that of the nodes, which has names of theirs alone.
        self._resolver = Resolver()
        if store is None:
            return
        folder = Folder(
            batches_folder(options, settings()),
            most_bytes=lambda: settings().batches.folder_bytes,
        )
        self.files = FileRegistry(store, folder, lambda: settings().batches, time.time)
        self.webhook_sender = WebhookSender(
            store,
            self.webhook_targets,
            lambda: settings().webhooks,
            WebhookPoster(self._resolver, time.time),
            bus,
        )

        self._logs = EventLogs(folder, self._threads, lambda: settings().limits.response_bytes)
        self.requests = BackgroundRequests(
            store,
            folder,
            self._threads,
            self._logs,
            self.webhook_events,
            lambda: settings().batches,
            time.time,
        )

    def storing(self, catalog: ServedModels, queue: RequestQueue) -> Storing:
        """What the handler gives the requests to that are kept or made later."""
        return Storing(self.requests, self.webhook_targets, catalog, queue)

    def run_requests(
        self, runner: Runner, ledger: Ledger | None, is_closing: Callable[[], bool]
    ) -> None:
        """Let `loops` run what waits, until `is_closing`."""
        if self.requests is not None and ledger is not None:
            self._request_runner = BackgroundRunner(
                self.requests,
                runner,
                ledger,
                lambda: self._settings().batches,
                time.time,
                is_closing,
            )

    def loops(self) -> Iterator[NamedLoop]:
        """What must run while the gateway serves."""
        if self.files is not None:
            yield NamedLoop(self.files.run(), "remove expired files")
        if self.requests is not None:
            yield NamedLoop(self.requests.run(), "remove expired background requests")
            yield NamedLoop(self._run_requests(), "run background requests")
        if self.webhook_sender is not None:
            yield NamedLoop(self.webhook_sender.run(), "deliver events to webhooks")

    async def _run_requests(self) -> None:
        """Run what waits and write its logs, which is to end last."""
        logs = asyncio.create_task(self._logs.run())
        try:
            if self._request_runner is not None:
                await self._request_runner.run()
        finally:
            logs.cancel()
            await asyncio.gather(logs, return_exceptions=True)

    def close(self) -> None:
        """Begin nothing more; the loops have ended."""
        if self.files is not None:
            self.files.close()
        self._threads.close()
        self._resolver.close()

    def webhooks_waiting(self) -> int:
        """Deliveries that wait in the store."""
        return 0 if self.webhook_sender is None else self.webhook_sender.waiting
