from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.house import measure
from tests.house.sample_checkout import PRIVATE_ACCESSES, Tree


def test_every_figure_is_explained_and_printed(
    tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(PRIVATE_ACCESSES)
    assert set(measure.measure(root, typed=False)) == set(measure.SOURCE_FIGURES)
    assert measure.main([str(root), "--quick"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        *measure.SOURCE_FIGURES
    ]
    assert measure.main([str(root), "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["private_in_tests"]["value"] == 3
    assert measure.main([str(root), "--list", "instruction_counts"]) == 0
    assert capsys.readouterr().out.startswith("instruction_counts: 1\n  tests/test_a.py:")


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        measure.main([str(tmp_path)])
    assert "has no folder gateway" in capsys.readouterr().err
