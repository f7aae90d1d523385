"""How each API speaks: one module per dialect, all of the shape of `Dialect`."""

from gateway.relay.dialects.base import Dialect, Part
from gateway.relay.dialects.chat import CHAT, COMPLETIONS
from gateway.relay.dialects.messages import MESSAGES
from gateway.relay.dialects.native import NATIVE
from gateway.relay.dialects.responses import RESPONSES

__all__ = ["CHAT", "COMPLETIONS", "MESSAGES", "NATIVE", "RESPONSES", "Dialect", "Part"]
