"""Confirms the plans for three teams on emulated nodes: `python -m tests.workshop.plan.confirm`.

Each plan's fleet is emulated, node for node, behind the real gateway, in virtual time. It gets the
same requests at the same times; what its clients see is compared with what the plan said.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gateway.workshop.plan.search import FleetOption, TimeLimit
from gateway.workshop.simulate.report import Percentiles
from tests.known import known
from tests.virtual import in_virtual_time
from tests.workshop.plan.build import try_fleet
from tests.workshop.plan.emulated import Measured, play, play_batch
from tests.workshop.plan.teams import Team, teams

TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of one team, as planned and as seen. Seconds."""

    name: str
    planned: float
    seen: float

    @property
    def off(self) -> float:
        """By how much the plan was wrong, as a share."""
        return self.seen / self.planned - 1


def compared(name: str, planned: Percentiles, seen: Percentiles) -> list[Compared]:
    """Print and return mean and 95th percentile."""
    found = [
        Compared(f"{name} mean", planned.mean, seen.mean),
        Compared(f"{name} p95", planned.p95, seen.p95),
    ]
    for one in found:
        print(
            f"  {one.name}: planned {one.planned:.2f} s, emulated fleet {one.seen:.2f} s "
            f"({one.off:+.1%})"
        )
    return found


@in_virtual_time
async def confirm_online(team: Team, option: FleetOption, found: list[Compared]) -> None:
    """A team whose requests arrive."""
    assert option.trial is not None
    seen = await play(option.parts, team.question.trace())
    found += compared("completion", option.trial.completion, seen.completion)
    found += compared("TTFT", option.trial.ttft, known(seen.ttft))


@in_virtual_time
async def confirm_batch(team: Team, option: FleetOption, lines: int, found: list[Compared]) -> None:
    """A backlog, of which so many lines are really run."""
    question = team.question
    sample = replace(question, requests=lines)
    trace = sample.trace()
    trial = try_fleet(option.parts, trace, TimeLimit(600.0), backlog=float(len(trace.jobs)))
    seen: Measured = await play_batch(option.parts, trace)
    print(f"  {len(trace.jobs):,} of {team.backlog:,.0f} lines, as a batch of /v1/batches:")
    found += compared("completion", trial.completion, seen.completion)


def draw(path: Path, results: Mapping[str, Sequence[Compared]]) -> None:
    """Draw the figures of each team as pairs of bars."""
    figure = Figure(figsize=(9, 2.6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (team, found) in zip(panels, results.items(), strict=True):
        places = range(len(found))
        axes.bar([place - 0.2 for place in places], [one.planned for one in found], 0.4)
        axes.bar([place + 0.2 for place in places], [one.seen for one in found], 0.4)
        axes.set_xticks(list(places), [one.name.replace(" ", "\n") for one in found], fontsize=6)
        axes.set_title(team, fontsize=9)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("seconds")
    figure.legend(["planned", "emulated fleet"], loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path)


def main() -> int:
    """Confirm all teams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=2500, help="of the batch")
    parser.add_argument("--plot", type=Path, help="a picture of all figures")
    given = parser.parse_args()
    results: dict[str, list[Compared]] = {}
    for team in teams():
        began = time.monotonic()
        option = team.plan()
        price = option.price
        print(f"{team.name}: {team.about}")
        print(f"  plan: {option.name}, used to {option.use:.0%}, {price.month:,.0f} a month")
        if option.trial is not None and team.backlog:
            print(f"  all done in {option.trial.seconds / 3600:.2f} h")
        found = results[team.name] = []
        if team.backlog is None:
            confirm_online(team, option, found)
        else:
            confirm_batch(team, option, given.lines, found)
        print(f"  ({time.monotonic() - began:.0f} s of real time)", flush=True)
    if given.plot is not None:
        draw(given.plot, results)
    good = all(abs(one.off) <= TOLERANCE for found in results.values() for one in found)
    print("all within 15 %" if good else "NOT all within 15 %")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
