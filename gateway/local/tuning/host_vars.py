"""The best setting as variables of the Ansible role `llama_node`, or as JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from gateway.local.sysfs import shown_list
from gateway.local.topology import Topology
from gateway.local.tuning.goals import Figures
from gateway.local.tuning.report import Report
from gateway.local.tuning.setting import Setting, cpus_of

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


def variables(setting: Setting, topology: Topology) -> dict[str, Any]:
    """The setting in the words of the role."""
    found: dict[str, Any] = {
        "llama_node_threads": setting.threads,
        "llama_node_batch": setting.batch,
        "llama_node_ubatch": setting.micro_batch,
        "llama_node_slots": setting.slots,
    }
    if setting.pinning == "cores":  # offered with a single NUMA node only
        cpus = cpus_of("cores", topology.nodes[0]) or ()
        found["llama_node_service_options"] = {"CPUAffinity": shown_list(cpus).replace(",", " ")}
    return found


def write(
    path: Path, found: Report, topology: Topology, subject: dict[str, Any], at: datetime
) -> None:
    """Write the file, by its suffix. Raises OSError."""
    if path.suffix == ".json":
        text = json.dumps({"subject": subject, **found.as_dict()}, indent=2) + "\n"
    else:
        text = host_vars(found, topology, subject, at)
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(text)
    draft.replace(path)


def host_vars(found: Report, topology: Topology, subject: dict[str, Any], at: datetime) -> str:
    """The text of a file of variables, with what it rests on."""
    best, session = found.best, found.session
    judged = f"{session.request.prompt} + {session.request.answer} tokens"
    told = [
        f"{HEADER} on {at.astimezone(UTC):%Y-%m-%d %H:%M} UTC, which replaces it as a whole.",
        f"# Goal {session.goal}: requests of {judged}, slots of {subject['context']} tokens.",
        f"# Model {subject['model']}, {subject['server']}, {subject['processor']}.",
        *(f"# {line}" for line in found.verdict()),
        f"# Each server: {figures_text(best.figures)}.",
    ]
    body = yaml.safe_dump(variables(best.setting, topology), sort_keys=False)
    return "\n".join(told) + f"\n---\n{body}"


def figures_text(figures: Figures) -> str:
    """Figures in words."""
    stall = "" if figures.stall is None else f", stall {figures.stall:.2f} s"
    memory = "" if figures.memory is None else f", {figures.memory / (1 << 30):.1f} GiB"
    return (
        f"reads {figures.prefill:.0f} tokens/s, writes {figures.decode:.1f} alone and "
        f"{figures.decode_busy:.1f} in all slots{stall}{memory}"
    )
