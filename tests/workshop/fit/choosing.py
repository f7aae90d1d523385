"""The table of docs/choosing-a-model.md: `python -m tests.workshop.fit.choosing` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gateway.local.gguf import Layer, ModelFile, ModelShape, Tensor
from gateway.local.memory import GIB, Place, ServerSettings
from gateway.workshop.fit import Fit, Machine, bandwidth_of_modules, fit
from tests.workshop.fit.random_models import Recipe, tensors


def shape_of(recipe: Recipe) -> ModelShape:
    """The shape of a model of the llama architecture, as its file would tell it."""
    width = recipe.kv_heads * recipe.key_length
    return ModelShape(
        architecture=recipe.architecture,
        width=recipe.width,
        heads=recipe.heads,
        feed_forward=recipe.feed_forward,
        vocabulary=recipe.vocabulary,
        experts=recipe.experts,
        experts_used=recipe.experts_used,
        trained_context=32_768,
        layers=(Layer(width, width),) * recipe.layers,
        tensors=tuple(
            Tensor(name, tuple(reversed(shape)), int(kind), 0)
            for name, shape, kind in tensors(recipe)
        ),
    )


LLAMA_8B = shape_of(Recipe("llama-3.1-8b", 32, 4096, 32, 8, 14_336, vocabulary=128_256))
MISTRAL_7B = shape_of(Recipe("mistral-7b", 32, 4096, 32, 8, 14_336, vocabulary=32_000))
MIXTRAL = shape_of(
    Recipe("mixtral", 32, 4096, 32, 8, 14_336, vocabulary=32_000, experts=8, experts_used=2)
)
LLAMA_70B = shape_of(Recipe("llama-3.1-70b", 80, 8192, 64, 8, 28_672, vocabulary=128_256))
QWEN_30B = shape_of(
    Recipe(
        "qwen3-30b-a3b",
        48,
        2048,
        32,
        4,
        768,
        vocabulary=151_936,
        head_size=128,
        experts=128,
        experts_used=8,
    )
)


MODELS = {"8 B dense": LLAMA_8B, "30 B, 3 B active": QWEN_30B, "70 B dense": LLAMA_70B}
QUANTIZATIONS = ("Q4_K_M", "Q8_0")
SETTINGS = ServerSettings(2, 4096)


def machine(memory: int, cores: int, channels: int, transfers: float, nodes: int) -> Machine:
    """A machine whose memory is empty but for 2 GiB of the system's."""
    available = (memory - 2) * GIB
    places = [Place("the machine", nodes, available)]
    if nodes > 1:
        places += [Place(f"NUMA node {n}", 1, available // nodes) for n in range(nodes)]
    bandwidth = bandwidth_of_modules(channels, transfers)
    return Machine(tuple(places), cores // nodes, "AVX2", bandwidth, "from its modules")


MACHINES = {
    "8 cores, 32 GiB, 2 channels at 3200": machine(32, 8, 2, 3200, 1),
    "16 cores, 64 GiB, 2 channels at 5600": machine(64, 16, 2, 5600, 1),
    "32 cores, 256 GiB, 8 channels at 3200": machine(256, 32, 8, 3200, 1),
    "2 x 48 cores, 768 GiB, 2 x 12 channels at 4800": machine(768, 96, 24, 4800, 2),
}


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| machine | model | quantisation | a server needs | decode/s | prefill/s |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, there in MACHINES.items():
        for model, shape in MODELS.items():
            found = fit(ModelFile(Path(model), model, 0, None, shape), shape, SETTINGS, there)
            yield from _rows(name, model, found)


def _rows(name: str, model: str, found: Fit) -> Iterator[str]:
    for choice in found.choices:
        if choice.name in QUANTIZATIONS and choice.fits and choice.decode is not None:
            yield (
                f"| {name} | {model} | {choice.name} | {choice.needed / GIB:.1f} GiB | "
                f"{choice.decode:.1f} | {choice.prefill:.0f} |"
            )


if __name__ == "__main__":
    print("\n".join(rows()))
