"""Runs `llama-gateway` with another policy than its own, to compare them.

python -m tests.bench.scheduling.with_policy least_loaded serve --nodes ...
"""

from __future__ import annotations

import sys

from gateway.cli import main
from gateway.schedule.core.selection import POLICIES

if __name__ == "__main__":
    POLICIES["least_finish"] = POLICIES[sys.argv.pop(1)]
    main()
