from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.language_model import WORDS, detokenize, expected_text, tokenize


@given(st.text(), st.integers(0, 30), st.integers(0, 30))
def test_an_answer_continues_in_the_same_way_wherever_it_was_cut(
    prompt: str, first: int, more: int
) -> None:
    begun = expected_text(prompt, first)
    whole = expected_text(prompt, first + more)
    assert begun + expected_text(prompt + begun, more) == whole


@given(st.text())
def test_token_ids_decode_to_their_text(text: str) -> None:
    assert detokenize(tokenize(text)) == text.encode(errors="replace").decode()


def test_different_prompts_have_different_answers_that_use_all_words() -> None:
    answers = {expected_text(f"prompt {i}", 12) for i in range(500)}
    assert len(answers) == 500
    assert set(" ".join(answers).split()) == set(WORDS)
