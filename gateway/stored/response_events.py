"""The events of one stored response: numbered, under ids of our own, with exactly one end.

A node's ids differ from run to run, and official clients refuse a stream whose ids change. So the
response and its items get ids that follow from the response's own id, and keep them when another
node, or another process after a crash, goes on with it.

Followers may have seen the events of a run that was lost, so those of a second run from the
beginning take their place only as long as they are equal (`Repetition`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, TypeVar

import msgspec

from gateway import errors
from gateway.api import sse
from gateway.api.json_values import InvalidJson, JsonObject, parse_object
from gateway.api.responses import read_response
from gateway.api.tokens import read_openai_usage
from gateway.api.transcript import TranscriptRecorder
from gateway.errors import GatewayError
from gateway.forward.resume import FirstRun
from gateway.lease import Usage
from gateway.stored.folder import DiskThreads
from gateway.stored.response_log import (
    TERMINAL_TYPES,
    LogEnded,
    LogFull,
    ResponseLog,
    ResponseLogs,
    event_data,
    split_events,
)
from gateway.transport.errors import InvalidResponse

T = TypeVar("T")


class NotRepeated(Exception):  # noqa: N818 - said of the run
    """The second run has given something else than the first."""


class Repetition:
    """Drops the events of a second run as long as they repeat these, those of the first."""

    def __init__(self, events: Iterable[JsonObject]) -> None:
        self._expected: deque[tuple[bytes, str | None]] = deque()
        parts = map(_parts, events)
        for (key, is_text), alike in groupby(parts, lambda one: (one[0], one[1] is not None)):
            if is_text:
                self._expected.append((key, "".join(text or "" for _, text in alike)))
            else:
                self._expected.extend(alike)

    def new_part(self, value: JsonObject) -> JsonObject | None:
        """The part of the next event that is new, if any is. Raises: NotRepeated."""
        if not self._expected:
            return value
        key, text = _parts(value)
        expected_key, expected_text = self._expected[0]
        if key != expected_key or (text is None) != (expected_text is None):
            raise NotRepeated
        if text is None or expected_text is None:
            self._expected.popleft()
            return None
        if expected_text.startswith(text):
            left = expected_text[len(text) :]
            if left:
                self._expected[0] = key, left
            else:
                self._expected.popleft()
            return None
        if len(self._expected) > 1 or not text.startswith(expected_text):
            raise NotRepeated
        self._expected.popleft()
        return value | {"delta": text[len(expected_text) :]}


def _parts(value: JsonObject) -> tuple[bytes, str | None]:
    """What an event is, without its number, and the text that it adds, if it is a delta."""
    delta = value.get("delta")
    fields = {name: one for name, one in value.items() if name != "sequence_number"}
    if isinstance(delta, str):
        del fields["delta"]
    key = msgspec.json.encode(fields, order="sorted")
    return key, delta if isinstance(delta, str) else None


_ITEM_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}

_ECHOED: JsonObject = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "reasoning": None,
    "service_tier": None, "temperature": None, "text": {"format": {"type": "text"}},
    "tool_choice": "auto", "tools": [], "top_logprobs": None, "top_p": None,
    "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of a response that repeat those of its request, with their values if it has none."""

# Fields of a request that `queued_response` reads.
REPEATED = (*_ECHOED, "background", "model", "store")
# Fields of a response that its nodes tell.
_OF_NODES = ("status", "output", "usage", "incomplete_details", "error", "model", "service_tier")
MOST_ITEMS = 1024  # items of one response
_LIFECYCLE_TYPES = frozenset({"response.created", "response.queued", "response.in_progress"})
# Begins the comment that tells where a response has begun, before its first event with content.
_RUN_MARK = b": run "
_END_MARK = b": end "  # begins the comment that tells what its run has used, before its last event


def queued_response(id_: str, created_at: float, body: JsonObject) -> JsonObject:
    """The response to this request before it runs, as its creation is answered."""
    echoed = {
        name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()
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


async def current_response(log: ResponseLog) -> JsonObject:
    """The response as a log shows it now; until it ends it has no output.

    Raises: FolderError, FileNotFoundError.
    """
    found: JsonObject = (await log.last_event() or {}).get("response") or {}
    if not found:
        async for events in log.events():
            for value in map(event_data, split_events(events)):
                if "response" not in value:
                    return found
                found = value["response"]
    return found


class RunEnd(NamedTuple):
    """What a run has used until its response ended, beside tokens: kept with the response."""

    started_at: float  # Unix time, as the next one
    ended_at: float
    node: str  # a word for the last node, which does not tell its name
    attempts: int
    slot_seconds: float
    cost: float


class _RunMark(msgspec.Struct):
    model: str
    kind: str | None = None


@dataclass(eq=False)
class ResponseEvents:
    """The sink of a response's runs (`RequestRunner.run`): puts their events into its log.

    `_response`: as in its first event. `_now`: gives Unix time.
    """

    _log: ResponseLog
    _response: JsonObject
    _now: Callable[[], float]
    _threads: DiskThreads
    begun: tuple[TranscriptRecorder, FirstRun] | None = None
    """What earlier runs have given of its output, as far as it was kept, and where it began."""
    run_end: RunEnd | None = None
    """What the run has used that has ended the response; None: the log does not tell."""
    _items: list[str] = field(default_factory=list)  # their ids
    _places: dict[str, int] = field(default_factory=dict)
    """Places in the output by ids: ours, and those of the node that runs it now."""
    _mark: bytes = b""  # goes before the next event with content
    _model: str = ""  # the model that answers, as far as the nodes have not told
    _in_progress: bool = False
    _measure: Callable[[int, int], RunEnd] | None = None
    _tokens: int = 0  # tokens of the output that the log had when it was opened
    _repetition: Repetition | None = None
    _error: tuple[str, str] | None = None
    """Code and message of the error with which the run has ended."""

    @property
    def _suffix(self) -> str:
        return str(self._response.get("id") or "").rpartition("_")[2]

    # Its beginning.

    @classmethod
    async def create(
        cls, logs: ResponseLogs, response: JsonObject, now: Callable[[], float]
    ) -> ResponseEvents:
        """A new log that begins with this queued response. Raises: FolderError."""
        log = await logs.create()
        types = "response.created", "response.queued"
        await log.append([{"type": one, "response": response} for one in types])
        await log.flush()
        return cls(log, response, now, logs.threads)

    @classmethod
    async def reopen(
        cls, logs: ResponseLogs, name: str, now: Callable[[], float], most_text: int = 8 << 20
    ) -> ResponseEvents:
        """Go on with this log, which nobody else writes; a torn event at its end is dropped.

        `most_text`: bytes of text beyond which it can't be resumed (`limits.resume_bytes`). Raises:
        FileNotFoundError, FolderError, which an empty log is too.
        """
        log = await logs.open(name, to_write=True)
        try:
            events = cls(log, {}, now, logs.threads)
            await events._read(most_text)
        except BaseException:
            await log.stop_writing()
            raise
        return events

    async def _read(self, most_text: int) -> None:
        recorder = TranscriptRecorder(read_response, most_text)
        first_run, first = FirstRun("", None), True
        async for events in self._log.events():
            if first:
                head = event_data(next(split_events(events)))
                self._response, first = head.get("response") or {}, False
                self._in_progress = b"\nevent: response.in_progress\n" in events
            if _RUN_MARK in events and (begun := _told(events, _RUN_MARK, _RunMark)) is not None:
                first_run = FirstRun(begun.model, begun.kind)
            if _END_MARK in events:
                self.run_end = _told(events, _END_MARK, RunEnd)
            await self._threads.run(recorder.add, events)
        self._model = first_run.model
        transcript = await self._threads.run(recorder.transcript)
        self._tokens = transcript.token_count
        for id_ in transcript.item_types:
            self._places[id_] = len(self._items)
            self._items.append(id_)
        if self._items and not self.ended:
            self.begun = recorder, first_run

    @property
    def name(self) -> str:
        """The log's file, to be kept in the row."""
        return self._log.name

    @property
    def size(self) -> int:
        """Bytes that are written."""
        return self._log.size

    @property
    def ended(self) -> bool:
        """Whether it has its terminal event."""
        return self._log.ending

    # A run.

    def runs_on(self, first_run: FirstRun) -> None:
        """The events to come are from such a node, and the first of the response."""
        self._model = first_run.model
        if self._repetition is None:
            mark = _RunMark(first_run.model, first_run.node_kind)
            self._mark = _RUN_MARK + msgspec.json.encode(mark) + b"\n"

    def measured_by(self, measure: Callable[[int, int], RunEnd]) -> None:
        """`measure` tells what the run has used, given its prompt's and its answer's tokens."""
        self._measure = measure

    def usage(self, response: JsonObject) -> Usage:
        """The tokens of the response, which has ended; about how many, if it does not tell."""
        told, counted = response.get("usage"), Usage(0, 0, self._tokens)
        return read_openai_usage(told, counted) if isinstance(told, dict) else counted

    async def run_anew(self, reason: str, *, greedy: bool) -> None:
        """The next events are those of a run from the beginning; they must repeat what there is.

        `reason`: why no run can go on with it. Raises: GatewayError, if that is not to be expected;
        FolderError.
        """
        assert self.begun is not None
        transcript = self.begun[0].transcript()
        if not greedy and (transcript.token_count or transcript.unresumable is not None):
            raise _interrupted(reason)
        pages = await self._pages()
        kept = (value for value in _values(pages) if value["type"] not in _LIFECYCLE_TYPES)
        self._repetition = await self._threads.run(Repetition, kept)
        self._items.clear()
        self._places.clear()
        self.begun = None

    async def write(self, events: bytes) -> None:
        """Whole events of a run; an error is kept for `finish`.

        Raises: GatewayError, if the response is too long, or another one than before; FolderError.
        """
        if self.ended:
            return
        values: list[JsonObject] = []
        if not self._in_progress:
            self._in_progress = True
            begun = self._response | {"status": "in_progress"}
            values.append({"type": "response.in_progress", "response": begun})
        for event in sse.split(events):
            data = sse.payload(event)
            if not data or data == b"[DONE]":
                continue
            try:
                value = self._rewritten(parse_object(data), sse.event_name(event))
            except (InvalidJson, InvalidResponse, TypeError, AttributeError, KeyError):
                raise errors.node_failed("An event of the node's stream can't be read.") from None
            if value is not None:
                values.append(value)
                if value["type"] in TERMINAL_TYPES:
                    break
        if not values:
            return
        mark = b""
        if self._mark and any(value["type"] not in _LIFECYCLE_TYPES for value in values):
            mark, self._mark = self._mark, b""
        if self._measure is not None and values[-1]["type"] in TERMINAL_TYPES:
            tokens = self.usage(values[-1]["response"])
            end = self._measure(tokens.prompt_tokens, tokens.completion_tokens)
            mark += _END_MARK + msgspec.json.encode(end) + b"\n"
        try:
            await self._log.append(values, comment=mark)
        except LogFull as full:
            await self.fail("response_too_large", f"{full}")
            raise GatewayError(502, "response_too_large", f"{full}", retryable=False) from None
        except LogEnded:
            return

    # Its end.

    async def finish(self, code: str | None, content: bytes) -> None:
        """The last run has ended: if no terminal event has come, it has failed.

        `code`, `content`: of its error, and the body of its result. Raises: FolderError.
        """
        if not self.ended:
            code, message = self._error or _error_of(code, content)
            await self.fail(code, message)
        await self._log.flush()

    async def fail(self, code: str, message: str) -> None:
        """It has failed; nothing, if it has ended. Raises: FolderError."""
        await self._end({"status": "failed", "error": {"code": code, "message": message}})

    async def cancel(self) -> None:
        """It was cancelled: it ends as failed, with the status `cancelled`. Raises: FolderError."""
        await self._end({"status": "cancelled"})

    async def response(self) -> JsonObject:
        """The response as it is now. Raises: FolderError."""
        await self._log.flush()
        return await current_response(self._log)

    async def close(self) -> None:
        """This process writes no more of it. Raises: FolderError."""
        await self._log.stop_writing()

    async def _end(self, fields: JsonObject) -> None:
        if not self.ended:
            pages = await self._pages()
            output = await self._threads.run(lambda: partial_output(_values(pages)))
            response = self._response | {"output": output} | fields
            # Of two that end it at the same time one is first.
            with contextlib.suppress(LogEnded):
                await self._log.append([{"type": "response.failed", "response": response}])
        await self._log.flush()

    # The events.

    async def _pages(self) -> list[bytes]:
        """All events, in pieces of whole ones."""
        await self._log.flush()
        return [events async for events in self._log.events()]

    def _rewritten(self, value: JsonObject, name: bytes) -> JsonObject | None:
        """An event as the log gets it; None: it does not."""
        kind = value.get("type")
        if name == b"error" or kind == "error" or (kind is None and value.get("error")):
            nested = value.get("error")
            self._fails(nested if isinstance(nested, dict) else value)
            return None
        if not isinstance(kind, str) or not kind.startswith("response."):
            return None
        if kind in _LIFECYCLE_TYPES:
            return None
        if kind == "response.failed":
            response = value.get("response")
            error = (response.get("error") if isinstance(response, dict) else None) or {}
            self._fails(error)
            return None
        value.pop("error", None)
        if kind in TERMINAL_TYPES:
            value = {"type": kind, "response": self._whole(value["response"], kind)}
        elif isinstance(item := value.get("item"), dict):
            value = self._placed_item(value, item)
        elif "item_id" in value:
            value = self._placed(value, kind)
        if self._repetition is None:
            return value
        try:
            return self._repetition.new_part(value)
        except NotRepeated:
            raise _interrupted("a second run has given another one") from None

    def _fails(self, error: JsonObject) -> None:
        code, message = error.get("code"), error.get("message")
        self._error = str(code or "server_error"), str(message or "The node failed.")

    def _placed_item(self, value: JsonObject, item: JsonObject) -> JsonObject:
        """An event with an item, under our id."""
        node_id = str(item.get("id"))
        if value["type"] == "response.output_item.added" and node_id not in self._places:
            self._add_item(node_id, str(item.get("type")))
        index = self._places.get(node_id, max(0, len(self._items) - 1))
        fields = {"type": value["type"], "sequence_number": 0, "output_index": index}
        return fields | {"item": self._own_item(item, index)}

    def _placed(self, value: JsonObject, kind: str) -> JsonObject:
        """An event about an item, under our id."""
        index = self._places.get(str(value["item_id"]), max(0, len(self._items) - 1))
        if index >= len(self._items):
            raise InvalidResponse("The node's stream begins within an item")
        fields: JsonObject = {"type": kind, "sequence_number": 0, "item_id": self._items[index]}
        fields["output_index"] = index
        if kind.startswith(_CONTENT_EVENTS):
            fields["content_index"] = value.get("content_index") or 0
        if kind.startswith("response.output_text."):
            fields["logprobs"] = value.get("logprobs") or []
        return fields | {name: one for name, one in value.items() if name not in fields}

    def _add_item(self, node_id: str, kind: str) -> None:
        index = len(self._items)
        if index >= MOST_ITEMS:
            raise InvalidResponse(f"The node's response has more than {MOST_ITEMS} items")
        prefix = _ITEM_PREFIXES.get(kind, "item_")
        own_id = f"{prefix}{self._suffix}{index:04x}"
        self._items.append(own_id)
        self._places[node_id] = self._places[own_id] = index

    def _own_item(self, item: JsonObject, index: int) -> JsonObject:
        """The item under our ids."""
        fields: JsonObject = {"id": self._items[index]}
        if "call_id" in item:
            fields["call_id"] = f"call_{self._suffix}{index:04x}"
        return item | fields

    def _whole(self, response: JsonObject, kind: str) -> JsonObject:
        """The response in a terminal event of a node."""
        fields = {name: response[name] for name in _OF_NODES if response.get(name)}
        if not (fields.get("model") or self._response.get("model")):
            fields["model"] = self._model
        output = []
        for item in fields.get("output") or []:
            node_id = str(item.get("id"))
            if node_id not in self._places:
                self._add_item(node_id, str(item.get("type")))
            output.append(self._own_item(item, self._places[node_id]))
        word = kind.rpartition(".")[2]
        done = {"completed_at": int(self._now())} if word == "completed" else {}
        return self._response | fields | {"status": word, "output": output} | done


_CONTENT_EVENTS = ("response.output_text.", "response.reasoning_text.", "response.content_part.",
                   "response.refusal.")  # fmt: skip
"""Beginnings of the types of events about a part of an item's content."""


def partial_output(values: Iterable[JsonObject]) -> list[JsonObject]:
    """The items of a response that has ended before its time, as far as its events show them."""
    items: dict[int, JsonObject] = {}
    texts: dict[tuple[int, str, int], list[str]] = {}
    for value in values:
        kind = value["type"]
        if kind in {"response.output_item.added", "response.output_item.done"}:
            items[value["output_index"]] = value["item"]
            if kind.endswith("done"):
                texts = {
                    key: text for key, text in texts.items() if key[0] != value["output_index"]
                }
        elif kind.endswith(".delta") and isinstance(value.get("delta"), str):
            key = value["output_index"], kind.split(".")[1], value.get("content_index") or 0
            texts.setdefault(key, []).append(value["delta"])
    for (index, kind, _), text in texts.items():
        item = items.get(index)
        if item is None:
            continue
        if kind == "function_call_arguments":
            items[index] = item | {"arguments": "".join(text), "status": "incomplete"}
            continue
        part: JsonObject = {"type": kind, "text": "".join(text)}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
        content = [*(item.get("content") or []), part]
        items[index] = item | {"content": content, "status": "incomplete"}
    return [items[index] for index in sorted(items)]


def _values(pages: list[bytes]) -> Iterator[JsonObject]:
    return (event_data(event) for events in pages for event in split_events(events))


def _interrupted(reason: str) -> GatewayError:
    message = f"The response was interrupted, and can't be continued: {reason}."
    return GatewayError(502, "response_interrupted", message, retryable=False)


def _error_of(code: str | None, content: bytes) -> tuple[str, str]:
    """Code and message of the error in a run's result."""
    code, message = code or "server_error", "The response ended too early."
    try:
        error = parse_object(content)["error"]
        return str(error.get("code") or code), str(error.get("message") or message)
    except (InvalidJson, KeyError, AttributeError):
        return code, message


def _told(events: bytes, mark: bytes, kind: type[T]) -> T | None:
    """What the last comment with this mark says; None: there is none, or it can't be read."""
    start = events.rfind(mark) + len(mark)
    try:
        return msgspec.json.decode(events[start : events.index(b"\n", start)], type=kind)
    except (msgspec.MsgspecError, ValueError):
        return None
