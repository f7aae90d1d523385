"""Builds and runs what callers need not wait for: their files, and the work in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from gateway.batches.files import FileRegistry
from gateway.batches.folder import Folder
from gateway.batches.webhook_events import WebhookEvents
from gateway.batches.webhook_post import WebhookPoster
from gateway.batches.webhook_targets import WebhookTargets
from gateway.batches.webhooks import WebhookSender
from gateway.config.settings import Settings
from gateway.events import EventBus
from gateway.metering import NamedLoop
from gateway.startup import Options, batches_folder
from gateway.store.store import Store
from gateway.transport.resolver import Resolver


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

    def loops(self) -> Iterator[NamedLoop]:
        """What must run while the gateway serves."""
        if self.files is not None:
            yield NamedLoop(self.files.run(), "remove expired files")
        if self.webhook_sender is not None:
            yield NamedLoop(self.webhook_sender.run(), "deliver events to webhooks")

    def close(self) -> None:
        """Begin nothing more; the loops have ended."""
        if self.files is not None:
            self.files.close()
        self._resolver.close()

    def webhooks_waiting(self) -> int:
        """Deliveries that wait in the store."""
        return 0 if self.webhook_sender is None else self.webhook_sender.waiting
