"""`python -m tests.stored.claimer URL LIMIT [hold]`: a process that claims lines and prints them.

With `hold` it claims once, and keeps what it has until it is killed; else it claims all there are.
"""

from __future__ import annotations

import sys
import time

from gateway.callers.processes import ProcessIdentity, register
from gateway.store.store import Store
from tests.store.stores import opened
from tests.stored.stored_rows import NOW, claim, once_unlocked

EMPTY_LOOKS = 20
"""Looks in vain after which nothing is left: rows that another claims just now are passed over."""


def claim_all(store: Store, process: str, limit: int) -> None:
    """Claim until nothing is left."""
    empty = 0
    while empty < EMPTY_LOOKS:
        rows = once_unlocked(lambda: claim(store, process, limit))
        print(*(row.id for row in rows), flush=True)
        empty = 0 if rows else empty + 1


def main(url: str, limit: int, *, hold: bool) -> None:
    """Claim as a registered process."""
    own = ProcessIdentity.of_this_process(NOW)
    with opened(url) as store:
        store.run_now(lambda connection: register(connection, own, NOW))
        if not hold:
            claim_all(store, own.id, limit)
            return
        print(*(row.id for row in claim(store, own.id, limit)), flush=True)
        while True:
            time.sleep(60.0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), hold="hold" in sys.argv[3:])
