"""Makes the running gateway read its files again, and waits until it has: `PYTHON - SETTINGS`.

The admin key is read here: it passes through no command line and no variable of the play.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

import yaml  # of the gateway's own environment

TIMEOUT = 60.0  # seconds
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def main(path: str) -> None:
    """Request the reload. Raises OSError if it refuses the files or doesn't answer."""
    admin = (yaml.safe_load(Path(path).read_text()) or {}).get("admin") or {}
    host = admin.get("host", "127.0.0.1")
    host = EVERYWHERE.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{host}:{admin.get('port', 8001)}/admin/reload"
    request = urllib.request.Request(url, method="POST")
    if admin.get("key_file"):
        key = (Path(path).parent / admin["key_file"]).read_text().strip()
        request.add_header("Authorization", f"Bearer {key}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=TIMEOUT):
        pass


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except urllib.error.HTTPError as error:
        sys.exit(f"the gateway refuses to read its files again: {error}: {error.read().decode()}")
    except OSError as error:
        sys.exit(f"the gateway does not answer: {error}")
