"""The paths that reach a node, and what is to be known of each."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.relay.dialects import CHAT, COMPLETIONS, MESSAGES, NATIVE, RESPONSES, Dialect
from gateway.relay.peek import NOTHING, Peek
from gateway.request import Endpoint


@dataclass(frozen=True, slots=True)
class Route:
    """One routed path."""

    path: str
    """As nodes know it."""
    dialect: Dialect
    endpoint: Endpoint = "chat"
    prompt: str | None = None
    """The body's field that holds the prompt."""
    limit: str | None = None
    """The body's field that bounds the answer, in tokens."""
    streams: bool = False
    """Generates, so that it can stream."""
    occupies: bool = True
    """Takes a slot of the node; tokenizing and counting don't."""
    native: bool = False
    """Only llama.cpp's server knows it."""
    form: bool = False
    """Its body is a form with a file (multipart/form-data), no JSON."""


_ROUTES = (
    Route("/v1/chat/completions", CHAT, "chat", "messages", "max_tokens", streams=True),
    Route("/v1/completions", COMPLETIONS, "chat", "prompt", "max_tokens", streams=True),
    Route("/v1/messages", MESSAGES, "chat", "messages", "max_tokens", streams=True),
    Route("/v1/responses", RESPONSES, "chat", "input", "max_output_tokens", streams=True),
    Route("/v1/embeddings", CHAT, "embeddings", "input"),
    Route("/v1/rerank", CHAT, "rerank", "documents"),
    Route("/v1/reranking", CHAT, "rerank", "documents"),
    Route("/v1/audio/transcriptions", CHAT, "audio", form=True),
    Route("/v1/responses/input_tokens", CHAT, "chat", "input", occupies=False),
    Route("/v1/messages/count_tokens", MESSAGES, "chat", "messages", occupies=False),
    Route(
        "/v1/chat/completions/input_tokens",
        CHAT,
        "chat",
        "messages",
        occupies=False,
        native=True,
    ),
    Route("/completion", NATIVE, "chat", "prompt", "n_predict", streams=True, native=True),
    Route("/infill", NATIVE, "infill", "input_prefix", "n_predict", streams=True, native=True),
    Route("/embedding", NATIVE, "embeddings", "content", native=True),
    Route("/tokenize", NATIVE, "chat", "content", occupies=False, native=True),
    Route("/detokenize", NATIVE, "chat", "tokens", occupies=False, native=True),
    Route("/apply-template", NATIVE, "chat", "messages", occupies=False, native=True),
)

_WITHOUT_V1 = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/reranking",
)

ROUTES: dict[str, Route] = {route.path: route for route in _ROUTES}
ROUTES.update({path.removeprefix("/v1"): ROUTES[path] for path in _WITHOUT_V1})
"""Every path that clients may ask for."""


PLAINEST = frozenset({"/v1/chat/completions", "/v1/completions", "/completion"})
"""Where a node says 501, it writes no answers at all."""


def is_editing(route: Route, peeked: Peek) -> bool:
    """Whether this fills in the middle of a text, as editors ask at each pause of typing."""
    if route.endpoint == "infill":
        return True
    suffix = peeked.suffix
    return (
        suffix is not NOTHING
        and route.prompt == "prompt"
        and (len(suffix) > len(b"null") or bytes(suffix) not in _NO_SUFFIX)
    )


_NO_SUFFIX = (b"null", b'""')
