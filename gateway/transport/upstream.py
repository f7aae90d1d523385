"""Everything that talks to one node: a pool for the relay, an httpx client for the rest."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from gateway.config.inventory import NodeSpec, NodeTls
from gateway.transport.httpx import PoolTransport
from gateway.transport.names import Names
from gateway.transport.pool import Origin, Pool


@dataclass(slots=True)
class Upstream:
    """The ways to one node; closed when the node has left the fleet and its work is done."""

    pool: Pool
    client: httpx.AsyncClient

    async def aclose(self) -> None:
        """Close every connection."""
        await self.client.aclose()
        self.pool.close()


Connect = Callable[[NodeSpec], Upstream]
"""How the fleet opens the ways to a node."""


def connect(spec: NodeSpec, names: Names | None = None) -> Upstream:
    """The ways to `spec`; nothing is sent yet. Needs a running event loop.

    `names` resolves its host; nodes share one, so that each name is looked up once.

    Raises: ssl.SSLError, OSError when a TLS file can't be used.
    """
    pool = Pool(origin(spec), names)
    client = httpx.AsyncClient(
        base_url=spec.url,
        transport=PoolTransport(pool),
        trust_env=False,
        headers={"accept-encoding": "identity", "user-agent": "llama-gateway"},
    )
    return Upstream(pool, client)


def origin(spec: NodeSpec) -> Origin:
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
    return Origin(
        host=host,
        port=port,
        prefix=url.path.rstrip("/").encode(),
        fields=fields.encode(),
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
