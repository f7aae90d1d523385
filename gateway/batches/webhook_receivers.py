"""Where events may be sent, and one attempt to send one.

A caller can name a URL, and so let the gateway, which stands in a network of trust, send requests.
So only URLs at or below one of the settings' targets are taken, and only if every address of the
host is public, unless the target says otherwise.

The connection goes to an address that was checked, not to the name, which could have another
address by then (DNS rebinding); `Host` and the certificate's name are those of the URL. No redirect
is followed and no proxy of the environment is used. Nothing of the answer but its status and
`Retry-After` is of interest, and no more than a few kilobytes of it are read.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import math
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpcore  # noqa: F401 - httpx would import it on the event loop: 30 ms
import httpx

from gateway import __version__
from gateway.config.webhooks import WebhookSettings, WebhookTarget, WebhookUrl, secret_bytes
from gateway.errors import GatewayError
from gateway.transport.errors import ConnectFailed
from gateway.transport.resolver import Resolver

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class WebhookTargets:
    """The receivers of the settings in force, which `settings` gives. Any thread may ask."""

    def __init__(self, settings: Callable[[], WebhookSettings]) -> None:
        self._settings = settings

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
            for target in self._settings().targets
            if not target.named_only and target.is_for(owner, group) and target.wants(event)
        ]
        url = None if named is None else _parsed(named)
        if url is not None:
            # The settings may have changed since the request came.
            target = self.target_of(owner, group, url)
            if target is not None and target.wants(event):
                found.append(url)
        return list(dict.fromkeys(found))

    def target_of(self, owner: str, group: str | None, url: WebhookUrl) -> WebhookTarget | None:
        """The target whose secrets sign events of this key for the URL; None: there is none now."""
        covering = [
            target
            for target in self._settings().targets
            if target.is_for(owner, group) and target.parsed_url.covers(url)
        ]
        return max(covering, key=lambda target: len(target.parsed_url.path), default=None)


def _parsed(url: str) -> WebhookUrl | None:
    try:
        return WebhookUrl.parse(url)
    except ValueError:
        return None


def _refused(why: str, code: str = "invalid_request") -> GatewayError:
    return GatewayError(400, code, f"'webhook_url' {why}", param="webhook_url", retryable=False)


_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",  # this network
        "169.254.0.0/16",  # link-local: clouds hand out credentials there
        "192.0.0.0/24",
        "192.0.2.0/24",  # documentation
        "198.51.100.0/24",
        "203.0.113.0/24",
        "192.88.99.0/24",  # relays of 6to4
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
        "::/128",
        "100::/64",  # discarded
        "2001::/23",  # Teredo and the like
        "2001:db8::/32",  # documentation
        "3fff::/20",
        "5f00::/16",
        "fe80::/10",  # link-local
        "fec0::/10",
        "ff00::/8",  # multicast
    )
)

_PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8",
        "100.64.0.0/10",  # carriers' NAT
        "127.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "198.18.0.0/15",  # measurements within a network
        "::1/128",
        "64:ff9b:1::/48",  # local NAT64
        "fc00::/7",
    )
)

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

_COMPATIBLE = ipaddress.IPv6Network("::/96")

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")

LAST_32_BITS = 0xFFFFFFFF


def address_problem(text: str, target: WebhookTarget, scheme: str) -> str | None:
    """Why events for the target must not be sent to this address; None: they may."""
    try:
        address = embedded_address(ipaddress.ip_address(text))
    except ValueError:
        return "is no address"
    if _within(address, _NEVER):
        return "is reserved for other uses"
    if _within(address, _PRIVATE):
        return None if target.allow_private else "is private or loopback"
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST:
        return "is reserved for other uses"
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


def _within(
    address: Address, networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]
) -> bool:
    return any(address in network for network in networks if network.version == address.version)


MOST_READ = 4096
"""Bytes of an answer's body that are read, so that its sender is not cut off at once."""

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


class WebhookPoster:
    """Posts events. `now` gives Unix seconds."""

    def __init__(self, resolver: Resolver, now: Callable[[], float]) -> None:
        self._resolver = resolver
        self._now = now
        self._trusted: dict[Path | None, tuple[tuple[int, int], ssl.SSLContext]] = {}
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
            addresses = await self._resolver.addresses(url.host, timeout)
        except ConnectFailed as error:
            return PostResult(None, str(error))
        # One address that is not allowed is enough: such a name is not what it was listed for.
        for address in addresses:
            problem = address_problem(address, target, url.scheme)
            if problem is not None:
                return PostResult(None, f"its address {address} {problem}")
        try:
            context = None if url.scheme == "http" else await self._context(target.ca)
        except (OSError, ValueError) as error:
            return PostResult(None, f"its certificate authorities can't be read: {_words(error)}")
        result = PostResult(None, "it has no address")
        for address in addresses:
            try:
                return await self._send(target, url, address, id_, body, context, limit)
            except httpx.ConnectError as error:
                result = PostResult(None, f"no connection to {address}: {_words(error)}")
            except httpx.TransportError as error:
                # Not its text, which may repeat what the receiver has sent.
                return PostResult(None, f"no valid answer ({type(error).__name__})")
        self._resolver.connect_failed(url.host)
        return result

    async def _send(
        self,
        target: WebhookTarget,
        url: WebhookUrl,
        address: str,
        id_: str,
        body: str,
        context: ssl.SSLContext | None,
        limit: asyncio.Timeout,
    ) -> PostResult:
        content = body.encode()
        timestamp = int(self._now())
        secrets = [secret.get_secret_value() for secret in target.secrets]
        request = httpx.Request(
            "POST",
            httpx.URL(
                scheme=url.scheme,
                host=address,
                port=url.port,
                raw_path=f"{url.path}{url.query}".encode(),
            ),
            headers={
                "host": url.host_field,
                "user-agent": _USER_AGENT,
                "accept": "*/*",
                "connection": "close",
                "content-type": "application/json",
                "webhook-id": id_,
                "webhook-timestamp": str(timestamp),
                "webhook-signature": signatures(secrets, id_, timestamp, body),
            },
            content=content,
            extensions={"sni_hostname": url.host},
        )
        # An http URL needs no context, but without one httpx reads the authorities of all.
        transport = httpx.AsyncHTTPTransport(
            verify=context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), trust_env=False
        )
        async with transport:
            response = await transport.handle_async_request(request)
            result = self._result(response)
            # What is known now must not be lost to a body that does not end.
            limit.reschedule(None)
            with contextlib.suppress(httpx.TransportError, TimeoutError):
                async with asyncio.timeout(READ_SECONDS):
                    await _read_some(response)
            with contextlib.suppress(httpx.TransportError):
                await response.aclose()
        return result

    def _result(self, response: httpx.Response) -> PostResult:
        status = response.status_code
        if 200 <= status < 300:
            return PostResult(status)
        error = f"status {status}"
        if 300 <= status < 400:
            error += ", a redirect, which is not followed"
        return PostResult(
            status, error, retry_after_seconds(response.headers.get("retry-after"), self._now())
        )

    async def _context(self, ca: Path | None) -> ssl.SSLContext:
        """Raises: OSError, ValueError."""
        known = self._trusted.get(ca)
        stamp, context = await asyncio.to_thread(_load_context, ca, known)
        self._trusted[ca] = stamp, context
        return context


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


async def _read_some(response: httpx.Response) -> None:
    stream = response.stream
    assert isinstance(stream, httpx.AsyncByteStream)
    read = 0
    async for piece in stream:
        read += len(piece)
        if read >= MOST_READ:
            return


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


_LONGEST_FIELD = 64


def retry_after_seconds(value: str | None, now: float) -> float | None:
    """The seconds that a field `Retry-After` means, from a number or a date; None: nothing."""
    if value is None or len(value) > _LONGEST_FIELD:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        seconds = parsedate_to_datetime(text).timestamp() - now
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
