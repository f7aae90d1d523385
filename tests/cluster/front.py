"""Three members behind HAProxy as one program: a front of the benches.

`python -m tests.cluster.front NODES PORT FOLDER`: over the nodes of this inventory, at this port
of 127.0.0.1, until SIGTERM. Members have addresses of loopback, and PostgreSQL is started too.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.certificates import Authority
from tests.cluster.machines import new_member, running_haproxy
from tests.cluster.network import Machine
from tests.postgres import running_postgres

MEMBERS = 3


async def serve(nodes: Sequence[Mapping[str, Any]], port: int, folder: Path) -> None:
    """Run all of it until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    settings = {"listen": {"edges": 1}, "allow_anonymous": True}
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(running_postgres()).new_database()
        authority = Authority(folder / "certificates")
        members = [
            new_member(
                Machine(f"gw-{number}", f"127.0.0.{10 + number}", is_own=False),
                *(folder, authority, store, settings, nodes, "operators"),
            )
            for number in range(MEMBERS)
        ]
        for member in members:
            member.start()
            stack.callback(member.end_at_once)
        for member in members:
            await member.ready()
        stack.enter_context(running_haproxy(folder, members, "127.0.0.1", port))
        await ended.wait()


def main(arguments: Sequence[str]) -> None:
    """Serve as these arguments say."""
    nodes, port, folder = arguments
    inventory = yaml.safe_load(Path(nodes).read_text())["nodes"]
    asyncio.run(serve(inventory, int(port), Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
