"""The settings (`config/gateway.yaml`): how the gateway behaves."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from gateway.config import yaml_file
from gateway.config.errors import ConfigError, Problem
from gateway.config.fields import (
    ConfigModel,
    EnvVarName,
    ExistingFile,
    Fraction,
    Listed,
    Lowercased,
    LowercasedOrOff,
    Networks,
    NonEmptyText,
    Number,
    PriorityName,
    Seconds,
    SecondsOrOff,
    SecondsOrZero,
    TypeLabel,
    instead_of,
    is_host,
    matching,
    read_by,
    resolved_secret,
    validation_error,
)
from gateway.config.foreign import foreign_problem
from gateway.config.keys import CacheSpec, GroupName, GroupSpec, KeySpec, check_unique
from gateway.config.listeners import (
    AdminSettings,
    CorsSpec,
    LimitSettings,
    ListenSettings,
    TlsFiles,
)
from gateway.config.scheduling import (
    HEADER_NAME,
    ClassRule,
    ElasticSettings,
    HealthSettings,
    HybridSettings,
    ModelPlacementSettings,
    ModelRule,
    QueueSettings,
    RepairSettings,
    RetrySettings,
    TimeoutSettings,
    check_catch_all,
    find_alias_loop,
)
from gateway.config.stored import (
    BatchSettings,
    StoreSettings,
    WebhookSettings,
    WebhookUrl,
    masked_store_url,
)
from gateway.config.yaml_file import YamlDocument, YamlEntry, YamlList, YamlMapping, YamlScalar

_RESERVED = frozenset(
    {
        # Hop-by-hop fields and those that frame a body: the gateway makes its own for each side.
        *("connection", "content-encoding", "content-length", "expect", "host", "http2-settings"),
        *("keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        # Credentials.
        *("api-key", "authorization", "cookie", "proxy-authenticate", "proxy-authorization"),
        *("set-cookie", "set-cookie2", "www-authenticate", "x-api-key"),
        # What the gateway itself reads or writes.
        *("accept-encoding", "request-id", "via", "x-priority", "x-request-id"),
        *("x-request-timeout", "x-should-retry"),
    }
)

_RESERVED_PREFIXES = ("access-control-", "x-accel-", "x-gateway-")


def _may_pass(name: str) -> str:
    lowered = name.lower()
    if "*" in name:
        raise validation_error("must be one header's name, not a pattern", "write each name")
    if lowered in _RESERVED or lowered.startswith(_RESERVED_PREFIXES):
        raise validation_error(
            f"{name} can't pass",
            "it holds credentials, belongs to one connection, or is the gateway's own: leave it "
            "out; a node's own key is named by its api_key_env or api_key_file in the inventory",
        )
    return name


HeaderName = Annotated[
    str,
    matching(HEADER_NAME.fullmatch, "must be the name of a header", "such as X-OpenWebUI-User-Id"),
    TypeLabel("header name"),
]

HeaderNames = Annotated[Listed[HeaderName], TypeLabel("list of header names")]

_Names = Annotated[
    Listed[Annotated[HeaderName, AfterValidator(_may_pass)]], TypeLabel("list of header names")
]


class HeaderSettings(ConfigModel):
    """Header fields that pass in addition to those that always do.

    To nodes: `Accept`, `Content-Type`, `User-Agent`, `traceparent`, `tracestate`; to clients:
    `Content-Type`, `Retry-After`, `traceparent`, `tracestate`; both ways: `anthropic-*` and
    `openai-*`.
    """

    to_nodes: _Names = ()
    """Further headers of requests that nodes get, outside endpoints too, such as
    `X-OpenWebUI-User-Id`."""
    to_clients: _Names = ()
    """Further headers of nodes' responses that clients get, such as
    `x-ratelimit-remaining-requests`."""


class IdentitySettings(ConfigModel):
    """The end user and the session that a request belongs to, where one key serves many people.

    User headers count for keys with `trust_user_headers`, and for local callers (no key, a
    loopback listener, no proxy); session headers count for everybody, within one caller.
    """

    user_headers: HeaderNames = ("X-OpenWebUI-User-Id", "X-User-Id")
    """Headers that name the end user; the first one present counts. The queue is fair between end
    users. An empty list trusts nobody."""
    session_headers: HeaderNames = (
        "X-OpenWebUI-Chat-Id",
        "X-Claude-Code-Session-Id",
        "X-Session-Id",
    )
    """Headers that name the conversation or the editor's session; the first one present counts. A
    session keeps its node unless another is a good deal faster, and a request can supersede an
    earlier one of its session only."""


TRACES_PATH = "/v1/traces"
"""Where collectors take traces by OTLP over HTTP."""

_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}):[ \t]*([ -~]+)")


def _endpoint(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        url = WebhookUrl.parse(value)
    except ValueError as error:
        raise validation_error(str(error), f"such as http://127.0.0.1:4318{TRACES_PATH}") from None
    if url.query:
        raise validation_error("must have no query", "a secret belongs into header_file")
    return f"{url.origin}{TRACES_PATH}" if url.path == "/" else str(url)


class TracesSettings(ConfigModel):
    """Traces of requests, exported by OTLP over HTTP. Never a prompt or a completion."""

    endpoint: Annotated[str | None, BeforeValidator(_endpoint), TypeLabel("URL")] = None
    """URL of the collector, such as `http://127.0.0.1:4318/v1/traces`; without a path `/v1/traces`
    is meant. Unset: no traces. Needs the extra `otel`."""
    share: Fraction = 0.05
    """Share of requests that are traced."""
    beyond_share: Annotated[Number, Field(ge=0, le=1000), TypeLabel("requests a second")] = 1.0
    """Requests a second that are traced beyond the share: so many whose client has recorded its
    part of the trace (`traceparent`), and as many that the gateway or a node failed (5xx)."""
    service_name: NonEmptyText = "llama-gateway"
    """The gateway's `service.name` in its traces."""
    header_env: EnvVarName | None = None
    """Name of the environment variable that holds a header for the collector, written as
    `Authorization: Bearer SECRET`."""
    header_file: Annotated[ExistingFile | None, instead_of("header_env")] = None
    """File that holds the header, instead of `header_env`."""
    ca_file: ExistingFile | None = None
    """PEM file of the certificate authorities to trust, instead of the system's."""
    timeout: Annotated[Seconds, Field(le=60)] = 10.0
    """For one message to the collector, with all its retries."""
    # Resolved from `header_env` or `header_file`; `exclude` keeps it out of the file's keys.
    header: SecretStr | None = Field(default=None, exclude=True, validate_default=True, repr=False)

    @field_validator("header", mode="before")
    @classmethod
    def _resolve_header(cls, header: object, info: ValidationInfo) -> object:
        found = resolved_secret(header, info, "a header", "header")
        if info.context and isinstance(found, str) and not _HEADER.fullmatch(found):
            raise validation_error(
                "holds no header",
                "it is written as `Authorization: Bearer SECRET`",
                "header_env" if info.data.get("header_env") else "header_file",
            )
        return found

    def header_fields(self) -> dict[str, str]:
        """The header for the collector; empty: there is none."""
        if self.header is None:
            return {}
        name, _, value = self.header.get_secret_value().partition(":")
        return {name: value.strip()}


class TelemetrySettings(ConfigModel):
    """What the gateway tells monitoring. Never a prompt or a completion."""

    gen_ai_metrics: bool = False
    """Requests in `/metrics` also under the names of OpenTelemetry's conventions for generative AI
    (`gen_ai_server_request_duration_seconds` and so on)."""
    key_names: bool = True
    """`llama_gateway_key_info` in `/metrics`: the name of each API key that sends requests beside
    its id, of 1,000 at most, for whoever may know callers: without admin keys, or from the role
    operator on."""
    node_metrics: bool = True
    """Serve `/metrics/nodes`: the metrics of all llama.cpp servers, each with its node's name."""
    traces: TracesSettings = TracesSettings()
    """Traces of requests, for a collector of OpenTelemetry."""


class LoggingSettings(ConfigModel):
    """Logging. No log holds a prompt, a completion or a key."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Lowercased] = "info"
    """Least severe level that is logged."""
    format: Annotated[Literal["auto", "console", "json"], Lowercased] = "auto"
    """`auto`: readable on a terminal, JSON otherwise."""
    access: bool = True
    """One line for each request."""
    access_share: Fraction = 1.0
    """Share of requests that have a line, between 0 and 1. Requests that the gateway or a node
    failed (5xx) always have one."""


_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
# A leader renews several times in a term, and its database may take its time.
LEAST_TERM, LONGEST_TERM = 1.0, 60.0
_WILDCARDS = frozenset({"0.0.0.0", "::"})


class Address(NamedTuple):
    """Where a member listens, or is reached."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """The address that `HOST:PORT` means, with an IPv6 address in brackets. Raises: ValueError."""
    parts = urlsplit(f"//{text}")
    found = Address(parts.hostname or "", parts.port or 0)
    if not found.port or not is_host(found.host) or str(found) != text.lower():
        raise ValueError("it is no HOST:PORT")
    return found


_READ_ADDRESS = read_by(
    lambda value: str(parse_address(str(value))),
    "must be an address with a port",
    "such as 10.0.0.1:8090 or [fd00::1]:8090",
)
_AddressText = Annotated[str, _READ_ADDRESS, TypeLabel("HOST:PORT")]
_ReachedAddress = Annotated[
    str,
    matching(
        lambda text: parse_address(text).host not in _WILDCARDS,
        "must be an address by which others reach this member",
        "0.0.0.0 and :: are none",
    ),
    _READ_ADDRESS,  # the last one reads first
    TypeLabel("HOST:PORT"),
]

Name = Annotated[
    str,
    matching(
        _NAME.fullmatch,
        "must be a name of letters, digits, '.', '_' and '-'",
        "at most 63 characters, the first and the last a letter or a digit",
    ),
    TypeLabel("name"),
]


class ClusterTls(TlsFiles):
    """Certificates between members: each side shows one, and checks that of the other."""

    ca: ExistingFile
    """PEM file of the authority that has signed the certificates of all members, and none else."""


class ClusterSettings(ConfigModel):
    """Several machines as one gateway. They share `store.url`. A change needs a restart."""

    name: Name = "llama-gateway"
    """Name of the cluster, the same for all its members. Several clusters may share a store."""
    member: Name | None = None
    """Name of this member, which its certificate must have (`subjectAltName`). Unset: the host's
    name."""
    listen: _AddressText
    """Address for the other members, over TLS."""
    advertise: _ReachedAddress | None = None
    """Address by which the others reach this member. Unset: `listen`, with the host's name in place
    of `0.0.0.0` or `::`."""
    allow: Networks = ()
    """Addresses or networks of the other members; connections from elsewhere are closed. Empty: any
    address, as long as it shows a certificate."""
    tls: ClusterTls
    """Certificates between members."""
    term: Annotated[Seconds, Field(ge=LEAST_TERM, le=LONGEST_TERM)] = 2.0
    """For so long the leader leads after it has last renewed its row in the store. If it dies,
    another one leads some two terms later. The same for all members."""

    @property
    def member_name(self) -> str:
        """The name of this member."""
        return self.member or socket.gethostname()

    @property
    def advertised(self) -> Address:
        """Where the others reach this member."""
        found = parse_address(self.advertise or self.listen)
        if self.advertise is None and found.host in _WILDCARDS:
            return Address(socket.gethostname(), found.port)
        return found


class ShutdownSettings(ConfigModel):
    """The time between SIGTERM and the end."""

    delay: SecondsOrZero = 0.0
    """`/ready` gives 503 for this time before the listeners close, so that a load balancer in front
    sends no more requests."""
    grace: SecondsOrZero = 60.0
    """Time in which queued and running requests may end."""


def _empty_rule(value: object) -> object:
    return {} if value is None else value


def _no_empty_name(value: object) -> object:
    if isinstance(value, Mapping) and "" in value:
        raise validation_error("a model's name can't be empty")
    return value


# The parser of `re` has no public name; tests hold it to each Python.
_parser, ops = vars(re)["_parser"], vars(re)["_constants"]


def _pattern(value: object) -> object:
    if not isinstance(value, str):
        raise validation_error("must be a regular expression", "for the beginning of one line")
    if (problem := pattern_problem(value)) is not None:
        raise validation_error(problem)
    return value


LinePattern = Annotated[str, BeforeValidator(_pattern), TypeLabel("regular expression")]
LinePatterns = Annotated[Listed[LinePattern], TypeLabel("list of patterns")]


class PromptSettings(ConfigModel):
    """Lines of system prompts that change with each request, and so void every prompt cache.

    Patterns are matched against the beginnings of lines. The billing line of Claude Code is known.
    """

    volatile: LinePatterns = ()
    """Lines to overlook when the node that knows a prompt is looked for."""
    strip: LinePatterns = ()
    """Lines to overlook, and to take out of the request as well."""
    remember: bool = True
    """Keep over a restart which prompts each node has cached, as digests beside their key. `false`:
    what was kept is deleted, and a restart forgets."""


SHORTEST_LITERAL_PREFIX = 4
"""Plain characters that a pattern begins with."""

LONGEST_PATTERN = 256

LONGEST_LINE = 1024
"""Characters of a line that a pattern is matched against."""

MOST_MATCH_PATHS = 16 * LONGEST_LINE
"""Ways in which the repeats and choices of a pattern may share out a line."""


def pattern_problem(pattern: str) -> str | None:
    """Return why a text can't be a pattern, with the remedy; None where it can.

    A pattern runs over each request's text, so it must not run long: a subset of regular
    expressions is accepted, and in how many ways one can match a line is bounded.
    """
    if len(pattern) > LONGEST_PATTERN:
        return f"is longer than {LONGEST_PATTERN} characters"
    try:
        compiled = re.compile(pattern)
        if compiled.flags & ~re.UNICODE:
            return "sets flags; spell out what is to match"
        if "\n" in pattern:
            return "goes over the end of a line; a pattern is for one line"
        parts = _parse(pattern)
        ways = _ways(parts)
    except _UnsupportedError as error:
        return str(error)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    if len(_prefix(parts)) < SHORTEST_LITERAL_PREFIX:
        return (
            f"must begin with {SHORTEST_LITERAL_PREFIX} plain characters or more, by which "
            f"lines are found"
        )
    if ways > MOST_MATCH_PATHS:
        return "can match in too many ways; leave one `.*` or `.+` at most"
    return None


def literal_prefix(pattern: str) -> str:
    """Return the plain characters that a pattern begins with; it must have no `pattern_problem`."""
    return _prefix(_parse(pattern))


def _parse(pattern: str) -> list[tuple[object, Any]]:
    """Return the parts of a pattern as `re` sees them: operation and argument."""
    return list(_parser.parse(pattern))


class _UnsupportedError(Exception):
    pass


_ONE_CHARACTER_OR_PLACE = {ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.AT}


def _ways(parts: Iterable[tuple[object, Any]]) -> int:
    """Return in how many ways these parts can share out a line, at most.

    Raises _UnsupportedError, with words for people.
    """
    ways = 1
    for operation, argument in parts:
        if operation is ops.SUBPATTERN:
            ways *= _ways(argument[-1])
        elif operation is ops.BRANCH:
            ways *= sum(map(_ways, argument[1]))
        elif operation in {ops.MAX_REPEAT, ops.MIN_REPEAT}:
            least, most, inner = argument
            ways_inside = _ways(inner)
            if most > 1 and ways_inside > 1:
                raise _UnsupportedError("repeats something that has repeats or choices of its own")
            if most > 1 and inner.getwidth()[0] == 0:
                # However short the line is, `re` would go through all of the repeats.
                raise _UnsupportedError("repeats something empty")
            ways *= ways_inside * min(most - least + 1, LONGEST_LINE)
        elif operation not in _ONE_CHARACTER_OR_PLACE:
            raise _UnsupportedError(
                "looks around, back, or into groups; plain characters, sets and repeats will do"
            )
    return ways


def _prefix(parts: Iterable[tuple[object, Any]]) -> str:
    plain = itertools.takewhile(lambda part: part[0] is ops.LITERAL, parts)
    return "".join(chr(argument) for _, argument in plain)


class Settings(ConfigModel):
    """All settings. Every key has a default; the file may be missing."""

    misplaced_keys: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("preload", "models_on_demand", "memory"), "it is a key of nodes, in the inventory"
    )

    listen: ListenSettings = ListenSettings()
    """The public listener."""
    admin: AdminSettings = AdminSettings()
    """The admin listener."""
    keys: Annotated[tuple[KeySpec, ...], TypeLabel("list")] = ()
    """API keys of the public listener. None: no key is needed; but after a reload that removes the
    last one every request gets 401, until there is a key or a restart."""
    groups: Annotated[
        Mapping[GroupName, Annotated[GroupSpec, BeforeValidator(_empty_rule)]],
        TypeLabel("mapping of groups"),
    ] = {}
    """Groups of keys, by name: what their keys may use together."""
    allow_anonymous: bool = False
    """Serve without keys on an address that isn't loopback, or behind a proxy."""
    headers: HeaderSettings = HeaderSettings()
    """Header fields that pass in addition to those that always do."""
    cors: CorsSpec | None = None
    """Web pages that may call; unset: none."""
    limits: LimitSettings = LimitSettings()
    """Limits of requests, responses, connections and memory."""
    models: Annotated[
        Mapping[str, Annotated[ModelRule, BeforeValidator(_empty_rule)]],
        BeforeValidator(_no_empty_name),
        TypeLabel("mapping of rules"),
    ] = {}
    """Public model names: aliases, fall-backs, parameters, and where each is loaded. `"*": {use:
    NAME}` takes every unknown name."""
    default_model: NonEmptyText | None = None
    """Model of a request that names none. Unset: the only model, if there is just one, else that of
    `"*"`."""
    classes: Annotated[
        Mapping[PriorityName, Annotated[ClassRule, BeforeValidator(_empty_rule)]],
        TypeLabel("mapping of rules"),
    ] = {}
    """Rules for `urgent`, `premium`, `normal` and `batch`."""
    queue: QueueSettings = QueueSettings()
    """Waiting for a slot."""
    policy: Literal["least_finish", "least_loaded", "round_robin", "prefix_hash"] = "least_finish"
    """How a node is chosen. `least_finish`: the earliest expected finish, by queues, speeds and
    prompt caches. The other words mean the same, with a warning in the log; the next release
    refuses them."""
    identity: IdentitySettings = IdentitySettings()
    """Headers that name end users and conversations."""
    cache: CacheSpec = CacheSpec()
    """Prompt caches and privacy: for all whose key and group don't say otherwise."""
    prompts: PromptSettings = PromptSettings()
    """Lines of prompts that change with each request."""
    hybrid: HybridSettings = HybridSettings()
    """How GPU and CPU nodes share the work."""
    elastic: ElasticSettings = ElasticSettings()
    """Standby nodes that are started and stopped on demand."""
    model_placement: ModelPlacementSettings = ModelPlacementSettings()
    """Which nodes hold which models, where these are loaded on demand."""
    health: HealthSettings = HealthSettings()
    """Probes and circuit breakers."""
    timeouts: TimeoutSettings = TimeoutSettings()
    """Limits of one request to a node."""
    retries: RetrySettings = RetrySettings()
    """Retries on another node."""
    resume: Annotated[Literal["text", "exact", "off"], LowercasedOrOff] = "text"
    """How a stream is resumed on another node when its own fails: `text`, from the text that was
    sent; `exact`, from its token ids, which costs more for each token; `off`: it ends with an error
    event."""
    heartbeat: SecondsOrOff = 15.0
    """Interval of a sign of life (a comment line or the API's own event) on a waiting stream. It
    commits status 200: a later error is an event of the stream. `off` or 0: none."""
    heartbeat_plain: bool = False
    """White space ahead of the JSON of a response without streaming, as often as `heartbeat`. It
    commits status 200: a later error has that status too, and its own in the body."""
    ollama: bool = False
    """Serve Ollama's API too: `/api/chat`, `/api/generate`, `/api/embed`, `/api/tags` and so on."""
    repairs: RepairSettings = RepairSettings()
    """What is repaired of llama.cpp's responses."""
    store: StoreSettings = StoreSettings()
    """Where keys, usage and the audit log are kept."""
    cluster: ClusterSettings | None = None
    """Several machines as one gateway; unset: this one alone."""
    batches: BatchSettings = BatchSettings()
    """Files, batches and background responses."""
    webhooks: WebhookSettings = WebhookSettings()
    """Events of batches, responses and quotas, posted to receivers."""
    logging: LoggingSettings = LoggingSettings()
    """What is logged."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """What monitoring is told."""
    shutdown: ShutdownSettings = ShutdownSettings()
    """From SIGTERM to the end."""

    @field_validator("keys")
    @classmethod
    def _names_are_unique(cls, keys: tuple[KeySpec, ...]) -> tuple[KeySpec, ...]:
        """Ids, and names, too: limits and the ledger tell callers apart, and people by names."""
        check_unique(keys, "id")
        check_unique(keys, "name")
        return keys

    @field_validator("groups")
    @classmethod
    def _covers_the_keys(
        cls, groups: Mapping[str, GroupSpec], info: ValidationInfo
    ) -> Mapping[str, GroupSpec]:
        """A slip in a group's name must not free its keys of the group's limits."""
        for key in info.data.get("keys", ()):
            if groups and key.group is not None and key.group not in groups:
                raise validation_error(
                    f"the key {key.id} is of the group '{key.group}', which is not here",
                    f"add `{key.group}: {{}}`, or correct the key's group",
                )
        return groups

    @field_validator("classes")
    @classmethod
    def _only_batch_yields(
        cls, rules: Mapping[PriorityName, ClassRule]
    ) -> Mapping[PriorityName, ClassRule]:
        for name, rule in rules.items():
            if rule.reserve_slots is not None and name != "batch":
                raise validation_error(
                    f"`reserve_slots` can't be set for {name}",
                    "it is for batch, which leaves slots free for the other classes",
                )
        return rules

    @field_validator("models")
    @classmethod
    def _no_loops(cls, models: Mapping[str, ModelRule]) -> Mapping[str, ModelRule]:
        check_catch_all(models)
        if loop := find_alias_loop(models):
            raise validation_error(
                f"the names stand for each other: {' -> '.join(loop)}",
                "let one of them name a model that a node serves",
            )
        return models


RejectedFiles = Literal["nothing", "blank", "empty"]
"""Settings files without a setting that `load_settings` refuses: none, blank ones, empty ones."""

_EMPTY_REMEDY = "write the settings into it; {} stands for the defaults, which need no key"


def load_settings(
    path: Path | None,
    env: Mapping[str, str] = os.environ,
    *,
    rejected: RejectedFiles = "nothing",
    text: str | None = None,
) -> Settings:
    """Read the settings from a YAML file; without a path, every key has its default.

    `env` holds the variables for `${VAR}`; by default the process's own. `text`: what to read in
    place of the file's own. Raises ConfigError with every problem of the file. Reads the disk: call
    it in a thread.

    `rejected`: files without a setting that are a problem. `blank`: one without a single word;
    `empty`: also one with comments alone, or `null`. A full disk and some editors leave such files
    behind, and the default settings need no key.
    """
    if path is None:
        return Settings()
    source = yaml_file.read_yaml(path, env, text)
    root = source.root
    if foreign := foreign_problem(source, "settings"):
        raise ConfigError([foreign])
    if root.tree == YamlScalar(None):
        if rejected == "empty" or (rejected == "blank" and source.blank and path.is_file()):
            raise ConfigError([Problem(path, 0, "", "the file is empty", _EMPTY_REMEDY)])
        root = YamlEntry(YamlMapping({}), root.line, root.key)
    problems = list(source.problems)
    if not isinstance(root.tree, YamlMapping):
        remedy = "write keys with values, such as queue: {max: 100}"
        problems.append(Problem(path, root.line, "", "must be a mapping", remedy))
    settings, wrongs = yaml_file.validate(Settings, source, root, env)
    problems += [*wrongs, *_same_names(source, root)]
    if problems or settings is None:
        raise ConfigError(yaml_file.first_of_each_place(problems))
    return settings


def load_admin(
    path: Path, needed: Collection[str], env: Mapping[str, str] = os.environ
) -> AdminSettings:
    """Read some keys of `admin`, from a file in which others are wrong.

    For commands that ask a gateway which serves on with the settings that it has. Raises
    ConfigError with the problems of these keys.
    """
    source = yaml_file.read_yaml(path, env)
    root = source.root.tree
    entry = root.entries.get("admin") if isinstance(root, YamlMapping) else None
    if entry is None or entry.tree == YamlScalar(None):
        return AdminSettings()
    problems = [
        one
        for one in source.problems
        if one.key == "admin" or any(f"{one.key}.".startswith(f"admin.{key}.") for key in needed)
    ]
    if isinstance(entry.tree, YamlMapping):
        kept = {key: one for key, one in entry.tree.entries.items() if key in needed}
        tls = kept.get("tls")
        if tls is not None and isinstance(tls.tree, YamlMapping) and "cert" in tls.tree.entries:
            # A client has no use for the certificate's key, which it may not be able to read.
            cert = tls.tree.entries["cert"]
            kept["tls"] = YamlEntry(YamlMapping({"cert": cert, "key": cert}), tls.line, tls.key)
        entry = YamlEntry(YamlMapping(kept), entry.line, entry.key)
    admin, wrongs = yaml_file.validate(AdminSettings, source, entry, env)
    if problems or wrongs or admin is None:
        raise ConfigError(yaml_file.first_of_each_place([*problems, *wrongs]))
    return admin


def _same_names(source: YamlDocument, root: YamlEntry) -> list[Problem]:
    if not isinstance(root.tree, YamlMapping):
        return []
    admin = root.tree.entries.get("admin")
    found = []
    for entry in (root, admin):
        tree = None if entry is None else entry.tree
        keys = tree.entries.get("keys") if isinstance(tree, YamlMapping) else None
        if keys is not None and isinstance(keys.tree, YamlList):
            found += yaml_file.find_duplicates(source, keys.tree.entries, "id", "the key")
    return found


# Fixed when a listener opens, but for `listen.caller_page`. A reload changes everything else.
RESTART_KEYS = (
    *("listen", "admin.host", "admin.port", "admin.tls", "admin.hosts"),
    *("limits.connections", "limits.header_bytes", "limits.header_timeout"),
    *("limits.send_timeout", "store.url", "cluster", "batches.folder"),
)


def changed_restart_keys(old: Settings, new: Settings) -> tuple[str, ...]:
    """Return the changed keys that need a restart, such as `listen.port`."""
    return tuple(key for key in _changed(old, new) if is_restart_key(key))


def is_restart_key(key: str) -> bool:
    """Return whether a key, such as `listen.port`, is read only when the gateway starts."""
    fixed = any(key == one or key.startswith(f"{one}.") for one in RESTART_KEYS)
    return fixed and key != "listen.caller_page"


def _changed(old: ConfigModel, new: ConfigModel, prefix: str = "") -> Iterator[str]:
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if isinstance(before, ConfigModel) and isinstance(after, ConfigModel):
            yield from _changed(before, after, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


MASK = "********"


def masked_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings as JSON values, with what is secret masked.

    That is: the hashes of keys, the store's password, and the paths of webhooks' URLs. Paths of
    files stay: they are no secrets.
    """
    shown = settings.model_dump(mode="json", by_alias=True)
    for key in (*shown["keys"], *shown["admin"]["keys"]):
        key["sha256"] = MASK
    if shown["store"]["url"] is not None:
        shown["store"]["url"] = masked_store_url(shown["store"]["url"])
    for target in shown["webhooks"]["targets"]:
        url = WebhookUrl.parse(target["url"])
        target["url"] = url.origin + (f"/{MASK}" if url.path != "/" or url.query else "")
    return shown


MOST_ROWS = 5000  # values of the settings that are listed with their origins
_VARIABLE = re.compile("\ue000([^\ue001]*)\ue001")  # the name of a variable in place of its value


class SettingRow(NamedTuple):
    """One value in force, and where it comes from."""

    key: str  # such as `queue.max` or `keys[2].class`
    value: Any  # as JSON, masked
    line: int | None  # of the file; None: it is not there
    by: str | None  # the variables or the option that gave it; None with no line: the default


def settings_rows(
    settings: Settings, text: str | None, env: Mapping[str, str], overrides: Mapping[str, str]
) -> list[SettingRow]:
    """Every value in force with its origin, at most `MOST_ROWS`.

    `text`: that of the file which is in force. `overrides`: what gave a value in place of the file,
    by its key.
    """
    names = {name: f"\ue000{name}\ue001" for name in env}
    entries: dict[str, YamlEntry] = {}
    with suppress(ConfigError):
        _find_entries(yaml_file.read_yaml(Path(), names, text or "").root, "", entries)
    rows = []
    for key, value in islice(_leaves(masked_settings(settings), ""), MOST_ROWS):
        entry, by = entries.get(key), overrides.get(key)
        if by is not None or entry is None:
            rows.append(SettingRow(key, value, None, by))
        else:
            variables = sorted(set(_VARIABLE.findall(str(yaml_file.to_plain(entry.tree)))))
            rows.append(SettingRow(key, value, entry.line, ", ".join(variables) or None))
    return rows


def _find_entries(entry: YamlEntry, key: str, found: dict[str, YamlEntry]) -> None:
    """Note each value of a file by its key, which aliases have several of."""
    found[key] = entry
    if isinstance(entry.tree, YamlMapping):
        for name, one in entry.tree.entries.items():
            _find_entries(one, f"{key}.{name}" if key else name, found)
    elif isinstance(entry.tree, YamlList):
        for number, one in enumerate(entry.tree.entries):
            _find_entries(one, f"{key}[{number}]", found)


def _leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    """The values of a tree of JSON by their keys; a list of plain values is one."""
    if isinstance(value, Mapping) and value:
        for name, one in value.items():
            yield from _leaves(one, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{key}[{number}]")
    else:
        yield key, value
