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
    TypeLabel,
    format_duration,
    format_size,
    validation_error,
)

DAY = 86400.0

MOST_LINES = 1_000_000
"""Lines of a batch that the settings may allow at most."""


class WindowSettings(ConfigModel):
    """The time within which a batch must be done, its `completion_window`."""

    shortest: Annotated[Seconds, Field(description="A batch may ask for no less.")] = 60.0
    longest: Annotated[
        Seconds, Field(description="A batch may ask for no more.", validate_default=True)
    ] = 7 * DAY
    default: Annotated[
        Seconds, Field(description="Of a batch that asks for none.", validate_default=True)
    ] = DAY

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

    folder: Annotated[
        FolderPath | None,
        Field(
            description=(
                "Folder of files and results, readable for the gateway's user alone. Unset: "
                "`batches` in the state folder. A change needs a restart, and moves nothing."
            )
        ),
    ] = None
    file_bytes: Annotated[
        ByteCount, Field(description="Largest file that a caller may upload; above it, 413.")
    ] = 200 << 20
    folder_bytes: Annotated[
        ByteCount,
        Field(
            description=(
                "All files of the folder together, uploads and results; beyond it, uploads get 507."
            ),
        ),
    ] = 10 << 30
    files_per_key: Annotated[
        Count,
        Field(description="Files that one key may own; beyond them, 429 until one is deleted."),
    ] = 1000
    bytes_per_key: Annotated[
        ByteCount,
        Field(
            description=(
                "All that one key keeps in the folder: files, batches and their results, "
                "background requests and their responses. Beyond it, 429 until something is "
                "deleted or expires, and its batches pause. Well below `folder_bytes` it leaves "
                "room for other keys."
            ),
            validate_default=True,
        ),
    ] = 2 << 30
    line_bytes: Annotated[
        ByteCount,
        Field(description="Longest line of a batch's input; a longer one is an error of its own."),
    ] = 1 << 20
    lines: Annotated[
        Annotated[Count, Field(le=MOST_LINES)], Field(description="Most lines of one batch.")
    ] = 50_000
    batches_per_key: Annotated[
        Count,
        Field(description="Batches of one key that have not ended; beyond them, 429."),
    ] = 100
    windows: Annotated[
        WindowSettings, Field(description="Times within which a batch must be done.")
    ] = WindowSettings()
    keep: Annotated[
        KeptSeconds,
        Field(
            description=(
                "For how long files and the results of batches are kept; an upload may ask for "
                "less (`expires_after`)."
            )
        ),
    ] = 30 * DAY
    background_keep: Annotated[
        KeptSeconds,
        Field(description="For how long the result of a background request is kept."),
    ] = 3600.0
    waiting_per_key: Annotated[
        Count,
        Field(
            description=(
                "Requests of one key that wait or run in the background, lines of batches aside; "
                "beyond them, 429."
            )
        ),
    ] = 1000
    waiting_bytes_per_key: Annotated[
        ByteCount,
        Field(description="Bodies of these requests together; beyond it, 429."),
    ] = 256 << 20
    background_at_once: Annotated[
        Count,
        Field(
            description=(
                "Background requests that one process runs or has in its queue at a time; the "
                "others wait in the store."
            )
        ),
    ] = 64
    store_responses: Annotated[
        bool,
        Field(
            description=(
                "Keep a response whose request has `store: true`, for `keep`. False: only those "
                "that also have `background: true` are kept."
            )
        ),
        TypeLabel("true or false"),
    ] = False

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
