"""A model of a cluster in which everything goes wrong, to be run as random scripts.

Members and edges run the real rules of `gateway.cluster`, the database is SQLite with the real
statements. Everything between them is made up by chance, from a seed: when who does what, messages
that are late, doubled or lost with their connection, processes that are killed, stopped (also
between their check and the write of a request) and started, machines that are suspended, wall
clocks that jump, databases that are away or fail over to an old state.

The property: the requests that were started on a node and have not ended are never more than its
slots, but for one for each stop of an edge between check and write. And: no two members lead at a
time (after a failover to an old state: may grant), each lease ends once, and when all is well again
all slots are free.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tests.cluster.sending import free, grant

TERM = 2.0
ALONE = 5.0
LIMIT = 1.5  # seconds after which a member takes a step for failed
LONGEST_GRANT = 1.0  # seconds from an asking to the write, at most
LONGEST_LANDING = 0.2  # seconds until a node shows a request that was written to it, at most


@dataclass(frozen=True)
class Rules:
    """The modules with the rules, as they are or with one rule broken."""

    leadership: ModuleType
    leader_row: ModuleType
    fencing: ModuleType
    sending: ModuleType
    clock: str = "boot"  # the clock that members and edges use


class Broken(Exception):  # noqa: N818
    """The property does not hold."""


def broken(is_so: bool, what: str) -> None:
    if is_so:
        raise Broken(what)


@dataclass(slots=True, eq=False)
class Machine:
    """A host, whose clocks started at some time and run at their own speed."""

    began: float
    speed: float
    wall: float
    suspended: float = 0.0

    def clock(self, kind: str, now: float) -> float:
        """What this clock shows: `boot`, `wall`, or `monotonic`, which stops in suspend."""
        shown = self.began + now * self.speed
        if kind == "wall":
            return shown + self.wall
        return shown - self.suspended if kind == "monotonic" else shown


@dataclass(slots=True, eq=False)
class Request:
    task: int  # the node's number for it: no other request ever has it
    number: int
    lands_at: float
    late: bool  # whether its edge was stopped between check and write
    edge: Edge | None


@dataclass(slots=True, eq=False)
class Step:
    """A step of a member on its way to the database and back."""

    brain: Brain
    step: Any
    asked_at: float
    row: Any = None
    done: bool = False


@dataclass(slots=True, eq=False)
class Brain:
    name: str
    machine: Machine
    member: Any
    slots: dict[str, int]  # of the nodes, as it knows them
    tenure: Any = None
    step: Step | None = None
    stopped: bool = False
    cut_off: bool = False  # from the database


@dataclass(slots=True, eq=False)
class Link:
    """A connection of an edge to a member, with what is under way in both directions."""

    edge: Edge
    brain: Brain
    epoch: int
    session: Any
    up: deque[tuple[Any, ...]] = field(default_factory=deque)
    down: deque[tuple[Any, ...]] = field(default_factory=deque)
    asked_at: float = 0.0  # when the edge sent the last message that the member has got
    is_cut: bool = False
    is_stalled: bool = False  # nothing arrives for a while


@dataclass(slots=True, eq=False)
class Edge:
    name: str
    machine: Machine
    process: str
    fence: Any
    sender: Any
    slots: dict[str, int]  # of the nodes, as it knows them
    link: Link | None = None
    greeted_at: float = 0.0
    ready: list[int] = field(default_factory=list)
    """Numbers of requests that were granted and are not written yet."""
    ended: list[int] = field(default_factory=list)
    """Numbers of requests whose end has not been noticed."""
    stopped: bool = False
    unwritten: tuple[int, str] | None = None
    """It was stopped between the check of this request and its write."""


class Script:
    """One run; `play` raises Broken."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.rules = rules
        self.rng, self.more = random.Random(seed), random.Random(seed)
        rng = self.rng
        self.now = 0.0
        self.starts = self.failovers = 0
        self.machines = [
            Machine(rng.uniform(0, 1e5), 1 + rng.uniform(-2e-4, 2e-4), rng.uniform(-1e5, 1e5))
            for _ in range(3)
        ]
        self.slots = {f"n{i}": rng.choice((1, 1, 2, 2, 3, 4)) for i in range(rng.choice((1, 1, 2)))}
        self.restarted_at = dict.fromkeys(self.slots, -10.0)
        """When the server of each node came to have fewer slots."""
        # Every fourth script is about the leadership alone.
        self.has_edges = seed % 4 != 3
        # And every fourth is about who shares, and goes alone.
        self.is_about_lists = seed % 4 == 2
        self.names = tuple(f"e{i}" for i in range(rng.choice((2, 3, 3)) if self.has_edges else 0))
        # Some scripts begin with fewer edges that share; an operator changes who should.
        first = self.names[: 1 + self.more.randrange(len(self.names))] if self.names else ()
        self.wanted = set(first)
        self.lists = [rules.fencing.Sharers(1, first)]  # as they are stored
        self.processes = itertools.count(1)
        self.brains = [self.new_brain(self.machines[i]) for i in range(rng.choice((2, 2, 3)))]
        self.edges = [self.new_edge(name, self.machines[i]) for i, name in enumerate(self.names)]
        self.running: dict[str, list[Request]] = {node: [] for node in self.slots}
        self.links: list[Link] = []
        self.doubles: list[tuple[Link, bool, tuple[Any, ...]]] = []
        self.steps: list[Step] = []  # those on their way to the database
        self.answers: list[Step] = []
        self.reads: list[list[Any]] = []  # who has asked which node when, and what it answered
        self.database = sqlite3.connect(":memory:", isolation_level=None)
        self.database.execute(
            "CREATE TABLE leadership (cluster TEXT, holder TEXT, epoch INT, counter INT)"
        )
        self.database.execute("INSERT INTO leadership VALUES ('c', '', 0, 0)")
        self.rows: list[tuple[Any, ...]] = [("", 0, 0)]
        self.is_away = False
        self.asks = True
        # How this script is: how often something goes wrong, messages and steps come at once, steps
        # are lost or late, and requests end.
        self.trouble = rng.choice((0.0, 0.05, 0.1, 0.3))
        self.delivery = rng.choice((0.5, 0.8, 0.95))
        self.losses = rng.choice((0.02, 0.1, 0.3))
        self.delays = rng.choice((0.02, 0.1, 0.4))
        self.ends = rng.choice((0.05, 0.2, 0.5))
        if self.is_about_lists:
            self.trouble, self.ends = 0.3, 0.05
        self.haste = rng.choice((0.7, 0.7, 0.2))
        """How soon an edge writes a request that was granted."""
        self.idles = rng.choice((0.0, 0.0, 0.5, 0.9) if self.has_edges else (0.0, 0.3, 0.7, 0.95))
        """How often a leader does not renew."""
        self.pauses = rng.choice(
            ((0.02, 0.1, 0.25), (0.1, 0.25, 0.5), (0.25, 0.5, 0.7), (0.1, 0.5, 1.3))
        )

    # Processes.

    def new_brain(self, machine: Machine) -> Brain:
        name = f"p{next(self.processes)}"
        return Brain(name, machine, self.rules.leadership.Member(name, TERM), dict(self.slots))

    def new_edge(self, name: str, machine: Machine) -> Edge:
        slots = dict(self.slots)
        fence = self.rules.fencing.Fence(name, lambda node: slots.get(node, 0), alone_seconds=ALONE)
        return Edge(
            name,
            machine,
            f"p{next(self.processes)}",
            fence,
            self.rules.sending.Sender(fence),
            slots,
        )

    def processes_here(self) -> list[Brain | Edge]:
        return [*self.brains, *self.edges]

    def clock(self, of: Brain | Edge) -> float:
        return of.machine.clock(self.rules.clock, self.now)

    def in_turn(self, all_of_them: list[Any]) -> list[Any]:
        """All of them, beginning with any."""
        first = int(self.rng.random() * len(all_of_them))
        return all_of_them[first:] + all_of_them[:first]

    # The script.

    def play(self, *, heal: bool = False) -> None:
        """Play it; `heal`: at the end all goes well until all slots must be free."""
        rng = self.rng
        self.begin()
        for _ in range(45 if self.has_edges else 150):
            self.now += rng.choice(self.pauses) * (0.5 + rng.random())
            if rng.random() < self.trouble:
                self.go_wrong()
            self.recover()
            self.a_round()
        if heal and self.has_edges:
            self.heal()

    def begin(self) -> None:
        """One member comes to lead, and all edges greet it, as fast as that can be."""
        brain, usual = self.brains[0], (self.delivery, self.losses, self.delays, self.idles)
        self.delivery, self.losses, self.delays, self.idles = 1.0, 0.0, 0.0, 0.0
        while not brain.member.may_grant(self.clock(brain)):
            self.now += 0.45
            self.work_on_the_row(brain)
        self.now += 0.1
        for node in self.slots:
            self.ask_node(brain, node)
        for edge in self.edges:
            self.greet(edge)
        for link in self.links:
            self.deliver(link)
        self.delivery, self.losses, self.delays, self.idles = usual

    def a_round(self) -> None:
        rng = self.rng
        chance = rng.random
        for brain in self.in_turn(self.brains):
            if not brain.stopped:
                self.work_on_the_row(brain)
                self.lead(brain)
        for step in self.steps[-4:]:
            if chance() < 0.4:
                self.execute(step)
        for step in self.answers[-4:]:
            if chance() < 0.4:
                self.answer(step)
        for edge in self.in_turn(self.edges):
            if not edge.stopped:
                self.serve(edge)
        for link in self.links:
            self.deliver(link)
        if self.doubles and chance() < 0.3:
            self.deliver_double()
        if self.reads and chance() < 0.5:
            self.answer_read(rng.choice(self.reads))
        self.check()

    # Members and their database.

    def work_on_the_row(self, brain: Brain) -> None:
        clock = self.clock(brain)
        if brain.step is not None:
            if clock - brain.step.asked_at <= LIMIT:
                return
            brain.step = None
        if self.rng.random() < self.idles and brain.member.leads(clock):
            return
        brain.step = step = Step(brain, brain.member.next_step(clock), clock)
        chance = self.rng.random
        if chance() < self.losses:
            return  # on its way there
        self.steps.append(step)
        if not self.is_away and not brain.cut_off and chance() >= self.delays:
            self.execute(step)
            if chance() >= self.losses + self.delays:
                self.answer(step)

    def execute(self, step: Step) -> None:
        """The database does what a member has asked for, however long ago that was."""
        if self.is_away:
            return
        self.steps.remove(step)
        execute = self.database.execute
        if step.step is None:
            found = execute(self.rules.leader_row.LOOK, {"cluster": "c"}).fetchone()
            step.row = self.rules.leadership.LeaderRow(*found)
        else:
            sql, values = self.rules.leader_row.update_of(step.step)
            step.done = execute(sql, {**values, "cluster": "c"}).fetchone() is not None
            if step.done:
                self.rows.append(tuple(step.step.wanted))
        self.answers.append(step)

    def answer(self, step: Step) -> None:
        """A member gets the database's answer, if it still waits for it."""
        brain = step.brain
        if step not in self.answers or brain.stopped:
            return
        self.answers.remove(step)
        if brain.step is not step:
            return
        brain.step = None
        clock = self.clock(brain)
        if step.row is not None:
            brain.member.saw(step.row, step.asked_at, clock)
        elif step.done:
            brain.member.done(step.step, step.asked_at, clock)
            member, tenure = brain.member, brain.tenure
            if member.leads(clock) and (tenure is None or tenure.epoch != member.row.epoch):
                brain.tenure = self.rules.fencing.Tenure(
                    member.row.epoch, member.won_at, self.lists, brain.slots, alone_seconds=ALONE
                )
        else:
            brain.member.refused()

    def lead(self, brain: Brain) -> None:
        """A leader tells edges of its term, and reads nodes."""
        if brain.tenure is None or not self.has_edges:
            return
        chance = self.rng.random
        for node in brain.slots:
            if chance() < 0.5:
                self.ask_node(brain, node)
        if brain.member.leads(self.clock(brain)):
            self.change_list(brain)
            for link in self.links:
                if link.brain is brain and chance() < 0.3:
                    self.tell(link)

    def change_list(self, brain: Brain) -> None:
        """A leader stores another list of those that share, and tells it from then on."""
        row = self.database.execute("SELECT epoch FROM leadership").fetchone()
        if self.is_away or row[0] != brain.tenure.epoch or self.more.random() < 0.5:
            return
        new = brain.tenure.next_list(self.wanted, self.clock(brain))
        self.lists = list(brain.tenure.lists)
        if new is not None:
            self.lists.append(new)
            brain.tenure.share_by(new)

    def tell(self, link: Link) -> None:
        brain, edge = link.brain, link.edge
        told = brain.tenure.tell(edge.name, self.clock(brain), brain.member.lead_until)
        if told is not None and told.session == link.session.number:
            self.send(link, link.down, "term", brain.tenure.epoch, told, link.asked_at)

    # Nodes.

    def busy(self, node: str) -> frozenset[int]:
        return frozenset(one.task for one in self.running[node] if one.lands_at <= self.now)

    def ask_node(self, asker: Brain | Edge, node: str) -> None:
        read = [asker, node, self.clock(asker), None]
        self.reads.append(read)
        if self.rng.random() < 0.8:
            self.answer_read(read)
            if self.rng.random() < 0.8:
                self.answer_read(read)

    def answer_read(self, read: list[Any]) -> None:
        """The node answers, or its answer comes to whom has asked."""
        asker, node, asked_at, busy = read
        if busy is None:
            read[3] = self.busy(node)
            return
        if asker.stopped:
            return
        self.reads.remove(read)
        if isinstance(asker, Edge):
            asker.fence.read(node, busy, asked_at)
        elif asker.tenure is not None:
            asker.tenure.read(node, busy, asked_at)

    def write(self, edge: Edge, number: int, node: str, *, late: bool = False) -> None:
        self.starts += 1
        lands_at = self.now + self.rng.random() * LONGEST_LANDING
        # A server that has just restarted with fewer slots queues what was granted before.
        late = late or self.now - self.restarted_at[node] < LONGEST_GRANT
        self.running[node].append(Request(self.starts, number, lands_at, late, edge))
        running = self.running[node]
        too_many = len(running) - sum(one.late for one in running) > self.slots[node]
        broken(too_many, f"{len(running)} requests on slots of {node}")

    # Edges.

    def serve(self, edge: Edge) -> None:
        chance = self.rng.random
        self.end_requests(edge)
        if edge.link is None or edge.link.is_cut:
            if chance() < 0.4:
                self.greet(edge)
        else:
            self.talk(edge, edge.link)
        for number in list(edge.ready):
            if chance() < self.haste:
                edge.ready.remove(number)
                self.start(edge, number)
        if self.more.random() < 0.2:
            # Its health checks read nodes all the time.
            for node in edge.slots:
                edge.fence.read(node, self.busy(node), self.clock(edge))
        if self.asks and edge.fence.is_alone(self.clock(edge)):
            for node in edge.slots:
                if chance() < 0.5:
                    self.ask_node(edge, node)
                if chance() < 0.7:
                    self.start_alone(edge, node)

    def end_requests(self, edge: Edge) -> None:
        """Requests end on nodes, and the edge notices it some time."""
        chance = self.rng.random
        for requests in self.running.values():
            for request in list(requests):
                if request.edge is edge and chance() < self.ends:
                    requests.remove(request)
                    edge.ended.append(request.number)
        if edge.ended and chance() < 0.7:
            number = edge.ended.pop(0)
            broken(not edge.sender.ended(number), "a lease has ended twice")
            self.give_back(edge, number)

    def talk(self, edge: Edge, link: Link) -> None:
        chance, fence, clock = self.rng.random, edge.fence, self.clock(edge)
        if chance() < 0.8:
            self.send(link, link.up, "beat", fence.seen, clock)
        if clock - edge.greeted_at > 1.0 and chance() < 0.3:
            fence.give_up()
        if fence.session != link.session.number:
            edge.link = None
            return
        if self.asks and chance() < 0.05:
            self.greet(edge)
        elif self.asks and chance() < 0.6:
            self.send(link, link.up, "ask", fence.seen, clock, edge.sender.ask(clock))
        self.deliver(link)

    def greet(self, edge: Edge) -> None:
        leaders = [brain for brain in self.brains if brain.tenure is not None]
        if not leaders:
            return
        # Mostly one that leads, but a member may be told so long after.
        ruling = [brain for brain in leaders if brain.member.leads(self.clock(brain))]
        brain = self.rng.choice(ruling if ruling and self.rng.random() < 0.9 else leaders)
        fence = edge.fence
        if not fence.greet(brain.tenure.epoch):
            brain.member.heard(fence.epoch, self.clock(brain))
            return
        session = self.rules.fencing.Session(edge.name, edge.process, fence.session)
        edge.link = link = Link(edge, brain, fence.epoch, session)
        edge.greeted_at = self.clock(edge)
        self.links.append(link)
        self.send(link, link.up, "hello", 0, edge.greeted_at, dict(edge.sender.leases))

    def start(self, edge: Edge, number: int) -> None:
        if edge.sender.start(number, self.clock(edge)):
            self.write_soon(edge, number)
        elif number not in edge.sender.leases:
            self.give_back(edge, number)

    def start_alone(self, edge: Edge, node: str) -> None:
        number = edge.sender.start_alone(node, self.clock(edge))
        if number is not None:
            self.write_soon(edge, number)

    def write_soon(self, edge: Edge, number: int) -> None:
        node = edge.sender.leases[number]
        if self.rng.random() < 0.01:
            edge.stopped, edge.unwritten = True, (number, node)
        else:
            self.write(edge, number, node)

    def give_back(self, edge: Edge, number: int) -> None:
        if edge.link is not None and not edge.link.is_cut:
            self.send(edge.link, edge.link.up, "ended", edge.fence.seen, self.clock(edge), number)

    # Messages.

    def send(self, link: Link, queue: deque[tuple[Any, ...]], *message: Any) -> None:
        if not link.is_cut:
            queue.append(message)

    def deliver(self, link: Link) -> None:
        if link.is_stalled:
            return
        chance, delivery = self.rng.random, self.delivery
        for queue, receiver, take in (
            (link.up, link.brain, self.to_brain),
            (link.down, link.edge, self.to_edge),
        ):
            while queue and not receiver.stopped and chance() < delivery:
                message = queue.popleft()
                if chance() < 0.02:
                    self.doubles.append((link, queue is link.up, message))
                take(link, message)

    def deliver_double(self) -> None:
        """Something that was delivered comes once more."""
        link, is_up, message = self.doubles.pop(self.rng.randrange(len(self.doubles)))
        if not (link.brain if is_up else link.edge).stopped:
            (self.to_brain if is_up else self.to_edge)(link, message)

    def to_brain(self, link: Link, message: tuple[Any, ...]) -> None:
        brain = link.brain
        if brain not in self.brains or brain.tenure is None or brain.tenure.epoch != link.epoch:
            return
        tenure, clock = brain.tenure, self.clock(brain)
        kind, seen, asked_at, *rest = message
        link.asked_at = max(link.asked_at, asked_at)
        if kind == "hello":
            tenure.hello(link.session, rest[0], clock)
        elif not tenure.confirmed(link.session, seen, clock):
            self.send(link, link.down, "greet")
            return
        if kind == "ended":
            tenure.dropped(link.session.edge, rest[0])
        elif kind == "ask":
            for node in self.in_turn([*brain.slots]):
                if not brain.member.may_grant(clock):
                    break
                if grant(tenure, link.session, rest[0], node, clock):
                    number = link.session.number
                    self.send(link, link.down, "grant", tenure.epoch, number, rest[0], node)
                    break
        elif brain.member.leads(clock):
            self.tell(link)

    def to_edge(self, link: Link, message: tuple[Any, ...]) -> None:
        edge = link.edge
        if edge not in self.edges or edge.process != link.session.process:
            return
        fence, clock = edge.fence, self.clock(edge)
        if message[0] == "greet":
            if edge.link is link:
                edge.link = None
            return
        if message[0] == "term":
            _, epoch, term, asked_at = message
            if edge.sender.told(epoch, term, asked_at=asked_at, now=clock):
                broken(epoch < fence.epoch, "a lower epoch is obeyed")
            return
        _, epoch, session, number, node = message
        answer = edge.sender.granted(epoch, session, number, node)
        if answer == "start":
            broken(epoch < fence.epoch, "a lower epoch is obeyed")
            edge.ready.append(number)
        elif answer == "give back" and edge.link is link:
            self.give_back(edge, number)

    # What goes wrong.

    def go_wrong(self) -> None:
        usual = (*FAULTS, *CHANGES) if self.has_edges else FAULTS
        self.rng.choice(LIST_FAULTS if self.is_about_lists else usual)(self)

    def recover(self) -> None:
        chance = self.rng.random
        if self.is_away and chance() < 0.15:
            self.go_away()
        for brain in self.brains:
            if brain.cut_off and chance() < 0.15:
                brain.cut_off = False
            if brain.stopped and chance() < 0.15:
                brain.stopped = False
        for edge in self.edges:
            if edge.stopped and chance() < 0.15:
                self.resume(edge)
        for link in self.links:
            if link.is_stalled and chance() < 0.1:
                link.is_stalled = False
        for one in self.processes_here():
            if one.slots != self.slots and not one.stopped and self.more.random() < 0.2:
                self.learn_slots(one)

    def fail_over(self) -> None:
        """The database is another one now, in an old state."""
        if len(self.rows) < 2 or self.is_away:
            return
        back = self.rng.choice((0, 0, 0, 1, 2, 5, 1000))
        epoch = self.rows[-1][1]
        if not back:  # to the last row of the epoch before
            back = next((i for i, row in enumerate(reversed(self.rows)) if row[1] != epoch), 1)
        del self.rows[-min(len(self.rows) - 1, back) :]
        self.failovers += 1
        change = "UPDATE leadership SET holder = ?, epoch = ?, counter = ?"
        self.database.execute(change, self.rows[-1])

    def go_away(self) -> None:
        self.is_away = not self.is_away

    def change_slots(self) -> None:
        """A server restarts with another number of slots; who knows it, and when, is chance."""
        node = self.more.choice([*self.slots])
        before = self.slots[node]
        self.slots[node] = after = self.more.choice((1, 2, 3, 4))
        if after < before:
            # Nobody gets an answer before its server is there again.
            self.restarted_at[node] = self.now
            for one in self.processes_here():
                if one.slots.get(node, 0) > after:
                    self.learn_slots(one, node)
            for request in self.running[node]:
                if request.edge is not None:
                    request.edge.ended.append(request.number)
            self.running[node].clear()

    def learn_slots(self, one: Brain | Edge, *nodes: str) -> None:
        """It comes to know the slots of these nodes, or of all."""
        one.slots.update({node: self.slots[node] for node in nodes or self.slots})
        if isinstance(one, Brain) and one.tenure is not None:
            one.tenure.set_nodes(one.slots, self.clock(one))

    def change_nodes(self) -> None:
        """A process reads another inventory, without one of the nodes."""
        one = self.more.choice(self.processes_here())
        node = self.more.choice([*self.slots])
        if not one.stopped and one.slots.pop(node, 0) and isinstance(one, Brain) and one.tenure:
            one.tenure.set_nodes(one.slots, self.clock(one))

    def change_members(self) -> None:
        if self.names:
            self.wanted ^= {self.more.choice(self.names)}

    def mark(self, name: str, some: list[Any]) -> None:
        """Make one of these stopped, stalled or cut off."""
        if some:
            setattr(self.rng.choice(some), name, True)

    def jump(self) -> None:
        """The time of day of a machine is set."""
        machine = self.rng.choice(self.machines)
        machine.wall += self.rng.choice((-1000, -3, -1, 1, 3, 1000))

    def be_silent(self) -> None:
        """Nothing happens anywhere."""
        self.now += self.rng.choice((1.5, 3.0, 5.0))

    def strand(self) -> None:
        """All edges are left alone, right after somebody has told something."""
        if self.links:
            self.deliver(self.more.choice(self.links))
        for brain in self.brains:
            brain.stopped = True

    def end_orphans(self) -> None:
        """Nodes notice that the edge of a request has died."""
        for requests in self.running.values():
            requests[:] = [one for one in requests if one.edge is not None]

    def cut(self) -> None:
        """Both sides of a link may get some of what was under way."""
        if not self.links:
            return
        link = self.rng.choice(self.links)
        link.is_cut = True
        for queue in (link.up, link.down):
            for _ in range(self.rng.randint(0, len(queue))):
                queue.pop()

    def resume(self, edge: Edge) -> None:
        edge.stopped = False
        if edge.unwritten is not None:
            (number, node), edge.unwritten = edge.unwritten, None
            self.write(edge, number, node, late=True)

    def suspend(self) -> None:
        """Time goes by, and the machine does nothing."""
        seconds = self.rng.choice((0.5, 2.0, 4.0))
        machine = self.rng.choice(self.machines)
        machine.suspended += seconds
        held = [one for one in self.processes_here() if one.machine is machine]
        before = [one.stopped for one in held]
        for one in held:
            one.stopped = True
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            self.a_round()
        for one, stopped in zip(held, before, strict=True):
            one.stopped = stopped

    def kill_edge(self) -> None:
        if not self.edges:
            return
        index = self.rng.randrange(len(self.edges))
        edge = self.edges[index]
        self.edges[index] = self.new_edge(edge.name, edge.machine)
        # Its connections to nodes are closed: some servers go on for a while.
        for requests in self.running.values():
            for request in list(requests):
                if request.edge is edge:
                    request.edge = None
                    if self.rng.random() < 0.5:
                        requests.remove(request)
        self.hang_up(edge)

    def kill_brain(self) -> None:
        index = self.rng.randrange(len(self.brains))
        brain = self.brains[index]
        self.brains[index] = self.new_brain(brain.machine)
        self.hang_up(brain)

    def hang_up(self, dead: Brain | Edge) -> None:
        """Nobody is at its end of connections any more."""
        for link in self.links:
            if dead is link.brain or dead is link.edge:
                link.is_cut = True
        self.reads = [read for read in self.reads if read[0] is not dead]

    # What must hold.

    def check(self) -> None:
        leading = [brain for brain in self.brains if brain.member.leads(self.clock(brain) + 0.01)]
        if self.failovers:
            leading = [one for one in leading if one.member.may_grant(self.clock(one) + 0.01)]
        broken(len(leading) > 1, "two members lead at a time")
        self.links = [link for link in self.links if not link.is_cut or link.up or link.down]

    def heal(self) -> None:
        """All goes well, and nobody asks for more: then all slots are free some time."""
        self.is_away, self.trouble, self.delivery = False, 0.0, 1.0
        self.losses = self.delays = self.idles = 0.0
        for brain in self.brains:
            brain.stopped = brain.cut_off = False
        for edge in self.edges:
            if edge.stopped:
                self.resume(edge)
        for link in self.links:
            link.is_stalled = False
        self.end_orphans()
        self.ends, self.asks = 1.0, False
        for one in self.processes_here():
            self.learn_slots(one)
        for _ in range(200):
            self.now += 0.25
            self.a_round()
            for brain in self.brains:
                clock = self.clock(brain)
                if brain.member.may_grant(clock) and all(
                    free(brain.tenure, node, clock) == slots for node, slots in self.slots.items()
                ):
                    return
        raise Broken("not all slots come free")


Fault = Callable[[Script], object]


FAULTS: tuple[Fault, ...] = (
    Script.fail_over, Script.go_away, Script.go_away,
    *[lambda script: script.mark("cut_off", script.brains)] * 2,
    Script.cut, *[lambda script: script.mark("is_stalled", script.links)] * 2,
    *[lambda script: script.mark("stopped", script.brains)] * 2,
    lambda script: script.mark("stopped", script.edges),
    Script.suspend, Script.kill_edge, Script.kill_brain,
    Script.jump, Script.be_silent, Script.end_orphans, Script.end_orphans,
)  # fmt: skip
"""What goes wrong, each as often as it stands here."""
CHANGES: tuple[Fault, ...] = (
    Script.change_members, Script.change_members, Script.change_slots, Script.change_nodes,
)  # fmt: skip
"""And what changes, where there are edges."""
LIST_FAULTS: tuple[Fault, ...] = (
    *[Script.change_members] * 3, lambda script: script.mark("is_stalled", script.links),
    Script.strand, Script.be_silent, Script.cut, Script.kill_edge,
)  # fmt: skip
