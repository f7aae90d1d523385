"""Configurations of other programs, given by mistake: which one it is, and its servers as nodes.

Each is told by keys that only it has. The lines hold addresses, model names and names of variables;
a key that stands in the file is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gateway.config.errors import Problem
from gateway.config.node import normalise_node_url
from gateway.config.yaml_file import YamlDocument, YamlMapping, parse_scalar, read_yaml, to_plain

MOST_NODES = 20
"""Nodes that are written out."""

LONGEST_NAME = 40

LONGEST_COMMAND = 10_000

_VARIABLE = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)|\$\{(?:env\.)?([A-Za-z_]\w*)\}")

_LISTEN = re.compile(r"(?:^|\s)--(host|port)[ =]+([A-Za-z0-9.:_-]+)")

_LLAMA_CPP = re.compile(r"llama[-._]?(cpp|server)|llama\.cpp")

_ENGINES = re.compile(r"llama|vllm|sglang|tgi|text-generation|local-?ai|kobold|litellm")


class _Unset(str):
    """The reference to a variable as the file has it. It is false, so that its default is taken."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


class _References(dict[str, str]):
    """Gives each variable its own reference: no value of one is repeated."""

    def get(self, name: str, default: Any = None) -> Any:
        """The reference."""
        return _Unset(f"${{{name}}}")


_LLAMA_SWAP_PORT = 5800
"""The port of its first model, unless `startPort` says another."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A server, as far as the file tells it."""

    name: str
    url: str
    models: tuple[str, ...] | Mapping[str, str] = ()
    kind: str = ""
    key: object = None
    """As the file has it: the name of a variable is kept."""


def foreign_problem(source: YamlDocument, belongs: str) -> Problem | None:
    """The one problem of a file that is another program's; None: it is none that is known.

    `belongs`: what the file should have been, `inventory` or `settings`.
    """
    root = source.root.tree
    if not isinstance(root, YamlMapping):
        return None
    for key, program, servers in (
        ("model_list", "LiteLLM", _litellm),
        ("models", "llama-swap", _llama_swap),
        ("services", "Docker Compose", _compose),
    ):
        if key not in root.entries or not _is_of(program, to_plain(root.entries[key].tree)):
            continue
        plain = to_plain(read_yaml(source.file, _References()).root.tree)
        found = list(servers(plain)) if isinstance(plain, dict) else []
        nodes = list(_lines(found))
        begin = f"this is a configuration of {program}, not "
        begin += "an inventory" if belongs == "inventory" else "the gateway's settings"
        if not nodes:
            remedy = "it names no address of a server: write nodes: [{name: ..., url: ...}]"
        elif belongs == "inventory":
            remedy = "the lines below would stand here; check each address, kind and model"
        else:
            remedy = (
                "its servers belong into the inventory (--nodes FILE), as in the lines below; "
                "the settings need nothing of it"
            )
        lines = ("nodes:", *nodes) if nodes else ()
        if nodes and (silent := sum(not one.url for one in found)):
            lines = (*lines, f"  # {silent} more of its entries name no address")
        return Problem(source.file, root.entries[key].line, key, begin, remedy, lines=lines)
    return None


def _is_of(program: str, value: object) -> bool:
    if program == "LiteLLM":
        return isinstance(value, list) and any(
            isinstance(one, dict) and {"litellm_params", "model_name"} & one.keys() for one in value
        )
    if not isinstance(value, dict):
        return False
    marks = {"cmd", "proxy"} if program == "llama-swap" else {"image", "build", "ports", "command"}
    return any(isinstance(one, dict) and marks & one.keys() for one in value.values())


def _litellm(root: Mapping[str, Any]) -> Iterator[_Found]:
    for entry in _mappings(root["model_list"]):
        given = entry.get("litellm_params")
        given = given if isinstance(given, dict) else {}
        provider, _, model = str(given.get("model") or "").rpartition("/")
        public = str(entry.get("model_name") or model)
        models = {public: model} if model and public != model else (public,)
        # A server of llama.cpp is asked as `openai` there, and hosted ones by their own names.
        url = given.get("api_base") or given.get("base_url")
        local = provider.split("/")[0] in {"", "openai", "llamafile", "lm_studio"}
        kind = "" if local and not str(url).startswith("https:") else "openai"
        yield _Found(public, str(url or ""), models, kind, given.get("api_key"))


def _llama_swap(root: Mapping[str, Any]) -> Iterator[_Found]:
    start, macros = root.get("startPort"), root.get("macros")
    port = start if isinstance(start, int) else _LLAMA_SWAP_PORT
    for name, entry in sorted(root["models"].items()):
        if not isinstance(entry, dict):
            continue
        command = str(entry.get("cmd") or "")
        for macro, text in (macros if isinstance(macros, dict) else {}).items():
            command = command.replace(f"${{{macro}}}", str(text))[:LONGEST_COMMAND]
        url = str(entry.get("proxy") or "http://127.0.0.1:${PORT}")
        listen = dict(_LISTEN.findall(command))
        if "${PORT}" in command or ("${PORT}" in url and "port" not in listen):
            url = url.replace("${PORT}", str(port))
            port += 1
        elif not entry.get("proxy"):
            url = _address(listen.get("host", ""), listen["port"])
        kind = "" if _LLAMA_CPP.search(command) or not command else "openai"
        yield _Found(str(name), url, (str(name),), kind)
    peers = root.get("peers")
    for name, entry in (peers if isinstance(peers, dict) else {}).items():
        if isinstance(entry, dict):
            models = entry.get("models")
            named = tuple(map(str, models)) if isinstance(models, list) else ()
            key = entry.get("apiKey")
            yield _Found(str(name), str(entry.get("proxy") or ""), named, "openai", key)


def _compose(root: Mapping[str, Any]) -> Iterator[_Found]:
    services = {
        str(name): (one, f"{one.get('image')} {name} {_text(one.get('command'))}".lower())
        for name, one in root["services"].items()
        if isinstance(one, dict)
    }
    engines = {name: one for name, one in services.items() if _ENGINES.search(one[1])}
    for name, (service, text) in (engines or services).items():
        listen = dict(_LISTEN.findall(_text(service.get("command"))))
        port = listen.get("port", "8080")
        url = f"http://{name}:{port}"
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
        yield _Found(name, url, (), "" if "llama" in text and "ollama" not in text else "openai")


def _address(host: str, port: str) -> str:
    """Where a server is reached that listens so."""
    host = "127.0.0.1" if host in {"", "0.0.0.0", "::"} else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _mappings(value: object) -> Iterator[dict[str, Any]]:
    for one in value if isinstance(value, list) else ():
        if isinstance(one, dict):
            yield one


def _text(command: object) -> str:
    if isinstance(command, list):
        return " ".join(map(str, command))
    return str(command or "")


def _lines(found: Iterable[_Found]) -> Iterator[str]:
    """An item of `nodes:` for each server that has an address, one for each address."""
    names: set[str] = set()
    by_place: dict[tuple[str, str, str], dict[str, str]] = {}
    first: dict[tuple[str, str, str], _Found] = {}
    for one in found:
        try:
            url = normalise_node_url(re.sub(r"/v1/?$", "", one.url.strip()))
        except ValueError:
            if not (named := _VARIABLE.fullmatch(one.url)):
                continue
            url = f"${{{named[1] or named[2]}}}"
        place = (str(url), one.kind, _variable(one))
        first.setdefault(place, one)
        models = one.models if isinstance(one.models, Mapping) else {m: m for m in one.models}
        by_place.setdefault(place, {}).update(models)
    for number, (place, models) in enumerate(by_place.items()):
        if number == MOST_NODES:
            yield f"  # and {len(by_place) - MOST_NODES} more"
            return
        url, kind, variable = place
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", first[place].name).strip("-.")[:LONGEST_NAME]
        name = name or urlsplit(url).hostname or "node"
        while name in names:
            name = f"{name}-{number + 1}"
        names.add(name)
        parts = [f"name: {_plain(name)}", f"url: {_plain(url)}"]
        if kind:
            parts.append(f"kind: {kind}")
        if models:
            same = all(public == own for public, own in models.items())
            listed = [_plain(public) for public in models]
            pairs = [f"{_plain(public)}: {_plain(own)}" for public, own in models.items()]
            parts.append(
                f"model: [{', '.join(listed)}]" if same else f"model: {{{', '.join(pairs)}}}"
            )
        if variable:
            parts.append(f"api_key_env: {variable}")
        yield f"  - {{{', '.join(parts)}}}"


def _variable(found: _Found) -> str:
    """The variable that holds the key; a key itself is not repeated."""
    if found.key in (None, "", "none", "None", "EMPTY", "sk-no-key-required", "not-needed"):
        return ""
    named = _VARIABLE.fullmatch(str(found.key))
    if named:
        return named[1] or named[2]
    return re.sub(r"\W+", "_", found.name).strip("_").upper()[:LONGEST_NAME] + "_API_KEY"


def _plain(text: str) -> str:
    """A text in a flow mapping of YAML."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9._/-]*|https?://[^\s,{}\[\]\"'#]+", text)
    return text if plain and isinstance(parse_scalar(text), str) else json.dumps(text[:200])
