"""Runs responses in the background and deferred requests: claims rows, runs them, records results.

A process that is killed loses its claims, and another one, or its successor, runs the requests
again; a response goes on from what its log has. A row's result, its end and its usage are recorded
in one transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass

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
from gateway.batches.folder import FolderError, StorageTrouble
from gateway.batches.request_rows import RequestKind, RequestState, StoredRow, UnfinishedWork, job
from gateway.batches.response_events import ResponseEvents
from gateway.batches.response_log import LogBroken
from gateway.batches.runner import (
    MOST_RUNS,
    HeldRow,
    Outcome,
    RequestRunner,
    RowDeferred,
    RowExpired,
    RowRuns,
    RunFailed,
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

RETRY_SECONDS = 2.0  # before the second run of these; before the third, twice as many
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


@dataclass(slots=True, eq=False)
class HeldRequest(HeldRow):
    """A request that runs."""

    events: ResponseEvents | None = None  # of a response whose log is open
    known_size: int = 0  # of that log, as the store knows it
    is_unwanted: bool = False  # whether it was cancelled or deleted
    is_given_back: bool = False  # whether it is to wait again, as its run has not begun

    def has_result(self) -> bool:
        """Whether those who follow a response have seen its end."""
        return self.events is not None and self.events.ended


@dataclass(frozen=True, slots=True)
class _Result:
    """What a run has brought."""

    recorded: RecordedResult
    end: ResponseEnd | None = None  # how a response has ended
    file: str | None = None  # the file of a deferred result, which goes if it is not recorded


class BackgroundRunner(RowRuns[HeldRequest]):
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
        super().__init__(leases, runner, rooms, now, LEASE_SECONDS)
        self._requests = requests
        self._work = work
        self._ledger = ledger
        self._settings = settings
        self._is_closing = is_closing
        self._nodes = nodes
        self._renew_at = 0.0
        self._full: set[str] = set()  # owners that keep as much as they may: their requests wait
        self._looked_at: set[str] = set()
        """The owners of which that is known, until `_look_again_at`."""
        self._look_again_at = 0.0
        self._trouble = StorageTrouble(lambda why: log.warning("background requests wait", why=why))
        requests.unwanted.append(self._end_run)

    def __len__(self) -> int:
        """How many run."""
        return len(self._held)

    async def run(self) -> None:
        """Run requests until cancelled; what runs then waits again."""
        wakes = self._requests.wakes
        try:
            while True:
                with self._trouble.told():
                    await self._look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await wakes.wait()
                wakes.clear()
        finally:
            if running := await self._close(CLOSE_SECONDS, until_recorded=True):
                log.warning("background requests do not end", requests=running)

    # Claims.

    async def _look(self) -> None:
        """Put back what must be, renew leases and claim. Raises: StoreError, FolderError."""
        await self.leases.write()
        self._raise_class()
        if self._is_closing():
            self._give_back_waiting()
        if self._held or await self._work.exists():
            now = asyncio.get_running_loop().time()
            if now >= self._renew_at:
                self._renew_at = now + RENEW_SECONDS
                await self._renew()
                await self._note_sizes()
            await self._claim()

    async def _claim(self) -> None:
        """Claim what there is room for; all owners get equal shares."""
        room = self._settings().background_at_once - len(self._held)
        if room <= 0:
            return
        requests, now = self._requests, self.now()
        if self._is_closing():
            # Their clients wait here, as those of other requests do.
            if not requests.waited_for.keys() <= self._held.keys():
                await self._begin_all(
                    [Pick(room, RequestKind.RESPONSE, ids=list(requests.waited_for))]
                )
            return
        folder = await requests.threads.opened(requests.folder)
        owners = await requests.store.run(job(waiting_owners, folder, now), write=False)
        full = await self._full_owners({owner for owner, _ in owners})
        owners = [one for one in owners if one[0] not in full]
        if not owners:
            return
        share = max(1, room // len(owners))
        picks = [Pick(share, kind, owner=owner, by_deadline=True) for owner, kind in owners[:room]]
        begun = await self._begin_all(picks)
        if begun and begun < room:
            requests.wakes.set()  # Others may have left some of their share.

    async def _begin_all(self, picks: Sequence[Pick]) -> int:
        """Begin what can be claimed; how many those are."""
        rows = await self.leases.claim_rows(picks)
        for row in rows:
            if row.id not in self._held:  # Else its last run has not ended yet: it goes first.
                held = self._held[row.id] = HeldRequest(row)
                self._begin(held)
        return len(rows)

    async def _full_owners(self, owners: set[str]) -> set[str]:
        """Those that keep as much as they may; what others add is seen a second later at most."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._look_again_at or not owners <= self._looked_at:
            full = job(full_owners, owners, self._settings().bytes_per_key, self.now())
            self._full = await self._requests.store.run(full, write=False)
            self._looked_at = owners
            self._look_again_at = loop.time() + LOOK_SECONDS
        return self._full

    def _raise_class(self) -> None:
        """Raise the class of those whose deadline is near."""
        now, ids = self.now(), dict[Priority, set[str]]()
        for held in self._held.values():
            if held.row.class_ == Priority.BATCH.label and is_near(held.row, now):
                priority = self.runner.late_priority(held.row.owner)
                ids.setdefault(priority, set()).add(held.row.id)
        for priority, some in ids.items():
            self.runner.raise_class(self.rooms, some, priority)

    async def _note_sizes(self) -> None:
        """Tell the store how much the logs have grown."""
        grown = {
            held: held.events.size
            for held in self._held.values()
            if held.events is not None and held.events.size != held.known_size
        }
        if grown:
            sizes = {held.row.id: size for held, size in grown.items()}
            await self._requests.store.run(job(note_log_sizes, sizes, running=True))
        for held, size in grown.items():
            held.known_size = size

    async def _drop_unwanted(self, ids: set[str]) -> None:
        """End runs of requests that were cancelled, deleted, or taken by another process."""
        if not ids:
            return
        taken = await self._requests.store.run(job(still_unfinished, ids), write=False)
        for id_ in ids:
            held = self._held.get(id_)
            if id_ not in taken:
                self._end_run(id_)
            elif held is not None and held.task is not None:
                held.task.cancel()  # Its end is told by whoever runs it now.

    def _end_run(self, id_: str) -> None:
        """A request is not wanted any more."""
        held = self._held.get(id_)
        if held is not None and held.task is not None and not held.is_unwanted:
            held.is_unwanted = True
            held.task.cancel()

    def _give_back_waiting(self) -> None:
        """Let others run what has been at no node yet: this process is to end.

        Requests whose clients wait here stay.
        """
        for id_, held in self._held.items():
            can_wait = id_ in self.runner.registry and not self.runner.has_begun(id_)
            kept = held.is_unwanted or held.is_given_back or id_ in self._requests.waited_for
            if can_wait and not kept and held.task is not None:
                held.is_given_back = True
                held.task.cancel()

    # One request.

    async def _run(self, held: HeldRequest) -> None:
        """Run a request and record its result, or let it wait again. Raises: RunFailed."""
        row = held.row
        try:
            body = await self._requests.body(row)
            if row.kind is RequestKind.RESPONSE:
                result = await self._respond(held, body)
            else:
                result = await self._defer(row, body)
        except RowDeferred as deferred:
            self.leases.put_back([row.id], self.now() + deferred.seconds)
            return
        except GatewayError as error:
            # Its files can't be read now: not those of one that is deleted meanwhile.
            if error.status != 404:
                self.leases.put_back([row.id], self.now() + (error.retry_after or LEASE_SECONDS))
                return
            result = _failed(row, error.code)
        if not held.is_unwanted:
            await self._until_stored(lambda: self._record(row, result))

    def _tell_failed(self, id_: str) -> None:
        log.exception("a background request failed", request=id_)  # noqa: LOG004 - in a handler

    async def _cancelled(self, held: HeldRequest) -> None:
        """The run was cancelled: the request has ended, or another run follows."""
        if held.is_unwanted:
            # Wherever its run was: nobody else writes its end.
            await self._requests.settle_unwanted(held.row)
        else:
            self.leases.put_back([held.row.id], 0.0)

    def _let_go(self, held: HeldRequest) -> None:
        """The run has ended."""
        self._forget(held)
        self._look_again_at = 0.0  # Its result takes room.
        self._requests.has_ended(held.row.id)
        self._requests.wakes.set()

    async def _respond(self, held: HeldRequest, body: bytes) -> _Result:
        """Run a response; its events go to its log. Raises: RowDeferred, RunFailed."""
        row = held.row
        assert row.result_place is not None
        try:
            events = await ResponseEvents.reopen(
                self._requests.logs, row.result_place, self.now,
                self.runner.settings.limits.resume_bytes,
            )  # fmt: skip
        except FileNotFoundError:
            return _failed(row, "storage_lost")
        except FolderError as error:
            raise RowDeferred(str(error), LEASE_SECONDS) from None
        outcome: Outcome | None = None
        held.events, held.known_size = events, row.result_length or 0
        try:
            if not events.ended:
                outcome = await self.runner.run(row, body, events)
                if not events.ended:
                    _check_failed(row, outcome)
                await events.finish(outcome.error_code, outcome.content)
            return await self._ended_response(row, events, outcome)
        except RowExpired:
            await events.fail("server_error", EXPIRED_MESSAGE)
            return await self._ended_response(row, events, None, RequestState.EXPIRED)
        except (FolderError, FileNotFoundError, LogBroken) as error:
            if held.is_unwanted:
                raise asyncio.CancelledError from None
            raise RowDeferred(str(error), LEASE_SECONDS) from None
        finally:
            with contextlib.suppress(FolderError, FileNotFoundError, LogBroken):
                await events.close()

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
            tokens = events.usage(response)
            usage = self.runner.recovered_usage(row, events.run_end, tokens, self._nodes())
        recorded = RecordedResult(row.id, state, status, code, events.name, 0, events.size, usage)
        return _Result(recorded, end)

    async def _defer(self, row: StoredRow, body: bytes) -> _Result:
        """Run a deferred request, and keep its response. Raises: RowDeferred, RunFailed."""
        try:
            outcome = await self.runner.run(row, body)
        except RowExpired:
            return _Result(RecordedResult(row.id, RequestState.EXPIRED, 504, "queue_timeout"))
        _check_failed(row, outcome)
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

        def recording(connection: Connection) -> Sequence[UsageRow]:
            now = self.now()
            counts[:] = record(connection, self.leases.process.id, [result.recorded], now)
            for kept in keep_background(connection, counts, now + keep_seconds(row)):
                if result.end is not None:
                    self._requests.webhooks.response_ended(connection, kept, result.end, now)
            usage = result.recorded.usage
            return [usage] if counts and usage is not None else []

        await self._ledger.write_with(recording)
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


def is_near(row: StoredRow, now: float) -> bool:
    """Whether the deadline of a request is near."""
    if row.deadline is None:
        return False
    near = max(NEAR_SECONDS, NEAR_SHARE * (row.deadline - row.created_at))
    return row.deadline - now <= near


def _check_failed(row: StoredRow, outcome: Outcome) -> None:
    """Raises: RunFailed, if nodes have failed the run and another one is to follow."""
    if outcome.failed_on_nodes and row.attempts + 1 < MOST_RUNS:
        raise RunFailed(RETRY_SECONDS * 2**row.attempts)


def _failed(row: StoredRow, code: str) -> _Result:
    end: ResponseEnd | None = "failed" if row.kind is RequestKind.RESPONSE else None
    place = None if end is None else row.result_place
    length = row.result_length or 0
    recorded = RecordedResult(row.id, RequestState.FAILED, 500, code, place, length=length)
    return _Result(recorded, end)
