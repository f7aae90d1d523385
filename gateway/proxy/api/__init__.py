"""How each API speaks: one module per dialect, all of the shape of `Dialect`."""

from gateway.proxy.api.base import Api, StreamEventKind
from gateway.proxy.api.chat import CHAT, COMPLETIONS
from gateway.proxy.api.messages import MESSAGES
from gateway.proxy.api.native import NATIVE
from gateway.proxy.api.responses import RESPONSES

__all__ = ["CHAT", "COMPLETIONS", "MESSAGES", "NATIVE", "RESPONSES", "Api", "StreamEventKind"]
