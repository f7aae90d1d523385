from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.store.store import Store
from gateway.stored import batch_rows, files
from gateway.stored.batch_rows import (
    WINDOW_SECONDS,
    Ahead,
    Batch,
    BatchSpeed,
    SpeedMeter,
    progress_of,
)
from gateway.stored.claims import (
    BatchState,
    RequestKind,
    RequestState,
    StoredRow,
    WorkLeft,
    add_rows,
    record,
    work_left,
)
from gateway.stored.files import StoredFile
from tests.stored.stored_rows import (
    DAY,
    FOLDER,
    NOW,
    a_batch,
    a_line,
    a_result,
    batch_id,
    begin,
    claim,
    do,
    find_row,
    limits,
)


def add(store: Store, batch: Batch, most: int = 9) -> Batch:
    return do(store, batch_rows.add_batch, batch, limits(batches_per_key=most))


def find(store: Store) -> Batch:
    batch = do(store, batch_rows.find_batch, "alice", batch_id(), "openai")
    assert batch is not None
    return batch


def a_file(id_: str = "file-1", **values: Any) -> StoredFile:
    given: dict[str, Any] = {
        "owner": "alice", "name": "x.jsonl", "purpose": "batch", "bytes": 9, "sha256": "",
        "created_at": NOW, "expires_at": None, "folder": FOLDER,
    }  # fmt: skip
    return StoredFile(id_, **{**given, **values})


def end_lines(store: Store, rows: list[StoredRow], **values: Any) -> None:
    do(store, record, "p1", [a_result(row, **values) for row in rows], NOW)


def finalize(store: Store, id_: str | None = None) -> Batch | None:
    return do(store, batch_rows.begin_finalizing, id_ or batch_id(), NOW)


def end(store: Store, id_: str | None = None) -> Batch:
    """End a batch all of whose lines have ended."""
    assert finalize(store, id_) is not None
    ended = do(store, batch_rows.end_batch, id_ or batch_id(), None, None, NOW)
    assert ended is not None
    return ended


def test_a_batch_comes_back_as_it_was_added(store: Store) -> None:
    batch = a_batch(
        metadata={"team": "ü"}, errors=[{"code": "x", "line": None}], idempotency_key="k",
        request_digest="d", webhook_url="https://example.org/", output_seconds=3600.0, user="ann",
    )  # fmt: skip
    assert add(store, batch, 1) == find(store) == add(store, batch, 1) == batch
    assert do(store, batch_rows.unfinished, FOLDER) == [batch]
    assert do(store, batch_rows.unfinished, "other") == []


def test_the_same_idempotency_key_gives_the_earlier_batch_or_a_conflict(store: Store) -> None:
    first = add(store, a_batch(1, idempotency_key="k", request_digest="d1"), 1)
    assert add(store, a_batch(2, idempotency_key="k", request_digest="d1"), 1) == first
    with pytest.raises(GatewayError, match="sent before with another request"):
        add(store, a_batch(3, idempotency_key="k", request_digest="d2"), 1)
    add(store, a_batch(4, idempotency_key="k", request_digest="d2", owner="bob"), 1)


def test_an_owner_has_at_most_so_many_unfinished_batches(store: Store) -> None:
    for number in (1, 2):
        add(store, a_batch(number), 2)
    with pytest.raises(GatewayError, match="2 batches that have not ended"):
        add(store, a_batch(3), 2)
    add(store, a_batch(4, owner="bob"), 2)
    do(store, batch_rows.fail_batch, batch_id(1), [], NOW)
    add(store, a_batch(3), 2)


def test_the_input_file_must_be_the_owners_of_the_right_purpose_and_here(store: Store) -> None:
    for file in (
        a_file("file-1"),
        a_file("file-2", purpose="user_data"),
        a_file("file-3", owner="bob"),
        a_file("file-4", folder="elsewhere"),
        a_file("file-5", expires_at=NOW),
    ):
        do(store, files.add_file, file)

    def outcome(number: int) -> str:
        try:
            add(store, a_batch(number, input_file=f"file-{number}"))
        except GatewayError as error:
            return error.code
        return "added"

    assert [outcome(number) for number in range(1, 7)] == [
        "added", "invalid_value", "file_not_found", "file_elsewhere", "file_not_found",
        "file_not_found",
    ]  # fmt: skip
    with pytest.raises(GatewayError, match=f"The batch '{batch_id(1)}' still reads this") as error:
        do(store, files.delete_file, "alice", "file-1", NOW)
    assert (error.value.status, error.value.code) == (409, "file_in_use")


def test_a_batch_that_fails_as_a_whole_tells_its_listener_once(store: Store) -> None:
    add(store, a_batch())
    errors = [{"code": "empty_file", "message": "…", "param": None, "line": None}]
    told: list[Batch] = []
    first, again = (
        do(store, batch_rows.fail_batch, batch_id(), errors, NOW, lambda _, one: told.append(one))
        for _ in range(2)
    )
    begun = do(store, batch_rows.begin_batch, batch_id(), None, NOW)
    assert first is not None
    assert first == again == begun == find(store)
    assert told == [first]
    assert (first.state, first.errors, first.ended_at) == (BatchState.FAILED, errors, NOW)


def test_a_batch_is_finalized_once_when_no_line_waits_or_runs(store: Store) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2), a_line(3, state=RequestState.FAILED)])
    begun = find(store)
    assert (begun.state, begun.total, begun.failed) == (BatchState.IN_PROGRESS, 3, 1)
    assert do(store, batch_rows.begin_batch, batch_id(), None, NOW + 1) == begun
    rows = claim(store)
    assert finalize(store) is None
    end_lines(store, rows[:1])
    assert finalize(store) is None
    assert do(store, batch_rows.end_batch, batch_id(), None, None, NOW) is None
    end_lines(store, rows[1:], state=RequestState.FAILED)
    finalizing = finalize(store)
    assert finalizing is not None
    assert finalizing.state is BatchState.FINALIZING
    assert finalize(store) == finalizing


def test_a_batch_ends_once_and_the_loser_hears_of_it(store: Store) -> None:
    begin(store, a_batch(), [a_line(1)])
    end_lines(store, claim(store))
    finalize(store)
    output = a_file("file-out", purpose="batch_output")
    told: list[Batch] = []

    def end(file: StoredFile | None) -> Batch | None:
        listener = lambda _, batch: told.append(batch)  # noqa: E731
        return do(store, batch_rows.end_batch, batch_id(), file, None, NOW + 1, listener)

    ended = end(output)
    assert ended is not None
    assert (ended.state, ended.output_file, ended.error_file, ended.ended_at) == (
        BatchState.COMPLETED, "file-out", None, NOW + 1,
    )  # fmt: skip
    assert end(output) == ended, "a commit that nobody knows of is done again"
    assert end(a_file("file-late")) is None
    assert told == [ended]
    assert do(store, files.find_file, "alice", "file-out", NOW) == output
    assert do(store, files.find_file, "alice", "file-late", NOW) is None


def cancel(store: Store, limit: int = 1000) -> Batch:
    batch = do(store, batch_rows.cancel_batch, "alice", batch_id(), "openai", NOW, limit=limit)
    assert batch is not None
    return batch


def test_a_batch_that_is_read_or_finalized_can_be_cancelled_and_ends_so(store: Store) -> None:
    add(store, a_batch())
    do(store, add_rows, [a_line(1), a_line(2, state=RequestState.FAILED)])
    batch = cancel(store)
    assert (batch.state, batch.total, batch.cancelled, batch.failed) == (
        BatchState.CANCELLING, 2, 1, 1,
    )  # fmt: skip
    assert do(store, batch_rows.begin_batch, batch_id(), None, NOW) == batch
    assert cancel(store) == batch
    assert finalize(store) is not None
    assert cancel(store).state is BatchState.CANCELLING
    ended = end(store)
    assert ended.state is BatchState.CANCELLED
    assert cancel(store) == ended


def ended_batch(store: Store, number: int = 1, **values: Any) -> Batch:
    batch = a_batch(number, **values)
    begin(store, batch, [a_line(n, batch) for n in range(1, 6)])
    end_lines(store, claim(store, batch=batch.id), result_place=f"results-{number}")
    return end(store, batch.id)


def test_a_deleted_batch_is_gone_at_once_and_removed_with_its_lines(store: Store) -> None:
    begin(store, a_batch(3), [a_line(1, a_batch(3))])
    batch = ended_batch(store, idempotency_key="k")
    deleted = [
        do(store, batch_rows.delete_batch, "alice", id_, "openai")
        for id_ in (batch.id, batch.id, batch_id(3))
    ]
    assert deleted == [["file-1", "results-1"], None, None]
    assert [one.id for one in do(store, batch_rows.unfinished, FOLDER)] == [batch_id(3)]
    again = a_batch(2, idempotency_key="k")
    assert add(store, again) == again
    ids = [batch.id, batch_id(3)]
    removed = [do(store, batch_rows.remove_batches, ids, limit=3) for _ in range(3)]
    assert removed == [False, True, True]
    assert do(store, find_row, "alice", a_line(1).id, RequestKind.LINE) is None
    assert do(store, work_left, batch_id(3)).waiting == 1


def test_batches_are_due_when_their_time_is_over_without_their_owners_file(store: Store) -> None:
    do(store, files.add_file, a_file("file-1"))
    ended_batch(store, 1, keep_until=NOW + 10, input_file="file-1")
    ended_batch(store, 2, keep_until=NOW + 20)
    begin(store, a_batch(3, keep_until=NOW), [a_line(1, a_batch(3))])

    def due(now: float) -> dict[str, list[str]]:
        return do(store, batch_rows.take_due_batches, FOLDER, now, 9)

    first = {batch_id(1): ["results-1"]}
    assert due(NOW + 9) == {}
    assert due(NOW + 10) == due(NOW + 11) == first
    assert due(NOW + DAY) == {**first, batch_id(2): ["file-1", "results-2"]}
    assert do(store, batch_rows.remove_batches, [batch_id(1), batch_id(2)])
    assert due(NOW + DAY) == {}


BATCH = Batch(
    id="batch_1", owner="alice", api="openai", endpoint="/v1/embeddings", input_file="file-1",
    created_at=0.0, expires_at=9.0, keep_until=99.0, folder="f",
    state=BatchState.IN_PROGRESS, in_progress_at=1.0, total=100,
)  # fmt: skip


def test_the_cost_is_reckoned_before_the_first_line_and_by_results_afterwards() -> None:
    left = WorkLeft(100, 0, 10_000, 50_000)
    found = progress_of(BATCH, left, None, 0.001, 100.0)
    assert found.expected_cost == pytest.approx(60.0)
    assert (found.waiting, found.running, found.cost) == (100, 0, 0.0)
    assert progress_of(BATCH, left, None, None, 100.0).expected_cost is None
    some = replace(
        BATCH, total=10, completed=5, prompt_tokens=500, completion_tokens=500, cost=1.0, failed=1
    )
    found = progress_of(some, WorkLeft(3, 1, 400, 0), BatchSpeed(50.0, 0.5), None, 100.0)
    assert found.expected_cost == pytest.approx(1.0 + 0.001 * 800)
    assert found.expected_end == pytest.approx(100.0 + 400 / 50)
    ended = replace(BATCH, state=BatchState.COMPLETED, cost=2.0)
    found = progress_of(ended, WorkLeft(0, 0, 0, 0), BatchSpeed(1.0, 1.0), 0.1, 100.0)
    assert (found.cost, found.expected_cost, found.tokens_per_second) == (2.0, 2.0, None)


@pytest.mark.parametrize(
    ("speed", "ahead", "seconds", "by"),
    [
        # 5,000 tokens are left to write.
        (BatchSpeed(50.0, 1.0), Ahead(None, 9.0, 9.0), 100.0, "speed"),
        # 10,000 tokens are read at 1,000 a second, then 5,000 written at 50, from its start on.
        (None, Ahead(starts_at=130.0, prefill_tps=1000.0, decode_tps=50.0), 140.0, "nodes"),
        (BatchSpeed(0.0, 0.0), Ahead(), None, None),
    ],
)
def test_an_end_is_reckoned_by_what_is_known_best(
    speed: BatchSpeed | None, ahead: Ahead, seconds: float | None, by: str | None
) -> None:
    left = WorkLeft(waiting=100, running=0, prompt_tokens=10_000, max_tokens=5_000)
    progress = progress_of(BATCH, left, speed, None, 100.0, ahead)
    assert progress.expected_end == (None if seconds is None else 100.0 + seconds)
    assert progress.expected_by == by
    assert progress.expected_start == ahead.starts_at


def test_speed_is_that_of_the_last_minutes() -> None:
    meter = SpeedMeter()
    assert meter.speed(BATCH.id) is None
    for second in range(0, 1000, 10):
        tokens = 0 if second < 500 else 20 * (second - 500)
        meter.look([replace(BATCH, completion_tokens=tokens, completed=second)], float(second))
    speed = meter.speed(BATCH.id)
    assert speed is not None
    assert [speed.tokens, speed.lines] == pytest.approx([20.0, 1.0])
    meter.look([replace(BATCH, paused_at=1.0)], 1001.0)
    assert meter.speed(BATCH.id) is None
    assert WINDOW_SECONDS < 500
