from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.local.topology import read_topology
from gateway.workshop.tune.report import TuningReport, build_report
from gateway.workshop.tune.search import (
    BenchmarkRequest,
    BenchmarkResult,
    Figures,
    MeasurementLog,
    Search,
    Setting,
    SettingFailedError,
    TuningSession,
    rule_of_thumb,
    search_space,
)
from tests.known import known
from tests.local.machine import make_machine, two_sockets_with_smt

REQUEST = BenchmarkRequest(1000, 100)


SUBJECT: dict[str, Any] = {
    "model": "m.gguf", "server": "embedded", "processor": "EPYC", "context": 4096,
}  # fmt: skip


EACH = 30.0  # seconds of a measurement


class Bench:
    """A machine whose figures follow a formula, with a clock that each measurement advances."""

    def __init__(self, tmp_path: Path) -> None:
        self.topology = read_topology(make_machine(tmp_path / "m", two_sockets_with_smt()[:1]))
        self.records = MeasurementLog(tmp_path / "tuning.jsonl", SUBJECT)
        self.time = 0.0
        self.measured: list[Setting] = []
        self.fails: Callable[[Setting], bool] = lambda _: False
        self.other_work = 0.0

    def session(self) -> TuningSession:
        space = search_space(self.topology, context=4096, max_slots=4)
        earlier, _ = self.records.read()
        return TuningSession(
            Search(space, rule_of_thumb(self.topology)), REQUEST, "balanced", earlier
        )

    async def measure(self, setting: Setting, seconds: float) -> BenchmarkResult:
        self.measured.append(setting)
        self.time += EACH
        if self.fails(setting):
            raise SettingFailedError("not enough memory")
        figures = Figures(
            prefill=25.0 * setting.threads,
            decode=12.0 - abs(setting.threads - 3),
            decode_busy=(12.0 - abs(setting.threads - 3)) * setting.slots**0.5,
            stall=setting.batch / 100 if setting.slots > 1 else None,
            memory=setting.slots << 30,
        )
        return figures, self.other_work

    async def run(self, session: TuningSession, minutes: float = 60.0) -> list[float | None]:
        """Run it; the seconds that a measurement was expected to take, before each."""
        steps: list[float | None] = []
        await session.run(
            self.measure,
            seconds=minutes * 60,
            record=self.records.append,
            on_begin=lambda _setting, _left, each: steps.append(each),
            clock=lambda: self.time,
            now=lambda: 1e9 + self.time,
        )
        return steps

    async def tuned(self, minutes: float = 60.0) -> TuningReport:
        """The report of a new session of so many minutes at most."""
        session = self.session()
        await self.run(session, minutes)
        return reported(session)


def reported(session: TuningSession) -> TuningReport:
    return known(build_report(session))
