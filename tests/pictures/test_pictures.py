"""The pictures are those of their figures, and load and run nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from tests.pictures import bars, timeline
from tests.pictures.__main__ import RECORDING, drawn
from tests.pictures.recording import Ask, Look, Recording, Spell, Stream

PICTURES = drawn()
MOST_BYTES = 100_000
TAGS = {
    *("svg", "title", "style", "defs", "pattern", "clipPath"),
    *("g", "rect", "circle", "path", "text"),
}


def recording() -> Recording:
    return msgspec.json.decode(RECORDING.read_bytes(), type=Recording)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_that_of_its_figures_and_loads_and_runs_nothing(path: Path) -> None:
    text = path.read_text()
    assert text == PICTURES[path], "python -m tests.pictures"
    assert len(text.encode()) < MOST_BYTES
    assert {element.tag.rpartition("}")[2] for element in ET.fromstring(text).iter()} <= TAGS
    elsewhere = re.sub(r'xmlns="[^"]+"|url\(#\w+\)', "", text)
    assert not re.search(r"://|url\(|@import|@font-face|href| on\w+=", elsewhere)
    # Readers of dark pages, and those who do not see it.
    assert "@media (prefers-color-scheme: dark)" in text
    title = re.search(r"<title>(.+)</title>", text)
    assert title
    assert len(title[1].split()) > 8


def test_nothing_moves_unless_the_reader_lets_it() -> None:
    """Without motion the cover is not there, and all is seen."""
    style = next(path for path in PICTURES if path.name == "slot-timeline.svg").read_text()
    allowed = style.index("@media (prefers-reduced-motion: no-preference)")
    assert style.index(".sweep { display: none }") < allowed
    assert all(found.start() > allowed for found in re.finditer("animation", style))


def test_the_recorded_run_moves_streams_amid_their_words_and_loses_none() -> None:
    run = recording()
    moved = [life for life in run.lives if life.was_moved]
    assert len(moved) >= 2
    for life in moved:
        first, *_, last = life.spells
        assert first.node == run.away.node != last.node
        assert first.writing is not None
        assert first.writing < run.away.begin <= first.end < run.away.end
    assert {life.outcome for life in run.lives} == {"whole"}
    assert run.same_text
    words = [
        timeline.picture(msgspec.structs.replace(run, same_text=same)) for same in (True, False)
    ]
    assert ["undisturbed run" in text for text in words] == [True, False]
    assert not re.search(r"/|127\.|content|sea and stones", RECORDING.read_text())


def test_a_request_waits_before_it_has_a_node_and_between_two() -> None:
    """The admin API names the last node until the next one has it."""
    looks = [
        Look(0.1, "waiting", None, 0),
        Look(0.5, "running", "a", 1),
        Look(2.0, "waiting", "a", 1),
        Look(4.0, "running", "a", 1),
        Look(4.1, "running", "b", 2),
    ]
    stream = Stream(Ask(0.0, "chat", 10, 20), ended=6.0, ok=True, words=[1.0, 5.0], looks=looks)
    life = stream.life()
    assert life.spells == [Spell("a", 0.5, 2.0, writing=1.0), Spell("b", 4.1, 6.0, writing=5.0)]
    assert life.waits == [(0.0, 0.5), (2.0, 4.1)]
    assert life.was_moved
    # One that was only read on the first node has not moved amid its words.
    stream.words = [5.0]
    assert not stream.life().was_moved


PAGE = """\
| load: light, 0.5 x capacity | mean completion, s |
| --- | --- |
| gateway, lengths unknown | 9 (0.9, 0.9) |

| load: capacity, 1 x capacity | mean completion, s |
| --- | --- |
| gateway, lengths unknown | 2 (0.50, 0.51) | 1.01 |
| nginx least_conn | 4 (1.00) | 2 |
| HAProxy leastconn, maxconn 2 | 3 (1.00) | 2 |

"""


def test_bars_are_as_long_as_the_table_of_the_full_fleet_says() -> None:
    boxes = ET.fromstring(bars.picture(PAGE)).findall(".//{*}rect[@rx='3']")
    assert [float(box.get("width", "")) for box in boxes] == [
        (bars.RIGHT - bars.LEFT) * share for share in (0.5, 1.0, 0.75)
    ]
    assert "Answered in 0.5 of the time behind nginx" in bars.picture(PAGE)
