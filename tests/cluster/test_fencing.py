"""What edges may start and leaders may grant, where `model.py` would need too much luck."""

from __future__ import annotations

import pytest

from gateway.cluster.fencing import (
    LANDING_SECONDS,
    SETTLE_SECONDS,
    Fence,
    Session,
    Sharers,
    Tenure,
    shares,
)
from tests.cluster.sending import Sender, free, grant
from tests.known import known

EDGES = ("a", "b")
BOTH = Sharers(1, EDGES)
TERM = 2.0
ALONE = 600.0
IDLE: frozenset[object] = frozenset()


def busy(*tasks: int) -> frozenset[object]:
    return frozenset(tasks)


class Cluster:
    """A leader and edges whose clocks show the same."""

    def __init__(self, slots: int = 4, *, greets_at: float | None = 101.0) -> None:
        self.slots = {"n": slots}
        self.tenure = Tenure(1, 100.0, [BOTH], self.slots, alone_seconds=ALONE)
        self.fences: dict[str, Fence] = {}
        self.senders: dict[str, Sender] = {}
        for edge in EDGES:
            self.begin_process(edge)
            if greets_at is not None:
                self.greet(edge, greets_at)

    def begin_process(self, edge: str) -> Fence:
        fence = Fence(edge, lambda node: self.slots.get(node, 0), alone_seconds=ALONE)
        self.fences[edge], self.senders[edge] = fence, Sender(fence)
        return fence

    def session(self, edge: str) -> Session:
        return Session(edge, f"process {id(self.fences[edge])}", self.fences[edge].session)

    def greet(self, edge: str, now: float) -> None:
        fence = self.fences[edge]
        assert fence.greet(self.tenure.epoch)
        self.tenure.hello(self.session(edge), self.senders[edge].leases, now)
        self.tell(edge, now)

    def tell(self, edge: str, now: float) -> None:
        """Tell the edge of a term from now on, and let it confirm."""
        told = known(self.tenure.tell(edge, now, now + TERM))
        assert self.senders[edge].told(self.tenure.epoch, told, asked_at=now, now=now)
        assert self.tenure.confirmed(self.session(edge), self.fences[edge].seen, now)

    def start(self, edge: str, now: float) -> int | None:
        """Ask for a slot and start on it; None: the leader has none."""
        fence, sender = self.fences[edge], self.senders[edge]
        number = sender.ask(now)
        if not grant(self.tenure, self.session(edge), number, "n", now):
            return None
        assert sender.granted(self.tenure.epoch, fence.session, number, "n") == "start"
        assert sender.start(number, now)
        return number


def settled(slots: int = 4) -> Cluster:
    """Return a leader that has read an idle node, and that both edges have greeted, at 102."""
    made = Cluster(slots)
    made.tenure.read("n", IDLE, 101.5)
    made.tell("a", 102.0)
    made.tell("b", 102.0)
    return made


# Shares.


def test_shares_are_even_and_change_only_for_who_has_to_own_other_slots() -> None:
    three, two = ("a", "b", "c"), ("a", "b")
    owners = set()
    for number in range(40):
        for total in (0, 1, 2, 3, 7, 12):
            found = shares(total, f"n{number}", three)
            assert sum(found.values()) == total
            assert max(found.values()) - min(found.values()) <= 1
        one = shares(1, f"n{number}", three)
        assert one == shares(1, f"n{number}", ("c", "a", "b")), "not by the order"
        owners |= {edge for edge, share in one.items() if share}
        after = shares(1, f"n{number}", two)
        assert all(one[edge] <= after[edge] for edge in two)
    assert owners == set(three)


# A new leader.


def test_a_new_leader_counts_all_slots_as_taken_until_it_has_read_them_a_second_later() -> None:
    cluster = Cluster(greets_at=100.1)
    assert free(cluster.tenure, "n", 101.0) == 0
    cluster.tenure.read("n", IDLE, 100.0 + SETTLE_SECONDS - 0.01)
    assert free(cluster.tenure, "n", 101.5) == 0
    cluster.tenure.read("n", busy(7), 100.0 + SETTLE_SECONDS)
    assert free(cluster.tenure, "n", 101.5) == 3
    # Another task on that slot is one of its own.
    cluster.tenure.read("n", busy(8), 101.6)
    assert free(cluster.tenure, "n", 101.7) == 4


def test_requests_that_hellos_tell_of_are_counted_once() -> None:
    cluster = Cluster(greets_at=None)
    cluster.senders["a"].leases.update({1: "n", 2: "n"})
    for edge in EDGES:
        cluster.greet(edge, 100.1)
    cluster.tenure.read("n", busy(1, 2, 3), 101.3)
    assert free(cluster.tenure, "n", 101.3) == 1
    assert cluster.tenure.is_unread("n")
    cluster.tenure.read("n", busy(1, 2), 101.4)
    assert free(cluster.tenure, "n", 101.4) == 2
    assert not cluster.tenure.is_unread("n")
    # Nobody else has an idle node asked.
    cluster.tenure.dropped("a", 1)
    assert cluster.tenure.is_unread("n")
    cluster.tenure.read("n", busy(2), 101.6)
    assert free(cluster.tenure, "n", 101.6) == 3
    assert not cluster.tenure.is_unread("n")


def test_a_request_that_a_node_may_not_show_yet_is_counted_beside_those_that_it_shows() -> None:
    cluster = Cluster(greets_at=100.1)
    cluster.senders["a"].leases[1] = "n"
    cluster.greet("a", 100.0 + SETTLE_SECONDS - LANDING_SECONDS / 2)
    cluster.tenure.read("n", busy(7), 100.0 + SETTLE_SECONDS)
    assert free(cluster.tenure, "n", 101.3) == 2


def test_a_hello_counts_when_the_edge_has_confirmed_a_term() -> None:
    cluster = Cluster(greets_at=None)
    cluster.greet("b", 101.0)
    cluster.tenure.read("n", IDLE, 101.5)
    fence = cluster.fences["a"]
    fence.greet(1)
    session = cluster.session("a")
    cluster.tenure.hello(session, {}, 101.6)
    assert cluster.tenure.tell("a", 101.6, 103.6) is not None
    assert not grant(cluster.tenure, session, 1, "n", 101.6)
    assert free(cluster.tenure, "n", 101.6) < 3, "its share stays its own"


# Alone.


def test_an_edge_greets_no_leader_of_a_lower_epoch_and_is_alone_again_if_nobody_answers() -> None:
    fence = settled(4).fences["a"]
    began = 102.0 + TERM + SETTLE_SECONDS
    assert fence.greet(7)
    assert not fence.greet(6)
    assert not fence.is_alone(began)
    fence.give_up()
    assert fence.is_alone(began)
    assert not Cluster(greets_at=None).fences["a"].is_alone(1e9), "nobody has ever answered it"


def test_an_edge_that_goes_alone_again_reads_anew_what_runs_there_and_is_told_of_its_own() -> None:
    cluster = settled(4)
    fence = cluster.fences["a"]
    fence.adopted("a/1", 6, "n")
    fence.read("n", IDLE, 106.0)
    assert fence.others("n", 106.0) == 2
    fence.go_alone(106.0)
    fence.adopted("a/1", 7, "n")
    assert fence.is_alone(106.0)
    fence.read("n", IDLE, 106.0 + LANDING_SECONDS / 2)
    assert fence.others("n", 106.2) == 4
    fence.read("n", busy(1, 2), 106.0 + LANDING_SECONDS)
    assert fence.others("n", 106.3) == 3, "one of them is its own, not that of the time before"
    fence.ended(7)
    assert fence.others("n", 106.3) == 4
    fence.read("n", busy(2), 106.4)
    assert fence.others("n", 106.4) == 3


def test_an_edge_is_alone_for_a_limited_time_and_its_leader_waits_longer() -> None:
    cluster = settled(4)
    fence, tenure = cluster.fences["a"], cluster.tenure
    assert fence.is_alone(102.0 + ALONE - 0.1)
    assert not fence.is_alone(102.0 + ALONE)
    now = 102.0
    while now < 102.0 + 1.01 * ALONE:
        cluster.tell("b", now)
        assert free(tenure, "n", now) == (4 if now < 102.0 + TERM else 2)
        assert tenure.next_list(["b"], now) is None, "it stays in the list, too"
        now += 1.0
    cluster.tell("b", now)
    assert free(tenure, "n", now) == 2, "until a reading shows that it runs nothing"
    tenure.read("n", IDLE, now + LANDING_SECONDS)
    assert free(tenure, "n", now + LANDING_SECONDS) == 4
    assert tenure.next_list(["b"], now) is not None


def test_what_ran_alone_is_counted_when_its_process_dies() -> None:
    cluster = settled(4)
    cluster.tell("b", 103.9)
    cluster.begin_process("a")
    cluster.greet("a", 105.5)
    assert free(cluster.tenure, "n", 105.5) == 2, "its share, until the node is seen without it"
    cluster.tenure.read("n", IDLE, 105.5 + LANDING_SECONDS)
    assert free(cluster.tenure, "n", 105.8) == 4


# Which edges share.


def joined() -> Cluster:
    """Return a leader of `a` and `b` that tells from 102 on that `c` shares, too."""
    made = Cluster(6)
    made.tenure.read("n", IDLE, 101.5)
    made.tenure.share_by(known(made.tenure.next_list(["a", "b", "c"], 102.0)))
    made.begin_process("c")
    return made


def test_a_new_leader_keeps_the_larger_share_by_the_lists_of_the_last_one() -> None:
    leader = Tenure(2, 200.0, [Sharers(2, ("a", "b", "c")), BOTH], {"n": 6}, alone_seconds=ALONE)
    leader.read("n", IDLE, 200.0 + SETTLE_SECONDS)
    # Of those that know it 2 by the last list, and 3 by the one before; `c` is in the last alone.
    assert leader.others("n", 202.0) == 3 + 3 + 2


def test_there_is_no_third_list_before_all_have_confirmed_the_second() -> None:
    cluster = joined()
    names = ["a", "b", "c", "d"]
    assert cluster.tenure.next_list(names, 102.0) is None
    assert len(cluster.tenure.lists) == 2, "as whoever leads next has to know"
    cluster.tell("a", 102.1)
    cluster.tell("b", 102.1)
    assert cluster.tenure.next_list(names, 102.2) is not None
    assert len(cluster.tenure.lists) == 1
    # Those of a later leader are later, whatever was stored.
    leader = Tenure(7, 100.0, [BOTH], {"n": 4}, alone_seconds=ALONE)
    assert known(leader.next_list(["a", "b", "c"], 101.0)).version >= 7 << 16


def test_an_edge_leaves_the_list_once_it_has_confirmed_that_it_may_not_be_alone() -> None:
    cluster = settled(4)
    assert cluster.tenure.next_list(["a"], 102.1) is None
    assert not known(cluster.tenure.tell("b", 102.1, 104.0)).may_be_alone
    assert cluster.tenure.next_list(["a"], 102.1) is None, "it may not have heard"
    cluster.tell("b", 102.2)
    assert not cluster.fences["b"].is_alone(106.0)
    assert known(cluster.tenure.next_list(["a"], 102.3)).names == ("a",)


@pytest.mark.parametrize("follows", [False, True])
def test_the_share_of_an_edge_that_operators_remove_is_free_once_the_node_is_read(
    follows: bool,
) -> None:
    cluster = settled(4)
    cluster.tell("a", 103.9)
    if follows:
        cluster.tell("b", 103.9)
        cluster.tenure.removed(["b"], 104.0)
        cluster.tell("a", 105.5)
        assert free(cluster.tenure, "n", 106.0) == 2, "it is not removed: its share is its own"
        return
    cluster.tenure.removed(["b"], 104.0)
    assert free(cluster.tenure, "n", 104.0) == 2, "it may have started requests until now"
    cluster.tenure.read("n", busy(1), 104.0 + LANDING_SECONDS)
    assert free(cluster.tenure, "n", 104.5) == 3
    cluster.tenure.read("n", IDLE, 105.0)
    assert free(cluster.tenure, "n", 105.0) == 4
    assert cluster.tenure.next_list(["a"], 105.0) is not None


# Nodes that change.


def test_new_nodes_and_slots_count_as_taken_until_they_were_read() -> None:
    cluster = settled(4)
    cluster.tenure.set_nodes({"n": 4, "m": 2}, 103.0)
    assert free(cluster.tenure, "m", 103.0) == 0
    cluster.tenure.read("m", IDLE, 103.0 + SETTLE_SECONDS - 0.01)
    assert cluster.tenure.is_unread("m")
    cluster.tell("a", 103.5)
    cluster.tell("b", 103.5)
    cluster.tenure.read("m", busy(1), 103.0 + SETTLE_SECONDS)
    assert free(cluster.tenure, "m", 104.5) == 1
    unread = Cluster(2, greets_at=100.1)
    unread.tenure.set_nodes({"n": 4}, 100.5)
    assert free(unread.tenure, "n", 100.5) == 0
    # Of a node that was read they are free or gone.
    cluster = settled(4)
    cluster.start("a", 102.1)
    for slots, left in ((6, 5), (1, 0)):
        cluster.tenure.set_nodes({"n": slots}, 102.2)
        assert free(cluster.tenure, "n", 102.2) == left


def test_what_runs_on_a_node_that_comes_again_is_not_forgotten() -> None:
    cluster = settled(4)
    number = known(cluster.start("a", 102.1))
    cluster.tenure.set_nodes({}, 102.2)
    cluster.tenure.set_nodes({"n": 4}, 102.3)
    cluster.tell("a", 103.5)
    cluster.tell("b", 103.5)
    cluster.tenure.read("n", busy(1), 103.6)
    assert cluster.tenure.others("n", 103.6) == 1
    assert cluster.senders["a"].ended(number)
    cluster.tenure.dropped("a", number)
    cluster.tenure.read("n", IDLE, 103.8)
    assert free(cluster.tenure, "n", 103.8) == 4
