"""The only place that builds the gateway's objects and owns their life."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from gateway import __version__, errors
from gateway.access.exposure import is_loopback
from gateway.addresses import bind_listeners, open_listeners
from gateway.config.inventory import Inventory, load_inventory
from gateway.config.listeners import LimitSettings
from gateway.config.live import needs_restart
from gateway.config.problems import ConfigError, Problem
from gateway.config.settings import Refused, Settings, load_settings
from gateway.config.watch import changes
from gateway.events import Bus, InventoryChanged, SettingsChanged
from gateway.fleet.drains import Drains
from gateway.fleet.fleet import Fleet
from gateway.fleet.last_seen import LastSeen
from gateway.observe.event_lines import subscribe
from gateway.observe.logs import Logs
from gateway.observe.metrics import Metrics
from gateway.open_files import raise_open_files, within
from gateway.options import Options, drains_file, last_seen_file, read_key
from gateway.relay.journey import Means
from gateway.relay.live import Registry
from gateway.relay.relay import Relay
from gateway.relay.watch import Watch
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.standby import Standby
from gateway.succession import Inheritance, SuccessionFailed, legacy, start_successor
from gateway.systemd import Notifier
from gateway.transport.names import Names
from gateway.transport.upstream import connect
from gateway.web.admin.app import admin_app
from gateway.web.admin.control import Reloaded
from gateway.web.admin.deadlines import Deadlines
from gateway.web.admin.totals import Totals
from gateway.web.admin.view import View
from gateway.web.listener import Listener
from gateway.web.public.edge import Edge, Snapshot
from gateway.web.public.protocol import bounded
from gateway.web.public.site import cors, public_site

FIRST_PROBES = 10.0
"""Seconds in which nodes are learnt of before it is said that they are served."""

LAST_WORDS = 5.0
"""Seconds for clients to read how their request ended, once the grace is over."""

KEYS_LOST = (
    "the settings have lost their last API key: every request is answered with 401; add a key, or "
    "restart to serve without any"
)

log = structlog.get_logger()


class Gateway:
    """A running gateway: what the admin listener steers and a signal ends."""

    version = __version__

    def __init__(
        self,
        options: Options,
        settings: Settings,
        logs: Logs,
        inheritance: Inheritance | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.options = options
        self._inheritance = inheritance or Inheritance()
        self.settings = settings
        self.clock = clock
        self.started = self.clock()
        self.inventory_error: str | None = None
        self.settings_error: str | None = None
        self.stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._told = asyncio.Event()
        self._successor: subprocess.Popen[bytes] | None = None
        """The process that has taken over."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()
        self._succeeding = asyncio.Lock()
        self._notifier = Notifier()
        rng = rng or random.Random()
        self.bus = Bus(lambda seconds, work: asyncio.get_running_loop().call_later(seconds, work))
        self._names = Names()
        self.fleet = Fleet(
            connect=functools.partial(connect, names=self._names),
            health=settings.health,
            timeouts=settings.timeouts,
            bus=self.bus,
            clock=self.clock,
            rng=rng,
            drains=Drains(drains_file(options)),
            last_seen=LastSeen(last_seen_file(options)),
        )
        self.scheduler = Scheduler(self.fleet, settings, self.clock, rng, catch_up=self.bus.flush)
        self.standby = Standby(self.fleet, self.scheduler, settings, self.bus, self.clock)
        self.watch = Watch(self.clock)
        self.means = Means(self.scheduler, self.fleet, settings, self.bus, self.watch, self.clock)
        self.relay = Relay(self.means)
        self.registry = Registry()
        self._loopback = is_loopback(settings.listen.host)
        self.edge = Edge(
            Snapshot.of(settings, loopback=self._loopback, before=self._inheritance.door),
            self.relay,
            self.fleet,
            self.registry,
            self.bus,
            self.clock,
        )
        self.metrics = Metrics(
            self.bus,
            View(
                self.fleet,
                self.scheduler,
                self.registry,
                lambda: self.inventory_error,
                self.relay.retries_left,
            ),
        )
        self.totals = Totals(self.metrics)
        self.deadlines = Deadlines(self.registry)
        self.lines = subscribe(self.bus, logs, access=settings.logging.access)
        self._logs = logs
        self._site = public_site(self.edge, self.scheduler)
        self._framed = self._site
        self._frame()
        self.public: Listener | None = None
        self.admin: Listener | None = None

    @property
    def closing(self) -> bool:
        """Whether it is on its way out."""
        return self.edge.closing

    @property
    def keys_lost(self) -> str | None:
        """Why nobody is let in, with the remedy; None: callers are."""
        return KEYS_LOST if self.edge.snapshot.door.closed else None

    @property
    def _has_defaults(self) -> bool:
        return self.settings == self.options.over(Settings())

    # Life.

    @contextlib.asynccontextmanager
    async def running(self, inventory: Inventory) -> AsyncIterator[None]:
        """Serve inside this context. Raises: StartError."""
        files = raise_open_files()
        try:
            self.public, self.admin = self._listeners(files)
            await self.fleet.start(inventory)
            self._own(self.standby.run(), "start and stop standby nodes")
            self._own(self._watch_files(inventory), "watch the files")
            self._own(self._notifier.feed_watchdog(), "feed the watchdog")
            if self._inheritance.ready is not None:
                # The predecessor serves until the nodes are known here.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.fleet.probed.wait(), FIRST_PROBES)
            open_listeners(self.public, self.admin)
            log.info(
                "listening",
                version=__version__,
                public=self.public.url,
                admin=self.admin.url,
                nodes=len(self.fleet.nodes),
                open_files=files,
            )
            if self.keys_lost is not None:
                log.warning("locked", why=self.keys_lost)
            self._notifier.tell("READY=1", f"STATUS=serving on {self.public.url}")
            self._inheritance.tell_ready()
            # Only now: until then the predecessor writes.
            self._own(self.fleet.last_seen.keep_saved(), "save what nodes said")
            yield
        finally:
            await self._end()

    def stop(self) -> None:
        """Begin the orderly end; called again, end at once."""
        if self._told.is_set():
            self._at_once.set()
        self._told.set()
        self.stopping.set()

    def succeed_soon(self) -> None:
        """Start a successor, and make room for it when it is ready (SIGUSR2)."""
        if not self.options.command:
            log.warning("no successor", why="only 'llama-gateway serve' can be succeeded")
        elif not self.stopping.is_set() and not self._succeeding.locked():
            self._own(self._succeed(), "succession")

    async def _succeed(self) -> None:
        assert self.public is not None
        assert self.admin is not None
        async with self._succeeding:
            sockets = {"public": self.public.sock, "admin": self.admin.sock}
            command = self.options.command
            log.info("starting a successor", command=command[0])
            try:
                fixed = self._inheritance.fixed
                door, config = self.edge.snapshot.door, self.options.config
                told = legacy(door, config, customised=not self._has_defaults)
                self._successor = await start_successor(command, sockets, fixed=fixed, told=told)
            except SuccessionFailed as error:
                log.error("no successor", why=str(error))  # noqa: TRY400 - the message says it all
                return
            self.standby.release()
            self.fleet.last_seen.release()
            self._notifier.tell(f"MAINPID={self._successor.pid}")
            self.stopping.set()

    async def shut_down(self) -> int:
        """Let what waits and runs end within the grace; 0, or 1 if a second signal cut it short.

        After a successor has taken over, the grace begins with a signal to end.
        """
        shutdown = self.settings.shutdown
        assert self.public is not None
        if self._successor is not None:
            log.info("succeeded", pid=self._successor.pid, in_flight=len(self.registry))
            closing = asyncio.create_task(self.public.retire())
            # Nobody waits for its end: what runs has the time that each request has anyway.
            told = asyncio.create_task(self._told.wait())
            await asyncio.wait([closing, told], return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
        else:
            self._notifier.tell("STOPPING=1")
            log.info("shutting down", in_flight=len(self.registry), grace=shutdown.grace)
            self.edge.closing = True
            await self._unless_at_once(asyncio.sleep(shutdown.delay))
            self.edge.refusing = True
            closing = asyncio.create_task(self.public.close())
        try:
            if not await self._unless_at_once(asyncio.wait([closing], timeout=shutdown.grace)):
                return 1
            if not closing.done():
                left = self.registry.end_where(lambda _: True, errors.shutting_down())
                self.scheduler.refuse_all(errors.shutting_down)
                log.warning("the grace is over", ended=left)
                await self._unless_at_once(asyncio.wait([closing], timeout=LAST_WORDS))
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
        return 1 if self._at_once.is_set() else 0

    async def _unless_at_once(self, waited: Any) -> bool:
        """Wait for something, unless a second signal comes; whether it was waited for."""
        waiting = asyncio.ensure_future(waited)
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait([waiting, at_once], return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, at_once):
            task.cancel()
        await asyncio.gather(waiting, at_once, return_exceptions=True)
        return not self._at_once.is_set()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in (self.public, self.admin):
            if listener is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(listener.close(), 1.0)
        self.deadlines.close()
        self.watch.close()
        self.scheduler.close()
        await self.fleet.aclose()
        self._names.close()
        self.fleet.last_seen.save()
        self.bus.flush()
        log.info("ended")

    def _own(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task failed", task=task.get_name(), exc_info=error)

    # Listeners.

    def _listeners(self, files: int) -> tuple[Listener, Listener]:
        listen, admin = self.settings.listen, self.settings.admin
        limits = self.settings.limits
        clients, asking = within(files, limits.connections, limits.connections)
        if clients < limits.connections:
            log.warning("fewer connections than the settings say", most=clients, open_files=files)
        key = None
        if admin.key_file is not None:
            key = read_key(admin.key_file)
        public_sock, admin_sock = bind_listeners(self.settings, self._inheritance)
        public = Listener(
            self._public,
            public_sock,
            protocol=bounded(_at_most(clients, limits), self.edge.serve, listen.trusted_proxies),
            keep_alive=listen.keep_alive,
            certificate=listen.tls.cert if listen.tls else None,
            key=listen.tls.key if listen.tls else None,
        )
        app = admin_app(
            fleet=self.fleet,
            scheduler=self.scheduler,
            registry=self.registry,
            metrics=self.metrics,
            totals=self.totals,
            deadlines=self.deadlines,
            control=self,
            host=admin.host,
            key=key,
            extra_hosts=admin.hosts,
        )
        protocol = bounded(_at_most(asking, limits))
        return public, Listener(app, admin_sock, protocol=protocol, keep_alive=listen.keep_alive)

    async def _public(self, scope: Any, receive: Any, send: Any) -> None:
        await self._framed(scope, receive, send)

    def _frame(self) -> None:
        """Put CORS around the site, where the settings ask for it."""
        self._framed = (
            self._site if self.settings.cors is None else cors(self._site, self.settings.cors)
        )

    # Reload.

    def reload_soon(self) -> None:
        """Read both files again (SIGHUP)."""
        self._own(self._reload_quietly(inventory=True, settings=True), "reload")

    async def reload(self) -> Reloaded:
        """Read both files again. Raises: ConfigError; then what was invalid has not changed."""
        async with self._reloading:
            problems: list[Problem] = []
            change = changed = None
            try:
                changed = await self._reload_settings()
            except ConfigError as error:
                problems += error.problems
            try:
                change = await self._reload_inventory()
            except ConfigError as error:
                problems += error.problems
            if change is None or changed is None:
                raise ConfigError(problems)
            return Reloaded(change, changed)

    async def _watch_files(self, inventory: Inventory) -> None:
        paths = [path for path in (self.options.nodes, self.options.config) if path is not None]
        edits = changes(paths)
        # What was edited since they were read for the start, which may have taken minutes.
        await self._reload_quietly(inventory=await self._differs_from(inventory), settings=True)
        async for changed in edits:
            await self._reload_quietly(
                inventory=self.options.nodes in changed, settings=self.options.config in changed
            )

    async def _differs_from(self, inventory: Inventory) -> bool:
        try:
            return await asyncio.to_thread(load_inventory, self.options.nodes) != inventory
        except (ConfigError, OSError):
            return True

    async def _reload_quietly(self, *, inventory: bool, settings: bool) -> None:
        async with self._reloading:
            # Each file by itself: an invalid one must not keep the other from being read.
            with contextlib.suppress(ConfigError, OSError):
                if settings:
                    await self._reload_settings()
            with contextlib.suppress(ConfigError, OSError):
                if inventory:
                    await self._reload_inventory()

    async def _reload_inventory(self) -> InventoryChanged:
        try:
            inventory = await asyncio.to_thread(load_inventory, self.options.nodes)
            change = self.fleet.apply(inventory)
        except (ConfigError, OSError) as error:
            self.inventory_error = str(error)
            self.bus.publish(InventoryChanged(error=self.inventory_error))
            raise
        self.inventory_error = None
        self.bus.publish(change)
        return change

    async def _reload_settings(self) -> SettingsChanged:
        try:
            # An empty file changes nothing: it may be half of an edit, or of a full disk.
            refused: Refused = "nothing" if self._has_defaults else "empty"
            path = self.options.config
            loaded = await asyncio.to_thread(load_settings, path, refused=refused)
        except (ConfigError, OSError) as error:
            self.settings_error = str(error)
            self.bus.publish(SettingsChanged(error=self.settings_error))
            raise
        self.settings_error = None
        settings = self.options.over(loaded)
        old, self.settings = self.settings, settings
        change = SettingsChanged(needs_restart=needs_restart(old, settings))
        if settings == old:
            return change
        self.means.settings = settings
        self.scheduler.configure(settings)
        self.standby.settings = settings
        self.fleet.configure(settings.health, settings.timeouts)
        before = self.edge.snapshot.door
        self.edge.snapshot = Snapshot.of(settings, loopback=self._loopback, before=before)
        if self.keys_lost is not None and not before.closed:
            log.warning("locked", why=self.keys_lost)
        self.lines.access = settings.logging.access
        self._logs.configure(settings.logging.level)
        self._frame()
        self.bus.publish(change)
        return change


def _at_most(connections: int, limits: LimitSettings) -> LimitSettings:
    return limits.model_copy(update={"connections": connections})
