"""Events of batches, responses and quotas, delivered to webhooks for a day, at least once.

A caller can name a URL, and so let the gateway, which stands in a network of trust, send requests.
So only URLs at or below one of the settings' targets are taken, and only if every address of the
host is public, unless the target says otherwise. The connection goes to an address that was
checked, not to the name, which could have another address by then (DNS rebinding); `Host` and the
certificate's name are those of the URL. No redirect is followed and no proxy of the environment is
used. Nothing of the answer but its status and `Retry-After` is of interest, and no more than a few
kilobytes of it are read.

A delivery is a row of the store, added within the transaction that ends its object: none is lost
and none is told too early. Its ids come of what it tells and where, so it is added once. A process
claims a delivery by moving its next attempt behind the time limit of this one. If it is killed in
between, the event is sent again, with the same `webhook-id`. Receivers share nothing but a number
of attempts at one time, of which each may have a few, and one alone while it fails: a slow one
delays nobody else's events.

    end_batch(connection, ..., also=webhook_events.batch_ended)
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpcore  # noqa: F401 - httpx would import it on the event loop: 30 ms
import httpx
import structlog
from sqlalchemy import Connection, case, delete, func, literal_column, select, update

from gateway import __version__
from gateway.api.outcome import retry_after_seconds
from gateway.callers.limits import UsedQuota
from gateway.config.stored import (
    QUOTA_EVENTS,
    WebhookSettings,
    WebhookTarget,
    WebhookUrl,
    secret_bytes,
)
from gateway.errors import GatewayError
from gateway.events import EventBus, WebhookAttempted
from gateway.store.database import Rows, insert_for
from gateway.store.failures import StoreError
from gateway.store.schema import webhook_deliveries as deliveries
from gateway.store.store import Store, woken
from gateway.stored.batch_rows import Batch
from gateway.stored.claims import ResponseEnd, StoredRow, unlocked
from gateway.stored.folder import job
from gateway.transport.errors import ConnectFailed
from gateway.transport.resolver import Resolver

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class WebhookTargets:
    """The receivers of the settings in force, which `settings` gives. Any thread may ask."""

    settings: Callable[[], WebhookSettings]

    def check(self, owner: str, group: str | None, url: object) -> str:
        """A `webhook_url` that a request of this key names, in the form that is to be stored.

        Raises: GatewayError (400).
        """
        if not isinstance(url, str):
            raise _refused("must be a string, the URL of a webhook.")
        try:
            parsed = WebhookUrl.parse(url)
        except ValueError as error:
            raise _refused(f"{error}.") from None
        if self.target_of(owner, group, parsed) is None:
            # Which URLs there are is the operator's secret.
            raise _refused(
                "is no URL that this gateway sends events of this key to: ask its operator to add "
                "it to webhooks.targets in the settings.",
                "webhook_url_not_allowed",
            )
        return str(parsed)

    def receivers(
        self, owner: str, group: str | None, event: str, named: str | None = None
    ) -> list[WebhookUrl]:
        """Where an event of this key goes; `named` is the `webhook_url` of its request.

        Never raises: it must not keep an object from ending.
        """
        found = [
            target.parsed_url
            for target in self.settings().targets
            if not target.named_only and target.is_for(owner, group) and target.wants(event)
        ]
        with contextlib.suppress(ValueError):
            # The settings may have changed since the request came.
            url = WebhookUrl.parse(named or "")
            target = self.target_of(owner, group, url)
            if target is not None and target.wants(event):
                found.append(url)
        return list(dict.fromkeys(found))

    def target_of(self, owner: str, group: str | None, url: WebhookUrl) -> WebhookTarget | None:
        """The target whose secrets sign events of this key for the URL; None: there is none now."""
        covering = [
            target
            for target in self.settings().targets
            if target.is_for(owner, group) and target.parsed_url.covers(url)
        ]
        return max(covering, key=lambda target: len(target.parsed_url.path), default=None)


def _refused(why: str, code: str = "invalid_request") -> GatewayError:
    return GatewayError(400, code, f"'webhook_url' {why}", param="webhook_url", retryable=False)


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
LAST_32_BITS = 0xFFFFFFFF


def address_problem(text: str, target: WebhookTarget, scheme: str) -> str | None:
    """Why events for the target must not be sent to this address; None: they may."""
    try:
        address = embedded_address(ipaddress.ip_address(text))
    except ValueError:
        return "is no address"
    # IPv6 has its loopback address among those that are reserved.
    reserved = address.is_reserved and not address.is_loopback
    # A cloud's credentials are at a link-local address.
    if reserved or address.is_link_local or address.is_multicast or address.is_unspecified:
        return "is reserved for other uses"
    # Python's module takes the site-local ones for global.
    if not address.is_global or getattr(address, "is_site_local", False):
        return None if target.allow_private else "is private or loopback"
    if scheme == "http" and not target.allow_http:
        return "is public, and http is allowed to private ones only"
    return None


def embedded_address(address: Address) -> Address:
    """The IPv4 address that packets to this IPv6 address end up at, or else itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    number = int(address)
    # `::1` and `::` are IPv6's own.
    if address in _NAT64 or (address in _COMPATIBLE and number > 0xFFFF):
        return ipaddress.IPv4Address(number & LAST_32_BITS)
    return address


# Bytes of an answer's body that are read, so that its sender is not cut off at once.
MOST_READ = 4096
READ_SECONDS = 1.0  # for that body: the status is known, so it changes nothing
_USER_AGENT = f"llama-gateway/{__version__}"


@dataclass(frozen=True, slots=True)
class PostResult:
    """What became of an attempt."""

    status: int | None  # of the answer; None: there was none
    error: str | None = None
    """Why it has failed, without URL and answer; None: the event is delivered."""
    retry_after: float | None = None  # seconds that the receiver asks to be left alone for


def signatures(secrets: Sequence[str], id_: str, timestamp: int, body: str) -> str:
    """The field `webhook-signature` of Standard Webhooks: a signature by each secret `whsec_...`.

    By hand, since it is these few lines; tests verify it by the published library and by OpenAI's.
    """
    signed = f"{id_}.{timestamp}.{body}".encode()
    digests = (hmac.digest(secret_bytes(secret), signed, hashlib.sha256) for secret in secrets)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


@dataclass(slots=True, eq=False)
class WebhookPoster:
    """Posts events."""

    resolver: Resolver
    now: Callable[[], float]  # Unix seconds
    _trusted: dict[Path | None, tuple[tuple[int, int], ssl.SSLContext]] = field(
        default_factory=dict
    )
    """By the file of certificate authorities, with its time and size when it was read."""

    async def post(
        self, target: WebhookTarget, url: WebhookUrl, id_: str, body: str, timeout: float
    ) -> PostResult:
        """Try once, for `timeout` seconds at most."""
        try:
            async with asyncio.timeout(timeout) as limit:
                return await self._try(target, url, id_, body, limit, timeout)
        except TimeoutError:
            return PostResult(None, f"no answer within {timeout:g} s")

    async def _try(
        self,
        target: WebhookTarget,
        url: WebhookUrl,
        id_: str,
        body: str,
        limit: asyncio.Timeout,
        timeout: float,
    ) -> PostResult:
        try:
            addresses = await self.resolver.addresses(url.host, timeout)
        except ConnectFailed as error:
            return PostResult(None, str(error))
        # One address that is not allowed is enough: such a name is not what it was listed for.
        for address in addresses:
            problem = address_problem(address, target, url.scheme)
            if problem is not None:
                return PostResult(None, f"its address {address} {problem}")
        # An http URL needs no context, but without one httpx reads the authorities of all.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if url.scheme != "http":
            known = self._trusted.get(target.ca)
            try:
                found = await asyncio.to_thread(_load_context, target.ca, known)
            except (OSError, ValueError) as error:
                why = f"its certificate authorities can't be read: {_words(error)}"
                return PostResult(None, why)
            self._trusted[target.ca], context = found, found[1]
        timestamp = int(self.now())
        secrets = [secret.get_secret_value() for secret in target.secrets]
        headers = {
            "host": url.host_field,
            "user-agent": _USER_AGENT,
            "accept": "*/*",
            "connection": "close",
            "content-type": "application/json",
            "webhook-id": id_,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signatures(secrets, id_, timestamp, body),
        }
        path, result = f"{url.path}{url.query}".encode(), PostResult(None, "it has no address")
        for address in addresses:
            to = httpx.URL(scheme=url.scheme, host=address, port=url.port, raw_path=path)
            request = httpx.Request(
                "POST", to, headers=headers, content=body.encode(),
                extensions={"sni_hostname": url.host},
            )  # fmt: skip
            try:
                return await self._send(request, context, limit)
            except httpx.ConnectError as error:
                result = PostResult(None, f"no connection to {address}: {_words(error)}")
            except httpx.TransportError as error:
                # Not its text, which may repeat what the receiver has sent.
                return PostResult(None, f"no valid answer ({type(error).__name__})")
        self.resolver.connect_failed(url.host)
        return result

    async def _send(
        self, request: httpx.Request, context: ssl.SSLContext, limit: asyncio.Timeout
    ) -> PostResult:
        async with httpx.AsyncHTTPTransport(verify=context, trust_env=False) as transport:
            response = await transport.handle_async_request(request)
            # What is known now must not be lost to a body that does not end.
            limit.reschedule(None)
            with contextlib.suppress(httpx.TransportError, TimeoutError):
                async with asyncio.timeout(READ_SECONDS):
                    assert isinstance(response.stream, httpx.AsyncByteStream)
                    read = 0
                    async for piece in response.stream:
                        read += len(piece)
                        if read >= MOST_READ:
                            break
            with contextlib.suppress(httpx.TransportError):
                await response.aclose()
        status = response.status_code
        if 200 <= status < 300:
            return PostResult(status)
        error = f"status {status}"
        if 300 <= status < 400:
            error += ", a redirect, which is not followed"
        wait = retry_after_seconds(response.headers.get("retry-after", ""), self.now())
        return PostResult(status, error, wait)


def _load_context(
    ca: Path | None, known: tuple[tuple[int, int], ssl.SSLContext] | None
) -> tuple[tuple[int, int], ssl.SSLContext]:
    stamp = (0, 0)
    if ca is not None:
        status = ca.stat()
        stamp = status.st_mtime_ns, status.st_size
    if known is not None and known[0] == stamp:
        return known
    return stamp, ssl.create_default_context(cafile=None if ca is None else str(ca))


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


LONGEST_ERROR = 200  # characters of `last_error`
QUOTA_KEPT_SECONDS = 31 * 86400.0  # for which deliveries of quotas stay beyond others


class DeliveryState(StrEnum):
    """Where a delivery is."""

    WAITING = "waiting"
    """For its next attempt, or under way: then `next_at` is behind the attempt's time limit."""
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"  # tried for too long
    REFUSED = "refused"  # the receiver wants no more (410)


@dataclass(frozen=True, slots=True)
class WebhookEvent:
    """What has happened to an object. The receiver asks for the object itself."""

    type: str  # one of `gateway.config.stored.EVENTS`
    object_id: str
    owner: str  # the id of the key that has the object
    group_name: str | None
    created_at: float  # Unix time at which it happened
    figures: Mapping[str, Any] = field(default_factory=dict)  # that go with the object's id

    def body(self) -> str:
        """What is sent, signed as it is."""
        told = {
            "object": "event",
            "id": f"evt_{_digest(self.type, self.object_id)}",
            "type": self.type,
            "created_at": int(self.created_at),
            "data": {"id": self.object_id, **self.figures},
        }
        return json.dumps(told, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one receiver."""

    id: str  # `wh_...`: the field `webhook-id`, the same in each attempt
    owner: str
    group_name: str | None
    event: str
    object_id: str
    url: str
    origin: str
    body: str
    created_at: float
    attempts: int  # attempts that have begun, the one that it is claimed for included


# A literal, as in the index: SQLite does not use it for a bound value.
_WAITS = deliveries.c.state == literal_column("'waiting'")
_DELIVERIES = Rows(Delivery, deliveries, {})


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def add_deliveries(
    connection: Connection, urls: Iterable[WebhookUrl], event: WebhookEvent, now: float
) -> list[str]:
    """Let the event be sent to each URL, from `now` on; returns the ids of the deliveries."""
    body = event.body()
    made = [
        Delivery(
            f"wh_{_digest(event.type, event.object_id, str(url))}", event.owner, event.group_name,
            event.type, event.object_id, str(url), url.origin, body, event.created_at, attempts=0,
        )
        for url in urls
    ]  # fmt: skip
    if made:
        waits = {"next_at": now, "state": DeliveryState.WAITING}
        rows = [_DELIVERIES.values(one) | waits for one in made]
        added = insert_for(connection)(deliveries).values(rows)
        connection.execute(added.on_conflict_do_nothing(index_elements=["id"]))
    return [one.id for one in made]


def waiting_origins(connection: Connection) -> list[tuple[str, int, float]]:
    """What waits: its origin, how many, when the first is due; the one due for longest is first."""
    first = func.min(deliveries.c.next_at)
    asked = select(deliveries.c.origin, func.count(), first).where(_WAITS)
    found = connection.execute(asked.group_by(deliveries.c.origin).order_by(first))
    return [(origin, number, next_at) for origin, number, next_at in found]


def claim_deliveries(
    connection: Connection, places: Mapping[str, int], now: float, until: float
) -> list[Delivery]:
    """Take due deliveries, so that no other process tries them until `until`.

    `places`: how many of each origin. Each counts as tried from now on: a process that is killed in
    an attempt has made it, as far as anybody knows.
    """
    ids: list[str] = []
    for origin, number in places.items():
        due = select(deliveries.c.id).where(
            _WAITS, deliveries.c.origin == origin, deliveries.c.next_at <= now
        )
        ids += connection.scalars(unlocked(due.order_by(deliveries.c.next_at), number))
    taken = update(deliveries).where(deliveries.c.id.in_(ids))
    taken = taken.values(next_at=until, attempts=deliveries.c.attempts + 1)
    return _DELIVERIES.changed(connection, taken)


def record_attempt(
    connection: Connection,
    delivery: Delivery,
    state: DeliveryState,
    next_at: float,
    error: str | None,
) -> None:
    """An attempt has ended so: it waits until `next_at`, or is tried no more.

    Nothing, if somebody else has begun another one; but that it was delivered holds in any case.
    """
    changed = update(deliveries).where(deliveries.c.id == delivery.id, _WAITS)
    if state is not DeliveryState.DELIVERED:
        changed = changed.where(deliveries.c.attempts == delivery.attempts)
    said = None if error is None else error[:LONGEST_ERROR]
    connection.execute(changed.values(state=state, next_at=next_at, last_error=said))


def remove_ended(connection: Connection, before: float, limit: int) -> int:
    """Remove deliveries that ended before that time, so many at most; returns how many."""
    # Those of quotas keep their quota from being told of again within its month.
    of_quota = deliveries.c.event.in_(QUOTA_EVENTS)
    least = case((of_quota, before - QUOTA_KEPT_SECONDS), else_=before)
    old = select(deliveries.c.id).where(
        deliveries.c.state != DeliveryState.WAITING, deliveries.c.next_at < least
    )
    ids = list(connection.scalars(old.limit(limit)))
    connection.execute(delete(deliveries).where(deliveries.c.id.in_(ids)))
    return len(ids)


@dataclass(slots=True, eq=False)
class WebhookEvents:
    """Records what is to be delivered. Its methods are parts of jobs of the store."""

    targets: WebhookTargets
    now: Callable[[], float]  # Unix seconds
    recorded: int = 0
    """Deliveries that jobs have added; those of a job that fails are counted, too."""

    def batch_ended(self, connection: Connection, batch: Batch) -> None:
        """A batch of either API has ended."""
        type_, ended_at = f"batch.{batch.state}", batch.ended_at
        assert ended_at is not None
        event = WebhookEvent(type_, batch.id, batch.owner, batch.group_name, ended_at)
        self._add(connection, event, batch.webhook_url)

    def response_ended(
        self, connection: Connection, row: StoredRow, end: ResponseEnd, ended_at: float
    ) -> None:
        """A response in the background has ended."""
        event = WebhookEvent(f"response.{end}", row.id, row.owner, row.group_name, ended_at)
        self._add(connection, event, row.webhook_url)

    def quota_used(self, connection: Connection, quota: UsedQuota, name: str | None) -> None:
        """A quota is nearly, or quite, used up; `name`: of the key, if it is a key's."""
        one = quota.standing
        type_ = "quota.spent" if quota.spent else "quota.near"
        key, group = (quota.id if one.kind == kind else None for kind in ("key", "group"))
        figures = {**one.as_json(), "key": key, "name": name, "group": group}
        event = WebhookEvent(type_, quota.name, key or "", group, self.now(), figures)
        self._add(connection, event, None)

    def _add(self, connection: Connection, event: WebhookEvent, named: str | None) -> None:
        urls = self.targets.receivers(event.owner, event.group_name, event.type, named)
        self.recorded += len(add_deliveries(connection, urls, event, self.now()))


# Seconds between the attempts, about as Standard Webhooks proposes; the last is repeated.
RETRY_DELAYS = (5.0, 30.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0)
JITTER = 0.2  # share by which a delay is made longer or shorter, at random
# An event is not given up before, though the gateway was down for longer than `give_up`.
LEAST_ATTEMPTS = 3
# Seconds for which a receiver is left alone at most because of its `Retry-After`.
LONGEST_RETRY_AFTER = 3600.0
MOST_ATTEMPTS = 64  # at one time in a process
MOST_OF_ORIGIN = 4  # of these, those of receivers with one origin; one alone after it has failed
POLL_SECONDS = 1.0  # between two looks for what other processes have added, or what is due
# The same where the settings have no receiver: only what was added before can wait.
IDLE_SECONDS = 30.0
LEASE_MARGIN = 15.0  # seconds beyond an attempt's time limit in which its outcome is recorded
# For which ended deliveries stay in the store, where an operator may look at them.
KEPT_SECONDS = 86400.0
REMOVE_SECONDS = 3600.0  # between two removals of those
MOST_REMOVED = 1000  # rows that one transaction removes
CLOSE_SECONDS = 2.0  # for attempts that are under way when the gateway ends
log = structlog.get_logger()


def next_attempt(
    delivery: Delivery,
    now: float,
    give_up: float,
    retry_after: float | None = None,
    *,
    delays: Sequence[float] = RETRY_DELAYS,
    uniform: Callable[[], float] = random.random,
) -> float | None:
    """When an event is tried again after the attempt that has just failed; None: it is given up.

    The last attempt is just when the time is over. `uniform` gives a number between 0 and 1.
    """
    last = delivery.created_at + give_up
    if now >= last and delivery.attempts >= LEAST_ATTEMPTS:
        return None
    delay = delays[min(delivery.attempts, len(delays)) - 1]
    delay *= 1 + JITTER * (2 * uniform() - 1)
    if retry_after is not None:
        delay = max(delay, min(retry_after, LONGEST_RETRY_AFTER))
    return now + delay if now >= last else min(now + delay, last)


@dataclass(slots=True, eq=False)
class WebhookSender:
    """Sends what waits. `settings` gives those in force, `now` Unix seconds.

    `recorded`: how many deliveries this process has added; None: that is not known.
    """

    store: Store
    targets: WebhookTargets
    settings: Callable[[], WebhookSettings]
    poster: WebhookPoster
    bus: EventBus
    _: KW_ONLY
    delays: Sequence[float] = RETRY_DELAYS
    now: Callable[[], float] = time.time
    poll_seconds: float = POLL_SECONDS
    close_seconds: float = CLOSE_SECONDS
    recorded: Callable[[], int] | None = None
    waiting: int = 0
    """Deliveries that wait in the store, of all processes, when it was last looked at."""
    _none_since: tuple[int, int] | None = None
    """The changes of the store and `recorded` before the look that found nothing."""
    _next_look: float = 0.0  # when to look though nothing is new
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _running: dict[asyncio.Task[None], Delivery] = field(default_factory=dict)
    _failing: set[str] = field(default_factory=set)
    """Origins whose last attempt has failed. Few: those of the settings' targets."""
    _paused: dict[str, float] = field(default_factory=dict)
    """Origins that have asked to be left alone until this time."""
    _next_removal: float = 0.0

    def wake(self) -> None:
        """There is something new to be delivered."""
        self._woken.set()

    async def run(self) -> None:
        """Deliver until cancelled."""
        try:
            while True:
                nothing = self._none_since is not None and self._none_since == self._news()
                try:
                    if nothing and self.now() < self._next_look:
                        next_at = self.now() + self._pause(0)
                    else:
                        next_at = await self._look()
                except StoreError:
                    # It tells of its failures itself. What waits in it stays there.
                    next_at = self.now() + self.poll_seconds
                await woken(self._woken, min(max(0.01, next_at - self.now()), IDLE_SECONDS))
        finally:
            # Attempts may end; others try again what does not, when its lease is over.
            if self._running:
                await asyncio.wait(self._running, timeout=self.close_seconds)
            for task in (tasks := list(self._running)):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _news(self) -> tuple[int, int] | None:
        return None if self.recorded is None else (self.store.changes, self.recorded())

    def _pause(self, waiting: int) -> float:
        """Seconds until the next look, of which `wake` may take some."""
        idle = not self.settings().targets and not waiting
        return IDLE_SECONDS if idle else self.poll_seconds

    async def _look(self) -> float:
        """Begin what is due and has a place; returns when to look again at the latest."""
        now = self.now()
        if now >= self._next_removal:
            old = job(remove_ended, now - KEPT_SECONDS, MOST_REMOVED)
            while await self.store.run(old) > 0:
                pass
            self._next_removal = now + REMOVE_SECONDS
        news = self._news()  # before the look: what comes after it is new
        origins = await self.store.run(waiting_origins, write=False)
        self._none_since = None if origins else news
        self._next_look = now + IDLE_SECONDS
        self.waiting = sum(number for _, number, _ in origins)
        places = self._places(origins, now)
        if places:
            until = now + self.settings().timeout + LEASE_MARGIN
            for delivery in await self.store.run(job(claim_deliveries, places, now, until)):
                task = asyncio.create_task(self._attempt(delivery), name=f"deliver {delivery.id}")
                self._running[task] = delivery
                task.add_done_callback(self._ended)
        return now + self._pause(len(origins))

    def _places(self, origins: Sequence[tuple[str, int, float]], now: float) -> dict[str, int]:
        """How many deliveries of which origin may begin now."""
        self._paused = {origin: end for origin, end in self._paused.items() if end > now}
        under_way = Counter(delivery.origin for delivery in self._running.values())
        free = MOST_ATTEMPTS - len(self._running)
        places: dict[str, int] = {}
        # The one that has waited for longest comes first.
        for origin, _, next_at in origins:
            if next_at > now or origin in self._paused:
                continue
            most = 1 if origin in self._failing else MOST_OF_ORIGIN
            number = min(most - under_way[origin], free)
            if number > 0:
                places[origin] = number
                free -= number
        return places

    def _ended(self, task: asyncio.Task[None]) -> None:
        delivery = self._running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # It is due again when its lease ends.
            log.error("webhook", delivery=delivery.id, error=repr(error))
        self._woken.set()

    async def _attempt(self, delivery: Delivery) -> None:
        settings = self.settings()
        url = WebhookUrl.parse(delivery.url)
        target = self.targets.target_of(delivery.owner, delivery.group_name, url)
        if target is None:
            result = PostResult(None, "no target of the settings covers its URL any more")
        else:
            result = await self.poster.post(
                target, url, delivery.id, delivery.body, settings.timeout
            )
        now, state = self.now(), DeliveryState.DELIVERED
        next_at: float | None = None  # None: it is tried no more
        if result.error is None:
            self._failing.discard(delivery.origin)
        else:
            if target is not None:
                self._failing.add(delivery.origin)
            if result.retry_after:
                pause = min(result.retry_after, LONGEST_RETRY_AFTER)
                self._paused[delivery.origin] = now + pause
            state = DeliveryState.REFUSED
            if result.status != 410:
                next_at = next_attempt(
                    delivery, now, settings.give_up, result.retry_after, delays=self.delays
                )
                state = DeliveryState.GIVEN_UP if next_at is None else DeliveryState.WAITING
        at = self.now() if next_at is None else next_at
        # If the store is away now, the delivery is tried again when its lease ends.
        await self.store.run(job(record_attempt, delivery, state, at, result.error))
        outcome = state.value if next_at is None else "failed"
        self.bus.publish(WebhookAttempted(outcome))
        # Never the URL's path, which may be a secret.
        told: dict[str, Any] = {} if result.error is None else {"why": result.error}
        if next_at is not None:
            told["retry_in"] = round(next_at - self.now(), 1)
        tell = log.info if result.error is None else log.warning
        tell(
            "webhook", outcome=outcome, delivery=delivery.id, type=delivery.event,
            object=delivery.object_id, receiver=delivery.origin, attempt=delivery.attempts, **told,
        )  # fmt: skip
