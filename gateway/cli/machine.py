"""What concerns this machine: `llama-gateway topology`, `fit` and `cache`."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gateway.cli import options, terminal
from gateway.cli.options import CommandGroup, Panel, argument, examples_epilog, flag
from gateway.cli.terminal import CommandFailed, WrongUsage, failing_by

if TYPE_CHECKING:
    from gateway.local.cache_contents import CacheEntry
    from gateway.local.topology import Topology
    from gateway.workshop.fit import Machine

TOPOLOGY_EXAMPLES = examples_epilog(
    ("llama-gateway topology", "sockets, NUMA nodes, cores, caches, memory"),
    ("llama-gateway topology --json", "as JSON, for a script or a playbook"),
    ("llama-gateway topology --root saved/", "for a machine whose /sys and /proc were copied"),
)


def topology(
    root: Path = flag("FOLDER", "Folder that holds the machine's `sys` and `proc`.", Path("/")),
    as_json: bool = options.JSON,
) -> None:
    """Show what this machine has for llama.cpp: sockets, NUMA nodes, cores, caches, memory.

    Only resources that this process may use are shown, by its affinity mask, its cpuset and its
    container's limits. The last lines show how to run one server on each NUMA node.
    """
    from gateway.local.topology import read_topology, topology_as_dict

    if not (root / "proc").is_dir() or not (root / "sys").is_dir():
        raise WrongUsage(
            f"{root}: holds no folders `proc` and `sys`. Remedy: name the folder that holds copies "
            "of them with --root; without it this machine is shown"
        )
    found = read_topology(root)
    if as_json:
        terminal.print_json(topology_as_dict(found))
    else:
        _show_machine(found)


def _show_machine(found: Topology) -> None:
    from gateway.local.memory import format_gib
    from gateway.local.topology import format_kernel_list, server_placement

    out = terminal.console()
    threads = max((len(core) for node in found.nodes for core in node.cores), default=1)
    processor = found.processor
    out.print(f"processor     {processor.name or 'unknown'} ({processor.architecture or '?'})")
    out.print(f"instructions  {', '.join(processor.instructions) or 'none that llama.cpp uses'}")
    out.print(
        f"cores         {found.core_count} in {_count(len(found.sockets) or 1, 'socket')} and "
        f"{_count(len(found.nodes), 'NUMA node')}, {_count(threads, 'thread')} each"
    )
    if found.cpu_quota is not None:
        out.print(f"quota         {found.cpu_quota:g} CPUs' worth of time (this container)")
    out.print(
        f"memory        {format_gib(found.memory_available)} of "
        f"{format_gib(found.memory_total)} available"
    )
    for level in sorted({cache.level for cache in found.caches}):
        alike = [cache for cache in found.caches if cache.level == level]
        size, shared = alike[0].size, len(alike[0].cpus)
        cache_size = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        out.print(f"L{level} cache      {len(alike)} x {cache_size}, {_count(shared, 'CPU')} each")
    for node in found.nodes:
        out.print(
            f"node {node.number:<8} CPUs {format_kernel_list(node.cpus)} "
            f"({_count(len(node.cores), 'core')}), "
            f"{format_gib(node.memory_available)} of {format_gib(node.memory_total)} free or "
            f"easily freed" + ("" if node.memory_allowed else "; its memory is not allowed here")
        )
        if node.efficiency_cpus:
            slow = format_kernel_list(tuple(node.efficiency_cpus))
            out.print(f"              efficiency CPUs {slow}: left out")
    out.print("\nOne llama.cpp server on each NUMA node:")
    for node in found.nodes:
        server = server_placement(found, node)
        bound = f" --membind={node.number}" if server["bind_memory"] else ""
        pinned = f"numactl --physcpubind={server['cpus']}{bound} " if server["pin"] else ""
        no_mmap = " --no-mmap" if server["no_mmap"] else ""
        out.print(f"  {pinned}llama-server --threads {server['threads']}{no_mmap} ...")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


# `llama-gateway fit`.

FIT_EXAMPLES = examples_epilog(
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

_servers = Panel("Servers")
_machine = Panel("Machine")


class MachineFlags(options.FlagGroup):
    """A machine that a model is fitted to: this one, but for what they say."""

    memory: str | None = _machine(
        "SIZE",
        "Memory of the machine, such as 32GiB.",
        show_default="what this machine has available",
    )
    cores: int | None = _machine(
        "N", "Physical cores of the machine.", min=1, max=1 << 14, show_default="this machine's"
    )
    numa_nodes: int | None = _machine(
        "N",
        "NUMA nodes of the machine: each has a server, and an equal share of all.",
        min=1,
        max=256,
        show_default="this machine's",
    )
    instructions: str | None = _machine(
        "SET",
        "Best instruction set: avx2, avx-512, avx-512-vnni, amx, dot-product, i8mm.",
        show_default="this machine's",
    )
    channels: int | None = _machine(
        "N", "Memory channels in use, of all sockets; with --mt-per-s.", min=1, max=1024
    )
    transfers: float | None = _machine(
        "N",
        "Speed of the memory modules, such as 4800; with --channels.",
        name="--mt-per-s",
        min=100,
        max=100_000,
    )
    measure: bool = _machine.switch(
        "--measure", "Measure this machine's memory bandwidth, for about a second on all cores."
    )

    def machine(self, topology: Topology) -> Machine:
        """Return this machine, with what the options say otherwise. Raises CommandFailed."""
        from gateway.local.memory import Place, memory_places
        from gateway.workshop.fit import INSTRUCTION_SETS, Machine, instruction_set

        bandwidth, source = self._bandwidth(topology)
        memory, cores, numa_nodes = self.memory, self.cores, self.numa_nodes
        nodes = numa_nodes or (1 if memory or cores else len(topology.nodes))
        if memory or numa_nodes:
            available = _bytes_of("--memory", memory) if memory else topology.memory_available
            places = [Place("the machine" if memory else "this machine", nodes, available)]
            if nodes > 1:
                places += [Place(f"NUMA node {n}", 1, available // nodes) for n in range(nodes)]
        else:
            bound = [node.number for node in topology.nodes] if nodes > 1 else [None]
            places = memory_places(topology, bound)
        if cores or numa_nodes:
            each = max(1, (cores or topology.core_count) // nodes)
        else:
            each = min(topology.threads_per_server(node) for node in topology.nodes)
        known = {one.lower().replace(" ", "-"): one for one in INSTRUCTION_SETS}
        name = (self.instructions or "").lower()
        if self.instructions is not None and name not in known:
            raise WrongUsage(
                f"--instructions {self.instructions}: there is no such set; known: "
                f"{', '.join(known)}"
            )
        instructions = known.get(name) or instruction_set(topology.processor.flags)
        return Machine(tuple(places), each, instructions, bandwidth, source)

    def _bandwidth(self, topology: Topology) -> tuple[float | None, str]:
        from gateway.workshop.fit import StreamError, bandwidth_of_modules, measure_bandwidth

        channels, transfers = self.channels, self.transfers
        if (channels is None) != (transfers is None):
            raise WrongUsage("--channels and --mt-per-s: only both of them tell a bandwidth")
        if self.measure and channels is not None:
            raise WrongUsage("--measure and --channels: only one of them")
        if self.measure:
            with failing_by(StreamError):
                return measure_bandwidth(topology), "measured on this machine"
        if channels is None or transfers is None:
            return None, "not known"
        source = f"three quarters of the peak of {channels} channels at {transfers:g} MT/s"
        return bandwidth_of_modules(channels, transfers), source


def fit(
    *,
    model: Path = argument("FILE.gguf", "The model; of a split one, any part."),
    slots: int = _servers("N", "Requests at once.", 2, min=1, max=256),
    context: int = _servers("TOKENS", "Context of one slot.", 4096, min=1, max=1 << 22),
    kv_type: str = _servers(
        "TYPE[,TYPE]",
        "Type of the KV cache, or of keys and of values: f32, f16, bf16, q8_0, q5_1, "
        "q5_0, q4_1, q4_0, iq4_nl.",
        "f16",
    ),
    cache_ram: str = _servers(
        "SIZE", "Memory for prompts that no slot holds any more; `up` gives what stays free.", "0"
    ),
    micro_batch: int = _servers(
        "TOKENS", "Tokens of one computation.", 256, name="--ubatch", min=1, max=1 << 16
    ),
    described: MachineFlags,
    as_json: bool = options.JSON,
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
    from gateway.local import LocalFleetError, gguf
    from gateway.local.gguf import UnknownShapeError
    from gateway.local.memory import (
        MEMORY_FACTOR,
        ServerSettings,
        format_gib,
        memory_needed,
        repacked_types,
    )
    from gateway.local.topology import read_topology
    from gateway.workshop.fit import INSTRUCTION_SETS, choice_rows, fit_as_dict, report_lines
    from gateway.workshop.fit import fit as compute

    key_type, value_type = _kv_types(kv_type)
    topology = read_topology()
    machine = described.machine(topology)
    with failing_by(LocalFleetError):
        file = gguf.read_model(model)
    settings = ServerSettings(
        slots,
        min(context, file.trained_context or context),
        key_type=key_type,
        value_type=value_type,
        micro_batch=micro_batch,
        prompt_cache_bytes=_bytes_of("--cache-ram", cache_ram),
        mapped=machine.servers == 1,
        repacked=repacked_types({INSTRUCTION_SETS[machine.instructions].layout_flag}),
    )
    try:
        heads = [gguf.file_header(part) for part in gguf.model_parts(model)]
        found = compute(file, gguf.model_shape(heads), settings, machine)
    except UnknownShapeError as error:
        raise CommandFailed(
            f"{file.path}: {error}. By the rule of thumb ({MEMORY_FACTOR} x file) a server takes "
            f"about {format_gib(memory_needed(file.size))}. Remedy: start it (llama-gateway up "
            "--model FILE) and see what it takes"
        ) from None
    if settings.context < context:
        terminal.print_note(
            f"The model was trained on {settings.context:,} tokens: --context is cut to it."
        )
    if as_json:
        terminal.print_json(fit_as_dict(found))
        return
    out = terminal.console()
    for name, text in report_lines(found):
        out.print(f"{name:<14}{text}", soft_wrap=True)
    out.print("")
    terminal.print_rows(choice_rows(found))
    if found.speed is None:
        terminal.print_note(
            "No tokens/s: the memory's bandwidth is not known. --measure measures this machine's; "
            "--channels and --mt-per-s give another one's."
        )


def _kv_types(text: str) -> tuple[str, str]:
    from gateway.local.embedded import KV_TYPES

    names = [name.strip().lower() for name in text.split(",")]
    if not set(names) <= set(KV_TYPES):
        raise WrongUsage(f"--kv-type {text}: there is no such type; known: {', '.join(KV_TYPES)}")
    if len(names) > 2:
        raise WrongUsage(f"--kv-type {text}: one type, or two: of keys and of values")
    return names[0], names[-1]


def _bytes_of(option: str, text: str) -> int:
    from gateway.config.fields import parse_size

    try:
        size = parse_size(text)
    except ValueError:
        size = -1
    if not 0 <= size <= 1 << 50:
        raise WrongUsage(f"{option} {text}: no size. Remedy: such as 32GiB or 512MiB")
    return size


# `llama-gateway cache`.

cache = CommandGroup(
    "Downloaded models, demo models, logs and measurements that are kept on this machine.\n\n"
    "They are in the folder that LLAMA_GATEWAY_CACHE names, by default "
    "~/.cache/llama-gateway.",
    ("llama-gateway cache list", "what there is, how large, and since when unused"),
    ("llama-gateway cache remove mistral-7b.gguf", "one model, or what has arrived of it"),
    ("llama-gateway cache remove --older-than 30d", "all that was not used for a month"),
)


@cache.add(
    "list",
    ("llama-gateway cache list", "the largest first"),
    ("llama-gateway cache list --json", "for scripts: bytes, Unix times, PIDs, digests"),
)
def list_cache(as_json: bool = options.JSON) -> None:
    """List what the cache holds: sizes, last use, and the processes that use it now."""
    from gateway.local.cache import cache_folder
    from gateway.local.cache_contents import cache_contents

    folder = cache_folder()
    entries = cache_contents(folder)
    total = sum(entry.size for entry in entries)
    told = {"folder": str(folder), "bytes": total, "entries": [_as_dict(one) for one in entries]}
    nothing = f"{folder}: the cache is empty"
    terminal.print_listing(told, map(_row, entries), nothing, as_json=as_json)
    if entries and not as_json:
        terminal.print_note(f"{_size(total)} in {folder}")


@cache.add(
    "remove",
    ("llama-gateway cache remove mistral-7b.gguf", "one model, or what has arrived of it"),
    ("llama-gateway cache remove --older-than 30d --dry-run", "what would go"),
    ("llama-gateway cache remove --all", "all but what is in use"),
)
def remove_cache(
    names: list[str] | None = argument(
        "[NAME]...", "Names of cache list.", None, show_default=False
    ),
    everything: bool = flag.switch("--all", "Remove all that is not in use."),
    older_than: str | None = flag(
        "TIME", "Remove what was not used for so long, such as 30d or 12h.", show_default=False
    ),
    dry_run: bool = flag.switch("--dry-run", "Say what would be removed, and remove nothing."),
    as_json: bool = options.JSON,
) -> None:
    """Remove models, partial downloads, logs or measurements.

    What a process uses now is refused when it is named (status 1), and left out by --all and
    --older-than.
    """
    from gateway.local.cache import cache_folder
    from gateway.local.cache_contents import CacheEntry, cache_contents, remove_entry

    if sum((bool(names), everything, older_than is not None)) != 1:
        raise WrongUsage("give one of: names, --all, --older-than TIME")
    entries = cache_contents(cache_folder())
    chosen = _chosen(entries, names or [], older_than)
    removed, refused = list[CacheEntry](), list[CacheEntry]()
    for entry in chosen:
        gone = not entry.in_use and (dry_run or remove_entry(entry))
        (removed if gone else refused).append(entry)
    freed = sum(entry.size for entry in removed)
    if as_json:
        told = {"removed": [*map(_as_dict, removed)], "in_use": [*map(_as_dict, refused)]}
        terminal.print_json({**told, "bytes": freed, "dry_run": dry_run})
    else:
        for entry in removed:
            print(f"{'would remove' if dry_run else 'removed'} {entry.name} ({_size(entry.size)})")
        terminal.print_note(f"{_size(freed)} {'would be' if dry_run else 'are'} free again")
    for entry in refused:
        say = terminal.print_error if names else terminal.print_note
        by = f" by process {_pids(entry)}" if entry.users else ""
        say(f"{entry.name} is in use{by} and stays. Remedy: end what uses it first")
    raise typer.Exit(1 if names and refused else 0)


def _chosen(
    entries: list[CacheEntry], names: list[str], older_than: str | None
) -> list[CacheEntry]:
    from gateway.config.fields import parse_duration

    by_name = {entry.name: entry for entry in entries}
    for name in names:
        if name not in by_name:
            raise WrongUsage(
                f"{name}: the cache holds nothing of that name, or several. Remedy: a name of "
                "llama-gateway cache list"
            )
    if names:
        return [by_name[name] for name in dict.fromkeys(names)]
    if older_than is None:
        return entries
    try:
        seconds = parse_duration(older_than)
    except ValueError:
        raise WrongUsage(f"--older-than {older_than}: not a time, such as 30d") from None
    if seconds < 0:
        raise WrongUsage(f"--older-than {older_than}: must not be negative")
    return [entry for entry in entries if time.time() - entry.last_used >= seconds]


def _row(entry: CacheEntry) -> list[tuple[str, object]]:
    expected = f" of {_size(entry.expected)}" if entry.expected else ""
    used = datetime.fromtimestamp(entry.last_used).astimezone()
    return [
        ("NAME", entry.name),
        ("KIND", entry.kind),
        ("SIZE", _size(entry.size) + expected),
        ("LAST USED", f"{used:%Y-%m-%d %H:%M}"),
        ("IN USE", f"by {_pids(entry)}" if entry.users else "yes" if entry.locked else ""),
        ("SOURCE", entry.source),
    ]


def _pids(entry: CacheEntry) -> str:
    return ", ".join(map(str, entry.users))


def _as_dict(entry: CacheEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "bytes": entry.size,
        "expected_bytes": entry.expected,
        "last_used": entry.last_used,
        "in_use": entry.in_use,
        "pids": list(entry.users),
        "source": entry.source,
        "sha256": entry.sha256,
        "files": [str(path) for path in entry.files],
    }


def _size(size: int) -> str:
    from gateway.local.memory import format_gib

    return format_gib(size) if size >= 1 << 20 else f"{size / 1024:.0f} KiB"
