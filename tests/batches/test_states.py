from __future__ import annotations

from gateway.batches.request_rows import BEFORE, BatchState, RequestState, line_id, new_id


def token(count: int) -> str:
    return "ab" * count


def test_ids_grow_with_time() -> None:
    times = [0.0, 1.0, 1_780_000_000.123, 1_780_000_000.124, 4_000_000_000.0]
    ids = [new_id("batch_", at, token) for at in times]
    assert ids == sorted(set(ids))
    assert new_id("batch_", 1_780_000_000.123, token) == f"batch_019e7044887b{'ab' * 10}"


def test_a_line_has_the_same_id_however_often_its_input_is_read() -> None:
    batch = new_id("msgbatch_", 1.0, token)
    assert line_id(batch, 7) == line_id(batch, 7) == f"batch_req_0000000003e8{'ab' * 10}_7"
    assert line_id(batch, 7) != line_id(batch, 71)


def test_a_state_that_has_ended_is_followed_by_none() -> None:
    before = {state for states in BEFORE.values() for state in states}
    assert set(BEFORE) == set(BatchState)
    assert {state for state in BatchState if state.ended} == set(BatchState) - before


def test_every_state_of_a_batch_can_be_reached() -> None:
    reached = {BatchState.VALIDATING}
    for _ in BatchState:
        reached |= {state for state, before in BEFORE.items() if reached.intersection(before)}
    assert reached == set(BatchState)


def test_a_request_that_waits_or_runs_has_not_ended() -> None:
    assert {state for state in RequestState if not state.ended} == {
        RequestState.WAITING, RequestState.RUNNING,
    }  # fmt: skip
