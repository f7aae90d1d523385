"""Probes a node over HTTP: is it alive, what are its properties, how many slots are busy."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from gateway.fleet.node import Node
from gateway.fleet.probe_history import ProbeAnswer, ProbeResult
from gateway.fleet.server_properties import (
    LONGEST_PROPERTY,
    UNREADABLE,
    Purpose,
    count_processing,
    count_slots,
    parse_models,
    parse_props,
)
from gateway.fleet.sleep import read_is_sleeping
from gateway.transport.connection import LoopTimeout
from gateway.transport.errors import (
    ConnectFailed,
    ConnectTimedOut,
    LocalResourcesExhausted,
    UpstreamError,
)
from gateway.transport.pool import speaks_plain_http, speaks_tls, tls_failure

LARGEST_RESPONSE = 4 << 20
"""Bytes; `/slots` of a server with many slots and `/props` with a long template are far smaller."""

LARGEST_REFUSAL = 64 * 1024
"""Bytes of the answer to an empty request."""

NOT_FOUND_STATUSES = frozenset({404, 405, 501})
"""Statuses of an endpoint that the server does not have."""

KEY_REJECTED_STATUSES = frozenset({401, 403})

RETRY_REFUSED_AFTER = 300.0
"""Seconds after which a node is tried again with endpoints that it refused with 501."""

_HEADER_LINES = b"accept: */*\r\naccept-encoding: identity\r\nuser-agent: llama-gateway\r\n"

_POST_HEADER_LINES = _HEADER_LINES + b"content-type: application/json\r\n"

_ENCODING = b"content-encoding"

NAME_MODEL_HINT = "say in the inventory what it serves (model: ...)"


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """A status and a whole body."""

    status: int
    body: bytes

    def json(self) -> object:
        """The body's value; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except UNREADABLE:
            return None


async def fetch(
    node: Node, path: str, *, body: bytes | None = None, largest: int = LARGEST_RESPONSE
) -> ProbeResponse | ProbeResult:
    """GET `path`, or POST `body`, limited in time and bytes; a ProbeResult if that failed."""
    began = node.clock()
    limit = node.settings.health.timeout

    def ended(answer: ProbeAnswer, detail: str) -> ProbeResult:
        return ProbeResult(answer, detail, node.clock() - began)

    pool = node.upstream
    if body is None:
        head = pool.address.request_head(b"GET", path.encode(), _HEADER_LINES)
    else:
        head = pool.address.request_head(b"POST", path.encode(), _POST_HEADER_LINES, len(body))
    try:
        async with (
            LoopTimeout(limit),
            pool.response(head, body or b"", connect_timeout=limit) as connection,
        ):
            encodings = {value.lower() for name, value in connection.headers if name == _ENCODING}
            # A compressed body of some bytes may have millions; none was asked for.
            if not encodings <= {b"", b"identity"}:
                return ended(ProbeAnswer.FAILED, f"{path} is compressed, though asked not to be")
            found = bytearray()
            while part := await connection.read():
                found += part
                if len(found) > largest:
                    return ended(ProbeAnswer.FAILED, f"{path} answers without end")
            return ProbeResponse(connection.status, bytes(found))
    except (TimeoutError, ConnectTimedOut):
        detail = f"no answer to {path} within {limit:g} s"
        # A TLS server does not leave plain HTTP waiting, as a plain one does with a handshake.
        hint = "" if pool.address.tls is None else await _scheme_hint(node, detail)
        return ended(ProbeAnswer.TIMED_OUT, detail + hint)
    except LocalResourcesExhausted as error:
        return ended(ProbeAnswer.TIMED_OUT, f"{path} could not be requested ({_why(error)})")
    except ConnectFailed as error:
        return ended(
            ProbeAnswer.CONNECTION_REFUSED,
            f"no connection to {node.spec.url} ({_why_not(node, error)})",
        )
    except UpstreamError as error:
        detail = f"{path} broke off ({_why(error)})"
        return ended(ProbeAnswer.FAILED, detail + await _scheme_hint(node, detail))
    except Exception as error:  # noqa: BLE001 - no error of one node may stop the watch of others
        return ended(ProbeAnswer.FAILED, f"{path} could not be requested ({_why(error)})")


async def check_alive(node: Node) -> ProbeResult:
    """Whether the node can take work, by its cheapest endpoint."""
    began = node.clock()
    if node.spec.kind == "openai":
        return await discover(node)
    reply = await fetch(node, "/health")
    if isinstance(reply, ProbeResult):
        return reply
    answer, detail = _judge_health(reply)
    if reply.status == HTTPStatus.BAD_REQUEST:
        detail += await _scheme_hint(node, detail)
    return ProbeResult(answer, detail, node.clock() - began)


async def discover(node: Node) -> ProbeResult:
    """Read the server's properties into `node.properties`; UP even if some could not be read."""
    began = node.clock()
    paths = ["/v1/models"] if node.spec.kind == "openai" else ["/v1/models", "/props"]
    properties = node.properties
    before = properties.version_key()
    for path in paths:
        reply = await fetch(node, path)
        if isinstance(reply, ProbeResult):
            return reply
        answer, detail = _judge_discovery(node, path, reply.status)
        if answer is not ProbeAnswer.UP:
            if reply.status == HTTPStatus.BAD_REQUEST:
                detail += await _scheme_hint(node, detail)
            return ProbeResult(answer, detail, node.clock() - began)
        if reply.status == HTTPStatus.OK:
            properties.clear_remembered()
            if path == "/props":
                node.probe_history.props_read(_note_sleep(node, reply.body))
                properties.read_props(parse_props(reply.body))
            else:
                properties.read_models(parse_models(reply.body))
    if node.spec.kind == "llama.cpp" and not properties.models and node.spec.models is None:
        # A server from before 2024, which would always be ready and never get work.
        detail = f"its /v1/models and /props name no model: {NAME_MODEL_HINT}"
        return ProbeResult(ProbeAnswer.NO_MODEL, detail, node.clock() - began)
    long_ago = node.clock() >= node.endpoint_refused_at + RETRY_REFUSED_AFTER
    is_new = properties.version_key() != before or node.probe_history.discovered_at is None
    if long_ago or is_new:
        # Another build or model, or a new process, perhaps with other options: earlier refusals
        # prove nothing. Nor do they for ever.
        properties.refused.clear()
    is_unasked = not properties.purpose_asked or (is_new and properties.process is None)
    if is_unasked and not node.sleep.sleeping and node.spec.kind == "llama.cpp":
        node.purpose_found(*await _ask_purpose(node))
    return ProbeResult(ProbeAnswer.UP, "", node.clock() - began)


async def _ask_purpose(node: Node) -> tuple[Purpose | None, dict[str, str]]:
    """What the server was started for, and its words about endpoints that it lacks.

    None: it did not answer.

    It says so nowhere, but checks whether it does embeddings and reranking (501) before the body
    (400). So an empty one is refused at once, also while it is busy, and takes no slot. Yet the
    question wakes a sleeping server, and begins its idle time anew: each process is asked once.
    Any other answer tells nothing: ik_llama.cpp's server checks the body alone and has no rerank
    (404), a proxy may pass one path only, and a router wants a model's name first.
    """
    purpose: Purpose = "chat"
    hints: dict[str, str] = {}
    questions: tuple[tuple[Purpose, bytes], ...] = (("embeddings", b"input"), ("rerank", b"query"))
    for endpoint, needed_field in questions:
        reply = await fetch(node, f"/v1/{endpoint}", body=b"{}", largest=LARGEST_REFUSAL)
        if isinstance(reply, ProbeResult):
            return None, {}
        if reply.status == HTTPStatus.BAD_REQUEST and needed_field in reply.body:
            purpose = endpoint
        elif reply.status != HTTPStatus.NOT_IMPLEMENTED:
            return "unknown", {}
        elif isinstance(answer := reply.json(), dict) and isinstance(answer.get("error"), dict):
            hints[endpoint] = str(answer["error"].get("message"))[:LONGEST_PROPERTY]
    return purpose, hints


async def has_changed(node: Node) -> bool:
    """Whether `/props` is no longer what was read: perhaps another process, with another model.

    One small query tells, which is not decoded. A node that fails it counts as unchanged.
    """
    if node.probe_history.props_digest is None:
        return False
    reply = await fetch(node, "/props")
    if isinstance(reply, ProbeResult) or reply.status != HTTPStatus.OK:
        return False
    if not node.probe_history.props_differ(_note_sleep(node, reply.body)):
        return False
    node.sleep.restarted()
    return True


def _note_sleep(node: Node, props: bytes) -> bytes:
    """Take in whether the server sleeps; returns the rest of its answer to `/props`."""
    asleep, rest = read_is_sleeping(props)
    node.sleep.props_read(asleep, node.clock(), asked=any(one.wake for one in node.leases))
    return rest


async def probe_slots(node: Node) -> tuple[int, ...] | None:
    """The tokens of each slot that the node reports as busy; None: unknown.

    Learns whether it has `/slots`. It wakes a server that sleeps, and begins the time anew of one
    that may fall asleep.
    """
    return read_busy(node, "/slots", await fetch(node, "/slots"))


def read_busy(node: Node, path: str, reply: ProbeResponse | ProbeResult) -> tuple[int, ...] | None:
    """As `probe_slots`, from the answer to `/slots`, or to `/metrics`, which knows no tokens."""
    if isinstance(reply, ProbeResult):
        # Without a process no slot is busy.
        return () if reply.answer is ProbeAnswer.CONNECTION_REFUSED else None
    refused = reply.status in NOT_FOUND_STATUSES | KEY_REJECTED_STATUSES
    if path == "/metrics":
        busy = count_processing(reply.body) if reply.status == HTTPStatus.OK else None
        if refused or (busy is None and reply.status == HTTPStatus.OK):
            node.properties.metrics_refused()
        return None if busy is None else (0,) * busy
    if refused:
        node.properties.slots_refused()
    counts = count_slots(reply.body) if reply.status == HTTPStatus.OK else None
    if counts is None:
        return None
    node.properties.slots_reported(counts.total)
    return counts.busy_tokens


def _judge_health(reply: ProbeResponse) -> tuple[ProbeAnswer, str]:
    if reply.status == HTTPStatus.OK:
        return ProbeAnswer.UP, ""
    if reply.status == HTTPStatus.SERVICE_UNAVAILABLE and b"loading model" in reply.body.lower():
        return ProbeAnswer.LOADING, "the server is loading its model"
    if reply.status in KEY_REJECTED_STATUSES:
        return _key_rejected("/health", reply.status)
    if reply.status in NOT_FOUND_STATUSES:
        return ProbeAnswer.FAILED, (
            f"/health answers {reply.status}: is this a llama.cpp server? "
            "Another one needs kind: openai in the inventory"
        )
    return ProbeAnswer.FAILED, f"/health answers {reply.status}"


def _judge_discovery(node: Node, path: str, status: int) -> tuple[ProbeAnswer, str]:
    if status == HTTPStatus.OK:
        return ProbeAnswer.UP, ""
    if node.spec.kind == "openai":
        # Some services hide their list of models, even from keys that may use them.
        hidden = status in NOT_FOUND_STATUSES or (
            status in KEY_REJECTED_STATUSES and node.spec.api_key is not None
        )
        if hidden and node.spec.models is not None:
            return ProbeAnswer.UP, ""
        if status in NOT_FOUND_STATUSES:
            return ProbeAnswer.FAILED, f"{path} answers {status}: {NAME_MODEL_HINT}"
    elif status in NOT_FOUND_STATUSES:
        return ProbeAnswer.UP, ""
    if status in KEY_REJECTED_STATUSES:
        return _key_rejected(path, status)
    return ProbeAnswer.FAILED, f"{path} answers {status}"


def _key_rejected(path: str, status: int) -> tuple[ProbeAnswer, str]:
    return ProbeAnswer.KEY_REJECTED, key_rejected_reason(path, status)


def key_rejected_reason(path: str, status: int) -> str:
    """The reason, for an operator, when this status on this path means a wrong key."""
    return (
        f"it refuses our key ({status} on {path}): set api_key_env or api_key_file in the inventory"
    )


SCHEME_LIMIT = 1.0
"""Seconds for a look whether the node speaks the other scheme."""


async def _scheme_hint(node: Node, detail: str) -> str:
    """What to write in the inventory if the node speaks the other scheme; else nothing.

    It is asked once for a failure, `detail`; and if it was up a moment ago it has other troubles.
    """
    if node.probe_history.up:
        return ""
    if node.probe_history.detail.startswith(detail):
        return node.probe_history.detail.removeprefix(detail)
    address = node.upstream.address
    limit = min(SCHEME_LIMIT, node.settings.health.timeout)
    if address.tls is None:
        if await speaks_tls(address.host, address.port, limit):
            return ": it speaks TLS: write https:// in its url"
    elif await speaks_plain_http(address.host, address.port, limit):
        return ": it speaks plain HTTP: write http:// in its url"
    return ""


def _why_not(node: Node, error: Exception) -> str:
    """Why there is no connection; of TLS, with the key of the inventory that mends it."""
    kind, words = tls_failure(_why(error))
    spec = node.spec.tls
    ca = None if spec is None else spec.ca
    remedy = {
        "untrusted": "name the authority behind it in tls.ca"
        if ca is None
        else f"tls.ca, {ca}, is not the authority behind it",
        "name": "use a name of its certificate in the url, or give it in tls.server_name",
        "expired": "renew it on the node",
        "plain": "write http:// in its url if it speaks plain HTTP",
        "client": "if it wants a certificate of ours, name it in tls.cert and tls.key",
    }.get(kind)
    if remedy is None:
        return words
    subject = "" if kind in {"plain", "client"} else "its certificate is not accepted: "
    return f"{subject}{words}: {remedy}"


def _why(error: Exception) -> str:
    return str(error).strip()[:200] or type(error).__name__
