"""`llama-gateway tune`: measures which settings serve a model best on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from gateway.cli import options
from gateway.cli.options import Panel, examples_epilog, flag
from gateway.cli.terminal import (
    CommandFailed,
    WrongUsage,
    failing_by,
    print_json,
    print_note,
    print_rows,
    run_interruptibly,
)
from gateway.config.errors import single_line

if TYPE_CHECKING:
    from gateway.local.energy import EnergyMeter
    from gateway.local.plan import LocalFleetPlan
    from gateway.local.topology import Topology
    from gateway.workshop.tune import search
    from gateway.workshop.tune.benchmark import MachineBenchmark
    from gateway.workshop.tune.report import SettingResult, TuningReport


EXAMPLES = examples_epilog(
    (
        "llama-gateway tune --model m.gguf --write host_vars/epyc-1/tuned.yml",
        "half an hour at most; the play `site.yml` uses the result",
    ),
    (
        "llama-gateway tune --model m.gguf --goal latency --minutes 90 --plot tuned.png",
        "for one request at a time, more thoroughly, with a picture",
    ),
    ("llama-gateway tune --model m.gguf --prompt 3000 --answer 60", "for long prompts"),
    ("llama-gateway tune --minutes 3", "with a demo model, to see how it works"),
)

GoalName = Literal["latency", "throughput", "balanced"]
SLOT_HEADROOM = 64  # tokens of a slot that stay free beside prompt and answer
_judged = Panel("What is judged")
_servers = Panel("Servers")
_output = Panel("Output")


def tune(
    model: Path | None = _servers(
        "FILE.gguf",
        "The model to measure with.",
        show_default="a small demo model; its results mean little",
    ),
    goal: GoalName = _judged(
        "GOAL",
        "latency: a request alone, and the stalls by other prompts. throughput: requests "
        "an hour with all slots busy. balanced: both.",
        "balanced",
    ),
    prompt: int = _judged(
        "TOKENS", "Prompt of the request that settings are judged by.", 1024, min=64
    ),
    answer: int = _judged("TOKENS", "Its answer.", 128, min=16),
    minutes: float = flag("M", "Longest duration.", 30.0, min=0.1),
    context: int = _servers("TOKENS", "Context of one slot.", 4096, min=256),
    max_slots: int = _servers("N", "Most slots to try.", 8, min=1, max=32),
    server_bin: Path | None = _servers(
        "FILE",
        "The llama-server program to measure.",
        show_default="llama-server on PATH, else the embedded one",
    ),
    write: Path | None = _output(
        "FILE",
        "Write the best setting: .yml as variables of the Ansible role llama_node (a file "
        "of its own, such as host_vars/HOST/tuned.yml), .json with all figures.",
    ),
    plot: Path | None = _output("FILE", "Plot the measurements: .png, .svg or .pdf."),
    measurements: Path | None = _output(
        "FILE.jsonl",
        "File of the measurements; those of an earlier run are used again.",
        show_default="tuning.jsonl in the cache folder",
    ),
    remeasure: bool = _output.switch("--again", "Measure everything again."),
    force: bool = flag.switch("--force", "Measure even if other work loads the machine."),
    force_memory: bool = _servers.switch(
        "--force-memory", "Start servers even if too little memory would stay free."
    ),
    as_json: bool = options.JSON,
) -> None:
    """Measure real llama.cpp servers on this machine, and find the best settings for a model.

    One server is started on each NUMA node, again and again with other settings: threads,
    micro-batch, slots, batch, pinning. Measured are the speeds of prefill, of decode alone and of
    decode with all slots busy, the stall of a stream during another prompt's prefill, memory, and
    joules for each token where the machine shows its energy counters (RAPL). The search begins
    with the rule of thumb (a thread for each physical core), turns one knob after the other, and
    repeats what seems better until it is known to be more than noise or not.

    Nothing else should run meanwhile. Ctrl-C keeps the measurements; the same command continues.
    """
    from gateway.local import LocalFleetError
    from gateway.local.cache import cache_folder, models_in_use
    from gateway.local.gguf import model_parts
    from gateway.local.plan import plan_local_fleet
    from gateway.local.topology import read_topology
    from gateway.workshop.tune import search
    from gateway.workshop.tune.benchmark import MachineBenchmark, measurement_subject
    from gateway.workshop.tune.report import WriteError, build_report, check_target

    if write is not None:
        with failing_by(WriteError, before="--write ", status=2):
            check_target(write)
    options.check_plot_file(plot)
    request = search.BenchmarkRequest(prompt, answer)
    with failing_by(LocalFleetError):
        plan = plan_local_fleet(model, server_bin=server_bin, force_memory=force_memory)
        slot = _slot_tokens(plan, context, request)
        topology = read_topology()
        if plan.is_demo:
            print_note(
                "No --model: measuring the demo model. It is so small that the results mean little "
                "for a real one, and should not be used."
            )
        _refuse_other_work(topology, force=force)
        subject = measurement_subject(plan, topology, request, slot)
        records = search.MeasurementLog(measurements or cache_folder() / "tuning.jsonl", subject)
        space = search.search_space(topology, context=slot, max_slots=max_slots)
        session = search.TuningSession(
            search.Search(space, search.rule_of_thumb(topology)),
            request,
            goal,
            _earlier(records, remeasure=remeasure),
        )
        known = (
            (one.setting, one.figures.memory // len(plan.specs))
            for one in session.earlier
            if one.figures is not None and one.figures.memory is not None
        )
        meter = _energy_meter()
        machine = MachineBenchmark(
            plan,
            request,
            context=slot,
            force_memory=force_memory,
            known_memory=next(known, None),
            meter=meter,
        )
        with models_in_use(model_parts(plan.model.path)):
            status = _run(session, machine, records, minutes)
    if meter is not None and meter.failure is not None:
        print_note(f"Energy was measured only in part: {meter.failure}")
    report = build_report(session)
    if report is None:
        raise _no_measurement(session, minutes, status)
    if as_json:
        print_json({"subject": subject, **report.as_dict()})
    else:
        print_report(report)
    _write_files(report, topology, subject, plot, write)
    if session.end_reason == "interrupted":
        print_note(
            f"Interrupted: the measurements are in {records.path}; the same command goes on."
        )
    raise typer.Exit(status)


def _energy_meter() -> EnergyMeter | None:
    """Return a meter of this machine; None, with a note, where it can't measure energy."""
    from gateway.local.energy import EnergyUnavailableError, open_meter

    try:
        return open_meter()
    except EnergyUnavailableError as error:
        print_note(f"Energy is not measured: {error}")
        return None


def _slot_tokens(plan: LocalFleetPlan, context: int, request: search.BenchmarkRequest) -> int:
    """Return the tokens of a slot: `context`, but at most the model's trained context."""
    slot = min(context, plan.model.trained_context or context)
    if request.prompt + request.answer + SLOT_HEADROOM > slot:
        raise WrongUsage(
            f"--prompt {request.prompt} and --answer {request.answer} do not fit into a slot of "
            f"{slot} tokens ({SLOT_HEADROOM} must stay free). Remedy: a larger --context"
            + ("" if slot == context else " does not help, the model was trained on no more")
            + ", or shorter ones"
        )
    return slot


def _refuse_other_work(topology: Topology, *, force: bool) -> None:
    import time

    from gateway.workshop.tune import benchmark

    cpus, seconds = [c for node in topology.nodes for c in node.cpus], benchmark.SAMPLE_SECONDS
    before = benchmark.read_cpu_times(cpus)
    time.sleep(seconds)
    busy, found = benchmark.other_work_between(before, benchmark.read_cpu_times(cpus))
    if not before.cpus:
        print_note("This system has no /proc/stat: other work on it can't be seen.")
    elif busy > benchmark.MOST_OTHER_WORK and force:
        print_note(f"Measuring beside other work (--force), which makes figures worse: {found}")
    elif busy > benchmark.MOST_OTHER_WORK:
        raise CommandFailed(
            f"other work loads this machine: {found}, by /proc/stat over {seconds:g} s (at most "
            f"{benchmark.MOST_OTHER_WORK} CPUs are tolerated). It would distort the figures. "
            "Remedy: stop it, or measure anyway with --force"
        )


def _earlier(records: search.MeasurementLog, *, remeasure: bool) -> list[search.Measurement]:
    if remeasure:
        records.rotate()
    earlier, broken = records.read()
    if broken:
        print_note(f"{records.path}: {broken} broken lines are ignored")
    if earlier:
        print_note(
            f"{records.path}: uses {len(earlier)} earlier measurements of this model on this "
            "machine where they fit (--again measures everything again)"
        )
    return earlier


def _run(
    session: search.TuningSession,
    machine: MachineBenchmark,
    records: search.MeasurementLog,
    minutes: float,
) -> int:
    """Run the search; return the exit status."""
    from gateway.cli.progress import TuningProgress

    async def search() -> None:
        with TuningProgress(session, minutes) as progress:
            await session.run(
                machine.measure,
                seconds=minutes * 60,
                record=records.append,
                on_begin=progress.measurement_started,
                on_end=progress.measurement_done,
            )

    print_note(
        f"About {session.search.expected_measurements()} measurements (the full grid has "
        f"{session.search.space.size} settings), at most {minutes:g} minutes. They are stored in "
        f"{records.path}."
    )
    return run_interruptibly(search())


def _no_measurement(session: search.TuningSession, minutes: float, status: int) -> CommandFailed:
    if error := session.errors().get(session.search.baseline):
        return CommandFailed(f"{session.search.baseline}: {error}")
    if session.end_reason == "interrupted":
        return CommandFailed("interrupted before the first measurement was done", status)
    return CommandFailed(
        f"no measurement was done in {minutes:g} minutes. Remedy: a larger --minutes, or a "
        "shorter --prompt and --answer"
    )


def _write_files(
    report: TuningReport,
    topology: Topology,
    subject: dict[str, object],
    plot: Path | None,
    write: Path | None,
) -> None:
    from datetime import UTC, datetime

    from gateway.workshop.tune.report import draw_report, write_result

    if plot is not None:
        title = f"{subject['model']} on {subject['processor']}: {report.best.setting}"
        draw_report(plot, report, title)
        print_note(f"written: {plot}")
    if write is not None and report.session.end_reason == "interrupted":
        print_note(f"{write} is not written: the search was interrupted")
    elif write is not None:
        write_result(write, report, topology, subject, datetime.now(UTC))
        print_note(f"written: {write}")


def print_report(report: TuningReport) -> None:
    """Print the table of all settings, the best first, and the verdict."""
    pinnings = len(report.session.search.space.pinning) > 1
    energy = any(row.figures.decode_joules is not None for row in report.results)
    rows = (_cells(row, pinning=pinnings, energy=energy) for row in report.results)
    print_rows(rows, state_column=0)
    request = report.session.request
    print(
        "\nREADS, WRITES (alone), BUSY (all slots): tokens/s of one server. STALL: seconds.\n"
        f"SCORE: seconds for {request.prompt} + {request.answer} tokens, goal "
        f"{report.session.goal}. GAIN: against the rule of thumb;\nin brackets where it may be "
        "noise. N: times measured."
        + (" J/TOK: joules for a token written in all slots.\n" if energy else "\n")
    )
    for setting, error in report.session.errors().items():
        print(f"Does not run: {setting}: {single_line(error)}")
    for line in report.verdict():
        print(line)


def _cells(row: SettingResult, *, pinning: bool, energy: bool) -> list[tuple[str, object]]:
    """Return a row of the table; its titles are short, so that it fits into 80 characters."""
    from gateway.local.memory import format_gib
    from gateway.workshop.tune.search import PINNING_LABELS

    setting, figures = row.setting, row.figures
    gain, joules = f"{row.gain:+.1%}", figures.decode_joules
    cells: list[tuple[str, object]] = [
        ("THR", str(setting.threads)),
        ("BATCH", f"{setting.batch}/{setting.micro_batch}"),
        ("SLOTS", str(setting.slots)),
        ("READS", _short(figures.prefill)),
        ("WRITES", _short(figures.decode)),
        ("BUSY", _short(figures.decode_busy)),
        ("STALL", None if figures.stall is None else f"{figures.stall:.2f}"),
        ("MEM", None if figures.memory is None else format_gib(figures.memory)),
        ("SCORE", f"{row.score:.2f}"),
        ("GAIN", gain if row.more_than_noise else f"({gain})"),
        ("N", str(row.measured)),
    ]
    if energy:
        cells.append(("J/TOK", None if joules is None else f"{joules:.3g}"))
    if pinning:
        cells.append(("PINNED", PINNING_LABELS[setting.pinning]))
    return cells


def _short(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.1f}"
