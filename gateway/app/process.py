"""Runs a gateway as a process: files, event loop, signals and exit status."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import structlog

from gateway.app.assembly import Gateway
from gateway.app.event_loop import (
    collect_garbage,
    freeze_objects,
    run_event_loop,
    wait_for_first,
)
from gateway.app.handover import InheritedState, inherit_from_environment
from gateway.app.startup import Options, load_checked
from gateway.config.inventory import Inventory
from gateway.config.settings import Settings
from gateway.watch.logs import Logs, set_up_logging


def run(options: Options) -> int:
    """Serve until a signal ends the process; returns its exit status. Raises: StartError."""
    inherited = inherit_from_environment()
    options = inherited.apply_to(options)
    settings, inventory = load_checked(options, allow_empty=not inherited.customised)
    with set_up_logging(settings.logging.level, settings.logging.format) as logs:
        return run_event_loop(serve(options, settings, inventory, logs, inherited=inherited))


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

    `on_ready` is called once every node has been probed, or after `Timings.first_probes`.
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
            if on_ready is not None:
                probed, limit = gateway.fleet.first_probes_done, gateway.timings.first_probes
                await wait_for_first(probed.wait(), gateway.stopping.wait(), timeout=limit)
                if not gateway.stopping.is_set():
                    on_ready(gateway)
            await gateway.stopping.wait()
            return await gateway.shut_down()
    finally:
        if collector is not None:
            collector.cancel()
        for number in signals:
            loop.remove_signal_handler(number)
