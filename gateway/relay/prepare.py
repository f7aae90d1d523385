"""From what the client sent to a `Request`: read once, checked once, edited once."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import msgspec

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.config.routing import CATCH_ALL
from gateway.fleet.catalogue import Catalogue
from gateway.relay import assembly, edits, grammar, peek, prompts, sampling
from gateway.relay.fingerprint import fingerprint, fingerprint_large
from gateway.relay.large import LARGE, Body, read_large
from gateway.relay.naming import Meaning, Names
from gateway.relay.routes import Route
from gateway.relay.volatile import Volatile
from gateway.request import Caller, Priority, Request

BYTES_PER_TOKEN = 4.0
"""English text has about 4 bytes a token in the tokenizers of today's open models; JSON around
it makes the guess low on purpose, since it only ever excludes nodes."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The part of the settings that preparing goes by; replaced as a whole at a reload."""

    limits: LimitSettings
    names: Names
    default_model: str | None
    volatile: Volatile = field(default_factory=Volatile)


@dataclass(slots=True)
class Incoming:
    """A request as the edge has read it."""

    id: str
    tag: str
    route: Route
    fields: bytes
    """The lines of its head that are passed on."""
    patience: float | None
    """Seconds that the client will wait for the whole answer."""
    body: Body
    caller: Caller
    received: float
    party: str = ""
    """Whom the queue is fair to; empty: the caller."""
    session: str | None = None
    own_timer: bool = False
    """Whether `patience` is what the client tells of a timer of its own."""


def prepare(
    incoming: Incoming,
    peeked: peek.Peek,
    priority: Priority,
    rules: Rules,
    catalogue: Catalogue,
) -> Request:
    """A request that can be sent to nodes. Raises: GatewayError."""
    route, limits, body = incoming.route, rules.limits, incoming.body
    raw = getattr(peeked, route.prompt) if route.prompt in _PROMPTS else peek.NOTHING
    if isinstance(body, bytes):
        levels = peek.depth(body, limits.json_depth)
        if levels > limits.json_depth:
            raise errors.nested_too_deeply(limits.json_depth)
        vision = peek.may_link(body) and _checked_media(*_links(body), limits.media_hosts, route)
        tokens = peek.count_tokens(raw, BYTES_PER_TOKEN)
    else:
        levels, found = body.levels, body.addresses()
        vision = _checked_media(found, body.pictures, limits.media_hosts, route)
        tokens = body.count_tokens(route.prompt, BYTES_PER_TOKEN)
    if peek.has_options(peeked):
        _check_options(peeked, levels, route, limits)
    model, meanings = _meant(peeked.model, rules, incoming.caller, catalogue)
    bodies: dict[str, Body] = {}
    slots = 1 if route.occupies else 0
    for meaning in meanings:
        ruled = edits.ruled(body, meaning.rules) if meaning.rules else body
        seen = peeked if ruled is body else _peeked(ruled)
        edit = edits.needed(
            seen,
            meaning.rules,
            length_field=route.limit,
            max_tokens=limits.max_tokens,
            n_probs=limits.n_probs,
        )
        if rules.volatile.strips:
            edit = (edit or {}) | rules.volatile.edit(ruled)
        bodies[meaning.name] = edits.applied(ruled, edit) if edit else ruled
        if route.streams:
            slots = max(slots, _slots(seen, limits.n))
    # By place: told by name, so many values cost more than all the rest of this function.
    request = Request(
        incoming.id,
        incoming.tag,
        route.path,
        incoming.fields + b"x-request-id: " + incoming.tag.encode() + b"\r\n",
        bodies,
        peeked.model,
        incoming.caller,
        priority,
        model,
        tuple(bodies),
        route.endpoint,
        incoming.received,
    )
    request.vision = vision
    request.slots = slots
    request.prompt_tokens = tokens
    request.native = route.native
    if incoming.patience is not None:
        request.deadline = incoming.received + incoming.patience
        request.own_timer = incoming.own_timer
    request.writes = route.streams
    if route.streams:
        if route.prompt == "prompt":
            request.several = _several(incoming, peeked, priority, rules, catalogue)
        _generates(request, body, peeked, raw, route, rules.volatile)
    else:
        request.text = int(tokens * BYTES_PER_TOKEN)
    request.party = incoming.party or incoming.caller.id
    request.session = incoming.session
    return request


def _generates(
    request: Request,
    body: Body,
    peeked: peek.Peek,
    raw: msgspec.Raw,
    route: Route,
    volatile: Volatile,
) -> None:
    """Note what is to be known of a request whose answer is generated."""
    request.stream = bool(peeked.stream)
    request.probabilities = sampling.tells_probabilities(peeked)
    if not request.stream:
        request.assembled = assembly.fits(route.path, body, peeked.messages, request.slots)
    request.max_tokens = _max_tokens(peeked)
    if isinstance(body, bytes):
        size = peek.measure(raw, peeked.tools, peeked.system, peeked.instructions)
        request.prompt = fingerprint(body, route, request.model, volatile)
    else:
        # Its fingerprint takes steps of its own: who asked for this sees to it.
        size = body.measure(route.prompt)
    request.text, request.ids, request.media = size


def _check_options(peeked: peek.Peek, levels: int, route: Route, limits: LimitSettings) -> None:
    """See that none of its options costs a node more than it may. Raises: GatewayError 400."""
    if grammar.is_bound(peeked):
        grammar.check(peeked, levels, limits)
    if route.streams:
        sampling.check(peeked, limits)


_PROMPTS = frozenset({"prompt", "messages", "input"})


def _meant(
    said: str | None, rules: Rules, caller: Caller, catalogue: Catalogue
) -> tuple[str, tuple[Meaning, ...]]:
    """The public model name of a request, and what it stands for. Raises: GatewayError."""
    model = said or rules.default_model
    if model is None:
        known = [name for name in catalogue.model_names() if caller.may_use(name)]
        if not known:
            raise catalogue.unknown(None)
        if len(known) > 1:
            some = ", ".join(f"'{name}'" for name in known[:8])
            raise errors.invalid_request(f"'model' is missing. There are: {some}.", "model")
        model = known[0]
    if rules.names.catches and rules.names.caught(model, catalogue):
        # From here on by the target's name: the client's may be any text.
        if not (caller.may_use(model) or caller.may_use(CATCH_ALL)):
            raise errors.model_not_allowed(model)
        meanings = rules.names.meanings(CATCH_ALL)
        return meanings[0].name, meanings
    if not caller.may_use(model):
        raise errors.model_not_allowed(model)
    return model, rules.names.meanings(model)


def prepare_form(
    incoming: Incoming, peeked: peek.Peek, priority: Priority, rules: Rules, catalogue: Catalogue
) -> Request:
    """A request whose body is a form, which the settings' rules of models leave as it is.

    Raises: GatewayError.
    """
    route = incoming.route
    model, meanings = _meant(peeked.model, rules, incoming.caller, catalogue)
    bodies = {meaning.name: incoming.body for meaning in meanings}
    return Request(
        id=incoming.id,
        tag=incoming.tag,
        path=route.path,
        fields=incoming.fields + b"x-request-id: " + incoming.tag.encode() + b"\r\n",
        bodies=bodies,
        said=peeked.model,
        caller=incoming.caller,
        priority=priority,
        model=model,
        candidates=tuple(bodies),
        endpoint=route.endpoint,
        received=incoming.received,
        deadline=None if incoming.patience is None else incoming.received + incoming.patience,
        writes=False,
        party=incoming.party or incoming.caller.id,
        session=incoming.session,
    )


def _several(
    incoming: Incoming, peeked: peek.Peek, priority: Priority, rules: Rules, catalogue: Catalogue
) -> prompts.Several | None:
    def make(index: int, body: bytes) -> Generator[None, None, Request]:
        return _part(incoming, index, body, priority, rules, catalogue)

    return prompts.several(incoming.body, peeked.prompt, rules.limits, make)


def _part(
    incoming: Incoming,
    index: int,
    body: bytes,
    priority: Priority,
    rules: Rules,
    catalogue: Catalogue,
) -> Generator[None, None, Request]:
    """The request of one prompt of several, a step at a time. Raises: GatewayError."""
    one = replace(incoming, id=f"{incoming.id}.{index}", tag=f"{incoming.tag}.{index}", body=body)
    if len(body) < LARGE:
        return prepare(one, peek.peek(body), priority, rules, catalogue)
    one.body = large = yield from read_large(body, rules.limits)
    request = prepare(one, large.peek(), priority, rules, catalogue)
    request.prompt = yield from fingerprint_large(large, one.route, request.model, rules.volatile)
    return request


def _slots(peeked: peek.Peek, limit: int) -> int:
    """Slots that a prompt takes at once: one for each answer."""
    if peeked.n is None and peeked.n_cmpl is None:
        return 1
    answers = 1
    for name in ("n", "n_cmpl"):
        asked = edits.whole(getattr(peeked, name)) or 1
        if asked > limit:
            raise errors.invalid_request(f"'{name}' is {asked}, the most is {limit}.", name)
        answers = max(answers, asked)
    return answers


def _peeked(body: Body) -> peek.Peek:
    return peek.peek(body) if isinstance(body, bytes) else body.peek()


def _max_tokens(peeked: peek.Peek) -> int | None:
    for value in (
        peeked.max_completion_tokens,
        peeked.max_tokens,
        peeked.max_output_tokens,
        peeked.n_predict,
    ):
        if value is not None and value >= 0:
            return edits.whole(value)
    return None


def _links(body: bytes) -> tuple[list[str], bool]:
    try:
        return peek.links(body)
    except (msgspec.DecodeError, RecursionError):
        raise errors.invalid_json("it can't be read") from None


def _checked_media(
    links: list[str],
    pictures: bool,  # noqa: FBT001
    hosts: tuple[str, ...],
    route: Route,
) -> bool:
    """Whether the body holds a picture; links that a node would fetch are refused."""
    for link in links:
        if not link.startswith("data:") and not _is_allowed(link, hosts):
            raise errors.invalid_request(
                "Only 'data:' URLs may be sent for images and files: the node would have to fetch "
                "anything else. An operator can allow hosts in 'limits.media_hosts'.",
                route.prompt or "messages",
            )
    return pictures


def _is_allowed(link: str, hosts: tuple[str, ...]) -> bool:
    """Whether a node may fetch it; an address that parsers read in different ways it may not."""
    if _AMBIGUOUS.search(link):
        return False
    try:
        parts = urlsplit(link)
        return parts.scheme in {"http", "https"} and parts.hostname in hosts
    except ValueError:
        return False


_AMBIGUOUS = re.compile(r"[^!-~]|[\\@]")
