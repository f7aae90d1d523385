"""Builds and runs what counts the gateway's use: store, API keys, limits, ledger and reports."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import structlog

from gateway.app.event_loop import OwnTasks
from gateway.app.startup import Options, keys_file, state_file, store_location
from gateway.callers.ended import OWN_EXAMINED, EndedFinder, OwnRequests
from gateway.callers.keys import AnonymousAccess, KeyRing
from gateway.callers.ledger import KeptRows, Ledger
from gateway.callers.limit_sync import LimitSync
from gateway.callers.limits import LimitBook
from gateway.callers.meter import Meter
from gateway.callers.money import NodeHoursRecorder
from gateway.callers.processes import ProcessIdentity
from gateway.callers.reports import CallerUsage, Reporter, Retention
from gateway.callers.standings import Standings
from gateway.callers.stored_keys import KeySync, members_of, with_groups
from gateway.config.keys import GroupSpec
from gateway.config.settings import Settings
from gateway.events import EventBus, LimitReached
from gateway.forward.in_flight import InFlightRegistry
from gateway.nodes.prices import GpuCosts, alive_nodes, cost_of
from gateway.schedule.scheduler import Scheduler
from gateway.store.failures import StoreError
from gateway.store.store import Store, log_store_change

log = structlog.get_logger()
# For each step of a start, when a store that does not answer has used up the time.
LEAST_SECONDS = 0.1


class Metering:
    """What counts the use of one gateway; without a store it counts in memory alone."""

    def __init__(
        self,
        options: Options,
        settings: Settings,
        *,
        access: AnonymousAccess,
        scheduler: Scheduler,
        registry: InFlightRegistry,
        bus: EventBus,
        on_groups: Callable[[], None],
    ) -> None:
        """`on_groups` is called when the store's groups have changed."""
        self._settings = settings
        self._bus, self._on_groups = bus, on_groups
        self._groups: Mapping[str, GroupSpec] = {}  # those of the store that are in force
        fleet, clock = self._fleet, self._clock = scheduler.fleet, scheduler.clock
        location = store_location(options, settings)
        self.store = None if location is None else Store(location, on_change=log_store_change)
        self.key_ring = KeyRing(access=access, is_complete=self.store is None)
        self.key_sync = KeySync(
            self.store, self.key_ring, keys_file(options), on_change=self._keys_changed
        )
        self.key_sync.configure(settings.keys, allow_anonymous=settings.allow_anonymous)
        self.limit_book = LimitBook(
            settings,
            clock=clock,
            learn_pending=bus.flush,
            dearest_token=scheduler.dearest_token,
            on_refusal=lambda limit, scope: bus.publish(LimitReached(limit, scope)),
        )
        self.ledger: Ledger | None = None
        self.reporter: Reporter | None = None
        self.ended: EndedFinder | None = None
        self.own_requests: OwnRequests | None = None
        self.process: ProcessIdentity | None = None
        """This process in the store; None: there is no store."""
        self._limit_sync: LimitSync | None = None
        self.standings = Standings(self.key_sync, self.limit_book, None)
        if self.store is None:
            self.meter = Meter(self.limit_book, bus)
            return
        process = self.process = ProcessIdentity.of_this_process(time.time())
        self.ledger = Ledger(
            self.store,
            process,
            now=time.time,
            clock=clock,
            kept=None
            if settings.cluster is None
            else KeptRows(state_file(options, "ledger").with_suffix(""), process.id),
            # The meter is made with the ledger.
            open_requests=lambda *which: self.meter.open_requests(*which),  # noqa: PLW0108
        )
        self.meter = Meter(
            self.limit_book,
            bus,
            process=process.id,
            add_row=self.ledger.add,
            tokens_so_far=registry.tokens_so_far,
            gpu_cost=GpuCosts(fleet, clock).of,
            slot_seconds_so_far=registry.slot_seconds_so_far,
            cost_of_use=self._cost_of_use,
        )
        ledger = self.ledger
        self._limit_sync = LimitSync(
            self.limit_book,
            self.store,
            process.id,
            clock=clock,
            recovered=lambda: ledger.recovered,
        )
        self.standings = Standings(self.key_sync, self.limit_book, self._limit_sync)
        self.reporter = Reporter(self.store)
        ring = self.key_ring
        self.ended = EndedFinder(self.store, ring.name_of, ring.ids_of, clock)
        of_callers = EndedFinder(self.store, ring.name_of, ring.ids_of, clock, OWN_EXAMINED)
        self.own_requests = OwnRequests(of_callers, time.time)

    def configure(self, settings: Settings) -> None:
        """Put the keys, limits and retention of these settings in force."""
        self._settings = settings
        self.key_sync.configure(settings.keys, allow_anonymous=settings.allow_anonymous)
        self.limit_book.configure(self.in_force)
        # Their lines in the log have the names of keys.
        self._bus.ended.forget_kinds()

    @property
    def in_force(self) -> Settings:
        """The settings with the store's groups beside their own."""
        return with_groups(self._settings, self.key_sync.groups)

    def undefined_groups(self) -> Mapping[str, int]:
        """How many keys are of each group that neither settings nor store define."""
        settings, sync = self._settings, self.key_sync
        if not self.key_ring.is_complete:
            return {}  # The store may define them.
        counts = members_of(settings.keys, sync.members)
        defined = {*settings.groups, *sync.groups}
        return {name: counts[name] for name in sorted(counts) if name not in defined}

    def _keys_changed(self) -> None:
        self._bus.ended.forget_kinds()
        if self.key_sync.groups != self._groups:
            self._groups = self.key_sync.groups
            self.limit_book.configure(self.in_force)
            self._on_groups()

    def caller_usage(self) -> CallerUsage:
        """What callers may read of their own use."""
        return CallerUsage(self.limit_book, self.reporter, time.time, self._clock)

    def _cost_of_use(
        self, node: str | None, prompt: int, completion: int, slot_seconds: float
    ) -> float:
        found = None if node is None else self._fleet.nodes.get(node)
        if found is None:
            return 0.0
        return cost_of(
            found.spec,
            found.slots_total,
            prompt=prompt,
            completion=completion,
            slots=1,
            seconds=slot_seconds,
        )

    # Start and end.

    async def load(self, seconds: float) -> None:
        """Read keys and counters, before the first request, within about so many seconds in all.

        A predecessor may have used up what is left of a limit. What the store can't tell in time
        is read later. The store must have been started.
        """
        end = self._clock() + seconds

        def left() -> float:
            return max(LEAST_SECONDS, end - self._clock())

        if self.store is not None:
            await self.store.wait_opened(seconds)
        await self.key_sync.start(left())
        if self.ledger is not None:
            await self.ledger.start(left())
        if self._limit_sync is not None:
            self.limit_book.prepare(self.key_ring.callers())
            await self._limit_sync.start(left())

    async def bring_up_to_date(self, seconds: float) -> None:
        """Read keys and counters again, within so many seconds: others have served until now."""

        async def read_keys() -> None:
            with contextlib.suppress(StoreError):
                await self.key_sync.refresh(seconds)

        reads = [read_keys()]
        if self._limit_sync is not None:
            reads.append(self._limit_sync.start(seconds))
        await asyncio.gather(*reads)

    def begin(self, tasks: OwnTasks) -> None:
        """Run what must run from `load` on."""
        tasks.start(self.key_sync.run(), "follow the API keys")
        if self.ledger is not None:
            tasks.start(self.ledger.worker.run(), "write the ledger")
            if self.ledger.kept is not None:
                tasks.start(self.ledger.keep_rows(), "keep rows of the ledger on the disk")
        if self._limit_sync is not None:
            tasks.start(self._limit_sync.worker.run(), "follow the use of other processes")
        if self.store is not None and self.reporter is not None:
            hours = NodeHoursRecorder(self.store, lambda: alive_nodes(self._fleet), time.time)
            tasks.start(hours.run(), "record the hours of nodes")
            kept = Retention(self.reporter, lambda: self._settings.store.retention, time.time)
            tasks.start(kept.worker.run(), "sum up old usage")
