"""The result of a search: a verdict for people, JSON, Ansible host vars, and a plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from gateway.local.energy import kwh_per_million
from gateway.local.topology import Topology, format_kernel_list
from gateway.system import replace_file
from gateway.workshop.tune.benchmark import MOST_OTHER_WORK
from gateway.workshop.tune.search import (
    REPEATS,
    Figures,
    Setting,
    TuningSession,
    pinned_cpus,
    score,
)

MOST_NAMED_SETTINGS = 3  # in one sentence of the verdict


@dataclass(frozen=True, slots=True)
class SettingResult:
    """A setting that was measured."""

    setting: Setting
    figures: Figures  # medians
    score: float  # seconds, median
    measured: int  # how often
    gain: float  # over the rule of thumb, as a share of its score; negative: worse
    more_than_noise: bool  # whether the gain is


@dataclass(frozen=True, slots=True)
class TuningReport:
    """All results of a session."""

    results: tuple[SettingResult, ...]  # best score first
    best: SettingResult
    baseline: SettingResult
    session: TuningSession

    @property
    def disturbed_count(self) -> int:
        """Measurements beside other work on the machine."""
        return sum((one.other_work or 0.0) > MOST_OTHER_WORK for one in self.session.measurements)

    def verdict(self) -> list[str]:
        """Say in sentences what the figures show."""
        search = self.session.search
        sentences = []
        if len(self.results) == 1:
            sentences.append(f"Only the rule of thumb was measured: {self.baseline.setting}.")
        elif self.best.setting == self.baseline.setting:
            sentences.append(
                "Nothing that was tried is better than the rule of thumb by more than noise: keep "
                f"{self.best.setting}."
            )
        else:
            sentences.append(
                f"Best: {self.best.setting}. Its score is {self.best.gain:.0%} less than that of "
                f"the rule of thumb ({self.baseline.setting})."
            )
        repeated = any(row.measured > 1 for row in self.results)
        sentences.append(
            f"A single measurement {'varies' if repeated else 'is taken to vary'} by "
            f"{search.history.noise():.1%}, so smaller differences than "
            f"{search.history.significant_difference(REPEATS, REPEATS):.1%} may be noise."
        )
        is_worse = search.history.clearly_better
        ties = [
            str(row.setting)
            for row in self.results
            if row.setting != self.best.setting and not is_worse(self.best.setting, row.setting)
        ]
        if ties:
            more = f"; and {len(ties) - MOST_NAMED_SETTINGS} more"
            sentences.append(
                f"Not clearly worse than the best: {'; '.join(ties[:MOST_NAMED_SETTINGS])}"
                f"{more if len(ties) > MOST_NAMED_SETTINGS else ''}."
            )
        if untried := search.unsearched_knobs():
            ended = self.session.end_reason
            why = "the time was over" if ended == "time" else ended
            sentences.append(
                f"Not searched to the end ({why}): {', '.join(untried)}. The same command goes on "
                "from here."
            )
        figures = self.best.figures
        written, read = figures.decode_joules, figures.prefill_joules
        if written is not None and read is not None:
            sentences.append(
                f"{self.best.setting} takes {written:.3g} J for a written token "
                f"({kwh_per_million(written):.3g} kWh a million) and {read:.3g} J for a prompt "
                "token: processors and memory by RAPL, idle power included; not the rest of the "
                "machine."
            )
        if self.disturbed_count:
            sentences.append(
                f"Other work disturbed {self.disturbed_count} of "
                f"{len(self.session.measurements)} measurements: do not rely on small differences."
            )
        return sentences

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        session = self.session
        return {
            "goal": session.goal,
            "request": asdict(session.request),
            "ended": session.end_reason,
            "best": asdict(self.best),
            "rule_of_thumb": asdict(self.baseline),
            "better_than_rule_of_thumb": self.best.setting != self.baseline.setting,
            "noise": session.search.history.noise(),
            "verdict": self.verdict(),
            "tried": [asdict(row) for row in self.results],
            "failed": [
                {"setting": asdict(setting), "error": error}
                for setting, error in session.errors().items()
            ],
            "measurements": len(session.measurements),
            "disturbed_measurements": self.disturbed_count,
            "settings_of_full_grid": session.search.space.size,
            "not_searched": session.search.unsearched_knobs(),
        }


def build_report(session: TuningSession) -> TuningReport | None:
    """Build the report on a session; None when not even the first setting was measured."""
    history, start = session.search.history, session.search.baseline
    if history.count(start) == 0:
        return None
    rows = {
        setting: SettingResult(
            setting,
            figures,
            history.median_score(setting),
            history.count(setting),
            1 - history.median_score(setting) / history.median_score(start),
            history.clearly_better(setting, start) or history.clearly_better(start, setting),
        )
        for setting, figures in session.median_by_setting().items()
    }
    ordered = tuple(sorted(rows.values(), key=lambda row: row.score))
    return TuningReport(ordered, rows[session.search.best], rows[start], session)


HEADER = "# Written by llama-gateway tune"
SUFFIXES = (".yml", ".yaml", ".json")


class WriteError(Exception):
    """The file must not be written. The text names the problem and the remedy."""


def check_target(path: Path) -> None:
    """Raise WriteError for a file that `write_result` could or should not write."""
    if path.suffix not in SUFFIXES:
        raise WriteError(f"{path}: must end in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise WriteError(f"{path}: there is no folder {path.parent}; make it first")
    if path.suffix == ".json":
        return
    if path.exists() and not path.read_text(errors="replace").startswith(HEADER):
        raise WriteError(
            f"{path}: holds variables that this command did not write. Remedy: name a file of its "
            "own, such as host_vars/HOST/tuned.yml"
        )
    if path.parent.parent.name == "host_vars":
        for suffix in (".yml", ".yaml"):
            beside = path.parent.with_name(path.parent.name + suffix)
            if beside.exists():
                raise WriteError(
                    f"{path}: Ansible would read the folder {path.parent} and no longer {beside}. "
                    f"Remedy: mv {beside} {path.parent / 'main.yml'}"
                )


def role_variables(setting: Setting, topology: Topology) -> dict[str, Any]:
    """Return the setting as variables of the Ansible role `llama_node`."""
    variables: dict[str, Any] = {
        "llama_node_threads": setting.threads,
        "llama_node_batch": setting.batch,
        "llama_node_ubatch": setting.micro_batch,
        "llama_node_slots": setting.slots,
    }
    if setting.pinning == "cores":  # offered with a single NUMA node only
        cpus = format_kernel_list(pinned_cpus("cores", topology.nodes[0]) or ())
        variables["llama_node_service_options"] = {"CPUAffinity": cpus.replace(",", " ")}
    return variables


def write_result(
    path: Path,
    report: TuningReport,
    topology: Topology,
    subject: dict[str, Any],
    written_at: datetime,
) -> None:
    """Write host vars, with the measurements that they rest on; as `.json` the whole report.

    Raises OSError.
    """
    if path.suffix == ".json":
        text = json.dumps({"subject": subject, **report.as_dict()}, indent=2) + "\n"
        replace_file(path, text.encode())
        return
    best, session = report.best, report.session
    judged = f"{session.request.prompt} + {session.request.answer} tokens"
    moment = f"{written_at.astimezone(UTC):%Y-%m-%d %H:%M}"
    lines = [
        f"{HEADER} on {moment} UTC, which replaces it as a whole.",
        f"# Goal {session.goal}: requests of {judged}, slots of {subject['context']} tokens.",
        f"# Model {subject['model']}, {subject['server']}, {subject['processor']}.",
        *(f"# {line}" for line in report.verdict()),
        f"# Each server: {format_figures(best.figures)}.",
        "---",
        yaml.safe_dump(role_variables(best.setting, topology), sort_keys=False),
    ]
    replace_file(path, "\n".join(lines).encode())


def format_figures(figures: Figures) -> str:
    """Describe figures in words."""
    stall = "" if figures.stall is None else f", stall {figures.stall:.2f} s"
    memory = "" if figures.memory is None else f", {figures.memory / (1 << 30):.1f} GiB"
    joules = (
        "" if figures.decode_joules is None else f", {figures.decode_joules:.3g} J a written token"
    )
    return (
        f"reads {figures.prefill:.0f} tokens/s, writes {figures.decode:.1f} alone and "
        f"{figures.decode_busy:.1f} in all slots{stall}{memory}{joules}"
    )


def draw_report(path: Path, report: TuningReport, title: str) -> None:
    """Plot the measurements along each knob, and their medians; the suffix selects the format.

    Each column shows settings that differ from the best in this knob only (and, for batch and
    micro-batch, in the other where it had to follow). Needs the extra `plots`. Raises OSError.
    """
    from matplotlib.figure import Figure

    session, space = report.session, report.session.search.space
    knobs = space.knobs
    rows: dict[str, Callable[[Figures], float | None]] = {
        f"{session.goal}, s\n(less is better)": lambda one: score(
            one, session.request, session.goal
        ),
        "prefill,\ntokens/s": lambda one: one.prefill,
        "decode alone,\ntokens/s": lambda one: one.decode,
        "decode, all slots,\ntokens/s": lambda one: one.decode_busy,
        "stall, s": lambda one: one.stall,
    }
    figure = Figure(
        figsize=(2.4 * max(1, len(knobs)) + 0.8, 1.7 * len(rows)), dpi=110, layout="constrained"
    )
    panels = figure.subplots(len(rows), max(1, len(knobs)), sharey="row", squeeze=False)
    for column, knob in enumerate(knobs):
        near = settings_along_knob(report, knob)
        values = [value for value in space.values(knob) if value in near]
        for read, panel in zip(rows.values(), panels[:, column], strict=True):
            medians = []
            for at, value in enumerate(values):
                measured = [one for one in session.measurements if one.setting == near[value]]
                read_off = [read(one.figures) for one in measured if one.figures is not None]
                points = [point for point in read_off if point is not None]
                panel.plot([at] * len(points), points, ".", color="grey", markersize=4)
                medians += [(at, median(points))] if points else []
            panel.plot(*zip(*medians, strict=True), linewidth=1.2) if medians else None
            best = getattr(report.best.setting, knob)
            if best in values:
                panel.axvline(values.index(best), color="tab:green", alpha=0.4, linewidth=4)
            panel.set_xlim(-0.5, max(1, len(values)) - 0.5)
            panel.set_xticks(range(len(values)), [str(value) for value in values], fontsize=7)
            panel.grid(alpha=0.3)
            panel.tick_params(axis="y", labelsize=7)
        panels[-1][column].set_xlabel(knob.replace("_", "-"), fontsize=8)
    for panel, label in zip(panels[:, 0], rows, strict=True):
        panel.set_ylabel(label, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)


def settings_along_knob(report: TuningReport, knob: str) -> dict[object, Setting]:
    """Return measured settings that differ in this knob only, by its value.

    It is the longest such series; of equals the one around the best setting.
    """
    tried = {row.setting for row in report.results}
    bases = [report.best.setting, report.baseline.setting, *(row.setting for row in report.results)]
    series = [
        {
            value: base.with_knob(knob, value)
            for value in report.session.search.space.values(knob)
            if base.with_knob(knob, value) in tried
        }
        for base in bases
    ]
    return max(series, key=len)
