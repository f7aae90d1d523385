"""A gateway as a member of a cluster: what it does while it leads, follows or is alone.

The membership says what the member is (`cluster/membership.py`). Here that becomes what the gateway
does: whose brain its edges are linked to, whether it has the duties that one process has for all,
who serves the requests that are no plain requests to nodes, and how much of each limit is its own.
A role is taken in steps, and is left before the next one is taken. What happens meanwhile waits.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import errors
from gateway.app.event_loop import OwnTasks
from gateway.callers.limits import Part
from gateway.cluster.fencing import Fence, Tenure
from gateway.cluster.leadership import boot_clock
from gateway.cluster.membership import Membership, MemberState, Owner, Role
from gateway.cluster.tables import StoredLeadership
from gateway.cluster.tunnel import Greeting, TunnelError
from gateway.config.settings import ClusterSettings
from gateway.edges.passing import Passing
from gateway.edges.reign import Reign
from gateway.edges.supervisor import Edges
from gateway.errors import GatewayError
from gateway.http.certificates import ServerCertificate
from gateway.http.exchange import ConnectionOrigin
from gateway.http.listener import Listener
from gateway.schedule.lease_service import LocalLeaseService
from gateway.store.store import Store
from gateway.watch.metrics import ClusterSample

# Seconds that a member may take to be heard by a new leader, until it counts as lost.
LOST_SECONDS = 10.0
# Seconds after a role's end for which a balancer may go on sending clients: requests wait.
TAKEOVER_SECONDS = 10.0
RETRY_SECONDS = 1.0  # before a role is taken once more that could not be
# What each member answers itself, on either listener: what it is, what its files say, and the files
# of the dashboard.
OWN_PATHS = frozenset(
    {
        *("/", "/health", "/ready", "/metrics", "/openapi.json", "/admin/reload"),
        *("/admin/config", "/admin/config/origins", "/admin/config/history"),
        *("/admin/config/diff", "/admin/config/rollback"),
    }
)
PassedKind = Literal["public", "admin"]  # the listener to which a request came that is passed on
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Duties:
    """What a gateway lets its member do."""

    catch_up: Callable[[], Awaitable[None]]
    """Read what others have learnt and counted until now; within a second or so."""
    begin: Callable[[], None]
    """Take over what only one process does of all that share the store."""
    end: Callable[[], Coroutine[Any, Any, None]]
    replaced: Callable[[str], None]
    """Another process has registered as this member."""
    folder: Callable[[], str]
    """The id of the folder of callers' files; empty: unknown."""
    route: Callable[[bool], None]
    """Serve the requests to nodes that come to this process; False: pass them on as all others."""


class ClusterPart:
    """What one gateway is and does in its cluster."""

    def __init__(
        self,
        settings: ClusterSettings,
        process: str,
        certificate: ServerCertificate,
        store: Store,
        edges: Edges,
        duties: Duties,
        *,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.member = settings.member_name
        self._settings = settings
        self._edges, self._brain, self._duties = edges, edges.brain, duties
        self._fleet, self._book = edges.brain.scheduler.fleet, edges.brain.meter.book
        self._clock = clock
        self._leadership = StoredLeadership(
            store.location, settings.name, seconds=settings.term / 4
        )
        fence = Fence(self.member, self._slots_of)
        owner = Owner(self._on_role, duties.replaced, self._on_tunnel, self._state)
        self._membership = Membership(
            settings, process, certificate, self._leadership, store, fence, owner, clock=clock
        )
        self._listeners: tuple[Listener, Listener] | None = None
        self._role = Role("limbo")  # that the membership says
        self._taken = Role("limbo")  # that this gateway fills
        self._since = clock()
        self._served_at = -math.inf  # when it had a role last
        self._changed = asyncio.Event()
        self._tasks = OwnTasks()
        self._ending: asyncio.Task[None] | None = None  # of the duties of the last reign
        self._unheard: dict[str, float] = {}
        """Members that this leader does not hear of, and since when it has looked in vain."""
        self._late = 0  # requests that were not sent, as this member did not lead any more

    # Start and end.

    def start(self, sock: socket.socket, public: Listener, admin: Listener) -> None:
        """Be a member from now on, and take what others pass on to these listeners.

        `sock` listens for other members.
        """
        self._listeners = public, admin
        leases = self._brain.context.leases
        assert isinstance(leases, LocalLeaseService)
        leases.start_while(self._may_start)
        self._fleet.hand_over()
        self._edges.relink(None)
        self._tasks.start(self._take_roles(), "take the member's role")
        self._membership.tunnels.serve(sock)
        self._membership.start()

    def drain(self) -> None:
        """Lead no more, and never be alone: a successor takes over, or this process ends."""
        self._membership.tunnels.stop_accepting()
        self._membership.drain()

    @property
    def has_others(self) -> bool:
        """Whether another member could lead."""
        others = (one for one in self._membership.seen() if one.name != self.member)
        return any(one.role in {"leader", "follower"} for one in others)

    async def aclose(self) -> None:
        """End it all."""
        await self._membership.aclose()
        await self._tasks.end()
        await self._leave()
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)
        await self._leadership.close()

    # Roles.

    def _on_role(self, role: Role) -> None:
        if self._taken.kind != "limbo":
            self._served_at = self._clock()
        self._role, self._taken = role, Role("limbo", role.epoch)
        self._since = self._clock()
        self._changed.set()

    async def _take_roles(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            role = self._role
            try:
                await self._leave()
                if self._role is role:
                    await self._take(role)
            except Exception:
                # Without a role it would serve nobody, and a leader would keep others from leading.
                log.exception("cluster: a role can't be taken", role=role.kind)
                await asyncio.sleep(RETRY_SECONDS)
                self._changed.set()

    async def _leave(self) -> None:
        """Serve nothing as in the role before; what runs at edges runs on."""
        brain = self._brain
        self._edges.relink(None)
        if brain.reign is not None:
            await brain.end()
            if self._ending is None or self._ending.done():
                self._ending = asyncio.create_task(self._duties.end())
        brain.registry.cancel_where(lambda _: True, errors.no_leader())
        self._duties.route(False)
        self._book.divide(None)
        for listener in self._listeners or ():
            listener.abort_busy()

    async def _take(self, role: Role) -> None:
        match role.kind:
            case "follower":
                open_tunnel = self._membership.open
                self._edges.relink(lambda name, sock: open_tunnel("link", name, sock=sock))
            case "leader":
                if self._ending is not None:
                    await asyncio.gather(self._ending, return_exceptions=True)
                await self._duties.catch_up()
                if self._role is not role:
                    return
                slots = {name: self._slots_of(name) for name in self._fleet.nodes}
                tenure = Tenure(role.epoch, role.won_at, role.lists, slots)
                self._brain.begin(self._reign(role, tenure, role.won_at))
                self._membership.lead(role.epoch, tenure)
                self._serve()
                self._duties.begin()
            case "alone":
                fence = self._membership.fence
                part = partial(fence.sharers.share, edge=self.member)
                self._book.divide(Part(len(fence.sharers.names), part))
                self._brain.begin(self._reign(role, fence, self._clock()))
                self._serve()
        if self._role is role:
            self._taken = role

    def _serve(self) -> None:
        """This gateway is the brain of edges."""
        self._duties.route(True)
        self._edges.relink(lambda name, sock: self._brain.connect(sock, name))

    def _reign(self, role: Role, rules: Tenure | Fence, begun_at: float) -> Reign:
        membership = self._membership
        return Reign(
            self.member, role.epoch, rules, membership.may_grant, self._clock, begun_at,
            self._fleet, membership.heard,
        )  # fmt: skip

    def _may_start(self, _: int) -> bool:
        reign = self._brain.reign
        may = reign is not None and reign.may_grant()
        self._late += not may
        return may

    def _slots_of(self, name: str) -> int:
        node = self._fleet.nodes.get(name)
        return 0 if node is None else node.slots_total

    # What others pass on, and what is passed on to the leader.

    def _on_tunnel(self, greeting: Greeting, sock: socket.socket) -> None:
        if greeting.kind == "link":
            self._tasks.start(self._connect(sock, greeting.name), "link an edge")
        elif self._listeners is not None:
            public, admin = self._listeners
            origin = greeting.origin or ConnectionOrigin(None, None)
            listener = public if greeting.kind == "public" else admin
            listener.adopt(sock, replace(origin, member=greeting.member))

    async def _connect(self, sock: socket.socket, name: str) -> None:
        with suppress(OSError):
            await self._brain.connect(sock, name)

    def relayed(self, app: ASGIApp, kind: PassedKind) -> ASGIApp:
        """The application of this listener, of which the leader serves what is not a member's own.

        Without a leader a member shows operators what it knows itself.
        """
        passing = Passing(partial(self._open, kind))

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or self._serves(scope, is_admin=kind == "admin"):
                await app(scope, receive, send)
            else:
                await passing(scope, receive, send)

        return serve

    def _serves(self, scope: Scope, *, is_admin: bool) -> bool:
        path = scope["path"]
        if path in OWN_PATHS or path.startswith("/dashboard/"):
            return True
        if self._role.kind == "limbo" and is_admin:
            return scope["method"] in {"GET", "HEAD"}
        return self._taken.kind in {"leader", "alone"}

    async def _open(self, kind: PassedKind, origin: ConnectionOrigin) -> socket.socket:
        if self._taken.kind != "follower":
            raise errors.no_leader()
        try:
            return await self._membership.open(kind, origin=origin)
        except TunnelError as error:
            log.info("a request can't be passed on to the leader", why=str(error))
            raise errors.no_leader() from None

    # What operators see.

    def standing_error(self) -> GatewayError | None:
        """Why this member serves nobody; None: it leads, follows or is alone, or soon will again.

        Clients need not be sent elsewhere for the seconds of a takeover, in which requests wait.
        """
        if self._taken.kind != "limbo" or self._clock() < self._served_at + TAKEOVER_SECONDS:
            return None
        return errors.no_leader()

    def has_folder(self, folder: str) -> bool:
        """Whether a member that is heard has the folder of this id."""
        return any(one.folder == folder for one in self._membership.seen())

    def _state(self) -> MemberState:
        cores = len(os.sched_getaffinity(0))
        return MemberState(tuple(self._edges.sample()), cores, self._duties.folder())

    def sample(self) -> ClusterSample:
        """The cluster, as this member knows it now."""
        role, now, own = self._role, self._clock(), self._duties.folder()
        members = self._membership.seen()
        leads = role.kind == "leader"
        unheard = [one.name for one in members if leads and one.role == "unknown"]
        self._unheard = {name: self._unheard.get(name, now) for name in unheard}
        lost = [name for name, since in self._unheard.items() if now - since > LOST_SECONDS]
        apart = [one.name for one in members if leads and own and one.folder not in {"", own}]
        leader = self.member if leads else role.leader
        return ClusterSample(
            self._settings.name, self.member, role.kind, now - self._since, role.epoch, leader,
            members,
            lost, apart, self._late,
        )  # fmt: skip
