"""Everything on the public listener that is not relayed: models, health, and what isn't there."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway import errors
from gateway.access.callers import identify_caller
from gateway.config.listeners import CorsSpec
from gateway.proxy.inbound import routes as relayed
from gateway.proxy.inbound.routes import ROUTES
from gateway.scheduling.scheduler import Scheduler
from gateway.web.asgi import JsonResponse, asgi_app, truncate_echo
from gateway.web.handler import ProxyHandler
from gateway.web.models import VisibleModels, add_anthropic_fields, list_response, props_response
from gateway.web.readiness import readiness_error
from gateway.web.request_context import may_name_nodes
from gateway.web.response_heads import EXPOSED_HEADERS


def public_app(handler: ProxyHandler, scheduler: Scheduler) -> ASGIApp:
    """The public listener's application, for all but the POSTs to routed paths.

    Those go from the protocol straight to `edge.serve`; here they only stand for the other
    methods to be told wrong.
    """
    site = _Site(handler, scheduler, created=int(time.time()))
    told = [
        Route(path, endpoint, methods=["GET"])
        for path, endpoint in (
            ("/v1/models", site.models),
            ("/models", site.models),
            ("/v1/models/{id:path}", site.model),
            ("/models/{id:path}", site.model),
            ("/props", site.props),
            ("/health", site.health),
            ("/v1/health", site.health),
            ("/ready", site.ready),
        )
    ]
    routed = [Route(path, _served_by_the_protocol, methods=["POST"]) for path in relayed.ROUTES]
    return asgi_app([*told, *routed], handler.next_id, suggest=suggest_path)


def with_cors(app: ASGIApp, spec: CorsSpec) -> ASGIApp:
    """`app` for web pages of other origins as well; stands around everything else."""
    return CORSMiddleware(
        app,
        allow_origins=spec.origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=spec.headers,
        allow_credentials=spec.credentials,
        expose_headers=EXPOSED_HEADERS,
        max_age=int(spec.max_age),
    )


async def _served_by_the_protocol(_: Request) -> Response:
    raise AssertionError("POSTs to routed paths do not come here")


@dataclass(frozen=True, slots=True)
class _Site:
    """The paths that the gateway answers itself."""

    edge: ProxyHandler
    scheduler: Scheduler
    created: int
    """What every model says of its age: seconds since 1970."""

    async def models(self, request: Request) -> Response:
        catalogue = self._catalogue(request)
        cards = [catalogue.model_object(name, self.created) for name in catalogue.visible_names()]
        return JsonResponse(list_response(cards, anthropic=_is_anthropic(request)))

    async def model(self, request: Request) -> Response:
        catalogue = self._catalogue(request)
        if not request.path_params["id"]:
            raise errors.not_found("/v1/models/", suggest_path("/v1/models/"))
        name = self._checked(request, catalogue, request.path_params["id"])
        card = catalogue.model_object(name, self.created)
        return JsonResponse(add_anthropic_fields(card) if _is_anthropic(request) else card)

    async def props(self, request: Request) -> Response:
        catalogue = self._catalogue(request)
        name = request.query_params.get("model") or self._default(catalogue)
        names = (
            catalogue.visible_names() if name is None else [self._checked(request, catalogue, name)]
        )
        return JsonResponse(props_response(catalogue.nodes_serving(names)))

    async def health(self, _: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        error = readiness_error(self.edge.fleet, self.scheduler, closing=self.edge.closing)
        if error is not None:
            raise error
        return JsonResponse({"status": "ready"})

    def _catalogue(self, request: Request) -> VisibleModels:
        """The models that this caller may use. Raises: GatewayError (401, 503)."""
        snapshot, client = self.edge.config, request.client
        caller = identify_caller(
            request.scope["headers"],
            client.host if client else None,
            snapshot.key_ring,
            allow_anonymous=snapshot.settings.allow_anonymous,
            loopback_listener=snapshot.loopback,
            trusted_proxies=snapshot.settings.listen.trusted_proxies,
            locked=snapshot.anonymous_access.locked,
        )
        if snapshot.origin_policy is not None and caller.anonymous:
            server = request.scope.get("server")
            own_address = server[0] if server else None
            snapshot.origin_policy.check(request.scope["headers"], own_address, is_post=False)
        if not self.edge.fleet.first_probes_done.is_set():
            raise errors.starting("The nodes are being asked what they serve.")
        return VisibleModels(self.edge.fleet, snapshot.rules.model_aliases, caller)

    def _checked(self, request: Request, catalogue: VisibleModels, name: str) -> str:
        """The name, if it is one of the catalogue. Raises: GatewayError (404, 503)."""
        if name in catalogue:
            return name
        if catalogue.caller.may_use(name):
            error = self.edge.fleet.model_index.not_found_error(name)
            if error.code == "no_node":
                raise error.reveal_nodes() if self._exposes(request) else error
        raise errors.model_not_found(truncate_echo(name), catalogue.visible_names())

    def _exposes(self, request: Request) -> bool:
        snapshot = self.edge.config
        return may_name_nodes(
            request.scope["headers"], snapshot.settings, loopback=snapshot.loopback
        )

    def _default(self, catalogue: VisibleModels) -> str | None:
        name = self.edge.config.settings.default_model
        return name if name is not None and name in catalogue else None


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


LONGEST_PATH = 1024
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


def suggest_path(path: str) -> str:
    """What to use instead of `path`, in a sentence or two."""
    path = _SLASHES.sub("/", path[:LONGEST_PATH]).rstrip("/")
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
    route = ROUTES.get(served)
    if route is not None and route.api.clients_add_v1:
        return f"Use {served}: set base_url to http://HOST:PORT (clients of Anthropic add /v1)."
    if served.startswith("/v1/"):
        return f"Use {served}: set base_url to http://HOST:PORT/v1."
    return f"Use {served} at http://HOST:PORT."
