"""The pictures are those of their figures, and load and run nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from tests.pictures import bars, timeline
from tests.pictures.__main__ import RECORDING, drawn
from tests.pictures.recording import Ask, Look, Recording, Spell, life_of, was_moved

PICTURES = drawn()
MOST_BYTES = 100_000
BY_NAME = {path.name: path for path in PICTURES}
CHAT = Ask(0.0, "chat", 10, 20)


def recording() -> Recording:
    return msgspec.json.decode(RECORDING.read_bytes(), type=Recording)


@pytest.fixture(params=PICTURES, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_a_picture_is_that_of_its_figures(path: Path) -> None:
    assert path.read_text() == PICTURES[path], "python -m tests.pictures"


def test_a_picture_is_small_and_loads_and_runs_nothing(path: Path) -> None:
    text = path.read_text()
    assert len(text.encode()) < MOST_BYTES
    tags = {element.tag.rpartition("}")[2] for element in ET.fromstring(text).iter()}
    assert tags <= {
        *("svg", "title", "style", "defs", "pattern", "clipPath"),
        *("g", "rect", "circle", "path", "text"),
    }
    elsewhere = re.sub(r'xmlns="[^"]+"|url\(#\w+\)', "", text)
    assert not re.search(r"://|url\(|@import|@font-face|href| on\w+=", elsewhere)


def test_a_picture_suits_readers_of_dark_pages_and_those_who_do_not_see_it(path: Path) -> None:
    text = path.read_text()
    assert "@media (prefers-color-scheme: dark)" in text
    title = re.search(r"<title>(.+)</title>", text)
    assert title
    assert len(title[1].split()) > 8


def test_nothing_moves_unless_the_reader_lets_it() -> None:
    """Without motion the cover is not there, and all is seen."""
    style = BY_NAME["slot-timeline.svg"].read_text()
    allowed = style.index("@media (prefers-reduced-motion: no-preference)")
    assert style.index(".sweep { display: none }") < allowed
    assert all(found.start() > allowed for found in re.finditer("animation", style))


def test_the_recorded_run_moves_streams_amid_their_words_and_loses_none() -> None:
    run = recording()
    moved = [life for life in run.lives if was_moved(life)]
    assert len(moved) >= 2
    for life in moved:
        first, *_, last = life.spells
        assert first.node == run.away.node != last.node
        assert first.writing is not None
        assert first.writing < run.away.begin <= first.end < run.away.end
    assert {life.outcome for life in run.lives} == {"whole"}
    assert run.same_text


def test_the_recorded_run_gives_no_node_more_than_its_slots() -> None:
    run = recording()
    for node, slots in run.slots.items():
        spells = [spell for life in run.lives for spell in life.spells if spell.node == node]
        for spell in spells:
            # A look at the admin API is up to 50 ms old.
            beside = [one for one in spells if one.begin <= spell.begin + 0.1 < one.end]
            assert len(beside) <= slots


def test_the_recorded_run_holds_nothing_of_this_machine_or_of_any_text() -> None:
    assert not re.search(r"/|127\.|content|sea and stones", RECORDING.read_text())


def test_a_request_waits_before_it_has_a_node() -> None:
    seen = [
        Look(0.1, "waiting", None, 0),
        Look(0.2, "waiting", None, 0),
        Look(1.5, "running", "a", 1),
    ]
    life = life_of(CHAT, seen, [2.0], 0.0, 3.0, ok=True)
    assert life.waits == [(0.0, 1.5)]
    assert life.spells == [Spell("a", 1.5, 3.0, writing=2.0)]


def test_between_two_nodes_a_request_waits_whatever_node_it_had() -> None:
    """The admin API names the last node until the next one has it."""
    seen = [
        Look(0.1, "running", "a", 1),
        Look(2.0, "waiting", "a", 1),
        Look(4.0, "running", "a", 1),
        Look(4.1, "running", "b", 2),
    ]
    life = life_of(CHAT, seen, [1.0, 5.0], 0.0, 6.0, ok=True)
    assert life.spells == [Spell("a", 0.0, 2.0, writing=1.0), Spell("b", 4.1, 6.0, writing=5.0)]
    assert life.waits == [(2.0, 4.1)]
    assert was_moved(life)
    # One that was only read on the first node has not moved amid its words.
    assert not was_moved(life_of(CHAT, seen, [5.0], 0.0, 6.0, ok=True))


def test_texts_that_differ_are_not_said_to_be_alike() -> None:
    run = recording()
    assert "undisturbed run" in timeline.picture(run)
    assert "undisturbed run" not in timeline.picture(msgspec.structs.replace(run, same_text=False))


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
