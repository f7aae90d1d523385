"""Background responses of a whole gateway that end, and the events that real receivers get."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.batches.receivers import receiving
from tests.batches.test_batch_webhooks import client, gateway, origin, unwrapped

pytestmark = pytest.mark.usefixtures("hurried")

pytest.importorskip("gateway.batches.background_runner")


async def test_a_background_response_is_told_when_it_has_ended(tmp_path: Path) -> None:
    async with receiving() as receiver:
        url = f"{origin(receiver)}/hooks"
        async with gateway(tmp_path, url=url) as running, client(running) as alice:
            made = await alice.responses.create(
                model="demo",
                input="hi",
                background=True,
                max_output_tokens=8,
                extra_body={"webhook_url": f"{url}/job-7"},
            )
            await receiver.came(2)
            ended = await alice.responses.retrieve(made.id)
            told = {unwrapped(alice, request) for request in receiver.requests}
            assert told == {(f"response.{ended.status}", made.id)}
            assert ended.status in {"completed", "incomplete"}
            assert {request.line for request in receiver.requests} == {
                "POST /hooks HTTP/1.1",
                "POST /hooks/job-7 HTTP/1.1",
            }


async def test_a_cancelled_background_response_is_told(tmp_path: Path) -> None:
    async with (
        receiving() as receiver,
        gateway(tmp_path, url=origin(receiver)) as running,
        client(running) as alice,
    ):
        made = await alice.responses.create(
            model="demo", input="hi", background=True, max_output_tokens=4000
        )
        await alice.responses.cancel(made.id)
        await receiver.came(1)
        assert unwrapped(alice, receiver.requests[0]) == ("response.cancelled", made.id)


async def test_a_background_response_with_a_webhook_url_that_is_not_listed_is_refused(
    tmp_path: Path,
) -> None:
    async with (
        receiving() as receiver,
        gateway(tmp_path, url=f"{origin(receiver)}/hooks") as running,
        client(running) as alice,
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await alice.responses.create(
                model="demo",
                input="hi",
                background=True,
                extra_body={"webhook_url": f"{origin(receiver)}/other"},
            )
        assert caught.value.param == "webhook_url"
    assert receiver.connections == 0
