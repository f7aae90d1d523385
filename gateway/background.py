"""Builds and runs what callers need not wait for: their files, and the work in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from gateway.batches.files import FileRegistry
from gateway.batches.folder import Folder
from gateway.config.settings import Settings
from gateway.metering import NamedLoop
from gateway.startup import Options, batches_folder
from gateway.store.store import Store


class BackgroundWork:
    """What one gateway keeps and does for callers that need not wait; nothing without a store.

    `settings` gives those in force.
    """

    def __init__(
        self, options: Options, settings: Callable[[], Settings], store: Store | None
    ) -> None:
        self.files: FileRegistry | None = None
        """None: there is no store."""
        if store is None:
            return
        folder = Folder(
            batches_folder(options, settings()),
            most_bytes=lambda: settings().batches.folder_bytes,
        )
        self.files = FileRegistry(store, folder, lambda: settings().batches, time.time)

    def loops(self) -> Iterator[NamedLoop]:
        """What must run while the gateway serves."""
        if self.files is not None:
            yield NamedLoop(self.files.run(), "remove expired files")

    def close(self) -> None:
        """Begin nothing more; the loops have ended."""
        if self.files is not None:
            self.files.close()
