from __future__ import annotations

from pathlib import Path

from tests.config.conftest import LoadSettings, Problems


def test_a_relative_folder_starts_in_that_of_the_settings(
    load_gateway: LoadSettings, tmp_path: Path
) -> None:
    assert load_gateway("batches: {folder: data/kept}").batches.folder == tmp_path / "data/kept"
    assert load_gateway("batches: {folder: /srv/kept}").batches.folder == Path("/srv/kept")


def test_a_file_is_no_folder(gateway_problems: Problems, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    (problem,) = gateway_problems("batches: {folder: kept}")
    assert (problem.key, problem.message) == ("batches.folder", "is a file")
    assert "name a folder" in problem.remedy


def test_what_is_kept_may_be_kept_for_a_year(load_gateway: LoadSettings) -> None:
    batches = load_gateway("batches: {keep: 365d, background_keep: 2d}").batches
    assert (batches.keep, batches.background_keep) == (365 * 86400, 2 * 86400)
