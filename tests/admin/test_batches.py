"""`/admin/batches`: the batches of all keys, in an operator's hands."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway
from tests.polling import eventually
from tests.stored.batch_gateway import lines
from tests.web.two_keys import ALICE, BOB, gateway, kept, reason, two_callers

pytestmark = pytest.mark.usefixtures("hurried")


async def upload(running: Running, items: Iterable[Any], **query: str) -> httpx.Response:
    """Hand in a batch of these lines as an operator; a text is no JSON."""
    content = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in items)
    return await running.admin.post(
        "/admin/batches",
        params=query,
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", content.encode())},
    )


async def shown(running: Running, id_: str, *statuses: str) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        found: dict[str, Any] = (await running.admin.get(f"/admin/batches/{id_}")).json()
        return found if found["status"] in statuses else None

    return await eventually(look)


async def audited(running: Running) -> list[tuple[str, str, str]]:
    entries = (await running.admin.get("/admin/audit?action=batches")).json()["entries"]
    return [(one["action"], one["target"], one["outcome"]) for one in entries][::-1]


async def test_an_upload_is_the_batch_of_the_key_that_is_named(tmp_path: Path) -> None:
    async with two_callers(tmp_path) as (running, alice, bob):
        made = await upload(running, lines(2), key="alice", completion_window="2h")
        assert made.status_code == 200, made.text
        batch = made.json()
        assert (batch["key"], batch["api"], batch["errors_by_kind"]) == (ALICE.id, "openai", [])
        assert batch["completion_window"] == "2h"
        begun = await shown(running, batch["id"], "in_progress")
        assert begun["request_counts"]["total"] == 2
        # It is hers as if she had made it, her file too, and nobody else's.
        assert (await alice.batches.retrieve(batch["id"])).input_file_id == begun["input_file_id"]
        assert [one.id async for one in alice.files.list()] == [begun["input_file_id"]]
        assert not [one async for one in bob.batches.list()]
        assert await audited(running) == [("batches.create", f"{batch['id']} for alice", "done")]


async def test_an_upload_that_is_no_batch_leaves_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, batches={"batches_per_key": 1}) as running:
        unknown = await upload(running, lines(1), key="carol")
        assert reason(unknown) == (404, "key_not_found")
        unnamed = await upload(running, lines(1))
        assert reason(unnamed) == (404, "key_not_found")
        assert reason(await upload(running, lines(1), key="alice", colour="red"))[0] == 400
        unknown = await running.admin.post("/admin/batches/batch_none/cancel")
        assert reason(unknown) == (404, "batch_not_found")
        wrong = await upload(running, lines(1), key="alice", completion_window="soon")
        assert reason(wrong) == (400, "invalid_value")
        assert kept(tmp_path) == []
        assert (await upload(running, lines(1), key="alice")).status_code == 200
        full = await upload(running, lines(1), key="alice")
        assert reason(full) == (429, "too_many_batches")
        assert len(kept(tmp_path)) == 1
        assert (await upload(running, lines(1), key="bob")).status_code == 200


async def test_batches_of_all_keys_and_apis_are_listed_the_newest_first(tmp_path: Path) -> None:
    async with two_callers(tmp_path) as (running, _, _):
        owners = ("alice", "bob", "alice")
        ids = [(await upload(running, lines(1), key=name)).json()["id"] for name in owners]
        params = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}], "model": "m"}
        answer = await running.client.post(
            "/v1/messages/batches",
            json={"requests": [{"custom_id": "a", "params": params}]},
            headers={"x-api-key": BOB.text},
        )
        ids.append(answer.json()["id"])
        await running.admin.post(f"/admin/batches/{ids[0]}/cancel")
        cancelled = await shown(running, ids[0], "cancelled")
        assert cancelled["errors_by_kind"] == [
            {"code": "batch_cancelled", "lines": 1, "first_line": 1}
        ]
        late = await running.admin.post(f"/admin/batches/{ids[0]}/pause")
        assert reason(late) == (409, "batch_ended")

        async def listed(**query: Any) -> tuple[list[str], str | None]:
            found = (await running.admin.get("/admin/batches", params=query)).json()
            return [one["id"] for one in found["batches"]], found["next"]

        assert await listed() == (ids[::-1], None)
        newest, next_ = await listed(limit=3)
        assert (newest, next_) == (ids[:0:-1], ids[1])
        assert await listed(limit=3, before=ids[1]) == ([ids[0]], None)
        assert await listed(key="bob") == ([ids[3], ids[1]], None)
        assert await listed(key=ALICE.id, state="unfinished") == ([ids[2]], None)
        assert await listed(state="ended") == ([ids[0]], None)
        assert await listed(key="nobody") == ([], None)
        for query in ("state=some", "limit=101", "before=a%20b", "colour=red"):
            answer = await running.admin.get(f"/admin/batches?{query}")
            assert reason(answer)[0] == 400, query


async def test_results_and_errors_are_read_and_that_is_audited(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()]) as running:
        items = [*lines(1), "no json", *lines(1), *lines(1, 1, model="unknown")]
        id_ = (await upload(running, items)).json()["id"]
        found = await shown(running, id_, "completed")
        assert (found["key"], found["key_name"]) == ("anonymous:local", None)
        kinds = {one["code"]: (one["lines"], one["first_line"]) for one in found["errors_by_kind"]}
        assert sum(number for number, _ in kinds.values()) == 3
        assert kinds["model_not_found"] == (1, 4)
        results = await running.admin.get(f"/admin/batches/{id_}/results")
        assert results.headers["content-disposition"].startswith("attachment")
        assert [json.loads(one)["custom_id"] for one in results.text.splitlines()] == ["line-0"]
        failed = await running.admin.get(f"/admin/batches/{id_}/errors")
        assert len(failed.text.splitlines()) == 3
        assert (await audited(running))[1:] == [
            ("batches.results", id_, "done"), ("batches.errors", id_, "done"),
        ]  # fmt: skip
