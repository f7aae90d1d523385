"""The public listener's own paths: models, health, and errors with a suggestion for all others.

Pages for browsers, of both listeners, are files that are sent under a strict content policy. They
hold no data and need no key: what a page shows, its scripts ask for with the key that somebody
types into it. There is no build step, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import errors
from gateway.api.base import ModelSummary, Page, VisibleCatalog
from gateway.callers.callers import MOST_IDENTITY_BYTES, cache_policy_of
from gateway.callers.ended import OwnRequests, own_row
from gateway.callers.limits import Accounts
from gateway.callers.reports import CallerUsage
from gateway.callers.windows import time_text
from gateway.catalog import FleetCatalog, ServerFigures
from gateway.config.keys import NodeLabels
from gateway.config.listeners import CorsSpec
from gateway.config.scheduling import CATCH_ALL
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.http.heads import EXPOSED_HEADERS, Callers, no_store
from gateway.request.preparation import ModelAliases
from gateway.request.routes import ROUTES, pages_of, routes_of
from gateway.stored.background_requests import BackgroundRequests
from gateway.stored.batch_registry import BatchRegistry
from gateway.stored.files import FileRegistry
from gateway.stored.webhooks import WebhookTargets
from gateway.terms import Caller
from gateway.web.asgi import (
    Endpoint,
    HealthEndpoints,
    JsonResponse,
    asgi_app,
    large_json,
    listed,
    read_fields,
    routes_by_path,
)
from gateway.web.background import DeferredEndpoints, StoredResponseEndpoints
from gateway.web.batches import BatchAccess, BatchEndpoints
from gateway.web.files import FileEndpoints
from gateway.web.handler import RequestHandler
from gateway.web.message_batches import MessageBatchEndpoints


class KeptForCallers(NamedTuple):
    """What callers may have of the gateway's store; None: there is no store."""

    files: FileRegistry | None = None
    batches: BatchRegistry | None = None
    requests: BackgroundRequests | None = None


def public_app(site: Site) -> ASGIApp:
    """The public listener's application, for all but POSTs to routed paths.

    Those go from the protocol straight to `handler.serve`; their routes here only make other
    methods 405.
    """
    settings = site.handler.config.settings
    own = routes_by_path(
        (one.method, one.path, one.endpoint(site)) for one in site_routes_of(settings)
    )
    own += [Route(page.path, site.page(page), methods=[page.method]) for page in pages_of(settings)]
    routed = [Route(path, _ServedByProtocol()) for path in routes_of(settings)]
    suggest = partial(suggest_path, ollama=settings.ollama)
    return asgi_app([*routed, *own], site.handler.next_id, suggest=suggest)


def batch_access(handler: RequestHandler, kept: KeptForCallers) -> BatchAccess:
    """Whose batches requests are about, by the handler's settings."""
    return BatchAccess(
        kept.batches,
        Callers(lambda: handler.config),
        lambda caller, user: handler.meter.book.accounts(caller, user).caller,
        WebhookTargets(lambda: handler.config.settings.webhooks),
    )


def with_cors(app: ASGIApp, spec: CorsSpec) -> ASGIApp:
    """`app`, for web pages of other origins too; must be the outermost middleware."""
    return CORSMiddleware(
        app,
        allow_origins=spec.origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=spec.headers,
        allow_credentials=spec.credentials,
        expose_headers=EXPOSED_HEADERS,
        max_age=int(spec.max_age),
    )


class _ServedByProtocol:
    """A routed path, whose POSTs do not come here: no other path's pattern is to match it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(405, headers={"Allow": "POST"})


class Site:
    """`/v1/models`, `/props`, the pages of APIs, and the endpoints of all other own paths.

    `own_requests` is None where there is no store. `created`: that of every model, in seconds since
    1970. `standing_error`: as in `HealthEndpoints`.
    """

    def __init__(
        self,
        handler: RequestHandler,
        fleet: FleetCatalog,
        usage: CallerUsage,
        own_requests: OwnRequests | None,
        caller_page: StaticPage,
        *,
        created: int,
        kept: KeptForCallers = KeptForCallers(),  # noqa: B008 - immutable
        standing_error: Callable[[], GatewayError | None] = lambda: None,
    ) -> None:
        access = batch_access(handler, kept)
        self.handler, self.fleet, self.created = handler, fleet, created
        self.caller_usage, self.own_requests = usage, own_requests
        self.caller_page, self.callers = caller_page, access.callers
        self.health = HealthEndpoints(fleet, handler.queue, lambda: handler.closing, standing_error)
        self.files = FileEndpoints(kept.files, self.callers)
        self.batches, self.message_batches = BatchEndpoints(access), MessageBatchEndpoints(access)
        self.responses = StoredResponseEndpoints(kept.requests, self.callers)
        self.deferred = DeferredEndpoints(kept.requests, handler.queue, self.callers)

    async def models(self, request: Request) -> Response:
        models = self._visible_models(request)
        objects = [models.model_object(name, self.created) for name in models.visible_names()]
        if not _is_anthropic(request):
            return JsonResponse({"object": "list", "data": objects})
        return JsonResponse({"object": "list", **listed([*map(with_anthropic_fields, objects)])})

    async def model(self, request: Request) -> Response:
        models = self._visible_models(request)
        if not request.path_params["id"]:
            raise errors.not_found("/v1/models/", suggest_path("/v1/models/"))
        name = self.check_name(request, models, request.path_params["id"])
        model = models.model_object(name, self.created)
        return JsonResponse(with_anthropic_fields(model) if _is_anthropic(request) else model)

    async def props(self, request: Request) -> Response:
        models = self._visible_models(request)
        name = request.query_params.get("model") or self.default_model(models)
        names = models.visible_names() if name is None else [self.check_name(request, models, name)]
        servers = models.servers_of(names)
        context = _largest(server.context for server in servers)
        # Sizes, but no paths and no templates.
        return JsonResponse(
            {
                "default_generation_settings": {} if context is None else {"n_ctx": context},
                "total_slots": sum(server.slots for server in servers),
                "modalities": {
                    "vision": any(server.has_vision for server in servers),
                    "audio": any(server.has_audio for server in servers),
                    "video": any(server.has_video for server in servers),
                },
            }
        )

    def page(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of an API's page."""

        async def endpoint(request: Request) -> Response:
            models = self._visible_models(request) if page.needs_models else None
            limits = self.handler.config.settings.limits
            body = (
                await read_fields(request, PAGE_BODY_BYTES, limits.body_timeout)
                if page.method == "POST"
                else {}
            )
            summaries = (
                [models.summary(name, self.created) for name in models.visible_names()]
                if models is not None
                else []
            )
            catalog = VisibleCatalog(summaries, partial(self._summary, request, models))
            answer = page.respond(catalog, body)
            return PlainTextResponse(answer) if isinstance(answer, str) else JsonResponse(answer)

        return endpoint

    def _summary(
        self, request: Request, models: VisibleModels | None, name: str | None
    ) -> ModelSummary:
        """The model that a request for this name gets. Raises: GatewayError."""
        assert models is not None
        wanted = name or self.default_model(models)
        if wanted is None:
            raise errors.invalid_request("'model' is missing.", "model")
        return models.summary(self.check_name(request, models, wanted), self.created)

    async def usage(self, request: Request) -> Response:
        """The caller's own figures and limits, or those of an end user that it may name."""
        accounts, hides_cache = self._asked_accounts(request)
        return JsonResponse(await self.caller_usage.describe(accounts, hides_cache=hides_cache))

    async def usage_requests(self, request: Request) -> Response:
        """The requests of the caller, or of that end user, that have ended; without their text."""
        accounts, hides_cache = self._asked_accounts(request)
        if self.own_requests is None:
            raise no_store("record of requests")
        query = request.query_params
        given = {name: query[name] for name in OWN_PARAMETERS if name in query}
        reader = await self.own_requests.read(accounts.caller.id, accounts.user, given)
        return await large_json(
            lambda: {"object": "list", **reader.page_of(partial(own_row, hides_cache=hides_cache))}
        )

    def _asked_accounts(self, request: Request) -> tuple[Accounts, bool]:
        """Whose use the request is about, and whether what tells of prompt caches is hidden.

        Raises: GatewayError 400, 401, 403.
        """
        config = self.handler.config
        caller = self.callers.identify(request)
        user = config.identity_headers.end_user(request.scope["headers"], caller)
        named = request.query_params.get("user")
        if named is not None:
            if not caller.trust_user_headers:
                raise errors.invalid_request(
                    "Only a key with trust_user_headers may ask for one of its users.", "user"
                )
            user = named[:MOST_IDENTITY_BYTES] or None
        accounts = self.handler.meter.book.accounts(caller, user)
        return accounts, cache_policy_of(caller, config.settings).hide

    def _visible_models(self, request: Request) -> VisibleModels:
        """The models that the caller may see. Raises: GatewayError (401, 403, 503)."""
        config = self.handler.config
        caller = self.callers.identify(request)
        if not self.fleet.is_probed:
            raise errors.starting("The nodes are being asked what they serve.")
        labels = cache_policy_of(caller, config.settings).node_labels
        user = config.identity_headers.end_user(request.scope["headers"], caller)
        caller = self.handler.meter.book.accounts(caller, user).caller
        return VisibleModels(config.rules.model_aliases, caller, labels)

    def check_name(self, request: Request, models: VisibleModels, name: str) -> str:
        """The name, if `models` has it. Raises: GatewayError (404, 503)."""
        if name in models:
            return name
        targets: list[str] = []
        if models.caller.may_use(name):
            index = self.fleet.model_index
            targets = [one.name for one in models.model_names.resolve(name)]
            error = index.not_found_error(name, models.labels, targets)
            if error.code == "no_node":
                if self.handler.config.may_name_nodes(request.scope["headers"]):
                    error.reveal_nodes()
                raise error
        raise errors.model_not_found(name, models.visible_names(), targets=targets)

    def default_model(self, models: VisibleModels) -> str | None:
        """The default model, if `models` has it."""
        name = self.handler.config.settings.default_model
        return name if name is not None and name in models else None


@dataclass(frozen=True, slots=True)
class SiteRoute:
    """A path of the public listener that the gateway answers by itself."""

    method: str
    path: str
    endpoint: Callable[[Site], Endpoint]
    needs_key: bool = True  # where callers need a key at all


SITE_ROUTES = (
    SiteRoute("GET", "/v1/models", lambda site: site.models),
    SiteRoute("GET", "/models", lambda site: site.models),
    SiteRoute("GET", "/v1/models/{id:path}", lambda site: site.model),
    SiteRoute("GET", "/models/{id:path}", lambda site: site.model),
    SiteRoute("GET", "/props", lambda site: site.props),
    SiteRoute("GET", "/v1/usage", lambda site: site.usage),
    SiteRoute("GET", "/v1/usage/requests", lambda site: site.usage_requests),
    SiteRoute("POST", "/v1/files", lambda site: site.files.upload),
    SiteRoute("GET", "/v1/files", lambda site: site.files.list),
    SiteRoute("GET", "/v1/files/{id}", lambda site: site.files.show),
    SiteRoute("GET", "/v1/files/{id}/content", lambda site: site.files.content),
    SiteRoute("DELETE", "/v1/files/{id}", lambda site: site.files.delete),
    SiteRoute("POST", "/v1/batches", lambda site: site.batches.create),
    SiteRoute("GET", "/v1/batches", lambda site: site.batches.list),
    SiteRoute("GET", "/v1/batches/{id}", lambda site: site.batches.show),
    SiteRoute("POST", "/v1/batches/{id}/cancel", lambda site: site.batches.cancel),
    SiteRoute("POST", "/v1/batches/{id}/pause", lambda site: site.batches.pause),
    SiteRoute("POST", "/v1/batches/{id}/resume", lambda site: site.batches.resume),
    SiteRoute("GET", "/v1/batches/{id}/output", lambda site: site.batches.results),
    SiteRoute("GET", "/v1/batches/{id}/errors", lambda site: site.batches.errors),
    SiteRoute("POST", "/v1/messages/batches", lambda site: site.message_batches.create),
    SiteRoute("GET", "/v1/messages/batches", lambda site: site.message_batches.list),
    SiteRoute("GET", "/v1/messages/batches/{id}", lambda site: site.message_batches.show),
    SiteRoute("DELETE", "/v1/messages/batches/{id}", lambda site: site.message_batches.delete),
    SiteRoute(
        "GET", "/v1/messages/batches/{id}/results", lambda site: site.message_batches.results
    ),
    SiteRoute("POST", "/v1/messages/batches/{id}/cancel", lambda site: site.message_batches.cancel),
    SiteRoute("POST", "/v1/messages/batches/{id}/pause", lambda site: site.message_batches.pause),
    SiteRoute("POST", "/v1/messages/batches/{id}/resume", lambda site: site.message_batches.resume),
    SiteRoute("GET", "/v1/responses/{id}", lambda site: site.responses.show),
    SiteRoute("DELETE", "/v1/responses/{id}", lambda site: site.responses.delete),
    SiteRoute("POST", "/v1/responses/{id}/cancel", lambda site: site.responses.cancel),
    SiteRoute("GET", "/v1/responses/{id}/input_items", lambda site: site.responses.input_items),
    SiteRoute("GET", "/v1/background/{id}", lambda site: site.deferred.show),
    SiteRoute("DELETE", "/v1/background/{id}", lambda site: site.deferred.delete),
    SiteRoute("GET", "/health", lambda site: site.health.health, needs_key=False),
    SiteRoute("GET", "/v1/health", lambda site: site.health.health, needs_key=False),
    SiteRoute("GET", "/ready", lambda site: site.health.ready, needs_key=False),
)
CALLER_PAGE = "/me"
CALLER_PAGE_ROUTES = (
    SiteRoute("GET", CALLER_PAGE, lambda site: site.caller_page.page, needs_key=False),
    SiteRoute("GET", "/me/{file:path}", lambda site: site.caller_page.file, needs_key=False),
)


def site_routes_of(settings: Settings) -> tuple[SiteRoute, ...]:
    """The routes of these settings, besides `routes_of` and `pages_of`."""
    return SITE_ROUTES + (CALLER_PAGE_ROUTES if settings.listen.caller_page else ())


PAGE_BODY_BYTES = 64 * 1024  # most bytes of the body of a request for an API's page


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


OWN_PARAMETERS = ("since", "until", "limit", "before")  # of a page of a caller's requests
LONGEST_PATH = 1024  # most characters of a path that a suggestion considers

_OWN_PATHS = (
    *("/v1/models", "/v1/usage", "/v1/usage/requests", "/v1/files", "/v1/batches"),
    *("/v1/messages/batches", "/props", "/health", "/ready"),
)

# With `/v1`, the longest first, so that the most specific one matches.
_SERVED_PATHS = sorted(
    {route.path for route in ROUTES.values()} | set(_OWN_PATHS), key=len, reverse=True
)

_OLLAMA_PATHS = frozenset(
    f"/api/{name}"
    for name in ("chat", "generate", "tags", "show", "ps", "version", "embed", "embeddings")
)
_PRIVATE_PATHS = frozenset({"/slots", "/metrics", "/v1/slots", "/v1/metrics", "/lora-adapters"})
# A path that ends with one of these means it, with or without `/v1`.
_SUFFIXES = frozenset({"/chat/completions", "/completions", "/embeddings", "/rerank", "/models"})

_SERVED_SUMMARY = (
    "Served are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, "
    "/v1/embeddings, /v1/rerank, /v1/models, /v1/files and /v1/batches."
)


def suggest_path(path: str, *, ollama: bool = False) -> str:
    """What to use instead of `path`, in one or two sentences.

    `ollama`: Ollama's API is served.
    """
    path = re.sub("/{2,}", "/", path[:LONGEST_PATH]).rstrip("/")
    if path == CALLER_PAGE:
        return "The page for callers is off: the setting 'listen.caller_page' turns it on."
    if path in _PRIVATE_PATHS:
        return "It would tell of other people's requests; the admin listener has /metrics."
    if path in _OLLAMA_PATHS:
        off = f"Ollama's API is not served: the setting 'ollama' turns it on. {_SERVED_SUMMARY}"
        return f"Use {path}." if ollama else off
    for served in _SERVED_PATHS:
        # Without `/v1`, or behind a prefix such as Azure's.
        short = served.removeprefix("/v1")
        if path in {served, short} or path.endswith((served, *_SUFFIXES.intersection({short}))):
            break
    else:
        return _SERVED_SUMMARY
    route = ROUTES.get(served)
    if served.startswith("/v1/messages/") or (route is not None and route.api.clients_add_v1):
        return f"Use {served}: set base_url to http://HOST:PORT (clients of Anthropic add /v1)."
    if served.startswith("/v1/"):
        return f"Use {served}: set base_url to http://HOST:PORT/v1."
    return f"Use {served} at http://HOST:PORT."


MODEL_OWNER = "llama-gateway"


@dataclass(frozen=True, slots=True)
class VisibleModels:
    """The models of the nodes that one caller may see, under one version of the settings.

    A model is visible if some node serves it, down or not. So is a name of the settings that
    stands for such a model. A request for any other name is 404.
    """

    model_names: ModelAliases
    caller: Caller
    labels: NodeLabels = ()  # labels of the nodes that the caller may use; empty: all nodes

    def visible_names(self) -> list[str]:
        """All visible names: the nodes' models in the inventory's order, then the settings' names.

        With a catch-all, then the names of the caller's key.
        """
        aliases = self.model_names
        key_names = sorted(self.caller.models or ()) if aliases.has_catch_all else ()
        served = aliases.catalog.model_names(self.labels)
        names = dict.fromkeys((*served, *aliases.rules, *key_names))
        return [name for name in names if name != CATCH_ALL and name in self]

    def __contains__(self, name: str) -> bool:
        """Whether a request for this name would find nodes, if only by the catch-all."""
        rule = self._rule_name(name)
        allowed = self.caller.may_use(name) or (rule != name and self.caller.may_use(rule))
        return allowed and any(
            self.model_names.catalog.serves(target.name, self.labels)
            for target in self.model_names.resolve(rule)
        )

    def _rule_name(self, name: str) -> str:
        """The name itself, or the catch-all if neither the settings nor the nodes know it."""
        return CATCH_ALL if self.model_names.is_catch_all(name) else name

    def servers_of(self, names: Iterable[str]) -> list[ServerFigures]:
        """The servers of any of these names, down or not, each once."""
        targets = (
            target.name
            for name in names
            for target in self.model_names.resolve(self._rule_name(name))
        )
        return self.model_names.catalog.servers_of(targets, self.labels)

    def model_object(self, name: str, created: int) -> ModelObject:
        """A model in OpenAI's form. `created` is in seconds since 1970."""
        servers = self.servers_of([name])
        sizes = {
            "n_ctx": _largest(server.context for server in servers),
            "n_ctx_train": _largest(server.trained_context for server in servers),
        }
        meta = {key: size for key, size in sizes.items() if size is not None}
        return ModelObject(id=name, created=created, meta=meta or UNSET)

    def summary(self, name: str, created: int) -> ModelSummary:
        """A model for APIs that describe models. `created` is in seconds since 1970."""
        servers = self.servers_of([name])
        return ModelSummary(
            name,
            created,
            frozenset().union(*(server.endpoints for server in servers)),
            is_up=any(server.is_up for server in servers),
            on_gpu=any(server.on_gpu for server in servers),
            context=_largest(server.context for server in servers),
            parameters=next((one.parameters for one in servers if one.parameters), None),
            size=next((one.size for one in servers if one.size), None),
            quantization=next((one.quantization for one in servers if one.quantization), None),
            file=next((one.file for one in servers if one.file), None),
        )


class ModelObject(msgspec.Struct, kw_only=True):
    """A model in OpenAI's form."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = MODEL_OWNER
    meta: dict[str, Any] | UnsetType = UNSET


class AnthropicModelObject(ModelObject, kw_only=True):
    """A model in OpenAI's form, with the fields that Anthropic's clients read."""

    type: Literal["model"] = "model"
    display_name: str
    created_at: str


def with_anthropic_fields(model: ModelObject) -> AnthropicModelObject:
    """The model, with the fields that Anthropic's clients read."""
    return AnthropicModelObject(
        id=model.id,
        created=model.created,
        meta=model.meta,
        display_name=model.id,
        created_at=time_text(model.created),
    )


def _largest(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


# No inline script or style, no other origin, and no text that becomes markup but lit's own
# templates.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types lit-html"
)

SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # A browser asks each time, so that an upgrade is seen at once.
    "cache-control": "no-cache",
}


class StaticPage:
    """One page and the files that it needs: of those in `folder` only `names` are served."""

    def __init__(self, name: str, folder: Path, names: Iterable[str]) -> None:
        self._name = name
        self._names = frozenset(names)
        self._files = StaticFiles(directory=folder)
        mimetypes.init()  # It reads files, at the first response otherwise.

    async def page(self, request: Request) -> Response:
        return await self._response(request, self._name)

    async def file(self, request: Request) -> Response:
        """A file that the page needs. Raises: GatewayError 404."""
        return await self._response(request, request.path_params["file"])

    async def _response(self, request: Request, name: str) -> Response:
        if name not in self._names:
            raise errors.not_found(request.scope["path"], None)
        response = await self._files.get_response(name, request.scope)
        response.headers.update(SECURITY_HEADERS)
        return response
