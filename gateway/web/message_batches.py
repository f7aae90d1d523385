"""`/v1/messages/batches` as Anthropic's API has it, and what the gateway adds to it."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway import errors
from gateway.api.json_values import JSON_ERRORS, InvalidJson, parse_json
from gateway.callers.windows import time_text
from gateway.errors import CLIENT_CLOSED_STATUS, GatewayError
from gateway.http.body_memory import body_parts, check_plain, content_length
from gateway.stored.batch_registry import BatchRegistry
from gateway.stored.batch_rows import Batch, BatchProgress, read_batches
from gateway.stored.files import UploadCounts
from gateway.stored.folder import FolderError
from gateway.stored.results import ANTHROPIC
from gateway.stored.waits import BatchWait
from gateway.web.asgi import JsonResponse, listed, page_limit
from gateway.web.batches import (
    BatchAccess,
    BatchActions,
    BatchFields,
    BatchFigures,
    figures_of,
    page_edge,
    read_batch_fields,
    request_digest,
)

ENDPOINT = "/v1/messages"
DEFAULT_PAGE, LONGEST_PAGE = "20", 1000  # batches of a page, as Anthropic's API has it


class MessageBatchEndpoints(BatchActions):
    """The endpoints of `/v1/messages/batches`."""

    api = ANTHROPIC
    not_found = "Message Batch {} not found."

    def __init__(self, access: BatchAccess) -> None:
        super().__init__(access)
        self._receiving = UploadCounts()

    async def create(self, request: Request) -> Response:
        new, batches = self.access.new_batch(request, ANTHROPIC, ENDPOINT), self.access.batches()
        check_plain(request)
        settings = self.access.callers.config().settings
        largest, length = settings.batches.file_bytes, content_length(request)
        if length is not None and length > largest:
            raise _too_large(largest)
        with self._receiving.one_more(new.owner):
            if new.idempotency_key is None:
                # Else it may be one that there is already.
                await batches.check_room(new.owner, length or 0)
            lines = await batches.new_requests(length)
            try:
                body = MessageBatchBody(
                    lines.write,
                    most_lines=settings.batches.lines,
                    line_bytes=settings.batches.line_bytes,
                )
                parts = body_parts(request, settings.limits, largest, lambda: _too_large(largest))
                try:
                    async for part in parts:
                        await batches.storage.on_disk(body.feed, part)
                except ClientDisconnect:
                    return Response(status_code=CLIENT_CLOSED_STATUS)  # Nobody reads it.
                body.end()
                asked = replace(
                    self.access.checked(new, read_batch_fields(body.fields, BatchFields)),
                    request_digest=request_digest(ANTHROPIC, body.digest.hexdigest()),
                )
                name = await batches.storage.on_disk(lines.finish)
            finally:
                with contextlib.suppress(FolderError, GatewayError):
                    await batches.storage.on_disk(lines.discard)
            asked = replace(asked, requests=name, requests_bytes=lines.size)
            batch = await batches.create(asked)
        if not batch.total:
            # Its lines are counted when they are read again, a moment later.
            batch = replace(batch, total=body.count)
        return await self._shown(request, batch)

    async def list(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        after, before = page_edge(request, "after_id"), page_edge(request, "before_id")
        if after is not None and before is not None:
            raise errors.invalid_request("Send 'after_id' or 'before_id', not both.", "before_id")
        limit = page_limit(request.query_params.get("limit") or DEFAULT_PAGE, LONGEST_PAGE)
        page = await batches.storage.read_for_caller(
            read_batches, owner, ANTHROPIC, limit, after, before
        )
        waits = await batches.waits_of(page.batches)
        found = [
            message_batch_object(one, None, results_url(request, one), wait)
            for one, wait in zip(page.batches, waits, strict=True)
        ]
        return JsonResponse(listed(found, has_more=page.has_more))

    async def results(self, request: Request) -> Response:
        """The result lines; before the end only with `?partial=true`."""
        if request.query_params.get("partial") != "true":
            batch = await self._do(request, BatchRegistry.find)
            if not batch.state.ended:
                raise GatewayError(
                    404,
                    "batch_not_ended",
                    f"Message Batch {batch.id} has no available results. Wait until it has ended, "
                    "or ask for '?partial=true'.",
                )
        return await self._lines(request)

    async def delete(self, request: Request) -> Response:
        owner, batches = self.access.owner(request), self.access.batches()
        id_ = self._id(request)
        await batches.delete(owner, id_, ANTHROPIC)
        return JsonResponse({"id": id_, "type": "message_batch_deleted"})

    async def _shown(self, request: Request, batch: Batch) -> Response:
        progress, wait = await self.access.progress(batch)
        url = results_url(request, batch)
        return JsonResponse(message_batch_object(batch, progress, url, wait))


TextTime = Annotated[str, msgspec.Meta(extra_json_schema={"format": "date-time"})]
OptionalTime = Annotated[str | None, msgspec.Meta(extra_json_schema={"format": "date-time"})]


class MessageCounts(msgspec.Struct, kw_only=True):
    """How many requests of a message batch there are, by their ends."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatchObject(msgspec.Struct, kw_only=True):
    """A batch as Anthropic's API shows it."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Annotated[
        str, msgspec.Meta(extra_json_schema={"enum": ["in_progress", "canceling", "ended"]})
    ]
    request_counts: MessageCounts
    created_at: TextTime
    expires_at: TextTime
    ended_at: OptionalTime
    cancel_initiated_at: OptionalTime
    archived_at: None = None
    results_url: str | None
    llama_gateway: BatchFigures


def message_batch_object(
    batch: Batch, progress: BatchProgress | None, url: str | None, wait: BatchWait | None = None
) -> MessageBatchObject:
    """The batch as its owner is shown it; `url` is that of its results."""
    state = batch.state
    status = "ended" if state.ended else "in_progress"
    if not state.ended and batch.cancelling_at is not None:
        status = "canceling"
    return MessageBatchObject(
        id=batch.id,
        processing_status=status,
        request_counts=MessageCounts(
            processing=0 if state.ended else max(0, batch.total - batch.ended_lines),
            succeeded=batch.completed,
            errored=batch.failed,
            canceled=batch.cancelled,
            expired=batch.expired,
        ),
        created_at=time_text(batch.created_at, "auto"),
        expires_at=time_text(batch.expires_at, "auto"),
        ended_at=None if batch.ended_at is None else time_text(batch.ended_at, "auto"),
        cancel_initiated_at=None
        if batch.cancelling_at is None
        else time_text(batch.cancelling_at, "auto"),
        results_url=url,
        llama_gateway=figures_of(batch, progress, wait),
    )


def results_url(request: Request, batch: Batch) -> str | None:
    """Where the results are; None: the batch has not ended.

    Clients send their key there. Where the gateway itself speaks TLS it is a whole URL, of the host
    that the client has named. Else it is the path alone, which clients add to the origin that they
    know: a proxy in front may speak TLS, and a URL with `http` would take the key past it.
    """
    if not batch.state.ended:
        return None
    path = f"{ENDPOINT}/batches/{batch.id}/results"
    host = request.headers.get("host")
    if request.url.scheme != "https" or not host:
        return path
    return f"https://{host}{path}"


def _too_large(most_bytes: int) -> GatewayError:
    return GatewayError(
        413,
        "request_too_large",
        f"The body is larger than {most_bytes} bytes ('batches.file_bytes').",
    )


LONGEST_FIELD = 4 * 1024  # bytes of a field besides the requests
# Fields besides the requests; they are the gateway's own.
OTHER_FIELDS = frozenset({"completion_window", "webhook_url"})
_SKIP = re.compile(rb"[ \t\n\r]*")
# A bracket, or a string, which may lack its end.
_TOKEN = re.compile(rb'[{}\[\]]|"[^"\\]*(?:\\.[^"\\]*)*(?P<end>"?)', re.DOTALL)
_SCALAR_END = re.compile(rb"[,\]} \t\n\r]")

_LIST, _LIST_END, _OBJECT_END, _QUOTE = b'[]}"'


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, msgspec.Meta(pattern=r"\A[a-zA-Z0-9_-]{1,64}\Z")]
    params: msgspec.Raw


_REQUEST = msgspec.json.Decoder(_Request)


class MessageBatchBody:
    """The body of a message batch, of which `write` gets one line after the other.

    `most_lines` and `line_bytes` bound it. `write` may raise what it likes.
    """

    def __init__(
        self, write: Callable[[bytes], object], *, most_lines: int, line_bytes: int
    ) -> None:
        self.fields: dict[str, Any] = {}  # the fields besides the requests
        self.count = 0  # requests that have come so far
        self._write = write
        self._most_lines = most_lines
        self._line_bytes = line_bytes
        self._key = ""
        self._keys: set[str] = set()
        self._data, self._at = b"", 0
        """The bytes that have come last, from the value that is being read on, and its place."""
        self._lines: list[bytes] = []  # that were read of them
        self._reading = self._read()  # goes on with each `feed`
        self._is_complete = False
        self.digest = hashlib.sha256()  # of the bytes that have come
        self._ids: set[bytes] = set()  # digests of the ids: much smaller than the ids may be

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises: GatewayError 400, and what `write` raises."""
        self.digest.update(data)
        self._data, self._at = self._data[self._at :] + data, 0
        next(self._reading)
        if self._lines:
            self._write(b"".join(self._lines))
            self._lines.clear()

    def end(self) -> None:
        """The body is complete. Raises: GatewayError 400, if it is not, or lacks requests."""
        if not self._is_complete:
            raise _invalid_json("it ends too early")
        if "requests" not in self._keys:
            raise _refused("requests: Field required")
        if not self.count:
            raise _refused("requests: List should have at least 1 item after validation, not 0")

    def _read(self) -> Generator[None, None, None]:
        """Read the whole body; yields where it needs more bytes."""
        yield from self._take(b"{", "it must be an object")
        is_last = (yield from self._next()) == _OBJECT_END
        if is_last:
            self._at += 1
        while not is_last:
            if (yield from self._next()) != _QUOTE:
                raise _invalid_json("a key is expected")
            key = self._key = self._parsed((yield from self._value()))
            if key in self._keys:
                raise _invalid_json(f"it has '{self._shown_key()}' twice")
            if key != "requests" and key not in OTHER_FIELDS:
                shown = self._shown_key()
                raise errors.invalid_request(f"{shown}: Extra inputs are not permitted", shown)
            self._keys.add(key)
            yield from self._take(b":", "':' is expected")
            if self._key == "requests":
                yield from self._read_requests()
            else:
                self.fields[self._key] = self._parsed((yield from self._value()))
            byte = yield from self._take(b",}", "',' or '}' is expected")
            is_last = byte == _OBJECT_END
        self._is_complete = True
        yield from self._next()
        raise _invalid_json("something follows its end")

    def _read_requests(self) -> Generator[None, None, None]:
        if (yield from self._next()) != _LIST:
            raise _refused("requests: Input should be a valid list")
        self._at += 1
        is_last = (yield from self._next()) == _LIST_END
        if is_last:
            self._at += 1
        while not is_last:
            yield from self._next()
            if self.count == self._most_lines:
                raise _refused(
                    f"requests: List should have at most {self._most_lines} items ('batches.lines')"
                )
            value = yield from self._value(f"requests.{self.count}")
            self._lines.append(self._line_of(value))
            self.count += 1
            byte = yield from self._take(b",]", "',' or ']' is expected")
            is_last = byte == _LIST_END

    def _next(self) -> Generator[None, None, int]:
        """The next byte that is no space; it is not taken."""
        while True:
            space = _SKIP.match(self._data, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._data):
                return self._data[self._at]
            yield

    def _take(self, allowed: bytes, problem: str) -> Generator[None, None, int]:
        """Take the next byte, which must be one of these. Raises: GatewayError 400."""
        byte = yield from self._next()
        if byte not in allowed:
            raise _invalid_json(problem)
        self._at += 1
        return byte

    def _value(self, request: str | None = None) -> Generator[None, None, bytes]:
        """Take the next value, which may be no JSON; `request`: what it is called if it is one.

        Raises: GatewayError 400.
        """
        is_scalar = (yield from self._next()) not in b'"{['
        most = LONGEST_FIELD if request is None else self._line_bytes
        size = depth = 0  # bytes of it that were looked at, and its brackets that are open
        while True:
            begin, end = self._at, None
            if is_scalar and (found := _SCALAR_END.search(self._data, begin)):
                end = found.start()
            for token in () if is_scalar else _TOKEN.finditer(self._data, begin + size):
                if token["end"] == b"":
                    break  # a string that goes on in the next bytes
                depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(token[0], 0)
                size = token.end() - begin
                if not depth:
                    end = token.end()
                    break
            if (len(self._data) if end is None else end) - begin > most:
                why = "" if request is None else " ('batches.line_bytes')"
                raise _refused(
                    f"{request or self._shown_key()}: It is longer than {most} bytes{why}"
                )
            if end is not None:
                self._at = end
                return self._data[begin:end]
            yield

    def _shown_key(self) -> str:
        return errors.truncate_echo(self._key)

    def _parsed(self, value: bytes) -> Any:
        try:
            return parse_json(value)
        except InvalidJson:
            raise _invalid_json("a field can't be read") from None

    def _line_of(self, value: bytes) -> bytes:
        """The line of a request. Raises: GatewayError 400."""
        where = f"requests.{self.count}"
        try:
            value.decode()
            request = _REQUEST.decode(value)
            body = msgspec.json.format(bytes(request.params), indent=-1)
        except msgspec.ValidationError as error:
            raise _refused(f"{where}: {errors.truncate_echo(str(error))}") from None
        except JSON_ERRORS:
            raise _invalid_json(f"{where} can't be read") from None
        if not body.startswith(b"{"):
            raise _refused(f"{where}.params: Input should be a valid dictionary")
        custom_id = request.custom_id.encode()
        digest = hashlib.blake2b(custom_id, digest_size=16).digest()
        if digest in self._ids:
            raise _refused(
                "requests: custom_id's must be unique within a batch. Duplicate custom_id found: "
                f"{request.custom_id}"
            )
        self._ids.add(digest)
        # In the form of OpenAI's lines, so that there is one reader of lines.
        return b'{"custom_id":"%b","method":"POST","url":"/v1/messages","body":%b}\n' % (
            custom_id,
            body,
        )


def _refused(problem: str) -> GatewayError:
    """400: the requests are not as Anthropic's API has them, in its words."""
    return errors.invalid_request(problem, "requests")


def _invalid_json(problem: str) -> GatewayError:
    return GatewayError(400, "invalid_json", f"The request body is not valid JSON: {problem}.")
