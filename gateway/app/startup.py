"""The command line's options, and the checks before a gateway starts.

Of the models that both files want loaded, those are refused that can't fit the nodes that are to
hold them: a figure that nobody has written counts as nothing.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gateway.callers.callers import is_loopback
from gateway.callers.stored_keys import count_stored_keys
from gateway.config.errors import ConfigError, Problem
from gateway.config.fields import format_size, is_host
from gateway.config.inventory import Inventory, NodeSpec, host_memory, load_inventory
from gateway.config.keys import has_labels
from gateway.config.listeners import LimitSettings
from gateway.config.scheduling import ModelRule
from gateway.config.settings import RejectedFiles, Settings, load_settings, parse_address
from gateway.config.stored import STORE_OFF
from gateway.config.versions import FileHistory, FileKind
from gateway.config.yaml_file import find_entry, read_yaml, unknown_key_remedy
from gateway.http.certificates import CertificateError, load_certificate
from gateway.system import install_command
from gateway.transport.pool import node_address
from gateway.watch.request_tracing import has_otel

if TYPE_CHECKING:
    from gateway.store.database import StoreLocation

# Keys of the settings that options override.
_OVERRIDDEN = (
    *("listen.host", "listen.port", "listen.edges"),
    *("admin.host", "admin.port", "admin.key_file", "allow_anonymous"),
)
NO_TEXTS: Mapping[Path, str] = {}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line; None: the settings file decides."""

    inventory_file: Path
    settings_file: Path | None = None
    host: str | None = None
    port: int | None = None
    admin_host: str | None = None
    admin_port: int | None = None
    admin_key_file: Path | None = None
    allow_anonymous: bool = False
    edges: int | Literal["auto"] | None = None
    state_dir: Path | None = None
    """Folder of the state files; by default systemd's, else the user's."""
    store_dir: Path | None = None
    """Folder of the store, where the settings name none; by default that of the state files."""
    read_memory: Callable[[Path, int, int], int] | None = field(default=None, compare=False)
    """Reads from a model's file what it takes with so many slots of so many tokens: bytes.
    Raises: ValueError if it is no readable model."""
    restart_command: tuple[str, ...] = ()
    """The command that starts a successor; empty: no handover is possible."""
    model_memory: dict[str, int] = field(default_factory=dict)
    """Bytes that models need, where the settings don't say it; it may change until a reload."""

    def apply_to(self, settings: Settings) -> Settings:
        """The settings, overridden by these options."""
        listen = {"host": self.host, "port": self.port, "edges": self.edges}
        admin = {"host": self.admin_host, "port": self.admin_port, "key_file": self.admin_key_file}
        return settings.model_copy(
            update={
                "listen": settings.listen.model_copy(update=_given(listen)),
                "admin": settings.admin.model_copy(update=_given(admin)),
                "allow_anonymous": settings.allow_anonymous or self.allow_anonymous,
                "models": {**settings.models, **dict(self._sized(settings.models))},
            }
        )

    def overrides(self, env: Mapping[str, str]) -> dict[str, str]:
        """What gave values in place of the file, by their keys: a variable of `env`, or an option.

        systemd's sockets count as options.
        """
        found = {}
        for key in _OVERRIDDEN:
            name = key.removeprefix("listen.").replace(".", "_")
            given = getattr(self, name)
            if given is not None and given is not False:
                variable = f"LLAMA_GATEWAY_{name.upper()}"
                found[key] = variable if variable in env else f"--{name.replace('_', '-')}"
        return found

    def _sized(self, rules: Mapping[str, ModelRule]) -> Iterator[tuple[str, ModelRule]]:
        for name, size in self.model_memory.items():
            rule = rules.get(name) or ModelRule()
            if rule.memory is None and (not rule.use or name in rule.use):
                yield name, rule.model_copy(update={"memory": size})


class StartError(Exception):
    """The gateway can't start; `status` is the process's exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class StartProblem(NamedTuple):
    """What keeps a gateway from starting although its files are valid."""

    key: str  # key of the settings or the inventory
    message: str  # with the remedy


@dataclass(frozen=True, slots=True)
class StartupCheck:
    """Both files, and everything that would keep a gateway from starting with them."""

    settings: Settings | None  # None: the file has problems. Likewise for the inventory.
    inventory: Inventory | None
    problems: tuple[Problem, ...]  # of both files
    start_problems: tuple[StartProblem, ...]


def check_startup(
    options: Options, *, allow_empty: bool = True, texts: Mapping[Path, str] = NO_TEXTS
) -> StartupCheck:
    """Check everything; nothing is started and nothing is sent.

    A blank settings file is a problem; one with comments alone is too, unless `allow_empty`.
    `texts`: what to read in place of a file's own.
    """
    files = options.settings_file, options.inventory_file
    problems: list[Problem] = []
    start_problems: list[StartProblem] = []
    settings = inventory = None
    try:
        rejected: RejectedFiles = "blank" if allow_empty else "empty"
        text = None if files[0] is None else texts.get(files[0])
        settings = options.apply_to(load_settings(files[0], rejected=rejected, text=text))
        start_problems += _listener_problems(settings, _count_keys(options, settings))
        start_problems += _cluster_problems(settings)
        if lacks_otel(settings):
            start_problems.append(
                StartProblem(_TRACES_KEY, f"{_TRACES_KEY}: {_NO_OTEL}: {_otel_remedy()}")
            )
    except ConfigError as error:
        problems += error.problems
    try:
        inventory = load_inventory(files[1], text=texts.get(files[1]))
        start_problems += _node_tls_problems(inventory)
        if settings is not None:
            check_fit(settings, inventory, *files, texts)
    except ConfigError as error:
        problems += error.problems
    return StartupCheck(settings, inventory, tuple(problems), tuple(start_problems))


def check_text(options: Options, kind: FileKind, text: str) -> Sequence[Problem]:
    """What would keep a gateway from starting, if one of its files had this text."""
    file = options.settings_file if kind == "gateway" else options.inventory_file
    assert file is not None
    check = check_startup(options, texts={file: text})
    others = (Problem(file, 0, one.key, one.message) for one in check.start_problems)
    return (*check.problems, *others)


def histories(options: Options) -> dict[FileKind, FileHistory]:
    """The earlier texts of both files, as far as there are files."""
    files: dict[FileKind, Path | None] = {
        "gateway": options.settings_file,
        "nodes": options.inventory_file,
    }
    folders = (options.state_dir or state_folder(),)
    return {
        kind: FileHistory.of(kind, file, folders)
        for kind, file in files.items()
        if file is not None
    }


def load_checked(options: Options, *, allow_empty: bool = True) -> tuple[Settings, Inventory]:
    """Both files, checked by `check_startup`. Raises: StartError, with every problem."""
    check = check_startup(options, allow_empty=allow_empty)
    messages = [str(ConfigError(check.problems))] if check.problems else []
    messages += [problem.message for problem in check.start_problems]
    if messages or check.settings is None or check.inventory is None:
        raise StartError("\n".join(messages), status=2)
    return check.settings, check.inventory


def empty_pools(settings: Settings, labels: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Warnings of pools (`cache.nodes`) that no node belongs to; `labels`: those of each node."""
    specs = {
        "cache": settings.cache,
        **{f"groups.{name}.cache": group.cache for name, group in settings.groups.items()},
        **{f"keys[{number}].cache": key.cache for number, key in enumerate(settings.keys)},
    }
    nodes = list(labels)
    for place, spec in specs.items():
        wanted = tuple(sorted(spec.nodes.items())) if spec is not None and spec.nodes else ()
        if not any(has_labels(one, wanted) for one in nodes) and wanted:
            pool = ", ".join(f"{name}={value}" for name, value in wanted)
            yield (
                f"{place}.nodes: no node of the inventory has the labels {pool}, so requests that "
                "need them get 404; give nodes these labels, or correct them"
            )


def _count_keys(options: Options, settings: Settings) -> int:
    """The API keys of settings and store, as far as it matters: 0 only where there surely are none.

    The store is asked only if the start depends on it. If it can't be read, there may be keys: the
    gateway starts, and refuses everybody until it knows.
    """
    listen = settings.listen
    is_open = not is_loopback(listen.host) or bool(listen.trusted_proxies)
    if settings.keys or settings.allow_anonymous or not is_open:
        return len(settings.keys)
    location = store_location(options, settings)
    if location is None:
        return 0
    stored = count_stored_keys(location, keys_file(options))
    return 1 if stored is None else stored


def _listener_problems(settings: Settings, keys: int) -> Iterator[StartProblem]:
    """What keeps the listeners from starting with these settings, and so many API keys."""
    listen, admin = settings.listen, settings.admin
    for key, host in (("listen.host", listen.host), ("admin.host", admin.host)):
        if not is_host(host.strip("[]")):
            yield StartProblem(key, f"{key}: {host!r} is no address; write one, or a host's name")
    if not (keys or settings.allow_anonymous):
        if not is_loopback(listen.host):
            yield StartProblem(
                "listen.host",
                f"the public listener would listen on {listen.host} without any API key, open to "
                f"everybody who can reach it: {_KEY_OR_ANONYMOUS}",
            )
        if listen.trusted_proxies:
            yield StartProblem(
                "listen.trusted_proxies",
                "the gateway would serve behind a proxy (listen.trusted_proxies) without any API "
                f"key, open to everybody who can reach that: {_KEY_OR_ANONYMOUS}",
            )
    if not (admin.keys or admin.key_file is not None or is_loopback(admin.host)):
        yield StartProblem(
            "admin.host",
            f"the admin listener would listen on {admin.host} without a key: add one to admin.keys "
            "('llama-gateway keys hash' makes it), name a file that holds one with "
            "--admin-key-file (admin.key_file), or let it listen on 127.0.0.1",
        )
    hosts = {listen.host.lower(), admin.host.lower()}
    if listen.port == admin.port != 0 and (len(hosts) == 1 or hosts & {"", "0.0.0.0", "::"}):
        yield StartProblem(
            "listen.port",
            f"both listeners would use port {listen.port}: choose another with --port "
            "(listen.port) or --admin-port (admin.port)",
        )
    if admin.key_file is not None:
        try:
            read_admin_key(admin.key_file)
        except StartError as error:
            yield StartProblem("admin.key_file", str(error))
    for key, files in (("listen.tls", listen.tls), ("admin.tls", admin.tls)):
        if files is not None:
            try:
                load_certificate(files)
            except CertificateError as error:
                yield StartProblem(key, f"{key}: {error}")


_KEY_OR_ANONYMOUS = (
    "add a key ('llama-gateway keys create' makes one), or say that this is intended with "
    "--allow-anonymous (allow_anonymous: true)"
)


def _cluster_problems(settings: Settings) -> Iterator[StartProblem]:
    cluster, url = settings.cluster, settings.store.url
    if cluster is None:
        return
    if url in {None, STORE_OFF}:
        yield StartProblem(
            "store.url",
            "store.url: the members of a cluster share a store: name a database of PostgreSQL "
            "(postgresql://USER:PASSWORD@HOST/DATABASE), or remove the section cluster",
        )
    if settings.listen.edges == 0 and "edges" in settings.listen.model_fields_set:
        yield StartProblem(
            "listen.edges",
            "listen.edges: a member of a cluster needs edges (--edges): write a number from 1 on, "
            "or auto",
        )
    port = parse_address(cluster.listen).port
    for key, other in (("listen.port", settings.listen.port), ("admin.port", settings.admin.port)):
        if port == other:
            yield StartProblem("cluster.listen", f"cluster.listen: {key} is {port} too: change one")
    from gateway.cluster.tunnel import member_certificate

    try:
        member_certificate(cluster.tls, cluster.member_name)
    except CertificateError as error:
        yield StartProblem("cluster.tls", f"cluster.tls: {error}")


def cluster_warnings(settings: Settings) -> Iterator[str]:
    """What may be a mistake in the settings of a cluster."""
    if settings.cluster is not None and (settings.store.url or "").startswith("sqlite:"):
        yield (
            "store.url: with a file of SQLite, all members of the cluster must be on this machine, "
            "and a defect of its disk ends them all: it is for trials; use PostgreSQL"
        )


def _node_tls_problems(inventory: Inventory) -> Iterator[StartProblem]:
    for number, spec in enumerate(inventory.nodes):
        try:
            node_address(spec)
        except OSError as error:
            yield StartProblem(
                f"nodes[{number}].tls",
                f"the TLS files of the node '{spec.name}' can't be used ({error}): name PEM files "
                "in its tls (ca, cert, key)",
            )


_TRACES_KEY = "telemetry.traces.endpoint"
_NO_OTEL = "traces need OpenTelemetry's packages, which are not installed"


def _otel_remedy() -> str:
    return f"{install_command('otel')}, or remove the key"


def lacks_otel(settings: Settings) -> bool:
    """Whether these settings need the extra `otel`, which is not installed."""
    return settings.telemetry.traces.endpoint is not None and not has_otel()


def check_extras(settings: Settings, path: Path | None) -> None:
    """Check at a reload that what these settings of a file need is there. Raises: ConfigError."""
    if lacks_otel(settings):
        raise ConfigError([Problem(path or Path(), 0, _TRACES_KEY, _NO_OTEL, _otel_remedy())])


def read_admin_key(path: Path) -> str:
    """The admin key in this file. Raises: StartError."""
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise StartError(
            f"{path}: the admin key can't be read: {why}; make the file, or name "
            "another with --admin-key-file (admin.key_file)",
            status=2,
        ) from None
    if not key:
        raise StartError(f"{path}: the file holds no admin key; write one into it", status=2)
    return key


def reread_admin_key(path: Path | None) -> str | None:
    """The key of `admin.key_file`, if it is set, at a reload. Raises: ConfigError."""
    try:
        return None if path is None else read_admin_key(path)
    except StartError as error:
        raise ConfigError([Problem(path or Path(), 0, "admin.key_file", str(error))]) from None


def count_edges(settings: Settings) -> int:
    """The edges that a gateway with these settings starts; 0: it serves all by itself."""
    edges = settings.listen.edges
    is_auto = edges == "auto" or (edges == 0 and settings.cluster is not None)
    return max(1, len(os.sched_getaffinity(0)) - 1) if is_auto else int(edges)


def share_memory(limits: LimitSettings, edges: int) -> LimitSettings:
    """The limits of each process of a gateway with so many edges, of those of all together.

    Its share of the memory for bodies holds at least one body; the brain has a share, too.
    """
    share = max(limits.body_bytes, limits.buffered_bytes // (edges + 1))
    return limits.model_copy(update={"buffered_bytes": share})


def gateway_name(options: Options, settings: Settings) -> str:
    """Tells this gateway from others of its store, and is the same after a restart.

    SQLite's file is on one host, whose name may be another after each start of a container. All
    members of a cluster are one gateway.
    """
    if settings.cluster is not None:
        return hashlib.sha256(f"cluster {settings.cluster.name}".encode()).hexdigest()[:16]
    listen = settings.listen
    location = store_location(options, settings)
    host = socket.gethostname() if location is not None and location.path is None else ""
    place = f"{host} {options.inventory_file.absolute()} {listen.host} {listen.port}"
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def keys_file(options: Options) -> Path:
    """The file that keeps the hashes of the store's keys for a start without the store.

    It is beside a store that has a folder of its own: the other state files may be temporary.
    """
    if options.store_dir is not None:
        return options.store_dir / "keys.json"
    return state_file(options, "keys")


def batches_folder(options: Options, settings: Settings) -> Path:
    """The folder of callers' files, and of what batches write."""
    return settings.batches.folder or (options.state_dir or state_folder()) / "batches"


def store_location(options: Options, settings: Settings) -> StoreLocation | None:
    """Where the store is; None: the settings have switched it off."""
    # Late: SQLAlchemy would slow the commands that need no store, such as `check`.
    from gateway.store.database import locate_store

    url = settings.store.url
    if url == STORE_OFF:
        return None
    return locate_store(url, options.store_dir or options.state_dir or state_folder())


def state_folder() -> Path:
    """The folder for what is kept over a restart: systemd's, else the user's."""
    if systemd := os.environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return Path(systemd)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "llama-gateway"


def state_file(options: Options, name: str) -> Path:
    """The file that keeps what is of this name over a restart, for this inventory."""
    folder = options.state_dir or state_folder()
    inventory_id = hashlib.sha256(str(options.inventory_file.absolute()).encode()).hexdigest()[:12]
    return folder / f"{name}-{inventory_id}.json"


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


MOST_NAMED = 5
"""Models that a message names."""


class Misfit(NamedTuple):
    """What can't be, by the key to blame: of `models` in the settings, or of `nodes`."""

    place: tuple[str | int, ...]
    message: str
    remedy: str


def check_fit(
    settings: Settings,
    inventory: Inventory,
    settings_file: Path | None,
    inventory_file: Path,
    texts: Mapping[Path, str] = NO_TEXTS,
) -> None:
    """Check that both files fit together. Reads them again for the lines. Raises: ConfigError.

    `texts`: what to read in place of a file's own.
    """
    read = cache(lambda file: read_yaml(file, {}, texts.get(file)).root)
    problems = []
    for place, message, remedy in misfits(settings, inventory.nodes):
        file = (settings_file if place[0] == "models" else inventory_file) or Path()
        line, key = 0, ".".join(map(str, place))
        try:
            entry = find_entry(read(file), place)
            line, key = entry.line, entry.key
        except ConfigError:
            pass  # it has just been replaced
        problems.append(Problem(file, line, key, message, remedy))
    if problems:
        raise ConfigError(problems)


def misfits(settings: Settings, specs: Sequence[NodeSpec]) -> Iterator[Misfit]:
    """Pins of unknown nodes, too many copies, too little memory, or two sizes of one host's."""
    memory = host_memory(specs)
    for number, spec in enumerate(specs):
        if spec.memory not in {None, memory.get(spec.host)}:
            yield Misfit(
                ("nodes", number, "memory"),
                f"another node of the host {spec.host} says {format_size(memory[spec.host])}",
                "say it at one of them, or the same at each: nodes of one host share its memory",
            )
    rules = {name: rule for name, rule in settings.models.items() if rule.is_placed}
    if not rules or not specs:  # a fleet may be filled later
        return
    kept = _kept(rules, specs)
    by_name = {spec.name: spec for spec in specs}
    for model, rule in rules.items():
        yield from _wrong_pins(model, rule, by_name)
        room = _room(model, rule, specs, memory)
        copies, always = room.total(), sum(model in one for one in kept)
        if rule.memory is not None and room and copies == 0:
            yield Misfit(
                ("models", model, "memory"),
                f"is {format_size(rule.memory)}, and no host that may hold {model} has more than "
                f"{format_size(max(memory[host] for host in room))}",
                "correct it, or the `memory` of the nodes",
            )
        elif rule.replicas.min > copies:
            yield Misfit(
                ("models", model, "replicas", "min"),
                f"is {rule.replicas.min}, but {copies} nodes can hold {model}",
                "lower it, or add nodes that load models on demand and have the memory",
            )
        if rule.replicas.max is not None and always > rule.replicas.max:
            yield Misfit(
                ("models", model, "replicas", "max"),
                f"is {rule.replicas.max}, but {always} nodes always hold {model}",
                "raise it, or take the model out of a `pin` or `preload`",
            )
    yield from _full_hosts(rules, specs, kept)


def _is_placed(spec: NodeSpec) -> bool:
    """Whether a node may be one that loads models on demand."""
    given = spec.models_on_demand
    return given is True or (given is None and spec.kind == "llama.cpp")


def _kept(rules: Mapping[str, ModelRule], specs: Iterable[NodeSpec]) -> list[set[str]]:
    """The models that each node always holds."""
    pins: dict[str, set[str]] = {}
    for model, rule in rules.items():
        for name in rule.pin:
            pins.setdefault(name, set()).add(model)
    return [pins.get(one.name, set()) | set(one.preload) if one.enabled else set() for one in specs]


def _room(
    model: str, rule: ModelRule, specs: Iterable[NodeSpec], memory: Mapping[str, int]
) -> Counter[str]:
    """How many nodes can hold a model at a time, alone: of each host that may hold it."""
    nodes = Counter(
        spec.host
        for spec in specs
        if _is_placed(spec) and (spec.models is None or model in spec.models)
    )
    for host in nodes.keys() & memory.keys() if rule.memory is not None else ():
        nodes[host] = min(nodes[host], memory[host] // (rule.memory or 1))
    return nodes


def _wrong_pins(model: str, rule: ModelRule, by_name: Mapping[str, NodeSpec]) -> Iterator[Misfit]:
    for number, name in enumerate(rule.pin):
        spec = by_name.get(name)
        if spec is None:
            words = f"no node of the inventory is named {name}", unknown_key_remedy(name, by_name)
        elif spec.models is not None and model not in spec.models:
            words = f"the node {name} has no {model}", f"its `model` has {', '.join(spec.models)}"
        elif not _is_placed(spec):
            words = f"the node {name} is told to load nothing", "see its kind and models_on_demand"
        else:
            continue
        yield Misfit(("models", model, "pin", number), *words)


def _full_hosts(
    rules: Mapping[str, ModelRule],
    specs: Sequence[NodeSpec],
    kept: Sequence[set[str]],
) -> Iterator[Misfit]:
    """Hosts whose pinned and preloaded models need more memory than they have."""
    needs: dict[str, Counter[str]] = {spec.host: Counter() for spec in specs}
    for spec, models in zip(specs, kept, strict=True):
        needs[spec.host].update(models & rules.keys())
    for number, spec in enumerate(specs):
        if spec.memory is None:
            continue
        copies = needs.pop(spec.host, Counter[str]())
        parts = {model: count * (rules[model].memory or 0) for model, count in copies.items()}
        if (total := sum(parts.values())) > spec.memory:
            largest = sorted(filter(parts.get, parts), key=lambda model: -parts[model])[:MOST_NAMED]
            yield Misfit(
                ("nodes", number, "memory"),
                f"{spec.host} has {format_size(spec.memory)}, and always to be loaded there are "
                f"{', '.join(f'{one} ({format_size(parts[one])})' for one in largest)}: "
                f"{format_size(total)} in all",
                "change `pin` in the settings, `preload` here, or the memory",
            )
