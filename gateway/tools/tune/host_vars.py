"""The best setting as variables of the Ansible role `llama_node`, or as JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from gateway.tools.local.system_files import format_kernel_list
from gateway.tools.local.topology import Topology
from gateway.tools.tune.measurements import Figures
from gateway.tools.tune.report import TuningReport
from gateway.tools.tune.setting import Setting, pinned_cpus

HEADER = "# Written by llama-gateway tune"

SUFFIXES = (".yml", ".yaml", ".json")


class WriteError(Exception):
    """The file must not be written; the text says why and what to do."""


def check_target(path: Path) -> None:
    """Raise WriteError, before anything is measured, for a file that would not do."""
    if path.suffix not in SUFFIXES:
        raise WriteError(f"{path}: must end in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise WriteError(f"{path}: there is no folder {path.parent}; make it first")
    if path.suffix == ".json":
        return
    if path.exists() and not path.read_text(errors="replace").startswith(HEADER):
        raise WriteError(
            f"{path}: holds variables that were not written by this command. Remedy: name a file "
            "of its own, such as host_vars/HOST/tuned.yml"
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
    """The setting in the words of the role."""
    found: dict[str, Any] = {
        "llama_node_threads": setting.threads,
        "llama_node_batch": setting.batch,
        "llama_node_ubatch": setting.micro_batch,
        "llama_node_slots": setting.slots,
    }
    if setting.pinning == "cores":  # offered with a single NUMA node only
        cpus = pinned_cpus("cores", topology.nodes[0]) or ()
        found["llama_node_service_options"] = {
            "CPUAffinity": format_kernel_list(cpus).replace(",", " ")
        }
    return found


def write_result(
    path: Path,
    report: TuningReport,
    topology: Topology,
    subject: dict[str, Any],
    written_at: datetime,
) -> None:
    """Write the file, by its suffix. Raises OSError."""
    if path.suffix == ".json":
        text = json.dumps({"subject": subject, **report.as_dict()}, indent=2) + "\n"
    else:
        text = render_host_vars(report, topology, subject, written_at)
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(text)
    draft.replace(path)


def render_host_vars(
    report: TuningReport, topology: Topology, subject: dict[str, Any], written_at: datetime
) -> str:
    """The text of a file of variables, with what it rests on."""
    best, session = report.best, report.session
    judged = f"{session.request.prompt} + {session.request.answer} tokens"
    moment = f"{written_at.astimezone(UTC):%Y-%m-%d %H:%M}"
    told = [
        f"{HEADER} on {moment} UTC, which replaces it as a whole.",
        f"# Goal {session.goal}: requests of {judged}, slots of {subject['context']} tokens.",
        f"# Model {subject['model']}, {subject['server']}, {subject['processor']}.",
        *(f"# {line}" for line in report.verdict()),
        f"# Each server: {format_figures(best.figures)}.",
    ]
    body = yaml.safe_dump(role_variables(best.setting, topology), sort_keys=False)
    return "\n".join(told) + f"\n---\n{body}"


def format_figures(figures: Figures) -> str:
    """Figures in words."""
    stall = "" if figures.stall is None else f", stall {figures.stall:.2f} s"
    memory = "" if figures.memory is None else f", {figures.memory / (1 << 30):.1f} GiB"
    return (
        f"reads {figures.prefill:.0f} tokens/s, writes {figures.decode:.1f} alone and "
        f"{figures.decode_busy:.1f} in all slots{stall}{memory}"
    )
