"""The autoscaler: looks at the load, and starts and stops standby nodes as the policy decides.

The hooks of a standby node are commands of the operator's, limited in time and output; secrets in
what they write are masked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpcore  # noqa: F401 - httpx would import it on the event loop: 30 ms
import httpx

from gateway.config.inventory import NodeSpec
from gateway.config.scheduling import Hook
from gateway.events import EventBus, HookEnded
from gateway.nodes.fleet import Fleet
from gateway.nodes.health import error_line, probe_slots
from gateway.nodes.lifecycle import LifecyclePhase
from gateway.nodes.node import Node
from gateway.schedule.candidates import is_alive, nodes_of
from gateway.schedule.core.autoscaling_policy import (
    AutoscalingPolicy,
    ScalingAction,
    StandbyNode,
    WaitingDemand,
)
from gateway.schedule.scheduler import Scheduler
from gateway.terms import Priority

# Bytes that are kept of a command's output (the last ones) or of an HTTP answer (the first).
MOST_OUTPUT = 4096
KILL_AFTER = 2.0  # seconds between SIGTERM and SIGKILL
MASK = "****"


async def run_hook(
    hook: Hook, name: str, spec: NodeSpec, timeout: float, clock: Callable[[], float]
) -> HookEnded:
    """Run it to its end, or for `timeout` seconds. Cancelled, it leaves no process behind.

    `name`: `start` or `stop`. A command that does not end gets SIGTERM, and SIGKILL `KILL_AFTER`
    seconds later.
    """
    began, output = clock(), bytearray()
    try:
        async with asyncio.timeout(timeout):
            if hook.url is None:
                outcome, detail = await _run(hook.command, spec, output)
            else:
                outcome, detail = await _call(hook, output)
    except TimeoutError:
        outcome, detail = "timeout", f"it had not ended after {timeout:g} s and was stopped"
    except (OSError, ValueError) as error:
        outcome, detail = "error", f"it can't be run: {error_line(error)}"
    secrets = [secret.get_secret_value() for secret in hook.secrets.values()]
    if spec.api_key is not None:
        secrets.append(spec.api_key.get_secret_value())
    detail, told = _shown(detail, secrets), _shown(output, secrets)
    return HookEnded(spec.name, name, outcome, clock() - began, detail, told)


async def _run(command: Iterable[str], spec: NodeSpec, output: bytearray) -> tuple[str, str]:
    """Run a command in a session of its own, so that all its processes can be ended.

    The output is read from a pipe that this function closes: a server that the command leaves
    behind may keep the other end open.
    """
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    try:
        os.set_blocking(reader, False)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                start_new_session=True,
                env=os.environ
                | {"LLAMA_GATEWAY_NODE": spec.name, "LLAMA_GATEWAY_NODE_URL": spec.url},
            )
        finally:
            os.close(writer)
        loop.add_reader(reader, _keep_last, loop, reader, output)
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            await _kill(process)
            raise
        finally:
            _keep_last(loop, reader, output)
            loop.remove_reader(reader)
    finally:
        os.close(reader)
    if status == 0:
        return "ok", "exit status 0"
    what = f"signal {-status}" if status < 0 else f"exit status {status}"
    return "failed", f"it ended with {what}"


def _keep_last(loop: asyncio.AbstractEventLoop, reader: int, output: bytearray) -> None:
    """Read the output that has come, up to a limit for each call, and keep its end."""
    try:
        part = os.read(reader, 1 << 16)
    except BlockingIOError:
        return
    if not part:
        loop.remove_reader(reader)
    output += part
    del output[:-MOST_OUTPUT]


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End its whole session, within twice `KILL_AFTER` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_AFTER)
            break
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _call(hook: Hook, output: bytearray) -> tuple[str, str]:
    """Make an HTTP call; redirects are not followed, since they would take the secrets along."""
    assert hook.url is not None
    secrets = {name: secret.get_secret_value() for name, secret in hook.secrets.items()}
    headers, parts = {**hook.headers, **secrets}, urlsplit(hook.url)
    call = f"{hook.method} {parts.scheme}://{parts.netloc}{parts.path}"
    # Reading the authorities takes 15 ms.
    context = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
    try:
        async with (
            httpx.AsyncClient(timeout=None, trust_env=False, verify=context) as client,  # noqa: S113 - the caller's
            client.stream(hook.method, hook.url, headers=headers, content=hook.body) as response,
        ):
            async for part in response.aiter_bytes():
                output += part
                if len(output) > MOST_OUTPUT:
                    del output[MOST_OUTPUT:]
                    break
            status = response.status_code
    except httpx.HTTPError as error:
        return "error", f"{call}: {error_line(error)}"
    return "ok" if response.is_success else "failed", f"{call} answered {status}"


def _shown(text: str | bytearray, secrets: Iterable[str]) -> str:
    """Printable, on one line, without secrets."""
    if isinstance(text, bytearray):
        text = text.decode("utf-8", "replace")
    for secret in filter(None, secrets):
        text = text.replace(secret, MASK)
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


log = logging.getLogger(__name__)
_NOT_ON = frozenset({LifecyclePhase.UNKNOWN, LifecyclePhase.OFF, LifecyclePhase.STARTING})
TICK = 0.5  # seconds between two looks at the load
OFF_REASON = "standby: it does not run"


@dataclass(slots=True, eq=False)
class Autoscaler:
    """Starts and stops the standby nodes of a fleet by their hooks. `run` owns every task."""

    fleet: Fleet
    scheduler: Scheduler
    bus: EventBus
    clock: Callable[[], float]
    policy: AutoscalingPolicy = field(default_factory=AutoscalingPolicy)
    _tasks: dict[Node, asyncio.Task[None]] = field(default_factory=dict)
    """By node: the task of its hook, with the probe before it."""
    _handed_over: bool = False

    async def run(self) -> None:
        """Run until cancelled. Then hooks that run are cancelled; the nodes stay as they are."""
        try:
            while True:
                self._check_load()
                await asyncio.sleep(TICK)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def hand_over(self) -> None:
        """Start and stop nothing any more: the successor process does now."""
        self._handed_over = True

    def _check_load(self) -> None:
        nodes = [node for node in self.fleet.nodes.values() if node.spec.enabled]
        standby = [node for node in nodes if node.spec.autoscaled]
        if not standby or self._handed_over:
            return
        now = self.clock()
        for node in standby:
            self._follow_probes(node, now)
        rules = self.scheduler.settings.elastic
        shown = self._standby_nodes(nodes, standby)
        for action in self.policy.decide(shown, self._demands(), rules, now):
            self._carry_out(self.fleet.nodes[action.name], action, now)
        running = sum(node.lifecycle.phase is not LifecyclePhase.OFF for node in standby)
        for node in standby:
            node.lifecycle.limit(at_max_running=rules.max is not None and running >= rules.max)

    def _follow_probes(self, node: Node, now: float) -> None:
        """Move to the phase that the probes show; run the stop hook anew when it is due."""
        lifecycle, probing = node.lifecycle, node.probe_history
        if node in self._tasks:
            return
        if lifecycle.phase is LifecyclePhase.STOPPING:
            if now >= lifecycle.retry_at:
                self._start_task(node, self._stop(node, lifecycle.reason))
        elif probing.up and lifecycle.phase in _NOT_ON:
            lifecycle.runs(now)
            self.fleet.lifecycle_changed(node)
        elif lifecycle.phase is LifecyclePhase.UNKNOWN and probing.loading:
            lifecycle.enter(LifecyclePhase.STARTING, "found loading its model", now)
        elif lifecycle.phase is LifecyclePhase.UNKNOWN and probing.down:
            self._enter(node, LifecyclePhase.OFF, OFF_REASON, now)
        elif lifecycle.phase is LifecyclePhase.STARTING:
            self._check_timeout(node, lifecycle.since, "it took no work", now)
        elif lifecycle.phase is LifecyclePhase.ON:
            since = lifecycle.down_since
            lifecycle.note_down(now, down=probing.down)
            if probing.down and since is not None and not node.leases:
                self._check_timeout(node, since, "it was down", now)

    def _check_timeout(self, node: Node, since: float, reason: str, now: float) -> None:
        """Stop a node that has not worked since `since` for longer than `elastic.ready_timeout`."""
        settings = self.scheduler.settings.elastic
        if now - since >= settings.ready_timeout and not node.draining:
            node.lifecycle.record_failure(now, settings.backoff, settings.backoff_max)
            self._start_task(node, self._stop(node, f"{reason} for {settings.ready_timeout:g} s"))

    def _carry_out(self, node: Node, action: ScalingAction, now: float) -> None:
        if action.verb == "start":
            node.lifecycle.start(f"being started: {action.reason}", now)
            self.fleet.lifecycle_changed(node, reset_probes=True)
            self._start_task(node, self._start(node))
        elif action.verb == "retire":
            reason = f"{action.reason}: it ends what it runs and is stopped then"
            self._enter(node, LifecyclePhase.RETIRING, reason, now)
        elif action.verb == "keep":
            self._enter(node, LifecyclePhase.ON, action.reason, now)
        elif not (node in self._tasks or node.leases or node.draining):
            self._start_task(node, self._stop_idle(node))

    # The policy's view.

    def _standby_nodes(self, nodes: Iterable[Node], standby: Iterable[Node]) -> list[StandbyNode]:
        """The `standby` nodes, each with what all other `nodes` have for its models."""
        slots, busy, now = Counter[str](), Counter[str](), self.clock()
        for node in nodes:
            if capacity := node.capacity(now):
                for model in node.public_models:
                    slots[model] += capacity
                    busy[model] += node.slots_busy
        found = []
        for node in standby:
            lifecycle, own = node.lifecycle, node.capacity(now)
            mine = node.slots_busy if own else 0
            others = min(
                ((slots[model] - own, busy[model] - mine) for model in node.public_models),
                key=lambda pair: pair[0] - pair[1],
                default=(0, 0),
            )
            found.append(
                StandbyNode(
                    node.name,
                    lifecycle.phase,
                    node.slots_total,
                    max(node.slots_busy, len(node.leases)),
                    others,
                    started_at=lifecycle.started_at,
                    stopped_at=lifecycle.stopped_at,
                    retry_at=lifecycle.retry_at,
                    drained=node.draining or node in self._tasks,
                    cost=node.spec.cost_per_hour,
                )
            )
        return found

    def _demands(self) -> list[WaitingDemand]:
        """Waiting requests, by the standby nodes that could serve them."""
        found: dict[tuple[int, Priority], tuple[frozenset[str], int]] = {}
        demands: dict[frozenset[str], WaitingDemand] = {}
        now = self.scheduler.clock()
        for waiter, expected in self.scheduler.predicted_waits():
            by_model, priority = waiter.candidates.by_model, waiter.request.caller.priority
            key = id(by_model), priority
            if key not in found:
                alive = sum(node.slots_total for node in nodes_of(by_model) if is_alive(node))
                found[key] = self._may_start([*nodes_of(by_model)], priority.label), alive
            names, alive = found[key]
            if not names:
                continue
            wait = 0.0
            if priority.label in self.scheduler.settings.elastic.classes:
                wait = max(now - waiter.queued_at, expected if math.isfinite(expected) else 0.0)
            known = demands.get(names)
            if known is None or wait > known.wait:
                demands[names] = WaitingDemand(names, wait, alive)
        return list(demands.values())

    def _may_start(self, nodes: Sequence[Node], label: str) -> frozenset[str]:
        """The names of the standby nodes among these that requests of a class may use."""
        hybrid = self.scheduler.settings.hybrid
        spills = hybrid.spill is not None and label in hybrid.spill.classes
        gpu = spills or label in hybrid.gpu_first or all(one.spec.tier == "gpu" for one in nodes)
        return frozenset(
            node.name for node in nodes if node.spec.autoscaled and (gpu or node.spec.tier != "gpu")
        )

    # Hooks.

    def _start_task(self, node: Node, hook: Coroutine[None, None, None]) -> None:
        task = self._tasks[node] = asyncio.create_task(hook, name=f"hook of {node.name}")
        task.add_done_callback(lambda done: self._task_ended(node, done))

    def _task_ended(self, node: Node, task: asyncio.Task[None]) -> None:
        if self._tasks.get(node) is task:
            del self._tasks[node]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("A standby node could not be started or stopped", exc_info=error)

    async def _start(self, node: Node) -> None:
        assert node.spec.start is not None
        if (why := await self._run(node, "start", node.spec.start)) is None:
            node.lifecycle.explain("started")
            self.fleet.lifecycle_changed(node)
            return
        settings = self.scheduler.settings.elastic
        node.lifecycle.record_failure(self.clock(), settings.backoff, settings.backoff_max)
        # The node may run all the same, and cost money.
        await self._stop(node, f"its start hook failed: {why}")

    async def _stop_idle(self, node: Node) -> None:
        """Stop it, unless a probe shows that it is busy with others' work: if it isn't asleep."""
        if node.reports_slots and not (node.probe_history.down or node.sleep.asleep):
            busy = await probe_slots(node)
            if busy or (busy is None and node.reports_slots):
                return
        lifecycle = node.lifecycle
        if lifecycle.phase is LifecyclePhase.RETIRING and not node.leases and not node.draining:
            lifecycle.clear_failures()
            await self._stop(node, lifecycle.reason.partition(":")[0])

    async def _stop(self, node: Node, why: str) -> None:
        """Run the stop hook; after a failure again and again, and the node counts as running."""
        assert node.spec.stop is not None
        lifecycle, settings = node.lifecycle, self.scheduler.settings.elastic
        if lifecycle.phase is not LifecyclePhase.STOPPING:
            self._enter(node, LifecyclePhase.STOPPING, f"{why}: being stopped", self.clock())
        failed = await self._run(node, "stop", node.spec.stop)
        now = self.clock()
        if failed is None:
            reason = f"{OFF_REASON}: {why.removesuffix(': being stopped')}"
            if lifecycle.retry_at > now:
                reason += f"; not started again for {lifecycle.retry_at - now:.0f} s"
            self._enter(node, LifecyclePhase.OFF, reason, now)
            return
        lifecycle.record_failure(now, settings.backoff, settings.backoff_max)
        retry_in = lifecycle.retry_at - now
        lifecycle.explain(f"its stop hook failed: {failed}; it is tried again in {retry_in:.0f} s")
        self.fleet.lifecycle_changed(node)

    def _enter(self, node: Node, phase: LifecyclePhase, reason: str, now: float) -> None:
        node.lifecycle.enter(phase, reason, now)
        self.fleet.lifecycle_changed(node, reset_probes=phase is LifecyclePhase.OFF)

    async def _run(self, node: Node, name: str, hook: Hook) -> str | None:
        """Run a hook and publish its result; why it failed, or None."""
        limit = self.scheduler.settings.elastic.hook_timeout
        ended = await run_hook(hook, name, node.spec, limit, self.clock)
        self.bus.publish(ended)
        return None if ended.outcome == "ok" else ended.detail
