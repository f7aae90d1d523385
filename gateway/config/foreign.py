"""Configurations of other programs, given by mistake: which one it is, and its servers as nodes.

Each is told by keys that only it has. The lines hold addresses, model names and names of variables;
a key that stands in the file is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from gateway.config.errors import Problem
from gateway.config.fields import normalise_node_url
from gateway.config.yaml_file import YamlDocument, YamlMapping, parse_scalar, read_yaml, to_plain

MOST_NODES = 20
"""Nodes that are written out, and models of each."""

MOST_ENTRIES = 1000
"""Of the file, that are looked at."""

LONGEST_NAME = 40

LONGEST_NAMED = 200
"""Of an address or a model's name."""

LONGEST_TEXT = 10_000
"""Of a text of the file, and of a command with its macros."""

MOST_PARTS = 100
"""Words of a command, macros, and uses of one."""

_VARIABLE = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)|\$\{(?:env\.)?([A-Za-z_]\w*)\}")

_LISTEN = re.compile(r"(?:^|\s)--(host|port)[ =]+([A-Za-z0-9.:_-]+)")

_LLAMA_CPP = re.compile(r"llama[-._]?(cpp|server)|llama\.cpp")

_ENGINES = re.compile(r"llama|vllm|sglang|tgi|text-generation|local-?ai|kobold|litellm")

_LLAMA_SWAP_PORT = 5800
"""The port of its first model, unless `startPort` says another."""

_ON_DEMAND = "openai, models_on_demand: true"
"""The kind of servers that load the models of their list by themselves."""

_LLAMA_SWAP_NOTES = (
    "  # llama-swap starts and stops these. To leave that to it, write it as the one node instead:",
    f"  # - {{name: llama-swap, url: http://127.0.0.1:8080, kind: {_ON_DEMAND}}}",
    "  # To leave it to the gateway, run llama-server --models-dir; ttl, groups and matrix are",
    "  # then models.NAME.idle_unload, pin and replicas in the settings.",
)


@dataclass(frozen=True, slots=True)
class _Found:
    """A server, as far as the file tells it."""

    name: str
    url: str
    models: Mapping[str, str] = field(default_factory=dict)
    """By their public names."""
    kind: str = ""
    key: object = None
    """As the file has it: the name of a variable is kept."""


def foreign_problem(source: YamlDocument, belongs: str) -> Problem | None:
    """The one problem of a file that is another program's; None: it is none that is known.

    `belongs`: what the file should have been, `inventory` or `settings`.
    """
    root = source.root.tree
    for key, program, form, marks, servers in (
        ("model_list", "LiteLLM", list, {"litellm_params", "model_name"}, _litellm),
        ("models", "llama-swap", dict, {"cmd", "proxy"}, _llama_swap),
        ("services", "Docker Compose", dict, {"image", "build", "ports", "command"}, _compose),
    ):
        if not isinstance(root, YamlMapping) or key not in root.entries:
            continue
        # Without variables their names stay, and no value of one is repeated.
        plain = to_plain(read_yaml(source.file, {}).root.tree, LONGEST_TEXT)
        if not isinstance(plain, dict) or not isinstance(value := plain.get(key), form):
            continue
        if not any(marks & one.keys() for _, one in _entries(value)):
            continue
        lines = tuple(_lines(servers(plain)))
        if lines and servers is _llama_swap:
            lines += _LLAMA_SWAP_NOTES
        begin = f"this is a configuration of {program}, not "
        begin += "an inventory" if belongs == "inventory" else "the gateway's settings"
        if not lines:
            remedy = "it names no address of a server: write nodes: [{name: ..., url: ...}]"
        elif belongs == "inventory":
            remedy = "the lines below would stand here; check each address, kind and model"
        else:
            remedy = (
                "its servers belong into the inventory (--nodes FILE), as in the lines below; "
                "the settings need nothing of it"
            )
        return Problem(source.file, root.entries[key].line, key, begin, remedy, lines=lines)
    return None


def _entries(value: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings in a mapping or list, by name."""
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for name, one in islice(pairs, MOST_ENTRIES):
        if isinstance(one, dict):
            yield str(name), one


def _litellm(root: Mapping[str, Any]) -> Iterator[_Found]:
    for _, entry in _entries(root["model_list"]):
        given = entry.get("litellm_params")
        given = given if isinstance(given, dict) else {}
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
        yield _Found(public, url, models, kind, given.get("api_key"))


def _llama_swap(root: Mapping[str, Any]) -> Iterator[_Found]:
    start, given = root.get("startPort"), root.get("macros")
    port = start if isinstance(start, int) else _LLAMA_SWAP_PORT
    macros = list((given if isinstance(given, dict) else {}).items())[:MOST_PARTS]
    for name, entry in sorted(_entries(root["models"])):
        command = str(entry.get("cmd") or "")
        # A macro may use those before it.
        for macro, text in reversed(macros):
            command = command.replace(f"${{{macro}}}", str(text), MOST_PARTS)[:LONGEST_TEXT]
        url = str(entry.get("proxy") or "http://127.0.0.1:${PORT}")
        listen = dict(_LISTEN.findall(command))
        if "${PORT}" in command or ("${PORT}" in url and "port" not in listen):
            url = url.replace("${PORT}", str(port))
            port += 1
        elif not entry.get("proxy"):
            url = _address(listen.get("host", ""), listen["port"])
        kind = "" if _LLAMA_CPP.search(command) or not command else "openai"
        yield _Found(name, url, {name: name}, kind)
    for name, entry in _entries(root.get("peers")):
        models = entry.get("models")
        named = map(str, models if isinstance(models, list) else ())
        url = str(entry.get("proxy") or "")
        yield _Found(name, url, {one: one for one in named}, "openai", entry.get("apiKey"))


def _compose(root: Mapping[str, Any]) -> Iterator[_Found]:
    services = {
        name: (one, f"{one.get('image')} {name} {_text(one.get('command'))}".lower())
        for name, one in _entries(root["services"])
    }
    engines = {name: one for name, one in services.items() if _ENGINES.search(one[1])}
    for name, (service, text) in (engines or services).items():
        listen = dict(_LISTEN.findall(_text(service.get("command"))))
        url = f"http://{name}:{listen.get('port', '8080')}"
        ports = service.get("ports")
        for mapped in ports if isinstance(ports, list) else ():
            if isinstance(mapped, dict):
                host, outer = str(mapped.get("host_ip") or ""), str(mapped.get("published") or "")
            else:
                host, _, rest = str(mapped).partition("/")[0].rpartition(":")
                host, _, outer = host.rpartition(":") if host else ("", "", rest)
            if outer:
                url = _address(host.strip("[]"), outer)
                break
        kind = "" if "llama" in text else "openai"
        kind = _ON_DEMAND if "ollama" in text or "llama-swap" in text else kind
        yield _Found(name, url, kind=kind)


def _address(host: str, port: str) -> str:
    """Where a server is reached that listens so."""
    host = "127.0.0.1" if host in {"", "0.0.0.0", "::"} else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _text(command: object) -> str:
    words = command[:MOST_PARTS] if isinstance(command, list) else [command or ""]
    return " ".join(map(str, words))[:LONGEST_TEXT]


def _lines(found: Iterable[_Found]) -> Iterator[str]:
    """An item of `nodes:` for each server that has an address, one for each address."""
    places: dict[tuple[str, str, str], tuple[str, dict[str, str]]] = {}
    silent = 0
    for one in found:
        if url := _usable(one.url):
            place = (url, one.kind, _variable(one))
            places.setdefault(place, (one.name, {}))[1].update(one.models)
        else:
            silent += 1
    if places:
        yield "nodes:"
    names: set[str] = set()
    for number, (place, (called, models)) in enumerate(islice(places.items(), MOST_NODES)):
        url, kind, variable = place
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", called).strip("-.")[:LONGEST_NAME]
        name = name or urlsplit(url).hostname or "node"
        while name in names:
            name = f"{name}-{number + 1}"
        names.add(name)
        shown = [(_plain(one), _plain(own)) for one, own in islice(models.items(), MOST_NODES)]
        if all(one == own for one, own in shown):
            listed = f"[{', '.join(one for one, _ in shown)}]"
        else:
            listed = f"{{{', '.join(f'{one}: {own}' for one, own in shown)}}}"
        item = f"name: {_plain(name)}, url: {_plain(url)}"
        item += f", kind: {kind}" * bool(kind) + f", model: {listed}" * bool(shown)
        item += f", api_key_env: {variable}" * bool(variable)
        more = len(models) - len(shown)
        yield f"  - {{{item}}}" + f"  # and {more} more models" * bool(more)
    if len(places) > MOST_NODES:
        yield f"  # and {len(places) - MOST_NODES} more"
    if places and silent:
        yield f"  # {silent} more of its entries name no usable address"


def _usable(url: str) -> str:
    """The address as a node has it, or the variable that holds it; empty: it is none."""
    try:
        return str(normalise_node_url(re.sub(r"/v1/?$", "", url.strip())))[:LONGEST_NAMED]
    except ValueError:
        named = _VARIABLE.fullmatch(url)
        return f"${{{named[1] or named[2]}}}" if named else ""


def _variable(found: _Found) -> str:
    """The variable that holds the key; a key itself is not repeated."""
    if found.key in (None, "", "none", "None", "EMPTY", "sk-no-key-required", "not-needed"):
        return ""
    if named := _VARIABLE.fullmatch(str(found.key)):
        return named[1] or named[2]
    name = re.sub(r"[^A-Za-z0-9]+", "_", found.name).strip("_").upper()[:LONGEST_NAME]
    return f"{name}_API_KEY" if name[:1].isalpha() else f"NODE_{name}_API_KEY".replace("__", "_")


def _plain(text: str) -> str:
    """A text in a flow mapping of YAML."""
    text = text[:LONGEST_NAMED]
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9._/-]*|https?://[^\s,{}\[\]\"'#]+", text)
    return text if plain and isinstance(parse_scalar(text), str) else json.dumps(text)
