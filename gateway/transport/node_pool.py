"""How a node of the inventory is reached: its address, its TLS, and the pool of its connections."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from gateway.config.node import NodeSpec, NodeTls
from gateway.transport.pool import ConnectionPool, NodeAddress
from gateway.transport.resolver import Resolver

OpenNodePool = Callable[[NodeSpec], ConnectionPool]
"""How the fleet opens the pool of a node's connections."""


def open_node_pool(spec: NodeSpec, resolver: Resolver | None = None) -> ConnectionPool:
    """The pool of the node's connections; it opens none yet. Needs a running event loop.

    `resolver` resolves its host; nodes share one, so that each name is looked up once.

    Raises: ssl.SSLError, OSError when a TLS file can't be used.
    """
    return ConnectionPool(node_address(spec), resolver)


def connection_key(spec: NodeSpec) -> tuple[object, ...]:
    """Changes when a node's entry in the inventory needs a new pool."""
    return (spec.url, spec.kind, spec.tls, spec.api_key)


def tls_files(spec: NodeSpec) -> set[Path]:
    """The files of certificates and keys with which the node is reached."""
    tls = spec.tls
    return set() if tls is None else {path for path in (tls.ca, tls.cert, tls.key) if path}


def node_address(spec: NodeSpec) -> NodeAddress:
    """Where the node of `spec` is, with the header lines that all requests to it carry."""
    url = urlsplit(spec.url)
    secure = url.scheme == "https"
    host = url.hostname or ""
    port = url.port or (443 if secure else 80)
    name = f"[{host}]" if ":" in host else host
    authority = name if url.port is None else f"{name}:{port}"
    lines = f"host: {authority}\r\n"
    if spec.api_key is not None:
        lines += f"authorization: Bearer {spec.api_key.get_secret_value()}\r\n"
    return NodeAddress(
        host=host,
        port=port,
        path_prefix=url.path.rstrip("/").encode(),
        header_lines=lines.encode(),
        tls=_tls_context(spec.tls) if secure else None,
        server_name=(spec.tls.server_name if spec.tls else None) or host,
    )


def _tls_context(spec: NodeTls | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(spec.ca) if spec and spec.ca else None)
    if spec is not None and not spec.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if spec is not None and spec.cert:
        # With a password, even an empty one, OpenSSL does not ask for it on the terminal.
        context.load_cert_chain(spec.cert, spec.key, password="")
    return context
