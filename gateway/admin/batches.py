"""`/admin/batches`: the batches of all keys, and what operators do with them.

Everything goes the way of the public listener's requests, with the key that the batch belongs to in
place of the one that a caller sends: its rights, its limits and its ledger.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.admin.reports import AUDIT_TARGET_KEY, query_parameters
from gateway.callers.callers import owner_of_stored
from gateway.callers.keys import KeyRing
from gateway.errors import CLIENT_CLOSED_STATUS, GatewayError
from gateway.http.heads import ANONYMOUS_OWNER
from gateway.stored.batch_registry import ENDPOINTS, NewBatch
from gateway.stored.batch_rows import Batch, BatchProgress, read_batches
from gateway.stored.waits import BatchWait
from gateway.terms import Caller
from gateway.web.asgi import JsonResponse, page_limit
from gateway.web.batches import (
    OPENAI,
    BatchAccess,
    BatchActions,
    BatchObject,
    batch_object,
    page_edge,
    request_digest,
)
from gateway.web.files import FileEndpoints

CREATE_PARAMETERS = frozenset({"key", "endpoint", "completion_window"})
LIST_PARAMETERS = frozenset({"key", "state", "limit", "before"})
DEFAULT_PAGE, LONGEST_PAGE = "50", 100  # batches of a page


class OwnedBatch(BatchObject, kw_only=True):
    """A batch as operators see it."""

    api: Annotated[str, "`openai` or `anthropic`"]
    key: Annotated[str, "the id of its key"]
    key_name: Annotated[str | None, "its name; null: there is no such key any more"]
    group: Annotated[str | None, "its group, as it was when the batch was made"]
    user: Annotated[str | None, "the end user whom its caller has named"]
    ended_at: Annotated[int | None, "when it ended, in Unix seconds"]
    errors_by_kind: Annotated[list[dict[str, Any]] | None, "of lines without a result: the error's "
        "`code`, how many `lines` have it, and the `first_line` of the input; null in lists"
    ]  # fmt: skip


class BatchDesk(BatchActions):
    """The endpoints of `/admin/batches`."""

    not_found = "No batch found with id '{}'."

    def __init__(self, access: BatchAccess, files: FileEndpoints) -> None:
        super().__init__(access)
        self._files = files

    @property
    def _ring(self) -> KeyRing:
        return self.access.callers.config().key_ring

    async def list(self, request: Request) -> Response:
        """The batches of all keys, or of one, the newest first."""
        given = query_parameters(request, LIST_PARAMETERS)
        ended = {"unfinished": False, "ended": True, "all": None}
        if (state := given.get("state", "all")) not in ended:
            known = ", ".join(f"'{word}'" for word in ended)
            raise errors.invalid_request(f"'state' must be one of {known}.", "state")
        owner = self._ring.ids_of(given["key"])[0] if given.get("key") else None
        batches = self.access.batches()
        limit = page_limit(given.get("limit") or DEFAULT_PAGE, LONGEST_PAGE)
        page = await batches.storage.read_for_caller(
            read_batches, owner, None, limit, page_edge(request, "before"), ended=ended[state]
        )
        waits = await batches.waits_of(page.batches)
        found = [
            self._owned(one, None, wait) for one, wait in zip(page.batches, waits, strict=True)
        ]
        next_ = found[-1].id if page.has_more else None
        return JsonResponse({"batches": found, "next": next_})

    async def create(self, request: Request) -> Response:
        """Keep the form's file for the key that is named, and make a batch of it."""
        given = query_parameters(request, CREATE_PARAMETERS)
        named = given.get("key", ANONYMOUS_OWNER)
        request.scope[AUDIT_TARGET_KEY] = named
        batches, owner = self.access.batches(), self._caller_of(named)
        file = await self._files.receive(request, owner.id)
        if file is None:
            return Response(status_code=CLIENT_CLOSED_STATUS)  # Nobody reads it.
        limited = self.access.limited(owner, None)
        new = NewBatch(
            owner=owner.id,
            api=OPENAI,
            endpoint=given.get("endpoint", ENDPOINTS[0]),
            input_file=file.id,
            window=given.get("completion_window"),
            request_digest=request_digest(OPENAI, given),
            group_name=owner.group,
            class_=limited.late_priority.label,
        )
        try:
            batch = await batches.create(new)
        except GatewayError:
            with contextlib.suppress(GatewayError):
                await self._files.files().delete(owner.id, file.id)
            raise
        request.scope[AUDIT_TARGET_KEY] = f"{batch.id} for {named}"
        return await self._shown(request, batch)

    async def _named(self, request: Request) -> tuple[str, str, str]:
        batch = await self.access.batches().find(None, self._id(request), None)
        return batch.owner, batch.id, batch.api

    async def _shown(self, request: Request, batch: Batch) -> Response:
        progress, wait = await self.access.progress(batch)
        shown = self._owned(batch, progress, wait)
        shown.errors_by_kind = [
            kind._asdict() for kind in await self.access.batches().errors_of(batch)
        ]
        return JsonResponse(shown)

    def _owned(
        self, batch: Batch, progress: BatchProgress | None, wait: BatchWait | None
    ) -> OwnedBatch:
        return OwnedBatch(
            **msgspec.structs.asdict(batch_object(batch, progress, wait)),
            api=batch.api,
            key=batch.owner,
            key_name=self._ring.name_of(batch.owner),
            group=batch.group_name,
            user=batch.user,
            ended_at=None if batch.ended_at is None else int(batch.ended_at),
            errors_by_kind=None,
        )

    def _caller_of(self, named: str) -> Caller:
        """The holder of the key of this id or name. Raises: GatewayError 404, 503."""
        config = self.access.callers.config()
        anonymous = config.settings.allow_anonymous
        (id_, *_) = self._ring.ids_of(named)
        # Without a key only callers of this machine own batches.
        if named != ANONYMOUS_OWNER or config.loopback:
            try:
                return owner_of_stored(id_, self._ring, allow_anonymous=anonymous)
            except GatewayError as error:
                if error.status != 401:
                    raise
                errors.drop_traceback(error)
        shown = errors.truncate_echo(named)
        message = f"There is no key '{shown}' in force: name one by its id or name."
        if named == ANONYMOUS_OWNER:
            message = "Name the key whose batch it is: '?key=NAME'."
        raise GatewayError(404, "key_not_found", message, param="key")
