"""A stream's events made into the one answer that the server would have given without a stream.

A plain generation runs upstream as a stream, so that a client's leaving frees the slot at once, a
silent node is noticed after a token's time, and a dead one can be followed by another. Here its
events become the plain answer, field by field as llama.cpp writes it.
"""

from gateway.relay.assembly.collected import Collected
from gateway.relay.assembly.events import NotAssembled, read_events
from gateway.relay.assembly.forms import FORMS, Form, asked, fits

__all__ = ["FORMS", "Collected", "Form", "NotAssembled", "asked", "fits", "read_events"]
