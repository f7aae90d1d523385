"""What a key keeps in the folder: one sum of the rows of its files, batches and requests.

Nothing is counted beside the rows, so a crash leaves no wrong count, and what is removed is
released in the transaction that removes it. Jobs that add to it take the turn of all processes
first (`file_rows.raise_revision`), so the limit holds for all of them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, bindparam, func, literal_column, or_, select, update

from gateway.batches.request_rows import IS_RUNNING, chunks
from gateway.batches.states import RequestKind
from gateway.config.batches import BatchSettings
from gateway.errors import GatewayError
from gateway.store.schema import batches, files, stored_requests

KEY_STORAGE_FULL = "key_storage_full"
"""Why batches are paused whose key keeps as much as it may."""

_BATCH: Final = batches.c

_ROW: Final = stored_requests.c

HAS_REQUESTS: Final = _BATCH.requests_bytes > literal_column("0")
"""The condition of batches that have a file of requests; as in the index."""


class Kept(NamedTuple):
    """What one owner has in the folder."""

    files: int
    """Uploads, and output files of batches."""
    bytes: int
    """Of all that it keeps."""


def kept_by(connection: Connection, owner: str, now: float) -> Kept:
    """What the owner keeps.

    Files that are still there, and expired ones that an unfinished batch reads; bodies of message
    batches; results of unfinished batches, which are in files after the end; bodies of background
    requests, logs of responses and results of deferred requests.
    """
    of_owner = _BATCH.owner == owner
    read = select(_BATCH.input_file).where(
        of_owner, _BATCH.ended_at.is_(None), _BATCH.input_file.is_not(None)
    )
    there = or_(files.c.expires_at.is_(None), files.c.expires_at > now, files.c.id.in_(read))
    number, size = connection.execute(
        select(func.count(), _sum(files.c.bytes)).where(
            files.c.owner == owner, files.c.deleted_at.is_(None), there
        )
    ).one()
    others = (
        select(_sum(_BATCH.result_bytes)).where(of_owner, _BATCH.ended_at.is_(None)),
        select(_sum(_BATCH.requests_bytes)).where(of_owner, HAS_REQUESTS),
        select(_sum(_ROW.length) + _sum(_ROW.result_length)).where(
            _ROW.owner == owner, _ROW.batch.is_(None)
        ),
    )
    return Kept(number, int(size) + sum(int(connection.scalar(asked) or 0) for asked in others))


def full_owners(
    connection: Connection, owners: Iterable[str], most_bytes: int, now: float
) -> set[str]:
    """Those of the owners that keep as much as they may, or more."""
    return {owner for owner in set(owners) if kept_by(connection, owner, now).bytes >= most_bytes}


def note_log_sizes(
    connection: Connection, sizes: Mapping[str, int], *, running: bool = False
) -> None:
    """Responses, by their ids, have logs of these sizes now; `running`: only those that run."""
    if sizes:
        rows = [{"of_id": id_, "size": size} for id_, size in sorted(sizes.items())]
        connection.execute(_SIZE_NOTED.where(IS_RUNNING) if running else _SIZE_NOTED, rows)


def correct_log_sizes(connection: Connection, folder: str, sizes: Mapping[str, int]) -> None:
    """Put right what a crash, or an older version, left: logs, by their files, have these sizes."""
    wrong: dict[str, int] = {}
    for some in chunks(sizes):
        asked = select(_ROW.id, _ROW.result_place, _ROW.result_length).where(
            _ROW.folder == folder,
            _ROW.batch.is_(None),
            _ROW.kind == RequestKind.RESPONSE.value,
            _ROW.result_place.in_(some),
        )
        for id_, place, length in connection.execute(asked):
            if length != sizes[place]:
                wrong[id_] = sizes[place]
    note_log_sizes(connection, wrong)


def kept_too_much(kept: Kept, settings: BatchSettings, *, for_file: bool = False) -> GatewayError:
    """429: the key keeps as much as it may, or has no room `for_file`, one file more.

    Clients do not repeat the request.
    """
    if for_file and kept.files >= settings.files_per_key:
        message = (
            f"This key has {kept.files} files and may have {settings.files_per_key} "
            "('batches.files_per_key'): delete some first."
        )
    else:
        message = (
            f"This key keeps {kept.bytes} bytes of files, batches and responses, and may keep "
            f"{settings.bytes_per_key} bytes ('batches.bytes_per_key'): delete some first."
        )
    return GatewayError(429, "insufficient_quota", message, retryable=False)


_SIZE_NOTED: Final = (
    update(stored_requests)
    .where(
        _ROW.id == bindparam("of_id"),
        _ROW.batch.is_(None),
        _ROW.kind == RequestKind.RESPONSE.value,
        _ROW.result_place.is_not(None),
    )
    .values(result_offset=0, result_length=bindparam("size"))
)


def _sum(column: Any) -> Any:
    return func.coalesce(func.sum(column), 0)
