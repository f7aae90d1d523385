"""A member of a cluster: whether it leads, follows, or is alone, and what it and the leader tell.

A member that does not lead has a control link to the leader, over a tunnel: it says which edges it
has, is told of each term, and confirms it. The leader tells by its account of all members' requests
(`Tenure`). What a member may start without a leader is its `Fence`'s to say. All waits are
durations by the clock since the machine was booted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import structlog

from gateway import __version__
from gateway.cluster import tables
from gateway.cluster.fencing import SETTLE_SECONDS, Fence, Session, Sharers, Tenure, Term
from gateway.cluster.leadership import (
    Leadership,
    Member,
    boot_clock,
    contend,
    holder_name,
    parse_holder,
)
from gateway.cluster.tunnel import Greeting, Kind, Refusal, TunnelError, Tunnels, Welcome
from gateway.config.settings import ClusterSettings, parse_address
from gateway.http.certificates import ServerCertificate
from gateway.http.exchange import ConnectionOrigin
from gateway.store.failures import StoreError
from gateway.store.store import Store
from gateway.transport.link import EdgeLink
from gateway.watch.metrics import EdgeSample, MemberSample

TICK_SECONDS = 0.1  # between two looks at what time alone changes
STATE_SECONDS = 1.0  # between two states that a member tells
LIST_SECONDS = 2.0  # between two looks at the list of members
# Seconds between two attempts to reach the leader, and between two looks at the list if somebody
# has come who is not in it.
RETRY_SECONDS, LEAST_LIST_SECONDS = 0.25, 0.5
GREET_SECONDS = 10.0  # for a session to begin: until its edges are linked to the leader
LEAD_SECONDS = 10.0  # for who has won to lead: until its gateway is ready to
LEAVE_SECONDS = 2.0  # for the store to take down that this member has ended
T = TypeVar("T")
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
    cores: int = 0
    folder: str = ""  # the id of the folder of its files

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its edges."""
        return tuple(sorted(one.name for one in self.edges))


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

    `process`: its name, which no other one ever has. `store`: for the jobs of `tables.py`.
    `fence`: what this member may start alone.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        process: str,
        certificate: ServerCertificate,
        leadership: Leadership,
        store: Store,
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
        self._own = tables.MemberRow(self._name, process, 0, str(settings.advertised), __version__)
        self._member = Member(holder_name(self._own.contender, settings.term), settings.term)
        self._member.stands = False  # until it is registered
        self._tasks: set[asyncio.Task[None]] = set()
        self._drains = self._replaced = self._closed = False
        self._may_be_alone_since = 0.0  # in limbo
        self._untaken_since = 0.0  # since when it has won, and does not lead
        # The list of members.
        self._rows: dict[str, tables.MemberRow] = {}
        self._removed: list[str] = []  # members that operators have removed
        self._list_wanted = asyncio.Event()
        # As a leader.
        self._winning: int | None = None  # the epoch whose lists are being read
        self._led_until = 0.0  # when its last time as a leader ended
        self._tenure: Tenure | None = None
        self._stored: list[Sharers] = []
        self._followers: dict[str, _Follower] = {}  # by process
        self._heard: dict[str, tuple[float, MemberState | None]] = {}
        """Of each member, when its last control link was heard, and what it said."""
        # As a follower.
        self._link: EdgeLink | None = None
        self._told_until = 0.0  # when it must have been told of a term again
        self._stated: tuple[float, MemberState] = 0.0, MemberState()
        """What it has told of itself last, and when."""
        self._hint = ""  # the member that leads, by what another one has said
        self._attempts = 0  # in vain, to find the leader

    # For its owner.

    def start(self) -> None:
        """Register as a member as soon as the store lets it; then contend, and follow."""
        lead = functools.partial(
            contend, self._member, self._leadership, clock=self._clock, on_step=self._look
        )
        for work in (self._keep_list, lead, self._follow, self._watch):
            self._spawn(self._keep_up(work))

    def lead(self, epoch: int, tenure: Tenure) -> None:
        """In the role of the leader of this epoch: others may follow, and are told by `tenure`.

        Nothing happens if that role is over.
        """
        if (self.role.kind, self.role.epoch) == ("leader", epoch):
            self._tenure = tenure
            self._begin_own_session(tenure)
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
        self._resign()
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

    def seen(self) -> list[MemberSample]:
        """All members of the cluster, as far as this one knows them: the leader knows most."""
        return [self._seen(row) for row in self._rows.values()]

    async def aclose(self) -> None:
        """End all of it, when no edge of this member runs any more."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for follower in tuple(self._followers.values()):
            follower.link.close()
        await self.tunnels.aclose()
        if self._drains:
            # So that nobody keeps a share of the slots for it, unless a successor is this member.
            leaving = self._in_store(tables.remove, name=self._name, process=self._process)
            with contextlib.suppress(StoreError, TimeoutError):
                await asyncio.wait_for(leaving, LEAVE_SECONDS)

    def _seen(self, row: tables.MemberRow) -> MemberSample:
        role, state, silent = "unknown", None, None
        if row.process == self._process:
            role, state, silent = self.role.kind, self._owner.state(), 0.0
        elif self.role.kind == "follower" and row.name == self.role.leader:
            role = "leader"
        elif row.name in self._heard:
            heard_at, state = self._heard[row.name]
            silent = self._clock() - heard_at
        follower = self._followers.get(row.process)
        if follower is not None:
            role = "draining" if follower.drains else "follower"
        told = MemberState() if state is None else state
        return MemberSample(
            row.name, role, row.address, row.version, silent, told.cores, told.folder, told.edges
        )

    async def _in_store(self, job: Callable[..., T], *, write: bool = True, **given: Any) -> T:
        """What a job of `tables.py` returns of this cluster. Raises: StoreError."""
        return await self._store.run(
            functools.partial(job, cluster=self._cluster, **given), write=write
        )

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
        # Who has won the row since then will be a leader in a moment, unless it can't be reached.
        elif not self._expects_leader(now) or now - self._may_be_alone_since > self._term:
            self._become(Role("alone", self.fence.epoch))
        if self._tenure is not None or not member.may_grant(now):
            self._untaken_since = now
        elif now - self._untaken_since > LEAD_SECONDS:
            log.error("cluster: this member could not begin to lead: it resigns")
            self._resign()
        if self.role.kind != "leader" and member.may_grant(now) and member.row is not None:
            epoch = member.row.epoch
            if epoch < self.fence.epoch:
                member.heard(self.fence.epoch, now)
            elif epoch != self._winning:
                self._winning = epoch
                self._spawn(self._win(epoch))
        if self._tenure is not None:
            with self._or_resign():
                self._tell_self(self._tenure, now)

    def _expects_leader(self, now: float) -> bool:
        """Whether a later leader has the row than all that this member has heard."""
        row = self._member.row
        return self._member.knows_leader(now) and row is not None and row.epoch > self.fence.epoch

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
                    rows = await self._in_store(tables.read_members, write=False)
                else:
                    rows = await self._in_store(tables.register, own=self._own)
                registered = self._take_list(rows)
                await self._update_shares()
            except StoreError as error:
                if problem is None:
                    log.warning("cluster: the list of members can't be read", why=str(error))
                problem = error
            else:
                problem = None
            # A leader's account has one session of each member: that of its newest process.
            may_stand = not self._drains and not self._replaced
            self._member.stands = may_stand and (registered or self._member.stands)
            await asyncio.sleep(LEAST_LIST_SECONDS)
            # By hand: in Python 3.11 `wait_for` may drop a cancellation.
            wait = LIST_SECONDS - LEAST_LIST_SECONDS if registered else 0.0
            timer = asyncio.get_running_loop().call_later(wait, self._list_wanted.set)
            try:
                await self._list_wanted.wait()
            finally:
                timer.cancel()

    def _take_list(self, rows: Sequence[tables.MemberRow]) -> bool:
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
        tenure, epoch = self._tenure, self.role.epoch
        if tenure is None:
            return
        now = self._clock()
        tenure.removed(self._removed, now)
        new = tenure.next_list(tuple(self._rows), now)
        wanted = [*tenure.lists, *([] if new is None else [new])]
        if wanted != self._stored:
            in_json = msgspec.json.encode(wanted).decode()
            writing = self._in_store(
                tables.write_sharers, holder=self._member.name, epoch=epoch, sharers=in_json
            )
            if not await writing or self._tenure is not tenure:
                return
            self._stored = wanted
            if new is not None:
                tenure.share_by(new)

    # Leading.

    async def _win(self, epoch: int) -> None:
        """Take the role of the leader of this epoch, once it is known how slots are shared."""
        stored = None
        while stored is None and self._has_won(epoch):
            try:
                stored = await self._in_store(tables.read_sharers, write=False)
            except StoreError:
                await asyncio.sleep(RETRY_SECONDS)
        self._winning = None
        if stored is None or not self._has_won(epoch) or not self.fence.greet(epoch):
            return
        self._leave()
        self._stored = msgspec.json.decode(stored, type=list[Sharers])
        told = [self.fence.sharers] if self.fence.sharers.version else []
        lists = sorted({*self._stored, *told}) or [Sharers(1, (self._name,))]
        # What it granted in its last term may still start, also if its epoch is the same.
        won_at = max(self._member.won_at, self._led_until)
        self._become(Role("leader", epoch, self._name, self._process, won_at, tuple(lists)))

    def _has_won(self, epoch: int) -> bool:
        member, row = self._member, self._member.row
        return member.may_grant(self._clock()) and row is not None and row.epoch == epoch

    def _end_leading(self) -> None:
        """Its term is over, or its epoch is another one."""
        self._led_until = self._clock()
        self._tenure = None
        followers, self._followers = self._followers, {}
        for follower in followers.values():
            follower.link.close()
        self._become(Role("limbo", self.fence.epoch))

    def _resign(self) -> None:
        """Let another member lead, which will have seen the row unchanged for longer."""
        self._member.refused()
        if self.role.kind == "leader":
            self._end_leading()

    @contextlib.contextmanager
    def _or_resign(self) -> Iterator[None]:
        """Resign if the account of members' requests fails: nobody would be told of the term."""
        try:
            yield
        except Exception:
            log.exception("cluster: this leader failed: it resigns")
            self._resign()

    def _begin_own_session(self, tenure: Tenure) -> None:
        self._stated = self._clock(), self._owner.state()
        tenure.begins(self._own_session, self._stated[1].names, self._stated[0])

    @property
    def _own_session(self) -> Session:
        return Session(self._name, self._process, self.fence.session)

    def _term_of(self, tenure: Tenure, session: Session, now: float) -> Term | None:
        """What a member is told of the term; None: this is not its session, or not yet."""
        if not tenure.has(session):
            return None
        return tenure.tell(session.edge, now, self._member.lead_until)

    def _tell_self(self, tenure: Tenure, now: float) -> None:
        """The leader's own member is told of the term as all others are."""
        if self._owner.state().names != self._stated[1].names:
            self._begin_own_session(tenure)
        session, epoch = self._own_session, self.role.epoch
        term = self._term_of(tenure, session, now)
        if term is None:
            is_over = self.fence.seen > 0
        else:
            self.fence.told(epoch, term, asked_at=now, now=now)
            is_over = not tenure.confirmed(session, term.number, now)
        if is_over and self.fence.greet(epoch):
            self._begin_own_session(tenure)

    def _admit(self, greeting: Greeting) -> Welcome:
        """Whether this process takes a tunnel."""
        row, follower = self._rows.get(greeting.member), self._followers.get(greeting.process)
        refused: Refusal | None = None
        if row is None:
            refused = "unknown"
        elif greeting.kind == "control":
            if greeting.process != row.process and greeting.name != DRAINING:
                refused = "replaced"
        elif follower is None or follower.member != greeting.member:
            refused = "no_control"
        elif greeting.kind == "link" and not greeting.name.startswith(f"{greeting.member}/"):
            refused = "edge"
        if refused in {"unknown", "replaced"}:
            self._list_wanted.set()  # It may have registered just now.
        elif self._tenure is None:
            refused = "not_leader"
        return Welcome(self._process, refused, self.role.leader)

    def _take(self, greeting: Greeting, sock: socket.socket) -> None:
        """A tunnel that was admitted."""
        if self._tenure is None:
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
            self._spawn(self._connect(made, sock))

    async def _connect(self, follower: _Follower, sock: socket.socket) -> None:
        try:
            await EdgeLink.over(sock, follower.link)
        except OSError as error:
            sock.close()
            self._lost(follower, f"{error}")

    def _tell(self, follower: _Follower) -> None:
        """Tell a follower of the term, with each sign of life."""
        tenure, session, now = self._tenure, follower.session, self._clock()
        if tenure is None or session is None:
            return
        with self._or_resign():
            term = self._term_of(tenure, session, now)
            if term is not None:
                follower.is_told = True
                follower.link.tell(Tells(term))
            elif follower.is_told and self._member.leads(now):
                follower.link.fail("its session is over")

    def _receive_of(self, follower: _Follower, message: FromMember) -> None:
        tenure, now = self._tenure, self._clock()
        if tenure is None:
            return
        session, row = follower.session, self._rows.get(follower.member)
        match message:
            case Greets():
                self._member.heard(message.highest, now)
                if message.session is not None:
                    session = Session(follower.member, follower.process, message.session)
                    follower.session, follower.is_told = session, False
                    tenure.begins(session, message.edges, now)
                elif follower.drains and row is not None and row.process == follower.process:
                    # It is never alone again, and no other process is this member.
                    tenure.removed([follower.member], now)
            case Confirms():
                if session is None or message.session != session.number:
                    return
                if not tenure.confirmed(session, message.number, now):
                    follower.link.fail("its session is over")
            case MemberState():
                before, follower.state = follower.state, message
                if session is not None and before is not None and before.names != message.names:
                    tenure.begins(session, message.names, now)
        if not follower.drains:
            self._heard[follower.member] = now, follower.state

    def _lost(self, follower: _Follower, reason: str) -> None:
        if self._followers.get(follower.process) is follower:
            del self._followers[follower.process]
            log.warning("cluster: a member is lost", member=follower.member, why=reason)
            if self._tenure is not None and follower.session is not None:
                self._tenure.left(follower.session)

    # Following.

    async def _follow(self) -> None:
        """Keep a control link to whoever leads."""
        problem = ""
        while True:
            leader, drains = self._other_leader(), self._drains
            if leader is not None:
                # Not in this task: what is tried in vain ends when another one leads.
                self._told_until = math.inf  # to open the link has a limit of its own
                attending = asyncio.create_task(self._attend(*leader, drains=drains))
                try:
                    while not attending.done() and self._goes_on(leader, drains=drains):
                        await asyncio.wait([attending], timeout=TICK_SECONDS)
                finally:
                    attending.cancel()
                    (ended,) = await asyncio.gather(attending, return_exceptions=True)
                if isinstance(ended, TunnelError):
                    self._attempts += 1
                    self._hint = ended.welcome.leader if ended.welcome is not None else ""
                    if str(ended) != problem:
                        problem = str(ended)
                        log.info("cluster: no control link", why=problem)
                elif isinstance(ended, Exception):
                    raise ended
                else:
                    self._attempts, self._hint, problem = 0, "", ""
            await asyncio.sleep(RETRY_SECONDS)

    def _other_leader(self) -> tuple[str, str] | None:
        """Who is to be followed: a member and its process, empty if that is not known."""
        now, row = self._clock(), self._member.row
        if self._member.leads(now):
            return None
        if row is not None and not self._member.is_blind(now) and row.epoch >= self.fence.epoch:
            name, _, process = parse_holder(row.holder)[0].rpartition("/")
            return (name, process) if name and process != self._process else None
        # Without a look at the row: by what others say, or one after the other.
        names = [name for name in self._rows if name != self._name]
        if self._hint in names:
            return self._hint, ""
        return (names[self._attempts % len(names)], "") if names else None

    async def _attend(self, name: str, process: str, *, drains: bool) -> None:
        """Follow this leader until its link is lost. Raises: TunnelError."""
        sock = await self._open(name, process, "control", DRAINING if drains else "")
        lost = asyncio.Event()
        self._told_until = self._clock() + GREET_SECONDS
        self._link = link = EdgeLink(
            FromLeader,
            functools.partial(self._receive, name),
            lambda _: lost.set(),
            self._clock,
            silence=self._term,
            on_beat=self._state_itself,
        )
        try:
            await EdgeLink.over(sock, link)
            await lost.wait()
        finally:
            link.close()
            if self._link is link:
                self._leave()

    def _goes_on(self, leader: tuple[str, str], *, drains: bool) -> bool:
        """Whether there is no reason to attend to this leader no more."""
        now, wanted, role = self._clock(), self._other_leader(), self.role
        if wanted is None or (wanted[1] and wanted not in {leader, (role.leader, role.process)}):
            return False
        if drains != self._drains:
            return False
        # A process that drains is told of no term: that it follows is enough.
        return now < self._told_until or (drains and role.kind == "follower")

    def _receive(self, leader: str, message: FromLeader) -> None:
        """What the leader tells."""
        link, fence = self._link, self.fence
        if link is None:
            return
        match message:
            case Leads():
                state = self._owner.state()
                greets = not self._drains and fence.greet(message.epoch)
                highest, session = fence.epoch, fence.session if greets else None
                link.tell(Greets(session, highest, state.names))
                if greets or self._drains:
                    self._become(Role("follower", message.epoch, leader, message.process))
            case Tells():
                now = self._clock()
                asked_at = now - link.age
                if fence.told(self.role.epoch, message.term, asked_at=asked_at, now=now):
                    self._told_until = now + message.term.left + SETTLE_SECONDS
                    link.tell(Confirms(fence.session, message.term.number))

    def _state_itself(self) -> None:
        """Tell the leader what this member is, if that is due or its edges are others."""
        now, state = self._clock(), self._owner.state()
        at, before = self._stated
        if now - at >= STATE_SECONDS or state.names != before.names:
            self._stated = now, state
            if self._link is not None:
                self._link.tell(state)

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
