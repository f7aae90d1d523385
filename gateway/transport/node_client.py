"""Everything that talks to one node: a pool for the relay, an httpx client for the rest."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from gateway.config.inventory import NodeSpec, NodeTls
from gateway.transport.httpx_transport import PoolTransport
from gateway.transport.pool import ConnectionPool, NodeAddress
from gateway.transport.resolver import Resolver


@dataclass(slots=True)
class NodeClient:
    """The ways to one node; closed when the node has left the fleet and its work is done."""

    pool: ConnectionPool
    http: httpx.AsyncClient

    async def aclose(self) -> None:
        """Close every connection."""
        await self.http.aclose()
        self.pool.close()


OpenNodeClient = Callable[[NodeSpec], NodeClient]
"""How the fleet opens the ways to a node."""


def open_node_client(spec: NodeSpec, resolver: Resolver | None = None) -> NodeClient:
    """The ways to `spec`; nothing is sent yet. Needs a running event loop.

    `names` resolves its host; nodes share one, so that each name is looked up once.

    Raises: ssl.SSLError, OSError when a TLS file can't be used.
    """
    pool = ConnectionPool(node_address(spec), resolver)
    client = httpx.AsyncClient(
        base_url=spec.url,
        transport=PoolTransport(pool),
        trust_env=False,
        headers={"accept-encoding": "identity", "user-agent": "llama-gateway"},
    )
    return NodeClient(pool, client)


def node_address(spec: NodeSpec) -> NodeAddress:
    """Where the node of `spec` is, with the header lines that all requests to it carry."""
    url = urlsplit(spec.url)
    secure = url.scheme == "https"
    host = url.hostname or ""
    port = url.port or (443 if secure else 80)
    name = f"[{host}]" if ":" in host else host
    authority = name if url.port is None else f"{name}:{port}"
    fields = f"host: {authority}\r\n"
    if spec.api_key is not None:
        fields += f"authorization: Bearer {spec.api_key.get_secret_value()}\r\n"
    return NodeAddress(
        host=host,
        port=port,
        path_prefix=url.path.rstrip("/").encode(),
        header_lines=fields.encode(),
        tls=_tls(spec.tls) if secure else None,
        server_name=(spec.tls.server_name if spec.tls else None) or host,
    )


def _tls(spec: NodeTls | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(spec.ca) if spec and spec.ca else None)
    if spec is not None and not spec.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if spec is not None and spec.cert:
        context.load_cert_chain(str(spec.cert), str(spec.key) if spec.key else None)
    return context
