"""One module for each API's shapes, copied field by field from a real server (b11549)."""

from __future__ import annotations

from tests.emulator.dialects.answer import Answer, Dialect, Told
from tests.emulator.dialects.chat import Chat
from tests.emulator.dialects.completions import Completions
from tests.emulator.dialects.messages import Messages
from tests.emulator.dialects.native import Native
from tests.emulator.dialects.responses import Responses
from tests.emulator.prompts import DialectName

DIALECTS: dict[DialectName, type[Dialect]] = {
    "chat": Chat,
    "completions": Completions,
    "messages": Messages,
    "native": Native,
    "responses": Responses,
}

__all__ = ["DIALECTS", "Answer", "Dialect", "Told"]
