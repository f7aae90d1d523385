from __future__ import annotations

from gateway.fleet.health import judge_state
from gateway.fleet.lifecycle import ProbeHistory
from gateway.fleet.node import Node, NodeState
from gateway.fleet.speed import SpeedSample, TokenTime
from tests.fleet.build import a_node, a_spec, take


def slow_down(node: Node) -> None:
    """Let it write at its usual speed for a long time, and then far slower."""
    for second in range(40):
        each = 0.1 if second < 20 else 1.0
        node.degradation.learn(SpeedSample(None, TokenTime(40, each, each), 1, 500), 10.0 * second)


def everything_at_once() -> Node:
    """A node for which every state but `starting` would hold."""
    node = a_node(enabled=False)
    node.draining = True
    node.sleep.props_read(True, 900.0, asked=False)
    node.probe_history = ProbeHistory(probed=True, up=False, detail="no connection", mute=True)
    for _ in range(5):
        node.circuit.record_failure(1000.0)
    slow_down(node)
    return node


def test_the_first_state_that_holds_wins() -> None:
    node, seen = everything_at_once(), []

    def state() -> str:
        return judge_state(node, 1000.0)[0].value

    seen.append(state())
    node.spec = a_spec()
    seen.append(state())
    node.draining = False
    seen.append(state())
    node.probe_history.loading = True
    seen.append(state())
    node.sleep.woke()
    seen.append(state())
    node.probe_history.loading = node.probe_history.probed = False
    seen.append(state())
    node.probe_history.probed = node.probe_history.up = True
    seen.append(state())
    node.circuit.close(1000.0)
    seen.append(state())
    node.probe_history.mute = False
    seen.append(state())
    node.degradation.server_restarted()
    seen.append(state())
    assert seen == [
        "standby", "draining", "down", "sleeping", "loading", "starting", "ejected", "mute",
        "degraded", "ready",
    ]  # fmt: skip


def test_the_states_are_tested_in_their_order() -> None:
    assert [state.value for state in NodeState] == (
        [
            "standby", "draining", "down", "sleeping", "loading", "starting", "ejected", "mute",
            "degraded", "ready",
        ]
    )  # fmt: skip


def test_the_reason_says_why_a_node_gets_no_work() -> None:
    assert judge_state(a_node(enabled=False), 0) == (
        NodeState.STANDBY,
        "enabled: false in the inventory",
    )
    assert judge_state(a_node(standby=True), 0) == (
        NodeState.STANDBY,
        "standby: true in the inventory, without start and stop",
    )
    node = everything_at_once()
    node.spec, node.draining = a_spec(), False
    assert judge_state(node, 1000.0) == (NodeState.DOWN, "no connection")


def test_the_reason_of_an_ejection_has_the_failures_and_the_next_step() -> None:
    node = a_node()
    for _ in range(5):
        node.circuit.record_failure(1000.0)
    assert judge_state(node, 1000.0)[1] == (
        "5 requests in a row failed; no work for about 30 s, then one on trial"
    )
    assert judge_state(node, 1040.0) == (
        NodeState.EJECTED,
        "5 requests in a row failed; the next one is on trial",
    )


def test_a_degraded_node_has_figures_in_its_reason_and_gets_work() -> None:
    node = a_node(slots=3)
    slow_down(node)
    node.state, reason = judge_state(node, 400.0)
    assert node.state is NodeState.DEGRADED
    assert reason.startswith("writes at 10% of its usual speed (")
    assert node.free_slots(400.0) == 3


def test_a_half_open_node_takes_exactly_one_request() -> None:
    node = a_node(slots=4)
    for _ in range(5):
        node.circuit.record_failure(1000.0)
    node.state = NodeState.EJECTED
    assert node.free_slots(1010.0) == 0
    assert (node.capacity(1040.0), node.free_slots(1040.0)) == (1, 1)
    lease = node.take_lease(1, 1040.0)
    assert lease.trial
    assert (node.capacity(1040.0), node.free_slots(1040.0)) == (0, 0)
    lease.release()
    assert node.free_slots(1040.0) == 1


def test_a_half_open_node_whose_slots_are_full_takes_nothing() -> None:
    node = a_node(slots=2)
    take(node, 2)
    for _ in range(5):
        node.circuit.record_failure(1000.0)
    node.state = NodeState.EJECTED
    assert node.free_slots(1040.0) == 0


def test_only_nodes_that_may_work_have_capacity() -> None:
    for state in NodeState:
        node = a_node(slots=3, state=state)
        may = state in {NodeState.READY, NodeState.DEGRADED, NodeState.SLEEPING}
        assert node.capacity(1000.0) == (3 if may else 0)
    node = a_node(slots=3)
    node.removed = True
    assert node.capacity(1000.0) == 0


def test_capacity_grows_in_slow_start() -> None:
    node = a_node(slots=4)
    for _ in range(5):
        node.circuit.record_failure(1000.0)
    node.circuit.close(1100.0)
    assert [node.capacity(1100.0 + t) for t in (0, 10, 20, 40)] == [1, 2, 3, 4]
