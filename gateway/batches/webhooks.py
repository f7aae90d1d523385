"""Delivers events to webhooks, again and again for a day, at least once, in any of the processes.

Deliveries are rows of the store. A process claims one by moving its next attempt behind the time
limit of this one, so one that is killed in between loses nothing: the event is then sent again,
with the same `webhook-id`. Receivers share nothing but a number of attempts at one time, of which
each may have a few, and one alone while it fails: a slow one delays nobody else's events.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from gateway.batches.webhook_post import PostResult, WebhookPoster
from gateway.batches.webhook_rows import (
    ClaimDeliveries,
    Delivery,
    DeliveryState,
    WaitingOrigin,
    end_delivery,
    put_back_deliveries,
    remove_ended,
    retry_delivery,
    waiting_origins,
)
from gateway.batches.webhook_targets import WebhookTargets
from gateway.config.webhooks import WebhookSettings, WebhookUrl
from gateway.events import EventBus, WebhookAttempted
from gateway.store.failures import StoreError
from gateway.store.store import Store

RETRY_DELAYS = (5.0, 30.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0)
"""Seconds between the attempts, about as Standard Webhooks proposes; the last is repeated."""

JITTER = 0.2
"""Share by which a delay is made longer or shorter, at random."""

LEAST_ATTEMPTS = 3
"""An event is not given up before, though the gateway was down for longer than `give_up`."""

LONGEST_RETRY_AFTER = 3600.0
"""Seconds for which a receiver is left alone at most because of its `Retry-After`."""

MOST_ATTEMPTS = 64
"""At one time in a process."""

MOST_OF_ORIGIN = 4
"""Of these, those of receivers with one origin; one alone after it has failed."""

POLL_SECONDS = 1.0
"""Between two looks for what other processes have added, or what is due."""

IDLE_SECONDS = 30.0
"""The same where the settings have no receiver: only what was added before can wait."""

LEASE_MARGIN = 15.0
"""Seconds beyond an attempt's time limit in which its outcome is recorded."""

STORE_PAUSE = 1.0
"""Seconds until an outcome is recorded again, when the store has failed."""

KEPT_SECONDS = 86400.0
"""For which ended deliveries stay in the store, where an operator may look at them."""

REMOVE_SECONDS = 3600.0
"""Between two removals of those."""

MOST_REMOVED = 1000
"""Rows that one transaction removes."""

CLOSE_SECONDS = 2.0
"""For attempts that are under way when the gateway ends; and then for giving them back."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When an event is tried again. `uniform` gives a number between 0 and 1 at random."""

    delays: Sequence[float] = RETRY_DELAYS
    uniform: Callable[[], float] = random.random

    def next_attempt(
        self, delivery: Delivery, now: float, give_up: float, retry_after: float | None = None
    ) -> float | None:
        """When, after the attempt that has just failed; None: it is given up.

        The last attempt is just when the time is over.
        """
        last = delivery.created_at + give_up
        if now >= last and delivery.attempts >= LEAST_ATTEMPTS:
            return None
        delay = self.delays[min(delivery.attempts, len(self.delays)) - 1]
        delay *= 1 + JITTER * (2 * self.uniform() - 1)
        if retry_after is not None:
            delay = max(delay, min(retry_after, LONGEST_RETRY_AFTER))
        return now + delay if now >= last else min(now + delay, last)


class WebhookSender:
    """Sends what waits. `settings` gives those in force, `now` Unix seconds."""

    def __init__(
        self,
        store: Store,
        targets: WebhookTargets,
        settings: Callable[[], WebhookSettings],
        poster: WebhookPoster,
        bus: EventBus,
        *,
        policy: RetryPolicy | None = None,
        now: Callable[[], float] = time.time,
        poll_seconds: float = POLL_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
        recorded: Callable[[], int] | None = None,
    ) -> None:
        """`recorded`: how many deliveries this process has added; None: that is not known."""
        self.waiting = 0
        """Deliveries that wait in the store, of all processes, when it was last looked at."""
        self._store = store
        self._targets = targets
        self._settings = settings
        self._poster = poster
        self._bus = bus
        self._policy = policy or RetryPolicy()
        self._now = now
        self._poll_seconds = poll_seconds
        self._close_seconds = close_seconds
        self._recorded = recorded
        self._none_since: tuple[int, int] | None = None
        """The changes of the store and `recorded` before the look that found nothing."""
        self._next_look = 0.0
        """When to look though nothing is new."""
        self._woken = asyncio.Event()
        self._running: dict[asyncio.Task[None], Delivery] = {}
        self._of_origin: Counter[str] = Counter()
        """Attempts that are under way."""
        self._failing: set[str] = set()
        """Origins whose last attempt has failed. Few: those of the settings' targets."""
        self._paused: dict[str, float] = {}
        """Origins that have asked to be left alone until this time."""
        self._next_removal = 0.0

    def wake(self) -> None:
        """There is something new to be delivered."""
        self._woken.set()

    async def run(self) -> None:
        """Deliver until cancelled."""
        try:
            while True:
                self._woken.clear()
                try:
                    next_at = (
                        await self._look() if self._may_have() else self._now() + self._pause(0)
                    )
                except StoreError:
                    # It tells of its failures itself. What waits in it stays there.
                    next_at = self._now() + self._poll_seconds
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(max(0.01, next_at - self._now()), IDLE_SECONDS)):
                        await self._woken.wait()
        finally:
            await self._close()

    def _news(self) -> tuple[int, int] | None:
        return None if self._recorded is None else (self._store.changes, self._recorded())

    def _may_have(self) -> bool:
        """Whether something may be there to be delivered."""
        nothing = self._none_since is not None and self._none_since == self._news()
        return not nothing or self._now() >= self._next_look

    def _pause(self, waiting: int) -> float:
        """Seconds until the next look, of which `wake` may take some."""
        idle = not self._settings().targets and not waiting
        return IDLE_SECONDS if idle else self._poll_seconds

    async def _look(self) -> float:
        """Begin what is due and has a place; returns when to look again at the latest."""
        now = self._now()
        if now >= self._next_removal:
            await self._remove_ended(now)
        news = self._news()  # before the look: what comes after it is new
        origins = await self._store.run(waiting_origins, write=False)
        self._none_since = None if origins else news
        self._next_look = now + IDLE_SECONDS
        self.waiting = sum(origin.number for origin in origins)
        places = self._places(origins, now)
        if places:
            await self._begin(ClaimDeliveries(places, now, self._lease_end(now)))
        return now + self._pause(len(origins))

    def _places(self, origins: Sequence[WaitingOrigin], now: float) -> dict[str, int]:
        """How many deliveries of which origin may begin now."""
        self._paused = {origin: end for origin, end in self._paused.items() if end > now}
        free = MOST_ATTEMPTS - len(self._running)
        places: dict[str, int] = {}
        # The one that has waited for longest comes first.
        for origin, _, next_at in origins:
            if next_at > now or origin in self._paused:
                continue
            most = 1 if origin in self._failing else MOST_OF_ORIGIN
            number = min(most - self._of_origin[origin], free)
            if number > 0:
                places[origin] = number
                free -= number
        return places

    def _lease_end(self, now: float) -> float:
        return now + self._settings().timeout + LEASE_MARGIN

    async def _begin(self, claim: ClaimDeliveries) -> None:
        for delivery in await self._store.run(claim):
            task = asyncio.create_task(
                self._attempt(delivery, claim.until), name=f"deliver {delivery.id}"
            )
            self._running[task] = delivery
            self._of_origin[delivery.origin] += 1
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        delivery = self._running.pop(task)
        self._of_origin[delivery.origin] -= 1
        if not self._of_origin[delivery.origin]:
            del self._of_origin[delivery.origin]
        if not task.cancelled() and (error := task.exception()) is not None:
            # It is due again when its lease ends.
            log.error("webhook", delivery=delivery.id, error=repr(error))
        self._woken.set()

    async def _attempt(self, delivery: Delivery, until: float) -> None:
        settings = self._settings()
        url = WebhookUrl.parse(delivery.url)
        target = self._targets.target_of(delivery.owner, delivery.group_name, url)
        if target is None:
            result = PostResult(None, "no target of the settings covers its URL any more")
        else:
            result = await self._poster.post(
                target, url, delivery.id, delivery.body, settings.timeout
            )
        now = self._now()
        if result.error is None:
            self._failing.discard(delivery.origin)
            await self._end(delivery, DeliveryState.DELIVERED, result, until)
            return
        if target is not None:
            self._failing.add(delivery.origin)
        if result.retry_after:
            pause = min(result.retry_after, LONGEST_RETRY_AFTER)
            self._paused[delivery.origin] = now + pause
        if result.status == 410:
            await self._end(delivery, DeliveryState.REFUSED, result, until)
            return
        next_at = self._policy.next_attempt(delivery, now, settings.give_up, result.retry_after)
        if next_at is None:
            await self._end(delivery, DeliveryState.GIVEN_UP, result, until)
        else:
            await self._retry(delivery, next_at, result, until)

    async def _end(
        self, delivery: Delivery, state: DeliveryState, result: PostResult, until: float
    ) -> None:
        now = self._now()
        await self._record(
            lambda connection: end_delivery(connection, delivery, state, now, result.error), until
        )
        self._bus.publish(WebhookAttempted(state.value))
        tell = log.info if state is DeliveryState.DELIVERED else log.warning
        tell("webhook", **self._described(delivery, state.value, result))

    async def _retry(
        self, delivery: Delivery, next_at: float, result: PostResult, until: float
    ) -> None:
        await self._record(
            lambda connection: retry_delivery(connection, delivery, next_at, result.error), until
        )
        self._bus.publish(WebhookAttempted("failed"))
        seconds = round(next_at - self._now(), 1)
        log.warning("webhook", **self._described(delivery, "failed", result), retry_in=seconds)

    def _described(
        self, delivery: Delivery, outcome: str, result: PostResult
    ) -> dict[str, str | int]:
        """What a log line says: never the URL's path, which may be a secret."""
        described: dict[str, str | int] = {
            "outcome": outcome,
            "delivery": delivery.id,
            "type": delivery.event,
            "object": delivery.object_id,
            "receiver": delivery.origin,
            "attempt": delivery.attempts,
        }
        if result.error is not None:
            described["why"] = result.error
        return described

    async def _record(self, job: Callable[..., None], until: float) -> None:
        """Do a job of the store, again until the lease ends: then others try the delivery anyway.

        Raises: StoreError.
        """
        while True:
            try:
                await self._store.run(job)
            except StoreError:
                if self._now() + STORE_PAUSE >= until:
                    raise
                await asyncio.sleep(STORE_PAUSE)
            else:
                return

    async def _remove_ended(self, now: float) -> None:
        before = now - KEPT_SECONDS
        while await self._store.run(lambda c: remove_ended(c, before, MOST_REMOVED)) > 0:
            pass
        self._next_removal = now + REMOVE_SECONDS

    async def _close(self) -> None:
        """Let attempts end, or give them to other processes."""
        if not self._running:
            return
        await asyncio.wait(self._running, timeout=self._close_seconds)
        left, tasks = list(self._running.values()), list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if left:
            now = self._now()
            with contextlib.suppress(StoreError):
                await self._store.run(
                    lambda connection: put_back_deliveries(connection, left, now),
                    seconds=CLOSE_SECONDS,
                )
