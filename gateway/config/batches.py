"""Settings of work that can wait: files, batches and background responses."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from gateway.config.fields import (
    ByteCount,
    ConfigModel,
    Count,
    FolderPath,
    KeptSeconds,
    Seconds,
    format_duration,
    format_size,
    validation_error,
)

DAY = 86400.0

MOST_LINES = 1_000_000
"""Lines of a batch that the settings may allow at most."""


class WindowSettings(ConfigModel):
    """The time within which a batch must be done, its `completion_window`."""

    shortest: Seconds = 60.0
    """A batch may ask for no less."""
    longest: Annotated[Seconds, Field(validate_default=True)] = 7 * DAY
    """A batch may ask for no more."""
    default: Annotated[Seconds, Field(validate_default=True)] = DAY
    """Of a batch that asks for none."""

    @field_validator("longest")
    @classmethod
    def _is_not_below_the_shortest(cls, longest: float, info: ValidationInfo) -> float:
        shortest = info.data.get("shortest")
        if shortest is not None and longest < shortest:
            raise validation_error(
                f"is below shortest, {format_duration(shortest)}", "raise it, or lower shortest"
            )
        return longest

    @field_validator("default")
    @classmethod
    def _is_between(cls, default: float, info: ValidationInfo) -> float:
        shortest, longest = info.data.get("shortest"), info.data.get("longest")
        if shortest is not None and longest is not None and not shortest <= default <= longest:
            raise validation_error(
                "must lie between shortest and longest, "
                f"{format_duration(shortest)} and {format_duration(longest)}"
            )
        return default


class BatchSettings(ConfigModel):
    """Files that callers upload, batches of requests, and background responses."""

    folder: FolderPath | None = None
    """Folder of files and results, readable for the gateway's user alone. Unset: `batches` in the
    state folder. A change needs a restart, and moves nothing."""
    file_bytes: ByteCount = 200 << 20
    """Largest file that a caller may upload; above it, 413."""
    folder_bytes: ByteCount = 10 << 30
    """All files of the folder together, uploads and results; beyond it, uploads get 507."""
    files_per_key: Count = 1000
    """Files that one key may own; beyond them, 429 until one is deleted."""
    bytes_per_key: Annotated[ByteCount, Field(validate_default=True)] = 2 << 30
    """All that one key keeps in the folder: files, batches and their results, background requests
    and their responses. Beyond it, 429 until something is deleted or expires, and its batches
    pause. Well below `folder_bytes` it leaves room for other keys."""
    line_bytes: ByteCount = 1 << 20
    """Longest line of a batch's input; a longer one is an error of its own."""
    lines: Annotated[Count, Field(le=MOST_LINES)] = 50_000
    """Most lines of one batch."""
    batches_per_key: Count = 100
    """Batches of one key that have not ended; beyond them, 429."""
    windows: WindowSettings = WindowSettings()
    """Times within which a batch must be done."""
    keep: KeptSeconds = 30 * DAY
    """For how long files and the results of batches are kept; an upload may ask for less
    (`expires_after`)."""
    background_keep: KeptSeconds = 3600.0
    """For how long the result of a background request is kept."""
    waiting_per_key: Count = 1000
    """Requests of one key that wait or run in the background, lines of batches aside; beyond them,
    429."""
    waiting_bytes_per_key: ByteCount = 256 << 20
    """Bodies of these requests together; beyond it, 429."""
    background_at_once: Count = 64
    """Background requests that one process runs or has in its queue at a time; the others wait in
    the store."""
    store_responses: bool = False
    """Keep a response whose request has `store: true`, for `keep`. False: only those that also have
    `background: true` are kept."""

    @field_validator("bytes_per_key")
    @classmethod
    def _holds_a_file(cls, most: int, info: ValidationInfo) -> int:
        one = info.data.get("file_bytes")
        if one is not None and most < one:
            raise validation_error(
                f"is below file_bytes, {format_size(one)}: no key could use that",
                "raise it, or lower file_bytes",
            )
        return most
