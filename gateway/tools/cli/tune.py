"""`llama-gateway tune`: the settings with which this machine serves a model best, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.tools.cli import options
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import CommandFailed, print_json, print_note

if TYPE_CHECKING:
    from gateway.tools.local.prepare import LocalFleetPlan
    from gateway.tools.local.topology import Topology
    from gateway.tools.tune.machine_benchmark import MachineBenchmark
    from gateway.tools.tune.measurements import BenchmarkRequest, Goal, Measurement, MeasurementLog
    from gateway.tools.tune.report import TuningReport
    from gateway.tools.tune.search import TuningSession
    from gateway.tools.tune.setting import Setting


EXAMPLES = examples_epilog(
    (
        "llama-gateway tune --model m.gguf --write host_vars/epyc-1/tuned.yml",
        "half an hour at most; the play `site.yml` uses what it finds",
    ),
    (
        "llama-gateway tune --model m.gguf --goal latency --minutes 90 --plot tuned.png",
        "for one request at a time, more thoroughly, with a picture",
    ),
    ("llama-gateway tune --model m.gguf --prompt 3000 --answer 60", "for long prompts"),
    ("llama-gateway tune --minutes 3", "with a demo model, to see how it works"),
)

SLOT_HEADROOM = 64
"""Tokens of a slot that stay free beside prompt and answer."""

_JUDGED = "What is judged"

_SERVERS = "Servers"

_OUTPUT = "Output"


def tune(
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="FILE.gguf",
            show_default="a small demo model; its results mean little",
            help="The model that is to be served.",
            rich_help_panel=_SERVERS,
        ),
    ] = None,
    goal: Annotated[
        str,
        typer.Option(
            "--goal",
            metavar="GOAL",
            help="latency: a request alone, and the pauses neighbours make. throughput: requests "
            "an hour with all slots busy. balanced: both.",
            rich_help_panel=_JUDGED,
        ),
    ] = "balanced",
    prompt: Annotated[
        int,
        typer.Option(
            "--prompt",
            min=64,
            metavar="TOKENS",
            help="Prompt of the request that settings are judged by.",
            rich_help_panel=_JUDGED,
        ),
    ] = 1024,
    answer: Annotated[
        int,
        typer.Option(
            "--answer", min=16, metavar="TOKENS", help="Its answer.", rich_help_panel=_JUDGED
        ),
    ] = 128,
    minutes: Annotated[
        float,
        typer.Option("--minutes", min=0.1, metavar="M", help="End after that long at the latest."),
    ] = 30.0,
    context: Annotated[
        int,
        typer.Option(
            "--context",
            min=256,
            metavar="TOKENS",
            help="Context of one slot.",
            rich_help_panel=_SERVERS,
        ),
    ] = 4096,
    max_slots: Annotated[
        int,
        typer.Option(
            "--max-slots",
            min=1,
            max=32,
            metavar="N",
            help="Slots that a server is tried with at most.",
            rich_help_panel=_SERVERS,
        ),
    ] = 8,
    server_bin: Annotated[
        Path | None,
        typer.Option(
            "--server-bin",
            metavar="FILE",
            show_default="llama-server on PATH, else the embedded one",
            help="The llama-server program to measure.",
            rich_help_panel=_SERVERS,
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="Write the best setting: .yml as variables of the Ansible role llama_node (a file "
            "of its own, such as host_vars/HOST/tuned.yml), .json with all figures.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw what was tried: .png, .svg or .pdf.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    measurements: Annotated[
        Path | None,
        typer.Option(
            "--measurements",
            metavar="FILE.jsonl",
            show_default="tuning.jsonl in the cache folder",
            help="Where each measurement is kept; those of an earlier run are not made again.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    remeasure: Annotated[
        bool, typer.Option("--again", help="Measure everything anew.", rich_help_panel=_OUTPUT)
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Measure although other work loads the machine.")
    ] = False,
    force_memory: Annotated[
        bool,
        typer.Option(
            "--force-memory",
            help="Start servers although too little memory would stay free.",
            rich_help_panel=_SERVERS,
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Measure real llama.cpp servers on this machine, and find the settings that suit it best.

    One server is started on each NUMA node, and again with other settings: threads, micro-batch,
    slots, batch, pinning. Each time it is measured how fast they read, write alone and write with
    all slots busy, how long a stream stalls while a neighbour's prompt is read, and how much
    memory they take. The search begins with the rule of thumb (a thread for each physical core),
    turns one knob after the other, and repeats what seems better until it is more than noise, or
    says that it is not.

    Nothing else should run meanwhile. Ctrl-C keeps what was measured; the same command goes on.
    """
    from gateway.tools.local.cache import cache_folder
    from gateway.tools.local.errors import LocalFleetError
    from gateway.tools.local.prepare import plan_local_fleet
    from gateway.tools.local.topology import read_topology
    from gateway.tools.tune.machine_benchmark import MachineBenchmark, measurement_subject
    from gateway.tools.tune.measurements import BenchmarkRequest, MeasurementLog
    from gateway.tools.tune.report import build_report
    from gateway.tools.tune.search import Search, TuningSession
    from gateway.tools.tune.setting import rule_of_thumb, search_space

    judged = _goal(goal)
    _check_files(write, plot)
    request = BenchmarkRequest(prompt, answer)
    try:
        plan = plan_local_fleet(model, server_bin=server_bin, force_memory=force_memory)
        slot = _slot(plan, context, request)
        topology = read_topology()
        if plan.is_demo:
            print_note(
                "No --model: measuring the demo model. It is so small that the results mean little "
                "for a real one, and should not be used."
            )
        _refuse_other_work(topology, force=force)
        about = measurement_subject(plan, topology, request, slot)
        records = MeasurementLog(measurements or cache_folder() / "tuning.jsonl", about)
        space = search_space(topology, context=slot, max_slots=max_slots)
        session = TuningSession(
            Search(space, rule_of_thumb(topology)), request, judged, _kept(records, again=remeasure)
        )
        machine = MachineBenchmark(
            plan,
            request,
            context=slot,
            force_memory=force_memory,
            known_memory=_known(session, len(plan.specs)),
        )
        status = _run(session, machine, records, minutes)
    except LocalFleetError as error:
        raise CommandFailed(str(error)) from None
    found = build_report(session)
    if found is None:
        raise _nothing(session, minutes, status)
    if as_json:
        print_json({"subject": about, **found.as_dict()})
    else:
        from gateway.tools.cli.tune_progress import print_report

        print_report(found)
    if plot is not None:
        _draw(plot, found, about)
    if write is not None:
        _write(write, found, topology, about)
    if session.end_reason == "interrupted":
        print_note(
            f"Interrupted: what was measured is kept in {records.path}; the same command goes on."
        )
    raise typer.Exit(status)


def _goal(name: str) -> Goal:
    from gateway.tools.tune.measurements import GOALS

    for goal in GOALS:
        if goal == name:
            return goal
    raise CommandFailed(f"--goal {name}: there is no such goal; known: {', '.join(GOALS)}", 2)


def _check_files(write: Path | None, plot: Path | None) -> None:
    """Told before the work, not after it."""
    import importlib.util

    from gateway.tools.tune.host_vars import WriteError, check_target

    if write is not None:
        try:
            check_target(write)
        except WriteError as error:
            raise CommandFailed(f"--write {error}", 2) from None
    if plot is None:
        return
    if plot.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise CommandFailed(f"--plot {plot}: must end in .png, .svg or .pdf", 2)
    if not plot.parent.is_dir():
        raise CommandFailed(f"--plot {plot}: there is no folder {plot.parent}", 2)
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandFailed(
            "--plot needs the package matplotlib, which is not installed: "
            "pip install 'llama-gateway[plots]'"
        )


def _slot(plan: LocalFleetPlan, context: int, request: BenchmarkRequest) -> int:
    """Tokens of a slot: what was asked for, but no more than the model was trained on."""
    slot = min(context, plan.model.trained_context or context)
    if request.prompt + request.answer + SLOT_HEADROOM > slot:
        raise CommandFailed(
            f"--prompt {request.prompt} and --answer {request.answer} do not fit into a slot of "
            f"{slot} tokens ({SLOT_HEADROOM} must stay free). Remedy: a larger --context"
            + ("" if slot == context else " does not help, the model was trained on no more")
            + ", or shorter ones",
            2,
        )
    return slot


def _refuse_other_work(topology: Topology, *, force: bool) -> None:
    import time

    from gateway.tools.tune.other_work import (
        MOST_OTHER_WORK,
        SAMPLE_SECONDS,
        other_work_between,
        read_cpu_times,
    )

    cpus = [cpu for node in topology.nodes for cpu in node.cpus]
    before = read_cpu_times(cpus)
    time.sleep(SAMPLE_SECONDS)
    found = other_work_between(before, read_cpu_times(cpus))
    if not before.cpus:
        print_note("This system has no /proc/stat: whether other work loads it is not known.")
    elif found.busy_cpus > MOST_OTHER_WORK and force:
        print_note(f"Measuring under other work (--force), which makes figures worse: {found}")
    elif found.busy_cpus > MOST_OTHER_WORK:
        raise CommandFailed(
            f"other work loads this machine: {found}, by /proc/stat over {SAMPLE_SECONDS:g} s "
            f"(at most "
            f"{MOST_OTHER_WORK} CPUs are let pass). It would be measured as well. Remedy: "
            f"stop it, or "
            "measure all the same with --force"
        )


def _kept(records: MeasurementLog, *, again: bool) -> list[Measurement]:
    if again:
        records.rotate()
    kept, broken = records.read()
    if broken:
        print_note(f"{records.path}: {broken} broken lines are left out")
    if kept:
        print_note(
            f"{records.path}: uses {len(kept)} earlier measurements of this model on this machine "
            "where they fit (--again measures everything anew)"
        )
    return kept


def _known(session: TuningSession, servers: int) -> tuple[Setting, int] | None:
    """What a server took of memory in an earlier run."""
    for one in session.earlier:
        if one.figures is not None and one.figures.memory is not None:
            return one.setting, one.figures.memory // servers
    return None


def _run(
    session: TuningSession, machine: MachineBenchmark, records: MeasurementLog, minutes: float
) -> int:
    """Measure; the exit status."""
    import asyncio
    import signal

    from gateway.tools.cli.tune_progress import TuningProgress

    async def measured() -> None:
        here = asyncio.current_task()
        assert here is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, here.cancel)
        with TuningProgress(session, minutes) as telling:
            await session.run(
                machine.measure,
                seconds=minutes * 60,
                record=records.append,
                on_begin=telling.measurement_started,
                on_end=telling.measurement_done,
            )

    print_note(
        f"About {session.search.expected_measurements()} measurements (the full grid has "
        f"{session.search.space.size} settings), at most {minutes:g} minutes. They are kept in "
        f"{records.path}."
    )
    try:
        asyncio.run(measured())
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 143
    return 0


def _nothing(session: TuningSession, minutes: float, status: int) -> CommandFailed:
    if why := session.errors().get(session.search.baseline):
        return CommandFailed(f"{session.search.baseline}: {why}")
    if session.end_reason == "interrupted":
        return CommandFailed("interrupted before the first measurement was done", status)
    return CommandFailed(
        f"not one measurement was done in {minutes:g} minutes. Remedy: a larger --minutes, or a "
        "shorter --prompt and --answer"
    )


def _draw(plot: Path, found: TuningReport, about: dict[str, object]) -> None:
    from gateway.tools.tune.report import draw_report

    draw_report(plot, found, f"{about['model']} on {about['processor']}: {found.best.setting}")
    print_note(f"drawn: {plot}")


def _write(path: Path, found: TuningReport, topology: Topology, about: dict[str, object]) -> None:
    from datetime import UTC, datetime

    from gateway.tools.tune import host_vars

    if found.session.end_reason == "interrupted":
        print_note(f"{path} is not written: the search was interrupted")
        return
    host_vars.write_result(path, found, topology, about, datetime.now(UTC))
    print_note(f"written: {path}")
