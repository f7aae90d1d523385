"""A run: asks the server what it is, calibrates, warms up, and puts each load on it."""

from __future__ import annotations

import os
import platform
import ssl
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gateway import __version__
from gateway.transport.pool import ConnectionPool
from gateway.workshop.bench.exchange import Endpoint, RequestResult, RequestSender
from gateway.workshop.bench.load import Load, LoadRun, LoadRunner, RequestPattern
from gateway.workshop.bench.report import BenchReport, LoadResult, RequestGoal, figures_of, judge
from gateway.workshop.bench.target import (
    Baseline,
    Probe,
    PromptWriter,
    ServerDescription,
    describe_server,
    probe_server,
    server_address,
)

if TYPE_CHECKING:
    from gateway.local.energy import EnergyMeter
    from gateway.workshop.simulate.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to measure, and how."""

    url: str  # without `/v1`
    endpoint: Endpoint
    loads: list[Load]
    pattern: RequestPattern
    key: str | None = None
    tls: ssl.SSLContext | None = None
    model: str | None = None  # None: the server's first one
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that every body gets; None leaves one out."""
    ignore_eos: bool | None = None
    """Whether answers go on to their last token; None: where the server is known to do so."""
    trace: Trace | None = None
    goal: RequestGoal = field(default_factory=RequestGoal)
    seed: int = 1
    warm_up: int = 2  # requests sent one after the other before the first load
    timeout: float = 600.0  # seconds for a request
    connect_timeout: float = 10.0
    most_in_flight: int = 512
    meter: EnergyMeter | None = None


class FitError(Exception):
    """The requests do not fit into a slot of the server. The text says by how much."""


@dataclass(slots=True)
class BenchSession:
    """One run. `report` may be asked for at any time, also after an interruption."""

    plan: BenchPlan
    on_phase: Callable[[str], None] = lambda _: None
    on_load: Callable[[Load], None] = lambda _: None
    on_request: Callable[[RequestResult], None] = lambda _: None
    on_load_end: Callable[[LoadResult], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    runs: list[LoadRun] = field(default_factory=list)
    _server: ServerDescription = field(default_factory=ServerDescription)
    _probe: Probe | None = None
    _baseline: Baseline = field(default_factory=Baseline)
    _began: datetime = field(default_factory=lambda: datetime.now(UTC))

    async def run(self) -> None:
        """Measure. Raises TargetError, FitError."""
        plan = self.plan
        with closing(ConnectionPool(server_address(plan.url, plan.key, plan.tls))) as pool:
            await self._run(pool)

    async def _run(self, pool: ConnectionPool) -> None:
        plan = self.plan
        self.on_phase("asking the server what it is")
        sender = RequestSender(pool, plan.endpoint, plan.connect_timeout, plan.timeout, self.clock)
        self._server = await describe_server(sender, plan.model)
        self._check_fit()
        self.on_phase("calibrating the prompts' length")
        ignores = self._server.ignores_eos if plan.ignore_eos is None else plan.ignore_eos
        self._probe = await probe_server(sender, self._server, plan.extra, ignores, plan.seed)
        runner = LoadRunner(
            sender,
            PromptWriter(plan.seed, self._probe.calibration),
            self._server.model,
            self._probe.extra,
            plan.pattern,
            plan.seed,
            trace=plan.trace,
            most_in_flight=plan.most_in_flight,
            meter=plan.meter,
            clock=self.clock,
            on_end=self.on_request,
        )
        self.on_phase("warming up")
        self._baseline = Baseline.of(await runner.warm_up(plan.warm_up))
        for load in plan.loads:
            self.on_load(load)
            run = LoadRun(load)
            self.runs.append(run)
            await runner.run(run)
            self.on_load_end(self._result(run))

    def report(self) -> BenchReport:
        """The report of the loads that have begun."""
        plan, probe = self.plan, self._probe
        request: dict[str, Any] = {
            **({"trace": len(plan.trace.jobs)} if plan.trace is not None else asdict(plan.pattern)),
            "seed": plan.seed,
        }
        notes = list(self._server.notes)
        client: dict[str, Any] = {
            "version": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpus": os.cpu_count(),
        }
        if probe is not None:
            notes += probe.notes
            client["prompt_lengths_by"] = probe.calibration.source
            client["tokens_per_word"] = round(probe.calibration.tokens_per_word, 4)
        if plan.meter is not None and plan.meter.failure is not None:
            notes.append(f"Energy was measured only in part: {plan.meter.failure}")
        return BenchReport(
            url=plan.url,
            endpoint=plan.endpoint.name,
            started_at=self._began.isoformat(timespec="seconds"),
            server=self._server,
            request=request,
            client=client,
            goal=plan.goal,
            baseline=self._baseline,
            loads=[self._result(run) for run in self.runs],
            notes=notes,
        )

    def _result(self, run: LoadRun) -> LoadResult:
        figures = figures_of(run, self.plan.goal, self._server.round_trip, self._baseline.ttft)
        return LoadResult(figures, judge(figures, self._server, self._baseline))

    def _check_fit(self) -> None:
        context, pattern = self._server.context, self.plan.pattern
        if context is None or self.plan.trace is not None:
            return
        answer = pattern.max_tokens if self.plan.endpoint.is_stream else 0
        if pattern.prompt_tokens + answer > context:
            raise FitError(
                f"{pattern.prompt_tokens} tokens of prompt and {answer} of answer do not fit into "
                f"a slot of {context} tokens"
            )
