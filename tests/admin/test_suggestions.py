"""Names that somebody may have meant."""

from __future__ import annotations

import pytest

from gateway.errors import suggestion

FLEET = [f"epyc-{number:03}-numa{number % 2}" for number in range(1000)]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("epyc-041numa1", "epyc-041-numa1"), ("pyc-998-numa0", "epyc-998-numa0")],
)
def test_a_slip_is_understood_among_a_thousand(name: str, meant: str) -> None:
    assert f"'{meant}'" in suggestion(name, FLEET, "")


def test_what_is_like_nothing_gets_the_other_sentence() -> None:
    assert suggestion("gpu", FLEET, "Look there.") == "Look there."
    assert suggestion("gpu", [], "Look there.") == "Look there."
