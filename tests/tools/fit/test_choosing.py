from __future__ import annotations

from pathlib import Path

from tests.tools.fit.choosing import rows

PAGE = Path(__file__).parents[3] / "docs/choosing-a-model.md"


def test_the_page_has_the_figures_that_fit_computes() -> None:
    page = PAGE.read_text().splitlines()
    missing = [row for row in rows() if row not in page]
    assert not missing, "python -m tests.tools.fit.choosing prints the table"
