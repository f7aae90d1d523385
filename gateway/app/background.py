"""Builds and runs what callers need not wait for: their files, and the work in them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from gateway.app.event_loop import OwnTasks, wait_for_first
from gateway.app.metering import Metering
from gateway.app.startup import Options, batches_folder
from gateway.callers.limits import UsedQuota
from gateway.callers.standings import QuotaWatch
from gateway.catalog import RequestQueue
from gateway.config.settings import Settings
from gateway.forward.context import ForwardContext
from gateway.forward.forwarder import Forwarder
from gateway.forward.in_flight import InFlightRegistry
from gateway.nodes.prices import dearest_token
from gateway.request.preparation import RequestRules
from gateway.schedule.scheduler import Scheduler
from gateway.stored.background_requests import (
    BACKGROUND_KINDS,
    LEASE_SECONDS,
    BackgroundRequests,
    BackgroundRunner,
)
from gateway.stored.batch_registry import BatchRegistry, BatchUpkeep
from gateway.stored.claims import RowLeases, UnfinishedWork
from gateway.stored.feeder import Feeder, Supply
from gateway.stored.files import FileRegistry
from gateway.stored.folder import DiskThreads, Folder, FolderFull, Storage
from gateway.stored.response_log import ResponseLogs
from gateway.stored.results import LineResults
from gateway.stored.runner import RequestRunner, RequestTarget
from gateway.stored.waits import BatchWaits, ServingNodes
from gateway.stored.webhooks import WebhookEvents, WebhookPoster, WebhookSender, WebhookTargets
from gateway.transport.resolver import Resolver
from gateway.watch.metrics import MetricsPage
from gateway.watch.problems import StorageCondition
from gateway.watch.request_tracing import RequestTracing
from gateway.web.background import Storing
from gateway.web.site import KeptForCallers

_Loop = tuple[Callable[[], Coroutine[Any, Any, None]], str]  # work without an end, and its name


class BackgroundWork:
    """What one gateway keeps and does for callers that need not wait; without a store, nothing.

    `settings` gives those in force.
    """

    def __init__(
        self,
        options: Options,
        settings: Callable[[], Settings],
        rules: RequestRules,
        *,
        metering: Metering,
        scheduler: Scheduler,
        context: ForwardContext,
        forwarder: Forwarder,
        registry: InFlightRegistry,
        tracing: RequestTracing,
        is_sole: bool = False,
        is_folder_there: Callable[[str], bool | None] = lambda _: None,
    ) -> None:
        """`is_sole`: no other process runs what waits while this one does.

        `is_folder_there`: as in `BatchWaits`.
        """
        fleet = self._fleet = scheduler.fleet
        self._stopped = False
        self._ends = asyncio.Event()
        bus, clock = context.bus, context.clock
        self.runner = RequestRunner(
            settings(),
            rules,
            metering.key_ring,
            metering.meter,
            forwarder,
            registry,
            bus,
            context.time_slicer,
            clock,
            time.time,
            tracing,
        )
        self.files: FileRegistry | None = None  # None: there is no store. So are the next ones.
        self.batches: BatchRegistry | None = None
        self.feeder: Feeder | None = None
        self._results: LineResults | None = None
        self.webhook_targets = WebhookTargets(lambda: settings().webhooks)
        self.webhook_events = WebhookEvents(self.webhook_targets, time.time)
        self.webhook_sender: WebhookSender | None = None
        self._store, self._key_ring = metering.store, metering.key_ring
        self.quotas = QuotaWatch(metering.limit_book, metering.key_ring, self._tell_quotas)
        self.requests: BackgroundRequests | None = None  # stored responses and deferred requests
        self._logs: ResponseLogs | None = None
        self._request_runner: BackgroundRunner | None = None
        self._writers: list[_Loop] = [(self.quotas.run, "watch quotas")]
        self._loops: list[_Loop] = []
        # Not that of the nodes, which has names of theirs alone.
        self._resolver = Resolver()
        self._threads = DiskThreads()  # for batches and background requests; files have their own
        store, ledger, process = metering.store, metering.ledger, metering.process
        if store is None or ledger is None or process is None:
            return
        folder = Folder(
            batches_folder(options, settings()),
            most_bytes=lambda: settings().batches.folder_bytes,
        )
        storage = Storage(
            store, folder, self._threads, lambda: settings().batches, time.time, clock
        )
        self.files = FileRegistry(replace(storage, threads=DiskThreads()))
        self.webhook_sender = WebhookSender(
            store,
            self.webhook_targets,
            lambda: settings().webhooks,
            WebhookPoster(self._resolver, time.time),
            bus,
            recorded=lambda: self.webhook_events.recorded,
        )
        self._results = LineResults(storage, ledger, process)
        work = UnfinishedWork(storage)
        leases = RowLeases(storage, process, is_sole=is_sole)
        supply = Supply(storage, self.runner.target_of)
        self.feeder = Feeder(leases, self.runner, scheduler, supply, self._results, work)
        waits = BatchWaits(self.feeder, self._serving_nodes, time.time, is_folder_there)
        upkeep = BatchUpkeep(
            storage, work, self.feeder.wake, self.webhook_events.batch_ended, waits
        )
        self.batches = BatchRegistry(storage, upkeep, self._token_price)
        self._logs = ResponseLogs(folder, self._threads, lambda: settings().limits.response_bytes)
        self.requests = BackgroundRequests(storage, self._logs, self.webhook_events, work)
        self._request_runner = BackgroundRunner(
            RowLeases(storage, process, LEASE_SECONDS, BACKGROUND_KINDS, is_sole),
            self.runner,
            scheduler,
            self.requests,
            ledger,
            lambda: self._stopped,
            lambda: ((node.name, node.spec.tier) for node in fleet.nodes.values()),
        )
        self._writers += [
            (self._results.run, "record results"),
            (self._logs.run, "write the logs of responses"),
        ]
        self._loops += [
            (self.files.run, "remove expired files"),
            (self.batches.upkeep.run, "begin and end batches"),
            (self.feeder.run, "feed batches"),
            (self.requests.run, "remove expired background requests"),
            (self._request_runner.run, "run background requests"),
            (self.webhook_sender.run, "deliver events to webhooks"),
        ]

    def configure(self, settings: Settings, rules: RequestRules) -> None:
        """Run what is begun from now on by these; the rest reads its settings each time."""
        self.runner.configure(settings, rules)

    def storing(self, queue: RequestQueue) -> Storing:
        """What the handler gives the requests to that are kept or made later."""
        return Storing(self.requests, self.webhook_targets, queue)

    def begin_writing(self, tasks: OwnTasks) -> None:
        """Run what must run while the gateway serves, and end after what `begin` runs."""
        for work, name in self._writers:
            tasks.start(work(), name)

    def begin(self, tasks: OwnTasks) -> None:
        """Run all that waits, and remove what is old."""
        for work, name in self._loops:
            tasks.start(work(), name)

    # The end.

    def stop(self) -> None:
        """Begin no more of what waits: this gateway ends, or has a successor."""
        self._stopped = True
        if self.feeder is not None:
            self.feeder.stop()

    def end(self) -> None:
        """The process is to end: nobody waits for what runs, and those who follow it break."""
        self.stop()
        self._ends.set()
        if self.requests is not None:
            self.requests.logs.cut()

    async def give_up(self) -> None:
        """End stored responses whose clients wait for them here, and would send them again."""
        if self.requests is not None:
            await self.requests.give_up()

    async def drain(self) -> None:
        """After `stop`: wait until what runs has ended, or until `end`."""
        await wait_for_first(self._idle(), self._ends.wait())

    async def _idle(self) -> None:
        if self.feeder is not None:
            await self.feeder.ended()
        if self._request_runner is not None:
            await self._request_runner.ended()

    async def aclose(self, seconds: float) -> None:
        """Record results that wait, within so many seconds; the loops have ended."""
        if self._results is not None:
            await self._results.close(seconds)
        if self.files is not None:
            self.files.close()
        self._threads.close()
        self._resolver.close()

    async def _tell_quotas(self, used: Sequence[UsedQuota]) -> None:
        """Have receivers told of quotas that are nearly, or quite, used up. Raises: StoreError."""
        if self._store is None:
            return

        def record(connection: Connection) -> None:
            for one in used:
                name = self._key_ring.name_of(one.id) if one.standing.kind == "key" else None
                self.webhook_events.quota_used(connection, one, name)

        await self._store.run(record)

    # What others ask.

    def kept_for_callers(self) -> KeptForCallers:
        """What the public listener shows to callers."""
        return KeptForCallers(self.files, self.batches, self.requests)

    def add_metrics(self, page: MetricsPage) -> None:
        """Add the metrics of what waits here; counts are of this process."""
        sender, results, files = self.webhook_sender, self._results, self.files
        page.number("webhook_deliveries_waiting", 0 if sender is None else sender.waiting)
        if self.feeder is None or results is None or files is None:
            return
        feeder, waiting, folder = self.feeder, self.feeder.waiting, files.storage.folder
        page.counts("batches", waiting.batches, "state")
        page.counts("batch_lines_total", feeder.outcomes, "outcome")
        page.counts("stored_requests_waiting", waiting.kinds, "kind")
        page.number("batch_lines_running", feeder.running)
        page.number("batch_lines_claimed", feeder.claimed)
        page.number("batch_lines_deferred_total", feeder.deferred)
        page.number("batch_lines_retried_total", feeder.retried)
        oldest = 0.0 if waiting.oldest is None else max(0.0, time.time() - waiting.oldest)
        page.number("batch_oldest_seconds", oldest)
        page.number("batch_results_blocked", int(results.problem is not None))
        page.number("folder_refusals_total", folder.refusals)
        page.number("folder_full", int(folder.full is not None))

    def storage(self) -> StorageCondition:
        """Whether files and results can be kept."""
        if self.files is None or self.batches is None or self._results is None:
            return StorageCondition()
        upkeep, blocked = self.batches.upkeep, self._results.disk_error
        error = blocked or self.files.storage.folder.full or upkeep.folder_error
        return StorageCondition(
            error=None if error is None else str(error),
            is_full=isinstance(error, FolderFull),
            results=0 if blocked is None else self._results.pending,
            full_callers=sorted(upkeep.full_owners),
        )

    def _token_price(self, model: str | None) -> float | None:
        """The mean cost of a token on the nodes that serve a model; None: unknown."""
        index = self._fleet.model_index
        if model is None:
            names = index.one_name_each(index.model_names())
            model = names[0] if len(names) == 1 else None
        nodes = index.nodes_for(model) if model is not None else ()
        prices = [dearest_token(node) for node in nodes]
        return sum(prices) / len(prices) if any(prices) else None

    def _serving_nodes(self, target: RequestTarget) -> ServingNodes:
        """The nodes of the target's models, and what those that are up do in a second."""
        index, labels = self._fleet.model_index, target.node_labels
        nodes = {node for name in target.model_names for node in index.nodes_for(name, labels)}
        up = [node for node in nodes if node.is_alive and node.slots_now]
        return ServingNodes(
            Counter(node.state.value for node in nodes),
            sum(node.speed.expected_prefill_tps for node in up),
            sum(
                node.slots_now
                / (node.speed.token_base + node.speed.token_step * (node.slots_now - 1))
                for node in up
            ),
        )
