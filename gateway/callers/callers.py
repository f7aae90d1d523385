"""Who may reach a listener, and who sends a request: caller, address, class and fairness key."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from gateway import errors
from gateway.callers.keys import KeyRing, caller_from_keys
from gateway.config.keys import CachePolicy, cache_policy
from gateway.config.settings import Settings
from gateway.terms import Caller, Headers, Priority


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`.

    A name other than `localhost` may resolve to any address, so it is not loopback.
    """
    if host.lower() == "localhost":
        return True
    address = parse_address(host.strip("[]"))
    return address is not None and address.is_loopback


# Header names, one per line: those of RFC 7239 and RFC 9110, and those that nginx, Apache, HAProxy,
# Envoy, Traefik, Varnish, WebLogic, Tailscale, Cloudflare, Fastly, Akamai, Fly, Azure, Amazon and
# Google add to a request.
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


def is_proxied(headers: Headers) -> bool:
    """Whether a header shows that a proxy has forwarded this request, whatever its value."""
    # One search over all names costs a third of one search for each.
    names = b"\n".join([b"", *[name for name, _ in headers], b""])
    return _PROXIED.search(names) is not None


def is_local(
    headers: Headers, *, loopback_listener: bool, trusted_proxies: Sequence[object]
) -> bool:
    """Whether this request comes from this machine itself.

    The listener must be on loopback without a proxy in front of it, judged by the settings
    (`trusted_proxies`) and by the request's own headers.
    """
    return loopback_listener and not trusted_proxies and not is_proxied(headers)


IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
MOST_FORWARDED_HOPS = 32  # entries of X-Forwarded-For that are considered, from the right
_SERVICE_TIERS = {"priority": Priority.PREMIUM, "flex": Priority.BATCH}


def identify_caller(
    headers: Headers,
    peer_address: str | None,
    key_ring: KeyRing,
    *,
    allow_anonymous: bool,
    loopback_listener: bool,
    trusted_proxies: Sequence[IPNetwork] = (),
    local: bool | None = None,
) -> Caller:
    """The caller of a request.

    `peer_address` is None if the peer has no IP address (a Unix socket). `local` is the result of
    `is_local`, if it is known already.

    If there are no keys, a key in the request is ignored: some clients must send one. Then callers
    are admitted only with `allow_anonymous`, or on a loopback listener without proxies in front of
    it, and none at all if there were keys before: losing the keys must not admit everybody.

    Raises: errors.GatewayError (401; 503 while the store's keys are not known).
    """
    if key_ring or not key_ring.is_complete:
        caller = caller_from_keys(headers, key_ring)
        if caller is not None:
            return caller
        if not allow_anonymous or key_ring.access.locked:
            raise errors.invalid_api_key() if key_ring else errors.keys_unknown()
    elif key_ring.access.locked or not (
        allow_anonymous or (loopback_listener and not trusted_proxies)
    ):
        raise errors.invalid_api_key()
    if local is None:
        local = is_local(
            headers, loopback_listener=loopback_listener, trusted_proxies=trusted_proxies
        )
    best = Priority.URGENT if local else Priority.NORMAL
    address = client_address(headers, peer_address, trusted_proxies)
    return _anonymous(client_network(address), best, local)


def owner_of_stored(owner: str, key_ring: KeyRing, *, allow_anonymous: bool) -> Caller:
    """The caller with this id, as the keys are now: it owns a request that was stored before.

    Callers without a key own requests only if they came from a trusted loopback listener, and may
    as long as it would admit them.

    Raises: errors.GatewayError (401 if the key has been revoked or has expired; 503 while the
    store's keys are not known).
    """
    if not owner.startswith(_ANONYMOUS):
        caller = key_ring.caller(owner)
        if caller is not None:
            return caller
    elif not key_ring.access.locked and (
        allow_anonymous or (key_ring.is_complete and not key_ring)
    ):
        return _anonymous(owner.removeprefix(_ANONYMOUS), Priority.URGENT, True)
    raise errors.owner_gone() if key_ring.is_complete else errors.keys_unknown()


_ANONYMOUS = "anonymous:"


@lru_cache(maxsize=1024)
def _anonymous(address: str, best: Priority, trusted: bool) -> Caller:  # noqa: FBT001
    id_ = f"{_ANONYMOUS}{address}"
    return Caller(
        id=id_, name="anonymous", max_priority=best, anonymous=True, trust_user_headers=trusted
    )


def client_address(
    headers: Headers, peer_address: str | None, trusted_proxies: Sequence[IPNetwork]
) -> str:
    """The client's address: the rightmost one in X-Forwarded-For that is not a trusted proxy.

    The header is read only if the peer itself is a trusted proxy. An invalid address ends the
    search; then the result is the trusted proxy that added it.
    """
    if peer_address is None:
        return "local"
    if not trusted_proxies:
        # By far the usual case; the event loop normalises addresses already.
        return peer_address.removeprefix("::ffff:")
    address = parse_address(peer_address)
    if address is None or not _is_trusted(address, trusted_proxies):
        return str(address or peer_address)
    values = [value for name, value in headers if name == b"x-forwarded-for"]
    hops = (
        b",".join(values).decode("latin-1").rsplit(",", MOST_FORWARDED_HOPS)[-MOST_FORWARDED_HOPS:]
    )
    for hop in reversed(hops):
        forwarded = parse_address(_without_port(hop.strip()))
        if forwarded is None:
            break
        address = forwarded
        if not _is_trusted(address, trusted_proxies):
            break
    return str(address)


def effective_priority(
    header_priority: str | None, body_priority: str | None, service_tier: str | None, caller: Caller
) -> Priority:
    """The class that the request asks for, else the caller's default; at most the caller's highest.

    `header_priority` is the value of `X-Priority`, `body_priority` that of the body's `priority`
    if it is a string. An unknown word in the body may be meant for a node and is ignored.

    Raises: errors.GatewayError (400) for an unknown class in `X-Priority`.
    """
    requested = None
    if header_priority is not None:
        requested = Priority.parse(header_priority)
        if requested is None:
            known = ", ".join(priority.label for priority in Priority)
            raise errors.invalid_request(
                f"There is no class {header_priority[:32]!r} (in X-Priority); the classes are "
                f"{known}.",
                "X-Priority",
            )
    elif body_priority is not None:
        requested = Priority.parse(body_priority)
    if requested is None:
        requested = _SERVICE_TIERS.get(service_tier or "", caller.default_priority)
    return max(requested, caller.max_priority)


def cache_policy_of(caller: Caller, settings: Settings) -> CachePolicy:
    """The caller's cache policy: by its key, its group, or for all."""
    group = None if caller.group is None else settings.groups.get(caller.group)
    specs = (caller.cache, None if group is None else group.cache, settings.cache)
    return cache_policy(specs, caller.id, caller.group)


def priority_header(headers: Headers) -> str | None:
    """The value of `X-Priority`, if there is one."""
    for name, value in headers:
        if name == b"x-priority":
            return value.decode("latin-1")
    return None


def _is_trusted(address: IPAddress, proxies: Sequence[IPNetwork]) -> bool:
    return any(address in network for network in proxies)


def parse_address(text: str) -> IPAddress | None:
    """An IP address, an IPv4 one in its own form; None: it is none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or address
    return address


def _without_port(hop: str) -> str:
    """An address such as `1.2.3.4:80` or `[2001:db8::1]:443`, without port and zone."""
    hop = hop.partition("%")[0]
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    if hop.count(":") == 1:
        return hop.partition(":")[0]
    return hop


# Bits of an IPv6 address that identify a subscriber, who owns all addresses that begin with them
# (RFC 6177).
IPV6_PREFIX_BITS = 64
# Bytes of a header's value that identify a user or session; the rest is cut off.
MOST_IDENTITY_BYTES = 128


@dataclass(frozen=True, slots=True)
class IdentityHeaders:
    """Names of the headers that identify users and sessions: in lower case, the preferred first."""

    users: tuple[bytes, ...]
    sessions: tuple[bytes, ...]

    @classmethod
    def of(cls, users: Sequence[str], sessions: Sequence[str]) -> Self:
        """From the names as the settings write them."""
        return cls(*(tuple(name.lower().encode() for name in names) for names in (users, sessions)))

    def fairness_key(self, headers: Headers, caller: Caller) -> str:
        """Who shares fairly: the caller, or the end user that it names if it may."""
        user = self.end_user(headers, caller)
        return caller.id if user is None else f"{caller.id}/{user}"

    def end_user(self, headers: Headers, caller: Caller) -> str | None:
        """The end user that the caller names; None: it names none, or may not."""
        if caller.trust_user_headers and self.users:
            return _first(headers, self.users)
        return None

    def session_key(self, headers: Headers, fairness_key: str) -> str | None:
        """The session that a header names, within its fairness key; None: no header does."""
        name = _first(headers, self.sessions) if self.sessions else None
        return None if name is None else f"{fairness_key}/{name}"


def client_network(address: str) -> str:
    """What identifies a client: its IPv4 address, or the /64 of its IPv6 address."""
    if ":" not in address:
        return address
    parsed = parse_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((parsed, IPV6_PREFIX_BITS), strict=False))
    return str(parsed or address)


def _first(headers: Headers, names: tuple[bytes, ...]) -> str | None:
    best_index, best_value = len(names), b""
    for name, value in headers:
        if name in names and value and (index := names.index(name)) < best_index:
            best_index, best_value = index, value
    if best_index == len(names):
        return None
    return best_value[:MOST_IDENTITY_BYTES].decode("latin-1")
