"""The pictures of figures load and run nothing, and the bars are those of their table."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from tests import bars_picture


@pytest.mark.parametrize("name", ["answered-sooner.svg", "slot-timeline.svg"])
def test_a_picture_of_figures_loads_and_runs_nothing_and_is_told_in_words(name: str) -> None:
    text = (bars_picture.DOCS / "images" / name).read_text()
    tags = {element.tag.rpartition("}")[2] for element in ET.fromstring(text).iter()}
    assert tags.isdisjoint({"a", "animate", "foreignObject", "image", "script", "set", "use"})
    elsewhere = re.sub(r'xmlns="[^"]+"|url\(#\w+\)', "", text)
    assert not re.search(r"://|url\(|@import|@font-face|href| on\w+=", elsewhere)
    assert "@media (prefers-color-scheme: dark)" in text
    title = re.search(r"<title>(.+)</title>", text)
    assert title
    assert len(title[1].split()) > 8


def test_the_bars_are_those_of_the_table_of_the_full_fleet() -> None:
    drawn = bars_picture.picture(bars_picture.RESULTS.read_text())
    assert bars_picture.PICTURE.read_text() == drawn, "python -m tests.bars_picture"
    page = """\
| load: light, 0.5 x capacity | mean completion, s |
| gateway, lengths unknown | 9 (0.9, 0.9) |

| load: capacity, 1 x capacity | mean completion, s |
| gateway, lengths unknown | 2 (0.50, 0.51) | 1.01 |
| nginx least_conn | 4 (1.00) | 2 |
| HAProxy leastconn, maxconn 2 | 3 (1.00) | 2 |
"""
    boxes = ET.fromstring(bars_picture.picture(page)).findall(".//{*}rect[@rx='3']")
    assert [box.get("width") for box in boxes] == ["270", "540", "405"]
    assert "Answered in 0.5 of the time behind nginx" in bars_picture.picture(page)
