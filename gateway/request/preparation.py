"""Turns what a client sent into a `Request`: parsed once, checked once, edited once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
from msgspec.structs import replace as replace_fields

from gateway import errors
from gateway.api.json_values import ITEMS_DECODER, JSON_ERRORS, InvalidJson, parse_object
from gateway.api.tokens import settle_bound
from gateway.callers.limits import Accounts
from gateway.catalog import ServedModels
from gateway.config.keys import SHARED_CACHE, CachePolicy, NodeLabels
from gateway.config.listeners import LimitSettings
from gateway.config.scheduling import CATCH_ALL, ModelRule
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.lease import KeyedHash, LeaseCaller, LeaseRequest, RequestSize, WantedNode
from gateway.request import edits, media, multipart, request_limits
from gateway.request.body import (
    BYTE_ORDER_MARK,
    BYTES_PER_TOKEN,
    FULL_PARSE_BYTES,
    LARGE_BODY_BYTES,
    MISSING,
    PROMPT_FIELDS,
    SMALL_BODY_BYTES,
    Body,
    ParsedBody,
    TimeSlicer,
    has_edited_options,
    has_limited_options,
    is_slow_to_parse,
    measure_prompt,
    nesting_depth,
    parse_body,
    read_large_body,
    without_large_fields,
)
from gateway.request.edits import raw_fields
from gateway.request.prompt_key import (
    SHORTEST_BODY,
    VolatileLines,
    build_prompt_key,
    prompt_key_steps,
)
from gateway.request.routes import Route
from gateway.terms import Caller, Headers, Priority

MOST_TARGETS = 32  # Models that one alias may resolve to
MOST_CHOICES = 1024  # Chosen models that are remembered


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that nodes may serve, and the rules for requests that reach it by this name."""

    name: str
    rules: tuple[ModelRule, ...] = ()


class ModelChoice:
    """The models that a name stands for, and what a request for it wants of a node."""

    __slots__ = ("_labels", "_wanted", "has_rules", "is_served", "model", "names", "targets")

    def __init__(
        self,
        model: str,
        targets: tuple[ResolvedModel, ...],
        labels: NodeLabels,
        catalog: ServedModels,
    ) -> None:
        self.model = model  # the public name
        self.targets = targets  # in order of preference; none is paused
        self.names = tuple([target.name for target in targets])
        self.has_rules = any(target.rules for target in targets)
        self.is_served = any(map(catalog.serves, self.names))  # else its name may be any text
        self._labels = labels  # those of the nodes that may serve it
        self._wanted: dict[tuple[object, ...], WantedNode] = {}

    def wanted_node(
        self,
        route: Route,
        *,
        needs_vision: bool,
        stream: bool,
        may_assemble: bool,
        prompt_cache: bool,
    ) -> WantedNode:
        """What a node must have and be able to do; one object for all requests that want it."""
        key = route.path, needs_vision, stream, may_assemble, prompt_cache
        found = self._wanted.get(key)
        if found is None:
            found = self._wanted[key] = WantedNode(
                self.model,
                self.names,
                route.endpoint,
                needs_vision,
                route.llama_cpp_only,
                self._labels,
                stream=stream,
                may_assemble=may_assemble,
                prompt_cache=prompt_cache,
                feature=route.path,
                prompt_field=route.prompt_field,
            )
        return found


@dataclass(slots=True)
class ModelAliases:
    """The `models` of one version of the settings; replaced at each reload."""

    rules: Mapping[str, ModelRule]
    catalog: ServedModels  # what nodes serve
    _resolved: dict[str, tuple[ResolvedModel, ...]] = field(default_factory=dict)
    _choices: dict[tuple[object, ...], ModelChoice] = field(default_factory=dict)
    """What was chosen, by the name asked for and the permissions."""
    _of: Mapping[str, str] = field(default_factory=dict)
    """The servers' aliases for which both hold: a new object when any node serves other models."""
    has_catch_all: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_catch_all = CATCH_ALL in self.rules

    def is_catch_all(self, name: str) -> bool:
        """Whether the catch-all applies: no rule has this name, and no node may serve it.

        A node whose models are not known yet may serve any.
        """
        return self.has_catch_all and (
            name == CATCH_ALL or not (name in self.rules or self.catalog.may_serve(name))
        )

    def knows(self, name: str) -> bool:
        """Whether a rule has this name, or some node serves it."""
        return name in self.rules or self.catalog.serves(name)

    def resolve(self, name: str) -> tuple[ResolvedModel, ...]:
        """The models that `name` stands for, in order of preference; itself without a rule.

        For a further name that servers give to a model, the model's rule holds, unless the name
        has one of its own.
        """
        if not self.rules:
            return (ResolvedModel(name),)
        aliases = self._current()
        if name not in self.rules and aliases.get(name) not in self.rules:
            return (ResolvedModel(name),)
        found = self._resolved.get(name)
        if found is None:
            every = _follow_aliases(name, self.rules, (), aliases)
            found = self._resolved[name] = tuple(every)[:MOST_TARGETS]
        return found

    def choice(self, key: tuple[object, ...]) -> ModelChoice | None:
        """What was kept under this key, while nodes serve the same models."""
        if self.catalog.aliases is not self._of:
            self._current()
        return self._choices.get(key)

    def keep_choice(self, key: tuple[object, ...], choice: ModelChoice) -> None:
        """Remember a choice; not of a name that no node serves, which may be any text."""
        if choice.is_served and not self.has_catch_all:
            if len(self._choices) >= MOST_CHOICES:
                self._choices.clear()
            self._choices[key] = choice

    def _current(self) -> Mapping[str, str]:
        """The servers' aliases; forget what was resolved by others."""
        aliases = self.catalog.aliases
        if aliases is not self._of:
            self._of, self._resolved, self._choices = aliases, {}, {}
        return aliases


def _follow_aliases(
    name: str,
    rules: Mapping[str, ModelRule],
    applied: tuple[ModelRule, ...],
    aliases: Mapping[str, str],
) -> list[ResolvedModel]:
    model = name if name in rules else aliases.get(name, name)
    rule = rules.get(model)
    if rule is None or (model != name and any(rule is one for one in applied)):
        return [ResolvedModel(name, applied)]
    applied = (*applied, rule)
    models: dict[str, ResolvedModel] = {}
    for target in rule.use or (model,):
        found = (
            [ResolvedModel(name, applied)]
            if target == model
            else _follow_aliases(target, rules, applied, aliases)
        )
        for one in found:
            models.setdefault(one.name, one)
    return list(models.values())


# A struct of msgspec: a frozen dataclass of so many fields takes sixteen times as long to make.
class Request(msgspec.Struct, frozen=True, eq=False):
    """A request that can be sent to a node, more than once if attempts fail.

    Times are monotonic seconds of the gateway's clock.
    """

    id: str  # Unique in this process; not chosen by the client
    x_request_id: str  # `X-Request-ID`: the client's own if it sent a valid one, else `id`
    path: str  # The path as nodes know it, for example `/v1/chat/completions`
    received_at: float
    lease_request: LeaseRequest  # All that the scheduler may know of it
    # What nodes are sent.
    header_lines: bytes = b""  # The client's header lines that they get, each with its line end
    bodies: Mapping[str, Body] = {}  # The body for each of the model names
    model_in_body: str | None = None  # The model's name in these bodies; None: they name none
    # What the client asks for.
    served_model: str | None = None  # The model's public name; None: no node serves it
    stream: bool = False  # Whether it asked for a stream
    logprobs: bool = False  # Whether the response contains log probabilities
    deadline: float | None = None  # When it stops waiting for the complete response
    client_has_timer: bool = False
    """Whether it times out by itself at `deadline`, so that it needs no error."""
    is_infill: bool = False  # Whether it fills in the middle of a text, as editors ask
    prompt_list: PromptList | None = None
    """The prompts, if there are several to answer one by one (`forward/multi_prompt.py`)."""

    @property
    def prompts(self) -> int:
        """How many prompts it has."""
        return 1 if self.prompt_list is None else len(self.prompt_list.prompts)


@dataclass(frozen=True, slots=True)
class PromptList:
    """The prompts of one request, which are served as requests of their own."""

    prompts: list[msgspec.Raw]
    other_fields: dict[str, msgspec.Raw]  # The body's other fields, which are sent with each prompt
    _whole: IncomingRequest
    _priority: Priority
    _rules: RequestRules

    def sub_request(self, index: int) -> Generator[None, None, Request]:
        """The request of one prompt, in short steps. Raises: GatewayError."""
        body = msgspec.json.encode(self.other_fields | {"prompt": self.prompts[index]})
        whole, rules = self._whole, self._rules
        id_, x_request_id = f"{whole.id}.{index}", f"{whole.x_request_id}.{index}"
        one = IncomingRequest(id_, x_request_id, whole.route, body, whole.sender, whole.received_at)

        def read() -> Request:
            parsed = parse_body(one.body) if isinstance(one.body, bytes) else one.body.parse()
            return prepare(one, parsed, self._priority, rules)

        return read_in_steps(one, body, rules, read)


# Several prompts.

MOST_PROMPTS_BYTES = FULL_PARSE_BYTES  # Bytes of several prompts together: they are split in one go
# Bytes of the other fields, times the prompts that they are sent with.
MOST_REPEATED_BYTES = 8 << 20


def split_prompts(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """The prompts of a completion's `prompt`, as llama.cpp counts them; empty: it is one.

    A list of numbers, or of numbers and strings mixed, is one prompt; in any other list each item
    is one.
    """
    start = bytes(memoryview(raw)[:64])
    # Text and token ids need no parsing.
    if start[:1] != b"[" or start[1:].lstrip()[:1] not in _PROMPT_STARTS:
        return []
    try:
        items = ITEMS_DECODER.decode(raw)
    except msgspec.DecodeError:
        return []
    if len(items) < 2 or any(bytes(item)[:1] not in _PROMPT_STARTS for item in items):
        return []
    return items


# The first byte of an item that is a prompt by itself; none: white space comes before it.
_PROMPT_STARTS = frozenset({b'"', b"[", b"{", b""})


def parse_prompt_list(
    incoming: IncomingRequest, raw: msgspec.Raw, priority: Priority, rules: RequestRules
) -> PromptList | None:
    """The prompts of this request; None: it has one. Raises: GatewayError 400."""
    body, limits = incoming.body, rules.limits
    prompts: list[msgspec.Raw] = []
    if isinstance(body, bytes):
        prompts = split_prompts(raw)
        count = len(prompts)
    else:
        count = body.count_prompts()
    if count < 2:
        return None
    if count > limits.prompts:
        problem = f"holds {count} prompts, the most is {limits.prompts}."
        raise errors.invalid_field("prompt", problem)
    size = memoryview(raw).nbytes
    if size > MOST_PROMPTS_BYTES:
        problem = f"holds {size} bytes in {count} prompts, the most is {MOST_PROMPTS_BYTES}."
        raise errors.invalid_field("prompt", f"{problem} Send fewer at a time.")
    other_bytes = len(body) - size
    if other_bytes * count > MOST_REPEATED_BYTES:
        raise errors.invalid_request(
            f"The body has {other_bytes} bytes besides 'prompt', which are sent with each of "
            f"{count} prompts: more than {MOST_REPEATED_BYTES} bytes in all. Send fewer at a time.",
            "prompt",
        )
    fields = raw_fields(body)
    fields.pop("prompt")
    if incoming.sender.patient:
        incoming = replace_fields(incoming, sender=replace(incoming.sender, patient=False))
    return PromptList(prompts or split_prompts(raw), fields, incoming, priority, rules)


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The settings that preparing a request depends on; replaced as a whole at a reload."""

    limits: LimitSettings
    model_aliases: ModelAliases
    default_model: str | None
    volatile_lines: VolatileLines = field(default_factory=VolatileLines)
    keyed_hash: KeyedHash = field(default_factory=KeyedHash)  # Identifies prompts


@dataclass(slots=True)
class Sender:
    """Who sends a request, and for how long they wait: all that is known before its body."""

    accounts: Accounts  # The caller, and what its use counts on
    header_lines: bytes = b""  # The header lines that nodes get
    fairness_key: str = ""
    """The caller or end user that the wait queue is fair to; empty: the caller."""
    session: str | None = None
    client_timeout: float | None = None  # Seconds that the client will wait for a complete stream
    plain_client_timeout: float | None = None
    """Seconds that it will wait for a complete plain response."""
    client_has_timer: bool = False
    """Whether `plain_client_timeout` is that of an official client's own timer."""
    cache: CachePolicy = SHARED_CACHE
    """Which nodes may serve it, and what it may learn of their prompt caches."""
    headers: Headers = field(default_factory=list)
    """The head of a form, which says how it is divided."""
    patient: bool = False
    """Whether it was stored: see `LeaseCaller.patient`. One of class `batch` yields, too."""
    _lease_caller: LeaseCaller | None = field(default=None, init=False, repr=False, compare=False)

    def lease_caller(self, priority: Priority, time_limit: float | None) -> LeaseCaller:
        """The sender as the scheduler knows it; one object for equal requests in a row."""
        kept = self._lease_caller
        if kept is None or kept.priority is not priority or kept.time_limit != time_limit:
            kept = self._lease_caller = LeaseCaller(
                self.accounts.caller.id,
                self.fairness_key or self.accounts.caller.id,
                priority,
                self.session,
                time_limit,
                patient=self.patient,
                yields=self.patient and priority is Priority.BATCH,
            )
        return kept


class IncomingRequest(msgspec.Struct, eq=False, gc=False):
    """A request as it was read: from a client's connection, or from where it was stored."""

    id: str
    x_request_id: str
    route: Route
    body: Body  # Without a byte order mark, and brought to its usual shape, once it was parsed
    sender: Sender
    received_at: float


# The class of a request by the fields of its body. Raises: GatewayError.
ClassOf = Callable[[ParsedBody], Priority]


def read_request(
    incoming: IncomingRequest, record: RequestRecord, rules: RequestRules, class_of: ClassOf
) -> Request:
    """The request of a body, noted in its record: class, stream, and the model if it is served.

    Raises: GatewayError.
    """
    body, form = incoming.body, incoming.route.multipart
    if not isinstance(body, bytes):
        parsed = body.parse()
    elif form:
        incoming.body, parsed = multipart.parse_multipart(body, incoming.sender.headers)
    else:
        try:
            parsed = parse_body(body)
        except GatewayError:
            if not body.startswith(BYTE_ORDER_MARK):
                raise
            incoming.body = body[len(BYTE_ORDER_MARK) :]
            parsed = parse_body(incoming.body)
    priority = class_of(parsed)
    if priority is not record.priority:
        record.classify(priority)
    make = prepare_multipart if form else prepare
    request = make(incoming, parsed, priority, rules)
    record.describe(stream=request.stream, model=request.served_model)
    return request


async def read_in_turn(
    incoming: IncomingRequest,
    record: RequestRecord,
    rules: RequestRules,
    class_of: ClassOf,
    slicer: TimeSlicer,
) -> Request:
    """`read_request` for a body of JSON, with other requests in between if it takes long.

    Needs a task. Raises: GatewayError.
    """
    body = incoming.body
    assert isinstance(body, bytes)
    if len(body) < SMALL_BODY_BYTES or not is_slow_to_parse(body):
        return read_request(incoming, record, rules, class_of)
    incoming.body = body.removeprefix(BYTE_ORDER_MARK)
    read = partial(read_request, incoming, record, rules, class_of)
    return await slicer.run(read_in_steps(incoming, incoming.body, rules, read))


def read_in_steps(
    incoming: IncomingRequest, body: bytes, rules: RequestRules, read: Callable[[], Request]
) -> Generator[None, None, Request]:
    """The request that `read` makes of a body, in short steps. Raises: GatewayError.

    If it is large, it is outlined before and its prompt key built after.
    """
    if len(body) < LARGE_BODY_BYTES:
        return read()
    large = incoming.body = yield from read_large_body(body, rules.limits)
    request = read()
    lease_request = request.lease_request
    key = yield from prompt_key_steps(
        large,
        incoming.route,
        lease_request.wanted.model,
        rules.volatile_lines,
        rules.keyed_hash,
        incoming.sender.cache.scope_of(incoming.id),
    )
    size = replace_fields(lease_request.size, prompt_key=key)
    return replace_fields(request, lease_request=replace_fields(lease_request, size=size))


def prepare(
    incoming: IncomingRequest, parsed: ParsedBody, priority: Priority, rules: RequestRules
) -> Request:
    """The request of a JSON body, ready to be sent to nodes. Raises: GatewayError.

    A large body's prompt key is left out: `read_in_steps` builds it.
    """
    route, limits, body = incoming.route, rules.limits, incoming.body
    prompt_field = route.prompt_field
    raw = getattr(parsed, prompt_field) if prompt_field in PROMPT_FIELDS else MISSING
    if isinstance(body, bytes):
        deepest = limits.json_depth
        # Each level has two brackets.
        depth = nesting_depth(body, deepest) if len(body) > 2 * deepest else 0
        if depth > deepest:
            raise errors.nested_too_deeply(deepest)
        needs_vision = False
        if media.may_have_links(body):
            links, needs_vision = media.find_links(body)
            media.check_links(links, limits.media_hosts, prompt_field)
        measured = measure_prompt(raw, parsed.tools, parsed.system, parsed.instructions)
    else:
        depth, needs_vision = body.outline.depth, body.outline.has_images
        media.check_links(body.find_links(), limits.media_hosts, prompt_field)
        measured = body.measure_prompt(prompt_field)
    tokens = measured.min_tokens
    if route.api.refused_fields:
        request_limits.check_supported(parsed, route.api.refused_fields)
    if has_limited_options(parsed):
        if request_limits.has_grammar(parsed):
            request_limits.check_grammars(parsed, depth, limits)
        if route.generates:
            request_limits.check_sampling(parsed, limits)
    choice = choose_model(parsed.model, incoming.sender, rules)
    bodies, slots, max_tokens = _edit_bodies(incoming, parsed, choice, rules, tokens)
    body_bytes = max(map(len, bodies.values()))
    if not route.generates:
        text_bytes = tokens * BYTES_PER_TOKEN
        size = RequestSize(slots, False, tokens, text_bytes, body_bytes=body_bytes)
        return _new_request(
            incoming, parsed, priority, choice, bodies, size, needs_vision=needs_vision
        )
    prompt_list = key = None
    if route.api.merger is not None:
        prompt_list = parse_prompt_list(incoming, parsed.prompt, priority, rules)
    if isinstance(body, bytes) and len(body) >= SHORTEST_BODY:
        scope = incoming.sender.cache.scope_of(incoming.id)
        key = build_prompt_key(
            body, route, choice.model, rules.volatile_lines, rules.keyed_hash, scope
        )
    stream = bool(parsed.stream)
    logprobs = not (parsed.n_probs is parsed.top_logprobs is None and parsed.logprobs is MISSING)
    return _new_request(
        incoming,
        parsed,
        priority,
        choice,
        bodies,
        RequestSize(
            slots,
            True,
            tokens,
            *measured[:3],
            max_tokens=max_tokens,
            body_bytes=body_bytes,
            prompt_key=key,
        ),
        needs_vision=needs_vision,
        stream=stream,
        may_assemble=not stream and can_assemble(route, body, parsed.messages, slots),
        logprobs=logprobs and request_limits.wants_logprobs(parsed),
        infill=is_infill(route, parsed),
        prompt_list=prompt_list,
    )


def prepare_multipart(
    incoming: IncomingRequest, parsed: ParsedBody, priority: Priority, rules: RequestRules
) -> Request:
    """The request of a multipart form; rules of `models` do not edit forms.

    Raises: GatewayError.
    """
    choice = choose_model(parsed.model, incoming.sender, rules)
    bodies = dict.fromkeys(choice.names, incoming.body)
    size = RequestSize(generates=False, body_bytes=len(incoming.body))
    return _new_request(incoming, parsed, priority, choice, bodies, size)


def resolve_model(
    requested: str | None, rules: RequestRules, caller: Caller, labels: NodeLabels
) -> tuple[str, tuple[ResolvedModel, ...]]:
    """The public model name of a request, and the models it stands for. Raises: GatewayError.

    `labels`: those of the nodes that may serve it.
    """
    model, aliases = requested or rules.default_model, rules.model_aliases
    catalog = aliases.catalog
    if model is None:
        known = catalog.model_names(labels)
        if caller.models is not None:
            known = tuple(name for name in known if caller.may_use(name))
        if len(known) > 1:
            known = catalog.one_name_each(known)
        if len(known) == 1:
            model = known[0]
        elif aliases.has_catch_all and caller.may_use(CATCH_ALL):
            model = CATCH_ALL
        elif known:
            raise errors.model_missing(known)
        else:
            raise catalog.not_found_error(None, labels)
    if aliases.has_catch_all and aliases.is_catch_all(model):
        if not (caller.may_use(model) or caller.may_use(CATCH_ALL)):
            raise errors.model_not_allowed(model)
        targets = aliases.resolve(CATCH_ALL)
        # The target's name from here on: the client's may be any text.
        return targets[0].name, targets
    if caller.models is not None and not caller.may_use(model):
        raise errors.model_not_allowed(model)
    return model, aliases.resolve(model)


def choose_model(requested: str | None, sender: Sender, rules: RequestRules) -> ModelChoice:
    """As `resolve_model`, without the models that are paused. Raises: GatewayError."""
    aliases, caller, labels = rules.model_aliases, sender.accounts.caller, sender.cache.node_labels
    key = requested or rules.default_model, caller.models, labels
    choice = aliases.choice(key)
    if choice is None:
        model, targets = resolve_model(requested, rules, caller, labels)
        if paused := aliases.catalog.paused:
            targets = tuple(target for target in targets if target.name not in paused)
            if model in paused or not targets:
                raise errors.model_paused(model)
        choice = ModelChoice(model, targets, labels, aliases.catalog)
        aliases.keep_choice(key, choice)
    return choice


def _edit_bodies(
    incoming: IncomingRequest,
    parsed: ParsedBody,
    choice: ModelChoice,
    rules: RequestRules,
    prompt_tokens: int,
) -> tuple[dict[str, Body], int, int | None]:
    """The body for each target model, the slots that it takes, and the most tokens of one answer.

    Raises: GatewayError.
    """
    body, route, volatile_lines = incoming.body, incoming.route, rules.volatile_lines
    slots = 1 if route.takes_slot else 0
    if not (
        route.generates
        or choice.has_rules
        or volatile_lines.strips_requests
        or has_edited_options(parsed)
    ):
        return dict.fromkeys(choice.names, body), slots, None
    cache, of_caller, limits = incoming.sender.cache, incoming.sender.accounts, rules.limits
    most_tokens, tokens_left = limits.max_tokens, of_caller.most_tokens - prompt_tokens
    if of_caller.completion_tokens is not None:
        most_tokens = min(of_caller.completion_tokens, most_tokens or of_caller.completion_tokens)
    bodies: dict[str, Body] = {}
    max_tokens: int | None = 0
    for target in choice.targets:
        ruled = edits.apply_rules(body, target.rules) if target.rules else body
        ruled_parsed = parsed
        if ruled is not body:
            ruled_parsed = parse_body(ruled) if isinstance(ruled, bytes) else ruled.parse()
        edit = None
        if has_edited_options(ruled_parsed):
            catalog = rules.model_aliases.catalog
            context = partial(_largest_context, catalog, target.name, cache.node_labels)
            edit = edits.required_edit(ruled_parsed, limits.n_probs, context)
        if route.generates:
            most = edits.lowest_bound(target.rules, most_tokens) if target.rules else most_tokens
            tokens, bound_edit = settle_bound(
                ruled_parsed, route.api.max_tokens_fields, most, tokens_left
            )
            if bound_edit:
                edit = (edit or {}) | bound_edit
            max_tokens = None if tokens is None or max_tokens is None else max(tokens, max_tokens)
        if volatile_lines.strips_requests:
            edit = (edit or {}) | volatile_lines.strip_edit(ruled)
        if cache.hide and route.generates:
            edit = (edit or {}) | edits.without_cache_figures(ruled)
        bodies[target.name] = edits.apply_edit(ruled, edit) if edit else ruled
        if route.generates and not (
            ruled_parsed.n is ruled_parsed.n_cmpl is ruled_parsed.best_of is None
        ):
            slots = max(slots, _completion_count(ruled_parsed, limits.n))
    return bodies, slots, max_tokens


UNKNOWN_CONTEXT = 1 << 17  # Tokens of a slot of a model whose nodes have not reported any


def _largest_context(catalog: ServedModels, model: str, labels: NodeLabels) -> int:
    """Tokens of the largest slot of this model."""
    contexts = [server.context or 0 for server in catalog.servers_of([model], labels)]
    return max(contexts, default=0) or UNKNOWN_CONTEXT


def _completion_count(parsed: ParsedBody, limit: int) -> int:
    """Completions per prompt; each takes a slot. Raises: GatewayError 400."""
    most = 1
    for name in ("n", "n_cmpl", "best_of"):
        count = edits.clamped_int(getattr(parsed, name)) or 1
        if count > limit:
            raise errors.invalid_field(name, f"is {count}, the most is {limit}.")
        most = max(most, count)
    return most


def _new_request(
    incoming: IncomingRequest,
    parsed: ParsedBody,
    priority: Priority,
    choice: ModelChoice,
    bodies: dict[str, Body],
    size: RequestSize,
    *,
    needs_vision: bool = False,
    stream: bool = False,
    may_assemble: bool = False,
    logprobs: bool = False,
    infill: bool = False,
    prompt_list: PromptList | None = None,
) -> Request:
    sender, route, received_at = incoming.sender, incoming.route, incoming.received_at
    limit, has_timer = sender.plain_client_timeout, sender.client_has_timer
    if parsed.stream:
        limit, has_timer = sender.client_timeout, False
    wanted = choice.wanted_node(
        route,
        needs_vision=needs_vision,
        stream=stream,
        may_assemble=may_assemble,
        prompt_cache=sender.cache.prompt_cache,
    )
    if size.slots > 1:
        # The field by which the body asks for several.
        small = without_large_fields(next(iter(bodies.values())))
        names = (name for name in ("n_cmpl", "best_of") if f'"{name}"'.encode() in small)
        wanted = replace_fields(wanted, slots_field=next(names, "n"))
    id_, x_request_id = incoming.id, incoming.x_request_id
    return Request(
        id_,
        x_request_id,
        route.path,
        received_at,
        LeaseRequest(id_, sender.lease_caller(priority, limit), wanted, size),
        header_lines=b"%bx-request-id: %b\r\n" % (sender.header_lines, x_request_id.encode()),
        bodies=bodies,
        model_in_body=parsed.model,
        served_model=choice.model if choice.is_served else None,
        stream=stream,
        logprobs=logprobs,
        deadline=None if limit is None else received_at + limit,
        client_has_timer=limit is not None and has_timer,
        is_infill=infill,
        prompt_list=prompt_list,
    )


def is_infill(route: Route, parsed: ParsedBody) -> bool:
    """Whether it fills in the middle of a text, as editors ask at each pause of typing."""
    if route.endpoint == "infill":
        return True
    suffix = parsed.suffix
    return (
        suffix is not MISSING
        and route.prompt_field == "prompt"
        and (len(suffix) > len(b"null") or bytes(suffix) not in _NO_SUFFIX)
    )


_NO_SUFFIX = (b"null", b'""')

_UNASSEMBLABLE = (
    b'"response_fields"', b'"return_progress"', b'"timings_per_token"', b'"verbose"', b'"echo"',
    b'"__verbose"',
)  # fmt: skip
"""Fields that make a plain response differ from the sum of a stream's events."""

_UNASSEMBLABLE_NAMES = tuple(name.decode().strip('"') for name in _UNASSEMBLABLE)


def can_assemble(route: Route, body: Body, messages: msgspec.Raw, slots: int) -> bool:
    """Whether the plain response to this body can be assembled from its stream.

    If the last message is the assistant's, a plain response repeats it and a stream does not.
    """
    api = route.api
    if api.streaming_fields is None or (slots != 1 and not api.assembles_several_answers):
        return False
    if not isinstance(body, bytes):
        return not body.ends_with_assistant() and not body.has_any(_UNASSEMBLABLE_NAMES)
    raw = bytes(messages)
    if b'"assistant"' in raw and _ends_with_assistant(raw):
        return False
    return not any(name in body for name in _UNASSEMBLABLE)


def _ends_with_assistant(messages: bytes) -> bool:
    try:
        last = parse_object(ITEMS_DECODER.decode(messages)[-1])
    except (*JSON_ERRORS, InvalidJson, IndexError):
        return True  # the node will say why it is invalid
    return last.get("role") == "assistant"
