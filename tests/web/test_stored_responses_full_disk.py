"""A disk that fills while a response in the background is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_disk import run_on_small_disk

ON_A_FULL_DISK = """
import asyncio, sys
from pathlib import Path
import openai
from gateway.stored import background_requests
from tests.emulator import EmulatedNode
from tests.web.test_background import ASK, client, ended, gateway

background_requests.LEASE_SECONDS = 1.0  # after which it is tried again

def fill(path):
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

async def main(disk, folder):
    node = EmulatedNode(decode_tps=40, answer_tokens=1000)
    kept = {"folder": str(disk / "batches")}
    ask = {**ASK, "max_output_tokens": 120, "background": True}
    async with gateway(folder, node, batches=kept) as running, client(running) as alice:
        like = await ended(alice, (await alice.responses.create(**ask)).id)
        seen, broken = [], False
        try:
            async for event in await alice.responses.create(**ask, stream=True):
                seen.append(event)
                if len(seen) == 12:
                    fill(disk / "fill")
        except openai.APIConnectionError:
            broken = True
        assert broken, seen[-1].type
        id_ = seen[0].response.id
        refused = None
        try:
            await alice.responses.create(**ask)
        except openai.InternalServerError as error:
            refused = error
        assert refused is not None
        assert (refused.status_code, refused.code) == (507, "storage_full")
        assert refused.response.headers["x-should-retry"] == "false"
        assert (await alice.responses.retrieve(id_)).status in {"queued", "in_progress"}
        (disk / "fill").unlink()
        after = await ended(alice, id_)
        assert after.status == like.status == "incomplete"
        assert after.output_text == like.output_text
        assert after.usage == like.usage, (after.usage, like.usage)
        whole = [e async for e in await alice.responses.retrieve(id_, stream=True)]
        assert [e.sequence_number for e in whole] == list(range(len(whole)))
        # What was seen before is the beginning of it.
        assert [e.to_dict() for e in whole[: len(seen)]] == [e.to_dict() for e in seen]

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
print("done", end="")
"""


@pytest.mark.slow
def test_a_response_whose_disk_fills_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk, folder = tmp_path / "disk", tmp_path / "gateway"
    disk.mkdir()
    folder.mkdir()
    # 64 MiB of it stay free.
    assert run_on_small_disk(ON_A_FULL_DISK, "66m", disk, folder) == "done"
