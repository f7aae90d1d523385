"""`python -m tests.stored.claimer URL LIMIT`: a process that claims lines and prints them.

It keeps what it has until it is killed.
"""

from __future__ import annotations

import sys
import time

from gateway.callers.processes import ProcessIdentity, register
from tests.store.stores import opened
from tests.stored.stored_rows import NOW, claim


def main(url: str, limit: int) -> None:
    """Claim as a registered process."""
    own = ProcessIdentity.of_this_process(NOW)
    with opened(url) as store:
        store.run_now(lambda connection: register(connection, own, NOW))
        print(*(row.id for row in claim(store, own.id, limit)), flush=True)
        while True:
            time.sleep(60.0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
