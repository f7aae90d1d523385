"""`/v1/files` as OpenAI's API has it: uploads streamed to the disk, lists, contents, deletion."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway import errors
from gateway.batches.files import FileRegistry, StoredFile, file_not_found, file_too_large
from gateway.batches.folder import is_file_name
from gateway.errors import CLIENT_CLOSED_STATUS
from gateway.request import Caller
from gateway.web.asgi import JsonResponse
from gateway.web.body_parts import body_parts, check_plain, content_length
from gateway.web.owners import no_store, owner_of
from gateway.web.request_context import HandlerConfig
from gateway.web.stored_content import ContentResponse, content_headers
from gateway.web.upload_form import FORM_BYTES, UNNAMED, UploadForm, boundary_of

UPLOAD_PURPOSES = ("batch", "user_data")
"""What callers may upload files for."""

PURPOSES = (*UPLOAD_PURPOSES, "batch_output")
"""What files are for; the gateway itself makes those of `batch_output`."""

SHORTEST_EXPIRY, LONGEST_EXPIRY = 3600, 30 * 86400
"""Seconds that `expires_after` may name, as OpenAI's API has it."""

LONGEST_PAGE = 10_000
"""Files of a page at most, as OpenAI's API has it, and without a `limit`."""

_DIGITS = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class FileEndpoints:
    """The endpoints. `identify` gives the caller of a request, or raises GatewayError."""

    registry: FileRegistry | None
    """None: there is no store."""
    config: Callable[[], HandlerConfig]
    identify: Callable[[Request], Caller]
    largest_file: Callable[[], int]
    """`batches.file_bytes`."""

    async def upload(self, request: Request) -> Response:
        owner, files = self._owner(request), self._files()
        check_plain(request)
        boundary = boundary_of(request.scope["headers"])
        length, largest = content_length(request), self.largest_file()
        if length is not None and length > largest + FORM_BYTES:
            raise file_too_large(largest)
        # The form around the file is short, so this much of the file will come, at least.
        expected = None if length is None else max(0, length - FORM_BYTES)
        async with files.uploading(owner, expected) as upload:
            # Most clients send the file last: what is wrong with the other fields is told before.
            form = UploadForm(boundary, upload.write, begin_file=lambda: _check_sent(form))
            limits = self.config().settings.limits
            try:
                async for part in body_parts(
                    request, limits, largest + FORM_BYTES, lambda: file_too_large(largest)
                ):
                    await files.on_disk(form.feed, part)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_STATUS)  # Nobody reads it.
            form.end()
            if not upload.new.size:
                raise errors.invalid_request("The file is empty.", "file")
            file = await files.keep(
                upload,
                name=form.file_name or UNNAMED,
                purpose=_purpose(form),
                seconds=_expiry(form),
            )
        return JsonResponse(file_object(file))

    async def list(self, request: Request) -> Response:
        owner, files = self._owner(request), self._files()
        query = request.query_params
        limit, order = query.get("limit", str(LONGEST_PAGE)), query.get("order", "desc")
        if _DIGITS.fullmatch(limit) is None or not 1 <= int(limit) <= LONGEST_PAGE:
            raise errors.invalid_request(f"'limit' must be 1 to {LONGEST_PAGE}.", "limit")
        if order not in {"asc", "desc"}:
            raise errors.invalid_request("'order' must be 'asc' or 'desc'.", "order")
        after = query.get("after") or None
        if after is not None and not is_file_name(after):
            raise errors.invalid_request("'after' must be the id of a file.", "after")
        page = await files.page(
            owner,
            int(limit),
            after=after,
            order="asc" if order == "asc" else "desc",
            purpose=query.get("purpose") or None,
        )
        found = [file_object(file) for file in page.files]
        return JsonResponse(
            {
                "object": "list",
                "data": found,
                "first_id": found[0]["id"] if found else None,
                "last_id": found[-1]["id"] if found else None,
                "has_more": page.has_more,
            }
        )

    async def show(self, request: Request) -> Response:
        owner, files = self._owner(request), self._files()
        return JsonResponse(file_object(await files.find(owner, _id(request))))

    async def content(self, request: Request) -> Response:
        owner, files = self._owner(request), self._files()
        if request.method == "HEAD":
            return Response(headers=_content_headers(await files.find(owner, _id(request))))
        content = await files.open_content(owner, _id(request))
        return ContentResponse(content, content_headers(content.name, content.size))

    async def delete(self, request: Request) -> Response:
        owner, files = self._owner(request), self._files()
        id_ = _id(request)
        await files.delete(owner, id_)
        return JsonResponse({"id": id_, "object": "file", "deleted": True})

    def _files(self) -> FileRegistry:
        if self.registry is None:
            raise no_store("files")
        return self.registry

    def _owner(self, request: Request) -> str:
        """Whose files the request is about. Raises: GatewayError 401, 403."""
        return owner_of(request, self.identify(request), self.config())


def file_object(file: StoredFile) -> dict[str, Any]:
    """A file as OpenAI's API shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.name,
        "purpose": file.purpose,
        "status": file.state,
        "status_details": None,
    }


def _content_headers(file: StoredFile) -> dict[str, str]:
    return content_headers(file.name, file.bytes)


def _id(request: Request) -> str:
    """The id in the path. Raises: GatewayError 404, if it is none."""
    id_: str = request.path_params["id"]
    if not is_file_name(id_):
        raise file_not_found(id_)
    return id_


def _check_sent(form: UploadForm) -> None:
    """Check the fields that have come so far. Raises: GatewayError 400."""
    if "purpose" in form.values:
        _purpose(form)


def _purpose(form: UploadForm) -> str:
    purpose = form.values.get("purpose")
    if purpose not in UPLOAD_PURPOSES:
        known = "' or '".join(UPLOAD_PURPOSES)
        raise errors.invalid_request(f"'purpose' must be '{known}'.", "purpose")
    return purpose


def _expiry(form: UploadForm) -> float | None:
    """Seconds of `expires_after`; None: it is not there."""
    anchor = form.values.get("expires_after[anchor]")
    seconds = form.values.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise errors.invalid_request(
            "'expires_after[anchor]' must be 'created_at'.", "expires_after"
        )
    if (
        seconds is None
        or _DIGITS.fullmatch(seconds) is None
        or not SHORTEST_EXPIRY <= int(seconds) <= LONGEST_EXPIRY
    ):
        raise errors.invalid_request(
            f"'expires_after[seconds]' must be {SHORTEST_EXPIRY} to {LONGEST_EXPIRY}.",
            "expires_after",
        )
    return float(seconds)
