from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest

from gateway.admin.app import ADMIN_ROUTES
from gateway.config.settings import Settings
from gateway.openapi import ADMIN_ERRORS, ERRORS, SCHEMAS, SITE_PATHS, openapi_json
from gateway.request.routes import pages_of, routes_of
from gateway.stored.batch_rows import Batch, BatchProgress
from gateway.stored.claims import BatchState
from gateway.web.batches import batch_object
from gateway.web.message_batches import message_batch_object
from gateway.web.site import site_routes_of
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import bare_gateway, error_of

ROOT = Path(__file__).resolve().parents[2]
WHOLE = Settings.model_validate({"ollama": True, "listen": {"caller_page": True}})
METHODS = {"get", "post", "put", "patch", "delete"}


def document(
    listener: str | None = None, settings: Settings = WHOLE, **needed: bool
) -> dict[str, Any]:
    """The document as programs read it."""
    result: dict[str, Any] = msgspec.json.decode(openapi_json(settings, listener, **needed))
    return result


def operations(whole: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in whole["paths"].items():
        for method in METHODS & set(item):
            yield method.upper(), path, item[method]


@pytest.mark.parametrize("listener", [None, "public", "admin"])
def test_the_document_is_valid(listener: str | None) -> None:
    definitions = pytest.importorskip("schemathesis.specs.openapi.definitions")
    for settings in (Settings(), WHOLE):
        jsonschema.validate(document(listener, settings), definitions.OPENAPI_31)


def test_it_has_every_path_of_both_listeners_and_no_other() -> None:
    public = {("POST", path) for path in routes_of(WHOLE)}
    public |= {(page.method, page.path) for page in pages_of(WHOLE)}
    public |= {(route.method, route.path.replace(":path}", "}")) for route in site_routes_of(WHOLE)}
    admin = {(route.method, route.path.replace(":path}", "}")) for route in ADMIN_ROUTES}
    for listener, wanted in (("public", public), ("admin", admin), (None, public | admin)):
        found = [(method, path) for method, path, _ in operations(document(listener))]
        assert len(found) == len(set(found))
        assert set(found) == wanted


def test_paths_that_settings_turn_on_are_there_only_if_they_are_served() -> None:
    assert not {"/api/chat", "/me", "/me/{file}"} & set(document("public", Settings())["paths"])


def test_every_operation_says_what_it_needs_and_answers() -> None:
    whole = document()
    ids = [operation["operationId"] for _, _, operation in operations(whole)]
    assert len(ids) == len(set(ids))
    for method, path, operation in operations(whole):
        assert operation["tags"], path
        assert {"200", "400", "431", "500"} <= set(operation["responses"]), path
        named = {part["name"] for part in operation.get("parameters", ()) if part["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path))
        verbs = ("/cancel", "/pause", "/resume")  # They have no body.
        if "public" in operation["tags"] and method == "POST" and not path.endswith(verbs):
            assert operation["requestBody"]["content"]


def test_keys_are_optional_where_none_is_needed() -> None:
    for needed in (False, True):
        paths = document(needs_key=needed, needs_admin_key=needed)["paths"]
        chat = paths["/v1/chat/completions"]["post"]["security"]
        status = paths["/admin/status"]["get"]["security"]
        assert ({} in chat, {} in status) == (not needed, not needed)
        assert paths["/health"]["get"]["security"] == []


async def test_the_roles_are_those_of_the_route_table() -> None:
    paths = document("admin")["paths"]
    for route in ADMIN_ROUTES:
        operation = paths[route.path.replace(":path}", "}")][route.method.lower()]
        assert operation.get("x-role") == (None if route.role is None else route.role.label)


@in_virtual_time
async def test_the_admin_listener_shows_it_whole_or_by_listener() -> None:
    async with bare_gateway(a_spec("a", "http://127.0.0.1:9")) as gateway:
        whole = (await gateway.admin.get("/openapi.json")).json()
        public = (await gateway.admin.get("/openapi.json?listener=public")).json()
        wrong = await gateway.admin.get("/openapi.json?listener=other")
    assert set(public["paths"]) < set(whole["paths"])
    assert "/admin/status" not in public["paths"]
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "listener")


@in_virtual_time
async def test_responses_are_as_the_document_says() -> None:
    whole = document()

    def check(name: str, value: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": whole["components"]}
        jsonschema.validate(value, schema)
        own = whole["components"]["schemas"][name]["properties"]
        assert set(value) <= set(own), f"{name}: the document lacks {set(value) - set(own)}"

    async with bare_gateway(
        EmulatedNode(slots=1, decode_tps=5),
        settings={"admin": {"keys": [{"id": "x", "sha256": "0" * 64, "role": "viewer"}]}},
        admin_key="key",
    ) as gateway:
        gateway.admin.headers["authorization"] = "Bearer key"
        check("Status", (await gateway.admin.get("/admin/status")).json())
        check("Node", (await gateway.admin.get("/admin/nodes/a")).json())
        check("Settings", (await gateway.admin.get("/admin/config")).json())
        check("Error", (await gateway.admin.get("/admin/nodes/b")).json())
        check("Model", (await gateway.public.get("/v1/models")).json()["data"][0])
        check("AnthropicError", (await gateway.public.post("/v1/messages", content="{")).json())


BATCH = Batch(
    id="batch_1", owner="key", api="openai", endpoint="/v1/embeddings", input_file="file-1",
    created_at=10.0, expires_at=86410.0, keep_until=9e9, folder="folder",
    total=3, completed=1, failed=1, metadata={"a": "b"},
)  # fmt: skip


@pytest.mark.parametrize("state", list(BatchState))
def test_batches_of_every_state_are_as_the_document_says(state: BatchState) -> None:
    batch = replace(BATCH, state=state, ended_at=20.5 if state.ended else None, paused_at=15.0)
    for progress in (None, BatchProgress(1, 1, 2.5, 99.5, 0.1, 0.3)):
        for name, shown in (
            ("Batch", batch_object(batch, progress)),
            ("MessageBatch", message_batch_object(batch, progress, None)),
        ):
            schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
            jsonschema.validate(msgspec.to_builtins(shown), schema)


async def test_answers_in_the_background_are_as_the_document_says(tmp_path: Path) -> None:
    def check(path: str, response: httpx.Response) -> None:
        described = SITE_PATHS[path]
        if response.status_code < 300:
            jsonschema.validate(response.json(), described.answer or {"type": "object"})
        else:
            assert response.status_code in described.statuses

    async with running_gateway(tmp_path, [node := EmulatedNode()]) as running:
        client, kept = running.client, "/v1/responses/{id}"
        body: dict[str, Any] = {"model": node.model, "input": "x", "background": True}
        made = (await client.post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{made['id']}"
        check(f"GET {kept}", await client.get(path))
        check(f"GET {kept}", await client.get(f"{path}?starting_after=-1"))
        items = f"{path}/input_items"
        for query in ("limit=1&order=asc", "limit=0", "order=up"):
            check(f"GET {kept}/input_items", await client.get(f"{items}?{query}"))
        check(f"POST {kept}/cancel", await client.post(f"{path}/cancel"))
        check(f"DELETE {kept}", await client.delete(path))
        check(f"GET {kept}", await client.get(path))

        body = {"model": node.model, "messages": [{"role": "user", "content": "x"}]}
        headers = {"prefer": "respond-async"}
        taken = await client.post("/v1/chat/completions", json=body, headers=headers)
        place = taken.headers["location"]
        async with asyncio.timeout(20):
            while (answer := await client.get(place)).status_code == 202:
                check("GET /v1/background/{id}", answer)
                await asyncio.sleep(0.05)
        check("GET /v1/background/{id}", answer)
        check("DELETE /v1/background/{id}", await client.delete(place))


def test_every_code_of_batches_is_in_the_table() -> None:
    for rows in (ERRORS, ADMIN_ERRORS):
        assert len(rows) == len({(row.status, row.code) for row in rows})
    known = {row.code for row in ERRORS}
    for name in ("stored/batch_registry.py", "web/batches.py", "web/message_batches.py"):
        text = (ROOT / "gateway" / name).read_text()
        sent = set(re.findall(r'GatewayError\(\s*\d+,\s*"(\w+)"', text))
        assert sent
        assert sent - known == set(), name
