"""Requests in the background: kept and found for their callers, and run one by one.

A request is complete in the folder before it has a row, and its row goes before its files do: so a
crash leaves at most files without a row, which `run` removes. The log of a response's events tells
its state and output; the row tells who runs it. The result of a deferred request is a file: a line
with the response's head, then its body.

A process that is killed loses its claims, and another one, or its successor, runs the requests
again; a response goes on from what its log has. A row's result, its end and its usage are recorded
in one transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
import structlog
from sqlalchemy import Connection, delete, func, select, update

from gateway.api.json_values import JsonObject
from gateway.callers.ledger import Ledger, UsageRow
from gateway.config.stored import BatchSettings
from gateway.errors import GatewayError, truncate_echo
from gateway.store.failures import StoreError
from gateway.store.schema import stored_requests
from gateway.store.store import woken
from gateway.stored import claims, files
from gateway.stored.claims import (
    AskedRow,
    Pick,
    RecordedResult,
    RequestKind,
    RequestState,
    ResponseEnd,
    StoredRow,
    UnfinishedWork,
)
from gateway.stored.folder import (
    RETRY_AFTER,
    FolderError,
    Storage,
    StorageTrouble,
    folder_errors_told,
)
from gateway.stored.response_events import ResponseEvents, current_response, queued_response
from gateway.stored.response_log import LOG_KIND, LogBroken, ResponseLogs
from gateway.stored.runner import (
    MOST_RUNS,
    HeldRow,
    Outcome,
    RowDeferred,
    RowExpired,
    RowRuns,
    RunFailed,
)
from gateway.stored.webhooks import WebhookEvents
from gateway.terms import Priority

DEFERRED_PATH = "/v1/background/{id}"


class DeferredHead(msgspec.Struct, frozen=True):
    """The status and the header lines of a response."""

    status: int
    header_lines: str
    x_request_id: str


def decode_result(data: bytes) -> tuple[DeferredHead, bytes]:
    """Head and content of the result that a file holds. Raises: FolderError."""
    line, found, content = data.partition(b"\n")
    with contextlib.suppress(msgspec.MsgspecError):
        head = msgspec.json.decode(line, type=DeferredHead)
        if found:
            return head, content
    raise FolderError("the result of a request is damaged", "put back a copy of the folder")


_ROW: Final = stored_requests.c
BACKGROUND_KINDS: Final = (RequestKind.RESPONSE, RequestKind.DEFERRED)
_IS_BACKGROUND = _ROW.kind.in_([kind.value for kind in BACKGROUND_KINDS])
# Called in the transaction in which a row ends, with the row as it is then.
EndListener = Callable[[Connection, StoredRow], None]


def add_background(connection: Connection, row: StoredRow, settings: BatchSettings) -> None:
    """Add a request. Raises: GatewayError 429, if its owner would have more than it may."""
    files.raise_revision(connection)
    if connection.scalar(select(_ROW.id).where(_ROW.id == row.id)) is not None:
        return  # Done again.
    sums = select(func.count(), func.coalesce(func.sum(_ROW.length), 0)).where(
        *claims.alone_in(row.folder), _ROW.owner == row.owner, claims.IS_WAITING | claims.IS_RUNNING
    )
    number, size = connection.execute(sums).one()
    most, most_bytes = settings.waiting_per_key, settings.waiting_bytes_per_key
    if number + 1 > most or int(size) + row.length > most_bytes:
        raise GatewayError(
            429,
            "rate_limit_exceeded",
            f"This key has {number} requests of {int(size)} bytes in the background and may have "
            f"{most} of {most_bytes} bytes.",
            retry_after=RETRY_AFTER,
        )
    kept = files.kept_by(connection, row.owner, row.created_at)
    if kept.bytes + row.length + (row.result_length or 0) > settings.bytes_per_key:
        raise files.kept_too_much(kept, settings)
    claims.add_rows(connection, [row])


def find_background(
    connection: Connection, owner: str, id_: str, kind: RequestKind, now: float
) -> StoredRow | None:
    """The owner's request, unless its time is over."""
    conditions = _ROW.id == id_, _ROW.owner == owner, _ROW.kind == kind.value
    return claims.ROWS.one(connection, *conditions, _ROW.keep_until > now)


def end_background(
    connection: Connection,
    row: StoredRow,
    now: float,
    also: EndListener,
    state: RequestState = RequestState.CANCELLED,
    status: int | None = None,
    error_code: str | None = None,
) -> StoredRow | None:
    """End the request if it waits or runs; returns it as it is then.

    Whoever runs it notices when it renews its claim.
    """
    ended = update(stored_requests).where(
        _ROW.id == row.id,
        _ROW.owner == row.owner,
        _ROW.kind == row.kind.value,
        claims.IS_WAITING | claims.IS_RUNNING,
    )
    values = {
        "state": state.value,
        "status": status,
        "error_code": error_code,
        "ended_at": now,
        "claimed_until": None,
        "keep_until": now + keep_seconds(row),
    }
    found = claims.ROWS.changed(connection, ended.values(values))
    if not found:
        return find_background(connection, row.owner, row.id, row.kind, now)
    also(connection, found[0])
    return found[0]


def delete_background(
    connection: Connection, owner: str, id_: str, kind: RequestKind, now: float
) -> StoredRow | None:
    """Remove the owner's request, whatever its state; as it was. Its files are removed then."""
    found = find_background(connection, owner, id_, kind, now)
    if found is not None:
        connection.execute(delete(stored_requests).where(_ROW.id == id_, _ROW.owner == owner))
    return found


def due_background(connection: Connection, folder: str, now: float, limit: int) -> list[StoredRow]:
    """Requests of the folder that nobody may read any more, though their files are still there."""
    asked = claims.ROWS.where(*claims.alone_in(folder), _ROW.keep_until <= now, _IS_BACKGROUND)
    return claims.ROWS.all(connection, asked.limit(limit))


def remove_background(connection: Connection, ids: Sequence[str]) -> None:
    """Remove the rows of requests whose files are gone."""
    for some in claims.chunks(ids):
        connection.execute(delete(stored_requests).where(_ROW.id.in_(some), _IS_BACKGROUND))


def known_places(connection: Connection, names: Iterable[str], folder: str) -> set[str]:
    """Those of the folder's files that a request needs."""
    alone = claims.alone_in(folder)
    places = claims.those_with(connection, _ROW.place, names, *alone)
    return places | claims.those_with(connection, _ROW.result_place, names, *alone)


def expire_background(
    connection: Connection, folder: str, now: float, also: EndListener, limit: int
) -> list[StoredRow]:
    """End requests that wait and whose deadline is over; returns them."""
    late = claims.ROWS.where(
        *claims.alone_in(folder), _ROW.deadline <= now, claims.IS_WAITING, _IS_BACKGROUND
    )
    ended = (
        end_background(connection, row, now, also, RequestState.EXPIRED)
        for row in claims.ROWS.all(connection, late.limit(limit))
    )
    return [row for row in ended if row is not None]


def waiting_before(connection: Connection, folder: str, created_at: float) -> int:
    """How many requests of the folder wait that came before."""
    asked = select(func.count()).where(
        *claims.alone_in(folder), claims.IS_WAITING, _ROW.created_at < created_at
    )
    return connection.scalar(asked) or 0


def waiting_owners(
    connection: Connection, folder: str, now: float
) -> list[tuple[str, RequestKind]]:
    """Whose requests may run now, and of which kind."""
    asked = select(_ROW.owner, _ROW.kind).where(
        *claims.alone_in(folder), claims.IS_WAITING, _ROW.not_before <= now, _IS_BACKGROUND
    )
    return [(owner, RequestKind(kind)) for owner, kind in connection.execute(asked.distinct())]


# Kinds of the folder's files: bodies, and results of deferred requests.
REQUEST, ANSWER = "request", "answer"
_PREFIXES = {RequestKind.RESPONSE: "resp_", RequestKind.DEFERRED: "bg_"}
POLL_SECONDS = 1.0  # between two looks at a request that another process may have ended
CLEAN_SECONDS = 10.0  # between two rounds of ending what is late and removing what is due
IDLE_CLEAN_SECONDS = 60.0  # the same while nothing waits or runs: only what was kept becomes due
# Age of a file without a row from which on it counts as left over from a crash.
ORPHAN_SECONDS = 3600.0
STEP_ROWS = 200  # requests, or files, that one round takes
MOST_STEPS = 50  # rounds of removing that follow each other at once
# After a response's end was recorded by a process that then wrote nothing, another one writes.
UNWRITTEN_SECONDS = 60.0
GIVE_UP_SECONDS = 5.0  # most seconds to end what clients wait for, at the end
MOST_ENDING = 1024  # cancellations under way whose clients have gone
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class BackgroundRequests:
    """The requests of all callers, in one folder and one store.

    `wakes` tells whoever runs them that there is a new one, `unwanted` that one is not wanted.
    """

    storage: Storage
    logs: ResponseLogs
    webhooks: WebhookEvents
    work: UnfinishedWork
    # Set when there is something new to run.
    wakes: asyncio.Event = field(default_factory=asyncio.Event)
    unwanted: list[Callable[[str], None]] = field(default_factory=list)
    """Called with the id of a request whose run is to end."""
    waited_for: dict[str, StoredRow] = field(default_factory=dict)
    """Requests whose clients wait in this process, by their ids."""
    _ends: WeakValueDictionary[str, asyncio.Event] = field(default_factory=WeakValueDictionary)
    """Set when a request may have ended in this process, for those who wait for that."""
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    # Add.

    async def add(
        self,
        asked: AskedRow,
        body: bytes,
        *,
        seconds: float,
        keep_seconds: float,
        echoed: JsonObject | None = None,
    ) -> StoredRow:
        """Take a request, which must have ended within so many seconds.

        Its result is kept for `keep_seconds`. `echoed`: the fields that a response repeats. Raises:
        GatewayError 429, 503, 507.
        """
        storage = self.storage
        created_at = storage.now()
        with folder_errors_told("request"):
            folder = await storage.opened()
            name = await storage.threads.run(storage.folder.write_new, REQUEST, body)
        id_ = f"{_PREFIXES[asked.kind]}{name.rpartition('-')[2]}"
        log_name, log_bytes = None, 0
        if asked.kind is RequestKind.RESPONSE:
            response = queued_response(id_, created_at, echoed or {})
            try:
                with folder_errors_told("request"):
                    events = await ResponseEvents.create(self.logs, response, storage.now)
                    log_name, log_bytes = events.name, events.size
                    await events.close()
            except GatewayError:
                with contextlib.suppress(FolderError):
                    await storage.delete(name)
                    if log_name is not None:
                        await self.logs.delete(log_name)
                raise
        deadline = created_at + seconds
        row = StoredRow(
            **{one.name: getattr(asked, one.name) for one in fields(AskedRow)},
            id=id_, place=name, offset=0, length=len(body), created_at=created_at,
            keep_until=deadline + keep_seconds, folder=folder, deadline=deadline,
            result_place=log_name, result_offset=None if log_name is None else 0,
            result_length=None if log_name is None else log_bytes,
        )  # fmt: skip
        try:
            remove = partial(self._remove_files, row)
            await storage.add_surely(remove, add_background, row, storage.settings())
        finally:
            self.work.added()  # It may have its row, though the store has not said so.
        self.wakes.set()
        return row

    # Find.

    async def find(self, owner: str, id_: str, kind: RequestKind) -> StoredRow:
        """The owner's request. Raises: GatewayError 404, 503."""
        storage = self.storage
        found = await storage.read_for_caller(find_background, owner, id_, kind, storage.now())
        if found is None:
            raise not_found(id_, kind)
        return found

    async def body(self, row: StoredRow) -> bytes:
        """The request's body. Raises: GatewayError 404, 503."""
        return await self._read(row, row.place, row.offset, row.length)

    async def answer(self, row: StoredRow) -> bytes:
        """The result of a deferred request. Raises: GatewayError 404, 503."""
        assert row.result_place is not None
        assert row.result_length is not None
        return await self._read(row, row.result_place, row.result_offset or 0, row.result_length)

    async def _read(self, row: StoredRow, place: str, offset: int, length: int) -> bytes:
        with folder_errors_told("request"):
            try:
                storage = self.storage
                return await storage.threads.run(storage.folder.read, place, offset, length)
            except FileNotFoundError:
                raise not_found(row.id, row.kind) from None

    async def response(self, row: StoredRow) -> JsonObject:
        """A response as it is now. Raises: GatewayError 404, 503."""
        assert row.result_place is not None
        with folder_errors_told("request"):
            try:
                opened = await self.logs.open(row.result_place)
                response, ended = await current_response(opened), opened.ended
            except FileNotFoundError:
                raise not_found(row.id, row.kind) from None
        if not ended and (end := _end_without_run(row)) is not None:
            await self._settle_if_left(row)
            return response | end
        return response

    async def follow(
        self, row: StoredRow, after: int = -1, *, can_return: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """The events of a response behind the one of this number, then those to come.

        Raises: as `ResponseLogs.follow`.
        """
        assert row.result_place is not None
        if _end_without_run(row) is not None:
            await self._settle_if_left(row)
        followed = self.logs.follow(row.result_place, after, can_return=can_return)
        async with contextlib.aclosing(followed) as pieces:
            async for piece in pieces:
                yield piece

    async def ahead_of(self, row: StoredRow) -> int:
        """How many requests in the background wait that came before. Raises: GatewayError 503."""
        return await self.storage.read_for_caller(waiting_before, row.folder, row.created_at)

    async def wait_ended(self, row: StoredRow, seconds: float) -> StoredRow:
        """The request once it has ended; as it is after so many seconds if it has not by then.

        Raises: GatewayError 404, 503.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            # Before the look: what ends after it is told.
            ended = self._ends.setdefault(row.id, asyncio.Event())
            found = await self.find(row.owner, row.id, row.kind)
            left = until - loop.time()
            if found.state.ended or left <= 0:
                return found
            await woken(ended, min(left, POLL_SECONDS))

    @contextlib.contextmanager
    def client_waits(self, row: StoredRow) -> Iterator[None]:
        """A client waits in this process for the request's end, and would send it again."""
        self.waited_for[row.id] = row
        try:
            yield
        finally:
            del self.waited_for[row.id]

    def has_ended(self, id_: str) -> None:
        """A request has ended in this process."""
        if (ended := self._ends.pop(id_, None)) is not None:
            ended.set()

    # End.

    async def cancel(self, owner: str, id_: str, kind: RequestKind) -> StoredRow:
        """End the owner's request, if it has not ended; as it is then. Raises: GatewayError."""
        found = await self.find(owner, id_, kind)
        if found.state.ended:
            return found
        storage = self.storage
        row = await storage.write_for_caller(end_background, found, storage.now(), self.ended)
        if row is None:
            raise not_found(id_, kind)
        self._end_run(id_)
        if row.state is RequestState.CANCELLED and found.state is RequestState.WAITING:
            await self.settle(row)
        return row

    async def give_up(self) -> None:
        """This process ends: so do the requests whose clients wait in it, which get an error."""
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_SECONDS):
                for one in list(self.waited_for.values()):
                    row = await self.storage.write(
                        end_background, one, self.storage.now(), self.ended, RequestState.FAILED,
                        503, SHUTTING_DOWN,
                    )  # fmt: skip
                    if row is not None and row.state.ended:
                        self._end_run(row.id)  # Whoever runs it writes its end.
                        if row.claimed_by is None:
                            await self.settle(row)

    def cancel_soon(self, row: StoredRow) -> None:
        """End a request that its client, which is gone, has waited for."""

        async def cancel() -> None:
            with contextlib.suppress(GatewayError):
                await self.cancel(row.owner, row.id, row.kind)

        if len(self._ending) < MOST_ENDING:
            task = asyncio.create_task(cancel())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def delete(self, owner: str, id_: str, kind: RequestKind) -> StoredRow:
        """Remove the owner's request with all that is kept of it; as it was. Raises: GatewayError.

        If it waits or runs, it ends.
        """
        storage = self.storage
        row = await storage.write_for_caller(delete_background, owner, id_, kind, storage.now())
        if row is None:
            raise not_found(id_, kind)
        self._end_run(id_)
        await self._remove_files(row)
        return row

    def _end_run(self, id_: str) -> None:
        self.has_ended(id_)
        for tell in self.unwanted:
            tell(id_)

    def ended(self, connection: Connection, row: StoredRow) -> None:
        """Within the transaction in which a row ends without a result: tell webhooks."""
        if row.kind is RequestKind.RESPONSE:
            end: ResponseEnd = "cancelled" if row.state is RequestState.CANCELLED else "failed"
            self.webhooks.response_ended(connection, row, end, self.storage.now())

    async def _settle_if_left(self, row: StoredRow) -> None:
        """Write the end of a response that nobody else will write."""
        since, now = row.ended_at, self.storage.now()
        if row.claimed_by is None or (since is not None and now >= since + UNWRITTEN_SECONDS):
            await self.settle(row)

    async def settle(self, row: StoredRow) -> None:
        """Write the end of a response that has ended without a run."""
        if row.kind is not RequestKind.RESPONSE or row.result_place is None:
            return
        with contextlib.suppress(FileNotFoundError, FolderError, LogBroken):
            events = await ResponseEvents.reopen(self.logs, row.result_place, self.storage.now)
            try:
                if (end := _end_without_run(row)) is not None:
                    error = end.get("error")
                    await (events.fail(**error) if error else events.cancel())
            finally:
                with contextlib.suppress(LogBroken, FolderError):
                    await events.close()
            # If that fails, `clean` does it later.
            with contextlib.suppress(StoreError):
                await self.storage.write(files.note_log_sizes, {row.id: events.size})

    # The gateway's own work.

    async def run(self) -> None:
        """End what is late, and remove what is due or left over, until cancelled."""
        now = self.storage.now
        orphans_at, clean_at = now(), 0.0
        trouble = StorageTrouble(lambda why: log.warning("old background requests stay", why=why))
        try:
            while True:
                with trouble.told():
                    orphans = now() >= orphans_at
                    if orphans or now() >= clean_at or await self.work.exists():
                        await self.clean(orphans=orphans)
                        clean_at = now() + IDLE_CLEAN_SECONDS
                    if orphans:
                        orphans_at = now() + ORPHAN_SECONDS
                await asyncio.sleep(CLEAN_SECONDS)
        finally:
            for task in self._ending:
                task.cancel()
            await asyncio.gather(*self._ending, return_exceptions=True)

    async def clean(self, *, orphans: bool = False) -> None:
        """One round of `run`. Raises: FolderError, StoreError."""
        storage, folder = self.storage, await self.storage.opened()
        late = await storage.write(expire_background, folder, storage.now(), self.ended, STEP_ROWS)
        for row in late:
            self.has_ended(row.id)
            await self.settle(row)
        for _ in range(MOST_STEPS):
            due = await storage.read(due_background, folder, storage.now(), STEP_ROWS)
            for row in due:
                self._end_run(row.id)
                await self._remove_files(row)
            if due:
                await storage.write(remove_background, [row.id for row in due])
                log.info("background requests removed", requests=len(due))
            if len(due) < STEP_ROWS:
                break
        for kind in (REQUEST, ANSWER, LOG_KIND) if orphans else ():
            await storage.remove_left_over(
                kind, ORPHAN_SECONDS, lambda connection, old: known_places(connection, old, folder)
            )

    async def _remove_files(self, row: StoredRow) -> None:
        """Remove what is kept of a request; what stays is left over, and removed later."""
        with contextlib.suppress(FolderError):
            await self.storage.delete(row.place)
            if row.result_place is not None:
                await self.logs.delete(row.result_place)  # It may be no log.


EXPIRED_MESSAGE = "The time was over before there was a response."
# The error of a request whose client has waited in a process that ended.
SHUTTING_DOWN = "shutting_down"


def _end_without_run(row: StoredRow) -> dict[str, Any] | None:
    """What a response is whose row has ended so, though its log may not say it yet."""
    if row.state is RequestState.CANCELLED:
        return {"status": "cancelled"}
    if row.state is RequestState.EXPIRED:
        message = EXPIRED_MESSAGE
    elif row.error_code == SHUTTING_DOWN:
        message = "The gateway was shut down before the response had ended: send it again."
    else:
        return None
    return {"status": "failed", "error": {"code": "server_error", "message": message}}


def keep_seconds(row: StoredRow) -> float:
    """For how long the request's result is kept once it has ended."""
    return row.keep_until - (row.created_at if row.deadline is None else row.deadline)


def response_not_found(id_: str) -> GatewayError:
    """404: the caller has no such response."""
    shown = truncate_echo(id_)
    return GatewayError(404, "response_not_found", f"Response with id '{shown}' not found.")


def not_found(id_: str, kind: RequestKind) -> GatewayError:
    """404: the caller has no such request."""
    if kind is RequestKind.RESPONSE:
        return response_not_found(id_)
    return GatewayError(
        404, "background_not_found", "There is no such background request, or it has expired."
    )


LEASE_SECONDS = 30.0  # after which a request whose process has said nothing is run by another one
RENEW_SECONDS = 5.0  # between two times that the process says what it runs
# Between two looks for requests while there is work, where nobody tells that some have come.
LOOK_SECONDS = 1.0
RETRY_SECONDS = 2.0  # before the second run of these; before the third, twice as many
STORE_SECONDS = 1.0  # before the store is tried again
# A deadline is near in the last quarter of the time until it, and in the last minute.
NEAR_SHARE, NEAR_SECONDS = 0.25, 60.0
# At the end: most seconds until what has ended is recorded, again until what runs has ended, and
# again until the store knows what waits.
CLOSE_SECONDS = 2.0


_ENDS: dict[str, ResponseEnd] = {
    "completed": "completed", "incomplete": "incomplete", "cancelled": "cancelled",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class HeldRequest(HeldRow):
    """A request that runs."""

    events: ResponseEvents | None = None  # of a response whose log is open
    known_size: int = 0  # of that log, as the store knows it
    is_unwanted: bool = False  # whether it was cancelled or deleted

    def has_result(self) -> bool:
        """Whether those who follow a response have seen its end."""
        return self.events is not None and self.events.ended


@dataclass(eq=False)
class BackgroundRunner(RowRuns[HeldRequest]):
    """Runs what `requests` has.

    `is_closing` tells when it should claim no more; `nodes` gives the names and tiers of nodes.
    Requests of class `batch` whose deadline is near are raised to the class that their owner's
    requests have, so that others of that class do not keep them waiting.
    """

    retry_seconds = LEASE_SECONDS
    failed_event = "a background request failed"
    requests: BackgroundRequests
    ledger: Ledger
    is_closing: Callable[[], bool] = lambda: False
    nodes: Callable[[], Iterable[tuple[str, str]]] = tuple
    _renew_at: float = 0.0
    _full: set[str] = field(default_factory=set)
    """Owners that keep as much as they may: their requests wait."""
    _look_again_at: float = 0.0  # when that is to be asked again
    _trouble: StorageTrouble = field(
        init=False,
        default_factory=lambda: StorageTrouble(
            lambda why: log.warning("background requests wait", why=why)
        ),
    )

    def __post_init__(self) -> None:
        self.requests.unwanted.append(self._end_run)

    async def run(self) -> None:
        """Run requests until cancelled; what runs then waits again."""
        try:
            while True:
                with self._trouble.told():
                    await self._look()
                await woken(self.requests.wakes, LOOK_SECONDS)
        finally:
            if running := await self._close(CLOSE_SECONDS, until_recorded=True):
                log.warning("background requests do not end", requests=running)

    # Claims.

    async def _look(self) -> None:
        """Put back what must be, renew leases and claim. Raises: StoreError, FolderError."""
        await self.leases.write()
        self._raise_class()
        if self.is_closing():
            self._give_back_waiting()
        if self._held or await self.requests.work.exists():
            now = asyncio.get_running_loop().time()
            if now >= self._renew_at:
                self._renew_at = now + RENEW_SECONDS
                await self._renew()
                await self._note_sizes()
            await self._claim()

    async def _claim(self) -> None:
        """Claim what there is room for; all owners get equal shares."""
        room = self.leases.storage.settings().background_at_once - len(self._held)
        if room <= 0:
            return
        requests, now = self.requests, self.now()
        if self.is_closing():
            # Their clients wait here, as those of other requests do.
            if not requests.waited_for.keys() <= self._held.keys():
                waited_for = Pick(room, RequestKind.RESPONSE, ids=list(requests.waited_for))
                await self._begin_all([waited_for])
            return
        owners = await self.leases.storage.read(
            waiting_owners, await self.leases.storage.opened(), now
        )
        loop = asyncio.get_running_loop()
        if loop.time() >= self._look_again_at:  # What others add is seen a second later at most.
            most, ids = self.leases.storage.settings().bytes_per_key, {owner for owner, _ in owners}
            self._full = await self.leases.storage.read(files.full_owners, ids, most, self.now())
            self._look_again_at = loop.time() + LOOK_SECONDS
        owners = [one for one in owners if one[0] not in self._full]
        if not owners:
            return
        share = max(1, room // len(owners))
        picks = [Pick(share, kind, owner=owner) for owner, kind in owners[:room]]
        begun = await self._begin_all(picks)
        if begun and begun < room:
            requests.wakes.set()  # Others may have left some of their share.

    async def _begin_all(self, picks: Sequence[Pick]) -> int:
        """Begin what can be claimed; how many those are."""
        rows = await self.leases.claim(picks)
        for row in rows:
            if row.id not in self._held:  # Else its last run has not ended yet: it goes first.
                held = self._held[row.id] = HeldRequest(row)
                self._begin(held)
        return len(rows)

    def _raise_class(self) -> None:
        now, ids = self.now(), dict[Priority, set[str]]()
        for held in self._held.values():
            if held.row.class_ == Priority.BATCH.label and is_near(held.row, now):
                priority = self.runner.late_priority(held.row.owner)
                ids.setdefault(priority, set()).add(held.row.id)
        for priority, some in ids.items():
            self.runner.raise_class(self.rooms, some, priority)

    async def _note_sizes(self) -> None:
        grown = {
            held: held.events.size
            for held in self._held.values()
            if held.events is not None and held.events.size != held.known_size
        }
        if grown:
            sizes = {held.row.id: size for held, size in grown.items()}
            await self.leases.storage.write(files.note_log_sizes, sizes, running=True)
        for held, size in grown.items():
            held.known_size = size

    async def _drop_unwanted(self, ids: set[str]) -> None:
        """End runs of requests that were cancelled, deleted, or taken by another process."""
        if not ids:
            return
        unfinished = claims.IS_WAITING | claims.IS_RUNNING
        taken = await self.leases.storage.read(claims.those_with, _ROW.id, ids, unfinished)
        for id_ in ids:
            held = self._held.get(id_)
            if id_ not in taken:
                self._end_run(id_)
            elif held is not None and held.task is not None:
                held.task.cancel()  # Its end is told by whoever runs it now.

    def _end_run(self, id_: str) -> None:
        held = self._held.get(id_)
        if held is not None and held.task is not None and not held.is_unwanted:
            held.is_unwanted = True
            held.task.cancel()

    def _give_back_waiting(self) -> None:
        """Let others run what has been at no node yet: this process is to end.

        Requests whose clients wait here stay.
        """
        for id_, held in self._held.items():
            has_client = id_ in self.requests.waited_for
            has_begun = id_ not in self.runner.registry or self.runner.has_begun(id_)
            if held.task is not None and not (has_begun or has_client or held.task.cancelling()):
                held.task.cancel()

    # One request.

    async def _run(self, held: HeldRequest, body: bytes | None) -> None:
        """Run a request and record its result. Raises: RowDeferred, RunFailed."""
        row = held.row
        if body is None:
            result = _failed(row, not_found(row.id, row.kind).code)
        elif row.kind is RequestKind.RESPONSE:
            result = await self._respond(held, body)
        else:
            result = await self._defer(row, body)
        while not held.is_unwanted:
            try:
                await self._record(row, result)
            except (StoreError, FolderError) as error:
                log.warning("a background result waits for the store", why=str(error))
                await asyncio.sleep(STORE_SECONDS)
            else:
                return

    async def _cancelled(self, held: HeldRequest) -> None:
        """The run was cancelled: the request has ended, or another run follows."""
        row, found = held.row, None
        if not held.is_unwanted:
            self.leases.put_back([row.id], 0.0)
            return
        # Wherever its run was: nobody else writes its end, as its row tells it.
        with contextlib.suppress(GatewayError):
            found = await self.requests.find(row.owner, row.id, row.kind)
        if found is None or not found.state.ended:
            found = replace(row, state=RequestState.CANCELLED)
        await self.requests.settle(found)

    def _let_go(self, held: HeldRequest) -> None:
        super()._let_go(held)
        self._look_again_at = 0.0  # Its result takes room.
        self.requests.has_ended(held.row.id)
        self.requests.wakes.set()

    async def _respond(self, held: HeldRequest, body: bytes) -> RecordedResult:
        """Run a response; its events go to its log. Raises: RowDeferred, RunFailed."""
        row = held.row
        assert row.result_place is not None
        try:
            events = await ResponseEvents.reopen(
                self.requests.logs, row.result_place, self.now,
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
    ) -> RecordedResult:
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
            usage = self.runner.recovered_usage(row, events.run_end, tokens, self.nodes())
        return RecordedResult(row.id, state, status, code, events.name, 0, events.size, usage, end)

    async def _defer(self, row: StoredRow, body: bytes) -> RecordedResult:
        """Run a deferred request, and keep its response. Raises: RowDeferred, RunFailed."""
        try:
            outcome = await self.runner.run(row, body)
        except RowExpired:
            return RecordedResult(row.id, RequestState.EXPIRED, 504, "queue_timeout")
        _check_failed(row, outcome)
        head = DeferredHead(outcome.status, outcome.header_lines.decode("latin-1"), row.id)
        data = msgspec.json.encode(head) + b"\n" + outcome.content
        try:
            folder = self.leases.storage.folder
            name = await self.leases.storage.threads.run(folder.write_new, ANSWER, data)
        except FolderError as error:
            raise RowDeferred(str(error), LEASE_SECONDS) from None
        state = RequestState.DONE if outcome.status < 400 else RequestState.FAILED
        return RecordedResult(
            row.id, state, outcome.status, outcome.error_code, name, 0, len(data), outcome.usage
        )

    async def _record(self, row: StoredRow, result: RecordedResult) -> None:
        """Record a result. Raises: StoreError."""
        counts: list[str] = []

        def recording(connection: Connection) -> Sequence[UsageRow]:
            now = self.now()
            counts[:] = claims.record(connection, self.leases.process.id, [result], now)
            kept_longer = update(stored_requests).where(_ROW.id.in_(counts))
            kept_longer = kept_longer.values(keep_until=now + keep_seconds(row))
            for kept in claims.ROWS.changed(connection, kept_longer):
                if result.end is not None:
                    self.requests.webhooks.response_ended(connection, kept, result.end, now)
            return [result.usage] if counts and result.usage is not None else []

        await self.ledger.write_with(recording)
        place = result.result_place
        if not counts and row.kind is RequestKind.DEFERRED and place is not None:
            with contextlib.suppress(FolderError):
                await self.leases.storage.delete(place)


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


def _failed(row: StoredRow, code: str) -> RecordedResult:
    what = row.id, RequestState.FAILED, 500, code
    if row.kind is not RequestKind.RESPONSE:
        return RecordedResult(*what)
    return RecordedResult(*what, row.result_place, 0, row.result_length or 0, end="failed")
