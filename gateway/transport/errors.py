"""Why a node gave no answer.

UpstreamError
├── ConnectFailed             refused, unreachable, unknown name, TLS failure
├── ConnectTimedOut           no connection within the limit
├── LocalResourcesExhausted   this machine has no descriptor or port left
├── ConnectionReset           the connection broke before the response was complete
│   └── StaleConnection       ... a reused one, at once and before the first byte: not an attempt
├── NodeReportedError         the node's own error, in the middle of its answer
│   └── PoolFull              ... its slots have no room left for their tokens together
├── ModelNotLoaded            a router has not loaded the model that the request is for
├── InvalidResponse           the response is not HTTP, or its head is too large
└── UpstreamTimeout           the caller's own limit passed (first byte, silence, whole request)

`outcome` is the word that metrics and logs use.
"""

from __future__ import annotations

from gateway.errors import GatewayError

# Statuses with which a node declines a request that another node may serve: its account is out of
# credit (402), or it does not want this content, or not now. Nobody is to blame.
DECLINED = frozenset({402, 409, 424, 425, 451})


class UpstreamError(Exception):
    """A node could not be reached, or did not answer to the end."""

    outcome = "failed"


class ConnectFailed(UpstreamError):  # noqa: N818 - the tree above reads better without "Error"
    """The connection was refused or could not be made."""

    outcome = "connect_failed"


class ConnectTimedOut(UpstreamError):  # noqa: N818
    """The connection was not made in time."""

    outcome = "connect_timeout"


class LocalResourcesExhausted(UpstreamError):  # noqa: N818
    """This machine has no descriptor or port left: the node is not to blame."""

    outcome = "exhausted"


class ConnectionReset(UpstreamError):  # noqa: N818
    """The connection broke before the response was complete."""

    outcome = "reset"


class StaleConnection(ConnectionReset):
    """A reused connection that the node had closed: the request never reached it."""

    outcome = "stale"


class ModelNotLoaded(UpstreamError):  # noqa: N818
    """A router has not loaded the model, has just lost it, or has it no more: nobody failed."""

    outcome = "not_loaded"

    def __init__(self, message: str, *, is_gone: bool = False) -> None:
        """`is_gone`: the router does not know the model."""
        super().__init__(message)
        self.is_gone = is_gone


class InvalidResponse(UpstreamError):  # noqa: N818
    """The response is not HTTP, or not what the request asked for."""

    outcome = "garbage"


class NodeReportedError(UpstreamError):
    """The node reported an error after it had begun to answer; `status` is its HTTP equivalent."""

    outcome = "error_event"

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status
        self.client_error: GatewayError | None = None
        """The error for the client, if it can be more precise than the status."""
        if self.is_request_fault:
            self.outcome = "request_error"
        elif status in DECLINED:
            self.outcome = "refused"

    @property
    def is_request_fault(self) -> bool:
        """Whether the request itself is wrong, so that every node would refuse it."""
        return self.status in {400, 413, 422}


class PoolFull(NodeReportedError):  # noqa: N818
    """The node ended all that ran on it: the pool of tokens that its slots share was full."""

    outcome = "pool_full"


class UpstreamTimeout(UpstreamError):  # noqa: N818
    """A limit passed; `limit` names it: `first_byte`, `silence`, `total`."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit
        self.outcome = f"{limit}_timeout"
