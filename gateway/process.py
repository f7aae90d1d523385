"""The process around a gateway: its files, its event loop, its signals and its exit status."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from typing import Any

import structlog
import uvloop

from gateway.app import FIRST_PROBES_SECONDS, Gateway
from gateway.config.inventory import Inventory
from gateway.config.settings import Settings
from gateway.handover import InheritedState, inherit_from_environment
from gateway.observe.logs import Logs, set_up_logging
from gateway.startup import Options, load_checked


def run(options: Options) -> int:
    """Serve until a signal ends it; the exit status. Raises: StartError."""
    inheritance = inherit_from_environment()
    options = inheritance.apply_to(options)
    settings, inventory = load_checked(options, allow_empty=not inheritance.customised)
    with set_up_logging(settings.logging.level, settings.logging.format) as logs:
        return run_event_loop(serve(options, settings, inventory, logs, inherited=inheritance))


def run_event_loop(main: Any) -> int:
    """Run a coroutine on the event loop that the gateway is made for."""
    # Requests leave next to no cycles behind, and a look at all objects for each few hundred of
    # them cost 7 % of the time. What is here by now stays to the end.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status: int = runner.run(main)
        return status


async def serve(
    options: Options,
    settings: Settings,
    inventory: Inventory,
    logs: Logs,
    on_ready: Callable[[Gateway], None] | None = None,
    *,
    inherited: InheritedState | None = None,
) -> int:
    """Serve until a signal ends it; the exit status. Raises: StartError.

    `on_ready` is called once every node has been probed, or after `FIRST_PROBES` seconds.
    """
    for problem in inventory.warnings:
        structlog.get_logger().warning("inventory", warning=str(problem))
    gateway = Gateway(options, settings, logs, inherited)
    loop = asyncio.get_running_loop()
    signals = {
        signal.SIGTERM: gateway.stop,
        signal.SIGINT: gateway.stop,
        signal.SIGHUP: gateway.schedule_reload,
        signal.SIGUSR2: gateway.schedule_handover,
    }
    for number, handler in signals.items():
        loop.add_signal_handler(number, handler)
    try:
        async with gateway.running(inventory):
            if on_ready is not None and await _nodes_known(gateway):
                on_ready(gateway)
            await gateway.stopping.wait()
            return await gateway.shut_down()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _nodes_known(gateway: Gateway) -> bool:
    """Wait for the first probes, for `FIRST_PROBES` seconds; False: the end has come before."""
    events = (gateway.fleet.first_probes_done, gateway.stopping)
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=FIRST_PROBES_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return not gateway.stopping.is_set()
