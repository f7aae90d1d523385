"""The paths that reach a node, and what is to be known of each."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.proxy.api.base import Api
from gateway.proxy.api.chat import CHAT, COMPLETIONS
from gateway.proxy.api.messages import MESSAGES
from gateway.proxy.api.native import NATIVE
from gateway.proxy.api.responses import RESPONSES
from gateway.proxy.inbound.parsed_body import MISSING, ParsedBody
from gateway.request import Endpoint


@dataclass(frozen=True, slots=True)
class Route:
    """One routed path."""

    path: str
    """As nodes know it."""
    api: Api
    endpoint: Endpoint = "chat"
    prompt_field: str | None = None
    """The body's field that holds the prompt."""
    max_tokens_field: str | None = None
    """The body's field that bounds the answer, in tokens."""
    generates: bool = False
    """Generates, so that it can stream."""
    takes_slot: bool = True
    """Takes a slot of the node; tokenizing and counting don't."""
    llama_cpp_only: bool = False
    """Only llama.cpp's server knows it."""
    multipart: bool = False
    """Its body is a form with a file (multipart/form-data), no JSON."""


_ROUTES = (
    Route("/v1/chat/completions", CHAT, "chat", "messages", "max_tokens", generates=True),
    Route("/v1/completions", COMPLETIONS, "chat", "prompt", "max_tokens", generates=True),
    Route("/v1/messages", MESSAGES, "chat", "messages", "max_tokens", generates=True),
    Route("/v1/responses", RESPONSES, "chat", "input", "max_output_tokens", generates=True),
    Route("/v1/embeddings", CHAT, "embeddings", "input"),
    Route("/v1/rerank", CHAT, "rerank", "documents"),
    Route("/v1/reranking", CHAT, "rerank", "documents"),
    Route("/v1/audio/transcriptions", CHAT, "audio", multipart=True),
    Route("/v1/responses/input_tokens", CHAT, "chat", "input", takes_slot=False),
    Route("/v1/messages/count_tokens", MESSAGES, "chat", "messages", takes_slot=False),
    Route(
        "/v1/chat/completions/input_tokens",
        CHAT,
        "chat",
        "messages",
        takes_slot=False,
        llama_cpp_only=True,
    ),
    Route(
        "/completion", NATIVE, "chat", "prompt", "n_predict", generates=True, llama_cpp_only=True
    ),
    Route(
        "/infill",
        NATIVE,
        "infill",
        "input_prefix",
        "n_predict",
        generates=True,
        llama_cpp_only=True,
    ),
    Route("/embedding", NATIVE, "embeddings", "content", llama_cpp_only=True),
    Route("/tokenize", NATIVE, "chat", "content", takes_slot=False, llama_cpp_only=True),
    Route("/detokenize", NATIVE, "chat", "tokens", takes_slot=False, llama_cpp_only=True),
    Route("/apply-template", NATIVE, "chat", "messages", takes_slot=False, llama_cpp_only=True),
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


BASIC_GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/completion"})
"""Where a node says 501, it writes no answers at all."""


def is_infill(route: Route, parsed: ParsedBody) -> bool:
    """Whether this fills in the middle of a text, as editors ask at each pause of typing."""
    if route.endpoint == "infill":
        return True
    suffix = parsed.suffix
    return (
        suffix is not MISSING
        and route.prompt_field == "prompt"
        and (len(suffix) > len(b"null") or bytes(suffix) not in _NO_SUFFIX)
    )


_NO_SUFFIX = (b"null", b'""')
