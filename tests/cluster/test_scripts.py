"""Random scripts of a cluster hold the property, and break it when a rule is broken."""

from __future__ import annotations

import pytest

from tests.cluster.scripts import MUTANTS, Mutant, find, load, play


def test_requests_never_exceed_slots_in_random_scripts() -> None:
    assert play(load(), range(100)) is None


@pytest.mark.slow
def test_requests_never_exceed_slots_in_thousands_of_random_scripts() -> None:
    assert play(load(), range(3000)) is None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_found(mutant: Mutant) -> None:
    assert find(mutant, 4000) is not None
