from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

from gateway.tools.bench.page import render_page
from tests.tools.bench.reports import sample_report


class _Tags(HTMLParser):
    """Checks that tags close in order, and keeps their names and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    page = render_page(sample_report())
    tags = _Tags(page)
    assert tags.open == []
    assert not tags.seen & {"script", "link", "img", "iframe"}
    assert re.search(r"(?:src|href|url)\s*[=(]", page) is None
    assert {"table", "svg", "polyline", "rect"} <= tags.seen
    for text in ("4 at a time", "TTFT P50", "decode", "http://127.0.0.1:8000"):
        assert text in tags.text


def test_a_servers_words_stay_text() -> None:
    report = sample_report()
    evil = '<script>alert(1)</script>"\x1b[31m'
    report = replace(
        report, url=evil, server=replace(report.server, model=evil, notes=[evil]), notes=[evil]
    )
    page = render_page(report)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "alert(1)" in _Tags(page).text


def test_a_run_without_any_success_has_a_page() -> None:
    assert "http_500" in render_page(sample_report(fails=True))
