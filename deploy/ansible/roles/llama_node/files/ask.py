"""Reads a server's /props, with the key of a file: `python3 - URL [KEYS]`.

The key passes through no command line and no variable of the play.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

TIMEOUT = 30.0  # seconds


def main(url: str, keys: str = "") -> dict[str, object]:
    """The properties that the gateway's inventory names. Raises OSError while it doesn't answer."""
    request = urllib.request.Request(f"{url}/props")
    if keys:
        request.add_header("Authorization", f"Bearer {Path(keys).read_text().split()[0]}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=TIMEOUT) as answer:
        told = json.load(answer)
    if told.get("role") == "router":  # its models are listed elsewhere, and have slots once loaded
        return {"model_alias": "", "total_slots": 0}
    return {"model_alias": told.get("model_alias", ""), "total_slots": told["total_slots"]}


if __name__ == "__main__":
    try:
        told = main(*sys.argv[1:])
    except (OSError, ValueError, KeyError, IndexError) as error:
        sys.exit(f"{sys.argv[1]}/props: {error}")
    sys.stdout.write(json.dumps(told) + "\n")
