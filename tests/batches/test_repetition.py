"""A second run takes the place of the first only as long as it repeats it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gateway.batches.response_events import NotRepeated, Repetition

TEXT = "response.output_text.delta"


def deltas(text: str, rng: random.Random) -> list[dict[str, Any]]:
    """Deltas of this text, cut at random."""
    values = []
    while text:
        size = rng.randint(1, 5)
        values.append({"type": TEXT, "sequence_number": 7, "item_id": "i", "delta": text[:size]})
        text = text[size:]
    return values


def a_run(text: str, rng: random.Random) -> list[dict[str, Any]]:
    added = {"type": "response.output_item.added", "item": {"id": "i"}}
    done = {"type": "response.output_item.done", "item": {"id": "i", "text": text}}
    return [added, *deltas(text, rng), done]


@pytest.mark.parametrize("seed", range(20))
def test_the_same_text_passes_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab ") for _ in range(60))
    first, second = a_run(text, rng), a_run(text, rng)
    seen = first[: rng.randrange(1, len(first) + 1)]
    repetition = Repetition(seen)
    new = [part for value in second if (part := repetition.new_part(value)) is not None]
    assert repetition.done
    parts = [value.get("delta", "") for value in (*seen, *new)]
    assert "".join(parts) == text
    kinds = [value["type"] for value in (*seen, *new) if value["type"] != TEXT]
    assert kinds == ["response.output_item.added", "response.output_item.done"]


def test_another_text_is_noticed() -> None:
    rng = random.Random(1)
    repetition = Repetition(a_run("one text", rng)[:4])
    with pytest.raises(NotRepeated):
        list(map(repetition.new_part, a_run("other text", rng)))


def test_a_text_that_ends_earlier_or_goes_on_is_noticed() -> None:
    for text in ("one", "one text more"):
        rng = random.Random(1)
        repetition = Repetition(a_run("one text", rng))
        with pytest.raises(NotRepeated):
            list(map(repetition.new_part, a_run(text, rng)))


def test_another_event_is_noticed() -> None:
    repetition = Repetition([{"type": "response.output_item.added", "item": {"id": "i"}}])
    with pytest.raises(NotRepeated):
        repetition.new_part({"type": "response.output_item.added", "item": {"id": "other"}})
