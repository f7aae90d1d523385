"""The questions a node is asked over HTTP: is it alive, what is it, what is it busy with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import msgspec

from gateway.fleet.facts import busy_slots
from gateway.fleet.probing import Answer, Outcome
from gateway.transport.patience import Within

if TYPE_CHECKING:
    from gateway.fleet.node import Node

LARGEST_ANSWER = 4 << 20
"""Bytes; `/slots` of a server with many slots and `/props` with a long template stay far below."""
GONE = frozenset({404, 405, 501})
"""There is no such endpoint."""
LOCKED = frozenset({401, 403})
ASK_AGAIN = 300.0
"""Seconds after which a node is asked again for what it refused with 501."""
NAME_IT = "say in the inventory what it serves (model: ...)"


@dataclass(frozen=True, slots=True)
class Reply:
    """A status and a body that was read to its end."""

    status: int
    body: bytes

    def json(self) -> object:
        """The body's value; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None


async def ask(node: Node, path: str) -> Reply | Outcome:
    """GET `path`, within the probe's limit and in bounded memory; an Outcome if that failed."""
    began = node.clock()
    limit = node.rules.health.timeout

    def ended(answer: Answer, detail: str) -> Outcome:
        return Outcome(answer, detail, node.clock() - began)

    try:
        async with (
            Within(limit),
            node.upstream.client.stream("GET", path, timeout=limit) as response,
        ):
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > LARGEST_ANSWER:
                    return ended(Answer.FAILED, f"{path} answers without end")
            return Reply(response.status_code, bytes(body))
    except (TimeoutError, httpx.TimeoutException):
        return ended(Answer.TIMED_OUT, f"no answer to {path} within {limit:g} s")
    except httpx.ConnectError as error:
        return ended(Answer.REFUSED, f"no connection to {node.spec.url} ({_why(error)})")
    except httpx.TransportError as error:
        return ended(Answer.FAILED, f"{path} broke off ({_why(error)})")
    except Exception as error:  # noqa: BLE001 - whatever one node causes, the others are watched
        return ended(Answer.FAILED, f"{path} could not be asked ({_why(error)})")


async def check_alive(node: Node) -> Outcome:
    """The cheapest question that tells whether the node can take work."""
    began = node.clock()
    if node.spec.kind == "openai":
        return await discover(node)
    reply = await ask(node, "/health")
    if isinstance(reply, Outcome):
        return reply
    answer, detail = _judge_health(reply)
    return Outcome(answer, detail, node.clock() - began)


async def discover(node: Node) -> Outcome:
    """Ask what the server is and take it in. UP also if it would not say all, but its models."""
    began = node.clock()
    paths = ["/v1/models"] if node.spec.kind == "openai" else ["/v1/models", "/props"]
    facts = node.facts
    before = facts.identity()
    for path in paths:
        reply = await ask(node, path)
        if isinstance(reply, Outcome):
            return reply
        answer, detail = _judge_discovery(node, path, reply.status)
        if answer is not Answer.UP:
            return Outcome(answer, detail, node.clock() - began)
        if reply.status == httpx.codes.OK:
            facts.forget_remembered()
            if path == "/props":
                facts.read_props(reply.json())
            else:
                facts.read_models(reply.json())
    if node.spec.kind == "llama.cpp" and not facts.models and node.spec.models is None:
        # A server from before 2024, which would be ready for ever and get nothing.
        told = f"its /v1/models and /props name no model: {NAME_IT}"
        return Outcome(Answer.NAMELESS, told, node.clock() - began)
    long_ago = node.clock() >= node.refused_at + ASK_AGAIN
    if long_ago or facts.identity() != before or node.probing.discovered is None:
        # Another build or model, or begun anew, perhaps with other options: what the old one
        # refused says nothing about it. Neither does it for ever.
        facts.refused.clear()
    return Outcome(Answer.UP, "", node.clock() - began)


async def read_slots(node: Node) -> int | None:
    """How many slots the node says are busy; None if it would not say.

    Learns whether there is such an endpoint.
    """
    reply = await ask(node, "/slots")
    if isinstance(reply, Outcome):
        # No process, no busy slot.
        return 0 if reply.answer is Answer.REFUSED else None
    if reply.status in GONE | LOCKED:
        node.facts.slots_endpoint = False
    counts = busy_slots(reply.json()) if reply.status == httpx.codes.OK else None
    if counts is None:
        return None
    node.facts.slots_endpoint = True
    node.facts.slots = node.facts.slots or counts[1]
    return counts[0]


def _judge_health(reply: Reply) -> tuple[Answer, str]:
    if reply.status == httpx.codes.OK:
        return Answer.UP, ""
    if reply.status == httpx.codes.SERVICE_UNAVAILABLE and b"loading model" in reply.body.lower():
        return Answer.LOADING, "the server is loading its model"
    if reply.status in LOCKED:
        return _locked("/health", reply.status)
    if reply.status in GONE:
        return Answer.FAILED, (
            f"/health answers {reply.status}: is this a llama.cpp server? "
            "Another one needs kind: openai in the inventory"
        )
    return Answer.FAILED, f"/health answers {reply.status}"


def _judge_discovery(node: Node, path: str, status: int) -> tuple[Answer, str]:
    if status == httpx.codes.OK:
        return Answer.UP, ""
    if node.spec.kind == "openai":
        # Some services hide their list, even from keys that may use their models.
        hidden = status in GONE or (status in LOCKED and node.spec.api_key is not None)
        if hidden and node.spec.models is not None:
            return Answer.UP, ""
        if status in GONE:
            return Answer.FAILED, f"{path} answers {status}: {NAME_IT}"
    elif status in GONE:
        return Answer.UP, ""
    if status in LOCKED:
        return _locked(path, status)
    return Answer.FAILED, f"{path} answers {status}"


def _locked(path: str, status: int) -> tuple[Answer, str]:
    return Answer.LOCKED, refuses_our_key(path, status)


def refuses_our_key(path: str, status: int) -> str:
    """What an operator reads of a node that this status on this path came from."""
    return (
        f"it refuses our key ({status} on {path}): set api_key_env or api_key_file in the inventory"
    )


def _why(error: Exception) -> str:
    return str(error).strip()[:200] or type(error).__name__
