"""Meters requests: each is admitted within its limits, settled by what it used, and recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gateway.callers.ledger import OpenRequest, UsageRow
from gateway.callers.limits import Accounts, LimitBook, Reservation
from gateway.events import EventBus, RequestRecord
from gateway.lease import LeaseRequest

# A request that was admitted so much later than it can have been: the clock was set back.
CLOCK_STEP_SECONDS = 1.0


class TokensSoFar(NamedTuple):
    """What a request that still runs has used."""

    prompt: int
    completion: int


NO_TOKENS = TokensSoFar(0, 0)


class CostSoFar(NamedTuple):
    """What a request that still runs has cost."""

    slot_seconds: float
    cost: float


class UsedBefore(NamedTuple):
    """A stored request that an earlier process has run to its end."""

    id: str
    key: str
    group: str | None
    user: str | None
    started_at: float  # Unix time, as the next one
    ended_at: float


class MeteredRequest:
    """One admitted request."""

    __slots__ = ("accounts", "ended_at", "record", "request", "reservation")

    def __init__(
        self,
        accounts: Accounts,
        request: LeaseRequest,
        record: RequestRecord,
        reservation: Reservation,
    ) -> None:
        self.accounts = accounts
        self.request = request
        self.record = record
        self.reservation = reservation
        self.ended_at: float | None = None

    def end(self, now: float) -> None:
        """The response has ended."""
        self.ended_at = now
        self.reservation.release(now)


class Meter:
    """What the handler calls when a request is admitted, and when it has ended.

    `process` and `add_row` are the ledger's; without them nothing is recorded. `tokens_so_far`: of
    the request with this id. `gpu_cost`: what a model's prompt, cached and completion tokens would
    have cost on the GPU tier. `slot_seconds_so_far`: of the request with this id; `cost_of_use`: of
    prompt and completion tokens and slot seconds on the node of this name. `wall_clock` gives Unix
    time.
    """

    def __init__(
        self,
        book: LimitBook,
        bus: EventBus,
        *,
        process: str = "",
        add_row: Callable[[UsageRow], None] | None = None,
        tokens_so_far: Callable[[str], TokensSoFar | tuple[int, int]] = lambda _: NO_TOKENS,
        gpu_cost: Callable[[str, int, int, int], float | None] = lambda *_: None,
        slot_seconds_so_far: Callable[[str], float] = lambda _: 0.0,
        cost_of_use: Callable[[str | None, int, int, float], float] = lambda *_: 0.0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.book = book
        self._bus = bus
        self._process = process
        self._add_row = add_row
        self._tokens_so_far = tokens_so_far
        self._gpu_cost = gpu_cost
        self._slot_seconds_so_far = slot_seconds_so_far
        self._cost_of_use = cost_of_use
        self._wall_clock = wall_clock
        self._open: dict[str, MeteredRequest] = {}  # the requests that run, the oldest first

    def admit(
        self, accounts: Accounts, request: LeaseRequest, record: RequestRecord, prompts: int = 1
    ) -> MeteredRequest:
        """Admit a request, which has so many prompts, or refuse it. Raises: GatewayError.

        Each admitted request must be reported to `ended`.
        """
        reservation = self.book.reserve(accounts, request, self._wall_clock(), prompts=prompts)
        metered = MeteredRequest(accounts, request, record, reservation)
        self._open[request.id] = metered
        return metered

    def ended(self, metered: MeteredRequest, record: RequestRecord) -> None:
        """The response has ended. Its record is published when what it used is known, soon."""
        metered.end(self._wall_clock())
        self._bus.defer(self._publish, metered, record)

    # Stored requests: their usage is recorded with their result, by those who run them.

    def admit_stored(
        self, accounts: Accounts, request: LeaseRequest, record: RequestRecord, prompts: int = 1
    ) -> MeteredRequest:
        """Admit a stored request, or refuse it. Raises: GatewayError.

        It must be reported to `ended_stored` or `dropped`. No journal has it while it runs: if the
        process dies it is run again, under the same id, and what it took costs its caller nothing.
        """
        reservation = self.book.reserve(accounts, request, self._wall_clock(), prompts=prompts)
        return MeteredRequest(accounts, request, record, reservation)

    def ended_stored(
        self, metered: MeteredRequest, record: RequestRecord, deliver: Callable[[UsageRow], None]
    ) -> None:
        """The response has ended; `deliver` gets its row in place of the ledger, a little later."""
        metered.end(self._wall_clock())
        self._bus.defer(record.when_complete, self._settle, metered, deliver)

    def dropped(self, metered: MeteredRequest) -> None:
        """A stored request has no result and is run again: it costs its caller nothing."""
        now = self._wall_clock()
        metered.end(now)
        metered.reservation.settle(0, 0.0, now)

    def cost_so_far(self, request_id: str, node: str | None, tokens: TokensSoFar) -> CostSoFar:
        """What the request with this id, which runs on this node, has cost with these tokens."""
        seconds = self._slot_seconds_so_far(request_id)
        cost = self._cost_of_use(node, tokens.prompt, tokens.completion, seconds)
        return CostSoFar(seconds, cost)

    def recovered_row(
        self, used: UsedBefore, record: RequestRecord, accounts: Accounts | None
    ) -> UsageRow:
        """The ledger's row of a stored request whose process ended before it could record it."""
        prompt, completion = record.prompt_tokens, record.completion_tokens
        if accounts is not None:
            self.book.count_recovered(accounts, prompt + completion, record.cost, used.ended_at)
        return self._row(
            used.id, record.model, used.started_at, used.ended_at, used.key, used.group, used.user,
            record, prompt, completion,
        )  # fmt: skip

    def open_requests(self, before: float) -> Iterator[OpenRequest]:
        """The requests that run and were admitted before this Unix time, for the ledger.

        Requests may begin and end while the ledger walks over them.
        """
        for metered in list(self._open.values()):
            if metered.request.id not in self._open:
                continue
            reservation = metered.reservation
            if before < reservation.admitted_at <= before + CLOCK_STEP_SECONDS:
                # Those behind it are younger still.
                break
            caller, record, request = metered.accounts.caller, metered.record, metered.request
            prompt, completion = self._tokens_so_far(request.id)
            slot_seconds = self._slot_seconds_so_far(request.id)
            yield OpenRequest(
                request.id,
                reservation.admitted_at,
                caller.id,
                caller.group,
                metered.accounts.user,
                record.model,
                record.priority.label,
                record.tier,
                record.node,
                record.path,
                record.stream,
                reservation.tokens,
                reservation.cost,
                prompt,
                completion,
                slot_seconds,
                self._cost_of_use(record.node, prompt, completion, slot_seconds),
            )

    def _publish(self, metered: MeteredRequest, record: RequestRecord) -> None:
        record.when_complete(self._settle, metered)
        self._bus.tell(record)

    def _settle(
        self, metered: MeteredRequest, deliver: Callable[[UsageRow], None] | None = None
    ) -> None:
        """Count what a request has used, and record it; `deliver`: of a stored request."""
        record, reservation, request = metered.record, metered.reservation, metered.request
        ended_at = metered.ended_at
        assert ended_at is not None
        add_row = self._add_row
        if deliver is None:
            del self._open[request.id]
        else:
            add_row = deliver
        prompt, completion, cost = record.prompt_tokens, record.completion_tokens, record.cost
        if not request.size.slots:
            # Token counts and the like: what they are told is no use of a node's slots.
            prompt = completion = 0
        reservation.settle(prompt + completion, cost, ended_at)
        if add_row is None:
            return
        caller = metered.accounts.caller
        add_row(
            self._row(
                request.id, request.wanted.model, reservation.admitted_at, ended_at, caller.id,
                caller.group, metered.accounts.user, record, prompt, completion,
            )
        )  # fmt: skip

    def _row(
        self,
        request_id: str,
        model: str,
        started_at: float,
        ended_at: float,
        key: str,
        group: str | None,
        user: str | None,
        record: RequestRecord,
        prompt: int,
        completion: int,
    ) -> UsageRow:
        # Positional, in the order of `ROW_COLUMNS`: there is one for each request.
        return (
            request_id,
            self._process,
            started_at,
            ended_at,
            key,
            group,
            user,
            record.model,
            record.priority.label,
            record.tier,
            record.node,
            record.path,
            record.stream,
            prompt,
            record.cached_tokens if prompt else 0,
            completion,
            record.slot_seconds,
            record.cost,
            self._gpu_cost(model, prompt, record.cached_tokens, completion)
            if prompt or completion
            else 0.0,
            record.attempts,
            record.status,
            record.reason or "ok",
        )
