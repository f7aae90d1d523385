from __future__ import annotations

from itertools import takewhile

import pytest

from gateway.tools.bench.prompts import Calibration, PromptWriter, Text, fit


def words(text: Text, seed: int = 1, calibration: Calibration | None = None) -> list[str]:
    return PromptWriter(seed, calibration or Calibration()).write(text).split()


def shared(one: list[str], other: list[str]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_a_prompt_has_as_many_words_as_the_calibration_says() -> None:
    calibration = fit((16, 30), (116, 180), "test")
    assert (calibration.tokens_per_word, calibration.overhead) == (1.5, 6.0)
    for tokens in (30, 180, 1000):
        count = len(words(Text(1, tokens), calibration=calibration))
        assert 6 + count * 1.5 == pytest.approx(tokens, abs=1)
    assert len(words(Text(1, 1), calibration=calibration)) == 1


def test_a_calibration_needs_a_longer_prompt_with_more_tokens() -> None:
    with pytest.raises(ValueError, match="not more tokens"):
        fit((16, 30), (116, 30), "test")


def test_the_seed_decides_the_words_and_two_texts_differ_from_the_first_words_on() -> None:
    assert words(Text(1, 500)) == words(Text(1, 500))
    assert words(Text(1, 500)) != words(Text(1, 500), seed=2)
    assert shared(words(Text(1, 500)), words(Text(2, 500))) < 5


def test_prompts_of_one_prefix_have_it_in_common_and_no_more() -> None:
    one, other = words(Text(1, 200, 7, 150)), words(Text(2, 300, 7, 150))
    assert 150 <= shared(one, other) < 155
    assert shared(one, words(Text(1, 200, 8, 150))) < 5


def test_a_later_turn_begins_with_all_of_the_earlier_one() -> None:
    calibration = Calibration(1.7, 9.0)
    earlier = words(Text(3, 400, 7, 150), calibration=calibration)
    later = words(Text(3, 700, 7, 150), calibration=calibration)
    assert later[: len(earlier)] == earlier
    assert len(later) > len(earlier)


def test_a_prompt_may_be_its_prefix_alone() -> None:
    assert words(Text(1, 100, 7, 100)) == words(Text(2, 100, 7, 100))
