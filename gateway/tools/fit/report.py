"""A fit in words, as a table, and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.tools.fit.estimate import Fit, Machine
from gateway.tools.fit.speed import MEASURED_INSTRUCTIONS, Speed
from gateway.tools.local.memory import MEMORY_RESERVE, format_gib, slot_bytes, weights_by_type

MIB = 1 << 20

LEAST_SHARE = 0.01  # of the weights, below which a type of them is not told


def report_lines(found: Fit) -> Iterator[tuple[str, str]]:
    """Yield what is told of a fit: a word, and a sentence beside it."""
    yield from _model_lines(found)
    yield from _memory_lines(found)
    yield from _answer_lines(found)
    if found.speed is not None:
        yield from _speed_lines(found.speed, found.machine)


def choice_table(found: Fit) -> tuple[list[str], list[list[object]]]:
    """Return the columns and rows of the quantisations."""
    columns = ["quantisation", "weights", "a server needs", "fits", "longest context"]
    if found.speed is not None:
        columns += ["decode/s", "prefill/s"]
    rows: list[list[object]] = []
    for one in found.choices:
        row: list[object] = [
            one.name,
            format_gib(one.size),
            format_gib(one.needed),
            "yes" if one.fits else "no",
            f"{one.largest_context:,}" if one.largest_context else None,
        ]
        if one.speed is not None:
            row += [f"{one.speed.decode:.1f}", f"{one.speed.prefill:.0f}"]
        rows.append(row)
    return columns, rows


def _model_lines(found: Fit) -> Iterator[tuple[str, str]]:
    shape, weights = found.shape, found.memory.weights
    parameters = sum(tensor.elements for tensor in shape.tensors) / 1e9
    experts = f", {shape.experts_used} of {shape.experts} experts" if shape.experts else ""
    trained = f", trained on {shape.trained_context:,} tokens" if shape.trained_context else ""
    yield (
        "model",
        (
            f"{found.model.name}: {shape.architecture}, {parameters:.2f} billion weights in "
            f"{len(shape.layers)} layers{experts}{trained}"
        ),
    )
    kinds = ", ".join(
        f"{name} {format_gib(size)}"
        for name, size in weights_by_type(shape).items()
        if size >= weights * LEAST_SHARE
    )
    yield "weights", f"{format_gib(weights)}: {kinds}"


def _memory_lines(found: Fit) -> Iterator[tuple[str, str]]:
    memory, settings = found.memory, found.settings
    types = " and ".join(dict.fromkeys((settings.key_type, settings.value_type)))
    slots = _count(settings.slots, "slot")
    yield (
        "KV cache",
        f"{format_gib(memory.kv_cache)}: {slots} of {settings.context:,} tokens in {types}",
    )
    rest = {
        "compute buffers": memory.compute,
        "recurrent states": memory.states,
        "checkpoints of prompts": memory.checkpoints,
        "prompt cache": memory.prompt_cache,
        "vocabulary": memory.vocabulary,
        "process": memory.process,
    }
    told = ", ".join(f"{name} {format_gib(size)}" for name, size in rest.items() if size >= MIB)
    yield "the rest", told
    yield "a server", f"needs {format_gib(memory.needed)} with all of that full"
    if memory.mapped_twice:
        yield (
            "",
            (
                f"shows up to {format_gib(memory.resident)}: behind weights that it copied into "
                f"another layout, {format_gib(memory.mapped_twice)} of the file stay in memory "
                "until others need it"
            ),
        )


def _answer_lines(found: Fit) -> Iterator[tuple[str, str]]:
    for place in found.machine.places:
        needed = found.memory.needed * place.servers
        left = place.available - needed
        spare = f"{format_gib(left)} stay free" if left >= 0 else f"{format_gib(-left)} are missing"
        need = "needs" if place.servers == 1 else "need"
        yield (
            "fits" if left >= MEMORY_RESERVE else "does not fit",
            (
                f"{place.name}: {_count(place.servers, 'server')} {need} {format_gib(needed)} of "
                f"{format_gib(place.available)}; {spare}, {format_gib(MEMORY_RESERVE)} must"
            ),
        )
    slots = _count(found.settings.slots, "slot")
    yield (
        "at most",
        (
            f"{found.largest_context:,} tokens in each of {slots}, or "
            f"{_count(found.largest_slots, 'slot')} of {found.settings.context:,} tokens"
        ),
    )


def _speed_lines(speed: Speed, machine: Machine) -> Iterator[tuple[str, str]]:
    waits = "memory" if speed.limit == "memory" else "the cores"
    yield (
        "decode",
        (
            f"{speed.decode:.1f} tokens/s for one request in a half full slot: a token reads "
            f"{format_gib(speed.weight_bytes)} of weights and {format_gib(speed.kv_bytes)} of KV "
            f"cache, and waits for {waits}"
        ),
    )
    estimated = "" if machine.instructions == MEASURED_INSTRUCTIONS else ", estimated from AVX2"
    yield (
        "prefill",
        (
            f"{speed.prefill:.0f} tokens/s by {_count(machine.cores_per_server, 'core')} with "
            f"{machine.instructions}{estimated}"
        ),
    )
    yield "bandwidth", f"{(machine.bandwidth or 0) / 1e9:.1f} GB/s, {machine.bandwidth_source}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def fit_as_dict(found: Fit) -> dict[str, Any]:
    """Return a fit as JSON values: sizes in bytes, speeds in tokens/s."""
    shape, settings, machine, memory = found.shape, found.settings, found.machine, found.memory
    return {
        "model": {
            "file": str(found.model.path),
            "name": found.model.name,
            "bytes": found.model.size,
            "architecture": shape.architecture,
            "parameters": sum(tensor.elements for tensor in shape.tensors),
            "layers": len(shape.layers),
            "experts": shape.experts,
            "experts_used": shape.experts_used,
            "trained_context": shape.trained_context,
            "weights_by_type": weights_by_type(shape),
        },
        "settings": {
            "servers": machine.servers,
            "slots": settings.slots,
            "context": settings.context,
            "key_type": settings.key_type,
            "value_type": settings.value_type,
            "mapped": settings.mapped,
        },
        "server": {
            "weights": memory.weights,
            "kv_cache": memory.kv_cache,
            "kv_cache_per_slot": slot_bytes(shape, settings),
            "states": memory.states,
            "compute": memory.compute,
            "checkpoints": memory.checkpoints,
            "prompt_cache": memory.prompt_cache,
            "vocabulary": memory.vocabulary,
            "process": memory.process,
            "needed": memory.needed,
            "mapped_twice": memory.mapped_twice,
            "resident": memory.resident,
        },
        "needed": memory.needed * machine.servers,
        "reserve": MEMORY_RESERVE,
        "fits": found.fits,
        "places": [
            {
                "name": one.name,
                "servers": one.servers,
                "available": one.available,
                "needed": memory.needed * one.servers,
                "left": one.available - memory.needed * one.servers,
            }
            for one in machine.places
        ],
        "largest_context": found.largest_context,
        "largest_slots": found.largest_slots,
        "speed": _speed_as_dict(found.speed, machine),
        "quantizations": [
            {
                "name": one.name,
                "bytes": one.size,
                "needed": one.needed,
                "fits": one.fits,
                "largest_context": one.largest_context,
                "decode": None if one.speed is None else round(one.speed.decode, 2),
                "prefill": None if one.speed is None else round(one.speed.prefill, 1),
            }
            for one in found.choices
        ],
    }


def _speed_as_dict(speed: Speed | None, machine: Machine) -> dict[str, Any] | None:
    if speed is None:
        return None
    return {
        "decode": round(speed.decode, 2),
        "prefill": round(speed.prefill, 1),
        "weight_bytes_per_token": speed.weight_bytes,
        "kv_bytes_per_token": speed.kv_bytes,
        "decode_waits_for": speed.limit,
        "cores": machine.cores_per_server,
        "instructions": machine.instructions,
        "bandwidth": round(machine.bandwidth or 0),
        "bandwidth_source": machine.bandwidth_source,
    }
