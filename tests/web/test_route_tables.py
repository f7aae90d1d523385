"""No path of either listener says more than the contract allows without its key or its role."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import __version__
from gateway.admin.app import ADMIN_ROUTES, INDEX_PAGE
from gateway.callers.keys import AdminRole, new_key
from gateway.config.settings import Settings
from gateway.request.routes import pages_of, routes_of
from gateway.web.site import CALLER_PAGE, site_routes_of
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import CHAT, BareGateway, bare_gateway

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
NODE, MODEL, OTHER_MODEL = "node-nobody-knows", "model-nobody-knows", "another-hidden-model"
GATEWAY_VERSION = "1.2.3"
"""Of a bare gateway; the OpenAPI document tells the program's own."""

CALLER, LIMITED = new_key("caller"), new_key("limited")
ADMIN_KEYS = {role: new_key(f"the-{role.label}") for role in AdminRole}
ADMIN = {
    "keys": [
        {"id": key.id, "sha256": key.sha256, "role": role.label} for role, key in ADMIN_KEYS.items()
    ]
}
WRONG = new_key("caller").text
"""A key of a known id with another secret."""
QUESTIONS = {
    "/admin/usage": "?by=key,user",
    "/admin/live": "?once=1",
    "/admin/config/diff": "?from=gateway",
    "/admin/cache": "?node=node-0",
}


@asynccontextmanager
async def gateway_with_keys(**more: Any) -> AsyncIterator[tuple[BareGateway, tuple[str, ...]]]:
    """A gateway of which everything needs keys, and the words that only those may read."""
    async with EmulatedNode(slots=3, model=MODEL, build="b7777") as node:
        settings = {
            "ollama": True,
            "listen": {"caller_page": True},
            "keys": [
                {"id": "caller", "sha256": CALLER.sha256, "name": "holder-nobody-knows"},
                {"id": "limited", "sha256": LIMITED.sha256, "models": [OTHER_MODEL]},
            ],
            "admin": ADMIN,
            "models": {OTHER_MODEL: {"use": MODEL}},
            **more,
        }
        spec = a_spec(NODE, node.url, labels={"rack": "rack-nobody-knows"}, cost_per_hour=0.77)
        async with bare_gateway(spec, settings=settings) as gateway:
            secrets = (
                NODE, MODEL, OTHER_MODEL, "holder-nobody-knows", "rack-nobody-knows", "b7777",
                node.url.rpartition(":")[2], GATEWAY_VERSION, __version__, "0.77",
                *(key.sha256 for key in (CALLER, LIMITED, *ADMIN_KEYS.values())),
            )  # fmt: skip
            yield gateway, secrets


def filled(
    path: str, node: str = NODE, name: str = NODE, request: str = MODEL, batch: str = MODEL,
    file: str = "unknown.js",
) -> str:  # fmt: skip
    """The path with these in the places of its parameters."""
    path = path.replace("/nodes/{name:path}", f"/nodes/{node}").replace("{name}", name)
    path = path.replace("{id:path}", request).replace("{id}", batch)
    return path.replace("{file:path}", file)


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def told(response: httpx.Response) -> str:
    """Everything that a response says, besides the path that was asked for and its random id."""
    headers = "\n".join(f"{name}: {value}" for name, value in response.headers.items())
    # By chance the id may have the digits of a port.
    return f"{headers}\n{response.text}".replace(response.headers.get("x-request-id", "-"), "-")


def assert_tells_nothing(response: httpx.Response, secrets: tuple[str, ...], why: str) -> None:
    text = told(response)
    assert [secret for secret in secrets if secret in text] == [], f"{why}: {text}"
    allowed = {
        "content-type", "content-length", "x-request-id", "request-id", "x-gateway-reason",
        "www-authenticate", "allow", "retry-after", "connection", "x-should-retry", "date", "vary",
    }  # fmt: skip
    # Always the same for a request that was refused.
    constant = {"x-gateway-class": "normal", "x-gateway-attempts": "0", "x-gateway-queue-ms": "0"}
    own = {name: value for name, value in response.headers.items() if name not in allowed}
    assert own in ({}, constant), why


def public_paths(gateway: BareGateway) -> Mapping[str, set[str]]:
    """Methods of each path of the public listener, by its route tables."""
    settings = gateway.settings
    paths: dict[str, set[str]] = {path: {"POST"} for path in routes_of(settings)}
    for page in pages_of(settings):
        paths.setdefault(page.path, set()).add(page.method)
    for route in site_routes_of(settings):
        head = {"HEAD"} if route.method == "GET" else set()
        paths.setdefault(route.path, set()).update({route.method, *head})
    return paths


KEYLESS_PUBLIC = {
    "/health": {"status": "ok"},
    "/v1/health": {"status": "ok"},
    "/ready": {"status": "ready"},
}
"""What the contract lets everybody read, word for word."""
CALLER_PAGE_PATHS = {CALLER_PAGE, "/me/{file:path}"}
"""What the settings may let everybody read besides: a page without data."""


@pytest.mark.parametrize(
    "key", [None, WRONG, "lg_x_y", "words"], ids=["none", "wrong", "unknown", "no key"]
)
@in_virtual_time
async def test_the_public_listener_without_a_key(key: str | None) -> None:
    async with gateway_with_keys() as (gateway, secrets):
        served = public_paths(gateway)
        needing = {route.path for route in site_routes_of(gateway.settings) if route.needs_key}
        needing |= {page.path for page in pages_of(gateway.settings) if page.needs_models}
        assert served.keys() - needing - routes_of(gateway.settings).keys() == {
            *KEYLESS_PUBLIC,
            "/",
            "/api/version",
            *CALLER_PAGE_PATHS,
        }
        for path, methods in served.items():
            for method in METHODS:
                why = f"{method} {path}"
                response = await gateway.public.request(
                    method, filled(path).replace(MODEL, "x"), headers=bearer(key), json={}
                )
                if path == CALLER_PAGE and method in {"GET", "HEAD"}:
                    # The same bytes for everybody: test_site.py.
                    assert response.status_code == 200, why
                    assert [word for word in secrets if word in response.text] == [], why
                    continue
                assert_tells_nothing(response, secrets, why)
                if path in CALLER_PAGE_PATHS and method in {"GET", "HEAD"}:
                    # There is no file of this name.
                    assert response.status_code == 404, why
                elif path in KEYLESS_PUBLIC and method == "GET":
                    assert response.json() == KEYLESS_PUBLIC[path], why
                elif path in {"/", "/api/version"} and method in {"GET", "HEAD"}:
                    # What Ollama answers: no word of this gateway.
                    words = {"/": "Ollama is running", "/api/version": '{"version":"0.33.0"}'}
                    assert response.text in {"", words[path]}, why
                elif method == "HEAD" and path in KEYLESS_PUBLIC:
                    assert (response.status_code, response.text) == (200, ""), why
                elif method in methods or (method == "HEAD" and "GET" in methods):
                    assert response.status_code == 401, why
                else:
                    assert response.status_code == 405, why
                    assert response.headers["x-gateway-reason"] == "method_not_allowed", why


@in_virtual_time
async def test_a_key_for_one_model_sees_no_other() -> None:
    async with gateway_with_keys() as (gateway, _):
        hidden = (MODEL, NODE, "holder-nobody-knows", "rack-nobody-knows", __version__)
        for path, methods in public_paths(gateway).items():
            for method in methods:
                response = await gateway.public.request(
                    method,
                    filled(path).replace(MODEL, "x"),
                    headers=bearer(LIMITED.text),
                    json={"model": "x", "messages": [], "prompt": "", "input": "", "content": ""},
                )
                text = response.text
                assert [word for word in hidden if word in text] == [], f"{method} {path}: {text}"


@pytest.mark.parametrize(
    "key",
    [None, WRONG, CALLER.text, ADMIN_KEYS[AdminRole.ADMIN].text + "x"],
    ids=["none", "wrong", "a caller's", "nearly"],
)
@in_virtual_time
async def test_the_admin_listener_without_an_admin_key(key: str | None) -> None:
    keyless = {"/": INDEX_PAGE, "/health": '{"status":"ok"}', "/ready": '{"status":"ready"}'}
    files = "/dashboard/{file:path}"
    assert {route.path for route in ADMIN_ROUTES if route.role is None} == {*keyless, files}
    async with gateway_with_keys() as (gateway, secrets):
        bodies = set()
        for path in {route.path for route in ADMIN_ROUTES} | {"/nothing", "/admin", "/docs"}:
            for method in METHODS:
                why = f"{method} {path}"
                response = await gateway.admin.request(method, filled(path), headers=bearer(key))
                assert_tells_nothing(response, secrets, why)
                if path == files:
                    # There is no file of this name.
                    assert response.status_code == (404 if method in {"GET", "HEAD"} else 405), why
                elif path in keyless:
                    if method in {"GET", "HEAD"}:
                        assert response.status_code == 200, why
                        assert response.text in {keyless[path], ""}, why
                    else:
                        assert response.status_code == 405, why
                else:
                    assert response.status_code == 401, why
                    bodies.add(response.text)
        # Nothing tells a path that exists from one that does not.
        assert len(bodies - {""}) == 1


CONTRACT = {
    None: {"GET /", "GET /dashboard/{file:path}", "GET /health", "GET /ready"},
    AdminRole.VIEWER: {
        "GET /metrics", "GET /metrics/nodes", "GET /openapi.json", "GET /admin/status",
        "GET /admin/live", "GET /admin/timeline", "GET /admin/nodes",
        "GET /admin/nodes/{name:path}", "GET /admin/nodes/{name:path}/history", "GET /admin/cache",
        "GET /admin/models", "GET /admin/placements",
    },
    AdminRole.OPERATOR: {
        "POST /admin/nodes/{name:path}/drain", "POST /admin/nodes/{name:path}/resume",
        "POST /admin/nodes/{name:path}/probe", "GET /admin/requests",
        "DELETE /admin/requests/{id:path}", "GET /admin/requests/{id:path}/why",
        "POST /admin/models/{name:path}/pause", "POST /admin/models/{name:path}/resume",
        "GET /admin/usage", "GET /admin/usage/arrivals", "POST /admin/chat", "POST /admin/reload",
        "POST /admin/placements", "GET /admin/requests/ended",
        "GET /admin/batches", "POST /admin/batches", "GET /admin/batches/{id}",
        "POST /admin/batches/{id}/pause", "POST /admin/batches/{id}/resume",
        "POST /admin/batches/{id}/cancel", "GET /admin/batches/{id}/results",
        "GET /admin/batches/{id}/errors",
    },
    AdminRole.ADMIN: {
        "GET /admin/config", "GET /admin/config/origins", "GET /admin/config/history",
        "GET /admin/config/diff", "POST /admin/config/rollback", "GET /admin/audit",
        "GET /admin/keys", "POST /admin/keys",
        "POST /admin/keys/import", "GET /admin/keys/{name}", "PATCH /admin/keys/{name}",
        "DELETE /admin/keys/{name}", "POST /admin/keys/{name}/rotate",
        "GET /admin/groups", "PUT /admin/groups/{name}", "DELETE /admin/groups/{name}",
    },
}  # fmt: skip
"""Who may use what, as promised: written here a second time, so that no route gets a lower role by
a slip. Who adds a route decides here as well."""


def test_each_path_needs_the_role_that_is_promised() -> None:
    found = {
        role: {f"{one.method} {one.path}" for one in ADMIN_ROUTES if one.role is role}
        for role in (None, *AdminRole)
    }
    assert found == CONTRACT
    # No path is in the table twice, so the first of two can't hide the other's role.
    assert len({(one.method, one.path) for one in ADMIN_ROUTES}) == len(ADMIN_ROUTES)


CALLERS_TEXT = {"/admin/batches/{id}/results", "/admin/batches/{id}/errors"}
"""What shows the text of callers, which is audited as changes are."""


def test_what_changes_something_needs_an_operator_and_is_audited() -> None:
    for route in ADMIN_ROUTES:
        why = f"{route.method} {route.path}"
        changes = route.method not in {"GET", "HEAD", "OPTIONS"} or route.path in CALLERS_TEXT
        assert changes == (route.action is not None), why
        assert not changes or (route.role or AdminRole.VIEWER) >= AdminRole.OPERATOR, why


def test_each_path_of_the_public_listener_that_needs_no_key_is_promised() -> None:
    def open_paths(settings: Settings) -> set[str]:
        return {route.path for route in site_routes_of(settings) if not route.needs_key}

    assert open_paths(Settings()) == set(KEYLESS_PUBLIC)
    settings = Settings.model_validate({"ollama": True, "listen": {"caller_page": True}})
    assert open_paths(settings) == {*KEYLESS_PUBLIC, *CALLER_PAGE_PATHS}
    pages = {f"{one.method} {one.path}" for one in pages_of(settings) if not one.needs_models}
    assert pages == {"GET /", "GET /api/version"}


@pytest.mark.parametrize("role", AdminRole)
@in_virtual_time
async def test_a_role_may_use_its_paths_and_those_of_lower_roles(role: AdminRole) -> None:
    methods: dict[str, dict[str, AdminRole | None]] = {}
    for route in ADMIN_ROUTES:
        methods.setdefault(route.path, {})[route.method] = route.role
    # With other methods it is a key of this name.
    methods["/admin/keys/import"] |= methods["/admin/keys/{name}"]
    # With other methods it is a request whose id ends so.
    methods["/admin/requests/{id:path}/why"] |= methods["/admin/requests/{id:path}"]
    methods["/admin/requests/ended"] |= methods["/admin/requests/{id:path}"]
    async with gateway_with_keys() as (gateway, secrets):
        for path, needed in methods.items():
            for method in METHODS:
                why = f"{method} {path}"
                asked = "GET" if method == "HEAD" and "GET" in needed else method
                wanted = needed.get(asked)
                may = asked in needed and (wanted is None or role >= wanted)
                if may and path in {"/admin/reload", "/admin/live"}:
                    continue  # A bare gateway has no files; test_live_feed.py reads the other.
                response = await gateway.admin.request(
                    method,
                    filled(path.replace("{id:path}", "unknown")),
                    headers=bearer(ADMIN_KEYS[role].text),
                )
                if may:
                    # No body is sent, and a bare gateway has no store for keys.
                    assert response.status_code in {200, 400, 404, 501}, why
                    continue
                assert response.status_code == (403 if asked in needed else 405), why
                assert_tells_nothing(response, secrets, why)
                if wanted is not None and method != "HEAD":
                    error = response.json()["error"]
                    assert error["code"] == response.headers["x-gateway-reason"] == "role_required"
                    assert f"'{wanted.label}'" in error["message"]
                    assert f"'{role.label}'" in error["message"]


async def test_what_a_role_reads_names_nobody_that_it_may_not_know(tmp_path: Path) -> None:
    """With a real store: keys, callers, users and the audit log are there to be told."""
    holder = {"id": CALLER.id, "sha256": CALLER.sha256, "name": "holder-nobody-knows"}
    keys = [{**holder, "trust_user_headers": True, "limits": {"rpm": 1000}}]
    settings = {"admin": ADMIN, "keys": keys}
    hashes = {key.sha256 for key in (CALLER, *ADMIN_KEYS.values())}
    unknown = {
        AdminRole.VIEWER: {"holder-nobody-knows", "stored-nobody-knows", "user-nobody-knows"},
        AdminRole.OPERATOR: {"stored-nobody-knows"},
        AdminRole.ADMIN: set[str](),
    }
    async with running_gateway(tmp_path, [EmulatedNode()], settings) as running:
        client = running.admin
        as_admin = bearer(ADMIN_KEYS[AdminRole.ADMIN].text)
        made = await client.post(
            "/admin/keys", json={"name": "stored-nobody-knows"}, headers=as_admin
        )
        secret = made.json()["key"].rpartition("_")[2]
        chat = await running.client.post(
            CHAT,
            json={"messages": [{"role": "user", "content": "words-nobody-knows"}], "max_tokens": 1},
            headers=bearer(CALLER.text) | {"x-user-id": "user-nobody-knows"},
        )
        assert chat.status_code == 200
        made_batch = await client.post(
            "/admin/batches?key=caller",
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", b'{"custom_id": "words-nobody-knows"}')},
            headers=as_admin,
        )
        request, batch = chat.headers["x-request-id"], made_batch.json()["id"]
        ledger = running.gateway.ledger
        assert ledger is not None
        await until(lambda: ledger.written >= 1)
        for role, key in ADMIN_KEYS.items():
            hidden = unknown[role] | hashes | {secret, "words-nobody-knows"}
            read = 0
            for route in ADMIN_ROUTES:
                if route.method != "GET" or (route.role or AdminRole.VIEWER) > role:
                    continue
                if route.path in CALLERS_TEXT:
                    continue
                path = filled(route.path, "node-0", "stored-nobody-knows", request, batch, "app.js")
                question = QUESTIONS.get(path, "")
                response = await client.get(path + question, headers=bearer(key.text))
                assert response.status_code == 200, path
                assert [word for word in hidden if word in told(response)] == [], path
                read += 1
            assert read >= 8
        # What the lower roles were not told is there.
        usage = await client.get("/admin/usage?by=key,user", headers=as_admin)
        assert "user-nobody-knows" in usage.text
        audit = await client.get("/admin/audit", headers=as_admin)
        assert "stored-nobody-knows" in audit.text
        # A caller's key is none of this listener, and an admin's none of the other.
        for path in ("/v1/usage", "/v1/models", "/props"):
            response = await running.client.get(path, headers=as_admin)
            assert response.status_code == 401, path
