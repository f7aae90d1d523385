"""The two models of docs/models.md, as files of the same shape but without the weights.

Shapes and types of the tensors are as published, and the sizes are exact. The weights are missing
(a hole in the file, so that it takes little room on the disk), and the words of the vocabulary.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType as Type

from tests.workshop.fit.random_models import Recipe, tensor_bytes, tensors, write


@dataclass(frozen=True, slots=True)
class Published:
    """A published model file."""

    size: int  # bytes
    recipe: Recipe
    weights_mib: float  # llama.cpp's "file size"
    types: dict[Type, int]  # how many tensors of each

    @property
    def file(self) -> str:
        """The name of the file."""
        return f"{self.recipe.name}.gguf"


def qwen(size: str, layers: int, width: int, heads: int, feed_forward: int) -> Recipe:
    return Recipe(
        f"qwen2.5-{size}-instruct-q4_k_m", layers, width, heads, 2, feed_forward,
        vocabulary=151_936, mixed=True, architecture="qwen2",
    )  # fmt: skip


SMALL = Published(
    size=491_400_032,
    recipe=qwen("0.5b", 24, 896, 14, 4864),
    weights_mib=462.96,
    types={Type.F32: 121, Type.Q5_0: 133, Type.Q8_0: 13, Type.Q4_K: 12, Type.Q6_K: 12},
)
LARGER = Published(
    size=1_117_320_736,
    recipe=qwen("1.5b", 28, 1536, 12, 8960),
    weights_mib=1059.89,
    types={Type.F32: 141, Type.Q4_K: 169, Type.Q6_K: 29},
)
MODELS = (SMALL, LARGER)


def write_hollow(model: Published, folder: Path) -> Path:
    """Write the file of `model` without its weights."""
    path = write(model.recipe, folder, hollow=True)
    os.truncate(path, model.size)
    return path


def types(model: Published) -> Counter[Type]:
    """Count the tensors of each type."""
    return Counter(kind for _, _, kind in tensors(model.recipe))


def weights(model: Published) -> int:
    """Sum the bytes of all tensors."""
    return sum(tensor_bytes(shape, kind) for _, shape, kind in tensors(model.recipe))
