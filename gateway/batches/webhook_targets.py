"""Where events may be sent: URLs by the allow-list of the settings, and addresses of their hosts.

A caller can name a URL, and so let the gateway, which stands in a network of trust, send requests.
So only URLs at or below one of the settings' targets are taken, and only if every address of the
host is public, unless the target says otherwise. Names are judged by the addresses that the
connection then goes to (`gateway.batches.webhook_post`), not by an earlier look-up.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from gateway.config.webhooks import WebhookSettings, WebhookTarget, WebhookUrl
from gateway.errors import GatewayError

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
        if self._covering(owner, group, parsed) is None:
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
            target = self._covering(owner, group, url)
            if target is not None and target.wants(event):
                found.append(url)
        return list(dict.fromkeys(found))

    def target_of(self, owner: str, group: str | None, url: WebhookUrl) -> WebhookTarget | None:
        """The target whose secrets sign events of this key for the URL; None: there is none now."""
        return self._covering(owner, group, url)

    def _covering(self, owner: str, group: str | None, url: WebhookUrl) -> WebhookTarget | None:
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
