"""Draws README's pictures of the slots and of the bars: `python -m tests.pictures [--record]`.

The slots are drawn from docs/images/slot-timeline.json, the bars from docs/scheduling-results.md.
`--record` makes that recording anew first: three real llama.cpp servers, a minute. A test says when
a picture is not that of its figures.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from tests.pictures import bars, timeline
from tests.pictures.recording import Recording, record

DOCS = Path(__file__).resolve().parents[2] / "docs"
IMAGES = DOCS / "images"
RECORDING = IMAGES / "slot-timeline.json"


def drawn() -> dict[Path, str]:
    """Return each picture's file, and what its figures make of it."""
    run = msgspec.json.decode(RECORDING.read_bytes(), type=Recording)
    results = (DOCS / "scheduling-results.md").read_text()
    return {
        IMAGES / "slot-timeline.svg": timeline.picture(run),
        IMAGES / "answered-sooner.svg": bars.picture(results),
    }


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--record"]):
        raise SystemExit(__doc__)
    if sys.argv[1:]:
        made = msgspec.json.encode(asyncio.run(record()))
        RECORDING.write_bytes(msgspec.json.format(made, indent=1) + b"\n")
    for path, picture in drawn().items():
        path.write_text(picture)
        print(f"{path.name}: {len(picture):,} bytes")
