"""A test over a table fails if any case does, and names each that does."""

from __future__ import annotations

import asyncio

import pytest

from tests.each_case import each_case


def notes_of(error: BaseException) -> list[str]:
    return error.__notes__


def test_every_case_runs_and_each_that_fails_is_named() -> None:
    seen: list[int] = []

    @each_case(("a", "b"), [(1, 1), (2, 3), (4, 4), (5, 6)])
    def test(*, more: list[int], a: int, b: int) -> None:
        more.append(a)
        assert a == b, "not equal"

    with pytest.raises(AssertionError, match="not equal") as failed:
        test(more=seen)
    assert seen == [1, 2, 4, 5]
    first, second = notes_of(failed.value)
    assert "{'a': 2, 'b': 3}" in first
    assert "{'a': 5, 'b': 6}" in second


def test_a_coroutine_is_awaited_for_every_case() -> None:
    @each_case("number", iter(range(3)))
    async def test(number: int) -> None:
        await asyncio.sleep(0)
        assert number < 2

    with pytest.raises(AssertionError):
        asyncio.run(test())
