"""The page on which callers see their own use: what is served of it, to whom, and how."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.admin.app import CALLER_PAGE_FILES, STATIC_FOLDER
from gateway.callers.keys import new_key
from gateway.web.site import SECURITY_HEADERS
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import bare_gateway, error_of

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


def test_the_files_are_those_that_the_page_needs() -> None:
    needed, looked_at = {"me.html"}, set[str]()
    while left := needed - looked_at:
        name = left.pop()
        looked_at.add(name)
        folder = Path(name).parent
        text = (STATIC_FOLDER / name).read_text()
        found = re.findall(r'(?:from|import) ?"\./([^"]+)"', text)
        needed |= {(folder / one).as_posix() for one in found}
        needed |= set(re.findall(r'(?:href|src)="me/([^"]+)"', text))
    assert needed == set(CALLER_PAGE_FILES)
    page = (STATIC_FOLDER / "me.html").read_text()
    for name in CALLER_PAGE_FILES:
        # Without this a browser learns of it only when it has read the file that imports it.
        assert name == "me.html" or f'"me/{name}"' in page, name
    assert not re.findall(r"<style|\sstyle=|\son[a-z]+=|<script>|(?:https?:)?//[a-z]", page)


async def test_a_reload_turns_it_on_and_off(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()]) as running:
        for settings, status in ((ON, 200), ({}, 404)):
            running.write_settings(settings)
            listen = bool(settings)
            await until(lambda: running.gateway.settings.listen.caller_page is listen)  # noqa: B023
            assert (await running.client.get("/me")).status_code == status
