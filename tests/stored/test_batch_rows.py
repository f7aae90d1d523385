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
    add_batch,
    progress_of,
    read_batches,
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
from gateway.stored.folder import job
from tests.stored.stored_rows import (
    DAY,
    FOLDER,
    NOW,
    a_batch,
    a_line,
    a_result,
    alone,
    batch_id,
    begin,
    claim,
    do,
    find_row,
    limits,
)


def find(store: Store, id_: str | None = None) -> Batch:
    batch = store.run_now(lambda c: batch_rows.find_batch(c, "alice", id_ or batch_id(), "openai"))
    assert batch is not None
    return batch


def a_file(id_: str = "file-1", **values: Any) -> StoredFile:
    given: dict[str, Any] = {
        "owner": "alice", "name": "x.jsonl", "purpose": "batch", "bytes": 9, "sha256": "",
        "created_at": NOW, "expires_at": None, "folder": FOLDER,
    }  # fmt: skip
    return StoredFile(id_, **{**given, **values})


def end_lines(store: Store, rows: list[StoredRow], **values: Any) -> None:
    results = [a_result(row, **values) for row in rows]
    store.run_now(lambda c: record(c, "p1", results, NOW))


def end(store: Store, id_: str | None = None) -> Batch:
    """End a batch all of whose lines have ended."""
    id_ = id_ or batch_id()
    assert do(store, batch_rows.begin_finalizing, id_, NOW) is not None
    ended = do(store, batch_rows.end_batch, id_, None, None, NOW)
    assert ended is not None
    return ended


# Adding.


def test_a_batch_comes_back_as_it_was_added(store: Store) -> None:
    batch = a_batch(
        metadata={"team": "ü"}, errors=[{"code": "x", "line": None}], idempotency_key="k",
        request_digest="d", webhook_url="https://example.org/", output_seconds=3600.0, user="ann",
    )  # fmt: skip
    assert store.run_now(job(add_batch, batch, limits(batches_per_key=1))) == batch
    assert find(store) == batch
    assert store.run_now(job(add_batch, batch, limits(batches_per_key=1))) == batch
    assert store.run_now(lambda c: batch_rows.unfinished(c, FOLDER)) == [batch]
    assert store.run_now(lambda c: batch_rows.unfinished(c, "other")) == []


def test_the_same_idempotency_key_gives_the_earlier_batch_or_a_conflict(store: Store) -> None:
    first = a_batch(1, idempotency_key="k", request_digest="d1")
    store.run_now(job(add_batch, first, limits(batches_per_key=1)))
    again = a_batch(2, idempotency_key="k", request_digest="d1")
    assert store.run_now(job(add_batch, again, limits(batches_per_key=1))) == first
    other = a_batch(3, idempotency_key="k", request_digest="d2")
    with pytest.raises(GatewayError, match="sent before with another request"):
        store.run_now(job(add_batch, other, limits(batches_per_key=1)))
    of_bob = a_batch(4, idempotency_key="k", request_digest="d2", owner="bob")
    store.run_now(job(add_batch, of_bob, limits(batches_per_key=1)))


def test_an_owner_has_at_most_so_many_unfinished_batches(store: Store) -> None:
    store.run_now(job(add_batch, a_batch(1), limits(batches_per_key=2)))
    store.run_now(job(add_batch, a_batch(2), limits(batches_per_key=2)))
    with pytest.raises(GatewayError, match="2 batches that have not ended"):
        store.run_now(job(add_batch, a_batch(3), limits(batches_per_key=2)))
    store.run_now(job(add_batch, a_batch(4, owner="bob"), limits(batches_per_key=2)))
    store.run_now(lambda c: batch_rows.fail_batch(c, batch_id(1), [], NOW))
    store.run_now(job(add_batch, a_batch(3), limits(batches_per_key=2)))


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
        batch = a_batch(number, input_file=f"file-{number}")
        try:
            store.run_now(job(add_batch, batch, limits(batches_per_key=9)))
        except GatewayError as error:
            return error.code
        return "added"

    assert [outcome(number) for number in range(1, 7)] == [
        "added", "invalid_value", "file_not_found", "file_elsewhere", "file_not_found",
        "file_not_found",
    ]  # fmt: skip
    with pytest.raises(GatewayError, match=f"The batch '{batch_id(1)}' still reads this") as error:
        store.run_now(job(files.delete_file, "alice", "file-1", NOW))
    assert (error.value.status, error.value.code) == (409, "file_in_use")


def test_lists_are_read_page_by_page_though_batches_vanish(store: Store) -> None:
    ids = [batch_id(number) for number in range(1, 8)]
    for number in range(1, 8):
        store.run_now(job(add_batch, a_batch(number), limits(batches_per_key=9)))

    def page(**values: Any) -> tuple[list[int], bool]:
        found = store.run_now(job(read_batches, "alice", "openai", 3, **values))
        return [ids.index(one.id) + 1 for one in found.batches], found.has_more

    assert page() == ([7, 6, 5], True)
    store.run_now(lambda c: batch_rows.fail_batch(c, ids[4], [], NOW))
    assert store.run_now(lambda c: batch_rows.delete_batch(c, "alice", ids[4], "openai")) == []
    assert page(after=ids[4]) == ([4, 3, 2], True)
    assert page(after=ids[1]) == ([1], False)
    assert page(before=ids[0]) == ([4, 3, 2], True)
    assert page(before=ids[4]) == ([7, 6], False)


def test_the_batches_of_all_keys_and_apis_are_read_page_by_page(store: Store) -> None:
    message = a_batch(3, api="anthropic", owner="bob")
    message = replace(message, id=f"msg{message.id}")
    batches = [a_batch(1), a_batch(2, owner="bob"), message, a_batch(4)]
    for batch in batches:
        store.run_now(job(add_batch, batch, limits(batches_per_key=9)))
    store.run_now(lambda c: batch_rows.fail_batch(c, batches[1].id, [], NOW))

    def page(limit: int = 2, owner: str | None = None, **values: Any) -> tuple[list[int], bool]:
        found = store.run_now(job(read_batches, owner, None, limit, **values))
        return [[one.id for one in batches].index(one.id) + 1 for one in found.batches], found[1]

    assert page() == ([4, 3], True)
    assert page(after=message.id) == ([2, 1], False)
    assert page(owner="bob") == ([3, 2], False)
    assert page(ended=True) == ([2], False)
    assert page(9, ended=False) == ([4, 3, 1], False)


def test_errors_are_counted_by_their_kind(store: Store) -> None:
    batch = a_batch()
    broken: dict[str, Any] = {"state": RequestState.FAILED, "error_code": "invalid_json"}
    begin(store, batch, [a_line(1), a_line(2, **broken), a_line(3), a_line(4), a_line(5, **broken)])
    end_lines(store, claim(store, limit=1))
    end_lines(store, claim(store, limit=1), state=RequestState.FAILED, error_code="node_failed")
    cancel(store)
    assert store.run_now(job(batch_rows.count_errors, batch.id)) == [
        ("invalid_json", 2, 2), ("batch_cancelled", 1, 4), ("node_failed", 1, 3)
    ]  # fmt: skip


# From the beginning to the end.


def test_a_batch_with_lines_begins_once(store: Store) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2, state=RequestState.FAILED)])
    batch = find(store)
    assert (batch.state, batch.total, batch.failed) == (BatchState.IN_PROGRESS, 2, 1)
    assert (batch.in_progress_at, batch.model) == (NOW, "demo")
    again = store.run_now(lambda c: batch_rows.begin_batch(c, batch.id, None, NOW + 1))
    assert again == batch


def test_a_batch_of_broken_lines_goes_straight_on_to_its_end(store: Store) -> None:
    begin(store, a_batch(), [a_line(1, state=RequestState.FAILED)])
    assert find(store).state is BatchState.FINALIZING
    ended = end(store)
    assert (ended.state, ended.failed, ended.completed) == (BatchState.COMPLETED, 1, 0)


def test_a_batch_that_fails_as_a_whole_tells_its_listener_once(store: Store) -> None:
    store.run_now(job(add_batch, a_batch(), limits(batches_per_key=1)))
    errors = [{"code": "empty_file", "message": "…", "param": None, "line": None}]
    told: list[Batch] = []

    def fail(connection: Any) -> Batch | None:
        return batch_rows.fail_batch(
            connection, batch_id(), errors, NOW, lambda _, batch: told.append(batch)
        )

    first, again = store.run_now(fail), store.run_now(fail)
    assert first == again == find(store)
    assert told == [first]
    assert (find(store).state, find(store).errors, find(store).ended_at) == (
        BatchState.FAILED, errors, NOW,
    )  # fmt: skip
    begun = store.run_now(lambda c: batch_rows.begin_batch(c, batch_id(), None, NOW))
    assert begun is not None
    assert begun.state is BatchState.FAILED


def test_a_batch_is_finalized_when_no_line_waits_or_runs(store: Store) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2)])
    rows = claim(store)
    finalize = lambda c: batch_rows.begin_finalizing(c, batch_id(), NOW + 9)  # noqa: E731
    end = lambda c: batch_rows.end_batch(c, batch_id(), None, None, NOW)  # noqa: E731
    assert store.run_now(finalize) is None
    end_lines(store, rows[:1])
    assert store.run_now(finalize) is None
    assert store.run_now(end) is None
    end_lines(store, rows[1:], state=RequestState.FAILED)
    finalizing = store.run_now(finalize)
    assert finalizing is not None
    assert (finalizing.state, finalizing.finalizing_at) == (BatchState.FINALIZING, NOW + 9)
    assert store.run_now(finalize) == finalizing


def test_a_batch_ends_once_and_the_loser_hears_of_it(store: Store) -> None:
    begin(store, a_batch(), [a_line(1)])
    end_lines(store, claim(store))
    store.run_now(lambda c: batch_rows.begin_finalizing(c, batch_id(), NOW))
    output = a_file("file-out", purpose="batch_output")
    told: list[Batch] = []

    def end(file: StoredFile | None) -> Batch | None:
        return store.run_now(
            lambda c: batch_rows.end_batch(
                c, batch_id(), file, None, NOW + 1, lambda _, batch: told.append(batch)
            )
        )

    ended = end(output)
    assert ended is not None
    assert (ended.state, ended.output_file, ended.error_file, ended.ended_at) == (
        BatchState.COMPLETED, "file-out", None, NOW + 1,
    )  # fmt: skip
    assert end(output) == ended, "a commit that nobody knows of is done again"
    assert end(a_file("file-late")) is None
    assert told == [ended]
    assert store.run_now(lambda c: files.find_file(c, "alice", "file-out", NOW)) == output
    assert store.run_now(lambda c: files.find_file(c, "alice", "file-late", NOW)) is None


def test_late_lines_expire_and_so_does_their_batch(store: Store) -> None:
    batch = a_batch(expires_at=NOW + 60)
    begin(store, batch, [a_line(number, batch) for number in range(1, 5)])
    rows = claim(store, limit=1)
    store.run_now(lambda c: add_rows(c, [alone(1, deadline=NOW + 60)]))
    expire = lambda c: batch_rows.expire_lines(c, FOLDER, NOW + 60, limit=3)  # noqa: E731
    assert store.run_now(lambda c: batch_rows.expire_lines(c, FOLDER, NOW + 59)) == 0
    assert [store.run_now(expire) for _ in range(3)] == [3, 0, 0]
    assert find(store).expired == 3
    kept = store.run_now(lambda c: find_row(c, "alice", alone(1).id, RequestKind.RESPONSE))
    assert kept is not None
    assert kept.state is RequestState.WAITING
    end_lines(store, rows)
    ended = end(store)
    assert (ended.state, ended.completed, ended.expired) == (BatchState.EXPIRED, 1, 3)


# Cancelling, in every state.


def cancel(store: Store, now: float = NOW) -> Batch:
    batch = store.run_now(lambda c: batch_rows.cancel_batch(c, "alice", batch_id(), "openai", now))
    assert batch is not None
    return batch


def test_a_batch_that_is_read_can_be_cancelled_and_ends_so(store: Store) -> None:
    store.run_now(job(add_batch, a_batch(), limits(batches_per_key=1)))
    store.run_now(lambda c: add_rows(c, [a_line(1), a_line(2, state=RequestState.FAILED)]))
    batch = cancel(store)
    assert (batch.state, batch.total, batch.cancelled, batch.failed) == (
        BatchState.CANCELLING, 2, 1, 1,
    )  # fmt: skip
    begun = store.run_now(lambda c: batch_rows.begin_batch(c, batch_id(), None, NOW))
    assert begun == batch
    assert cancel(store, NOW + 5) == batch
    ended = end(store)
    assert ended.state is BatchState.CANCELLED
    assert cancel(store, NOW + 9) == ended


def test_a_batch_that_is_being_finalized_can_be_cancelled(store: Store) -> None:
    begin(store, a_batch(), [a_line(1)])
    end_lines(store, claim(store))
    store.run_now(lambda c: batch_rows.begin_finalizing(c, batch_id(), NOW))
    assert cancel(store).state is BatchState.CANCELLING
    ended = store.run_now(lambda c: batch_rows.end_batch(c, batch_id(), None, None, NOW))
    assert ended is not None
    assert (ended.state, ended.completed) == (BatchState.CANCELLED, 1)


def test_very_many_waiting_lines_are_cancelled_in_steps(store: Store) -> None:
    begin(store, a_batch(), [a_line(number) for number in range(1, 21)])
    cancelled = do(store, batch_rows.cancel_batch, "alice", batch_id(), "openai", NOW, limit=8)
    assert cancelled is not None
    assert cancelled.cancelled == 8
    assert do(store, batch_rows.begin_finalizing, batch_id(), NOW, limit=8) is None
    assert find(store).cancelled == 16
    assert do(store, batch_rows.begin_finalizing, batch_id(), NOW, limit=8) is not None
    assert find(store).cancelled == 20


def test_a_pause_keeps_its_first_reason_until_it_is_over(store: Store) -> None:
    begin(store, a_batch(), [a_line(1)])
    pause = batch_rows.pause_batch
    first = store.run_now(lambda c: pause(c, "alice", batch_id(), NOW, "its owner"))
    again = store.run_now(lambda c: pause(c, "alice", batch_id(), NOW + 5, "no room"))
    assert first == again
    assert first is not None
    assert (first.paused_at, first.pause_reason) == (NOW, "its owner")
    resumed = store.run_now(lambda c: batch_rows.resume_batch(c, "alice", batch_id()))
    assert resumed == replace(first, paused_at=None, pause_reason=None)


# The end of all.


def ended_batch(store: Store, number: int = 1, **values: Any) -> Batch:
    batch = a_batch(number, **values)
    begin(store, batch, [a_line(n, batch) for n in range(1, 6)])
    end_lines(store, claim(store, batch=batch.id), result_place=f"results-{number}")
    return end(store, batch.id)


def test_a_deleted_batch_is_gone_at_once_and_removed_with_its_lines(store: Store) -> None:
    batch = ended_batch(store, idempotency_key="k")
    delete = lambda c: batch_rows.delete_batch(c, "alice", batch.id, "openai")  # noqa: E731
    assert store.run_now(delete) == ["file-1", "results-1"]
    assert store.run_now(delete) is None
    assert store.run_now(job(read_batches, "alice", "openai", 9)).batches == []
    again = a_batch(2, idempotency_key="k")
    assert store.run_now(job(add_batch, again, limits(batches_per_key=9))) == again
    remove = lambda c: batch_rows.remove_batches(c, [batch.id], limit=3)  # noqa: E731
    assert [store.run_now(remove) for _ in range(3)] == [False, True, True]
    assert store.run_now(lambda c: find_row(c, "alice", a_line(1).id, RequestKind.LINE)) is None


def test_an_unfinished_batch_is_neither_deleted_nor_removed(store: Store) -> None:
    begin(store, a_batch(keep_until=NOW), [a_line(1)])
    deleted = store.run_now(lambda c: batch_rows.delete_batch(c, "alice", batch_id(), "openai"))
    assert deleted is None
    assert store.run_now(lambda c: batch_rows.take_due_batches(c, FOLDER, NOW + DAY, 9)) == {}
    assert store.run_now(lambda c: batch_rows.remove_batches(c, [batch_id()]))
    assert store.run_now(lambda c: work_left(c, batch_id())).waiting == 1


def test_batches_are_due_when_their_time_is_over_without_their_owners_file(store: Store) -> None:
    store.run_now(lambda c: files.add_file(c, a_file("file-1")))
    ended_batch(store, 1, keep_until=NOW + 10, input_file="file-1")
    ended_batch(store, 2, keep_until=NOW + 20)

    def due(now: float) -> dict[str, list[str]]:
        return do(store, batch_rows.take_due_batches, FOLDER, now, 9)

    first = {batch_id(1): ["results-1"]}
    assert due(NOW + 9) == {}
    assert due(NOW + 10) == due(NOW + 11) == first
    assert due(NOW + 20) == {**first, batch_id(2): ["file-1", "results-2"]}
    assert store.run_now(lambda c: batch_rows.remove_batches(c, [batch_id(1), batch_id(2)]))
    assert due(NOW + 20) == {}


# How far it is, when it ends and what it costs.


BATCH = Batch(
    id="batch_1", owner="alice", api="openai", endpoint="/v1/embeddings", input_file="file-1",
    created_at=0.0, expires_at=9.0, keep_until=99.0, folder="f",
    state=BatchState.IN_PROGRESS, in_progress_at=1.0, total=10,
)  # fmt: skip


def test_the_cost_is_known_before_the_first_line() -> None:
    left = WorkLeft(10, 0, 1000, 5000)
    found = progress_of(BATCH, left, None, 0.001, 100.0)
    assert found.expected_cost == pytest.approx(6.0)
    assert (found.waiting, found.running, found.cost) == (10, 0, 0.0)
    assert (found.expected_end, found.tokens_per_second) == (None, None)
    assert progress_of(BATCH, left, None, None, 100.0).expected_cost is None
    validating = replace(BATCH, state=BatchState.VALIDATING, in_progress_at=None)
    assert progress_of(validating, left, None, 0.001, 100.0).expected_cost is None


def test_recorded_results_tell_the_price_and_the_length_of_answers() -> None:
    batch = replace(
        BATCH, completed=5, prompt_tokens=500, completion_tokens=500, cost=1.0, failed=1
    )
    left = WorkLeft(3, 1, 400, 0)
    found = progress_of(batch, left, BatchSpeed(50.0, 0.5), None, 100.0)
    assert found.expected_cost == pytest.approx(1.0 + 0.001 * 800)
    assert found.expected_end == pytest.approx(100.0 + 400 / 50)
    shorter = progress_of(batch, WorkLeft(3, 1, 400, 40), BatchSpeed(50.0, 0.5), None, 100.0)
    assert shorter.expected_end == pytest.approx(100.0 + 40 / 50)


def test_embeddings_end_by_lines() -> None:
    batch = replace(BATCH, completed=5, prompt_tokens=500)
    found = progress_of(batch, WorkLeft(5, 0, 500, 0), BatchSpeed(0.0, 0.5), None, 100.0)
    assert found.expected_end == pytest.approx(110.0)


def test_an_ended_batch_has_its_cost() -> None:
    batch = replace(BATCH, state=BatchState.COMPLETED, cost=2.0)
    found = progress_of(batch, WorkLeft(0, 0, 0, 0), BatchSpeed(1.0, 1.0), 0.1, 100.0)
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
    progress = progress_of(replace(BATCH, total=100), left, speed, None, 100.0, ahead)
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
    assert speed.tokens == pytest.approx(20.0)
    assert speed.lines == pytest.approx(1.0)
    paused = replace(BATCH, paused_at=1.0)
    meter.look([paused], 1001.0)
    assert meter.speed(BATCH.id) is None
    meter.look([], 1002.0)
    assert meter.speed(BATCH.id) is None
    assert WINDOW_SECONDS < 500
