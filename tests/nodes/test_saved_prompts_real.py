"""Saved prompts of a real router (`llama-server --models-dir DIR --slot-save-path DIR`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.nodes.saved_prompts import SavingModels, prompt, saving_models, saving_routers

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.binary_only("the wheel's server has no router mode"),
]
SAVED, RESTORED = [("r1/a", "saved", 2)], [("r1/a", "restored", 2)]
MISMATCH = [("r1/a", "mismatch", 1)]


@asynccontextmanager
async def saved(folder: Path) -> AsyncIterator[tuple[SavingModels, list[str], list[Path]]]:
    """The gateway, two answers of the model `a`, and its files: it is not loaded any more."""
    async with (
        saving_routers(folder) as [router],
        saving_models(folder, [router.url]) as models,
    ):
        texts = [(await models.ask("a", prompt(seed)))[0] for seed in (1, 2)]
        await models.ask("b", "Hello.")
        assert models.told == SAVED
        yield models, texts, sorted((folder / "saved1").iterdir())


async def test_a_model_that_is_loaded_again_has_its_prompts(tmp_path: Path) -> None:
    async with saved(tmp_path) as (models, texts, files):
        assert [one.name[-6:] for one in files] == ["-0.bin", "-1.bin", "ry.bin"]
        for _ in range(2):
            found = [await models.ask("a", prompt(seed)) for seed in (1, 2)]
            assert [text for text, _ in found] == texts
            assert all(cached > 700 for _, cached in found)
            await models.ask("b", "Hello.")
            assert models.told == [*RESTORED, *SAVED]


async def test_the_next_gateway_knows_the_files(tmp_path: Path) -> None:
    async with saving_routers(tmp_path) as [router]:
        async with saving_models(tmp_path, [router.url]) as models:
            texts = [(await models.ask("a", prompt(seed)))[0] for seed in (1, 2)]
            await models.ask("b", "Hello.")
        async with saving_models(tmp_path, [router.url]) as models:
            found = [await models.ask("a", prompt(seed)) for seed in (1, 2)]
            assert models.told == RESTORED
            assert [text for text, _ in found] == texts
            assert all(cached > 700 for _, cached in found)


async def test_files_of_other_weights_are_erased_and_no_text_is_wrong(tmp_path: Path) -> None:
    async with saved(tmp_path) as (models, texts, _):
        content = bytearray((tmp_path / "models" / "a.gguf").read_bytes())
        # Some weights are those of others: the same shape, other numbers.
        content[-400_000:] = content[-800_000:-400_000]
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / "models" / name).unlink()
            (tmp_path / "models" / name).write_bytes(content)
        changed = [await models.ask("a", prompt(seed)) for seed in (1, 2)]
        assert models.told == MISMATCH
        assert [cached for _, cached in changed] == [0, 0]
        assert [text for text, _ in changed] != texts
        assert changed == [await models.ask("b", prompt(seed)) for seed in (1, 2)]


@pytest.mark.parametrize("part", ["0", "canary"])
async def test_a_file_with_a_flipped_bit_is_erased(tmp_path: Path, part: str) -> None:
    async with saved(tmp_path) as (models, texts, files):
        [file] = [one for one in files if one.stem.endswith(f"-{part}")]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x40
        file.write_bytes(content)
        found = [await models.ask("a", prompt(seed)) for seed in (2, 1)]
        assert [text for text, _ in found] == texts[::-1]
        one_left = [("r1/a", "restored", 1)]
        assert models.told == [*MISMATCH, *(one_left if part == "0" else [])]
        assert [cached > 700 for _, cached in found] == [part == "0", False]
