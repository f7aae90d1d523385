"""The public listener's own paths."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from gateway.admin.app import CALLER_PAGE_FILES, STATIC_FOLDER
from gateway.callers.keys import ApiKey, new_key
from gateway.request.routes import ROUTES
from gateway.web.asgi import STEP_SECONDS, asgi_app, json_of_rows
from gateway.web.site import SECURITY_HEADERS, suggest_path
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import CHAT, BareGateway, bare_gateway, error_of

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


async def test_models_are_those_declared_and_those_reported() -> None:
    async with bare_gateway(
        EmulatedNode(model="said"), a_spec("b", DEAD, model="declared")
    ) as gateway:
        answer = (await gateway.public.get("/v1/models")).json()
        assert (await gateway.public.get("/models")).json() == answer
        anthropics = {"anthropic-version": "2023-06-01"}
        page = (await gateway.public.get("/v1/models", headers=anthropics)).json()
        one = (await gateway.public.get("/v1/models/said", headers=anthropics)).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "said", "declared")
    assert (one["type"], one["display_name"]) == ("model", "said")
    assert one["created_at"].endswith("Z")
    said, declared = answer["data"]
    assert (answer["object"], said["id"], declared["id"]) == ("list", "said", "declared")
    assert (said["object"], said["owned_by"]) == ("model", "llama-gateway")
    assert said["meta"] == {"n_ctx": 4096, "n_ctx_train": 8192}
    assert isinstance(said["created"], int)
    assert said["created"] == declared["created"]
    assert "meta" not in declared, "nobody has said"


async def test_an_alias_is_listed_if_a_node_serves_its_model() -> None:
    models = {
        "gpt-4o-mini": {"use": "demo"},
        "helper": {"use": ["nowhere", "gpt-4o-mini"]},
        "lost": {"use": "nowhere"},
        "rules-alone": {"max_tokens": 5},
    }
    async with bare_gateway(EmulatedNode(), settings={"models": models}) as gateway:
        assert await ids(gateway) == ["demo", "gpt-4o-mini", "helper"]
        assert (await gateway.public.get("/v1/models/helper")).json()["meta"]["n_ctx"] == 4096
        assert (await gateway.public.get("/v1/models/lost")).status_code == 404


async def test_an_encoded_slash_is_part_of_a_name_and_divides_no_path() -> None:
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("a", node.url, model={"org/model": "demo"})) as gateway,
    ):
        public, admin = gateway.public, gateway.admin
        for client, method, path, status, said in [
            (admin, "POST", "/admin/nodes/a%2Fdrain", 405, "not allow"),
            (admin, "GET", "/admin%2Fnodes", 404, "/admin%2Fnodes"),
            (admin, "POST", "/admin/models/org%2fmodel/pause", 200, "org/model"),
            (admin, "POST", "/admin/models/org%2fmodel%2Fresume", 404, "%2Fresume"),
            (admin, "POST", "/admin/models/org/model/resume", 200, "org/model"),
            (public, "GET", "/v1%2Fmodels", 404, "/v1%2Fmodels"),
            (public, "GET", "/v1/models/org%2Fmodel", 200, "org/model"),
            (public, "GET", "/models/org/model", 200, "org/model"),
            (public, "GET", "/v1/models/org%252Fmodel", 404, "org%2Fmodel"),
            (public, "GET", "/v1/m%6fdels", 200, "org/model"),
        ]:
            response = await client.request(method, path)
            assert (response.status_code, said in response.text) == (status, True), (
                method, path, response.text,
            )  # fmt: skip


async def test_a_key_sees_only_the_models_it_may_use() -> None:
    made, settings = keys(all=None, some=["alias"], none=[])
    settings["models"] = {"alias": {"use": "demo"}}
    async with bare_gateway(EmulatedNode(), settings=settings) as gateway:
        assert await ids(gateway, **bearer(made["all"])) == ["demo", "alias"]
        assert await ids(gateway, **{"x-api-key": made["some"].text}) == ["alias"]
        assert await ids(gateway, **bearer(made["none"])) == []
        hidden = await gateway.public.get("/v1/models/demo", headers=bearer(made["some"]))
    error = error_of(hidden)
    assert (hidden.status_code, error["code"]) == (404, "model_not_found")
    assert "Known here: 'alias'." in error["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/declared", "/props", "/ready"])
async def test_models_and_readiness_are_503_until_the_first_probes_are_done(path: str) -> None:
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


async def test_props_contain_sizes_but_no_path_and_no_template() -> None:
    async with (
        EmulatedNode(context=8192, slots=3, model="other") as large,
        bare_gateway(
            EmulatedNode(context=2048, slots=2), a_spec("b", large.url, endpoints=["vision"])
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


async def test_errors_of_anthropics_paths_and_their_like_have_its_form() -> None:
    async with bare_gateway() as gateway:
        for method, path, status, kind in (
            ("GET", "/v1/messages", 405, "invalid_request_error"),
            ("POST", "/v1/messages/batches", 501, "api_error"),
            ("POST", "/v1/messages/batches/a/b", 404, "not_found_error"),
            ("POST", "//v1/messages", 404, "not_found_error"),
            ("POST", "/messages", 404, "not_found_error"),
        ):
            response = await gateway.public.request(method, path, headers={"x-request-id": "mine"})
            answer = response.json()
            assert (response.status_code, answer["type"]) == (status, "error"), path
            assert answer["error"]["type"] == kind
            assert answer["request_id"] == response.headers["request-id"] == "mine"


@each_case(
    ("path", "use"),
    [
        ("/v1/v1/chat/completions", CHAT), ("/v1/v1/v1/models", "/v1/models"),
        ("/v1/chat/completions///", CHAT), ("/v1//chat//completions", CHAT),
        ("/v1/chat/completions/chat/completions", CHAT), ("/openai/v1/chat/completions", CHAT),
        ("/chat/v1/completions", "/v1/completions"), ("/v1/infill/", "/infill"),
        ("/openai/deployments/gpt-4o/chat/completions", CHAT),
        ("/openai/deployments/a b/embeddings", "/v1/embeddings"),
        ("/v1/engines/davinci/completions", "/v1/completions"), ("/messages", "/v1/messages"),
        ("/v1/messages/count_tokens/", "/v1/messages/count_tokens"), ("/files", "/v1/files"),
        *((f"/{path}//", route.path) for path, route in ROUTES.items()),
    ],
)  # fmt: skip
def test_the_suggestion_names_the_path_that_was_meant(path: str, use: str) -> None:
    assert f"Use {use}:" in suggest_path(path) or f"Use {use} at" in suggest_path(path)


async def test_a_404_contains_the_suggestion_and_repeats_nothing_of_the_path() -> None:
    served = f"Served are {CHAT}, "
    async with bare_gateway() as gateway:
        for path, said in (
            ("/v1/v1/chat/completions", f"Use {CHAT}"), ("/v1/images/generations", served),
            ("/openai/deployments/gpt/chat/completions?a=b", f"Use {CHAT}"),
            ("/slots", "other people's requests"),
            ("/v1/" * 500, served),
        ):  # fmt: skip
            response = await gateway.public.post(path, json={})
            assert response.status_code == 404
            assert said in error_of(response)["message"]
            assert len(error_of(response)["message"]) < 400
    assert "'ollama' turns it on" in suggest_path("/api/chat")
    assert suggest_path("/api//chat/", ollama=True) == "Use /api/chat."


PROMPT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
TO_DEMO: dict[str, Any] = {"models": {"*": {"use": "demo"}, "alias": {"use": "other"}}}


async def asked(running: Running, model: str | None, key: str = "", **body: Any) -> httpx.Response:
    headers = {"x-api-key": key} if key else {}
    named = {} if model is None else {"model": model}
    return await running.client.post(CHAT, json={**PROMPT, **named, **body}, headers=headers)


def outcome(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.headers.get("x-gateway-reason")


async def test_the_catch_all_serves_unknown_names_and_labels_none(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()], TO_DEMO) as running:
        for name in ("gpt-4o", "*", "a/b:c", "DEMO", "x" * 10_000, "\u00e9\n"):
            answer = await asked(running, name)
            assert (answer.status_code, answer.headers["x-gateway-node"]) == (200, "node-0"), name
        listed = (await running.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["demo"]
        assert (await running.client.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        text = (await running.admin.get("/metrics")).text
        assert ('model="demo"' in text, "gpt-4o" in text) == (True, False)
        services = running.gateway.scheduler.fleet_sync.services
        assert not any("gpt-4o" in str(key) for key in services)


async def test_the_catch_all_leaves_known_names_alone(tmp_path: Path) -> None:
    declared = {"name": "other", "url": DEAD, "model": "declared"}
    settings = TO_DEMO | {"retries": {"wait_for_node": 0}}
    async with running_gateway(tmp_path, [EmulatedNode(), declared], settings) as running:
        assert (await asked(running, "demo")).status_code == 200
        # Down, but known: the catch-all does not replace it.
        assert outcome(await asked(running, "declared")) == (503, "no_node")
        # An alias for a model that nobody serves.
        for answer in (await asked(running, "alias"), await running.client.get("/v1/models/alias")):
            assert outcome(answer) == (404, "model_not_found")
            assert "'alias' (it stands for 'other') does not exist here" in answer.text


async def test_a_request_without_a_model_gets_what_its_key_may_use(tmp_path: Path) -> None:
    declared = {"name": "other", "url": DEAD, "model": "declared"}
    made, keyed = keys(all=None, some=["demo", "declared"])
    settings = {**TO_DEMO, **keyed}
    async with running_gateway(tmp_path, [declared, EmulatedNode()], settings) as running:
        for padding in ("", "x" * 100_000):
            answer = await asked(running, None, made["all"].text, padding=padding)
            assert (answer.status_code, answer.headers["x-gateway-node"]) == (200, "node-1")
        answer = await asked(running, None, made["some"].text)
        assert outcome(answer) == (400, "invalid_request")
        for word in ("default_model", "'declared'", "'demo'"):
            assert word in answer.json()["error"]["message"]


async def test_a_key_needs_the_name_or_the_star(tmp_path: Path) -> None:
    allowed = {
        "all": None, "demo": ["demo"], "named": ["gpt-4o"], "star": ["*"], "both": ["demo", "*"]
    }  # fmt: skip
    served = {
        "all": {"demo", "gpt-4o", "o3"}, "demo": {"demo"}, "named": {"gpt-4o"},
        "star": {"gpt-4o", "o3"}, "both": {"demo", "gpt-4o", "o3"},
    }  # fmt: skip
    made, keyed = keys(**allowed)
    async with running_gateway(tmp_path, [EmulatedNode()], TO_DEMO | keyed) as running:
        for name, key in made.items():
            listed = await running.client.get("/v1/models", headers=bearer(key))
            # Of the names that the catch-all takes, only those of the key are listed.
            names = {card["id"] for card in listed.json()["data"]}
            assert names == served[name] & {"demo", *(allowed[name] or ())}
            for model in ("demo", "gpt-4o", "o3"):
                good = (200, None) if model in served[name] else (403, "model_not_allowed")
                assert outcome(await asked(running, model, key.text)) == good, (name, model)
                found = await running.client.get(f"/v1/models/{model}", headers=bearer(key))
                assert (found.status_code == 200) == (model in served[name]), (name, model)


async def unready(gateway: BareGateway) -> str:
    response = await gateway.public.get("/ready")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    return str(error_of(response)["code"])


async def test_ready_is_200_while_a_node_is_ready_and_needs_no_key() -> None:
    _, settings = keys(all=None)
    async with bare_gateway(
        node := EmulatedNode(), a_spec("b", DEAD), settings=settings
    ) as gateway:
        assert (await gateway.public.get("/ready")).status_code == 200
        await node.kill()
        await gateway.until(lambda: gateway["a"].state.value == "down")
        assert await unready(gateway) == "no_node"
        gateway.handler.begin_shutdown()
        assert await unready(gateway) == "shutting_down"
        assert (await gateway.public.get("/health")).status_code == 200


@pytest.mark.parametrize("places", [1, 0])
async def test_a_full_fleet_is_ready_while_requests_can_be_queued(places: int) -> None:
    async with bare_gateway(
        node := EmulatedNode(slots=1, decode_tps=5),
        settings={"queue": {"max": places}},
    ) as gateway:
        assert (await gateway.public.get("/ready")).status_code == 200
        running = asyncio.create_task(gateway.chat())
        await gateway.until(lambda: node.busy == 1)
        if places:
            assert (await gateway.public.get("/ready")).status_code == 200
        else:
            assert await unready(gateway) == "queue_full"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_internal_error_has_the_same_form_and_is_raised_again() -> None:
    async def fails(_: object) -> None:
        raise RuntimeError("a secret of ours")

    app = asgi_app([Route("/", fails)], lambda: "an-id")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as asking:
        response = await asking.get("/")
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "an-id"
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as asking:
        with pytest.raises(RuntimeError):
            await asking.get("/")


async def test_other_work_runs_between_the_rows_of_a_large_response() -> None:
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def slow_row(number: int) -> int:
        until = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < until:
            pass
        return number

    other = asyncio.create_task(other_work())
    await json_of_rows("rows", range(5), slow_row)
    other.cancel()
    assert turns >= 4


NODE = a_spec("a", "http://127.0.0.1:9")
KEY = new_key("alice")
KEYED = {"keys": [{"id": KEY.id, "sha256": KEY.sha256}]}
ON = {"listen": {"caller_page": True}}


@in_virtual_time
async def test_the_page_is_off_by_default_and_its_path_says_what_turns_it_on() -> None:
    async with bare_gateway(NODE) as gateway:
        for path in ("/me", "/me/", "/me/me.js", "/me/index.html"):
            assert (await gateway.public.get(path)).status_code == 404, path
        message = error_of(await gateway.public.get("/me"))["message"]
        assert "'listen.caller_page' turns it on" in message


@in_virtual_time
async def test_page_and_files_need_no_key_and_come_under_the_policy_of_the_dashboard() -> None:
    async with bare_gateway(NODE, settings=KEYED | ON) as gateway:
        assert (await gateway.public.get("/v1/usage")).status_code == 401
        for path in ("/me", *(f"/me/{name}" for name in CALLER_PAGE_FILES)):
            response = await gateway.public.get(path)
            assert response.status_code == 200, path
            assert {name: response.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
            assert "set-cookie" not in response.headers
            head = await gateway.public.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(response.content))
            held = {"if-none-match": response.headers["etag"]}
            again = await gateway.public.get(path, headers=held)
            assert (again.status_code, again.content) == (304, b"")
            refused = await gateway.public.post(path, content=b"x")
            assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        page = await gateway.public.get("/me")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.content == (STATIC_FOLDER / "me.html").read_bytes()


@in_virtual_time
async def test_no_other_file_is_served() -> None:
    async with bare_gateway(NODE, settings=ON) as gateway:
        for name in ("", "app.js", "index.html", "stream.js", "../index.html", "..%2fapp.js",
                     "%2e%2e/app.py", "me.js/", "vendor/SHA256SUMS", "ME.JS"):  # fmt: skip
            assert (await gateway.public.get(f"/me/{name}")).status_code == 404, name


async def test_a_reload_turns_it_on_and_off(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()]) as running:
        for settings, status in ((ON, 200), ({}, 404)):
            running.write_settings(settings)
            listen = bool(settings)
            await until(lambda: running.gateway.settings.listen.caller_page is listen)  # noqa: B023
            assert (await running.client.get("/me")).status_code == status
