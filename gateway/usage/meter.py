"""Meters requests: each is admitted within its limits, and settled by what it has used."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.events import EventBus, RequestFinished
from gateway.lease import LeaseRequest
from gateway.usage.accounts import Accounts
from gateway.usage.limits import LimitBook, Reservation


class MeteredRequest:
    """One admitted request."""

    __slots__ = ("accounts", "ended_at", "request", "reservation")

    def __init__(self, accounts: Accounts, request: LeaseRequest, reservation: Reservation) -> None:
        self.accounts = accounts
        self.request = request
        self.reservation = reservation
        self.ended_at: float | None = None

    def end(self, now: float) -> None:
        """The response has ended."""
        self.ended_at = now
        self.reservation.release(now)


class Meter:
    """What the handler calls when a request is admitted, and when it has ended."""

    def __init__(
        self, book: LimitBook, bus: EventBus, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.book = book
        self._bus = bus
        self._wall_clock = wall_clock

    def admit(
        self, accounts: Accounts, request: LeaseRequest, record: RequestFinished, prompts: int = 1
    ) -> MeteredRequest:
        """Admit a request, which has so many prompts, or refuse it. Raises: GatewayError.

        Each admitted request must be reported to `ended`.
        """
        reservation = self.book.reserve(accounts, request, self._wall_clock(), prompts=prompts)
        return MeteredRequest(accounts, request, reservation)

    def ended(self, metered: MeteredRequest, record: RequestFinished) -> None:
        """The response has ended; what it used is known when the deferred work is done."""
        metered.end(self._wall_clock())
        self._bus.defer(self._settle, metered, record)

    def _settle(self, metered: MeteredRequest, record: RequestFinished) -> None:
        assert metered.ended_at is not None
        tokens = record.prompt_tokens + record.completion_tokens if metered.request.slots else 0
        metered.reservation.settle(tokens, record.cost, metered.ended_at)
