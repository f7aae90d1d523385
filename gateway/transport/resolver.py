"""Resolves the host names of nodes once and caches them; a resolver that hangs stops no one else.

The system's resolver can't be interrupted, and takes half a minute to give up. So each look-up has
a thread of its own, for which a caller waits only as long as its limit, and the process not at all
when it ends. Known addresses are used at once, and looked up again in the background.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import math
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gateway.transport.errors import ConnectFailed

REFRESH_AFTER = 45.0  # seconds after which a name that is in use is looked up again
LEAST_LOOKUP_INTERVAL = 1.0  # least seconds between two look-ups of a name
# Seconds after which a look-up no longer prevents another one of the same name.
LOOKUP_ABANDONED_AFTER = 120.0
MOST_LOOKUP_THREADS = 128  # look-ups at the same time; one for each name at most
MOST_ADDRESSES = 8  # addresses of one name that are tried
# Finds the addresses of a name, however long it takes. Raises: OSError, UnicodeError.
Lookup = Callable[[str], list[str]]


def system_lookup(name: str) -> list[str]:
    """Look up with the system's resolver."""
    found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Resolver:
    """The host names of all nodes. Times are the event loop's."""

    def __init__(
        self,
        look_up: Lookup = system_lookup,
        threads: int = MOST_LOOKUP_THREADS,
        *,
        refresh_after: float = REFRESH_AFTER,
        least_interval: float = LEAST_LOOKUP_INTERVAL,
        abandoned_after: float = LOOKUP_ABANDONED_AFTER,
    ) -> None:
        self._look_up = look_up
        self._refresh_after = refresh_after
        self._least_interval = least_interval
        self._abandoned_after = abandoned_after
        self._threads = asyncio.Semaphore(threads)
        self._hosts: dict[str, Host] = {}

    def host(self, name: str) -> Host:
        """What is known of this host name."""
        return self._hosts.setdefault(name, Host())

    async def addresses(self, host: str, limit: float) -> tuple[str, ...]:
        """The addresses of `host`: itself, else known ones, else looked up within `limit` seconds.

        Raises: ConnectFailed.
        """
        if is_address(host):
            return (host,)
        known = self.host(host)
        now = asyncio.get_running_loop().time()
        if known.addresses:
            if now - known.asked_at >= self._refresh_after:
                self.refresh(host)
            return known.addresses
        if known.lookup is None:
            self.refresh(host)
        if known.lookup is not None and now - known.asked_at < limit:
            await asyncio.wait((known.lookup,), timeout=limit)
        if known.addresses:
            return known.addresses
        why = known.error if known.lookup is None else "the resolver does not answer"
        raise ConnectFailed(f"The name '{host}' can't be resolved: {why}")

    def connected(self, host: str, address: str) -> None:
        """A connection to this address of `host` was made: it is tried first from now on."""
        if host in self._hosts:
            self._hosts[host].put_first(address)

    def connect_failed(self, host: str) -> None:
        """No connection to `host` could be made: it may have moved."""
        known = self._hosts.get(host)
        now = asyncio.get_running_loop().time()
        if known is not None and now - known.asked_at >= self._least_interval:
            self.refresh(host)

    def refresh(self, host: str) -> None:
        """Look this name up in the background, unless a look-up is under way."""
        known = self.host(host)
        now = asyncio.get_running_loop().time()
        if known.lookup is None or now - known.asked_at >= self._abandoned_after:
            known.lookup_began(asyncio.create_task(self._look_up_in_thread(host)), now)

    async def _look_up_in_thread(self, name: str) -> list[str]:
        """Look up in a thread for which the process does not wait when it ends."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()

        def finish(addresses: list[str], error: Exception | None) -> None:
            if not found.done():
                found.set_exception(error) if error else found.set_result(addresses)

        def work() -> None:
            addresses, error = list[str](), None
            try:
                addresses = self._look_up(name)
            except Exception as raised:  # noqa: BLE001 - who waits gets it
                error = raised
            with suppress(RuntimeError):  # The event loop has ended.
                loop.call_soon_threadsafe(finish, addresses, error)

        async with self._threads:
            threading.Thread(target=work, name="resolver", daemon=True).start()
            return await found

    def close(self) -> None:
        """Wait for no look-up any more."""
        for known in self._hosts.values():
            if known.lookup is not None:
                known.lookup.cancel()


@dataclass(slots=True)
class Host:
    """One host name and its addresses."""

    addresses: tuple[str, ...] = ()
    """From the last look-up that found any; the one that was connected to last comes first."""
    asked_at: float = -math.inf  # when the last look-up began
    error: str = ""  # why the last look-up found no address
    lookup: asyncio.Task[list[str]] | None = None  # the look-up that is under way

    def put_first(self, address: str) -> None:
        """Try this address before the others, if it is one of the host's."""
        if address in self.addresses:
            others = (other for other in self.addresses if other != address)
            self.addresses = (address, *others)

    def lookup_began(self, lookup: asyncio.Task[list[str]], now: float) -> None:
        """A look-up is under way."""
        self.asked_at, self.lookup = now, lookup
        lookup.add_done_callback(self._lookup_done)

    def _lookup_done(self, lookup: asyncio.Task[list[str]]) -> None:
        if self.lookup is lookup:
            self.lookup = None
        if lookup.cancelled():
            return
        error = lookup.exception()
        if error is not None:
            # The known addresses stay: they are better than none.
            self.error = getattr(error, "strerror", None) or str(error) or type(error).__name__
            return
        found = tuple(dict.fromkeys(lookup.result()))[:MOST_ADDRESSES]
        if not found:
            self.error = "it has no address"
            return
        first = self.addresses[:1]
        self.addresses, self.error = found, ""
        if first:
            self.put_first(*first)


@functools.lru_cache(maxsize=4096)
def is_address(host: str) -> bool:
    """Whether this is an IP address, which needs no look-up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
