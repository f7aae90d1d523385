"""`llama-gateway fit`: whether a model fits a machine, and how fast it will be there."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.tools.cli import options
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import CommandFailed, console, print_json, print_note, print_table

if TYPE_CHECKING:
    from gateway.tools.fit import Fit, Machine
    from gateway.tools.local.gguf import ModelFile
    from gateway.tools.local.topology import Topology


EXAMPLES = examples_epilog(
    ("llama-gateway fit mistral-7b.gguf", "does it fit this machine, with the settings of up?"),
    (
        "llama-gateway fit mistral-7b.gguf --measure",
        "and how many tokens a second, by a test of this machine's memory",
    ),
    (
        (
            "llama-gateway fit m.gguf --memory 128GiB --cores 64 --numa-nodes 2 --channels 16 "
            "--mt-per-s 4800"
        ),
        "on a machine that is not bought yet",
    ),
    (
        "llama-gateway fit m.gguf --slots 4 --context 16384 --kv-type q8_0",
        "with more and longer requests at once, and a smaller KV cache",
    ),
    ("llama-gateway fit m.gguf --json", "as JSON; `.fits` is the answer in a word"),
)

_servers = partial(typer.Option, rich_help_panel="Servers")
_machine = partial(typer.Option, rich_help_panel="Machine")

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)
MOST_BYTES = 1 << 50


def fit(
    model: Annotated[
        Path, typer.Argument(metavar="FILE.gguf", help="The model; of a split one, any part.")
    ],
    slots: int = _servers(2, min=1, max=256, metavar="N", help="Requests at once."),
    context: int = _servers(
        4096, min=1, max=1 << 22, metavar="TOKENS", help="Context of one slot."
    ),
    kv_type: str = _servers(
        "f16",
        metavar="TYPE[,TYPE]",
        help=(
            "Type of the KV cache, or of keys and of values: f32, f16, bf16, q8_0, q5_1, "
            "q5_0, q4_1, q4_0, iq4_nl."
        ),
    ),
    cache_ram: str = _servers(
        "0",
        metavar="SIZE",
        help="Memory for prompts that no slot holds any more; `up` gives what stays free.",
    ),
    micro_batch: int = _servers(
        256, "--ubatch", min=1, max=1 << 16, metavar="TOKENS", help="Tokens of one computation."
    ),
    memory: str | None = _machine(
        None,
        metavar="SIZE",
        show_default="what this machine has available",
        help="Memory of the machine, such as 32GiB.",
    ),
    cores: int | None = _machine(
        None,
        min=1,
        max=1 << 14,
        metavar="N",
        show_default="this machine's",
        help="Physical cores of the machine.",
    ),
    numa_nodes: int | None = _machine(
        None,
        min=1,
        max=256,
        metavar="N",
        show_default="this machine's",
        help="NUMA nodes of the machine: each has a server, and an equal share of all.",
    ),
    instructions: str | None = _machine(
        None,
        metavar="SET",
        show_default="this machine's",
        help="Best instruction set: avx2, avx-512, avx-512-vnni, amx, dot-product, i8mm.",
    ),
    channels: int | None = _machine(
        None,
        min=1,
        max=1024,
        metavar="N",
        help="Memory channels in use, of all sockets; with --mt-per-s.",
    ),
    transfers: float | None = _machine(
        None,
        "--mt-per-s",
        min=100,
        max=100_000,
        metavar="N",
        help="Speed of the memory modules, such as 4800; with --channels.",
    ),
    measure: bool = _machine(
        False,
        "--measure",
        help="Measure this machine's memory bandwidth, for about a second on all cores.",
    ),
    as_json: options.Json = False,
) -> None:
    """Tell whether a model fits a machine, and how fast it will be there.

    Only the head of the file is read: its metadata, and the shapes and types of its tensors. From
    them follow the weights, the KV cache of each slot, the buffers, and so what a server takes with
    all its slots full; one server runs on each NUMA node, and 2 GiB must stay free. The table of
    quantisations says which file of the same model would fit, and with how much context.

    Decode waits for memory: each token reads all weights that it uses, and the slot's KV cache. So
    tokens a second need the memory's bandwidth: by --measure on this machine, or from --channels
    and --mt-per-s. Prefill needs arithmetic, so it goes by cores and instruction set.
    """
    from gateway.tools.fit import LAYOUT_FLAGS, fit_as_dict
    from gateway.tools.fit import fit as compute
    from gateway.tools.local import LocalFleetError
    from gateway.tools.local.gguf import (
        UnknownShapeError,
        model_parts,
        model_shape,
        read_headers,
        read_model,
    )
    from gateway.tools.local.memory import ServerSettings, repacked_types
    from gateway.tools.local.topology import read_topology

    key_type, value_type = _kv_types(kv_type)
    topology = read_topology()
    machine = _read_machine(
        topology, memory, cores, numa_nodes, instructions, (channels, transfers), measure=measure
    )
    try:
        file = read_model(model)
    except LocalFleetError as error:
        raise CommandFailed(str(error)) from None
    settings = ServerSettings(
        slots,
        min(context, file.trained_context or context),
        key_type=key_type,
        value_type=value_type,
        micro_batch=micro_batch,
        prompt_cache_bytes=_size("--cache-ram", cache_ram),
        mapped=machine.servers == 1,
        repacked=repacked_types({LAYOUT_FLAGS[machine.instructions]}),
    )
    try:
        found = compute(file, model_shape(read_headers(model_parts(model))), settings, machine)
    except UnknownShapeError as error:
        raise CommandFailed(_unknown(file, error)) from None
    if settings.context < context:
        print_note(f"The model was trained on {settings.context:,} tokens: --context is cut to it.")
    if as_json:
        print_json(fit_as_dict(found))
    else:
        _report(found)


def _unknown(file: ModelFile, error: Exception) -> str:
    from gateway.tools.local.memory import MEMORY_FACTOR, format_gib, memory_needed

    return (
        f"{file.path}: {error}. By the rule of thumb ({MEMORY_FACTOR} x file) a server takes about "
        f"{format_gib(memory_needed(file.size, 1))}. Remedy: start it (llama-gateway up --model "
        "FILE) and see what it takes"
    )


def _kv_types(text: str) -> tuple[str, str]:
    from gateway.tools.local.embedded import KV_TYPES

    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in KV_TYPES:
            raise CommandFailed(
                f"--kv-type {text}: there is no such type; known: {', '.join(KV_TYPES)}", 2
            )
    if len(names) > 2:
        raise CommandFailed(f"--kv-type {text}: one type, or two: of keys and of values", 2)
    return names[0], names[-1]


def _size(option: str, text: str) -> int:
    """Return the bytes of a size such as `32GiB`; K, M, G and T are powers of 1024."""
    found = SIZE.fullmatch(text.strip())
    size = 0.0
    if found:
        unit = (found[2] or "").upper().removesuffix("B").removesuffix("I")
        size = float(found[1]) * 1024 ** ("KMGT".find(unit) + 1 if unit else 0)
    if not found or size > MOST_BYTES:
        raise CommandFailed(f"{option} {text}: no size. Remedy: such as 32GiB or 512MiB", 2)
    return int(size)


def _read_machine(
    topology: Topology,
    memory: str | None,
    cores: int | None,
    numa_nodes: int | None,
    instructions: str | None,
    modules: tuple[int | None, float | None],
    *,
    measure: bool,
) -> Machine:
    """Return this machine, with what the options say otherwise. Raises CommandFailed."""
    from gateway.tools.fit import Machine, Place, instruction_set
    from gateway.tools.local.memory import memory_places

    bandwidth, source = _bandwidth(topology, modules, measure=measure)
    nodes = numa_nodes or (1 if memory or cores else len(topology.nodes))
    if memory or numa_nodes:
        available = _size("--memory", memory) if memory else topology.memory_available
        places = [Place("the machine" if memory else "this machine", nodes, available)]
        if nodes > 1:
            places += [Place(f"NUMA node {n}", 1, available // nodes) for n in range(nodes)]
    else:
        bound = [node.number for node in topology.nodes] if nodes > 1 else [None]
        places = [Place(*place) for place in memory_places(topology, bound)]
    if cores or numa_nodes:
        each = max(1, (cores or topology.core_count) // nodes)
    else:
        each = min(topology.threads_per_server(node) for node in topology.nodes)
    return Machine(
        tuple(places),
        each,
        _instructions(instructions) or instruction_set(topology.processor.flags),
        bandwidth,
        source,
    )


def _bandwidth(
    topology: Topology, modules: tuple[int | None, float | None], *, measure: bool
) -> tuple[float | None, str]:
    from gateway.tools.fit import StreamError, bandwidth_of_modules, measure_bandwidth

    channels, transfers = modules
    if (channels is None) != (transfers is None):
        raise CommandFailed("--channels and --mt-per-s: only both of them tell a bandwidth", 2)
    if measure and channels is not None:
        raise CommandFailed("--measure and --channels: only one of them", 2)
    if measure:
        try:
            return measure_bandwidth(topology), "measured on this machine"
        except StreamError as error:
            raise CommandFailed(str(error)) from None
    if channels is None or transfers is None:
        return None, "not known"
    return (
        bandwidth_of_modules(channels, transfers),
        f"three quarters of the peak of {channels} channels at {transfers:g} MT/s",
    )


def _instructions(name: str | None) -> str | None:
    from gateway.tools.fit import INSTRUCTION_FACTORS

    if name is None:
        return None
    known = {one.lower().replace(" ", "-"): one for one in INSTRUCTION_FACTORS}
    if name.lower() not in known:
        raise CommandFailed(
            f"--instructions {name}: there is no such set; known: {', '.join(known)}", 2
        )
    return known[name.lower()]


def _report(found: Fit) -> None:
    from gateway.tools.fit import choice_table, report_lines

    out = console()
    for name, text in report_lines(found):
        out.print(f"{name:<14}{text}", soft_wrap=True)
    out.print("")
    print_table(*choice_table(found))
    if found.speed is None:
        print_note(
            "No tokens/s: the memory's bandwidth is not known. --measure measures this machine's; "
            "--channels and --mt-per-s give another one's."
        )
