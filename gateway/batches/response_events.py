"""The events of one stored response: numbered, under ids of our own, with exactly one end.

A node's ids differ from run to run, and official clients refuse a stream whose ids change. So the
response and its items get ids that follow from the response's own id, and keep them when another
node, or another process after a crash, goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.batches.event_log import EventLog, EventLogs, event_data
from gateway.proxy.json_values import JsonObject

_ITEM_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}

_ECHOED: JsonObject = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "reasoning": None,
    "service_tier": None, "temperature": None, "text": {"format": {"type": "text"}},
    "tool_choice": "auto", "tools": [], "top_logprobs": None, "top_p": None,
    "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of a response that repeat those of its request, with their values if it has none."""

MOST_ITEMS = 1024
"""Items of one response."""


def queued_response(id_: str, created_at: float, body: JsonObject) -> JsonObject:
    """The response to this request before it runs, as its creation is answered."""
    echoed = {
        name: default if body.get(name) is None else body[name]
        for name, default in _ECHOED.items()
    }
    return {
        "id": id_,
        "object": "response",
        "created_at": int(created_at),
        "status": "queued",
        "background": bool(body.get("background")),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": str(body.get("model") or ""),
        "output": [],
        "store": body.get("store") is not False,
        "usage": None,
        **echoed,
    }


async def current_response(log: EventLog) -> JsonObject:
    """The response as a log shows it now. Raises: FolderError, FileNotFoundError.

    That of its terminal event; before that it has no output.
    """
    last = await log.last_event()
    if last is None:
        return {}
    if "response" in last:
        found: JsonObject = last["response"]
        return found
    async for events in log.events():
        lifecycle = [value for event in _split(events) if "response" in (value := event_data(event))]
        begun: JsonObject = lifecycle[-1]["response"]
        return begun
    return {}


@dataclass(slots=True)
class OutputItem:
    """An item of the response's output."""

    id: str
    type: str
    done: bool = False


class ResponseEvents:
    """Takes the events of a response's runs (`Runner.run`'s sink), and puts them into its log.

    `response`: as in its first event.
    """

    def __init__(self, log: EventLog, response: JsonObject, now: Callable[[], float]) -> None:
        self._log = log
        self._response = response
        self._now = now
        self._items: list[OutputItem] = []
        self._places: dict[str, int] = {}
        """Places in the output by the ids of the node that runs it now."""
        self._in_progress = False

    @classmethod
    async def create(
        cls, logs: EventLogs, response: JsonObject, now: Callable[[], float]
    ) -> ResponseEvents:
        """A new log that begins with this queued response. Raises: FolderError."""
        log = await logs.create()
        try:
            await log.append(
                [{"type": f"response.{word}", "response": response} for word in ("created", "queued")]
            )
            await log.flush()
        except BaseException:
            await log.release()
            raise
        return cls(log, response, now)

    @classmethod
    async def reopen(
        cls, logs: EventLogs, name: str, now: Callable[[], float]
    ) -> ResponseEvents:
        """Go on with this log, which nobody else writes. Raises: FileNotFoundError, FolderError."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The log's file, to be kept in the row."""
        return self._log.name

    @property
    def ended(self) -> bool:
        """Whether it has its terminal event."""
        return self._log.ending

    async def begin(self) -> None:
        """A run begins. Raises: FolderError."""

    async def write(self, events: bytes) -> None:
        """Whole events of a run, of a node or one of the gateway's errors.

        Raises: GatewayError, if the response gets too long: then it has failed; FolderError.
        """

    async def fail(self, code: str, message: str) -> None:
        """It has failed; nothing, if it has ended. Raises: FolderError."""

    async def cancel(self) -> None:
        """It was cancelled: it ends as failed, with the status `cancelled`. Raises: FolderError."""

    async def response(self) -> JsonObject:
        """The response as it is now. Raises: FolderError."""
        await self._log.flush()
        return await current_response(self._log)

    async def close(self) -> None:
        """This process writes no more of it. Raises: FolderError."""
        try:
            await self._log.stop_writing()
        finally:
            await self._log.release()
