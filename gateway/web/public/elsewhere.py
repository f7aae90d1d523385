"""What to use instead of a path that is not served: part of the 404 that its client gets.

Nothing of what the client sent is repeated but names that were found in these tables.
"""

from __future__ import annotations

import re

from gateway.relay.routes import ROUTES

LONGEST = 1024
"""Characters of a path that are looked at."""

_OWN = ("/v1/models", "/props", "/health", "/ready")
_SERVED = sorted({route.path for route in ROUTES.values()} | set(_OWN), key=len, reverse=True)
"""Each path by its full name, longest first, so that the whole of it is found."""

_OLLAMA = {
    "chat": "/v1/chat/completions",
    "generate": "/v1/completions",
    "tags": "/v1/models",
    "show": "/v1/models",
    "ps": "/v1/models",
    "version": "/v1/models",
    "embed": "/v1/embeddings",
    "embeddings": "/v1/embeddings",
}
_SHORT = {
    "": "/v1/chat/completions",
    "/v1": "/v1/chat/completions",
    "/chat": "/v1/chat/completions",
    "/v1/chat": "/v1/chat/completions",
    "/generate": "/v1/completions",
    "/v1/generate": "/v1/completions",
    "/v1/complete": "/v1/messages",
    "/v1/message": "/v1/messages",
    "/messages": "/v1/messages",
    "/v1/embed": "/v1/embeddings",
    "/model": "/v1/models",
    "/v1/model": "/v1/models",
    "/v1/embedding": "/v1/embeddings",
    "/audio/transcriptions": "/v1/audio/transcriptions",
}
_ABSENT = {
    "images": "images are not made",
    "videos": "videos are not made",
    "audio/speech": "speech is not made",
    "audio/translations": "sound is not translated; /v1/audio/transcriptions writes it down",
    "audio": "of sound there is only /v1/audio/transcriptions",
    "realtime": "there are no realtime sessions; /v1/chat/completions can stream",
    "moderations": "nothing is moderated",
    "fine_tuning": "models are not trained",
    "fine-tunes": "models are not trained",
    "assistants": "there are no assistants; /v1/chat/completions and /v1/responses take tools",
    "threads": "no conversation is kept; send it whole to /v1/chat/completions",
    "conversations": "no conversation is kept; send it whole to /v1/responses",
    "responses": "no response is kept; send the conversation whole to /v1/responses",
    "chat/completions": "no chat is kept; send it whole to /v1/chat/completions",
    "vector_stores": "nothing is stored; /v1/embeddings makes vectors",
    "files": "no files are kept; send pictures and texts within the request",
    "uploads": "no files are kept; send pictures and texts within the request",
    "batches": "there are no batches; send requests with the header 'X-Priority: batch'",
    "messages/batches": "there are no batches; send requests with the header 'X-Priority: batch'",
    "containers": "no code is run",
    "evals": "nothing is evaluated",
    "organization": "there is no organization",
    "edits": "the edits API is no more; use /v1/chat/completions",
    "engines": "engines are no more; name the model in the body of /v1/completions",
}
"""Parts of OpenAI's API that llama.cpp's servers don't have, without `/v1/`."""
_PRIVATE = frozenset({"/slots", "/metrics", "/v1/slots", "/v1/metrics", "/lora-adapters"})

_TAILS = frozenset({"/chat/completions", "/completions", "/embeddings", "/rerank", "/models"})
"""By these a path is known without `/v1` as well."""
_MAIN = (
    "Served are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, "
    "/v1/embeddings, /v1/rerank and /v1/models."
)

_SLASHES = re.compile("/{2,}")
_VERSIONS = re.compile("(?:/v1)+(?=/|$)")
_AZURE = re.compile("/openai/(?:deployments/[^/]+|v1)(/.+)")
_GEMINI = re.compile("/v1(?:beta|alpha)/models/")


def instead(path: str) -> str:
    """What to use instead of `path`, in a sentence or two."""
    path = _SLASHES.sub("/", path[:LONGEST]).rstrip("/")
    azure = _AZURE.fullmatch(path)
    if azure is not None:
        use = _use(_served(azure[1]) or "/v1/chat/completions")
        return f"Azure's paths are not served. {use} The deployment's name is the 'model'."
    if path.startswith("/api/") and path.removeprefix("/api/") in _OLLAMA:
        return f"Ollama's API is not served. {_use(_OLLAMA[path.removeprefix('/api/')])}"
    if _GEMINI.match(path) is not None:
        return f"Gemini's API is not served. {_use('/v1/chat/completions')}"
    if path in _PRIVATE:
        return "It would tell of other people's requests; the admin listener has /metrics."
    path = _VERSIONS.sub("/v1", path, count=1)
    served = _served(path)
    if served is not None:
        return _use(served)
    rest = path.removeprefix("/v1").removeprefix("/")
    for name, why in _ABSENT.items():
        if rest == name or rest.startswith(f"{name}/"):
            return f"{why[0].upper()}{why[1:]}. {_MAIN}"
    return _MAIN


def _served(path: str) -> str | None:
    """The path that this one is, or ends with, whatever stands before it."""
    if path in _SHORT:
        return _SHORT[path]
    for served in _SERVED:
        short = served.removeprefix("/v1")
        if path in {served, short} or path.endswith((served, *_TAILS.intersection({short}))):
            return served
    return None


def _use(served: str) -> str:
    if served.startswith("/v1/messages"):
        return f"Use {served}: set base_url to http://HOST:PORT (clients of Anthropic add /v1)."
    if served.startswith("/v1/"):
        return f"Use {served}: set base_url to http://HOST:PORT/v1."
    return f"Use {served} at http://HOST:PORT."
