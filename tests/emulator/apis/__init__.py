"""The answers in the form of each API, a module each, with the fields of a real server (b11549)."""

from __future__ import annotations

from tests.emulator.apis.answer import Answer, Api, ResponseState
from tests.emulator.apis.chat import Chat
from tests.emulator.apis.completions import Completions
from tests.emulator.apis.messages import Messages
from tests.emulator.apis.native import Native
from tests.emulator.apis.responses import Responses
from tests.emulator.request_body import ApiName

APIS: dict[ApiName, type[Api]] = {
    "chat": Chat,
    "completions": Completions,
    "messages": Messages,
    "native": Native,
    "responses": Responses,
}

__all__ = ["APIS", "Answer", "Api", "ResponseState"]
