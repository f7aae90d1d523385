"""Host names of nodes, resolved once and then kept: a resolver that hangs stops nobody else.

The system's resolver can't be interrupted, and takes half a minute to give up. So each look-up has
a thread of its own, which nobody waits for longer than told, at the end of the process neither.
Addresses that are known are used at once, and looked up again behind their use.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import math
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from gateway.transport.errors import ConnectFailed

REFRESH_AFTER = 45.0
"""Seconds after which a name that is used is looked up again."""

LEAST_LOOKUP_INTERVAL = 1.0
"""Seconds between two look-ups of a name at least."""

LOOKUP_ABANDONED_AFTER = 120.0
"""Seconds after which a look-up no longer stands in the way of another one of the same name."""

MOST_LOOKUP_THREADS = 128
"""Look-ups at one time; one for each name at most."""

MOST_ADDRESSES = 8
"""Addresses of one name that are tried."""

Lookup = Callable[[str], list[str]]
"""Finds the addresses of a name, however long it takes. Raises: OSError, UnicodeError."""

P = ParamSpec("P")

T = TypeVar("T")


def system_lookup(name: str) -> list[str]:
    """Ask the system's resolver."""
    found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass(slots=True)
class _Host:
    addresses: tuple[str, ...] = ()
    """The last ones that the resolver told; the one that answered last comes first."""
    asked: float = -math.inf
    error: str = ""
    """Why it told none, the last time."""
    asking: asyncio.Future[list[str]] | None = None


class Resolver:
    """The names of all nodes. Times are the event loop's."""

    def __init__(self, look_up: Lookup = system_lookup, threads: int = MOST_LOOKUP_THREADS) -> None:
        self._look_up = look_up
        self._threads = DaemonThreads(threads)
        self._names: dict[str, _Host] = {}

    async def addresses(self, host: str, limit: float) -> tuple[str, ...]:
        """Addresses of `host`: itself if it is one, else those known, else within `limit` seconds.

        Raises: ConnectFailed.
        """
        if is_address(host):
            return (host,)
        name = self._names.setdefault(host, _Host())
        now = asyncio.get_running_loop().time()
        if name.addresses:
            if now - name.asked >= REFRESH_AFTER:
                self._ask(host, name)
            return name.addresses
        if name.asking is None:
            self._ask(host, name)
        if name.asking is not None and now - name.asked < limit:
            await asyncio.wait((name.asking,), timeout=limit)
        if name.addresses:
            return name.addresses
        why = name.error if name.asking is None else "the resolver does not answer"
        raise ConnectFailed(f"The name '{host}' can't be resolved: {why}")

    def connected(self, host: str, address: str) -> None:
        """A connection to this address of `host` came about: it is tried first from now on."""
        name = self._names.get(host)
        if name is not None and address in name.addresses:
            others = (other for other in name.addresses if other != address)
            name.addresses = (address, *others)

    def connect_failed(self, host: str) -> None:
        """No connection to `host` came about: it may have moved."""
        name = self._names.get(host)
        now = asyncio.get_running_loop().time()
        if name is not None and now - name.asked >= LEAST_LOOKUP_INTERVAL:
            self._ask(host, name)

    def close(self) -> None:
        """Wait for no look-up any more."""
        for name in self._names.values():
            if name.asking is not None:
                name.asking.cancel()

    def _ask(self, host: str, name: _Host) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if name.asking is not None and now - name.asked < LOOKUP_ABANDONED_AFTER:
            return
        name.asked = now
        try:
            name.asking = loop.run_in_executor(self._threads, self._look_up, host)
        except RuntimeError as error:  # no thread can be started
            name.error = str(error)
        else:
            name.asking.add_done_callback(functools.partial(_heard, name))


def _heard(name: _Host, asking: asyncio.Future[list[str]]) -> None:
    if name.asking is asking:
        name.asking = None
    if asking.cancelled():
        return
    error = asking.exception()
    if error is not None:
        # What was known is better than nothing, whatever the resolver says now.
        name.error = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return
    found = tuple(dict.fromkeys(asking.result()))[:MOST_ADDRESSES]
    if not found:
        name.error = "it has no address"
        return
    if name.addresses and name.addresses[0] in found:
        found = (name.addresses[0], *(one for one in found if one != name.addresses[0]))
    name.addresses, name.error = found, ""


@functools.lru_cache(maxsize=4096)
def is_address(host: str) -> bool:
    """Whether this is an address, so that nobody need be asked for it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class DaemonThreads(Executor):
    """Threads that the process does not wait for at its end, up to `most` at one time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run it in a thread, once one may be started. Raises: RuntimeError, when none can be."""
        future: Future[T] = Future()
        work = functools.partial(_run, future, functools.partial(fn, *args, **kwargs))
        with self._lock:
            if self._running >= self._most:
                self._waiting.append(work)
                return future
            self._running += 1
        try:
            threading.Thread(target=self._work, args=(work,), name="resolver", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._running -= 1
            raise
        return future

    def _work(self, work: Callable[[], None]) -> None:
        while True:
            work()
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                work = self._waiting.popleft()


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
        future.set_exception(error)
    else:
        future.set_result(result)
