"""Runs a gateway as a process: files, event loop, signals and exit status."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import uvloop

from gateway.app.assembly import Gateway
from gateway.app.handover import InheritedState, inherit_from_environment
from gateway.app.startup import Options, load_checked
from gateway.config.inventory import Inventory
from gateway.config.settings import Settings
from gateway.watch.logs import Logs, set_up_logging

GARBAGE_SECONDS = 10.0
"""Seconds between two looks whether garbage of all ages may be collected."""

DUE_AFTER = 100
"""Collections of middle-aged objects after which those of all ages are worth one: of those there
were 4,000 more each time."""

FORCED_AFTER = 25_000
"""Of those as well: then Python collects all garbage, though there was no idle moment."""


def run(options: Options) -> int:
    """Serve until a signal ends the process; returns its exit status. Raises: StartError."""
    inherited = inherit_from_environment()
    options = inherited.apply_to(options)
    settings, inventory = load_checked(options, allow_empty=not inherited.customised)
    with set_up_logging(settings.logging.level, settings.logging.format) as logs:
        return run_event_loop(serve(options, settings, inventory, logs, inherited=inherited))


def run_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine on uvloop, with the garbage collector tuned for the gateway."""
    # Requests leave almost no reference cycles, and a full collection for every few hundred of
    # them cost 7 % of the time. The event loop waits for each collection: 20 ms for 50,000 young
    # objects, those of 400 streams that have begun. How long all of them take together does not
    # depend on how many objects each visits. So these are small and frequent: 2,000 objects, 4,000
    # in every second one. Full ones take 0.2 s beside 2,000 streams: `collect_garbage` waits for a
    # moment without requests.
    freeze_objects()
    gc.set_threshold(2_000, 0, FORCED_AFTER)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def freeze_objects() -> None:
    """Let no later collection visit the objects that exist by now: they live until the end."""
    gc.collect()
    gc.freeze()


async def collect_garbage(is_idle: Callable[[], bool]) -> None:
    """Collect garbage of all ages while the gateway is idle, until cancelled."""
    while True:
        await asyncio.sleep(GARBAGE_SECONDS)
        if is_idle() and gc.get_count()[2] >= DUE_AFTER:
            gc.collect()


async def serve(
    options: Options,
    settings: Settings,
    inventory: Inventory,
    logs: Logs,
    on_ready: Callable[[Gateway], None] | None = None,
    *,
    inherited: InheritedState | None = None,
) -> int:
    """Serve until a signal ends the process; returns its exit status. Raises: StartError.

    `on_ready` is called once every node has been probed, or after `FIRST_PROBES_SECONDS`.
    """
    for problem in inventory.warnings:
        structlog.get_logger().warning("inventory", warning=str(problem))
    gateway = Gateway(options, settings, logs, inherited)
    loop = asyncio.get_running_loop()
    collector: asyncio.Task[None] | None = None
    signals = {
        signal.SIGTERM: gateway.stop,
        signal.SIGINT: gateway.stop,
        signal.SIGHUP: gateway.schedule_reload,
        signal.SIGUSR2: gateway.schedule_handover,
    }
    for number, handler in signals.items():
        loop.add_signal_handler(number, handler)
    try:
        async with gateway.running(inventory, freeze_objects):
            collector = asyncio.create_task(collect_garbage(lambda: not gateway.registry))
            if on_ready is not None and await _wait_for_probes(gateway):
                on_ready(gateway)
            await gateway.stopping.wait()
            return await gateway.shut_down()
    finally:
        if collector is not None:
            collector.cancel()
        for number in signals:
            loop.remove_signal_handler(number)


async def _wait_for_probes(gateway: Gateway) -> bool:
    """Wait for the first probes, with a limit; False: the gateway was stopped meanwhile."""
    events = (gateway.fleet.first_probes_done, gateway.stopping)
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        limit = gateway.timings.first_probes
        await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return not gateway.stopping.is_set()
