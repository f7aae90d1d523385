"""The old name of `client`, for modules that still import it."""

from gateway.tools.cli.client import AdminClient, NoGateway, connect_admin
from gateway.tools.cli.client import GatewayRefused as AdminRefused

__all__ = ["AdminClient", "AdminRefused", "NoGateway", "connect_admin"]
