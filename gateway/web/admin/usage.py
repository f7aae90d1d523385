"""`/admin/usage`: what requests used and cost, from the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.errors import GatewayError
from gateway.store.failures import StoreError
from gateway.usage.reports import InvalidQuery, Reporter, ReportInterrupted, parse_query
from gateway.web.asgi import large_json, store_unavailable

PARAMETERS = frozenset({"by", "since", "until", "limit", "format"})


@dataclass(frozen=True, slots=True)
class UsageEndpoints:
    """The endpoint of the ledger's reports. `reporter` is None where there is no store."""

    reporter: Reporter | None
    now: Callable[[], float]

    async def report(self, request: Request) -> Response:
        """A report, as JSON or CSV."""
        given = dict(request.query_params)
        if unknown := sorted(set(given) - PARAMETERS):
            raise errors.invalid_request(
                f"Unknown parameter '{errors.truncate_echo(unknown[0])}': there are "
                f"{', '.join(sorted(PARAMETERS))}.",
                unknown[0][:64],
            )
        form = given.pop("format", "json")
        if form not in {"json", "csv"}:
            raise errors.invalid_request("'format' must be 'json' or 'csv'.", "format")
        try:
            query = parse_query(self.now(), **given)
            if self.reporter is None:
                raise GatewayError(
                    501,
                    "not_supported",
                    "The gateway has no store (store.url: off), so there is no record of requests.",
                )
            report = await self.reporter.read(query)
        except InvalidQuery as error:
            raise errors.invalid_request(
                f"'{error.parameter}': {error}.", error.parameter
            ) from None
        except StoreError as error:
            raise store_unavailable(f"The store can't be read: {error}.") from None
        except ReportInterrupted as error:
            raise store_unavailable(f"The report could not be read: {error}.") from None
        if form == "csv":
            return Response(await asyncio.to_thread(report.to_csv), media_type="text/csv")
        return await large_json(report.to_json)
