"""The route table: every path that reaches a node, and its API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.api.base import (
    CHAT_COUNT,
    DETOKENIZE,
    EMBEDDINGS,
    NATIVE_EMBEDDINGS,
    RANKING,
    RELAYED,
    TEMPLATE,
    TOKENIZE,
    TRANSCRIPTIONS,
    Api,
    Page,
)
from gateway.api.chat import CHAT
from gateway.api.completions import COMPLETIONS
from gateway.api.messages import COUNT_TOKENS, MESSAGES
from gateway.api.native import INFILL, NATIVE
from gateway.api.ollama import OLLAMA, OLLAMA_CHAT, OLLAMA_EMBED, OLLAMA_EMBEDDINGS, OLLAMA_GENERATE
from gateway.api.ollama import PAGES as OLLAMA_PAGES
from gateway.api.responses import RESPONSES, RESPONSES_COUNT
from gateway.config.settings import Settings
from gateway.terms import Endpoint


@dataclass(frozen=True, slots=True)
class Route:
    """One routed path."""

    path: str  # The path as nodes know it; if the API translates, as clients do
    api: Api
    endpoint: Endpoint = "chat"
    generates: bool = False  # Whether it generates text, and so can stream
    takes_slot: bool = True  # Whether it takes a slot of the node; tokenizing and counting don't
    llama_cpp_only: bool = False  # Whether only llama.cpp's server has it
    multipart: bool = False
    """Whether its body is a form with a file (multipart/form-data), not JSON."""
    prompt_field: str | None = field(init=False)
    """The body's field that holds the prompt: the API's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_field", self.api.prompt_field)


_ROUTES = (
    Route("/v1/chat/completions", CHAT, generates=True),
    Route("/v1/completions", COMPLETIONS, generates=True),
    Route("/v1/messages", MESSAGES, generates=True),
    Route("/v1/responses", RESPONSES, generates=True),
    Route("/v1/embeddings", EMBEDDINGS, "embeddings"),
    Route("/v1/rerank", RANKING, "rerank"),
    Route("/v1/reranking", RANKING, "rerank"),
    Route("/v1/audio/transcriptions", TRANSCRIPTIONS, "audio", multipart=True),
    Route("/v1/responses/input_tokens", RESPONSES_COUNT, takes_slot=False),
    Route("/v1/messages/count_tokens", COUNT_TOKENS, takes_slot=False),
    Route("/v1/chat/completions/input_tokens", CHAT_COUNT, takes_slot=False, llama_cpp_only=True),
    Route("/completion", NATIVE, generates=True, llama_cpp_only=True),
    Route("/infill", INFILL, "infill", generates=True, llama_cpp_only=True),
    Route("/embedding", NATIVE_EMBEDDINGS, "embeddings", llama_cpp_only=True),
    Route("/tokenize", TOKENIZE, takes_slot=False, llama_cpp_only=True),
    Route("/detokenize", DETOKENIZE, takes_slot=False, llama_cpp_only=True),
    Route("/apply-template", TEMPLATE, takes_slot=False, llama_cpp_only=True),
)

_WITHOUT_V1 = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank",
    "/v1/reranking",
)  # fmt: skip

ROUTES: dict[str, Route] = {route.path: route for route in _ROUTES}

ROUTES.update({path.removeprefix("/v1"): ROUTES[path] for path in _WITHOUT_V1})
"""Every path that nodes know and clients may ask for."""

# Their requests are translated into those of `ROUTES`.
_OLLAMA_ROUTES: dict[str, Route] = {
    route.path: route
    for route in (
        Route("/api/chat", OLLAMA_CHAT, generates=True),
        Route("/api/generate", OLLAMA_GENERATE, generates=True),
        Route("/api/embed", OLLAMA_EMBED, "embeddings"),
        Route("/api/embeddings", OLLAMA_EMBEDDINGS, "embeddings"),
    )
}


def routes_of(settings: Settings) -> Mapping[str, Route]:
    """The paths that clients may ask for under these settings."""
    return {**ROUTES, **_OLLAMA_ROUTES} if settings.ollama else ROUTES


def pages_of(settings: Settings) -> tuple[Page, ...]:
    """The pages of APIs that are served under these settings."""
    return OLLAMA_PAGES if settings.ollama else ()


# llama.cpp's completion of a rendered prompt, by which a node can resume a stream of any API.
NATIVE_ROUTE = ROUTES["/completion"]


def api_of_path(path: str) -> Api:
    """The API that the errors of a path follow, which may have no route."""
    return next((api for api in (OLLAMA, MESSAGES) if api.owns_path(path)), RELAYED)
