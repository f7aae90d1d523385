"""Shapes of models without a file."""

from __future__ import annotations

from gateway.local.gguf import Layer, ModelShape, Tensor
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
