"""`/admin/usage`: what requests used and cost, from the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.errors import GatewayError
from gateway.store.failures import StoreError
from gateway.usage.reports import (
    ArrivalsReader,
    InvalidQuery,
    Reporter,
    ReportInterrupted,
    ReportQuery,
    parse_query,
)
from gateway.web.asgi import large_json, store_unavailable

PARAMETERS = frozenset({"by", "since", "until", "limit", "format"})

ARRIVALS_PARAMETERS = frozenset({"since", "until"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UsageEndpoints:
    """The endpoint of the ledger's reports. `reporter` is None where there is no store."""

    reporter: Reporter | None
    now: Callable[[], float]

    async def report(self, request: Request) -> Response:
        """A report, as JSON or CSV."""
        given = _parameters(request, PARAMETERS)
        form = given.pop("format", "json")
        if form not in {"json", "csv"}:
            raise errors.invalid_request("'format' must be 'json' or 'csv'.", "format")
        report = await self._read(given, Reporter.read)
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

        given = _parameters(request, ARRIVALS_PARAMETERS)
        body = await self._read(given, read)
        return Response(body, media_type="application/json")

    async def _read(
        self, given: dict[str, str], read: Callable[[Reporter, ReportQuery], Awaitable[T]]
    ) -> T:
        try:
            query = parse_query(self.now(), **given)
            if self.reporter is None:
                raise GatewayError(
                    501,
                    "not_supported",
                    "The gateway has no store (store.url: off), so there is no record of requests.",
                )
            return await read(self.reporter, query)
        except InvalidQuery as error:
            raise errors.invalid_request(
                f"'{error.parameter}': {error}.", error.parameter
            ) from None
        except StoreError as error:
            raise store_unavailable(f"The store can't be read: {error}.") from None
        except ReportInterrupted as error:
            raise store_unavailable(f"The report could not be read: {error}.") from None


def _parameters(request: Request, known: frozenset[str]) -> dict[str, str]:
    given = dict(request.query_params)
    if unknown := sorted(set(given) - known):
        raise errors.invalid_request(
            f"Unknown parameter '{errors.truncate_echo(unknown[0])}': there are "
            f"{', '.join(sorted(known))}.",
            unknown[0][:64],
        )
    return given
