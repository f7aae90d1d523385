"""When a caller without a key may come in, and when it is trusted as local."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.request import Headers

_PROXIED = re.compile(
    rb"""\n(?:
        x-(?: forwarded | real- | original- | envoy- | amz-cf- | appengine- | arr- | azure-
            | (?: amzn-trace-id | client-ip | cloud-trace-context | cluster-client-ip | nginx-proxy
                | proxyuser-ip | remote-addr | remote-ip | scheme | varnish )\n )
        | cf- | fastly- | fly- | tailscale-
        | (?: cdn-loop | client-ip | forwarded | proxy-client-ip | surrogate-capability
            | true-client-ip | via | wl-proxy-client-ip )\n )""",
    re.VERBOSE,
)
"""Names of fields, one a line: what RFC 7239 and RFC 9110 name, and what nginx, Apache, HAProxy,
Envoy, Traefik, Varnish, WebLogic, Tailscale, Cloudflare, Fastly, Akamai, Fly, Azure, Amazon and
Google add to a request."""


def is_proxied(headers: Headers) -> bool:
    """Whether a field tells that a proxy has passed this request on, whatever its value."""
    # One search over all names costs a third of a look at each.
    names = b"\n".join([b"", *[name for name, _ in headers], b""])
    return _PROXIED.search(names) is not None


def is_local(
    headers: Headers, *, loopback_listener: bool, trusted_proxies: Sequence[object]
) -> bool:
    """Whether this request comes from this machine itself.

    The listener must be a loopback one with nothing in front of it: neither by the settings
    (`trusted_proxies`) nor by the request's own fields.
    """
    return loopback_listener and not trusted_proxies and not is_proxied(headers)


@dataclass(frozen=True, slots=True)
class Door:
    """Whether callers without a key may come in at all, over all reloads of a process.

    Losing the keys must not open it: they may be gone by mistake.
    """

    keyed: bool = False
    """There have been keys since the start, a predecessor's included."""
    anonymous: bool = False
    """`allow_anonymous` lets callers in without a key, and did when there last were keys."""
    closed: bool = False
    """There were keys, there are none now: nobody comes in until there are some, or a restart."""

    def after(self, *, keys: int, allow_anonymous: bool) -> Door:
        """The door under the next settings."""
        keyed = self.keyed or keys > 0
        anonymous = allow_anonymous and (keys > 0 or not keyed or self.anonymous)
        return Door(keyed, anonymous, closed=keyed and not keys and not anonymous)


OPEN = Door()
"""Of a gateway that has had no settings yet."""
