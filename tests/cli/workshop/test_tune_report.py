from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.progress import TuningProgress
from tests.workshop.tune.fake_machine import EACH, Bench


async def test_each_measurement_is_a_line_with_its_figures_and_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path)
    bench.fails = lambda setting: setting.batch > 512
    bench.other_work = 1.5
    session = bench.session()
    with TuningProgress(session, 60.0) as progress:
        await session.run(
            bench.measure,
            seconds=3600.0,
            record=bench.records.append,
            on_begin=progress.measurement_started,
            on_end=progress.measurement_done,
            clock=lambda: bench.time,
        )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    estimates = [line for line in lines if "A measurement takes about" in line]
    assert len(estimates) == 1, "once, when the first is done"
    assert f"about {EACH:.0f} s" in estimates[0]
    assert "the time is enough" in estimates[0]
    numbered = [line for line in lines if line.lstrip()[0].isdigit()]
    assert len(numbered) == len(session.measurements)
    assert "59.5 min left" in numbered[0]
    assert "other work took 1.5 CPUs" in numbered[0]
    failed = [line for line in numbered if "does not run: not enough memory" in line]
    assert len(failed) == len(session.errors())
