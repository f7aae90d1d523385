"""Who asks, and what of a head is forwarded: `access/`, `forward/client_response.py`, contexts.

An input is header lines. Oracles: a caller is a key's holder only if the key itself is there; what
a proxy has forwarded is never local; an address is that of the peer unless the peer is trusted;
nodes and clients get listed names only, one line each, and never a credential.
"""

from __future__ import annotations

import ipaddress
import math
import re

from gateway.callers.callers import (
    IdentityHeaders,
    client_address,
    client_network,
    effective_priority,
    is_local,
    is_proxied,
)
from gateway.callers.keys import KeyRing, hash_key
from gateway.callers.limits import LimitBook
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.forward.header_fields import headers_for_client, headers_for_node
from gateway.http.heads import HandlerConfig, parse_context, x_request_id_of
from gateway.lease import KeyedHash
from gateway.nodes.model_index import ModelIndex
from gateway.terms import Headers, Priority
from tests.fuzz.inputs import Divided, Target, seed

KEYS = {"anna": "lg_anna_" + "a" * 43, "ben": "lg_ben_" + "b" * 43}

PEERS = ("127.0.0.1", "10.1.2.3", "::ffff:10.0.0.1", "2001:db8::1", "192.0.2.7", None)

PROXIES = (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("2001:db8::/32"))

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9a-z-]+):[ \t]*([^\r\n\0]*)")

_TO_NODE = re.compile(
    rb"accept|content-type|traceparent|tracestate|user-agent|accept-encoding|via|x-more"
    rb"|(?:anthropic|openai)-(?!(?:.*-)?(?:key|token|secret|password|auth|authorization|cookie)$).*"
)
"""No credential is among them, whatever it begins with."""

_TO_CLIENT = re.compile(
    rb"content-type|retry-after|traceparent|tracestate|x-more|anthropic-.*|openai-.*"
)


def read_headers(text: bytes) -> Headers:
    """The header lines, as the head parser hands them on: names in lower case, values in one line."""
    found = [_LINE.fullmatch(line) for line in text.lower().split(b"\n")]
    lines = text.split(b"\n")
    return [
        (one[1], line.partition(b":")[2].lstrip(b" \t"))
        for one, line in zip(found, lines, strict=True)
        if one is not None
    ][:256]


def _settings(*, keys: bool, proxies: bool) -> Settings:
    made = [hash_key(text) for text in KEYS.values()] if keys else []
    return Settings.model_validate(
        {
            "keys": [
                {"id": key.id, "sha256": key.sha256, "trust_user_headers": key.id == "anna"}
                for key in made
            ],
            "listen": {"trusted_proxies": [str(one) for one in PROXIES] if proxies else []},
            "allow_anonymous": not keys,
            "headers": {"to_nodes": ["X-More"], "to_clients": ["X-More"]},
        }
    )


class Listener:
    """What one listener makes of heads."""

    def __init__(self, *, keys: bool, proxies: bool, loopback: bool) -> None:
        self.settings = _settings(keys=keys, proxies=proxies)
        self.loopback = loopback
        key_ring = KeyRing()
        key_ring.configure(self.settings.keys, allow_anonymous=self.settings.allow_anonymous)
        self.limit_book = LimitBook(self.settings)
        self.config = HandlerConfig(
            self.settings,
            loopback=loopback,
            keyed_hash=KeyedHash(),
            key_ring=key_ring,
            catalog=ModelIndex(),
        )

    def check(self, headers: Headers, peer: str | None) -> None:
        proxies = self.settings.listen.trusted_proxies
        presented = _presented(headers)
        owners = {name for name, key in KEYS.items() if key.encode() in presented}
        try:
            context = parse_context(headers, peer, self.config, self.limit_book)
        except GatewayError as error:
            assert error.status in {400, 401, 415}
            if self.settings.keys and not owners:
                return
            assert error.status != 401 or len(owners) > 1 or len(presented) > 4
            return
        caller = context.accounts.caller
        if self.settings.keys:
            assert len(owners) == 1, "somebody was let in without a key"
            assert caller.id == next(iter(owners))
            assert not caller.anonymous
        else:
            assert caller.anonymous
            local = self.loopback and not proxies and not is_proxied(headers)
            assert local or caller.max_priority >= Priority.NORMAL
            assert local or not caller.trust_user_headers
        if not caller.trust_user_headers:
            assert context.fairness_key == caller.id
        assert context.fairness_key.startswith(caller.id)
        for wish in (context.priority_header, "urgent", "batch"):
            try:
                given = effective_priority(wish, None, None, caller)
            except GatewayError as error:
                assert error.status == 400
            else:
                assert given >= caller.max_priority, "a class above the caller's highest"
        timeout = context.client_timeout
        assert timeout is None or (math.isfinite(timeout) and timeout > 0)
        _check_lines(context.header_lines, _TO_NODE)


def _presented(headers: Headers) -> set[bytes]:
    """The keys in these headers, read plainly."""
    found = set()
    for name, value in headers:
        text = value.strip()
        if name == b"authorization":
            scheme, _, text = text.partition(b" ")
            text = text.strip() if scheme.lower() == b"bearer" else b""
        if name in {b"authorization", b"x-api-key", b"api-key"} and text:
            found.add(text)
    return found


def _check_lines(lines: bytes, allowed: re.Pattern[bytes]) -> None:
    """Check that these lines are whole, and listed."""
    assert not lines or lines.endswith(b"\r\n")
    for line in lines.split(b"\r\n")[:-1]:
        assert b"\n" not in line
        assert b"\r" not in line
        name, colon, _ = line.partition(b": ")
        assert colon
        assert allowed.fullmatch(name), name


def _check_address(headers: Headers, peer: str | None) -> None:
    trusted = client_address(headers, peer, PROXIES)
    alone = client_address(headers, peer, ())
    assert alone == (peer or "local").removeprefix("::ffff:")
    if peer is None:
        assert trusted == "local"
        return
    address = ipaddress.ip_address(peer.removeprefix("::ffff:"))
    if not any(address in network for network in PROXIES):
        assert trusted == str(address), "a stranger names its address"
    else:
        ipaddress.ip_address(trusted)
    assert client_network(client_network(trusted).partition("/")[0]) == client_network(trusted)


_LISTENERS = [
    Listener(keys=keys, proxies=proxies, loopback=loopback)
    for keys in (True, False)
    for proxies in (True, False)
    for loopback in (True, False)
]
_IDENTITY = IdentityHeaders.of(["X-User"], ["X-Session"])


def check(one: Divided) -> None:
    """Check one head, on every kind of listener."""
    headers = read_headers(one.text)
    peer = PEERS[one.choice % len(PEERS)]
    _LISTENERS[one.choice // 8 % len(_LISTENERS)].check(headers, peer)
    _check_address(headers, peer)
    forwarded = [*headers, (b"x-forwarded-for", b"1.2.3.4")]
    assert not is_local(forwarded, loopback_listener=True, trusted_proxies=())
    _check_lines(headers_for_client(headers, ("X-More",)), _TO_CLIENT)
    _check_lines(headers_for_node(headers, ("X-More",)), _TO_NODE)
    told = x_request_id_of(headers)
    assert told is None or (told.isprintable() and 0 < len(told) <= 128)
    session = _IDENTITY.session_key(headers, "k")
    assert session is None or (session.startswith("k/") and len(session) <= 130)


_LINES = (
    b"host: a\nauthorization: Bearer " + KEYS["anna"].encode() + b"\nx-priority: urgent\nx-user: u",
    b"x-api-key: "
    + KEYS["ben"].encode()
    + b"\napi-key: sk-none\naccept: */*\nx-request-timeout: 5",
    b"authorization: Basic abc\ncookie: a=b\nx-forwarded-for: 1.2.3.4, 10.0.0.1\nvia: 1.1 a",
    b"connection: close, accept\naccept: a\nte: b\nanthropic-api-key: k\nanthropic-version: 1",
    b"x-forwarded-for: [2001:db8::9]:80, 10.9.9.9:1\nforwarded: for=1.1.1.1\nx-real-ip: 1.1.1.1",
    b"content-type: application/x-www-form-urlencoded\ncontent-encoding: gzip\nx-more: y",
    b"x-request-id: a.b-c\nx-stainless-timeout: 600\nx-gateway-progress: 1\nx-session: s",
)

IDENTITY = Target(
    "identity",
    check,
    tuple(seed(text, choice) for choice, text in enumerate(_LINES * 8)),
    longest=1024,
)  # fmt: skip
