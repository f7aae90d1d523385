"""Meters requests: each is admitted within its limits, settled by what it used, and recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.callers.ledger import UNKNOWN_TIMES, OpenRequest, UsageRow
from gateway.callers.limits import Accounts, LimitBook, Reservation
from gateway.events import EventBus, RequestRecord
from gateway.lease import LeaseRequest

Whose = tuple[str, str | None, str | None]  # of a request: key, group and end user
# A request that was admitted so much later than it can have been: the clock was set back.
CLOCK_STEP_SECONDS = 1.0


@dataclass(eq=False)
class Meter:
    """What the handler calls when a request is admitted, and when it has ended.

    `process` and `add_row` are the ledger's; without them nothing is recorded. `tokens_so_far`: of
    the request with this id. `gpu_cost`: what a model's prompt, cached and completion tokens would
    have cost on the GPU tier. `slot_seconds_so_far`: of the request with this id; `cost_of_use`: of
    prompt and completion tokens and slot seconds on the node of this name. `wall_clock` gives Unix
    time.
    """

    book: LimitBook
    bus: EventBus
    process: str = ""
    add_row: Callable[[UsageRow], None] | None = None
    tokens_so_far: Callable[[str], tuple[int, int]] = lambda _: (0, 0)
    gpu_cost: Callable[[str, int, int, int], float | None] = lambda *_: None
    slot_seconds_so_far: Callable[[str], float] = lambda _: 0.0
    cost_of_use: Callable[[str | None, int, int, float], float] = lambda *_: 0.0
    wall_clock: Callable[[], float] = time.time
    _open: dict[str, tuple[Reservation, RequestRecord]] = field(default_factory=dict, init=False)
    """The requests that run, by their ids, the oldest first."""

    def admit(
        self, accounts: Accounts, request: LeaseRequest, record: RequestRecord, prompts: int = 1
    ) -> Reservation:
        """Admit a request, which has so many prompts, or refuse it. Raises: GatewayError.

        Each admitted request must be reported to `ended`.
        """
        reservation = self.book.reserve(accounts, request, self.wall_clock(), prompts)
        self._open[request.id] = reservation, record
        return reservation

    def adopt(
        self,
        accounts: Accounts,
        request: LeaseRequest,
        record: RequestRecord,
        prompts: int,
        age: float,
    ) -> Reservation:
        """Take over a request that another process admitted `age` seconds ago."""
        admitted_at = self.wall_clock() - age
        reservation = self.book.adopt(accounts, request, admitted_at, prompts)
        self._open[request.id] = reservation, record
        return reservation

    def leave(self, reservation: Reservation) -> None:
        """An admitted request goes on in another process, which records it."""
        self._open.pop(reservation.request.id, None)
        self.dropped(reservation)

    def released(self, reservation: Reservation) -> None:
        """The response has ended, and another request may run; `ended` follows."""
        reservation.release(self.wall_clock())

    def ended(self, reservation: Reservation, record: RequestRecord) -> None:
        """The response has ended. Its record is published when what it used is known, soon."""
        reservation.release(self.wall_clock())
        self.bus.defer(self._publish, reservation, record)

    # Stored requests: their usage is recorded with their result, by those who run them.

    def admit_stored(
        self, accounts: Accounts, request: LeaseRequest, prompts: int = 1
    ) -> Reservation:
        """Admit a stored request, or refuse it. Raises: GatewayError.

        It must be reported to `ended_stored` or `dropped`. No journal has it while it runs: if the
        process dies it is run again, under the same id, and what it took costs its caller nothing.
        """
        return self.book.reserve(accounts, request, self.wall_clock(), prompts)

    def ended_stored(
        self, reservation: Reservation, record: RequestRecord, deliver: Callable[[UsageRow], None]
    ) -> None:
        """The response has ended; `deliver` gets its row in place of the ledger, a little later."""
        reservation.release(self.wall_clock())
        self.bus.defer(record.when_complete, self._settle, reservation, record, deliver)

    def dropped(self, reservation: Reservation) -> None:
        """A stored request has no result and is run again: it costs its caller nothing."""
        reservation.settle(0, 0.0, self.wall_clock())

    def cost_so_far(
        self, request_id: str, node: str | None, prompt: int, completion: int
    ) -> tuple[float, float]:
        """Slot seconds and cost of the request with this id, which runs, with so many tokens."""
        seconds = self.slot_seconds_so_far(request_id)
        return seconds, self.cost_of_use(node, prompt, completion, seconds)

    def recovered_row(
        self,
        request_id: str,
        whose: Whose,
        times: tuple[float, float],
        record: RequestRecord,
        accounts: Accounts | None,
    ) -> UsageRow:
        """The ledger's row of a stored request whose process ended before it could record it.

        `times`: when it began and ended, Unix time.
        """
        prompt, completion = record.prompt_tokens, record.completion_tokens
        if accounts is not None:
            self.book.count_recovered(accounts, prompt + completion, record.cost, times[1])
        rest = self._rest_of_row(record, record.model, prompt, completion)
        return (request_id, self.process, *times, *whose, *rest, *UNKNOWN_TIMES)

    def open_requests(self, before: float, but: Mapping[str, object]) -> Iterator[OpenRequest]:
        """The requests that run and were admitted before this Unix time, for the ledger.

        Without those of which `but` has something. Requests may begin and end while the ledger
        walks over them.
        """
        for id_, (reservation, record) in list(self._open.items()):
            if id_ not in self._open or but.get(id_) is not None:
                continue
            if before < reservation.admitted_at <= before + CLOCK_STEP_SECONDS:
                # Those behind it are younger still.
                break
            accounts = reservation.accounts
            prompt, completion = self.tokens_so_far(id_)
            slot_seconds, cost = self.cost_so_far(id_, record.node, prompt, completion)
            yield OpenRequest(
                id=id_,
                started_at=reservation.admitted_at,
                key=accounts.caller.id,
                group=accounts.caller.group,
                user=accounts.user,
                model=record.model,
                class_=record.priority.label,
                tier=record.tier,
                node=record.node,
                path=record.path,
                stream=record.stream,
                reserved_tokens=reservation.tokens,
                reserved_cost=reservation.cost,
                prompt_tokens=prompt,
                completion_tokens=completion,
                slot_seconds=slot_seconds,
                cost=cost,
            )

    def _publish(self, reservation: Reservation, record: RequestRecord) -> None:
        try:
            record.when_complete(self._settle, reservation, record, None)
        finally:
            self.bus.tell(record)

    def _settle(
        self,
        reservation: Reservation,
        record: RequestRecord,
        deliver: Callable[[UsageRow], None] | None,
    ) -> None:
        """Count what a request has used, and record it; `deliver`: of a stored request."""
        request, ended_at = reservation.request, reservation.ended_at
        assert ended_at is not None
        if deliver is None:
            # Not there: it was taken for lost and came again, and that has ended before.
            self._open.pop(request.id, None)
            deliver = self.add_row
        if request.size.slots:
            prompt, completion = record.prompt_tokens, record.completion_tokens
        else:
            # Token counts and the like: what they are told is no use of a node's slots.
            prompt = completion = 0
        reservation.settle(prompt + completion, record.cost, ended_at)
        if deliver is not None:
            accounts = reservation.accounts
            caller = accounts.caller
            deliver(
                (
                    request.id, self.process, reservation.admitted_at, ended_at, caller.id,
                    caller.group, accounts.user,
                    *self._rest_of_row(record, request.wanted.model, prompt, completion),
                    record.queue_seconds, record.ttft, record.prefill_seconds,
                    record.decode_seconds, record.resumptions,
                    None if record.x_request_id == request.id else record.x_request_id,
                )
            )  # fmt: skip

    def _rest_of_row(
        self, record: RequestRecord, model: str, prompt: int, completion: int
    ) -> tuple[Any, ...]:
        """The columns of `ROW_COLUMNS` from `model` to `outcome`; `model`: as it was asked for."""
        return (
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
            self.gpu_cost(model, prompt, record.cached_tokens, completion)
            if prompt or completion
            else 0.0,
            record.attempts,
            record.status,
            record.reason or "ok",
        )
