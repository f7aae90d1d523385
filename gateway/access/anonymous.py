"""When a caller without a key may come in, and when it is trusted as local."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.request import Headers

_PROXIED = frozenset(
    {
        b"cdn-loop",
        b"client-ip",
        b"forwarded",
        b"proxy-client-ip",
        b"surrogate-capability",
        b"true-client-ip",
        b"via",
        b"wl-proxy-client-ip",
        b"x-amzn-trace-id",
        b"x-client-ip",
        b"x-cloud-trace-context",
        b"x-cluster-client-ip",
        b"x-nginx-proxy",
        b"x-proxyuser-ip",
        b"x-remote-addr",
        b"x-remote-ip",
        b"x-scheme",
        b"x-varnish",
    }
)
_PROXIED_PREFIXES = (
    b"x-forwarded",
    b"x-real-",
    b"x-original-",
    b"cf-",
    b"fastly-",
    b"fly-",
    b"tailscale-",
    b"x-amz-cf-",
    b"x-appengine-",
    b"x-arr-",
    b"x-azure-",
    b"x-envoy-",
)
"""What RFC 7239 and RFC 9110 name, and what nginx, Apache, HAProxy, Envoy, Traefik, Varnish,
WebLogic, Tailscale, Cloudflare, Fastly, Akamai, Fly, Azure, Amazon and Google add to a request."""


def is_proxied(headers: Headers) -> bool:
    """Whether a field tells that a proxy has passed this request on, whatever its value."""
    return any(
        # Some servers write an underscore where others write a hyphen.
        (name := field.replace(b"_", b"-")) in _PROXIED or name.startswith(_PROXIED_PREFIXES)
        for field, _ in headers
    )


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
    """Keys have been in force since the start, which a successor's predecessor counts to."""
    anonymous: bool = False
    """`allow_anonymous` lets callers in without a key, and has since there were keys."""
    closed: bool = False
    """There were keys, there are none now: nobody comes in until there are some, or a restart."""

    def after(self, *, keys: int, allow_anonymous: bool) -> Door:
        """The door under the next settings."""
        keyed = self.keyed or keys > 0
        anonymous = allow_anonymous and (keys > 0 or not keyed or self.anonymous)
        return Door(keyed, anonymous, closed=keyed and not keys and not anonymous)


OPEN = Door()
"""Of a gateway that has had no settings yet."""
