"""Failures of the store and of the folder, as callers are told them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog

from gateway.batches.folder import FolderError, FolderFull
from gateway.errors import GatewayError
from gateway.store.failures import StoreError

RETRY_AFTER = 5.0
"""`Retry-After` in seconds while the store or the folder can't be used."""

log = structlog.get_logger()


def store_unavailable(error: StoreError) -> GatewayError:
    """503: the store can't be used now."""
    return GatewayError(
        503,
        "store_unavailable",
        f"The gateway's store can't be used now ({error.state}).",
        retry_after=RETRY_AFTER,
    )


@contextlib.contextmanager
def folder_errors_told(thing: str = "file") -> Iterator[None]:
    """Turn the folder's errors into responses; paths and remedies are for the log alone.

    `thing`: a word for what there was no room for.
    """
    try:
        yield
    except FolderFull as error:
        log.warning("no room for a file", of=thing, why=str(error))
        raise GatewayError(
            507,
            "storage_full",
            f"The gateway has no room for this {thing}. Delete files, or ask its operator.",
            retryable=False,
        ) from None
    except FolderError as error:
        log.warning("the folder of files can't be used", of=thing, why=str(error))
        raise GatewayError(
            503,
            "storage_unavailable",
            f"The gateway's folder of {thing}s can't be used now.",
            retry_after=RETRY_AFTER,
        ) from None
