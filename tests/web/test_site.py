from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, NotFoundError

from gateway.access.keys import ApiKey, new_key
from gateway.config.listeners import CorsSpec
from gateway.errors import LONGEST_ECHO
from gateway.http.response_head import EXPOSED_HEADERS
from gateway.proxy.inbound.routes import ROUTES
from gateway.web.site import with_cors
from tests.emulator import EmulatedNode
from tests.fleet.build import a_spec
from tests.gateways import running_gateway
from tests.web.bare_gateway import BareGateway, bare_gateway, client, error_of

DEAD = "http://127.0.0.1:9"


def keys(**models: list[str] | None) -> tuple[dict[str, ApiKey], dict[str, Any]]:
    made = {name: new_key(name) for name in models}
    specs = [
        {"id": key.id, "sha256": key.sha256, "models": models[name]} for name, key in made.items()
    ]
    return made, {"keys": specs}


def bearer(key: ApiKey) -> dict[str, str]:
    return {"authorization": f"Bearer {key.text}"}


async def ids(gateway: BareGateway, **headers: str) -> list[str]:
    response = await gateway.public.get("/v1/models", headers=headers)
    assert response.status_code == 200
    return [card["id"] for card in response.json()["data"]]


# Models.


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
async def test_models_are_those_declared_and_those_reported(path: str) -> None:
    async with (
        EmulatedNode(model="said") as node,
        bare_gateway(a_spec("a", node.url), a_spec("b", DEAD, model="declared")) as gateway,
    ):
        response = await gateway.public.get(path)
    answer = response.json()
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == ["said", "declared"]
    said, declared = answer["data"]
    assert {key: said[key] for key in ("object", "owned_by", "meta")} == {
        "object": "model",
        "owned_by": "llama-gateway",
        "meta": {"n_ctx": 4096, "n_ctx_train": 8192},
    }
    assert isinstance(said["created"], int)
    assert said["created"] == declared["created"]
    assert "meta" not in declared, "nobody has said"


async def test_a_model_is_listed_while_its_node_is_down() -> None:
    async with EmulatedNode(model="said") as node, bare_gateway(a_spec("a", node.url)) as gateway:
        await node.kill()
        await gateway.until(lambda: gateway["a"].state.value == "down")
        assert await ids(gateway) == ["said"]


async def test_the_context_of_a_model_is_the_largest_of_its_nodes() -> None:
    async with (
        EmulatedNode(context=2048) as small,
        EmulatedNode(context=8192, context_train=32768) as large,
        bare_gateway(a_spec("a", small.url), a_spec("b", large.url)) as gateway,
    ):
        card = (await gateway.public.get("/v1/models/demo")).json()
    assert card["meta"] == {"n_ctx": 8192, "n_ctx_train": 32768}


async def test_an_alias_is_listed_if_a_node_serves_its_model() -> None:
    models = {
        "gpt-4o-mini": {"use": "demo"},
        "helper": {"use": ["nowhere", "gpt-4o-mini"]},
        "lost": {"use": "nowhere"},
        "demo": {"set": {"temperature": 0.2}},
        "rules-alone": {"max_tokens": 5},
    }
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("a", node.url), settings={"models": models}) as gateway,
    ):
        assert await ids(gateway) == ["demo", "gpt-4o-mini", "helper"]
        card = (await gateway.public.get("/v1/models/helper")).json()
        lost = await gateway.public.get("/v1/models/lost")
    assert (card["id"], card["meta"]) == ("helper", {"n_ctx": 4096, "n_ctx_train": 8192})
    assert lost.status_code == 404


@pytest.mark.parametrize("path", ["org%2Fmodel", "org/model"])
async def test_an_id_may_contain_a_slash_encoded_or_not(path: str) -> None:
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("a", node.url, model={"org/model": "demo"})) as gateway,
    ):
        for prefix in ("/v1/models/", "/models/"):
            response = await gateway.public.get(prefix + path)
            assert response.json()["id"] == "org/model"


async def test_an_encoded_slash_is_part_of_a_name_and_divides_no_path() -> None:
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("a", node.url, model={"org/model": "demo"})) as gateway,
    ):
        public, admin = gateway.public, gateway.admin
        for client, method, path, status, said in [
            (admin, "POST", "/admin/nodes/a%2Fdrain", 405, "not allow"),
            (admin, "GET", "/admin/nodes/a%2f", 404, "a/"),
            (admin, "GET", "/admin%2Fnodes", 404, "/admin%2Fnodes"),
            (admin, "POST", "/admin/models/org%2fmodel/pause", 200, "org/model"),
            (admin, "POST", "/admin/models/org%2fmodel%2Fresume", 404, "%2Fresume"),
            (admin, "POST", "/admin/models/org/model/resume", 200, "org/model"),
            (public, "GET", "/v1%2Fmodels", 404, "/v1%2Fmodels"),
            (public, "GET", "/v1/models/org%2Fmodel", 200, "org/model"),
            (public, "GET", "/v1/models/org%252Fmodel", 404, "org%2Fmodel"),
            (public, "GET", "/v1/models/o%252Fr%2Fx", 404, "o%2Fr/x"),
            (public, "GET", "/v1/m%6fdels", 200, "org/model"),
        ]:
            response = await client.request(method, path)
            assert (response.status_code, said in response.text) == (status, True), (
                method, path, response.text,
            )  # fmt: skip


async def test_an_unknown_model_is_404_with_the_known_ones() -> None:
    async with EmulatedNode() as node, bare_gateway(a_spec("a", node.url)) as gateway:
        response = await gateway.public.get("/v1/models/nobody-has-it")
        long = await gateway.public.get("/v1/models/" + "x" * 5000)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (404, "model_not_found")
    assert "'demo'" in error["message"]
    assert len(error_of(long)["message"]) < LONGEST_ECHO + 200


async def test_a_key_sees_only_the_models_it_may_use() -> None:
    made, settings = keys(all=None, some=["alias"], none=[])
    settings["models"] = {"alias": {"use": "demo"}}
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("a", node.url), settings=settings) as gateway,
    ):
        assert await ids(gateway, **bearer(made["all"])) == ["demo", "alias"]
        assert await ids(gateway, **{"x-api-key": made["some"].text}) == ["alias"]
        assert await ids(gateway, **bearer(made["none"])) == []
        hidden = await gateway.public.get("/v1/models/demo", headers=bearer(made["some"]))
    error = error_of(hidden)
    assert (hidden.status_code, error["code"]) == (404, "model_not_found")
    assert "Known here: 'alias'." in error["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/demo", "/props"])
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer lg_all_wrong"}])
async def test_without_a_valid_key_nothing_is_revealed(path: str, headers: dict[str, str]) -> None:
    _, settings = keys(all=None)
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("a", node.url), settings=settings) as gateway,
    ):
        response = await gateway.public.get(path, headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/declared", "/props"])
async def test_models_are_503_until_the_first_probes_are_done(path: str) -> None:
    async with EmulatedNode() as node:
        node.faults.set("hang", path="/health")
        async with bare_gateway(
            a_spec("a", node.url, model="declared"), probed=False, timeout=5.0
        ) as gateway:
            response = await gateway.public.get(path)
            assert (response.status_code, error_of(response)["code"]) == (503, "starting")
            assert int(response.headers["retry-after"]) > 0
            node.faults.clear()
            await asyncio.wait_for(gateway.fleet.first_probes_done.wait(), 30)
            assert (await gateway.public.get(path)).status_code == 200


async def test_while_a_node_may_yet_serve_a_model_it_is_503() -> None:
    async with EmulatedNode() as node:
        node.loading = True
        async with bare_gateway(a_spec("a", node.url)) as gateway:
            response = await gateway.public.get("/v1/models/demo")
            assert (response.status_code, error_of(response)["code"]) == (503, "no_node")
            assert "'a' is loading" in error_of(response)["message"]
            node.loading = False
            await gateway.until(lambda: gateway.fleet.model_index.serves("demo"))
            assert (await gateway.public.get("/v1/models/demo")).status_code == 200


async def test_official_clients_read_the_models(tmp_path: Path) -> None:
    other = {"name": "b", "url": DEAD, "model": "org/other"}
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [{"name": "a", "url": node.url}, other]) as running,
    ):
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as openai:
            assert [model.id async for model in openai.models.list()] == ["demo", "org/other"]
            assert (await openai.models.retrieve("org/other")).id == "org/other"
            with pytest.raises(NotFoundError) as caught:
                await openai.models.retrieve("nobody-has-it")
            assert caught.value.code == "model_not_found"
        async with AsyncAnthropic(base_url=running.url, api_key="-", max_retries=0) as anthropic:
            page = await anthropic.models.list()
            assert [model.id for model in page.data] == ["demo", "org/other"]
            assert (page.has_more, page.first_id, page.last_id) == (False, "demo", "org/other")
            one = await anthropic.models.retrieve("org/other")
    assert (one.type, one.display_name) == ("model", "org/other")
    assert isinstance(one.created_at, datetime)
    assert one.created_at.tzinfo is not None


async def test_without_models_the_list_is_empty_in_both_forms() -> None:
    async with bare_gateway() as gateway:
        plain = (await gateway.public.get("/v1/models")).json()
        header = {"anthropic-version": "2023-06-01"}
        both = (await gateway.public.get("/v1/models", headers=header)).json()
    assert plain == {"object": "list", "data": []}
    assert both == {**plain, "has_more": False, "first_id": None, "last_id": None}


# Properties.


async def test_props_contain_sizes_but_no_path_and_no_template() -> None:
    async with (
        EmulatedNode(context=2048, slots=2) as small,
        EmulatedNode(context=8192, slots=3, model="other") as large,
        bare_gateway(
            a_spec("a", small.url), a_spec("b", large.url, endpoints=["vision"])
        ) as gateway,
    ):
        every = (await gateway.public.get("/props")).json()
        one = (await gateway.public.get("/props?model=demo")).json()
        unknown = await gateway.public.get("/props?model=nobody-has-it")
    assert every == {
        "default_generation_settings": {"n_ctx": 8192},
        "total_slots": 5,
        "modalities": {"vision": True, "audio": False, "video": False},
    }
    assert one == {
        "default_generation_settings": {"n_ctx": 2048},
        "total_slots": 2,
        "modalities": {"vision": False, "audio": False, "video": False},
    }
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")


async def test_props_describe_the_default_model_if_there_is_one() -> None:
    async with (
        EmulatedNode(context=2048) as small,
        EmulatedNode(context=8192, model="other") as large,
        bare_gateway(
            a_spec("a", small.url),
            a_spec("b", large.url),
            settings={"default_model": "demo"},
        ) as gateway,
    ):
        props = (await gateway.public.get("/props")).json()
    assert props["default_generation_settings"] == {"n_ctx": 2048}


# What is not there.


async def test_a_routed_path_accepts_post_alone() -> None:
    async with bare_gateway() as gateway:
        for path in sorted(ROUTES):
            for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
                response = await gateway.public.request(method, path)
                assert (response.status_code, response.headers["allow"]) == (405, "POST"), path
                assert response.headers["x-gateway-reason"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/demo", "/models", "/props", "/health", "/ready"]
)
async def test_own_paths_accept_get_and_head(path: str) -> None:
    async with EmulatedNode() as node, bare_gateway(a_spec("a", node.url)) as gateway:
        assert (await gateway.public.head(path)).status_code == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            response = await gateway.public.request(method, path)
            assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")
            assert error_of(response)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path",
    ["/", "/slots", "/metrics", "/v1", "/admin/nodes", "/v1/models/../../slots", "/health/"],
)
async def test_every_other_path_is_404(path: str) -> None:
    async with EmulatedNode() as node, bare_gateway(a_spec("a", node.url)) as gateway:
        before = node.requests
        for method in ("GET", "POST"):
            response = await gateway.public.request(method, path)
            assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
        assert node.requests == before


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("GET", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 501, "api_error"),
        ("POST", "/v1/messages/batches/a/b", 404, "not_found_error"),
    ],
)
async def test_errors_below_messages_have_anthropics_form(
    method: str, path: str, status: int, kind: str
) -> None:
    async with bare_gateway() as gateway:
        response = await gateway.public.request(method, path, headers={"x-request-id": "mine"})
    answer = response.json()
    assert (response.status_code, answer["type"], answer["error"]["type"]) == (
        status,
        "error",
        kind,
    )
    assert answer["request_id"] == "mine"
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"


async def test_a_post_to_a_routed_path_is_forwarded() -> None:
    async with EmulatedNode() as node, bare_gateway(a_spec("a", node.url), serving=True) as gateway:
        response = await gateway.chat()
        assert response.status_code == 200
        assert response.json()["choices"]
        assert node.requests == 1
        assert len(response.headers.get_list("x-request-id")) == 1


# Pages of other origins.

PAGE = "https://chat.example.org"
FOREIGN = "https://evil.example"


async def reply(
    gateway: BareGateway, spec: CorsSpec, method: str, **headers: str
) -> httpx.Response:
    async with client(with_cors(gateway.site, spec)) as asking:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await asking.request(method, "/v1/models", headers=named)


async def test_a_page_of_an_allowed_origin_may_read_our_headers() -> None:
    spec = CorsSpec(origins=(PAGE,), max_age=60)
    async with bare_gateway() as gateway:
        preflight = await reply(
            gateway,
            spec,
            "OPTIONS",
            origin=PAGE,
            access_control_request_method="POST",
            access_control_request_headers="authorization,x-priority",
        )
        answer = await reply(gateway, spec, "GET", origin=PAGE)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-priority"
    assert preflight.headers["access-control-max-age"] == "60"
    assert answer.headers["access-control-allow-origin"] == PAGE
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert exposed == list(EXPOSED_HEADERS)
    assert "X-Request-ID" in exposed


async def test_a_page_of_another_origin_may_not() -> None:
    spec = CorsSpec(origins=(PAGE,))
    async with bare_gateway() as gateway:
        preflight = await reply(
            gateway, spec, "OPTIONS", origin=FOREIGN, access_control_request_method="POST"
        )
        answer = await reply(gateway, spec, "GET", origin=FOREIGN)
    assert preflight.status_code == 400
    assert "access-control-allow-origin" not in preflight.headers
    assert "access-control-allow-origin" not in answer.headers


async def test_every_page_may_read_if_the_settings_say_so() -> None:
    async with bare_gateway() as gateway:
        answer = await reply(gateway, CorsSpec(origins=("*",)), "GET", origin=FOREIGN)
        error = await reply(gateway, CorsSpec(origins=("*",)), "DELETE", origin=FOREIGN)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert (error.status_code, error.headers["access-control-allow-origin"]) == (405, "*")
