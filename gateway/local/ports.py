"""Ports for servers that are yet to start.

A claimed port stays bound, though it never listens, for as long as its server may come back:
no other program and no outgoing connection can take it meanwhile.
"""

from __future__ import annotations

import errno
import socket

BASE_PORT = 8081
PORTS_TRIED = 1000


def claim_port(host: str, port: int = 0) -> socket.socket:
    """Bind `port` (0: any free one) for a server that sets SO_REUSEADDR or SO_REUSEPORT.

    Raises OSError when somebody has it. The options are set after the bind: with them it would
    succeed beside another claim.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    claim = socket.socket(family, socket.SOCK_STREAM)
    try:
        claim.bind((host, port))
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        claim.close()
        raise
    return claim


def claim_free_port(host: str, base: int = BASE_PORT) -> socket.socket:
    """Claim the first free port from `base` upwards, else any.

    Raises OSError when the host isn't an address of this machine.
    """
    for port in range(base, min(base + PORTS_TRIED, 65536)):
        try:
            return claim_port(host, port)
        except OSError as error:
            if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
                raise
    return claim_port(host)


def port_of(claim: socket.socket) -> int:
    """The number of a claimed port."""
    port: int = claim.getsockname()[1]
    return port
