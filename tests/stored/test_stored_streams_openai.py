"""The official client reads stored streams, live and again, from any event on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.api import sse
from gateway.stored.response_events import ResponseEvents, current_response
from gateway.stored.response_log import ResponseLog, ResponseLogs
from tests.stored.responses_over_nodes import begin, check_whole, logged, open_logs
from tests.stored.test_response_events import node_events

openai = pytest.importorskip("openai")


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[str]:
    """The URL of a server of this app."""
    door = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    running = asyncio.create_task(server.serve(sockets=[door]))
    try:
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await running
        door.close()


@asynccontextmanager
async def client_of(logs: ResponseLogs, name: str) -> AsyncIterator[Any]:
    """The official client, of a server with this response."""

    async def retrieve(request: Request) -> Response:
        if request.query_params.get("stream") != "true":
            log: ResponseLog = await logs.open(name)
            found = await current_response(log)
            await log.release()
            return JSONResponse(found)
        after = int(request.query_params.get("starting_after", -1))

        async def events() -> AsyncGenerator[bytes, None]:
            async for piece in logs.follow(name, after):
                yield piece

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/responses/{id}", retrieve)])
    async with serving(app) as url:
        client = openai.AsyncOpenAI(api_key="x", base_url=f"{url}/v1", max_retries=0)
        yield client
        await client.close()


async def feed(events: ResponseEvents) -> None:
    for event in sse.split(node_events(30)):
        await events.write(event)
        await asyncio.sleep(0.005)
    await events.close()


ID = "resp_00000000000aff"


async def test_the_raw_call_follows_live_and_from_any_event(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        events = await begin(logs)
        async with client_of(logs, events.name) as client:
            assert (await client.responses.retrieve(ID)).status == "queued"
            feeding = asyncio.create_task(feed(events))
            stream = await client.responses.retrieve(ID, stream=True)
            live = [event async for event in stream]
            await feeding
            check_whole(await logged(logs, events.name))
            assert [event.sequence_number for event in live] == list(range(len(live)))
            assert live[-1].type == "response.completed"
            again = [event async for event in await client.responses.retrieve(ID, stream=True)]
            assert again == live
            for after in (0, 1, 10, len(live) - 2, len(live) - 1, len(live) + 5):
                rest = await client.responses.retrieve(ID, stream=True, starting_after=after)
                assert [event async for event in rest] == live[after + 1 :]
            whole = await client.responses.retrieve(ID)
            assert whole.output_text == "".join(f"w{number} " for number in range(30))


async def test_the_helper_accepts_the_stream_as_whole(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        events = await begin(logs)
        async with client_of(logs, events.name) as client:
            feeding = asyncio.create_task(feed(events))
            async with client.responses.stream(response_id=ID) as stream:
                async for _ in stream:
                    pass
                live = await stream.get_final_response()
            await feeding
            async with client.responses.stream(response_id=ID, starting_after=7) as stream:
                kinds = [event.sequence_number async for event in stream]
                assert await stream.get_final_response() == live
            assert min(kinds) == 8
            assert live.status == "completed"
            assert live.output_text == "".join(f"w{number} " for number in range(30))


async def test_a_cancelled_stream_is_read_to_its_end(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        events = await begin(logs)
        await events.write(b"".join(list(sse.split(node_events()))[:7]))
        await events.cancel()
        await events.close()
        async with client_of(logs, events.name) as client:
            found = [event async for event in await client.responses.retrieve(ID, stream=True)]
            assert found[-1].type == "response.failed"
            assert found[-1].response.status == "cancelled"
            async with client.responses.stream(response_id=ID) as stream:
                kinds = [event.type async for event in stream]
            assert kinds[-1] == "response.failed"
            assert (await client.responses.retrieve(ID)).output_text == "w0 w1 w2 "


async def test_a_stream_without_an_end_breaks(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        events = await begin(logs)
        await events.write(b"".join(list(sse.split(node_events()))[:7]))
        async with client_of(logs, events.name) as client:
            stream = await client.responses.retrieve(ID, stream=True)
            seen = [await anext(stream) for _ in range(5)]
            await logs.close()

            async def read_on() -> None:
                seen.extend([event async for event in stream])

            with pytest.raises(Exception, match=r"incomplete|closed|[Cc]onnection"):
                await read_on()
            assert all(event.type != "response.completed" for event in seen)
