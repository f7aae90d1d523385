"""Slots whose prompts are saved in files and restored, as with `--slot-save-path`.

A file is accepted by any model, as real servers accept those of other weights in the same shape;
then the answers are wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs

from tests.emulator.prompt_cache import Tokens, token_count
from tests.emulator.request_body import RefusedError, bad_request

if TYPE_CHECKING:
    from tests.emulator.node import EmulatedNode

_HEAD, _TOKEN = 40, 2064  # bytes
_UNREADABLE = "Unable to restore slot: No available space in KV cache or invalid slot save file"


class SlotFile(NamedTuple):
    weights: str  # of the model that has read it
    tokens: Tokens

    @property
    def size(self) -> int:
        return _HEAD + _TOKEN * token_count(self.tokens)


async def slot_action(
    node: EmulatedNode, path: str, query: str, body: dict[str, Any]
) -> dict[str, Any]:
    """Saves, restores or erases a slot, once it is idle. Raises `RefusedError`."""
    files = node.slot_files
    if files is None:
        message = "This server does not support slots action. Start it with `--slot-save-path`"
        raise RefusedError(501, "not_supported_error", message)
    text = path.removeprefix("/slots/")
    if not text.lstrip("-").isdigit():
        raise bad_request("Invalid slot ID")
    action = parse_qs(query).get("action", [""])[0]
    if action not in {"save", "restore", "erase"}:
        raise bad_request("Invalid action")
    number = int(text)
    slot = node.slots.slots[number % len(node.slots.slots)]  # another one for an unknown number
    await node.until(lambda: not slot.busy, limit=3600)
    if action == "erase":
        erased, slot.contents = token_count(slot.contents), b""
        return {"id_slot": number, "n_erased": erased}
    if "filename" not in body:
        raise bad_request("[json.exception.out_of_range.403] key 'filename' not found")
    name = str(body["filename"])
    if not name or "/" in name or ".." in name:
        raise bad_request("Invalid filename")
    answer = {"id_slot": number, "filename": name}
    if action == "save":
        file = files[name] = SlotFile(slot.foreign or node.weights, slot.contents)
        figures = {"n_saved": token_count(file.tokens), "n_written": file.size}
        return {**answer, **figures, "timings": {"save_ms": 0.5}}
    slot.contents = b""
    if (found := files.get(name)) is None:
        raise bad_request(_UNREADABLE)
    slot.contents = found.tokens
    slot.foreign = found.weights if found.weights != node.weights else ""
    figures = {"n_restored": token_count(found.tokens), "n_read": found.size}
    return {**answer, **figures, "timings": {"restore_ms": 0.5}}
