"""Runs responses in the background and deferred requests: claims rows, runs them, records results.

Each is claimed under a lease that is renewed while it runs. A process that is killed loses its
claims, and another one, or its successor, runs the requests again; a response goes on from what its
log has. A row's result, its end and its usage are recorded in one transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from sqlalchemy import Connection

from gateway.batches.background_requests import (
    EXPIRED_MESSAGE,
    BackgroundRequests,
    DeferredHead,
    DeferredResult,
    keep_background,
    keep_seconds,
    waiting_owners,
)
from gateway.batches.claims import Pick, RecordedResult, RowLeases, record, still_unfinished
from gateway.batches.files import full_owners, note_log_sizes
from gateway.batches.folder import FolderError
from gateway.batches.request_rows import RequestKind, RequestState, StoredRow, UnfinishedWork
from gateway.batches.response_events import ResponseEvents
from gateway.batches.response_log import LogBroken
from gateway.batches.runner import (
    MOST_RUNS,
    Outcome,
    RequestRunner,
    RowDeferred,
    RowExpired,
    StoredRequest,
    recovered_usage,
)
from gateway.batches.webhooks import ResponseEnd
from gateway.config.batches import BatchSettings
from gateway.errors import GatewayError
from gateway.lease import BatchRoomService
from gateway.request import Priority
from gateway.store.failures import StoreError
from gateway.usage.ledger import Ledger, UsageRow

LEASE_SECONDS = 30.0  # after which a request whose process has said nothing is run by another one
RENEW_SECONDS = 5.0  # between two times that the process says what it runs

LOOK_SECONDS = 1.0
"""Between two looks for requests while there is work, where nobody tells that some have come."""

RETRY_SECONDS = 2.0  # before the second of these; before the third, twice as many
STORE_SECONDS = 1.0  # before the store is tried again

NEAR_SHARE, NEAR_SECONDS = 0.25, 60.0
"""A deadline is near in the last quarter of the time until it, and in the last minute."""

CLOSE_SECONDS = 2.0
"""At the end: most seconds until what has ended is recorded, again until what runs has ended, and
again until the store knows what waits."""

log = structlog.get_logger()

_ENDS: dict[str, ResponseEnd] = {
    "completed": "completed", "incomplete": "incomplete", "cancelled": "cancelled",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Result:
    """What a run has brought."""

    recorded: RecordedResult
    end: ResponseEnd | None = None  # how a response has ended
    file: str | None = None  # the file of a deferred result, which goes if it is not recorded


class BackgroundRunner:
    """Runs what `requests` has.

    `is_closing` tells when it should claim no more; `nodes` gives the names and tiers of nodes.
    Requests of class `batch` whose deadline is near are raised to the class that their owner's
    requests have, so that others of that class do not keep them waiting.
    """

    def __init__(
        self,
        requests: BackgroundRequests,
        leases: RowLeases,
        work: UnfinishedWork,
        runner: RequestRunner,
        rooms: BatchRoomService,
        ledger: Ledger,
        settings: Callable[[], BatchSettings],
        now: Callable[[], float],
        is_closing: Callable[[], bool] = lambda: False,
        nodes: Callable[[], Iterable[tuple[str, str]]] = tuple,
    ) -> None:
        self._requests = requests
        self._leases = leases
        self._work = work
        self._runner = runner
        self._rooms = rooms
        self._ledger = ledger
        self._process = ledger.own
        self._settings = settings
        self._now = now
        self._is_closing = is_closing
        self._nodes = nodes
        self._running: dict[str, asyncio.Task[None]] = {}
        self._can_raise: dict[str, StoredRow] = {}
        """Those of class `batch` that run or have been handed to the scheduler."""
        self._unwanted: set[str] = set()  # running requests that were cancelled or deleted
        self._log_sizes: dict[str, tuple[ResponseEvents, int]] = {}
        """Responses that run, by their ids, and the sizes of their logs that the store knows."""
        self._full: set[str] = set()  # owners that keep as much as they may: their requests wait
        self._looked_at: set[str] = set()
        """The owners of which that is known, until `_look_again_at`."""
        self._look_again_at = 0.0
        self._problem = ""
        self._given_back: set[str] = set()
        """Requests that are to wait again, as their run has not begun."""
        self._idle = asyncio.Event()  # set when nothing runs any more
        requests.unwanted.append(self._end_run)

    def __len__(self) -> int:
        """How many run."""
        return len(self._running)

    async def ended(self) -> None:
        """Wait until nothing runs any more; `is_closing` must be so."""
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    async def run(self) -> None:
        """Run requests until cancelled; what runs then waits again."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time()
        try:
            while True:
                try:
                    await self._leases.write()
                    self._raise_class()
                    if self._is_closing():
                        self._give_back_waiting()
                    if self._running or await self._work.exists():
                        if loop.time() >= renew_at:
                            renew_at = loop.time() + RENEW_SECONDS
                            await self._renew()
                        await self._claim()
                    self._problem = ""
                except (StoreError, FolderError) as error:
                    if self._problem != str(error):
                        self._problem = str(error)
                        log.warning("background requests wait", why=self._problem)
                await self._rest()
        finally:
            await self._close()

    async def _rest(self) -> None:
        wakes = self._requests.wakes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await wakes.wait()
        wakes.clear()

    async def _close(self) -> None:
        """Let what has ended be recorded; end what runs, and let it wait again."""
        tasks = dict(self._running)
        for id_, task in tasks.items():
            if not self._has_ended(id_):
                task.cancel()
        if tasks:
            await asyncio.wait(tasks.values(), timeout=CLOSE_SECONDS)
        late = [task for task in tasks.values() if not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=CLOSE_SECONDS)
        # Who still writes keeps its claim: the log must not have a second writer.
        ids = [id_ for id_, task in tasks.items() if task.done()]
        if len(ids) < len(tasks):
            log.warning("background requests do not end", requests=len(tasks) - len(ids))
        self._leases.put_back(ids, 0.0)
        with contextlib.suppress(StoreError, FolderError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._leases.write()

    def _has_ended(self, id_: str) -> bool:
        """Whether those who follow a response have seen its end."""
        return id_ in self._log_sizes and self._log_sizes[id_][0].ended

    # Claims.

    async def _claim(self) -> None:
        """Claim what there is room for; all owners get equal shares."""
        room = self._settings().background_at_once - len(self._running)
        if room <= 0:
            return
        requests, now = self._requests, self._now()
        if self._is_closing() and requests.waited_for.keys() <= self._running.keys():
            return
        folder = await requests.opened()
        if self._is_closing():
            # Their clients wait here, as those of other requests do.
            pick = Pick(room, RequestKind.RESPONSE, ids=list(requests.waited_for))
            await self._begin([pick])
            return
        owners = await requests.store.run(
            partial(waiting_owners, folder=folder, now=now), write=False
        )
        full = await self._full_owners({owner for owner, _ in owners})
        owners = [one for one in owners if one[0] not in full]
        if not owners:
            return
        share = max(1, room // len(owners))
        picks = [Pick(share, kind, owner=owner, by_deadline=True) for owner, kind in owners[:room]]
        begun = await self._begin(picks)
        if begun and begun < room:
            requests.wakes.set()  # Others may have left some of their share.

    async def _begin(self, picks: Sequence[Pick]) -> int:
        """Begin what can be claimed; how many those are."""
        rows = await self._leases.claim_rows(picks)
        for row in rows:
            self._running[row.id] = asyncio.create_task(self._serve(row))
            if row.class_ == Priority.BATCH.label:
                self._can_raise[row.id] = row
        return len(rows)

    async def _full_owners(self, owners: set[str]) -> set[str]:
        """Those that keep as much as they may; what others add is seen a second later at most."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._look_again_at or not owners <= self._looked_at:
            most = self._settings().bytes_per_key
            job = partial(full_owners, owners=owners, most_bytes=most, now=self._now())
            self._full = await self._requests.store.run(job, write=False)
            self._looked_at = owners
            self._look_again_at = loop.time() + LOOK_SECONDS
        return self._full

    def _raise_class(self) -> None:
        """Raise the class of those whose deadline is near."""
        now, ids = self._now(), dict[Priority, set[str]]()
        for row in list(self._can_raise.values()):
            if is_near(row, now):
                priority = self._runner.late_priority(row.owner)
                ids.setdefault(priority, set()).add(row.id)
                self._runner.note_raised(row.id, priority)
        for priority, some in ids.items():
            self._rooms.raise_class(some, priority)

    async def _renew(self) -> None:
        if ids := set(self._running):
            # First: the store may have been away for longer than a lease.
            await self._end_unwanted(ids - await self._leases.renew(ids))
            await self._note_sizes()
        await self._leases.release_lost()

    async def _note_sizes(self) -> None:
        """Tell the store how much the logs have grown."""
        grown = {
            id_: events.size
            for id_, (events, known) in self._log_sizes.items()
            if events.size != known
        }
        if grown:
            await self._requests.store.run(partial(note_log_sizes, sizes=grown, running=True))
        for id_, size in grown.items():
            if id_ in self._log_sizes:
                self._log_sizes[id_] = self._log_sizes[id_][0], size

    async def _end_unwanted(self, ids: Collection[str]) -> None:
        """End runs of requests that were cancelled, deleted, or taken by another process."""
        if not ids:
            return
        job = partial(still_unfinished, ids=ids)
        taken = await self._requests.store.run(job, write=False)
        for id_ in ids:
            task = self._running.get(id_)
            if id_ not in taken:
                self._end_run(id_)
            elif task is not None:
                task.cancel()  # Its end is told by whoever runs it now.

    def _end_run(self, id_: str) -> None:
        """A request is not wanted any more."""
        task = self._running.get(id_)
        if task is not None and id_ not in self._unwanted:
            self._unwanted.add(id_)
            task.cancel()

    def _give_back_waiting(self) -> None:
        """Let others run what has been at no node yet: this process is to end.

        Requests whose clients wait here stay.
        """
        kept = self._unwanted | self._given_back | self._requests.waited_for.keys()
        for id_, task in self._running.items():
            can_wait = id_ in self._runner.registry and not self._runner.has_begun(id_)
            if can_wait and id_ not in kept:
                self._given_back.add(id_)
                task.cancel()

    async def _put_back(self, id_: str, not_before: float, *, failed: bool = False) -> None:
        """Let a request wait again. Returns when the store knows it."""
        self._leases.put_back([id_], not_before, failed=failed)
        await self._until_stored(self._leases.write)

    # One request.

    async def _serve(self, row: StoredRow) -> None:
        """Run one request to its result, or let it wait again."""
        try:
            try:
                await self._run_once(row)
            except (RowDeferred, _FailedRun) as again:
                not_before, failed = self._now() + again.seconds, isinstance(again, _FailedRun)
                await self._put_back(row.id, not_before, failed=failed)
            except asyncio.CancelledError:
                if row.id in self._given_back and row.id not in self._unwanted:
                    await self._put_back(row.id, 0.0)
                    return
                if row.id not in self._unwanted:
                    raise
                # Wherever its run was: nobody else writes its end.
                await self._requests.settle_unwanted(row)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a background request failed", request=row.id)
            self._leases.put_back([row.id], self._now() + LEASE_SECONDS, failed=True)
        finally:
            self._unwanted.discard(row.id)
            self._given_back.discard(row.id)
            self._log_sizes.pop(row.id, None)
            del self._running[row.id]
            self._can_raise.pop(row.id, None)
            self._look_again_at = 0.0  # Its result takes room.
            if not self._running:
                self._idle.set()
            self._requests.has_ended(row.id)
            self._requests.wakes.set()

    async def _run_once(self, row: StoredRow) -> None:
        """Raises: RowDeferred, _FailedRun."""
        try:
            body = await self._requests.body(row)
            if row.kind is RequestKind.RESPONSE:
                result = await self._respond(row, body)
            else:
                result = await self._defer(row, body)
        except GatewayError as error:
            # Its files can't be read now: not those of one that is deleted meanwhile.
            if error.status == 404:
                result = _failed(row, error.code)
            else:
                raise RowDeferred(error.code, error.retry_after or LEASE_SECONDS) from None
        if row.id in self._unwanted:
            return
        await self._until_stored(partial(self._record, row, result))

    async def _respond(self, row: StoredRow, body: bytes) -> _Result:
        """Run a response; its events go to its log. Raises: RowDeferred, GatewayError."""
        assert row.result_place is not None
        try:
            events = await ResponseEvents.reopen(
                self._requests.logs, row.result_place, self._now,
                self._runner.settings.limits.resume_bytes,
            )  # fmt: skip
        except FileNotFoundError:
            return _failed(row, "storage_lost")
        except FolderError as error:
            raise RowDeferred(str(error), LEASE_SECONDS) from None
        outcome: Outcome | None = None
        self._log_sizes[row.id] = events, row.result_length or 0
        try:
            if not events.ended:
                outcome = await self._run_events(row, body, events)
            return await self._ended_response(row, events, outcome)
        except RowExpired:
            await events.fail("server_error", EXPIRED_MESSAGE)
            return await self._ended_response(row, events, None, RequestState.EXPIRED)
        except (FolderError, FileNotFoundError, LogBroken) as error:
            if row.id in self._unwanted:
                raise asyncio.CancelledError from None
            raise RowDeferred(str(error), LEASE_SECONDS) from None
        finally:
            with contextlib.suppress(FolderError, FileNotFoundError, LogBroken):
                await events.close()

    async def _run_events(self, row: StoredRow, body: bytes, events: ResponseEvents) -> Outcome:
        outcome = await self._runner.run(_to_run(row), body, events)
        if outcome.failed_on_nodes and not events.ended and row.attempts + 1 < MOST_RUNS:
            raise _FailedRun(row)
        await events.finish(outcome)
        return outcome

    async def _ended_response(
        self,
        row: StoredRow,
        events: ResponseEvents,
        outcome: Outcome | None,
        state: RequestState | None = None,
    ) -> _Result:
        """The result of a response whose log has ended. Raises: FolderError."""
        response = await events.response()
        end = _ENDS.get(str(response.get("status")), "failed")
        error = response.get("error") or {}
        if state is None:
            state = RequestState.FAILED if end == "failed" else RequestState.DONE
        status = 200 if end != "failed" else 500 if outcome is None else max(outcome.status, 400)
        code = str(error.get("code") or "server_error") if end == "failed" else None
        usage = None if outcome is None else outcome.usage
        if outcome is None and state is RequestState.DONE and events.run_end is not None:
            usage = recovered_usage(
                self._runner, _to_run(row), events.run_end, events.usage(response),
                model=row.model, group=row.group_name, nodes=self._nodes(),
            )  # fmt: skip
        recorded = RecordedResult(row.id, state, status, code, events.name, 0, events.size, usage)
        return _Result(recorded, end)

    async def _defer(self, row: StoredRow, body: bytes) -> _Result:
        """Run a deferred request, and keep its response. Raises: RowDeferred, GatewayError."""
        try:
            outcome = await self._runner.run(_to_run(row), body)
        except RowExpired:
            return _Result(RecordedResult(row.id, RequestState.EXPIRED, 504, "queue_timeout"))
        if outcome.failed_on_nodes and row.attempts + 1 < MOST_RUNS:
            raise _FailedRun(row)
        head = DeferredHead(outcome.status, outcome.header_lines.decode("latin-1"), row.id)
        data = DeferredResult(head, outcome.content).encode()
        try:
            name = await self._requests.write_answer(data)
        except FolderError as error:
            raise RowDeferred(str(error), LEASE_SECONDS) from None
        state = RequestState.DONE if outcome.status < 400 else RequestState.FAILED
        recorded = RecordedResult(
            row.id, state, outcome.status, outcome.error_code, name, 0, len(data), outcome.usage
        )
        return _Result(recorded, file=name)

    async def _record(self, row: StoredRow, result: _Result) -> None:
        """Record a result. Raises: StoreError."""
        counts: list[str] = []

        def job(connection: Connection) -> Sequence[UsageRow]:
            now = self._now()
            counts[:] = record(connection, self._process.id, [result.recorded], now)
            for kept in keep_background(connection, counts, now + keep_seconds(row)):
                if result.end is not None:
                    self._requests.webhooks.response_ended(connection, kept, result.end, now)
            usage = result.recorded.usage
            return [usage] if counts and usage is not None else []

        await self._ledger.write_with(job)
        if not counts and result.file is not None:
            with contextlib.suppress(FolderError):
                await self._requests.threads.run(self._requests.folder.delete, result.file)

    async def _until_stored(self, work: Callable[[], Coroutine[None, None, object]]) -> None:
        """Do this work of the store, however long the store can't be used."""
        while True:
            try:
                await work()
            except (StoreError, FolderError) as error:
                log.warning("a background result waits for the store", why=str(error))
                await asyncio.sleep(STORE_SECONDS)
            else:
                return


class _FailedRun(Exception):  # noqa: N818 - it is tried again
    """Nodes have failed this run, and another one may go better."""

    def __init__(self, row: StoredRow) -> None:
        super().__init__(row.id)
        self.seconds = RETRY_SECONDS * 2**row.attempts


def is_near(row: StoredRow, now: float) -> bool:
    """Whether the deadline of a request is near."""
    if row.deadline is None:
        return False
    near = max(NEAR_SECONDS, NEAR_SHARE * (row.deadline - row.created_at))
    return row.deadline - now <= near


def _failed(row: StoredRow, code: str) -> _Result:
    end: ResponseEnd | None = "failed" if row.kind is RequestKind.RESPONSE else None
    place = None if end is None else row.result_place
    length = row.result_length or 0
    recorded = RecordedResult(row.id, RequestState.FAILED, 500, code, place, length=length)
    return _Result(recorded, end)


def _to_run(row: StoredRow) -> StoredRequest:
    return StoredRequest(
        row.id,
        row.owner,
        row.path,
        Priority.parse(row.class_) or Priority.NORMAL,
        row.user,
        deadline=row.deadline,
    )
