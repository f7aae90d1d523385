"""The screen of `llama-gateway top`: tables that follow the gateway, and keys that act on nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from gateway.cli.client import AdminClient
from gateway.cli.terminal import STATE_COLOURS, CommandFailed, caller_text
from gateway.cli.top import fleet
from gateway.cli.top.fleet import FleetPicture, Line
from gateway.cli.why import explained

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds before the next try; they double
OTHER_VERSION = "it may be of another version"
STALE_SECONDS = 5.0  # after so long without an event the screen says so
MOST_PROBLEMS_ABOVE = 3  # problems that are shown above the tables
MOST_LINES_ABOVE = 9  # lines that they take, and no more than a quarter of the screen
LOW_LINES = 16  # a screen of fewer lines has none to spare for an empty one
SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "notice": "cyan"}
TABS = ("nodes", "queue", "requests", "problems")
T = TypeVar("T")


class Confirm(ModalScreen[bool]):
    """Asks before something is done that callers notice."""

    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm > Static {
        width: 100%; max-width: 76; padding: 1 2; border: heavy $warning; background: $surface;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question."""
        yield Static(Text(f"{self._question}\n\ny: yes   n: no"))

    def action_answer(self, answer: bool) -> None:
        """Close with the answer."""
        self.dismiss(answer)


class Explanation(ModalScreen[None]):
    """Why a request went where it went, until a key closes it."""

    DEFAULT_CSS = """
    Explanation { align: center middle; }
    Explanation > VerticalScroll {
        width: 95%; height: 85%; padding: 0 1; border: heavy $accent; background: $surface;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,w", "dismiss", "Close")]

    def __init__(self, parts: Iterable[str | Table]) -> None:
        super().__init__()
        self._parts = [Text(part) if isinstance(part, str) else part for part in parts]

    def compose(self) -> ComposeResult:
        """Its lines and tables."""
        with VerticalScroll():
            yield Static(Group(*self._parts), id="explanation")


class Top(App[None]):
    """Shows the gateway of `admin` until it is closed."""

    CSS = """
    #headline { height: 1; text-style: bold; }
    #note { height: auto; max-height: 4; }
    #problems-above { height: auto; }
    #filter { display: none; }
    #filter.shown { display: block; }
    TabbedContent, ContentSwitcher, TabPane, DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "tab('nodes')", "Nodes", show=False),
        Binding("2", "tab('queue')", "Queue", show=False),
        Binding("3", "tab('requests')", "Requests", show=False),
        Binding("4", "tab('problems')", "Problems", show=False),
        Binding("d", "node('drain')", "Drain"),
        Binding("r", "node('resume')", "Resume"),
        Binding("p", "node('probe')", "Probe"),
        Binding("c", "cancel", "Cancel"),
        Binding("w", "why", "Why"),
        Binding("s", "sort", "Sort"),
        Binding("o", "reverse", "Order", show=False),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "clear_filter", "All", show=False),
        Binding("q", "quit", "Quit"),
    ]
    TITLE = "llama-gateway top"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, admin: AdminClient, clock: Callable[[], float]) -> None:
        super().__init__()
        self._admin = admin
        self._clock = clock
        self.picture = FleetPicture()
        self._heard_at = clock()
        self._lost: str | None = None
        self._note = ""
        self._words = ""
        self._sorts = {"nodes": (1, False), "requests": (4, False)}
        self._ended = threading.Event()
        self.following = threading.Thread(target=self._follow, name="follow", daemon=True)
        """Ends soon after the screen, with the next event."""

    # The screen.

    def compose(self) -> ComposeResult:
        """A headline, the problems, the tables."""
        with Vertical():
            yield Static(id="headline")
            yield Static(id="note")
            yield Static(id="problems-above")
            yield Input(placeholder="words that a row must have", id="filter")
            with TabbedContent(initial="nodes"):
                for number, name in enumerate(TABS, 1):
                    with TabPane(f"{number} {name.capitalize()}", id=name):
                        if name == "problems":
                            with VerticalScroll(id="problems-scroll"):
                                yield Static(id="all-problems")
                        else:
                            yield DataTable[Text](
                                id=f"{name}-table", cursor_type="row", zebra_stripes=True
                            )
        yield Footer()

    @property
    def _tables(self) -> Screen[Any]:
        """The screen with the tables, which a question may lie upon."""
        return self.screen_stack[0]

    def on_mount(self) -> None:
        """Begin to follow."""
        self._table("nodes").add_columns(*(column.title for column in fleet.NODE_COLUMNS))
        self._table("queue").add_columns(*fleet.QUEUE_TITLES)
        self._table("requests").add_columns(*(one.title for one in fleet.request_columns(0.0)))
        self._table("nodes").focus()
        self.set_interval(1.0, self._show_note)
        self._show()
        # Rows that come before a table is laid out would be drawn late.
        self.call_after_refresh(self.following.start)

    def on_unmount(self) -> None:
        """Stop following."""
        self._ended.set()

    def _table(self, name: str) -> DataTable[Text]:
        return self._tables.query_one(f"#{name}-table", DataTable)

    @property
    def _tab(self) -> str:
        return self._tables.query_one(TabbedContent).active

    def _show(self) -> None:
        self._show_note()
        self._tables.query_one("#headline", Static).update(Text(fleet.headline(self.picture)))
        self._show_above()
        self._show_table()

    def _show_above(self) -> None:
        """Show the first problems, in so few lines that the table keeps most of the screen."""
        above = self._tables.query_one("#problems-above", Static)
        above.styles.max_height = max(1, min(MOST_LINES_ABOVE, self.size.height // 4))
        above.update(_problems(self.picture, MOST_PROBLEMS_ABOVE))
        above.display = bool(self.picture.problems) and self._tab != "problems"

    def on_resize(self) -> None:
        """The terminal has another size."""
        self._show_note()
        self._show_above()

    def _show_note(self) -> None:
        silent = self._clock() - self._heard_at
        unheard = f"nothing was heard for {silent:.0f} s" if silent > STALE_SECONDS else None
        lost = self._lost or unheard
        note = Text(f"{lost}: what is shown is old" if lost else self._note)
        note.stylize("bold red" if lost else "cyan")
        # While the screen closes its parts go first, and the interval still runs.
        for shown in self._tables.query("#note").results(Static):
            shown.update(note)
            shown.display = bool(note.plain) or self.size.height >= LOW_LINES

    def _show_table(self) -> None:
        picture, words, tab = self.picture, self._words, self._tab
        if tab == "nodes":
            sort, descending = self._sorts[tab]
            lines = fleet.node_lines(picture, sort, words, descending=descending)
            _fill(self._table(tab), lines, state_column=1)
        elif tab == "queue":
            _fill(self._table(tab), fleet.queue_lines(picture, words))
        elif tab == "requests":
            sort, descending = self._sorts[tab]
            lines = fleet.request_lines(picture, sort, words, descending=descending)
            _fill(self._table(tab), lines)
            if picture.at and picture.requests is None:
                self._note = "requests are shown to keys of the role operator"
        else:
            every = _problems(picture, len(picture.problems), commands=True)
            self._tables.query_one("#all-problems", Static).update(every or Text("no problems"))

    # What is heard, in the thread of the feed.

    def _follow(self) -> None:
        pause = FIRST_PAUSE
        while not self._ended.is_set():
            try:
                for event, data in self._admin.events(fleet.LIVE_PATH):
                    if self._ended.is_set():
                        return
                    pause = FIRST_PAUSE
                    self._call(self._heard, event, data)
            except CommandFailed as error:
                self._call(self._report, str(error))
            self._ended.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if self.is_running:
            self.call_from_thread(function, *arguments)

    def _heard(self, event: str, data: Mapping[str, Any]) -> None:
        self._heard_at, self._lost = self._clock(), None
        try:
            self.picture.apply(event, data)
            if event != "hello":
                self._show()
        except (AttributeError, LookupError, TypeError, ValueError):
            self._lost = f"the gateway tells its state in another form ({OTHER_VERSION})"

    def _report(self, why: str) -> None:
        self._lost = why

    # The keys.

    def on_tabbed_content_tab_activated(self) -> None:
        """Another table is shown."""
        self._show_above()
        self.call_after_refresh(self._show_table)

    def action_tab(self, name: str) -> None:
        """Show this table."""
        self._tables.query_one(TabbedContent).active = name
        if name == "problems":
            self._tables.query_one("#problems-scroll").focus()
        else:
            self._table(name).focus()

    def action_sort(self) -> None:
        """Sort by the next column."""
        if self._tab in self._sorts:
            columns = fleet.NODE_COLUMNS if self._tab == "nodes" else fleet.request_columns(0.0)
            sort = (self._sorts[self._tab][0] + 1) % len(columns)
            self._sorts[self._tab] = (sort, columns[sort].order is not None and sort > 1)
            self._note = f"sorted by {columns[sort].title}; o: the other way round"
            self._show()

    def action_reverse(self) -> None:
        """Sort the other way round."""
        if self._tab in self._sorts:
            sort, descending = self._sorts[self._tab]
            self._sorts[self._tab] = (sort, not descending)
            self._show()

    def action_filter(self) -> None:
        """Ask for the words of a filter."""
        field = self._tables.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the words are typed."""
        self._words = event.value
        self._show()

    def on_input_submitted(self) -> None:
        """Back to the table, with the filter."""
        self.action_tab(self._tab)

    def action_clear_filter(self) -> None:
        """Show everything again."""
        field = self._tables.query_one("#filter", Input)
        field.value = ""
        field.remove_class("shown")
        self.action_tab(self._tab)

    def _selected(self, name: str) -> str | None:
        """What is under the cursor of this table; None, and a note, if another one is shown."""
        table = self._table(name)
        if self._tab != name or not table.row_count:
            self._tell(f"choose a {name.removesuffix('s')} first: key {TABS.index(name) + 1}")
            return None
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    def action_node(self, action: str) -> None:
        """Drain, resume or probe the node under the cursor."""
        name = self._selected("nodes")
        if name is None:
            return
        done = {"drain": "drained", "resume": "resumed", "probe": "probed"}[action]
        send = partial(self._admin.node_action, name, action)
        act = partial(self._ask, send, lambda _: self._tell(f"{done} {name}"))
        if action == "drain":
            running = self.picture.nodes.get(name, {}).get("in_flight") or 0
            question = f"Drain {name}? It gets no new requests; {running} that run may end."
            self._confirm(question, act)
        else:
            act()

    def action_cancel(self) -> None:
        """Cancel the request under the cursor."""
        id_ = self._selected("requests")
        if id_ is None:
            return
        row = (self.picture.requests or {}).get(id_, {})
        question = f"Cancel the request {row.get('request_id', id_)} of {caller_text(row)}?"
        send = partial(self._admin.request, "DELETE", f"/admin/requests/{quote(id_, safe='')}")
        done = f"cancelled {row.get('request_id')}"
        self._confirm(question, partial(self._ask, send, lambda _: self._tell(done)))

    def action_why(self) -> None:
        """Explain the request under the cursor."""
        id_ = self._selected("requests")
        if id_ is not None:
            self._ask(partial(self._admin.explanation, id_), self._explain)

    def _explain(self, found: dict[str, Any]) -> None:
        try:
            explanation = Explanation(explained(found))
        except (AttributeError, LookupError, TypeError, ValueError):
            self._tell(f"the gateway's explanation has another form ({OTHER_VERSION})")
        else:
            if not isinstance(self.screen, Explanation):  # else a second press of the key
                self.push_screen(explanation)

    def _confirm(self, question: str, action: Callable[[], None]) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                action()

        self.push_screen(Confirm(question), answered)

    def _ask(self, send: Callable[[], T], then: Callable[[T], None]) -> None:
        """Send it in a thread, since the gateway may take its time; then go on, or say why not."""

        def work() -> None:
            try:
                answer = send()
            except CommandFailed as error:
                self._call(self._tell, str(error))
            else:
                self._call(then, answer)

        self.run_worker(work, thread=True, exit_on_error=False)

    def _tell(self, words: str) -> None:
        self._note = words
        self._show()


def _problems(picture: FleetPicture, most: int, *, commands: bool = False) -> Text:
    lines = [
        Text(f"{severity}: {words}", SEVERITY_STYLES.get(severity, ""))
        for severity, words in fleet.problem_lines(picture, most, commands=commands)
    ]
    return Text("\n").join(lines)


def _fill(table: DataTable[Text], lines: list[Line], state_column: int | None = None) -> None:
    """Make these the rows of a table; only cells that differ are drawn, and the cursor stays."""
    if [row.value for row in table.rows] == [line.key for line in lines]:
        columns = list(table.columns.items())
        changed = [
            (line.key, key, cell, cell.cell_len > column.content_width)
            for line in lines
            for number, (key, column) in enumerate(columns)
            if table.get_cell(line.key, key) != (cell := _cell(line, number, state_column))
        ]
        # A column that grows is measured over all rows: once for all of them.
        if not any(wider for *_, wider in changed):
            for row, key, cell, _ in changed:
                table.update_cell(row, key, cell)
            return
    chosen = None
    if table.row_count:
        chosen = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
    top = table.scroll_y
    table.clear()
    for line in lines:
        cells = [_cell(line, column, state_column) for column in range(len(line.cells))]
        table.add_row(*cells, key=line.key)
    place = next((n for n, line in enumerate(lines) if line.key == chosen), None)
    if place is not None:
        table.move_cursor(row=place, scroll=False)
        table.scroll_to(y=top, animate=False)


def _cell(line: Line, column: int, state_column: int | None) -> Text:
    words = line.cells[column]
    return Text(words, STATE_COLOURS.get(words, "") if column == state_column else "")
