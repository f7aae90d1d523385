"""Which requests may start on a node when leaders change, die, stop or can't be reached.

The leader of an epoch grants slots to the **edges**, the processes that send requests to nodes: in
a cluster those of one member are one edge here, by the member's name. Its scheduler counts what it
grants; what else may run is in its `Tenure`, and what an edge may start in a `Fence`. A node can't
refuse a request that was granted by a former leader, so edges must:

- A grant starts a request only within `GRANT_SECONDS` of the edge's asking. So what a leader has
  granted runs that long after its term, or never.
- An edge obeys the highest epoch that it has ever seen.
- An edge tells a new leader (`Fence.greet`, `Tenure.hello`) which of its requests run.

A leader whose term is over leaves requests that the next one has not granted. So a new leader
counts all slots of a node as taken until it has read, after `SETTLE_SECONDS`, which of them are
busy; these are taken until they have been seen idle.

An edge that no leader answers goes **alone**, `SETTLE_SECONDS` after the end of the last term that
it was told. Then it may use its share of each node (`shares`), less what still runs there of the
time before. A leader may lend an edge's share to others only while that edge can't be alone: until
the end of the term of which the edge has confirmed that it was told. Then the share is the edge's,
until the edge greets again, or has been silent for `alone_seconds`: an edge that no leader has
answered for so long starts nothing.

Which edges share the slots, `Sharers`, is told with each term. An edge that is new to them may go
alone only once all others have confirmed that it is among them, or can't be alone any more; one
that leaves must not be able to be alone. So the shares of all that may be alone never exceed the
slots, whichever of the last lists each believes. A leader keeps for each the largest of its shares
by these lists. All times are durations, or moments of the boot clock of the machine that uses them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

GRANT_SECONDS = 1.0  # from an edge's asking until the request must have been written to the node
# Seconds until a node's `/slots` shows a request that was written to it, and by which the clocks of
# two machines may disagree about a term.
LANDING_SECONDS = 0.25
SETTLE_SECONDS = GRANT_SECONDS + LANDING_SECONDS
# Seconds for which an edge may be alone, and for which a leader leaves it its share: as long as the
# longest outage of the database that all must survive.
ALONE_SECONDS = 3600.0
_CLOCKS_DIFFER = 1.01  # more than any two clocks differ, over such a time


@functools.lru_cache(maxsize=65536)
def shares(total: int, key: str, edges: tuple[str, ...]) -> Mapping[str, int]:
    """The share of each edge in the slots of a node, or in what a limit allows.

    Each has the same, rounded down; the rest goes to those that come first by rendezvous hash, so
    that what is less than one for each has owners too.
    """
    each, rest = divmod(total, len(edges))

    def rank(edge: str) -> bytes:
        return hashlib.blake2b(f"{key}\0{edge}".encode(), digest_size=8).digest()

    first = sorted(edges, key=rank)[:rest]
    return {edge: each + (edge in first) for edge in edges}


class Sharers(NamedTuple):
    """The edges that share the slots when they are alone."""

    version: int  # a later list has a higher one
    names: tuple[str, ...]

    def share(self, total: int, node: str, edge: str) -> int:
        """The edge's share in the slots of a node; 0, if it is none of these."""
        return shares(total, node, self.names)[edge] if edge in self.names else 0


class Term(NamedTuple):
    """What a leader tells an edge of its term."""

    session: int
    number: int  # of this telling
    left: float  # seconds until the term ends
    sharers: Sharers
    may_be_alone: bool  # whether the edge may go alone after it


# The edge's side.


class Fence:
    """Whether a member's edge may start requests without a leader, and how many on each node.

    What a leader says names its epoch and session. Whether a grant still starts a request is for
    those to say who send it (`edges.edge`).
    """

    def __init__(
        self, edge: str, slots_of: Callable[[str], int], *, alone_seconds: float = ALONE_SECONDS
    ) -> None:
        """`slots_of`: of a node, as the edge knows them at the time; 0: it does not know it."""
        self.edge = edge
        self.epoch = 0  # the highest that it has seen
        self.session = 0  # counted in each epoch
        self.seen = 0  # the number of the last term that it was told in this session
        self.sharers = Sharers(0, ())  # as it was told last
        self.slots_of = slots_of
        self._alone_seconds = alone_seconds
        # A process that was never told of a term can't know whether its share is lent.
        self._alone_from = math.inf
        self._reads_from = -math.inf  # nodes count as read that were asked from then on
        self._alone_until = -math.inf
        self._greets = False
        self._leases: dict[int, str] = {}  # requests of the time before it is alone, their nodes
        self._before: Counter[str] = Counter()  # how many of them each node has
        self._busy: dict[str, frozenset[object]] = {}
        """By node, what has been running since it went alone."""

    # With a leader.

    def greet(self, epoch: int) -> bool:
        """Begin a session with the leader of this epoch, which is then told what runs.

        The edge is not alone while it waits for the answer. False: it knows a later epoch.
        """
        if epoch < self.epoch:
            return False
        if epoch > self.epoch:
            self.epoch, self.session = epoch, 0
        self.leave()
        self._greets = True
        return True

    def give_up(self) -> None:
        """The leader has not answered."""
        if self._greets:
            self.leave()

    def leave(self) -> None:
        """Go on with another session: what was granted in the last one is void."""
        self.session += 1
        self.seen = 0
        self._greets = False

    def obeys(self, epoch: int, session: int) -> bool:
        """Whether what names these is of the leader that the edge obeys."""
        return (epoch, session) == (self.epoch, self.session)

    def told(self, epoch: int, term: Term, *, asked_at: float, now: float) -> bool:
        """The leader of this epoch has answered what the edge sent at `asked_at` by this term.

        False: it is not the leader that the edge obeys.
        """
        if not self.obeys(epoch, term.session):
            return False
        if term.number > self.seen:
            self.seen, self.sharers = term.number, term.sharers
            self._greets = False
            ends_at = now + term.left
            self._alone_from = ends_at + SETTLE_SECONDS if term.may_be_alone else math.inf
            self._alone_until = asked_at + self._alone_seconds
            self._busy.clear()
        return True

    # Alone.

    def is_alone(self, now: float) -> bool:
        """Whether it may start requests without a leader."""
        return not self._greets and self._alone_from <= now < self._alone_until

    def go_alone(self, now: float) -> None:
        """Begin to start requests alone, once nodes have been read anew.

        What runs is told anew (`adopted`): of what has ended meanwhile it may not have heard.
        """
        self.leave()
        self._reads_from = now + LANDING_SECONDS
        for known in (self._busy, self._leases, self._before):
            known.clear()

    def adopted(self, _: str, number: int, node: str) -> None:
        """This request runs already, from before it is alone."""
        self.ended(number)
        self._leases[number] = node
        self._before[node] += 1

    def ended(self, number: int) -> str | None:
        """A request that was adopted has ended: its node; None: it was not adopted."""
        node = self._leases.pop(number, None)
        if node is not None:
            self._before[node] -= 1
        return node

    def read(self, node: str, busy: frozenset[object], asked_at: float) -> None:
        """The node was asked at that time, and is busy with these (slot and task)."""
        if asked_at >= max(self._alone_from, self._reads_from):
            self._busy[node] = self._busy.get(node, busy) & busy

    def is_unread(self, node: str) -> bool:
        """Whether a reading of the node may free slots, so that it has to be asked."""
        busy = self._busy.get(node)
        return busy is None or len(busy) > self._before[node]

    def shared_by(self, now: float) -> object:
        """Equal as long as time alone changes nothing of `others`."""
        return self.is_alone(now), self.sharers

    def others(self, node: str, now: float) -> int:
        """Slots of the node that it may not use, or that others use, while it is alone.

        What ran at the end of the last term may be anybody's, or that of a process that has died.
        So each edge counts all of it as its own until it has ended: those that were `adopted` are
        among them.
        """
        busy, slots = self._busy.get(node), self.slots_of(node)
        if busy is None or not self.is_alone(now):
            return slots
        before = self._before[node]
        share = self.sharers.share(slots, node, self.edge)
        return slots - share + max(0, len(busy) - before)


# The leader's side.


def member_of(process: str) -> str:
    """The member that a process sends requests for, by its name: MEMBER/NAME."""
    return process.partition("/")[0]


class Session(NamedTuple):
    """A talk of an edge with the leader of an epoch."""

    edge: str
    process: str  # of the edge; no other one ever has this name
    number: int


_NO_SESSION = Session("", "", 0)


@dataclass(slots=True)
class _Rest:
    """Requests that may run on a node, known only by its busy slots."""

    count: int
    reads_from: float  # a reading counts that was asked for after this time
    busy: frozenset[object] | None = None

    def read(self, busy: frozenset[object], asked_at: float) -> None:
        if asked_at >= self.reads_from:
            self.busy = busy if self.busy is None else self.busy & busy
            self.count = min(self.count, len(self.busy))


@dataclass(slots=True)
class _Node:
    slots: int
    strangers: _Rest  # what former leaders have granted
    # By edge and process, with which this leader has lost touch.
    lost: dict[tuple[str, str], _Rest] = field(default_factory=dict)
    early: set[tuple[str, int]] = field(default_factory=set)  # leases that are among the strangers

    def lose(self, edge: str, process: str, count: int, reads_from: float) -> None:
        """So many requests of this process may run, and it tells no more of them."""
        lost = self.lost.setdefault((edge, process), _Rest(0, reads_from))
        lost.count += count
        lost.reads_from = max(lost.reads_from, reads_from)
        lost.busy = None


@dataclass(slots=True)
class _Edge:
    gone_at: float  # when it can't be alone any more, unless it is told of a term until then
    gone: bool = False
    believes: int = 0  # the version of the list that it has confirmed; it may know any later one
    session: Session = _NO_SESSION
    hello: dict[int, str] | None = None  # its leases, until it has confirmed a term
    present: bool = False
    leases: dict[int, str] = field(default_factory=dict)
    number: int = 0  # of the last term that it was told
    told: dict[int, tuple[float, Term]] = field(default_factory=dict)
    """The terms that it was told, until it confirms them, and when each ends."""
    lent_until: float = -math.inf  # until when it can't be alone, so that its share may be lent

    @property
    def is_open(self) -> bool:
        """Whether its session goes on, or has begun."""
        return self.present or self.hello is not None

    def has_share(self, now: float) -> bool:
        """Whether its share is its own: it may be alone."""
        return now >= self.lent_until and not self.gone


_MOST_UNCONFIRMED = 64  # terms that an edge was told; it confirms each with its next message


class Tenure:
    """The account of slots of one leader in one epoch, by its boot clock.

    A message of an edge that names another epoch is not for it.
    """

    def __init__(
        self,
        epoch: int,
        won_at: float,
        lists: Sequence[Sharers],
        slots: Mapping[str, int],
        *,
        alone_seconds: float = ALONE_SECONDS,
    ) -> None:
        """`lists`: all that an edge may believe, as the leader before had them."""
        self.epoch = epoch
        self.lists = sorted(set(lists))
        """Those that an edge may believe, the one to be told last. Who leads next needs them."""
        self._alone_seconds = alone_seconds * _CLOCKS_DIFFER
        names = {name for one in lists for name in one.names}
        self._edges = {edge: _Edge(won_at + self._alone_seconds) for edge in names}
        self._wanted = frozenset(self.lists[-1].names)
        self._joined: dict[str, int] = {}
        """Edges that may not go alone yet, and the version of the first list that has them."""
        for older, newer in itertools.pairwise(self.lists):
            self._joined.update((name, newer.version) for name in set(newer.names) - {*older.names})
        self._adopted: dict[int, tuple[str, str]] = {}
        """Of the requests that processes carry from before: who runs them, and their nodes."""
        self._carried: set[str] = set()  # processes that have told all that they carry
        self._greeting: dict[str, tuple[Session, frozenset[str]]] = {}
        """Edges whose processes have not all done so, and which those are."""
        self._nodes: dict[str, _Node] = {}
        self.set_nodes(slots, won_at)

    # Who shares, and what.

    def next_list(self, names: Collection[str], now: float) -> Sharers | None:
        """The list to be told from now on, once it is stored, if these are to be the edges.

        Those that may be alone stay, and are told that they may not any more. None: it is as it
        was, or has to be confirmed before. To be called now and then, until the list is `names`.
        """
        self._notice(now)
        self._wanted = frozenset(names)
        last = self.lists[-1]
        kept = {name for name in last.names if not self._edges[name].gone}
        wanted = tuple(sorted(kept | set(names)))
        if wanted == last.names or len(self.lists) > 1:
            return None
        return Sharers(max(last.version + 1, self.epoch << 16), wanted)

    def share_by(self, sharers: Sharers) -> None:
        """Tell this list from now on: the `next_list`, which is stored."""
        new = set(sharers.names) - set(self.lists[-1].names)
        for name in new:
            self._edges.setdefault(name, _Edge(-math.inf, gone=True))
        self._joined.update(dict.fromkeys(new, sharers.version))
        self.lists.append(sharers)

    def removed(self, edges: Collection[str], now: float) -> None:
        """Operators say that the processes of these edges have ended for good."""
        self._notice(now)
        for edge in edges:
            known = self._edges.get(edge)
            if known is not None and known.has_share(now):
                known.gone = True
                self._lose_share(edge, known, now)

    def set_nodes(self, slots: Mapping[str, int], now: float) -> None:
        """These are the nodes and their slots. A new one counts as taken until it is read."""
        for node in [node for node in self._nodes if node not in slots]:
            del self._nodes[node]
        for node, count in slots.items():
            account = self._nodes.get(node)
            if account is None:
                self._nodes[node] = _Node(count, _Rest(count, now + SETTLE_SECONDS))
            elif account.slots != count:
                account.slots = count
                if account.strangers.busy is None:
                    account.strangers.count = count

    def _share(self, edge: str, known: _Edge, node: str, slots: int) -> int:
        """The largest share that the edge may take for its own."""
        return max(
            [one.share(slots, node, edge) for one in self.lists if one.version >= known.believes],
            default=0,
        )

    def _confirmed_list(self, known: _Edge, version: int) -> None:
        """The edge has confirmed a list: forget those that nobody can believe any more."""
        known.believes = max(known.believes, version)
        least = min((one.believes for one in self._edges.values() if not one.gone), default=version)
        self.lists = [one for one in self.lists[:-1] if one.version >= least] + self.lists[-1:]

    def _may_be_alone(self, edge: str) -> bool:
        """Whether the edge may be told that it may go alone."""
        joined = self._joined.get(edge)
        if edge not in self.lists[-1].names or edge not in self._wanted:
            return False
        if joined is not None and all(
            one.gone or one.believes >= joined or name == edge for name, one in self._edges.items()
        ):
            del self._joined[edge]
        return edge not in self._joined

    # What processes carry from before, until their edge's session begins.

    def begins(self, session: Session, processes: Collection[str], now: float) -> None:
        """An edge greets, and has these processes; called again if it has others now.

        Its session begins, and it is told of terms, once all of them have told what they carry.
        """
        self._greeting[session.edge] = session, frozenset(processes)
        self._greet(session.edge, now)

    def left(self, session: Session) -> None:
        """The edge confirms nothing more in this session."""
        if self._greeting.get(session.edge, (None,))[0] == session:
            del self._greeting[session.edge]

    def adopted(self, process: str, number: int, node: str) -> None:
        """A process runs a request that a leader before has granted."""
        self._adopted[number] = process, node

    def ended(self, number: int) -> str | None:
        """A request that was adopted has ended: its node; None: it was not adopted."""
        process, node = self._adopted.pop(number, ("", None))
        if node is not None:
            self.dropped(member_of(process), number)
        return node

    def carried(self, process: str, now: float) -> None:
        """A process has told all that it carries."""
        self._carried.add(process)
        self._greet(member_of(process), now)

    def lost(self, process: str) -> None:
        """A process can't be heard any more."""
        self._carried.discard(process)

    def _greet(self, edge: str, now: float) -> None:
        session, processes = self._greeting.get(edge, (None, frozenset[str]()))
        if session is not None and processes <= self._carried:
            del self._greeting[edge]
            adopted = self._adopted.items()
            leases = {id_: node for id_, (process, node) in adopted if member_of(process) == edge}
            self.hello(session, leases, now)

    # Edges.

    def hello(self, session: Session, leases: Mapping[int, str], now: float) -> None:
        """A process of an edge begins a session; these of its requests run."""
        known = self._edges.setdefault(session.edge, _Edge(-math.inf, gone=True))
        if session.process != known.session.process:
            self._lose(known, now)
            if known.has_share(now):
                self._lose_share(session.edge, known, now)
        elif session.number <= known.session.number:
            return
        known.session, known.hello, known.present = session, dict(leases), False
        known.number = 0
        known.told.clear()

    def has(self, session: Session) -> bool:
        """Whether this is the session of its edge."""
        known = self._edges.get(session.edge)
        return known is not None and known.is_open and known.session == session

    def tell(self, edge: str, now: float, lead_until: float) -> Term | None:
        """Tell the edge of the term; None: it has to greet first."""
        known = self._edges.get(edge)
        if now >= lead_until or known is None or not known.is_open:
            return None
        self._notice(now)
        sharers, may_be_alone = self.lists[-1], self._may_be_alone(edge)
        known.number += 1
        if may_be_alone:
            known.gone_at, known.gone = now + self._alone_seconds, False
        left, session = lead_until - now, known.session.number
        term = Term(session, known.number, left, sharers, may_be_alone)
        known.told[known.number] = lead_until, term
        known.told.pop(known.number - _MOST_UNCONFIRMED, None)
        return term

    def confirmed(self, session: Session, number: int, now: float) -> bool:
        """The edge was told of the term with this number. False: it has to greet first."""
        self._notice(now)
        if not self.has(session):
            return False
        known = self._edges[session.edge]
        told = known.told.get(number)
        if told is not None:
            until, term = told
            known.lent_until = max(known.lent_until, until)
            known.told = {key: value for key, value in known.told.items() if key > number}
            if not (term.may_be_alone or any(one.may_be_alone for _, one in known.told.values())):
                known.gone = True
            self._confirmed_list(known, term.sharers.version)
            if known.hello is not None:
                self._adopt(known, known.hello, now)
        return True

    def dropped(self, edge: str, number: int) -> None:
        """What the edge ran under this number has ended."""
        known = self._edges.get(edge)
        if known is None:
            return
        if known.hello is not None:
            known.hello.pop(number, None)
        node = known.leases.pop(number, None)
        if node is not None:
            self._drop(edge, number, node)

    # Nodes.

    def read(self, node: str, busy: frozenset[object], asked_at: float) -> None:
        """The node was asked at that time, and is busy with these (slot and task).

        Of one that can't tell, all slots are busy until the longest request must have ended.
        """
        account = self._nodes.get(node)
        if account is None:
            return
        account.strangers.read(busy, asked_at)
        for lost in account.lost.values():
            lost.read(busy, asked_at)
        account.lost = {process: lost for process, lost in account.lost.items() if lost.count}

    def is_unread(self, node: str) -> bool:
        """Whether a reading of the node may free slots, so that it has to be asked."""
        account = self._nodes.get(node)
        if account is None or account.strangers.busy is None or account.lost:
            return True
        return account.strangers.count > len(account.early)

    def shared_by(self, now: float) -> object:
        """Equal as long as time alone changes nothing of `others`."""
        self._notice(now)
        return self.lists[-1], {edge for edge, one in self._edges.items() if one.has_share(now)}

    def others(self, node: str, now: float) -> int:
        """Slots of the node that are kept for others, or may be taken by what is not known here."""
        self._notice(now)
        account = self._nodes[node]
        kept = sum(
            self._share(edge, known, node, account.slots)
            for edge, known in self._edges.items()
            if known.has_share(now)
        )
        lost = sum(lost.count for lost in account.lost.values())
        return max(0, account.strangers.count - len(account.early)) + lost + kept

    def _notice(self, now: float) -> None:
        """Draw the conclusions of the time that has passed."""
        for edge, known in self._edges.items():
            if now < known.lent_until:
                continue
            if known.present or known.leases:
                self._lose(known, now)
            if now >= known.gone_at and not known.gone:
                known.gone = True
                self._lose_share(edge, known, now)

    def _lose(self, known: _Edge, now: float) -> None:
        """The edge may be alone from now on, or its process has ended."""
        edge, process, _ = known.session
        for number, node in known.leases.items():
            self._drop(edge, number, node)
            if node in self._nodes:
                self._nodes[node].lose(edge, process, 1, now + SETTLE_SECONDS)
        known.leases, known.present = {}, False

    def _lose_share(self, edge: str, known: _Edge, now: float) -> None:
        """The edge's process was alone, perhaps, and starts nothing more."""
        for node, account in self._nodes.items():
            strangers = account.strangers
            if strangers.busy is None:
                # They are among those that the first reading finds.
                strangers.reads_from = max(strangers.reads_from, now + LANDING_SECONDS)
            else:
                share = self._share(edge, known, node, account.slots)
                account.lose(edge, known.session.process, share, now + LANDING_SECONDS)

    def _adopt(self, known: _Edge, leases: dict[int, str], now: float) -> None:
        """The edge has confirmed a term, so that it has started nothing since its hello."""
        edge, process, _ = known.session
        for number, node in known.leases.items():
            self._drop(edge, number, node)
        for account in self._nodes.values():
            account.lost.pop((edge, process), None)
        known.leases, known.hello, known.present = leases, None, True
        for number, node in leases.items():
            if node in self._nodes:
                account = self._nodes[node]
                if now + LANDING_SECONDS <= account.strangers.reads_from:
                    account.early.add((edge, number))

    def _drop(self, edge: str, number: int, node: str) -> None:
        account = self._nodes.get(node)
        if account is not None:
            account.early.discard((edge, number))
