"""What the store tells: what requests used and cost, which have ended, and who changed what."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.callers import ended
from gateway.callers.reports import (
    ArrivalsReader,
    InvalidQuery,
    Reporter,
    ReportInterrupted,
    ReportQuery,
    parse_query,
)
from gateway.errors import GatewayError
from gateway.store.failures import StoreError
from gateway.watch.audit import LONGEST_TEXT, AuditQuery, AuditTrail
from gateway.web.asgi import JsonResponse, large_json, number_parameter, store_unavailable

PARAMETERS = frozenset({"by", "since", "until", "limit", "format", "key", "percentiles"})
ARRIVALS_PARAMETERS = frozenset({"since", "until"})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UsageEndpoints:
    """The endpoints of the ledger. `reporter` and `ended` are None where there is no store."""

    reporter: Reporter | None
    ended: ended.EndedFinder | None
    now: Callable[[], float]
    name_of: Callable[[str], str | None]  # the name of the key with this id

    async def report(self, request: Request) -> Response:
        given = query_parameters(request, PARAMETERS)
        form = given.pop("format", "json")
        if form not in {"json", "csv"}:
            raise errors.invalid_request("'format' must be 'json' or 'csv'.", "format")
        report = await self._read(given, Reporter.read)
        report.name_keys(self.name_of)
        if form == "csv":
            return Response(await asyncio.to_thread(report.to_csv), media_type="text/csv")
        return await large_json(report.to_json)

    async def arrivals(self, request: Request) -> Response:
        """The requests of the busiest hour, as sizes and times."""

        async def read(reporter: Reporter, query: ReportQuery) -> bytes:
            reader = ArrivalsReader(query, self.now())
            await reporter.read_steps(reader.step)
            # Megabytes of JSON are made in the store's thread, not on the event loop.
            return await reporter.store.run(
                lambda _: msgspec.json.encode(reader.to_json()), write=False
            )

        given = query_parameters(request, ARRIVALS_PARAMETERS)
        body = await self._read(given, read)
        return Response(body, media_type="application/json")

    async def requests(self, request: Request) -> Response:
        """Requests that have ended, the latest or the slowest first."""
        given = query_parameters(request, ended.PARAMETERS)
        with _told():
            if self.ended is None:
                raise _no_record()
            query = ended.parse_ended_query(self.now(), given, self.ended.ids_of)
            reader, name_of = await self.ended.read(query), self.ended.name_of
        return await large_json(lambda: reader.page(name_of))

    async def _read(
        self, given: dict[str, str], read: Callable[[Reporter, ReportQuery], Awaitable[T]]
    ) -> T:
        with _told():
            query = parse_query(self.now(), **given)
            if self.reporter is None:
                raise _no_record()
            return await read(self.reporter, query)


def _no_record() -> GatewayError:
    return GatewayError(
        501,
        "not_supported",
        "The gateway has no store (store.url: off), so there is no record of requests.",
    )


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Tell clients why a question can't be answered. Raises: GatewayError."""
    try:
        yield
    except InvalidQuery as error:
        raise errors.invalid_request(f"'{error.parameter}': {error}.", error.parameter) from None
    except StoreError as error:
        raise store_unavailable(f"The store can't be read: {error}.") from None
    except ReportInterrupted as error:
        raise store_unavailable(f"The report could not be read: {error}.") from None


def query_parameters(request: Request, known: frozenset[str]) -> dict[str, str]:
    """The parameters of the query, of which only these are known. Raises: GatewayError 400."""
    given = dict(request.query_params)
    if unknown := sorted(set(given) - known):
        raise errors.invalid_request(
            f"Unknown parameter '{errors.truncate_echo(unknown[0])}': there are "
            f"{', '.join(sorted(known))}.",
            unknown[0][:64],
        )
    return given


# Key of the change's target in the ASGI scope, where no parameter of the path is it.
AUDIT_TARGET_KEY = "gateway.audit_target"
AUDIT_ACTION_KEY = "gateway.audit_action"
MOST_LISTED = 1000  # most changes of one response
DEFAULT_LISTED = 100
LARGEST_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class AuditEndpoints:
    """The endpoint of the audit log."""

    audit: AuditTrail

    async def list(self, request: Request) -> Response:
        """Changes, the latest first; `next` is the parameter `before` of the page behind."""
        limit = _integer(request, "limit", MOST_LISTED) or DEFAULT_LISTED
        query = AuditQuery(
            since=_seconds(request, "since"),
            until=_seconds(request, "until"),
            before=_integer(request, "before", LARGEST_ID),
            action=_text(request, "action"),
            target=_text(request, "target"),
            limit=limit + 1,
        )
        try:
            found = await self.audit.entries(query)
        except StoreError as error:
            raise store_unavailable(f"The store can't be read: {error}") from None
        shown = found[:limit]
        return JsonResponse(
            {
                "entries": [entry.as_json() for entry in shown],
                "next": shown[-1].id if len(found) > limit else None,
            }
        )


def _seconds(request: Request, name: str) -> float | None:
    most = sys.float_info.max
    return number_parameter(request, name, -most, most, "a time in seconds since 1970")


def _text(request: Request, name: str) -> str | None:
    word = request.query_params.get(name)
    if word is not None and not (word.isprintable() and len(word) <= LONGEST_TEXT + 1):
        problem = f"must be printable, and of at most {LONGEST_TEXT} characters."
        raise errors.invalid_field(name, problem)
    return word


def _integer(request: Request, name: str, most: int) -> int | None:
    word = request.query_params.get(name)
    if word is None:
        return None
    if not (word.isascii() and word.isdigit() and len(word) < 20 and 0 < int(word) <= most):
        raise errors.invalid_request(f"'{name}' must be a number from 1 to {most}.", name)
    return int(word)
