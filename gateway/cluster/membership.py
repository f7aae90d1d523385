"""A member of a cluster: whether it leads, follows, or is alone, and what it and the leader tell.

A member that does not lead has a control link to the leader, over a tunnel: it says which edges it
has, is told of each term, and confirms it. The leader tells by its account of all members' requests
(`LeaderAccount`). What a member may start without a leader is its `Fence`'s to say. All waits are
durations by the clock since the machine was booted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import structlog

from gateway import __version__
from gateway.cluster.fencing import SETTLE_SECONDS, Fence, Session, Sharers, Term
from gateway.cluster.leadership import Leadership, Member, boot_clock, contend
from gateway.cluster.members import (
    MemberRow,
    read_members,
    read_sharers,
    register,
    write_sharers,
)
from gateway.cluster.tunnel import Greeting, Kind, Refusal, TunnelError, Tunnels, Welcome
from gateway.config.cluster import ClusterSettings, parse_address
from gateway.http.certificates import ServerCertificate
from gateway.http.exchange import ConnectionOrigin
from gateway.store.failures import StoreError
from gateway.transport.link import EdgeLink
from gateway.watch.metrics import EdgeSample

TICK_SECONDS = 0.1  # between two looks at what time alone changes
TELL_SECONDS = 0.25  # between two terms that the leader tells itself; others: with each beat
STATE_SECONDS = 1.0  # between two states that a member tells
LIST_SECONDS = 2.0  # between two looks at the list of members
# Seconds between two attempts to reach the leader, and between two looks at the list if somebody
# has come who is not in it.
RETRY_SECONDS, LEAST_LIST_SECONDS = 0.25, 0.5
GREET_SECONDS = 10.0  # for a session to begin: until its edges are linked to the leader
DRAINING = "draining"  # the name in the greeting of a process that is to end
log = structlog.get_logger()


class Role(NamedTuple):
    """What a member is, until it is told of its next role.

    `limbo`: no leader is known, and it is not alone (yet); `follower`: its session with the leader
    has begun, so that its edges may be linked to it; `leader`: it may grant slots; `alone`: no
    leader can be reached.
    """

    kind: Literal["limbo", "follower", "leader", "alone"]
    epoch: int = 0  # of the leader; limbo, alone: the highest that it has seen
    leader: str = ""  # the name of the leading member; limbo, alone: empty
    process: str = ""  # and of its process
    # Of a leader: when it knew that it had its epoch, by the boot clock, and the lists of those
    # that share the slots, as any member may believe them.
    won_at: float = 0.0
    lists: tuple[Sharers, ...] = ()


class MemberState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a member tells of itself about once a second, for operators, and for its session."""

    edges: tuple[EdgeSample, ...] = ()  # its processes that run
    died: int = 0  # edges that have ended by themselves
    cores: int = 0
    folder: str = ""  # the id of the folder of its files
    version: str = __version__  # of the program

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its edges."""
        return tuple(sorted(one.name for one in self.edges))


class SeenMember(NamedTuple):
    """A member, as this one sees it. Only the leader knows of all of them."""

    row: MemberRow
    role: Literal["leader", "follower", "draining", "alone", "limbo", "unknown"]
    state: MemberState | None  # None: it is not known
    silent: float | None  # seconds since the leader has heard of it; None: never


class LeaderAccount(Protocol):
    """The leader's account of the members' requests, which says what they are told of its term.

    The leader's own member has a session too. A member with a session may begin another one.
    """

    @property
    def lists(self) -> Sequence[Sharers]:
        """All lists that a member may believe: who leads next needs them."""

    def next_list(self, names: Collection[str]) -> Sharers | None:
        """The list for these members, which has to be stored first; None: there is none now."""

    def share_by(self, sharers: Sharers) -> None:
        """This list is stored."""

    def removed(self, names: Collection[str]) -> None:
        """Operators say that the processes of these members have ended for good."""

    def begins(self, session: Session, edges: Collection[str]) -> None:
        """A member begins a session: these of its edges are to be heard first.

        Called again with the same session if it has other edges now.
        """

    def tell(self, session: Session, now: float, lead_until: float) -> Term | None:
        """What the member is told of the term; None: this is not its session, or not yet."""

    def confirmed(self, session: Session, number: int, now: float) -> bool:
        """The member was told of the term with this number; False: it has to begin anew."""

    def left(self, session: Session) -> None:
        """The control link of this session is lost: it can confirm nothing more."""


class Jobs(Protocol):
    """Runs jobs of the store."""

    def run(self, job: Callable[..., Any], *, write: bool = True) -> Awaitable[Any]:
        """Do the job in a transaction; its result. Raises: StoreError."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who is told by a membership. Nothing is called before `start` or after `aclose`."""

    on_role: Callable[[Role], None]
    """Its role is another one: called in order, from the event loop, never for one that is over."""
    on_replaced: Callable[[str], None]
    """Another process (its name) has registered as this member, later: this one has to end, or is
    being succeeded by it."""
    on_tunnel: Callable[[Greeting, socket.socket], None]
    """A member has opened a tunnel that is no control link, while this one leads."""
    state: Callable[[], MemberState]


# What is told over a control link.


class Leads(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The leader's first message."""

    epoch: int
    process: str


class Greets(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A member begins a session, or asks for none: it drains, or obeys a later leader."""

    session: int | None
    highest: int  # epoch that it has seen
    edges: tuple[str, ...]


class Tells(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The leader tells of its term."""

    term: Term


class Confirms(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A member has been told of the term with this number, in this session."""

    session: int
    number: int


FromMember = Greets | Confirms | MemberState
FromLeader = Leads | Tells


@dataclass(slots=True, eq=False)
class _Follower:
    """A process that has a control link to this one, which leads."""

    member: str
    process: str
    drains: bool
    link: EdgeLink = field(init=False)
    session: Session | None = None
    is_told: bool = False  # of a term, in this session
    state: MemberState | None = None


class Membership:
    """The membership of this process.

    `process`: its name, which no other one ever has. `store`: for the jobs of `members.py`.
    `fence`: what this member may start alone.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        process: str,
        certificate: ServerCertificate,
        leadership: Leadership,
        store: Jobs,
        fence: Fence,
        owner: Owner,
        *,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.fence = fence
        self.role = Role("limbo")
        self.tunnels = Tunnels(
            settings, process, certificate, admit=self._admit, on_tunnel=self._take
        )
        self._settings, self._cluster, self._term = settings, settings.name, settings.term
        self._name, self._process = settings.member_name, process
        self._leadership, self._store, self._owner = leadership, store, owner
        self._clock = clock
        self._own = MemberRow(self._name, process, 0, str(settings.advertised), __version__)
        self._member = Member(self._own.holder, settings.term)
        self._member.stands = False  # until it is registered
        self._tasks: set[asyncio.Task[None]] = set()
        self._drains = self._replaced = self._closed = False
        self._may_be_alone_since = 0.0  # in limbo
        # The list of members.
        self._rows: dict[str, MemberRow] = {}
        self._removed: list[str] = []  # members that operators have removed
        self._list_wanted = asyncio.Event()
        # As a leader.
        self._winning: int | None = None  # the epoch whose lists are being read
        self._account: LeaderAccount | None = None
        self._stored: list[Sharers] = []
        self._session: Session | None = None
        self._told_at = 0.0
        self._followers: dict[str, _Follower] = {}  # by process
        self._heard: dict[str, tuple[float, MemberState | None]] = {}
        """Of each member, when its last control link was heard, and what it said."""
        # As a follower.
        self._link: EdgeLink | None = None
        self._leader = "", ""  # the member and the process at the other end
        self._told_until = 0.0  # when it must have been told of a term again
        self._stated: tuple[float, MemberState] = 0.0, MemberState()
        """What it has told of itself last, and when."""
        self._hint = ""  # the member that leads, by what another one has said
        self._attempts = 0  # in vain, to find the leader

    # For its owner.

    def start(self) -> None:
        """Register as a member as soon as the store lets it; then contend, and follow."""
        for work in (self._keep_list, self._contend, self._follow, self._watch):
            self._spawn(self._keep_up(work))

    def lead(self, epoch: int, account: LeaderAccount) -> None:
        """In the role of the leader of this epoch: others may follow, and are told by `account`.

        Nothing happens if that role is over.
        """
        if (self.role.kind, self.role.epoch) == ("leader", epoch):
            self._account = account
            self._begin_own_session()
            self._list_wanted.set()

    def may_grant(self) -> bool:
        """Whether this member may grant slots now: it leads, or is alone."""
        now, role = self._clock(), self.role
        if role.kind == "leader":
            row = self._member.row
            return self._member.may_grant(now) and row is not None and row.epoch == role.epoch
        return role.kind == "alone" and self.fence.is_alone(now)

    def heard(self, epoch: int) -> None:
        """An edge knows a leader of this epoch."""
        self._member.heard(epoch, self._clock())

    def drain(self) -> None:
        """Lead no more, and never be alone: a successor takes over, or this process ends."""
        self._drains = True
        self._member.stands = False
        self._member.refused()
        self._look()

    async def open(
        self,
        kind: Literal["link", "public", "admin"],
        name: str = "",
        origin: ConnectionOrigin | None = None,
        sock: socket.socket | None = None,
    ) -> socket.socket:
        """Open a tunnel to the leader that it follows, as `Tunnels.open`. Raises: TunnelError."""
        if self.role.kind != "follower":
            raise TunnelError("no leader is known")
        return await self._open(self.role.leader, self.role.process, kind, name, origin, sock)

    def seen(self) -> list[SeenMember]:
        """All members of the cluster."""
        return [self._seen(row) for row in self._rows.values()]

    async def aclose(self) -> None:
        """End all of it."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for follower in tuple(self._followers.values()):
            follower.link.close()
        await self.tunnels.aclose()

    def _seen(self, row: MemberRow) -> SeenMember:
        if row.process == self._process:
            return SeenMember(row, self.role.kind, self._owner.state(), 0.0)
        if self.role.kind == "follower" and row.name == self.role.leader:
            return SeenMember(row, "leader", None, None)
        follower = self._followers.get(row.process)
        heard_at, state = self._heard.get(row.name, (None, None))
        silent = None if heard_at is None else self._clock() - heard_at
        if follower is None:
            return SeenMember(row, "unknown", state, silent)
        return SeenMember(row, "draining" if follower.drains else "follower", state, silent)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_up(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do this work until cancelled, whatever happens."""
        while True:
            try:
                await work()
            except Exception:
                log.exception("cluster: this member failed, and goes on")
            await asyncio.sleep(RETRY_SECONDS)

    async def _contend(self) -> None:
        await contend(self._member, self._leadership, clock=self._clock, on_step=self._look)

    # Roles.

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(TICK_SECONDS)

    def _look(self) -> None:
        """Draw the conclusions of the time that has passed, and of the last step."""
        now, member, role = self._clock(), self._member, self.role
        if role.kind == "leader" and not self.may_grant():
            self._end_leading()
        elif role.kind == "alone" and (self._drains or not self.fence.is_alone(now)):
            self._become(Role("limbo", self.fence.epoch))
        if self.role.kind != "limbo" or self._drains or not self.fence.is_alone(now):
            self._may_be_alone_since = now
        # Who has the row will be a leader in a moment, unless it can't be reached.
        elif not member.knows_leader(now) or now - self._may_be_alone_since > self._term:
            self._become(Role("alone", self.fence.epoch))
        if self.role.kind != "leader" and member.may_grant(now) and member.row is not None:
            epoch = member.row.epoch
            if epoch < self.fence.epoch:
                member.heard(self.fence.epoch, now)
            elif epoch != self._winning:
                self._winning = epoch
                self._spawn(self._win(epoch))
        if self._account is not None and now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            self._tell_self(now)

    def _become(self, role: Role) -> None:
        if role != self.role and not self._closed:
            log.info("cluster: role", role=role.kind, epoch=role.epoch, leader=role.leader)
            self.role = role
            self._owner.on_role(role)

    # The list of members.

    async def _keep_list(self) -> None:
        """Register, and read the list of members again and again."""
        problem: StoreError | None = None
        registered = False
        while True:
            self._list_wanted.clear()
            try:
                if registered or self._drains or self._replaced:
                    job = functools.partial(read_members, cluster=self._cluster)
                    rows = await self._store.run(job, write=False)
                else:
                    job = functools.partial(register, cluster=self._cluster, own=self._own)
                    rows = await self._store.run(job)
                registered = self._take_list(rows)
                await self._update_shares()
            except StoreError as error:
                if problem is None:
                    log.warning("cluster: the list of members can't be read", why=str(error))
                problem = error
            else:
                problem = None
            self._member.stands = not self._drains and (registered or self._member.stands)
            await asyncio.sleep(LEAST_LIST_SECONDS)
            if registered:
                with contextlib.suppress(TimeoutError):
                    wait = LIST_SECONDS - LEAST_LIST_SECONDS
                    await asyncio.wait_for(self._list_wanted.wait(), wait)

    def _take_list(self, rows: Sequence[MemberRow]) -> bool:
        """Note all members; returns whether this process is its member's, as far as that says."""
        self._rows = {row.name: row for row in rows if row.process}
        self._removed = [row.name for row in rows if not row.process]
        mine, own = self._rows.get(self._name), self._own
        if mine is None or (mine.generation, mine.process) < (own.generation, own.process):
            return False  # It was removed, or the database has come back with an old state.
        if mine.process == self._process:
            self._own = mine
        elif not self._replaced:
            self._replaced = True
            self._owner.on_replaced(mine.process)
        return True

    async def _update_shares(self) -> None:
        """Let those who are members share the slots when they are alone; raises: StoreError."""
        account, epoch = self._account, self.role.epoch
        if account is None:
            return
        account.removed(self._removed)
        new = account.next_list(tuple(sorted(self._rows)))
        wanted = [*account.lists, *([] if new is None else [new])]
        if wanted != self._stored:
            job = functools.partial(
                write_sharers,
                cluster=self._cluster,
                holder=self._member.name,
                epoch=epoch,
                sharers=msgspec.json.encode(wanted).decode(),
            )
            if not await self._store.run(job) or self._account is not account:
                return
            self._stored = wanted
            if new is not None:
                account.share_by(new)

    # Leading.

    async def _win(self, epoch: int) -> None:
        """Take the role of the leader of this epoch, once it is known how slots are shared."""
        stored = None
        while stored is None and self._has_won(epoch):
            try:
                job = functools.partial(read_sharers, cluster=self._cluster)
                stored = await self._store.run(job, write=False)
            except StoreError:
                await asyncio.sleep(RETRY_SECONDS)
        self._winning = None
        if stored is None or not self._has_won(epoch) or not self.fence.greet(epoch):
            return
        self._leave()
        self._stored = msgspec.json.decode(stored, type=list[Sharers])
        told = [self.fence.sharers] if self.fence.sharers.version else []
        lists = sorted({*self._stored, *told}) or [Sharers(1, (self._name,))]
        won_at = self._member.won_at
        self._become(Role("leader", epoch, self._name, self._process, won_at, tuple(lists)))

    def _has_won(self, epoch: int) -> bool:
        member, row = self._member, self._member.row
        return member.may_grant(self._clock()) and row is not None and row.epoch == epoch

    def _end_leading(self) -> None:
        """Its term is over, or its epoch is another one."""
        self._account = self._session = None
        followers, self._followers = self._followers, {}
        for follower in followers.values():
            follower.link.close()
        self._become(Role("limbo", self.fence.epoch))

    def _begin_own_session(self) -> None:
        account = self._account
        assert account is not None
        self._session = Session(self._name, self._process, self.fence.session)
        self._stated = self._clock(), self._owner.state()
        account.begins(self._session, self._stated[1].names)

    def _tell_self(self, now: float) -> None:
        """The leader's own member is told of the term as all others are."""
        account, session, state = self._account, self._session, self._owner.state()
        assert account is not None
        assert session is not None
        if state.names != self._stated[1].names:
            self._begin_own_session()
        term, epoch = account.tell(session, now, self._member.lead_until), self.role.epoch
        if term is None:
            is_over = self.fence.seen > 0
        else:
            self.fence.told(epoch, *term, asked_at=now, now=now)
            is_over = not account.confirmed(session, term.number, now)
        if is_over and self.fence.greet(epoch):
            self._begin_own_session()

    def _admit(self, greeting: Greeting) -> Welcome:
        """Whether this process takes a tunnel."""
        row = self._rows.get(greeting.member)
        refused: Refusal | None = None
        if row is None:
            refused = "unknown"
        elif greeting.kind == "control":
            if greeting.process != row.process and greeting.name != DRAINING:
                refused = "replaced"
        elif greeting.process not in self._followers:
            refused = "no_control"
        if refused in {"unknown", "replaced"}:
            self._list_wanted.set()  # It may have registered just now.
        elif self._account is None:
            refused = "not_leader"
        return Welcome(self._process, refused, self.role.leader, self.role.epoch)

    def _take(self, greeting: Greeting, sock: socket.socket) -> None:
        """A tunnel that was admitted."""
        if self._account is None:
            sock.close()
        elif greeting.kind != "control":
            self._owner.on_tunnel(greeting, sock)
        else:
            before = self._followers.get(greeting.process)
            if before is not None:
                before.link.fail("it has opened another one")
            made = _Follower(greeting.member, greeting.process, greeting.name == DRAINING)
            made.link = EdgeLink(
                FromMember,
                functools.partial(self._receive_of, made),
                functools.partial(self._lost, made),
                self._clock,
                silence=self._term,
                on_beat=functools.partial(self._tell, made),
            )
            self._followers[made.process] = made
            made.link.tell(Leads(self.role.epoch, self._process))
            self._spawn(_connect(made.link, sock))

    def _tell(self, follower: _Follower) -> None:
        """Tell a follower of the term, with each sign of life."""
        if self._account is not None and follower.session is not None:
            now = self._clock()
            term = self._account.tell(follower.session, now, self._member.lead_until)
            if term is not None:
                follower.is_told = True
                follower.link.tell(Tells(term))
            elif follower.is_told and self._member.leads(now):
                follower.link.fail("its session is over")

    def _receive_of(self, follower: _Follower, message: FromMember) -> None:
        account, now = self._account, self._clock()
        if account is None:
            return
        session = follower.session
        match message:
            case Greets():
                self._member.heard(message.highest, now)
                if message.session is not None:
                    session = Session(follower.member, follower.process, message.session)
                    follower.session, follower.is_told = session, False
                    account.begins(session, message.edges)
            case Confirms():
                if session is None or message.session != session.number:
                    return
                if not account.confirmed(session, message.number, now):
                    follower.link.fail("its session is over")
            case MemberState():
                before, follower.state = follower.state, message
                if session is not None and before is not None and before.names != message.names:
                    account.begins(session, message.names)
        if not follower.drains:
            self._heard[follower.member] = now, follower.state

    def _lost(self, follower: _Follower, reason: str) -> None:
        if self._followers.get(follower.process) is follower:
            del self._followers[follower.process]
            log.warning("cluster: a member is lost", member=follower.member, why=reason)
            if self._account is not None and follower.session is not None:
                self._account.left(follower.session)

    # Following.

    async def _follow(self) -> None:
        """Keep a control link to whoever leads."""
        problem = ""
        while True:
            leader = self._other_leader()
            if leader is not None:
                try:
                    await self._attend(*leader)
                    self._attempts, self._hint, problem = 0, "", ""
                except TunnelError as error:
                    self._attempts += 1
                    told = error.welcome
                    self._hint = told.leader if told is not None else ""
                    if str(error) != problem:
                        problem = str(error)
                        log.info("cluster: no control link", why=problem)
            await asyncio.sleep(RETRY_SECONDS)

    def _other_leader(self) -> tuple[str, str] | None:
        """Who is to be followed: a member and its process, empty if that is not known."""
        now, row = self._clock(), self._member.row
        if self._member.leads(now):
            return None
        if row is not None and not self._member.is_blind(now) and row.epoch >= self.fence.epoch:
            name, _, process = row.holder.rpartition("/")
            return (name, process) if name and process != self._process else None
        # Without a look at the row: by what others say, or one after the other.
        names = [name for name in self._rows if name != self._name]
        if self._hint in names:
            return self._hint, ""
        return (names[self._attempts % len(names)], "") if names else None

    async def _attend(self, name: str, process: str) -> None:
        """Follow this leader until its link is lost or another one leads. Raises: TunnelError."""
        drains = self._drains
        sock = await self._open(name, process, "control", DRAINING if drains else "")
        lost = asyncio.Event()
        self._leader, self._told_until = (name, process), self._clock() + GREET_SECONDS
        self._link = link = EdgeLink(
            FromLeader, self._receive, lambda _: lost.set(), self._clock, silence=self._term
        )
        try:
            await _connect(link, sock)
            while not lost.is_set() and self._link is link and self._goes_on(drains=drains):
                self._state_itself(link)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(lost.wait(), TICK_SECONDS)
        finally:
            link.close()
            if self._link is link:
                self._leave()

    def _goes_on(self, *, drains: bool) -> bool:
        """Whether there is no reason to end the control link."""
        now, leader = self._clock(), self._other_leader()
        is_other = leader is None or (leader[1] and leader != self._leader)
        if is_other or drains != self._drains:
            return False
        # A process that drains is told of no term: that it follows is enough.
        return now < self._told_until or (drains and self.role.kind == "follower")

    def _receive(self, message: FromLeader) -> None:
        """What the leader tells."""
        link, fence = self._link, self.fence
        if link is None:
            return
        match message:
            case Leads():
                self._leader = self._leader[0], message.process
                state = self._owner.state()
                greets = not self._drains and fence.greet(message.epoch)
                highest, session = fence.epoch, fence.session if greets else None
                link.tell(Greets(session, highest, state.names))
                if greets or self._drains:
                    self._become(Role("follower", message.epoch, *self._leader))
            case Tells():
                now = self._clock()
                asked_at = now - link.age
                if fence.told(self.role.epoch, *message.term, asked_at=asked_at, now=now):
                    self._told_until = now + message.term.left + SETTLE_SECONDS
                    link.tell(Confirms(fence.session, message.term.number))

    def _state_itself(self, link: EdgeLink) -> None:
        """Tell what this member is, if that is due or its edges are others."""
        now, state = self._clock(), self._owner.state()
        at, before = self._stated
        if now - at >= STATE_SECONDS or state.names != before.names:
            self._stated = now, state
            link.tell(state)

    def _leave(self) -> None:
        """Follow no leader any more."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
            self.fence.give_up()
        if self.role.kind == "follower":
            self._become(Role("limbo", self.fence.epoch))

    async def _open(
        self,
        member: str,
        process: str,
        kind: Kind,
        name: str,
        origin: ConnectionOrigin | None = None,
        sock: socket.socket | None = None,
    ) -> socket.socket:
        row = self._rows.get(member)
        if row is None:
            self._list_wanted.set()
            raise TunnelError(f"{member} is not in the list of members")
        try:
            address = parse_address(row.address)
        except ValueError as error:
            raise TunnelError(f"{member} at {row.address}: {error}") from None
        return await self.tunnels.open(
            member, address, kind, to=process, name=name, origin=origin, sock=sock
        )


async def _connect(link: EdgeLink, sock: socket.socket) -> None:
    """Have a link, which may have ended by now, use a socket."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_unix_connection(lambda: link, sock=sock)
    if link.lost:
        transport.abort()
