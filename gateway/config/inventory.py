"""The inventory (`config/nodes.yaml`): each node, and all nodes of the fleet."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from gateway.config import fields, yaml_file
from gateway.config.errors import ConfigError, Problem
from gateway.config.fields import (
    ConfigModel,
    Count,
    EnvVarName,
    ExistingFile,
    Factor,
    Host,
    MemorySize,
    Money,
    NonEmptyText,
    Seconds,
    TypeLabel,
)
from gateway.config.foreign import foreign_problem
from gateway.config.scheduling import Hook, NameList, command_as_hook
from gateway.config.yaml_file import (
    MOST_VALUES,
    YamlDocument,
    YamlEntry,
    YamlList,
    YamlMapping,
    YamlScalar,
)

Endpoint = Literal["chat", "embeddings", "rerank", "infill", "audio", "vision"]

STARTED_BY, UP = "started_by", "llama-gateway up"
"""The label, and its value, of the nodes whose servers `llama-gateway up` has started."""

_NAME = "[A-Za-z0-9._-]{1,128}"


def _slots(value: object) -> object:
    if value == "auto":
        return None
    if isinstance(value, (bool, str)):
        raise fields.validation_error('must be a number of slots or "auto"')
    return value


def _models(value: object) -> object:
    """Normalise the three forms of `model` to one: {public name: the node's name}."""
    match value:
        case str():
            return {value: value}
        case Mapping():
            models = dict(value)
        case list() | tuple() if all(isinstance(name, str) for name in value):
            models = {name: name for name in value}
        case _:
            raise fields.validation_error(
                "must be a name, a list of names, or a mapping {public name: node's name}"
            )
    if not models:
        raise fields.validation_error(
            "must name a model", "leave the key out to take the models that the server reports"
        )
    return models


class TokenCost(ConfigModel):
    """The price of a million tokens, in the settings' currency."""

    prompt: Money = 0.0
    """Price of a million prompt tokens."""
    completion: Money = 0.0
    """Price of a million generated tokens."""


class NodeTimeouts(ConfigModel):
    """A node's own timeouts; an unset key takes its value from `timeouts` in the settings."""

    connect: Seconds | None = None
    """Longest wait for a connection to be made."""
    first_byte: Seconds | None = None
    """Longest wait for the first event with content, before scaling."""
    silence: Seconds | None = None
    """Longest silence between two chunks of a response."""
    total: Seconds | None = None
    """Longest duration of a whole request."""


class NodeTls(ConfigModel):
    """How the gateway checks a node's certificate, and presents its own."""

    ca: ExistingFile | None = None
    """PEM file of the certificate authorities to trust, instead of the system's."""
    cert: ExistingFile | None = None
    """PEM file of the gateway's own certificate."""
    key: ExistingFile | None = None
    """PEM file of that certificate's key, if `cert` does not hold it."""
    verify: bool = True
    """`false` accepts any certificate. For a closed network only."""
    server_name: Host | None = None
    """Name expected in the certificate, if it is not the URL's host."""

    @field_validator("key")
    @classmethod
    def _key_has_a_certificate(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        if key is not None and info.data.get("cert", key) is None:
            raise fields.validation_error(
                "needs `cert`", "name the certificate that this key belongs to"
            )
        return key


_HookOrCommand = Annotated[
    Hook | None, BeforeValidator(command_as_hook), TypeLabel("list or mapping")
]


class NodeSpec(ConfigModel):
    """One node: a llama.cpp server, or another OpenAI-compatible endpoint."""

    misplaced_keys: ClassVar[Mapping[str, str]] = {
        "port": "it is part of the url: http://10.0.0.11:8080",
        **dict.fromkeys(
            ("address", "server", "api_base", "base_url", "apiBase", "baseUrl", "proxy"),
            "it is called url: http://10.0.0.11:8080, without /v1",
        ),
        "api_key": "name its variable in api_key_env, or its file in api_key_file",
        "weight": (
            "there are no weights: speeds are measured, and speed_hint is the first guess (2: "
            "twice as fast as the others)"
        ),
        "priority": (
            "nodes have none: each request goes where it is expected to end first. A node for "
            "what the others can't do in time is `tier: gpu`; requests have classes"
        ),
        "backup": (
            "a reserve is `tier: gpu`, which gets what the others can't do in time, or "
            "`standby: true` with `start` and `stop`, which is started for that"
        ),
        **dict.fromkeys(
            (
                "max_conns", "maxconn", "max_connections", "max_parallel_requests", "parallel",
                "n_parallel", "concurrency", "concurrencyLimit",
            ),
            "it is called slots, and learnt from llama.cpp",
        ),
        **dict.fromkeys(
            ("max_fails", "fail_timeout", "health_check", "healthcheck", "check_interval"),
            "it is of all nodes: health, in the settings",
        ),
        **dict.fromkeys(("ctx_size", "n_ctx", "context_length"), "it is called context"),
        **dict.fromkeys(("model_name", "model_id"), "it is called model"),
        **dict.fromkeys(
            ("timeout", "request_timeout"),
            "it is one of timeouts: {connect, first_byte, silence, total}",
        ),
        **dict.fromkeys(
            ("ttl", "keep_alive", "idle_unload", "pin", "replicas"),
            "it is of a model: models.NAME.idle_unload, pin and replicas, in the settings",
        ),
        **dict.fromkeys(
            ("models_max", "max_instances", "max_loaded_models"),
            "it is learnt from the server; memory says what its host has for models",
        ),
        "slot_save_path": "it is an option of its server; here slot_save: true",
    }  # fmt: skip

    name: Annotated[
        str,
        fields.matching(
            re.compile(rf"(?!\.{{1,2}}$){_NAME}").fullmatch,
            "must be 1 to 128 letters, digits, '.', '_' or '-'",
            "such as epyc-a-numa0",
        ),
        Field(examples=["epyc-a"], json_schema_extra={"pattern": f"^{_NAME}$"}),
        TypeLabel("text"),
    ]
    """Unique name: letters, digits, `.`, `_`, `-`."""
    url: Annotated[
        str,
        BeforeValidator(fields.normalise_node_url),
        Field(
            examples=["http://10.0.0.11:8080"],
            json_schema_extra={"pattern": r"^(https?://|.*\$\{)"},
        ),
        TypeLabel("URL"),
    ]
    """Address without `/v1`; a path prefix is kept."""
    kind: Literal["llama.cpp", "openai"] = "llama.cpp"
    """`llama.cpp`, or `openai` for any other OpenAI-compatible endpoint."""
    tier: Literal["cpu", "gpu"] = "cpu"
    """The processor that the node computes on."""
    slots: Annotated[
        Annotated[int, Field(ge=1, le=65536)] | None,
        BeforeValidator(_slots),
        WithJsonSchema(
            {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65536}, {"const": "auto"}]}
        ),
        TypeLabel("number or `auto`"),
    ] = None
    """Requests that it works on at once. `auto`: as many as the server reports."""
    models: Annotated[
        Mapping[NonEmptyText, NonEmptyText] | None,
        BeforeValidator(_models),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {
                        "type": "object",
                        "additionalProperties": {"type": "string"},
                        "minProperties": 1,
                    },
                ]
            }
        ),
        Field(validation_alias="model"),
        TypeLabel("text, list or mapping"),
    ] = None
    """The models that it serves: a name, a list, or a mapping `{public name: node's name}`. Unset:
    those that the server reports."""
    endpoints: Annotated[
        frozenset[Endpoint] | None, BeforeValidator(fields.as_list), TypeLabel("list")
    ] = None
    """The APIs that it serves: `chat`, `embeddings`, `rerank`, `infill`, `audio`, `vision`. Unset:
    all that the node does not refuse with 501; but a server for embeddings or reranking gets chats
    only where no node of its model is for them."""
    context: Annotated[Count | None, TypeLabel("number", "tokens")] = None
    """Tokens of one slot. Unset: as the server reports."""
    kv: Literal["auto", "shared", "split"] = "auto"
    """`shared`: all its slots share one pool of `context` tokens, as those of a server that was
    started without `-np`; `split`: each slot has its own. `auto`: learnt from the error of a full
    pool."""
    host: Annotated[Host, Field(validate_default=True), TypeLabel("text")] = ""
    """Failure domain: nodes that fail together share it, and a retry prefers another. Unset: the
    URL's host."""
    models_on_demand: bool | None = None
    """`true`: a server of kind `openai` that loads the models of its list when they are asked for,
    such as llama-swap or Ollama. `false`: a llama.cpp server in router mode that the gateway must
    not tell to load or unload. Unset: such a server is recognised and told."""
    memory: MemorySize | None = None
    """What its host has for models that llama.cpp loads on demand. Nodes with one `host` share it,
    and one of them may say it for all. Unset: one model at a time, unless the server limits their
    number (`--models-max`)."""
    preload: NameList = ()
    """Models that it always holds, by their public names."""
    slot_save: bool = False
    """`true`: the prompts that are worth it are saved to files of its server (`--slot-save-path`)
    before a model is unloaded, and read again after its next load."""
    cost_per_hour: Money = 0.0
    """Cost of an hour, in the settings' currency."""
    cost_per_million_tokens: Annotated[
        TokenCost | None,
        fields.instead_of("cost_per_hour", "a node is paid by the hour or by the token"),
    ] = None
    """Cost of its tokens, instead of `cost_per_hour`."""
    speed_hint: Factor = 1.0
    """Assumed speed relative to that of similar nodes, until it is measured. Where it is not
    written: that of the best of them."""
    calibrate: bool = True
    """`false`: no tiny requests that measure its speed while it is idle and unmeasured."""
    api_key_env: EnvVarName | None = None
    """Name of the environment variable that holds the node's key."""
    api_key_file: Annotated[ExistingFile | None, fields.instead_of("api_key_env")] = None
    """File that holds the node's key, instead of `api_key_env`."""
    # Resolved from the two keys above; `exclude` keeps it out of the file's keys.
    api_key: SecretStr | None = Field(default=None, exclude=True, validate_default=True)
    timeouts: NodeTimeouts = NodeTimeouts()
    """This node's own timeouts, instead of the settings' `timeouts`."""
    tls: NodeTls | None = None
    """For an https node."""
    enabled: bool = True
    """`false`: it stays in the file and gets no requests."""
    standby: bool = False
    """`true`: it gets no requests until its `start` hook has been run on demand; without hooks it
    never does."""
    start: _HookOrCommand = None
    """Starts a standby node: a list (program, arguments), or the mapping below. Needs `stop` and
    `model`."""
    stop: Annotated[_HookOrCommand, Field(validate_default=True)] = None
    """Stops it; written as `start` is."""
    labels: Annotated[
        Mapping[NonEmptyText, str], Field(max_length=64), TypeLabel("mapping of texts")
    ] = {}
    """Free text about it, such as `{numa: "0"}`."""

    @field_validator("host", mode="before")
    @classmethod
    def _host_of_the_url(cls, host: object, info: ValidationInfo) -> object:
        return host or url_host(info.data.get("url", "http://unknown"))

    @field_validator("models_on_demand")
    @classmethod
    def _on_demand_by_kind(cls, given: object, info: ValidationInfo) -> object:
        if given and info.data.get("kind") == "llama.cpp":
            raise fields.validation_error(
                "is for kind openai",
                "leave it out: a llama.cpp server in router mode is recognised by itself",
            )
        return given

    @field_validator("preload", "slot_save")
    @classmethod
    def _done_by_commands(cls, wanted: Any, info: ValidationInfo) -> Any:
        declared: Mapping[str, str] | None = info.data.get("models")
        if wanted and info.data.get("kind") == "openai":
            raise fields.validation_error(
                "is for llama.cpp's servers: a node of kind openai can't be told to load models",
                "leave it out, and use its own settings",
            )
        if wanted and info.data.get("models_on_demand") is False:
            raise fields.validation_error(
                "needs a node that may be told to load models", "leave out models_on_demand: false"
            )
        for name in wanted if info.field_name == "preload" else ():
            if declared is not None and name not in declared:
                raise fields.validation_error(
                    f"names {name}, which is no model of the node",
                    f"its `model` has {', '.join(declared)}",
                )
        return wanted

    @field_validator("stop")
    @classmethod
    def _can_be_started_on_demand(cls, stop: Hook | None, info: ValidationInfo) -> Hook | None:
        if "start" not in info.data:
            return stop
        if info.data["start"] is None:
            if stop is not None:
                raise fields.validation_error("is missing", "a node with `stop` needs it", "start")
            return None
        if stop is None:
            raise fields.validation_error(
                "is missing", "a node that the gateway starts must be stopped, too"
            )
        if "models" in info.data and info.data["models"] is None:
            raise fields.validation_error(
                "is missing", "name what it serves: it can't be asked while it is stopped", "model"
            )
        return stop

    # The one model of a router that this entry was made for (`of_model`), by the router's own name.
    _instance: str | None = PrivateAttr(None)

    @property
    def instance(self) -> str | None:
        """The model of a router that this is the entry of; None: it is an entry of the file."""
        return self._instance

    def of_model(self, model: str, names: Collection[str]) -> NodeSpec:
        """The entry of one model on this router, which answers to all of these names."""
        declared = self.models
        own = {
            "name": f"{self.name}/{model}",
            "models": declared and {one: name for one, name in declared.items() if name in names},
            "standby": False,
            "start": None,
            "stop": None,
        }
        spec = self.model_copy(update=own)
        spec._instance = model  # noqa: SLF001 - the copy's own
        return spec

    @property
    def written_hint(self) -> float | None:
        """Its `speed_hint`; None: the file has none."""
        return self.speed_hint if "speed_hint" in self.model_fields_set else None

    @property
    def autoscaled(self) -> bool:
        """Whether the gateway starts and stops the node."""
        return self.standby and self.start is not None and self.stop is not None

    @field_validator("api_key", mode="before")
    @classmethod
    def _resolve_the_key(cls, key: object, info: ValidationInfo) -> object:
        return fields.resolved_secret(key, info, "a key", "api_key")


def host_memory(specs: Iterable[NodeSpec]) -> dict[str, int]:
    """The bytes that each host has for models, by the first of its nodes that says it."""
    said = [(spec.host, spec.memory) for spec in specs if spec.memory is not None]
    return dict(reversed(said))


def url_host(url: str) -> str:
    """Return the host of an address from `normalise_node_url`."""
    return urlsplit(url).hostname or ""


# Keys that exclude each other: a node that has one takes no default for the other.
_ALTERNATIVES = (("cost_per_hour", "cost_per_million_tokens"), ("api_key_env", "api_key_file"))

_NO_FILE_REMEDY = (
    "name yours with --nodes, or write `nodes: [{name: first, url: 'http://HOST:8080'}]` into it; "
    "`llama-gateway up` needs none: it starts servers on this machine"
)

# Keys of a node that can't be a default.
_NO_DEFAULTS = ("name", "url")

_EXAMPLE = "- {name: epyc-a, url: http://10.0.0.11:8080}"


class Inventory(ConfigModel):
    """All nodes, in the order of the file."""

    nodes: tuple[NodeSpec, ...]
    """The nodes. `[]` is allowed: a fleet may be filled later."""

    _warnings: tuple[Problem, ...] = PrivateAttr(())

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Entries that are valid but look like a slip."""
        return self._warnings


def load_inventory(
    path: Path, env: Mapping[str, str] = os.environ, *, text: str | None = None
) -> Inventory:
    """Read the inventory from a YAML file.

    `env` holds the variables for `${VAR}` and `api_key_env`; by default the process's own. `text`:
    what to read in place of the file's own. Raises ConfigError with every problem of the file.
    Reads the disk: call it in a thread.
    """
    if text is None and not os.path.lexists(path):
        raise ConfigError([Problem(path, 0, "", "there is no such file", _NO_FILE_REMEDY)])
    source = yaml_file.read_yaml(path, env, text)
    if foreign := foreign_problem(source, "inventory"):
        raise ConfigError([foreign])
    problems = list(source.problems)
    defaults, entries = _read_top_level(source, problems)

    # The defaults are checked even if no node takes them.
    needed = {"name": "node", "url": "http://node"}
    given = {key: YamlEntry(YamlScalar(value), 0, "") for key, value in needed.items()}
    checked = YamlMapping({**defaults.entries, **given})
    problems += yaml_file.validate(NodeSpec, source, YamlEntry(checked, 0, "defaults"), env)[1]

    nodes: list[NodeSpec] = []
    values = 0
    for entry in entries:
        merged = _with_defaults(defaults, entry)
        values += yaml_file.measure(merged.tree)[0]
        if values > MOST_VALUES:
            problems.append(
                Problem(path, entry.line, entry.key, f"more than {MOST_VALUES} values in all")
            )
            break
        node, found = yaml_file.validate(NodeSpec, source, merged, env)
        problems += found
        if node is not None:
            nodes.append(node)
    problems += yaml_file.find_duplicates(source, entries, "name", "the node")
    if problems:
        raise ConfigError(yaml_file.first_of_each_place(problems))
    inventory = Inventory(nodes=tuple(nodes))
    inventory._warnings = tuple(_shared_addresses(path, entries, nodes))  # noqa: SLF001 - its own
    return inventory


def _shared_addresses(
    path: Path, entries: tuple[YamlEntry, ...], nodes: list[NodeSpec]
) -> Iterator[Problem]:
    """Report nodes at one address; an `openai` endpoint counts once for each key and model."""
    first: dict[tuple[object, ...], str] = {}
    for number, (entry, spec) in enumerate(zip(entries, nodes, strict=True)):
        if not spec.enabled:
            continue
        models = repr(spec.models) if spec.kind == "openai" else ""
        other = first.setdefault((_server_of(spec.url), spec.api_key, models), spec.name)
        if other != spec.name:
            place = entry.tree.entries["url"] if isinstance(entry.tree, YamlMapping) else entry
            yield Problem(
                path,
                place.line,
                f"nodes[{number}].url",
                f"the nodes {other} and {spec.name} are one server, whose slots count twice",
                "correct one url, or remove one node",
            )


def _server_of(url: str) -> tuple[str, int, str]:
    """Host, port and path of an address, alike for the spellings that lead to one server.

    Names are not looked up: only `localhost` is taken for a loopback address.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        host = str(getattr(address, "ipv4_mapped", None) or address)
    # To connect to every address is to connect to this machine.
    host = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return host, parts.port or (443 if parts.scheme == "https" else 80), parts.path


def _read_top_level(
    source: YamlDocument, problems: list[Problem]
) -> tuple[YamlMapping, tuple[YamlEntry, ...]]:
    """Return the defaults and the entries of the nodes."""
    root = source.root

    def report(entry: YamlEntry, message: str, remedy: str, key: str | None = None) -> None:
        key = entry.key if key is None else key
        problems.append(Problem(source.file, entry.line, key, message, remedy))

    if not isinstance(root.tree, YamlMapping):
        if isinstance(root.tree, YamlList):
            report(root, "must be a mapping, not a list", "write the line nodes: before it")
        elif root.tree == YamlScalar(None):
            report(root, "the file is empty", "write nodes: []")
        else:
            report(root, "must be a mapping", f"write nodes: and below it {_EXAMPLE}")
        return YamlMapping({}), ()
    for key, entry in root.tree.entries.items():
        if key not in {"defaults", "nodes"}:
            remedy = yaml_file.unknown_key_remedy(key, ("defaults", "nodes"))
            if key in yaml_file.keys_of(NodeSpec):
                remedy = "it is a key of a node: indent it as far as that node's name"
            report(entry, "unknown key", remedy)
    return _defaults(root.tree, report), _entries(root, root.tree, report)


def _defaults(root: YamlMapping, report: Callable[..., None]) -> YamlMapping:
    given = root.entries.get("defaults")
    if given is None or given.tree == YamlScalar(None):
        return YamlMapping({})
    if not isinstance(given.tree, YamlMapping):
        report(given, "must be a mapping", "of keys for every node")
        return YamlMapping({})
    for key in _NO_DEFAULTS:
        if key in given.tree.entries:
            report(given.tree.entries[key], "can't be a default", "each node has its own")
    return YamlMapping(
        {key: one for key, one in given.tree.entries.items() if key not in _NO_DEFAULTS}
    )


def _entries(
    root: YamlEntry, tree: YamlMapping, report: Callable[..., None]
) -> tuple[YamlEntry, ...]:
    nodes = tree.entries.get("nodes")
    if nodes is None or nodes.tree == YamlScalar(None):
        report(nodes or root, "is missing", "list the nodes, or write nodes: []", key="nodes")
        return ()
    if not isinstance(nodes.tree, YamlList):
        report(nodes, "must be a list", f"one item for each node: {_EXAMPLE}")
        return ()
    for entry in nodes.tree.entries:
        if not isinstance(entry.tree, YamlMapping):
            report(entry, "must be a mapping", f"write {_EXAMPLE}")
    return nodes.tree.entries


def _with_defaults(defaults: YamlMapping, entry: YamlEntry) -> YamlEntry:
    if not isinstance(entry.tree, YamlMapping):
        return entry
    own_defaults = dict(defaults.entries)
    for pair in _ALTERNATIVES:
        if any(key in entry.tree.entries for key in pair):
            for key in pair:
                own_defaults.pop(key, None)
    return YamlEntry(_merged(YamlMapping(own_defaults), entry.tree), entry.line, entry.key)


def _merged(below: YamlMapping, above: YamlMapping) -> YamlMapping:
    """Lay a mapping over another, and the mappings in it over theirs."""
    entries = dict(below.entries)
    for key, entry in above.entries.items():
        under, tree = entries.get(key), entry.tree
        if key != "model" and under is not None and isinstance(tree, YamlMapping):
            tree = _merged(under.tree, tree) if isinstance(under.tree, YamlMapping) else tree
        entries[key] = YamlEntry(tree, entry.line, entry.key)
    return YamlMapping(entries)
