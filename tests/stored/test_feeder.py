"""The feeder learns what waits, and which prompts begin alike."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from gateway.callers.keys import hash_key
from gateway.config.stored import BatchSettings
from gateway.events import RequestRecord
from gateway.store.failures import StoreUnavailable
from gateway.store.store import Store
from gateway.stored.batch_rows import pause_batch
from gateway.stored.claims import Pick, RequestKind
from gateway.stored.feeder import IDLE_SECONDS, READ_SECONDS, Supply, read_prefixes, read_waiting
from gateway.stored.feeding import PrefixGroup
from gateway.stored.folder import DiskThreads, Folder, Storage, job
from gateway.stored.runner import RequestTarget
from gateway.terms import Priority
from tests.callers.kills import rows_of
from tests.emulator import EmulatedNode
from tests.gateways import Running, until
from tests.stored.batch_gateway import (
    HEADERS,
    ended,
    gateway_over,
    key,
    lines,
    output,
    show,
    submit,
    virtual_gateway_over,
)
from tests.stored.measure_feeding import Site, chats_beside
from tests.stored.stored_rows import FOLDER, NOW, a_batch, a_line, begin, claim, do
from tests.stored.virtual_store import store_in_virtual_time
from tests.virtual import in_virtual_time, now


def test_what_waits_is_counted_by_batch_and_state(store: Store) -> None:
    assert store.run_now(job(read_waiting, FOLDER, NOW)).lines == []
    for number, count in ((1, 3), (2, 2)):
        batch = a_batch(number, created_at=NOW + number)
        begin(store, batch, [a_line(index + 1, batch) for index in range(count)])
    waiting = store.run_now(job(read_waiting, FOLDER, NOW))
    assert {group.batch: group.rows for group in waiting.lines} == {
        a_batch(1).id: 3, a_batch(2).id: 2
    }  # fmt: skip
    assert (waiting.batches, waiting.oldest) == ({"in_progress": 2}, NOW + 1)
    assert store.run_now(job(read_waiting, "g" * 32, NOW)).batches == {}
    do(store, pause_batch, "alice", a_batch(1).id, NOW, "asked")
    (group,) = store.run_now(job(read_waiting, FOLDER, NOW)).lines
    assert group.batch == a_batch(2).id


def test_groups_are_lines_whose_prompts_begin_alike(store: Store) -> None:
    prefixes = {1: 7, 2: 7, 3: 8, 4: 9, 5: 9, 6: 0}
    lines = [a_line(n, prefix=prefix, max_tokens=10 * n) for n, prefix in prefixes.items()]
    begin(store, a_batch(), lines)
    read = job(read_prefixes, a_batch().id, NOW)
    assert store.run_now(read) == (
        PrefixGroup(0, 1, 60, 60), PrefixGroup(9, 2, 50, 90), PrefixGroup(7, 2, 20, 30)
    )  # fmt: skip
    assert len(store.run_now(job(read_prefixes, a_batch().id, NOW, most=1))) == 1
    claim(store, limit=2, prefix=9)
    assert [group.prefix for group in store.run_now(read)] == [0, 7]


def by_model(owner: str, path: str, model: str | None) -> RequestTarget | None:
    """Each model is a target; `x` and `y` are names of one."""
    if model == "refused":
        return None
    return RequestTarget(("xy" if model in {"x", "y"} else str(model),), "chat", ())


def target(name: str) -> RequestTarget:
    return RequestTarget((name,), "chat", ())


def supply_of(store: Store) -> Supply:
    folder = Folder(Path("nowhere"), most_bytes=lambda: 0)
    storage = Storage(store, folder, DiskThreads(), BatchSettings, lambda: NOW, lambda: 0.0)
    return Supply(storage, by_model)


async def test_lines_are_divided_by_target(store: Store) -> None:
    models = ["x", "y", "x", "demo", "refused"]
    lines = [a_line(number, model=model) for number, model in enumerate(models, 1)]
    begin(store, a_batch(class_="normal"), lines, None)
    supply = supply_of(store)
    await supply.read(FOLDER)
    assert supply.read_at == pytest.approx(READ_SECONDS)
    assert set(supply.known_targets()) == {target("xy"), target("demo"), None}
    (work,) = supply.works_of(target("xy"))
    assert (work.batch, work.rows, work.deadline) == (a_batch().id, 3, a_batch().expires_at)
    assert work.class_ == "normal"
    picks = supply.picks(target("xy"), [Pick(4, RequestKind.LINE, a_batch().id)])
    assert sorted(picks, key=lambda pick: pick.model or "") == [
        Pick(2, RequestKind.LINE, a_batch().id, model="x"),
        Pick(2, RequestKind.LINE, a_batch().id, model="y"),
    ]


async def test_nothing_that_waits_is_read_more_rarely(store: Store) -> None:
    supply = supply_of(store)
    assert (await supply.read(FOLDER)).lines == []
    assert supply.read_at == pytest.approx(IDLE_SECONDS)
    supply.read_soon(1.0)
    assert supply.read_at == 1.0


async def test_claims_count_down_what_waits(store: Store) -> None:
    begin(store, a_batch(), [a_line(number, prefix=7) for number in range(1, 11)])
    supply = supply_of(store)
    await supply.read(FOLDER)
    works = await supply.with_groups(supply.works_of(target("demo")), {})
    assert [(group.prefix, group.rows) for group in works[0].groups] == [(7, 10)]
    wants = [Pick(4, RequestKind.LINE, a_batch().id, prefix=7)]
    picks = supply.picks(target("demo"), wants)
    assert picks == wants
    supply.count_claimed(target("demo"), picks, claim(store, limit=4, prefix=7))
    works = await supply.with_groups(supply.works_of(target("demo")), {})
    assert [work.rows for work in works] == [6]
    assert [group.rows for group in works[0].groups] == [6]
    supply.count_claimed(target("demo"), picks, [])
    assert supply.works_of(target("demo")) == []
    assert supply.read_at < 1.0


@pytest.mark.usefixtures("hurried")
async def test_all_lines_of_a_batch_are_run_once(tmp_path: Path) -> None:
    nodes = [EmulatedNode(slots=4) for _ in range(2)]
    async with gateway_over(tmp_path, *nodes) as running:
        batch = await submit(running, lines(40))
        found = await ended(running, batch)
        assert found["status"] == "completed"
        assert found["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        results = await output(running, found["output_file_id"])
        assert sorted(one["custom_id"] for one in results) == sorted(
            f"line-{number}" for number in range(40)
        )
        assert sum(node.requests for node in nodes) == 40
        metrics = (await running.client.get(f"{running.admin_url}/metrics")).text
        assert 'llama_gateway_batch_lines_total{outcome="done"} 40\n' in metrics


@in_virtual_time
async def test_as_many_lines_run_as_there_are_slots_and_no_more_wait(tmp_path: Path) -> None:
    node = EmulatedNode(slots=4, decode_tps=40)
    async with virtual_gateway_over(tmp_path, node) as running:
        batch = await submit(running, lines(40))
        await until(lambda: node.slots.busy == 4)
        seen: list[tuple[int, int]] = []
        scheduler = running.gateway.scheduler
        while (await show(running, batch))["request_counts"]["completed"] < 30:
            seen.append((node.slots.busy, len(scheduler.waiters)))
            await asyncio.sleep(0.02)
        assert sum(busy for busy, _ in seen) / len(seen) >= 0.95 * 4
        assert max(waiting for _, waiting in seen) <= 4
        await ended(running, batch)


@pytest.mark.usefixtures("hurried")
async def test_a_cancelled_batch_leaves_its_slots(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, decode_tps=10, answer_tokens=5000)
    async with gateway_over(tmp_path, node) as running:
        batch = await submit(running, lines(20, max_tokens=5000))
        await until(lambda: node.slots.busy == 2)
        await running.client.post(f"/v1/batches/{batch}/cancel", headers=HEADERS)
        found = await ended(running, batch, 20.0)
        assert found["status"] == "cancelled"
        await until(lambda: node.slots.busy == 0)


@in_virtual_time
async def test_lines_of_a_revoked_key_fail(tmp_path: Path) -> None:
    other = key(id="k2", name="bob", sha256=hash_key("lg_k2_" + "t" * 43).sha256)
    node = EmulatedNode(slots=2, decode_tps=20)
    async with virtual_gateway_over(tmp_path, node, keys=[key(), other]) as running:
        batch = await submit(running, lines(20))
        await until(lambda: node.requests >= 4)
        running.gateway.key_sync.configure([], allow_anonymous=False)
        feeder = running.gateway.background.feeder
        assert feeder is not None
        await until(lambda: feeder.counts.outcomes["failed"] >= 10, 30.0)
        assert node.requests < 12
        del batch


@pytest.mark.usefixtures("hurried")
async def test_lines_wait_while_a_limit_of_their_key_is_reached(tmp_path: Path) -> None:
    node = EmulatedNode(slots=4)
    limited = key(limits={"concurrency": 2})
    async with gateway_over(tmp_path, node, keys=[limited]) as running:
        found = await ended(running, await submit(running, lines(20)))
        assert found["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


@pytest.mark.usefixtures("hurried")
async def test_lines_for_an_unknown_model_fail_soon(tmp_path: Path) -> None:
    async with gateway_over(tmp_path, EmulatedNode()) as running:
        found = await ended(running, await submit(running, lines(50, model="gpt-nothing")))
        assert found["request_counts"] == {"total": 50, "completed": 0, "failed": 50}


@in_virtual_time
async def test_a_gateway_that_ends_puts_back_what_it_runs(tmp_path: Path) -> None:
    async with virtual_gateway_over(tmp_path, EmulatedNode(slots=2, decode_tps=30)) as running:
        batch = await submit(running, lines(20))
        node = running.gateway.fleet.nodes["n0"]
        await until(lambda: node.requests >= 4)
    async with virtual_gateway_over(tmp_path, EmulatedNode(slots=2, decode_tps=30)) as running:
        found = await ended(running, batch, 60.0)
        assert found["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        results = await output(running, found["output_file_id"])
        assert len({one["custom_id"] for one in results}) == len(results) == 20


@pytest.mark.usefixtures("hurried")
@pytest.mark.slow
async def test_lines_end_while_the_store_is_away_and_are_recorded_later(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, decode_tps=40)
    async with gateway_over(tmp_path, node) as running:
        batch, feeder = await submit(running, lines(40)), running.gateway.background.feeder
        assert feeder is not None
        await until(lambda: node.requests >= 2)
        away = StoreUnavailable("it is away", "wait")
        with patch.object(Store, "run", side_effect=away):
            # Those that were claimed before run to their end.
            await until(lambda: feeder.claimed == feeder.running == node.slots.busy == 0, 20.0)
            assert node.requests < 40
        found = await ended(running, batch)
        assert found["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert node.requests == 40
        log = (tmp_path / "gateway.log").read_text()
        assert log.count('"lines of batches wait"') == 1


@in_virtual_time
async def test_lines_whose_file_is_gone_fail(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=20)
    async with virtual_gateway_over(tmp_path, node) as running:
        batch = await submit(running, lines(6))
        await until(lambda: node.requests == 1)
        (tmp_path / "state/batches" / (await show(running, batch))["input_file_id"]).unlink()
        found = await ended(running, batch)
        assert found["request_counts"] == {"total": 6, "completed": 1, "failed": 5}


@pytest.mark.usefixtures("hurried")
async def test_lines_of_a_paused_model_wait_and_go_on(tmp_path: Path) -> None:
    nodes = [
        EmulatedNode(slots=2),
        EmulatedNode(slots=2, model="other"),
    ]
    async with gateway_over(tmp_path, *nodes) as running:
        fleet = running.gateway.fleet
        fleet.pause_model("demo", paused=True)
        with patch("gateway.errors.PAUSED_RETRY_SECONDS", 0.05):
            paused = await submit(running, lines(20, model="demo"))
            others = await submit(running, lines(20, model="other"))
            assert (await ended(running, others))["request_counts"]["completed"] == 20
            found = await show(running, paused)
            assert found["status"] == "in_progress"
            assert found["request_counts"] == {"total": 20, "completed": 0, "failed": 0}
            fleet.pause_model("demo", paused=False)
            assert (await ended(running, paused))["request_counts"]["completed"] == 20


def p95(seconds: list[float]) -> float:
    return quantiles(seconds, n=20)[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("site", "lines_beside", "words", "busy"),
    [
        pytest.param(Site(2, 4, 0.25), 200, 300, 6.0, id="long prompts"),
        pytest.param(Site(4, 2, 0.5, line_words=300), 100, 0, 4.0, id="as many nodes as chats"),
    ],
)
@in_virtual_time
async def test_chats_do_not_notice_the_lines_of_a_batch_beside_them(
    site: Site, lines_beside: int, words: int, busy: float
) -> None:
    alone = await chats_beside(site, 0, words, 30)
    beside = await chats_beside(site, lines_beside, words, 30)
    assert beside.busy > busy > alone.busy
    assert p95(beside.seconds) <= 1.25 * p95(alone.seconds)


CHAT = "/v1/chat/completions"
OTHER = "lg_k2_" + "t" * 43
OTHERS: dict[str, Any] = {"id": "k2", "name": "bob", "sha256": hash_key(OTHER).sha256}
OTHER_HEADERS = {"authorization": f"Bearer {OTHER}"}


def a_node(slots: int = 2, **options: Any) -> EmulatedNode:
    """A node that writes 20 tokens in a second."""
    return EmulatedNode(
        **{"slots": slots, "prefill_tps": 2000.0, "decode_tps": 20.0, "answer_tokens": 5000}
        | options
    )


@contextlib.asynccontextmanager
async def a_site(
    folder: Path, *nodes: EmulatedNode, own: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Running]:
    """A gateway with a store whose wall clock is virtual too; `own`: fields of the batch's key."""
    loop = asyncio.get_running_loop()
    begin = time.time() - loop.time()
    wall = SimpleNamespace(time=lambda: begin + loop.time())
    chosen: dict[str, Any] = {
        "store": {"url": f"sqlite:///{folder}/gateway.db"},
        "keys": [key(**(own or {})), OTHERS],
        "batches": {"windows": {"shortest": 5}},
        **settings,
    }
    with store_in_virtual_time(), patch("gateway.app.background.time", wall):
        async with gateway_over(folder, *nodes, **chosen) as running:
            yield running


@contextlib.asynccontextmanager
async def chats(
    running: Running, clients: int, tokens: int = 20, headers: dict[str, str] = OTHER_HEADERS
) -> AsyncIterator[list[float]]:
    """Clients that always want an answer; gives the seconds that each chat took."""
    seconds: list[float] = []

    async def one(number: int) -> None:
        while True:
            body = {
                "messages": [{"role": "user", "content": f"chat {number} at {now()}"}],
                "max_tokens": tokens,
            }
            began = now()
            answer = await running.client.post(CHAT, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            seconds.append(now() - began)

    tasks = [asyncio.create_task(one(number)) for number in range(clients)]
    try:
        yield seconds
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in results if not isinstance(one, asyncio.CancelledError)]


def finished_of(running: Running) -> list[RequestRecord]:
    found: list[RequestRecord] = []
    running.gateway.bus.subscribe(RequestRecord, found.append)
    return found


def queued_of(running: Running, caller: str = "k1") -> list[Priority]:
    """The classes in which requests of a caller wait."""
    waiters = running.gateway.scheduler.waiters
    return [one.request.caller.priority for one in waiters if one.request.caller.id == caller]


async def responded_later(running: Running, body: dict[str, Any]) -> str:
    """The id of a new response in the background."""
    made = await running.client.post("/v1/responses", json=body, headers=HEADERS)
    return str(made.json()["id"])


async def response(running: Running, id_: str) -> dict[str, Any]:
    found = await running.client.get(f"/v1/responses/{id_}", headers=HEADERS)
    shown: dict[str, Any] = found.json()
    return shown


async def errors_of(running: Running, batch: dict[str, Any]) -> Counter[str]:
    assert batch["error_file_id"] is not None, batch
    return Counter(line["error"]["code"] for line in await output(running, batch["error_file_id"]))


@in_virtual_time
async def test_lines_whose_folder_is_away_wait_and_go_on(tmp_path: Path) -> None:
    node = a_node(1)
    async with a_site(tmp_path, node) as running:
        batch = await submit(running, lines(6))
        await until(lambda: node.requests == 2)
        folder, away = tmp_path / "state/batches", tmp_path / "away"
        folder.rename(away)
        folder.mkdir(mode=0o700)
        await asyncio.sleep(10.0)
        assert node.requests == 2
        folder.rmdir()
        away.rename(folder)
        found = await ended(running, batch, 120.0)
        assert found["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        assert node.requests == 6


@in_virtual_time
async def test_a_late_batch_does_not_stand_behind_lines_that_have_time(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node()) as running, chats(running, 8):
        await asyncio.sleep(3.0)
        early = await submit(running, lines(50))
        feeder = running.gateway.background.feeder
        assert feeder is not None
        await until(lambda: feeder.claimed >= 4)
        late = await submit(running, lines(8), completion_window="40s")
        found = await ended(running, late)
        assert found["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        assert (await show(running, early))["request_counts"]["completed"] == 0


@in_virtual_time
async def test_lines_of_a_key_that_may_have_no_higher_class_wait_and_expire(tmp_path: Path) -> None:
    own = {"class": "batch", "max_class": "batch"}
    async with a_site(tmp_path, a_node(), own=own) as running:
        async with chats(running, 8):
            await asyncio.sleep(3.0)
            began = now()
            found = await ended(running, await submit(running, lines(12), completion_window="20s"))
            took = now() - began
        assert (found["status"], found["request_counts"]["completed"]) == ("expired", 0)
        assert await errors_of(running, found) == {"batch_expired": 12}
        assert 20.0 <= took <= 25.0


@in_virtual_time
async def test_lines_are_raised_to_the_usual_class_of_their_key_and_no_higher(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node(), own={"max_class": "urgent"}) as running:
        finished, seen = finished_of(running), set[Priority]()
        async with chats(running, 6):
            await asyncio.sleep(3.0)
            batch = await submit(running, lines(8), completion_window="30s")
            while (await show(running, batch))["status"] in {"validating", "in_progress"}:
                seen.update(queued_of(running))
                await asyncio.sleep(0.2)
        assert Priority.NORMAL in seen
        assert seen <= {Priority.NORMAL, Priority.BATCH}
        assert {one.priority for one in finished} <= {Priority.NORMAL, Priority.BATCH}


@in_virtual_time
async def test_late_lines_and_chats_of_another_key_get_equal_shares(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node()) as running:
        async with chats(running, 8) as theirs:
            await asyncio.sleep(3.0)
            batch = await submit(running, lines(200), completion_window="60s")
            await until(lambda: queued_of(running))
            before = len(theirs)
            await asyncio.sleep(30.0)
            of_chats = len(theirs) - before
            of_lines = (await show(running, batch))["request_counts"]["completed"]
            await running.client.post(f"/v1/batches/{batch}/cancel", headers=HEADERS)
        assert of_lines + of_chats >= 50
        assert 0.4 <= of_lines / (of_lines + of_chats) <= 0.6


@in_virtual_time
async def test_chats_of_the_same_key_wait_behind_few_late_lines(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node(4)) as running:
        batch = await submit(running, lines(300), completion_window="60s")
        await until(lambda: queued_of(running))
        most = 0
        async with chats(running, 3, headers=HEADERS) as own:
            for _ in range(100):
                await asyncio.sleep(0.2)
                most = max(most, len(queued_of(running)))
        # An answer takes a second; 3 chats and 2 late lines share 4 slots at most.
        assert len(own) >= 30
        assert max(own) <= 3.0
        assert most <= 5
        assert (await show(running, batch))["request_counts"]["completed"] >= 20


@in_virtual_time
async def test_late_lines_take_an_eighth_of_the_queue_at_most(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node(32), queue={"max": 16}) as running:
        batch = await submit(running, lines(100, max_tokens=400), completion_window="60s")
        await until(lambda: len(queued_of(running)) == 2)
        for _ in range(30):
            await asyncio.sleep(0.5)
            assert len(queued_of(running)) <= 2
        await running.client.post(f"/v1/batches/{batch}/cancel", headers=HEADERS)
        await until(lambda: not queued_of(running))


@in_virtual_time
async def test_a_line_that_runs_at_the_deadline_is_cut_and_costs_nothing(tmp_path: Path) -> None:
    node = a_node(2)
    limited = {"limits": {"tokens_per_day": 100_000}}
    async with a_site(tmp_path, node, own=limited) as running:
        began = now()
        batch = await submit(running, lines(5, max_tokens=5000), completion_window="20s")
        await until(lambda: node.slots.busy == 2)
        found = await ended(running, batch)
        assert 20.0 <= now() - began <= 25.0
        assert found["status"] == "expired"
        assert found["request_counts"] == {"total": 5, "completed": 0, "failed": 0}
        assert found["llama_gateway"]["expired"] == 5
        assert await errors_of(running, found) == {"batch_expired": 5}
        await until(lambda: node.slots.busy == 0, 5.0)
        assert found["usage"]["total_tokens"] == 0
        limits = (await running.client.get("/v1/usage", headers=HEADERS)).json()["limits"]
        assert [one["used"] for one in limits] == [0], limits
    rows, _ = rows_of(f"sqlite:///{tmp_path}/gateway.db")
    assert [row for row in rows if row["key"] == "k1"] == []


@in_virtual_time
async def test_lines_that_end_before_the_deadline_are_kept_when_others_expire(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node(2)) as running:
        batch = await submit(running, lines(100), completion_window="20s")
        found = await ended(running, batch)
        assert found["status"] == "expired"
        done = await output(running, found["output_file_id"])
        gone = await output(running, found["error_file_id"])
        assert 30 <= len(done) <= 45
        assert {one["error"]["code"] for one in gone} == {"batch_expired"}
        ids = [one["custom_id"] for one in (*done, *gone)]
        assert sorted(ids) == sorted(f"line-{number}" for number in range(100))
        assert found["request_counts"]["completed"] == len(done)


@in_virtual_time
async def test_a_paused_batch_takes_its_late_lines_out_of_the_queue(tmp_path: Path) -> None:
    node = a_node(2)
    async with a_site(tmp_path, node) as running:
        async with chats(running, 6, tokens=100):
            await asyncio.sleep(8.0)
            batch = await submit(running, lines(20), completion_window="60s")
            await until(lambda: len(queued_of(running)) == 2)
            answer = await running.client.post(f"/v1/batches/{batch}/pause", headers=HEADERS)
            assert answer.status_code == 200
            await until(lambda: not queued_of(running), 2.0)
            await asyncio.sleep(10.0)
            assert not queued_of(running)
            assert (await show(running, batch))["llama_gateway"]["running"] == 0
        await running.client.post(f"/v1/batches/{batch}/resume", headers=HEADERS)
        found = await ended(running, batch)
        assert found["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


@in_virtual_time
async def test_a_paused_batch_expires_at_its_deadline(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node(1)) as running:
        began = now()
        batch = await submit(running, lines(50), completion_window="15s")
        await asyncio.sleep(5.0)
        await running.client.post(f"/v1/batches/{batch}/pause", headers=HEADERS)
        found = await ended(running, batch)
        assert found["status"] == "expired"
        assert 15.0 <= now() - began <= 20.0
        assert 3 <= found["request_counts"]["completed"] <= 8


@in_virtual_time
async def test_a_line_that_runs_when_its_deadline_comes_near_yields_no_more(
    tmp_path: Path,
) -> None:
    node = a_node(1)
    async with a_site(tmp_path, node) as running:
        # The line takes 40 s of the 100 s that it has; clients want its slot all the time.
        batch = await submit(running, lines(1, max_tokens=800), completion_window="100s")
        await until(lambda: node.slots.busy == 1)
        async with chats(running, 2, tokens=100):
            found = await ended(running, batch, 110.0)
        assert found["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


@in_virtual_time
async def test_a_background_response_ends_at_its_deadline(tmp_path: Path) -> None:
    node = a_node(1)
    async with a_site(
        tmp_path, node, batches={"windows": {"shortest": 5, "default": 20}}
    ) as running:
        began = now()
        body = {"input": "tell", "background": True, "max_output_tokens": 4000}
        for id_ in [await responded_later(running, body) for _ in range(2)]:
            while (found := await response(running, id_))["status"] in {"queued", "in_progress"}:
                assert now() - began < 60.0
                await asyncio.sleep(0.2)
            assert found["status"] == "failed"
            assert "time was over" in found["error"]["message"]
        assert 20.0 <= now() - began <= 25.0
        await until(lambda: node.slots.busy == 0, 5.0)


@in_virtual_time
async def test_a_background_request_of_class_batch_is_not_starved(tmp_path: Path) -> None:
    settings = {"windows": {"shortest": 5, "default": 60}}
    async with a_site(tmp_path, a_node(1), batches=settings) as running, chats(running, 4):
        await asyncio.sleep(2.0)
        body = {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 20}
        headers = {**HEADERS, "prefer": "respond-async", "x-priority": "batch"}
        answer = await running.client.post(CHAT, json=body, headers=headers)
        url = answer.headers["location"]
        async with asyncio.timeout(70.0):
            while True:
                got = await running.client.get(url, headers=HEADERS)
                if got.status_code != 202:
                    break
                await asyncio.sleep(0.5)
        assert got.status_code == 200


@in_virtual_time
async def test_a_gateway_that_is_succeeded_leaves_late_lines_that_wait_to_the_next(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node(2)) as running, chats(running, 6, tokens=100):
        await asyncio.sleep(8.0)
        batch = await submit(running, lines(20, max_tokens=100), completion_window="60s")
        feeder = running.gateway.background.feeder
        assert feeder is not None
        await until(lambda: len(queued_of(running)) == 2 and feeder.running > 2)
        running.gateway.background.stop()
        await until(lambda: not queued_of(running), 1.0)
        assert feeder.running > 0
        await asyncio.wait_for(running.gateway.background.drain(), 10.0)
        shown = await show(running, batch)
        assert shown["request_counts"]["completed"] >= 1
        assert shown["llama_gateway"]["running"] == 0


@in_virtual_time
async def test_a_gateway_that_is_succeeded_leaves_waiting_responses_to_the_next(
    tmp_path: Path,
) -> None:
    node = a_node(1)
    async with a_site(tmp_path, node) as running:
        body = {"input": "tell", "background": True, "max_output_tokens": 100}
        made = [await responded_later(running, body) for _ in range(2)]
        await until(lambda: node.slots.busy == 1 and len(queued_of(running)) == 1)
        running.gateway.background.stop()
        await until(lambda: not queued_of(running), 3.0)
        await asyncio.wait_for(running.gateway.background.drain(), 10.0)
        found = [await response(running, id_) for id_ in made]
        assert sorted(one["status"] in {"queued", "in_progress"} for one in found) == [False, True]
