"""`/v1/files` as OpenAI's API has it: uploads streamed to the disk, lists, contents, deletion."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import quote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.errors import CLIENT_CLOSED_STATUS, GatewayError
from gateway.http.body_memory import body_parts, check_plain, content_length
from gateway.http.heads import Callers, no_store
from gateway.request import multipart
from gateway.request.multipart import (
    LONGEST_FIELD_HEADERS,
    LONGEST_PADDING,
    MOST_FORM_FIELDS,
    form_error,
    parse_field_head,
)
from gateway.stored.files import (
    Content,
    FileRegistry,
    StoredFile,
    file_not_found,
    file_too_large,
    read_files,
)
from gateway.stored.folder import is_file_name
from gateway.terms import Headers
from gateway.web.asgi import JsonResponse, listed, page_limit, page_order

UPLOAD_PURPOSES = ("batch", "user_data")  # what callers may upload files for
LONGEST_PAGE = 10_000  # files of a page at most, as OpenAI's API has it, and without a `limit`


@dataclass(frozen=True, slots=True)
class FileEndpoints:
    """The endpoints of `/v1/files`."""

    registry: FileRegistry | None  # None: there is no store
    callers: Callers

    async def upload(self, request: Request) -> Response:
        file = await self.receive(request, self.callers.owner(request))
        if file is None:
            return Response(status_code=CLIENT_CLOSED_STATUS)  # Nobody reads it.
        return JsonResponse(file_object(file))

    async def receive(self, request: Request, owner: str) -> StoredFile | None:
        """Keep the file of the request's form for this owner; None: its client has left.

        Raises: GatewayError.
        """
        files = self.files()
        check_plain(request)
        boundary = boundary_of(request.scope["headers"])
        settings = self.callers.config().settings
        length, largest = content_length(request), settings.batches.file_bytes
        if length is not None and length > largest + FORM_BYTES:
            raise file_too_large(largest)
        # The form around the file is short, so this much of the file will come, at least.
        expected = None if length is None else max(0, length - FORM_BYTES)
        async with files.uploading(owner, expected) as upload:
            # Most clients send the file last: what is wrong with the other fields is told before.
            form = UploadForm(
                boundary, upload.write, lambda: "purpose" in form.values and _purpose(form)
            )
            try:
                async for part in body_parts(
                    request, settings.limits, largest + FORM_BYTES, lambda: file_too_large(largest)
                ):
                    await files.storage.on_disk(form.feed, part)
            except ClientDisconnect:
                return None
            form.end()
            if not upload.new.size:
                raise errors.invalid_request("The file is empty.", "file")
            return await files.keep(
                upload,
                name=form.file_name or UNNAMED,
                purpose=_purpose(form),
                seconds=_expiry(form),
            )

    async def list(self, request: Request) -> Response:
        owner, files = self.callers.owner(request), self.files()
        query = request.query_params
        limit = page_limit(query.get("limit", str(LONGEST_PAGE)), LONGEST_PAGE)
        order = page_order(query.get("order", "desc"))
        after = query.get("after") or None
        if after is not None and not is_file_name(after):
            raise errors.invalid_request("'after' must be the id of a file.", "after")
        purpose = query.get("purpose") or None
        storage = files.storage
        page = await storage.read_for_caller(
            read_files, owner, storage.now(), limit, after, order, purpose
        )
        found = [file_object(file) for file in page.files]
        return JsonResponse({"object": "list", **listed(found, has_more=page.has_more)})

    async def show(self, request: Request) -> Response:
        owner, files = self.callers.owner(request), self.files()
        return JsonResponse(file_object(await files.find(owner, _id(request))))

    async def content(self, request: Request) -> Response:
        owner, files = self.callers.owner(request), self.files()
        if request.method == "HEAD":
            file = await files.find(owner, _id(request))
            return Response(headers=content_headers(file.name, file.bytes))
        content = await files.open_content(owner, _id(request))
        return ContentResponse(content, content_headers(content.name, content.size))

    async def delete(self, request: Request) -> Response:
        owner, files = self.callers.owner(request), self.files()
        id_ = _id(request)
        await files.delete(owner, id_)
        return JsonResponse({"id": id_, "object": "file", "deleted": True})

    def files(self) -> FileRegistry:
        """The registry. Raises: GatewayError 501."""
        if self.registry is None:
            raise no_store("files")
        return self.registry


class FileObject(msgspec.Struct, kw_only=True):
    """A file as OpenAI's API shows it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    status_details: None = None


def file_object(file: StoredFile) -> FileObject:
    """The file as its owner is shown it."""
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=int(file.created_at),
        expires_at=None if file.expires_at is None else int(file.expires_at),
        filename=file.name,
        purpose=file.purpose,
        status=file.state,
    )


def _id(request: Request) -> str:
    """The id in the path. Raises: GatewayError 404, if it is none."""
    id_: str = request.path_params["id"]
    if not is_file_name(id_):
        raise file_not_found(id_)
    return id_


def _purpose(form: UploadForm) -> str:
    purpose = form.values.get("purpose")
    if purpose not in UPLOAD_PURPOSES:
        known = "' or '".join(UPLOAD_PURPOSES)
        raise errors.invalid_request(f"'purpose' must be '{known}'.", "purpose")
    return purpose


class Expiry(msgspec.Struct, forbid_unknown_fields=True):
    """For how long a file is to be kept, as OpenAI's API has it."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=30 * 86400)]


def _expiry(form: UploadForm) -> float | None:
    """Seconds of `expires_after`; None: it is not there."""
    names = {name: f"expires_after[{name}]" for name in ("anchor", "seconds")}
    given = {name: form.values[field] for name, field in names.items() if field in form.values}
    try:
        return float(msgspec.convert(given, Expiry, strict=False).seconds) if given else None
    except msgspec.ValidationError as error:
        problem = errors.truncate_echo(str(error))
        raise errors.invalid_field("expires_after", f"is wrong: {problem}.") from None


LONGEST_VALUE = 4 * 1024  # bytes of a field that is no file
LONGEST_NAME = 255  # characters of a file's name
FORM_BYTES = 64 * 1024  # bytes of a form besides its file
UNNAMED = "upload"  # the name of a file whose client has sent none


def boundary_of(headers: Headers) -> bytes:
    """The boundary of a form. Raises: GatewayError 400, 415."""
    types = [value for name, value in headers if name == b"content-type"]
    value = types[0] if len(types) == 1 else b""
    if value.partition(b";")[0].strip().lower() != b"multipart/form-data":
        raise GatewayError(
            415,
            "unsupported_media_type",
            "Send a form: 'Content-Type: multipart/form-data', with the fields 'purpose' and "
            "'file'.",
            retryable=False,
        )
    boundary = multipart.boundary_of(value)
    if boundary is None:
        raise form_error("its Content-Type has no boundary")
    return boundary


class UploadForm:
    """A form of which `write_file` gets the bytes of the field `file`.

    `begin_file` is called before the first of them. Both may raise what they like.
    """

    def __init__(
        self,
        boundary: bytes,
        write_file: Callable[[bytes], None],
        begin_file: Callable[[], object] = lambda: None,
    ) -> None:
        self.values: dict[str, str] = {}  # the fields that are no files, complete so far
        self.file_name: str | None = None  # the name of the file; None: none has come
        self._write_file = write_file
        self._begin_file = begin_file
        self._name: str | None = None
        """The field that is being read; None: its bytes are the file's."""
        self._value = bytearray()
        self._mark = b"\r\n--" + boundary
        self._pending = bytearray(b"\r\n")
        """What has come and was not understood yet; a boundary begins with the line end before."""
        self._reading = self._read()  # goes on with each `feed`
        self._is_complete = False

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises: GatewayError 400, and what the callables raise."""
        self._pending += data
        next(self._reading)

    def end(self) -> None:
        """The body is complete. Raises: GatewayError 400, if the form is not."""
        if not self._is_complete:
            raise form_error("its last boundary is missing")
        if self.file_name is None:
            raise errors.invalid_request("The form has no field 'file'.", "file")

    def _read(self) -> Generator[None, None, None]:
        """Read the whole form; yields where it needs more bytes."""
        yield from self._read_content(lambda _: None)
        while not (yield from self._begins_with(b"--")):
            padding = yield from self._until(b"\r\n", LONGEST_PADDING, _PADDED)
            if padding.strip(b" \t"):
                raise form_error(_PADDED)
            head = yield from self._until(b"\r\n\r\n", LONGEST_FIELD_HEADERS, _HEADERS)
            if head.startswith(b"\r\n"):
                raise form_error(_HEADERS)
            if (yield from self._begins_with(self._mark[2:])):
                self._pending[:0] = b"\r\n"  # Without a value, the empty line's end is its own.
            self._begin_field(head)
            yield from self._read_content(self._add)
            if self._name is not None:
                self.values[self._name] = self._value.decode("utf-8", "replace")
        self._is_complete = True
        while True:
            self._pending.clear()
            yield

    def _read_content(self, add: Callable[[bytes], None]) -> Generator[None, None, None]:
        """Take all up to the next boundary, and the boundary."""
        while (at := self._pending.find(self._mark)) < 0:
            add(self._take(max(0, len(self._pending) - len(self._mark) + 1)))
            yield
        add(self._take(at))
        self._take(len(self._mark))

    def _begins_with(self, begin: bytes) -> Generator[None, None, bool]:
        while len(self._pending) < len(begin):
            yield
        return self._pending.startswith(begin)

    def _until(self, end: bytes, most: int, problem: str) -> Generator[None, None, bytes]:
        """Take all up to `end`, which must come within `most` bytes, and drop it."""
        while (at := self._pending.find(end, 0, most)) < 0:
            if len(self._pending) >= most:
                raise form_error(problem)
            yield
        return self._take(at + len(end))[:at]

    def _take(self, size: int) -> bytes:
        taken = bytes(self._pending[:size])
        del self._pending[:size]
        return taken

    def _begin_field(self, raw_head: bytes) -> None:
        if len(self.values) + (self.file_name is not None) >= MOST_FORM_FIELDS:
            raise form_error(f"it has more than {MOST_FORM_FIELDS} fields")
        head = parse_field_head(raw_head)
        for line in head.lines:
            name, _, value = line.lower().partition(b":")
            if name == b"content-transfer-encoding" and value.strip() not in _PLAIN:
                raise form_error("a field has a Content-Transfer-Encoding")
        self._value.clear()
        self._name = head.name.decode("utf-8", "replace")
        if self._name != "file":
            if self._name in self.values:
                raise form_error(f"it has the field '{errors.truncate_echo(self._name)}' twice")
            return
        if self.file_name is not None:
            raise errors.invalid_request("The form has more than one file.", "file")
        self._name = None
        self.file_name = _clean_name(head.parameters.get(b"filename", b""))
        self._begin_file()

    def _add(self, content: bytes) -> None:
        if self._name is None:
            if content:
                self._write_file(content)
            return
        self._value += content
        if len(self._value) > LONGEST_VALUE:
            shown = errors.truncate_echo(self._name)
            raise form_error(f"the field '{shown}' is longer than {LONGEST_VALUE} bytes")


_HEADERS = "a field has no headers, or too many"
_PADDED = "a boundary's line does not end with it"
_PLAIN = frozenset({b"", b"7bit", b"8bit", b"binary"})


def _clean_name(raw: bytes) -> str:
    """The last part of a path, without what can't be shown."""
    text = raw.replace(b'\\"', b'"').decode("utf-8", "replace")
    text = text.replace("\\", "/").rpartition("/")[2]
    return "".join(one for one in text if one.isprintable())[:LONGEST_NAME] or UNNAMED


class ContentResponse(StreamingResponse):
    """The bytes of `content`, which is closed whatever happens."""

    def __init__(self, content: Content, headers: dict[str, str]) -> None:
        super().__init__(content.pieces, headers=headers)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._content.close()


def content_headers(
    name: str, size: int | None, media_type: str = "application/octet-stream"
) -> dict[str, str]:
    """The headers of a file of this name; `size` is None where it is not known yet."""
    length = {} if size is None else {"content-length": str(size)}
    return {
        "content-type": media_type,
        **length,
        # No browser shows it as a page of this host.
        "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "x-content-type-options": "nosniff",
    }
