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
from gateway.fleet.model_index import ModelIndex
from gateway.proxy.inbound import edits, parsed_body, request_limits
from gateway.proxy.inbound.large_body import LARGE_BODY_BYTES, Body, read_large_body
from gateway.proxy.inbound.model_names import ModelAliases, ResolvedModel
from gateway.proxy.inbound.prompt_key import VolatileLines, build_large_prompt_key, build_prompt_key
from gateway.proxy.inbound.prompt_list import PromptList, parse_prompt_list
from gateway.proxy.inbound.routes import Route, can_assemble
from gateway.request import Caller, Priority, Request

BYTES_PER_TOKEN = 4.0
"""English text has about 4 bytes a token in the tokenizers of today's open models; JSON around
it makes the guess low on purpose, since it only ever excludes nodes."""


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The part of the settings that preparing goes by; replaced as a whole at a reload."""

    limits: LimitSettings
    model_aliases: ModelAliases
    default_model: str | None
    volatile_lines: VolatileLines = field(default_factory=VolatileLines)


@dataclass(slots=True)
class IncomingRequest:
    """A request as the edge has read it."""

    id: str
    x_request_id: str
    route: Route
    header_lines: bytes
    """The lines of its head that are passed on."""
    client_timeout: float | None
    """Seconds that the client will wait for the whole answer."""
    body: Body
    caller: Caller
    received_at: float
    fairness_key: str = ""
    """Whom the queue is fair to; empty: the caller."""
    session: str | None = None
    client_has_timer: bool = False
    """Whether `patience` is what the client tells of a timer of its own."""


def prepare(
    incoming: IncomingRequest,
    parsed: parsed_body.ParsedBody,
    priority: Priority,
    rules: RequestRules,
    model_index: ModelIndex,
) -> Request:
    """A request that can be sent to nodes. Raises: GatewayError."""
    route, limits, body = incoming.route, rules.limits, incoming.body
    raw = (
        getattr(parsed, route.prompt_field)
        if route.prompt_field in _PROMPTS
        else parsed_body.MISSING
    )
    if isinstance(body, bytes):
        levels = parsed_body.nesting_depth(body, limits.json_depth)
        if levels > limits.json_depth:
            raise errors.nested_too_deeply(limits.json_depth)
        vision = parsed_body.may_have_links(body) and _check_links(
            *_find_links(body), limits.media_hosts, route
        )
        tokens = parsed_body.estimate_min_tokens(raw, BYTES_PER_TOKEN)
    else:
        levels, found = body.depth, body.find_links()
        vision = _check_links(found, body.has_images, limits.media_hosts, route)
        tokens = body.estimate_min_tokens(route.prompt_field, BYTES_PER_TOKEN)
    if parsed_body.has_limited_options(parsed):
        _check_options(parsed, levels, route, limits)
    model, meanings = _resolve_model(parsed.model, rules, incoming.caller, model_index)
    bodies: dict[str, Body] = {}
    slots = 1 if route.takes_slot else 0
    for meaning in meanings:
        ruled = edits.apply_rules(body, meaning.rules) if meaning.rules else body
        seen = parsed if ruled is body else _parse(ruled)
        edit = edits.required_edit(
            seen,
            meaning.rules,
            max_tokens_field=route.max_tokens_field,
            max_tokens=limits.max_tokens,
            n_probs=limits.n_probs,
        )
        if rules.volatile_lines.strips_requests:
            edit = (edit or {}) | rules.volatile_lines.strip_edit(ruled)
        bodies[meaning.name] = edits.apply_edit(ruled, edit) if edit else ruled
        if route.generates:
            slots = max(slots, _slots(seen, limits.n))
    # By place: told by name, so many values cost more than all the rest of this function.
    request = Request(
        incoming.id,
        incoming.x_request_id,
        route.path,
        incoming.header_lines + b"x-request-id: " + incoming.x_request_id.encode() + b"\r\n",
        bodies,
        parsed.model,
        incoming.caller,
        priority,
        model,
        tuple(bodies),
        route.endpoint,
        incoming.received_at,
    )
    request.needs_vision = vision
    request.slots = slots
    request.prompt_tokens = tokens
    request.llama_cpp_only = route.llama_cpp_only
    if incoming.client_timeout is not None:
        request.deadline = incoming.received_at + incoming.client_timeout
        request.client_has_timer = incoming.client_has_timer
    request.prompt_field = route.prompt_field
    request.generates = route.generates
    if route.generates:
        if route.api.merger is not None:
            request.prompt_list = _split_prompts(incoming, parsed, priority, rules, model_index)
        _set_generation_fields(request, body, parsed, raw, route, rules.volatile_lines)
    else:
        request.text_bytes = int(tokens * BYTES_PER_TOKEN)
    request.fairness_key = incoming.fairness_key or incoming.caller.id
    request.session = incoming.session
    return request


def _set_generation_fields(
    request: Request,
    body: Body,
    peeked: parsed_body.ParsedBody,
    raw: msgspec.Raw,
    route: Route,
    volatile: VolatileLines,
) -> None:
    """Note what is to be known of a request whose answer is generated."""
    request.stream = bool(peeked.stream)
    request.logprobs = request_limits.wants_logprobs(peeked)
    if not request.stream:
        request.may_assemble = can_assemble(route, body, peeked.messages, request.slots)
    request.max_tokens = _max_tokens(peeked)
    if isinstance(body, bytes):
        size = parsed_body.measure_prompt(raw, peeked.tools, peeked.system, peeked.instructions)
        request.prompt_key = build_prompt_key(body, route, request.model, volatile)
    else:
        # Its fingerprint takes steps of its own: who asked for this sees to it.
        size = body.measure_prompt(route.prompt_field)
    request.text_bytes, request.exact_tokens, request.media_tokens = size


def _check_options(
    peeked: parsed_body.ParsedBody, levels: int, route: Route, limits: LimitSettings
) -> None:
    """See that none of its options costs a node more than it may. Raises: GatewayError 400."""
    if request_limits.has_grammar(peeked):
        request_limits.check_grammars(peeked, levels, limits)
    if route.generates:
        request_limits.check_sampling(peeked, limits)


_PROMPTS = frozenset({"prompt", "messages", "input"})


def _resolve_model(
    said: str | None, rules: RequestRules, caller: Caller, catalogue: ModelIndex
) -> tuple[str, tuple[ResolvedModel, ...]]:
    """The public model name of a request, and what it stands for. Raises: GatewayError."""
    model = said or rules.default_model
    if model is None:
        known = [name for name in catalogue.model_names() if caller.may_use(name)]
        if not known:
            raise catalogue.not_found_error(None)
        if len(known) > 1:
            some = ", ".join(f"'{name}'" for name in known[:8])
            raise errors.invalid_request(f"'model' is missing. There are: {some}.", "model")
        model = known[0]
    if rules.model_aliases.has_catch_all and rules.model_aliases.is_catch_all(model, catalogue):
        # From here on by the target's name: the client's may be any text.
        if not (caller.may_use(model) or caller.may_use(CATCH_ALL)):
            raise errors.model_not_allowed(model)
        meanings = rules.model_aliases.resolve(CATCH_ALL)
        return meanings[0].name, meanings
    if not caller.may_use(model):
        raise errors.model_not_allowed(model)
    return model, rules.model_aliases.resolve(model)


def prepare_multipart(
    incoming: IncomingRequest,
    parsed: parsed_body.ParsedBody,
    priority: Priority,
    rules: RequestRules,
    model_index: ModelIndex,
) -> Request:
    """A request whose body is a form, which the settings' rules of models leave as it is.

    Raises: GatewayError.
    """
    route = incoming.route
    model, meanings = _resolve_model(parsed.model, rules, incoming.caller, model_index)
    bodies = {meaning.name: incoming.body for meaning in meanings}
    return Request(
        id=incoming.id,
        x_request_id=incoming.x_request_id,
        path=route.path,
        header_lines=incoming.header_lines
        + b"x-request-id: "
        + incoming.x_request_id.encode()
        + b"\r\n",
        bodies=bodies,
        model_in_body=parsed.model,
        caller=incoming.caller,
        priority=priority,
        model=model,
        model_names=tuple(bodies),
        endpoint=route.endpoint,
        received_at=incoming.received_at,
        deadline=None
        if incoming.client_timeout is None
        else incoming.received_at + incoming.client_timeout,
        generates=False,
        fairness_key=incoming.fairness_key or incoming.caller.id,
        session=incoming.session,
    )


def _split_prompts(
    incoming: IncomingRequest,
    peeked: parsed_body.ParsedBody,
    priority: Priority,
    rules: RequestRules,
    catalogue: ModelIndex,
) -> PromptList | None:
    def make(index: int, body: bytes) -> Generator[None, None, Request]:
        return _prepare_one_prompt(incoming, index, body, priority, rules, catalogue)

    return parse_prompt_list(incoming.body, peeked.prompt, rules.limits, make)


def _prepare_one_prompt(
    incoming: IncomingRequest,
    index: int,
    body: bytes,
    priority: Priority,
    rules: RequestRules,
    catalogue: ModelIndex,
) -> Generator[None, None, Request]:
    """The request of one prompt of several, a step at a time. Raises: GatewayError."""
    one = replace(
        incoming,
        id=f"{incoming.id}.{index}",
        x_request_id=f"{incoming.x_request_id}.{index}",
        body=body,
    )
    if len(body) < LARGE_BODY_BYTES:
        return prepare(one, parsed_body.parse_body(body), priority, rules, catalogue)
    one.body = large = yield from read_large_body(body, rules.limits)
    request = prepare(one, large.parse(), priority, rules, catalogue)
    request.prompt_key = yield from build_large_prompt_key(
        large, one.route, request.model, rules.volatile_lines
    )
    return request


def _slots(peeked: parsed_body.ParsedBody, limit: int) -> int:
    """Slots that a prompt takes at once: one for each answer."""
    if peeked.n is None and peeked.n_cmpl is None:
        return 1
    answers = 1
    for name in ("n", "n_cmpl"):
        asked = edits.clamped_int(getattr(peeked, name)) or 1
        if asked > limit:
            raise errors.invalid_request(f"'{name}' is {asked}, the most is {limit}.", name)
        answers = max(answers, asked)
    return answers


def _parse(body: Body) -> parsed_body.ParsedBody:
    return parsed_body.parse_body(body) if isinstance(body, bytes) else body.parse()


def _max_tokens(peeked: parsed_body.ParsedBody) -> int | None:
    for value in (
        peeked.max_completion_tokens,
        peeked.max_tokens,
        peeked.max_output_tokens,
        peeked.n_predict,
    ):
        if value is not None and value >= 0:
            return edits.clamped_int(value)
    return None


def _find_links(body: bytes) -> tuple[list[str], bool]:
    try:
        return parsed_body.find_links(body)
    except (msgspec.DecodeError, RecursionError):
        raise errors.invalid_json("it can't be read") from None


def _check_links(
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
                route.prompt_field or "messages",
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
