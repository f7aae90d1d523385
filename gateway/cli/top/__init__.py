"""`llama-gateway top`: the running fleet, live in the terminal."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import TYPE_CHECKING

from gateway.cli import options
from gateway.cli.client import AdminFlags
from gateway.cli.options import examples_epilog, flag
from gateway.cli.terminal import CommandFailed, print_json, print_note, print_table

if TYPE_CHECKING:
    from gateway.cli.client import AdminClient
    from gateway.cli.top.fleet import FleetPicture


EXAMPLES = examples_epilog(
    ("llama-gateway top", "nodes, queue, requests and problems, live; q ends it"),
    ("llama-gateway top --once", "the same once, for a script or a mail"),
    ("llama-gateway top --admin-url http://10.0.0.2:8001 --admin-key-file k", "another machine's"),
)


def top(
    *,
    gateway: AdminFlags,
    once: bool = flag.switch("--once", "Print the state once; the default in a pipe."),
    as_json: bool = options.JSON,
) -> None:
    """Show the running gateway: problems first, nodes, queue and requests, once a second.

    Keys: 1 nodes, 2 queue, 3 requests, 4 problems; s sorts by the next column, o turns the order
    round, / filters; d drains the node under the cursor, r resumes it, p probes it; c cancels the
    request under the cursor, w explains it; q ends. What d, r, p, c and w do needs the role
    operator.

    The arrow keys reach the columns beyond the screen's width, host and labels among them; / finds
    words of any column, `rack=b` too.

    SLOTS shows each slot: R reads a prompt, W writes, H is held after its client has left, o is
    used by another client of the server, and a dot is free. A percentage behind a speed compares it
    with the node's own past.
    """
    with gateway.connect() as admin:
        if once or as_json or not sys.stdout.isatty():
            _print(_read_once(admin), as_json=as_json)
            return
        if importlib.util.find_spec("textual") is None:
            from gateway.system import install_command

            raise CommandFailed(
                f"the live screen needs Textual: {install_command('tui')}; --once works without it"
            )
        # A key that is refused is told here, and not on a screen.
        _read_once(admin)
        from gateway.cli.top.app import Top

        Top(admin, time.monotonic).run()


def _read_once(admin: AdminClient) -> FleetPicture:
    from gateway.cli.top.fleet import LIVE_PATH, FleetPicture

    picture = FleetPicture()
    for event, data in admin.events(LIVE_PATH):
        picture.apply(event, data)
        if event == "snapshot":
            return picture
    raise CommandFailed(f"the gateway at {admin.url} has shown nothing; is it shutting down?")


def _print(picture: FleetPicture, *, as_json: bool) -> None:
    from gateway.cli.top import fleet

    if as_json:
        requests, keys = picture.requests, ("class", "model", "waited", "expected_start")
        told = {
            "at": picture.at,
            "summary": picture.summary,
            "problems": picture.problems,
            "nodes": list(picture.nodes.values()),
            "waiting": [dict(zip(keys, one, strict=False)) for one in picture.waiting],
            "requests": None if requests is None else list(requests.values()),
        }
        print_json(told)
        return
    print(fleet.headline(picture))
    for severity, words in fleet.problem_lines(picture, len(picture.problems)):
        print(f"{severity}: {words}")
    print()
    titles = [column.title for column in fleet.NODE_COLUMNS]
    print_table(titles, [line.cells for line in fleet.node_lines(picture)], state_column=1)
    if picture.waiting:
        print()
        print_table(fleet.QUEUE_TITLES, [line.cells for line in fleet.queue_lines(picture)])
    if picture.requests is None:
        print_note("requests are shown to keys of the role operator")
    elif picture.requests:
        print()
        titles = [column.title for column in fleet.request_columns(picture.at)]
        print_table(titles, [line.cells for line in fleet.request_lines(picture)])
