"""Configurations of other programs, given by mistake: which one it is, and its servers as nodes.

Each is told by keys that only it has. The lines hold addresses, model names and names of variables;
a key that stands in the file is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from gateway.config.errors import Problem
from gateway.config.fields import normalise_node_url
from gateway.config.yaml_file import YamlDocument, YamlMapping, parse_scalar, read_yaml, to_plain

MOST_NODES = 20
"""Nodes that are written out, and models of each."""

MOST_ENTRIES = 100
"""Of a list or mapping of the file, that are looked at."""

LONGEST_TEXT = 1000
"""Of a text of the file, and of a command with its macros."""

_VARIABLE = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)|\$\{([A-Za-z_]\w*)\}")

_PORT = re.compile(r"(?:^|\s)--port[ =]+(\d{1,5})\b")

_LLAMA_CPP = re.compile(r"llama[-._]?(cpp|server)|llama\.cpp")

_ENGINES = re.compile(r"llama|vllm|sglang|tgi|text-generation|local-?ai|kobold|litellm")

_ON_DEMAND = "openai, models_on_demand: true"
"""The kind of servers that load the models of their list by themselves."""

_LLAMA_SWAP_NOTES = (
    "  # llama-swap starts and stops these. To leave that to it, write it as the one node instead:",
    f"  # - {{name: llama-swap, url: http://127.0.0.1:8080, kind: {_ON_DEMAND}}}",
    "  # To leave it to the gateway, run llama-server --models-dir; ttl, groups and matrix are",
    "  # then models.NAME.idle_unload, pin and replicas in the settings.",
)


class _Server(NamedTuple):
    name: str
    url: str
    kind: str = ""
    models: dict[str, str] = {}  # noqa: RUF012 - nobody changes it; by their public names
    key: str = ""  # the variable that holds it


def foreign_problem(source: YamlDocument, belongs: str) -> Problem | None:
    """The one problem of a file that is another program's; None: it is none that is known.

    `belongs`: what the file should have been, `inventory` or `settings`.
    """
    root = source.root.tree
    for key, (program, marks, servers) in _PROGRAMS.items():
        if not isinstance(root, YamlMapping) or key not in root.entries:
            continue
        # Without variables their names stay, and no value of one is repeated.
        plain = to_plain(read_yaml(source.file, {}).root.tree, LONGEST_TEXT)
        if not any(marks & one.keys() for _, one in _entries(_mapping(plain).get(key))):
            continue
        lines = tuple(_lines(servers(_mapping(plain))))
        if lines and program == "llama-swap":
            lines += _LLAMA_SWAP_NOTES
        begin = f"this is a configuration of {program}, not "
        begin += "an inventory" if belongs == "inventory" else "the gateway's settings"
        if not lines:
            remedy = "it names no address of a server: write nodes: [{name: ..., url: ...}]"
        elif belongs == "inventory":
            remedy = "the lines below would stand here; check each address, kind, model and key"
        else:
            remedy = (
                "its servers belong into the inventory (--nodes FILE), as in the lines below; "
                "the settings need nothing of it"
            )
        return Problem(source.file, root.entries[key].line, key, begin, remedy, lines=lines)
    return None


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _entries(value: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings in a mapping or list, by name."""
    pairs = enumerate(value) if isinstance(value, list) else _mapping(value).items()
    for name, one in islice(pairs, MOST_ENTRIES):
        if isinstance(one, dict):
            yield str(name), one


def _litellm(root: dict[str, Any]) -> Iterator[_Server]:
    for _, entry in _entries(root["model_list"]):
        given = _mapping(entry.get("litellm_params"))
        provider, slash, model = str(given.get("model") or "").partition("/")
        if not slash:
            provider, model = "", provider
        public = str(entry.get("model_name") or model)
        url = str(given.get("api_base") or given.get("base_url") or "")
        # A server of llama.cpp is asked as `openai` there, and hosted ones by their own names.
        local = provider in {"", "openai", "llamafile", "lm_studio"}
        kind = "" if local and not url.startswith("https:") else "openai"
        kind = _ON_DEMAND if provider.startswith("ollama") else kind
        models = {} if "*" in public else {public: model or public}
        yield _Server(public, url, kind, models, _variable(str(given.get("api_key") or "")))


def _llama_swap(root: dict[str, Any]) -> Iterator[_Server]:
    start = root.get("startPort")
    port = start if isinstance(start, int) else 5800  # that of its first model
    macros = [*islice(_mapping(root.get("macros")).items(), MOST_ENTRIES)]
    for name, entry in sorted(_entries(root["models"])):
        command = str(entry.get("cmd") or "")
        # A macro may use those before it.
        for macro, text in reversed(macros):
            command = command.replace(f"${{{macro}}}", str(text))[:LONGEST_TEXT]
        own = _PORT.search(command)
        url = str(entry.get("proxy") or f"http://127.0.0.1:{own[1] if own else '${PORT}'}")
        if "${PORT}" in command + url:
            url = url.replace("${PORT}", str(port))
            port += 1
        kind = "" if _LLAMA_CPP.search(command) or not command else "openai"
        yield _Server(name, url, kind, {name: name})


def _compose(root: dict[str, Any]) -> Iterator[_Server]:
    services = {
        name: (one, f"{one.get('image')} {name} {_text(one.get('command'))}".lower())
        for name, one in _entries(root["services"])
    }
    engines = {name: one for name, one in services.items() if _ENGINES.search(one[1])}
    for name, (service, text) in (engines or services).items():
        own = _PORT.search(text)
        url = f"http://{name}:{own[1] if own else '8080'}"
        ports = service.get("ports")
        for mapped in ports[:1] if isinstance(ports, list) else ():
            # `8081:8080`, with or without an address before it.
            outer = mapped.get("published") if isinstance(mapped, dict) else str(mapped)
            parts = str(outer or "").split(":")
            url = f"http://127.0.0.1:{parts[-2] if len(parts) > 1 else parts[0]}"
        kind = "" if "llama" in text else "openai"
        kind = _ON_DEMAND if "ollama" in text or "llama-swap" in text else kind
        yield _Server(name, url, kind)


def _text(command: object) -> str:
    words = command if isinstance(command, list) else [command or ""]
    return " ".join(map(str, words[:MOST_ENTRIES]))


_PROGRAMS: dict[str, tuple[str, frozenset[str], Callable[[dict[str, Any]], Iterable[_Server]]]] = {
    "model_list": ("LiteLLM", frozenset({"litellm_params", "model_name"}), _litellm),
    "models": ("llama-swap", frozenset({"cmd", "proxy"}), _llama_swap),
    "services": ("Docker Compose", frozenset({"image", "build", "ports", "command"}), _compose),
}
"""By the key of their servers: their names, the keys of a server, and what reads them."""


def _lines(found: Iterable[_Server]) -> Iterator[str]:
    """An item of `nodes:` for each server that has an address, one for each address."""
    servers: dict[tuple[str, ...], _Server] = {}
    for one in found:
        if url := _usable(one.url):
            known = servers.setdefault((url, one.kind, one.key), one._replace(url=url, models={}))
            known.models.update(one.models)
    if servers:
        yield "nodes:"
    names: set[str] = set()
    for number, one in enumerate(islice(servers.values(), MOST_NODES), 1):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", one.name).strip("-.")[:40] or "node"
        while name in names:
            name = f"{name}-{number}"
        names.add(name)
        models = islice(one.models.items(), MOST_NODES)
        listed = ", ".join(f"{_plain(public)}: {_plain(own)}" for public, own in models)
        item = f"name: {_plain(name)}, url: {_plain(one.url)}"
        item += f", kind: {one.kind}" * bool(one.kind) + f", model: {{{listed}}}" * bool(listed)
        yield f"  - {{{item}{f', api_key_env: {one.key}' * bool(one.key)}}}"
    if len(servers) > MOST_NODES:
        yield f"  # and {len(servers) - MOST_NODES} more"


def _usable(url: str) -> str:
    """The address as a node has it, or the variable that holds it; empty: it is none."""
    try:
        return str(normalise_node_url(re.sub(r"/v1/?$", "", url.strip())))
    except ValueError:
        variable = _variable(url)
        return f"${{{variable}}}" if variable else ""


def _variable(text: str) -> str:
    """The variable that the whole text names; empty: it names none."""
    named = _VARIABLE.fullmatch(text)
    return (named[1] or named[2]) if named else ""


def _plain(text: str) -> str:
    """A text in a flow mapping of YAML."""
    text = text[:200]
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9._/-]*|https?://[^\s,{}\[\]\"'#]+", text)
    return text if plain and isinstance(parse_scalar(text), str) else json.dumps(text)
