"""Processes of members in one process, over real tunnels, with a database in memory or another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, cast

from sqlalchemy import create_engine, text
from sqlalchemy.pool import StaticPool

from gateway.cluster.fencing import Fence, Session, Tenure
from gateway.cluster.leadership import FIRST_ROW, Change, LeaderRow, Leadership
from gateway.cluster.membership import Membership, MemberState, Owner, Role
from gateway.cluster.tables import FIRST, LOOK, update_of
from gateway.cluster.tunnel import Greeting, member_certificate
from gateway.config.settings import ClusterSettings
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import metadata
from gateway.store.store import Store
from gateway.watch.metrics import EdgeSample, MemberSample
from tests.cluster.certificates import CLUSTER, Authority
from tests.virtual import now

TERM = 2.0
STEP = 0.05  # seconds that the database takes for a step


class Database:
    """A database with the real tables, and the real statements and jobs; it may be away."""

    def __init__(self) -> None:
        self._engine = create_engine("sqlite://", poolclass=StaticPool)
        metadata.create_all(self._engine)
        self.is_away = False

    async def run(self, job: Callable[..., Any], *, write: bool = True) -> Any:
        del write
        await asyncio.sleep(STEP)
        if self.is_away:
            raise StoreUnavailable("it is away", "wait")
        with self._engine.begin() as connection:
            return job(connection)


class Row:
    """The leadership's row in it, as one member reaches it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.is_away = False

    async def look(self) -> LeaderRow:
        if not (found := await self._ask(LOOK, {})):
            await self._ask(FIRST, FIRST_ROW._asdict())
            found = await self._ask(LOOK, {})
        return LeaderRow(*found[0])

    async def change(self, change: Change) -> bool:
        return bool(await self._ask(*update_of(change)))

    async def _ask(self, sql: str, values: dict[str, Any]) -> list[Any]:
        def job(connection: Any) -> list[Any]:
            result = connection.execute(text(sql), {**values, "cluster": CLUSTER})
            return list(result.all()) if result.returns_rows else []

        if self.is_away:
            raise StoreUnavailable("it can't be reached from here", "wait")
        found: list[Any] = await self.database.run(job)
        return found


class Account(Tenure):
    """A leader's account of members whose edges tell at once that they carry nothing."""

    def __init__(self, role: Role, clock: Callable[[], float]) -> None:
        super().__init__(role.epoch, role.won_at, role.lists, {"x": 4})
        self.clock = clock
        self.begun: list[tuple[Session, tuple[str, ...]]] = []
        self.sessions_left: list[Session] = []

    def begins(self, session: Session, processes: Collection[str], now: float) -> None:
        self.begun.append((session, tuple(processes)))
        self.hello(session, {}, now)

    def left(self, session: Session) -> None:
        self.sessions_left.append(session)


class One:
    def __init__(
        self, settings: ClusterSettings, process: str, store: Store, row: Leadership
    ) -> None:
        self.name = settings.member_name
        self.process = process
        self.roles: list[Role] = []
        self.replaced_by: list[str] = []
        self.tunnels: list[tuple[Greeting, socket.socket]] = []
        self.edges: tuple[str, ...] = (f"{self.name}/edge-1",)
        self.account: Account | None = None
        self.row = row
        self.suspended = 0.0
        self.listening = socket.create_server(("127.0.0.1", int(settings.listen[10:])))
        self.membership = Membership(
            settings,
            process,
            member_certificate(settings.tls, self.name),
            row,
            store,
            Fence(self.name, lambda _: 4),
            Owner(self._on_role, self.replaced_by.append, self._on_tunnel, self._state),
            clock=self.clock,
        )

    def start(self) -> None:
        self.membership.tunnels.serve(self.listening)
        self.membership.start()

    def clock(self) -> float:
        return now() + self.suspended

    @property
    def role(self) -> Role:
        return self.membership.role

    def seen(self) -> dict[str, MemberSample]:
        return {one.name: one for one in self.membership.seen()}

    async def end(self) -> None:
        """End it as `kill -9` does."""
        self.listening.close()
        await self.membership.aclose()
        for _, sock in self.tunnels:
            sock.close()

    def _on_role(self, role: Role) -> None:
        assert role == self.membership.role
        self.roles.append(role)
        if role.kind == "leader":
            self.account = Account(role, self.clock)
            self.membership.lead(role.epoch, self.account)

    def _on_tunnel(self, greeting: Greeting, sock: socket.socket) -> None:
        self.tunnels.append((greeting, sock))

    def _state(self) -> MemberState:
        edges = [EdgeSample(name, 1, True, 0, 0, 0.0, 0.0, 0, 1.0) for name in self.edges]
        return MemberState(tuple(edges), cores=4, folder=f"folder of {self.name}")


class Cluster:
    def __init__(self, authority: Authority, term: float = TERM) -> None:
        self.authority = authority
        self.term = term
        self.database = Database()
        self.all: list[One] = []
        self.ports: dict[str, int] = {}

    def join(self, name: str, process: str = "") -> One:
        if name not in self.ports:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.ports[name] = free.getsockname()[1]
        process = process or f"process of {name}"
        listen = f"127.0.0.1:{self.ports[name]}"
        settings = self.authority.settings(name, listen=listen, term=self.term)
        made = One(settings, process, *self.connections())
        self.all.append(made)
        made.start()
        return made

    def connections(self) -> tuple[Store, Leadership]:
        return cast("Store", self.database), Row(self.database)

    async def end(self, one: One) -> None:
        self.all.remove(one)
        await one.end()

    def leaders(self) -> list[One]:
        return [one for one in self.all if one.role.kind == "leader"]

    def leader(self) -> One:
        (found,) = self.leaders()
        return found

    def others(self) -> list[One]:
        return [one for one in self.all if one is not self.leader()]

    async def until(self, is_so: Callable[[], bool], limit: float) -> float:
        """Wait until this holds, at most so many seconds; how long that took."""
        began = now()
        async with asyncio.timeout(limit):
            while not is_so():
                assert len(self.leaders()) < 2
                await asyncio.sleep(0.01)
        return now() - began

    async def settled(self, limit: float) -> float:
        """Wait until one leads and all others follow it and have been told of its term."""

        def is_so() -> bool:
            if not (found := self.leaders()):
                return False
            role = found[0].role
            return all(
                (one.role.leader, one.role.epoch) == (role.leader, role.epoch)
                and (one.membership.fence.epoch, one.membership.fence.seen > 0)
                == (role.epoch, True)
                for one in self.all
            )

        return await self.until(is_so, limit)


@contextlib.asynccontextmanager
async def cluster_of(authority: Authority, *names: str) -> AsyncIterator[Cluster]:
    made = Cluster(authority)
    for name in names:
        made.join(name)
    try:
        yield made
    finally:
        for one in made.all:
            await one.end()
