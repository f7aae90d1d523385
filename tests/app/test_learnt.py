from __future__ import annotations

import json
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from sqlalchemy import select
from structlog.testing import capture_logs

from gateway.app.learnt import HALF_LIFE, OLDEST, Demand, LearntFile, LearntMemory
from gateway.callers.keys import KeyRing
from gateway.callers.stored_keys import add_keys, revoke_key
from gateway.config.keys import KeySpec
from gateway.events import EventBus
from gateway.lease import (
    NOTHING_TRIED,
    AttemptReport,
    KeyedHash,
    LeaseRequest,
    PromptKey,
    Usage,
    UsageReport,
)
from gateway.nodes.prompt_cache import KeptPrompt
from gateway.nodes.saved_prompts import Canary, SavedFile, SavedPrompt, SavedPrompts
from gateway.nodes.server_properties import ServerProperties
from gateway.schedule.core.demand_model import TokenEstimates
from gateway.schedule.lease_service import LocalLeaseService
from gateway.schedule.scheduler import Scheduler
from gateway.store.schema import learnt as table
from gateway.store.store import Store
from gateway.watch.history import FleetHistory, Gauges, NodeHistory
from tests.each_case import each_case
from tests.lease_requests import expected, learn
from tests.nodes.build import Clock, a_node
from tests.schedule.build import a_request, a_scheduler
from tests.store.stores import opened

WHOLE = 10.0
"""Seconds; no test comes near."""
SAID: dict[str, Any] = {
    "models": ("demo",), "n_params": 7, "size": 9, "file": "m.gguf", "build": "b1", "slots": 2,
}  # fmt: skip
TIMINGS = {"prompt_n": 300, "prompt_ms": 1000.0, "predicted_n": 60, "predicted_ms": 2000.0}
ANYBODY = "anonymous:192.0.2.1"
BLOCKS = tuple(range(-5, 15))


class Life:
    """One process of a gateway, as far as it learns."""

    def __init__(
        self,
        place: Path | Store,
        *,
        said: dict[str, Any] = SAID,
        key: bytes | None = None,
        name: str = "g",
        remember: bool = True,
    ) -> None:
        self.clock = Clock()
        self.ring = KeyRing()
        self.node = a_node(name="a", url="http://a:1")
        self.node.properties = ServerProperties(**said)
        self.scheduler: Scheduler = a_scheduler(self.node, clock=self.clock)
        self.scheduler.fleet.refresh_state(self.node)
        self.bus = EventBus()
        self.history = FleetHistory(self.bus)
        self.days = NodeHistory()
        self.keyed_hash = KeyedHash(key)
        sync = self.scheduler.fleet_sync
        self.saved = SavedPrompts(self.scheduler.prompt_cache, sync.row_index, lambda _: None)
        self.memory = LearntMemory.of_gateway(
            *(self.scheduler, self.history, self.days, self.bus, self.ring, self.keyed_hash),
            *(place, name, lambda: remember),
            saved_prompts=self.saved,
            has_hash_key=key is not None,
        )

    def serve(self, caller: str = ANYBODY, fairness_key: str | None = None) -> LeaseRequest:
        request = a_request(
            caller=caller,
            fairness_key=fairness_key or caller,
            prompt_key=PromptKey(BLOCKS, 400.0),
            text_bytes=1200.0,
        )
        leases = LocalLeaseService(self.scheduler, self.scheduler.fleet)
        lease = leases.lease_now(request, NOTHING_TRIED, 0.0)
        assert lease is not None
        self.clock.passes(1.0)
        leases.content_began(lease.id)
        self.clock.passes(2.0)
        leases.ended(AttemptReport(lease.id, "ok", 200, True, True, True))
        used = Usage(400, 100, 60, TIMINGS)
        leases.settle(UsageReport(lease.id, used, used, 60), request)
        return request

    @property
    def cached(self) -> float:
        """Tokens that the node is believed to have of the prompt."""
        found = self.scheduler.prompt_cache.lookup(PromptKey((*BLOCKS, 99), 420.0)).cached
        return sum(found.values())

    def expected(self, caller: str = ANYBODY) -> tuple[float, float]:
        return expected(self.scheduler.demand_model.token_estimates, "demo", caller, 1000.0, None)


@pytest.fixture(params=["file", "sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | Store]:
    """Where rows are kept, of each kind in turn."""
    if request.param == "file":
        yield tmp_path / "learnt.json"
        return
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").new_database()
    with opened(url) as store:
        yield store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "learnt.json"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(f"sqlite:///{tmp_path / 'gateway.db'}") as store:
        yield store


async def learnt_once(place: Path | Store, **keys: Any) -> Life:
    life = await next_life(place, **keys)
    for _ in range(3):
        life.serve()
    life.node.sleep.learn_wake(7.0)
    life.history.close_step(time.time(), life.clock(), Gauges(0, 1, 0))
    for ago in (900.0, 600.0, 300.0, 0.0):
        life.days.read("a", time.time() - ago, 1, 2, life.node.speed)
    await life.memory.close(WHOLE)
    return life


async def next_life(place: Path | Store, **keys: Any) -> Life:
    life = Life(place, **keys)
    await life.memory.load(WHOLE)
    life.memory.begin_writing()
    return life


def kept(place: Path | Store) -> list[tuple[str, str | None]]:
    if isinstance(place, Path):
        return [(row[0], row[3]) for row in json.loads(place.read_text())["rows"]]
    return place.run_now(
        lambda c: [(s, who) for s, who in c.execute(select(table.c.section, table.c.caller))]
    )


def times(place: Path | Store) -> list[float]:
    if isinstance(place, Path):
        return sorted(row[4] for row in json.loads(place.read_text())["rows"])
    return place.run_now(lambda c: sorted(c.scalars(select(table.c.changed_at))))


async def test_all_that_was_learnt_is_there_after_a_restart(place: Path | Store) -> None:
    before = await learnt_once(place)
    after = await next_life(place)
    assert after.node.speed.decode_tps == before.node.speed.decode_tps == pytest.approx(30)
    assert (after.node.speed.samples, after.node.sleep.measured) == (3, 7.0)
    assert after.node.degradation.export() == before.node.degradation.export()
    assert after.expected() == pytest.approx(before.expected(), rel=1e-4)
    assert after.expected(ANYBODY) != after.expected("nobody")
    for counted in ("first_token", "completion"):
        was, now = (getattr(life.scheduler.accuracy, counted) for life in (before, after))
        assert now.counts == was.counts
        assert sum(now.counts) > 0
    assert after.keyed_hash.key == before.keyed_hash.key
    assert after.cached == before.cached > 400
    assert after.history.points == before.history.points
    day = after.days.as_json("a", time.time(), after.node.speed)["points"]
    assert [row[1:3] for row in day] == [(1.0, 2.0)] * 3  # The step that ran was not over.
    assert len(after.scheduler.decision_log.grants) == 3
    was, now = (life.scheduler.decision_log.grants[0] for life in (before, after))
    assert now.used == was.used == (400, 100, 60)
    # All but times, which count by the clock of a process.
    untimed = {"at": 0.0, "received_at": 0.0, "first_content_at": 0.0, "ended_at": 0.0}
    assert was.comparison is not None
    assert now.comparison is not None
    chosen = replace(now.comparison.chosen, work=was.comparison.chosen.work)
    alike = replace(now.comparison, at=was.comparison.at, chosen=chosen)
    one, other = replace(now, comparison=alike, **untimed), replace(was, **untimed)
    assert msgspec.json.encode(one) == msgspec.json.encode(other)
    # A thing that nobody has learnt anything of since is not written again.
    rows = times(place)
    await after.memory.save(WHOLE)
    assert times(place) == rows


@each_case(
    ("name", "value"),
    [("models", ("other",)), ("file", "x.gguf"), ("build", "b2"), ("slots", 4), ("size", 10)],
)
async def test_what_was_learnt_of_another_build_is_dropped(
    name: str, value: object, tmp_path: Path
) -> None:
    file, other = tmp_path / f"{name}.json", SAID | {name: value}
    await learnt_once(file)
    for said in (other, SAID):
        life = Life(file, said=said)
        await life.memory.load(WHOLE)
        if said is SAID:
            # The server says so only now.
            assert life.node.speed.decode_tps
            assert life.cached
            life.node.properties = ServerProperties(**other)
            life.scheduler.fleet.refresh_state(life.node)
        assert life.node.speed.decode_tps is None
        assert not life.node.degradation.decode.baselines
        assert not life.cached


async def test_older_evidence_counts_less_and_old_rows_are_dropped(file: Path) -> None:
    now = Clock(1e9)

    def estimates_of(memory_of: TokenEstimates) -> LearntMemory:
        return LearntMemory([Demand(memory_of)], LearntFile(file, now), KeyRing(), now)

    first = TokenEstimates()
    memory = estimates_of(first)
    memory.begin_writing()
    for _ in range(50):
        learn(first, "demo", ANYBODY, 1000, 500, 1000, None)
    await memory.close(WHOLE)
    means = []
    for age in (0.0, HALF_LIFE, 4 * HALF_LIFE, OLDEST):
        now.now = 1e9 + age
        later = TokenEstimates()
        await estimates_of(later).load(WHOLE)
        for _ in range(2):
            learn(later, "demo", ANYBODY, 1000, 500, 10, None)
        means.append(expected(later, "demo", ANYBODY, 1000, None)[1])
    assert means == sorted(means, reverse=True)
    assert means[0] > 800
    fresh = TokenEstimates()
    for _ in range(2):
        learn(fresh, "demo", ANYBODY, 1000, 500, 10, None)
    assert means[-1] == expected(fresh, "demo", ANYBODY, 1000, None)[1]


@each_case(
    ("content", "told"),
    [
        (b"\xff\xfe garbage", "damaged"),
        (b"", "damaged"),
        (b'{"version": 1, "rows": [[1]]}', "damaged"),
        (b'{"version": 1, "rows": [["servers", 1, "k"', "damaged"),
        (b'{"version": 2, "rows": []}', "another version"),
    ],
)
async def test_an_unusable_file_is_set_aside_with_one_line(
    content: bytes, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "learnt.json"
    file.write_bytes(content)
    caplog.clear()
    with capture_logs() as logs:
        life = await next_life(file)
    lines = [*(str(line) for line in logs), *(r.getMessage() for r in caplog.records)]
    assert [told in line for line in lines] == [True]
    assert (tmp_path / "learnt.json.bad").read_bytes() == content
    life.serve()
    await life.memory.close(WHOLE)
    assert file.stat().st_mode & 0o777 == 0o600
    assert (await next_life(file)).node.speed.decode_tps


@each_case(
    ("column", "value", "is_read"),
    [
        ("changed_at", "'soon'", True),
        ("key", "X'00'", True),
        ("value", "CAST(X'FFFE' AS TEXT)", False),
        ("changed_at", "9e999", True),
        ("version", "3", True),
    ],
)
async def test_a_row_that_this_program_never_wrote_stops_nothing(
    column: str, value: str, *, is_read: bool, tmp_path: Path
) -> None:
    name = sha256(f"{column} {value}".encode()).hexdigest()
    with opened(f"sqlite:///{tmp_path / name}") as store:
        await learnt_once(store)
        row = {
            "gateway": "'g'", "section": "'decisions'", "version": "2", "key": "'g1'",
            "changed_at": "4e9", "value": "'{}'",
        } | {column: value}  # fmt: skip
        statement = f"INSERT INTO learnt ({','.join(row)}) VALUES ({','.join(row.values())})"
        store.run_now(lambda c: c.exec_driver_sql(statement).rowcount)
        with capture_logs() as logs:
            life = await next_life(store)
        assert [line["log_level"] for line in logs] == ["warning"], logs
        assert bool(life.node.speed.decode_tps) is is_read
        life.serve()
        await life.memory.close(WHOLE)


async def test_gateways_of_one_store_keep_own_rows_and_learn_of_each_other(store: Store) -> None:
    await learnt_once(store, name="one")
    two = await next_life(store, name="two")
    assert two.node.speed.decode_tps == pytest.approx(30)
    assert two.expected(ANYBODY) != two.expected("nobody")
    assert not two.scheduler.decision_log.grants
    assert not two.history.points
    two.serve()
    await two.memory.close(WHOLE)
    names = store.run_now(lambda c: [*c.scalars(select(table.c.gateway))])
    assert set(names) == {"one", "two"}
    one = await next_life(store, name="one")
    assert len(one.scheduler.decision_log.grants) == 3
    assert one.cached


async def test_a_full_section_drops_what_changed_least_recently(file: Path) -> None:
    def small(estimates: TokenEstimates) -> LearntMemory:
        section = Demand(estimates)
        section.most_rows = 10
        return LearntMemory([section], LearntFile(file), KeyRing())

    estimates = TokenEstimates()
    memory = small(estimates)
    memory.begin_writing()
    with capture_logs() as logs:
        for number in range(30):
            learn(estimates, "demo", f"anonymous:{number}", 1000, 500, 100, None)
            await memory.save(WHOLE)
    assert [line["event"] for line in logs] == ["learnt: the oldest rows are dropped from now on"]
    callers = {caller for _, caller in kept(file)}
    assert callers == {None, *(f"anonymous:{number}" for number in range(21, 30))}


KEY = KeySpec(id="team", sha256=sha256(b"secret").hexdigest(), name="team")


async def test_revoking_a_key_deletes_what_was_learnt_of_its_caller(store: Store) -> None:
    def of_team() -> set[str]:
        return {section for section, caller in kept(store) if caller == "team"}

    store.run_now(lambda c: add_keys(c, [KEY], 1.0))
    life = Life(store)
    life.ring.configure([KEY])
    await life.memory.load(WHOLE)
    life.memory.begin_writing()
    life.serve("team", "team/alice")
    await life.memory.save(WHOLE)
    assert of_team() == {"demand", "prompts"}
    store.run_now(lambda c: revoke_key(c, "team", 2.0))
    assert not of_team()
    for _ in range(2):  # What the running gateway would write of it again, and what ran on.
        life.serve("team", "team/alice")
        life.ring.configure([])
        await life.memory.save(WHOLE)
        assert not of_team()
        assert life.expected("team/alice") == life.expected("nobody")
        assert not life.cached
    # What is left of a key that went meanwhile is dropped at the start.
    life.ring.configure([KEY])
    life.serve("team")
    life.serve("anonymous:2001:db8::/64")
    await life.memory.close(WHOLE)
    assert of_team()
    after = await next_life(store)
    await after.memory.save(WHOLE)
    assert after.node.speed.decode_tps
    callers = {caller for section, caller in kept(store) if section == "demand"}
    assert callers == {None, "anonymous:2001:db8::/64"}


async def test_the_files_of_saved_prompts_are_known_after_a_restart(place: Path | Store) -> None:
    one = SavedPrompt(
        b"server",
        Canary((7, 8), (-0.5, -0.25), SavedFile(20, 4096, b"digest")),
        SavedFile(99, 4096, None),
        KeptPrompt(b"12345678", 90, 10, ends_on_block=True),
        "",
    )
    life = await next_life(place)
    for slot in (0, 1):
        life.saved.add(f"a.{slot}", one)
    life.saved.add("b.0", replace(one, caller="gone"))
    await life.memory.close(WHOLE)
    life = await next_life(place)
    assert dict(life.saved.export()) == {"a.0": one, "a.1": one}
    life.saved.forget(lambda _: True)
    life.saved.add("a.2", one)
    await life.memory.close(WHOLE)
    life = await next_life(place)
    assert [key for key, _ in life.saved.export()] == ["a.0", "a.1", "a.2"]
    # Of other digests nothing is known.
    await life.memory.close(WHOLE)
    assert not [*(await next_life(place, key=bytes(32))).saved.export()]


async def test_a_process_that_never_served_writes_nothing(place: Path | Store) -> None:
    await learnt_once(place)
    rows = times(place)
    life = Life(place)
    await life.memory.close(WHOLE)
    life = Life(place)
    await life.memory.load(WHOLE)
    life.serve()
    await life.memory.close(WHOLE)
    assert times(place) == rows


async def test_prompts_are_forgotten_where_the_settings_or_the_key_say_so(file: Path) -> None:
    await learnt_once(file)
    assert (await next_life(file, key=bytes(32))).cached == 0
    life = await next_life(file, remember=False)
    assert not life.cached
    life.serve()
    await life.memory.close(WHOLE)
    assert not {section for section, _ in kept(file)} & {"prompts", "prompt_key"}


async def test_a_successor_takes_what_was_written_last_and_keeps_its_own(
    place: Path | Store,
) -> None:
    first = await next_life(place)
    first.serve("anonymous:both")
    await first.memory.save(WHOLE)
    second = await next_life(place, key=first.keyed_hash.key)
    request = first.serve("anonymous:early")
    first.serve("anonymous:both")
    await first.memory.close(WHOLE)
    second.serve("anonymous:both")
    own = second.node.speed.samples, second.expected("anonymous:both")
    await second.memory.load(WHOLE)
    assert (second.node.speed.samples, second.expected("anonymous:both")) == own
    assert second.expected("anonymous:early") != second.expected("nobody")
    assert second.scheduler.decision_log.find([request.id])[request.id].decisions
    assert len(second.scheduler.decision_log.grants) == 4
    # The predecessor writes no more.
    rows = kept(place)
    first.serve("anonymous:late")
    await first.memory.save(WHOLE)
    assert kept(place) == rows
