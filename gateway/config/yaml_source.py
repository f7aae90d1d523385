"""YAML read into a tree that knows the line of every key and item, in bounded memory.

Scalars are typed as YAML 1.2 does: `off`, `no` and `1:30` are texts, not a boolean and a number
of seconds. `${VAR}` is put in after parsing, so that a variable can't bring YAML with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
)
from yaml.reader import Reader

from gateway.config.interpolation import InterpolationError, interpolate, is_reference
from gateway.config.problems import ConfigError, Problem
from gateway.config.tree import Entry, Items, Scalar, Table, Tree, Value, items, table, typed
from gateway.config.yaml_advice import advice

# A fleet of ten thousand nodes takes about 2 MiB and 200,000 values.
LARGEST_FILE = 8 << 20
MOST_VALUES = 500_000
DEEPEST = 64

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TAG = "tag:yaml.org,2002:"
_ANCHOR = re.compile(r"[\w-]{1,64}")
# What a tag promises.
_TAGGED: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "null": (type(None),),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A file that has been read. The tree is whole even where problems were found in it."""

    file: Path
    root: Entry
    problems: tuple[Problem, ...]
    blank: bool = False
    """Whether there is nothing in it, not even a comment."""


def read_yaml(path: Path, env: Mapping[str, str]) -> Source:
    """Read a YAML file of one document, with `${VAR}` from `env` put in.

    Raises ConfigError where there is no tree: no such file, not YAML, too large, too deep.
    """
    text = _read(path)
    if bad := Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        column = bad.start() - text.rfind("\n", 0, bad.start())
        raise ConfigError(
            [Problem(path, line, "", "a control character", "remove it", column=column)]
        )
    return _Builder(path, env).build(text)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        message = getattr(error, "strerror", None) or "not a path"
        raise ConfigError(
            [Problem(path, 0, "", f"can't be read: {message}", "check the path and its rights")]
        ) from None
    if len(content) > LARGEST_FILE:
        limit = f"larger than {LARGEST_FILE >> 20} MiB"
        raise ConfigError([Problem(path, 0, "", limit, "is this the right file?")])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            [Problem(path, line, "", "not UTF-8", "save the file as UTF-8")]
        ) from None


def _line(event: Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


@dataclass(slots=True)
class _Open:
    """A collection whose end has not been read."""

    key: str  # path of the collection
    line: int
    anchor: str | None
    items: list[Entry] | None  # None: a mapping
    entries: dict[str, Entry] = field(default_factory=dict)
    merged: list[Entry] = field(default_factory=list)
    next_key: str | None = None
    next_line: int = 0


class _Builder:
    """Builds the tree from the parser's events: no recursion, so no depth can break it."""

    def __init__(self, file: Path, env: Mapping[str, str]) -> None:
        self._file = file
        self._env = env
        self._problems: list[Problem] = []
        self._open: list[_Open] = []
        # None: the anchor's value has not ended yet.
        self._anchors: dict[str, Tree | None] = {}
        self._values = 0
        self._root: Entry | None = None

    def build(self, text: str) -> Source:
        try:
            for event in yaml.parse(text, Loader=_Loader):
                self._take(event)
        except yaml.MarkedYAMLError as error:
            raise self._syntax(error, text) from None
        except yaml.YAMLError as error:
            message = str(error).splitlines()[0]
            raise ConfigError([Problem(self._file, 0, "", f"no valid YAML: {message}")]) from None
        root = self._root or Entry(Scalar(None), 1, "")
        return Source(self._file, root, tuple(self._problems), blank=not text.strip())

    def _take(self, event: Event) -> None:
        match event:
            case DocumentStartEvent() if self._root is not None:
                raise self._stop(event, "a second document", "a file holds one; remove the ---")
            case CollectionStartEvent():
                self._start(event)
            case MappingEndEvent() | SequenceEndEvent():
                self._end(event)
            case AliasEvent():
                self._alias(event)
            case ScalarEvent():
                self._scalar(event)

    def _start(self, event: CollectionStartEvent) -> None:
        mapping = isinstance(event, MappingStartEvent)
        if event.tag not in {None, "!", _TAG + ("map" if mapping else "seq")}:
            self._problem(event, "this tag is not supported", "remove what follows the !")
        if self._open and self._open[-1].items is None and self._open[-1].next_key is None:
            raise self._stop(event, "a key must be a text, not a list or a mapping")
        if len(self._open) >= DEEPEST:
            raise self._stop(event, f"nested deeper than {DEEPEST} levels")
        line, key = self._place(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._open.append(_Open(key, line, event.anchor, None if mapping else []))

    def _end(self, event: Event) -> None:
        ended = self._open.pop()
        tree: Tree = table(self._with_merged(ended)) if ended.items is None else items(ended.items)
        if tree.depth > DEEPEST:
            raise self._stop(event, f"nested deeper than {DEEPEST} levels")
        self._add(event, tree, ended.anchor, (ended.line, ended.key))

    def _with_merged(self, ended: _Open) -> dict[str, Entry]:
        """Put in what `<<` names; the mapping's own keys come first."""
        entries = dict(ended.entries)
        for merged in ended.merged:
            sources = merged.tree.entries if isinstance(merged.tree, Items) else (merged,)
            for source in sources:
                if isinstance(source.tree, Table):
                    for key, entry in source.tree.entries.items():
                        entries.setdefault(key, entry)
                else:
                    self._problems.append(self._no_mapping(merged, source))
        return entries

    def _no_mapping(self, merged: Entry, source: Entry) -> Problem:
        named = source.tree.value if isinstance(source.tree, Scalar) else None
        name = named if isinstance(named, str) and _ANCHOR.fullmatch(named) else "NAME"
        remedy = f"write *{name}"
        if name not in self._anchors:
            remedy += f", and &{name} after the key of the mapping it stands for"
        return Problem(self._file, merged.line, merged.key, "must name mappings", remedy)

    def _alias(self, event: AliasEvent) -> None:
        if event.anchor not in self._anchors:
            raise self._stop(event, f"the alias *{event.anchor} has no anchor before it")
        tree = self._anchors[event.anchor]
        if tree is None:
            raise self._stop(event, f"the alias *{event.anchor} is inside of what it stands for")
        self._values += tree.size
        self._add(event, tree, None)

    def _scalar(self, event: ScalarEvent) -> None:
        top = self._open[-1] if self._open else None
        if top is not None and top.items is None and top.next_key is None:
            self._key(top, event)
            return
        tag, text = event.tag, event.value
        if tag is None and event.implicit[0]:
            tree = self._interpolated(event, typed(text))
        elif tag is None:
            tree = self._interpolated(event, text)
        elif tag in {"!", _TAG + "str"}:
            tree = self._interpolated(event, text)
            tree = tree if tree.text is None else Scalar(tree.text)
        else:
            tree = Scalar(typed(text))
            kind = tag.removeprefix(_TAG)
            if type(tree.value) not in _TAGGED.get(kind, ()):
                self._problem(event, "this tag is not supported here", "remove what follows the !")
        self._add(event, tree, event.anchor)

    def _key(self, top: _Open, event: ScalarEvent) -> None:
        line, name = _line(event), event.value
        top.next_key, top.next_line = name, line
        if event.anchor is not None:
            self._anchors[event.anchor] = Scalar(name)
        first = top.entries.get(name)
        if name == "<<" and top.merged:
            first = top.merged[0]
        if first is not None:
            self._problem(
                event, f"this key stands in line {first.line} already", "keep one of them"
            )

    def _interpolated(self, event: ScalarEvent, value: Value) -> Scalar:
        if not isinstance(value, str) or "$" not in value:
            return Scalar(value)
        try:
            text = interpolate(value, self._env)
        except InterpolationError as error:
            self._problem(event, error.message, error.remedy)
            return Scalar(value)
        if is_reference(value):
            return Scalar(typed(text.strip()), text)
        return Scalar(text)

    def _add(
        self, event: Event, tree: Tree, anchor: str | None, place: tuple[int, str] | None = None
    ) -> None:
        self._values += 1
        if self._values > MOST_VALUES:
            raise self._stop(event, f"more than {MOST_VALUES} values, aliases expanded")
        if anchor is not None:
            self._anchors[anchor] = tree
        entry = Entry(tree, *(place or self._place(event)))
        if not self._open:
            self._root = entry
            return
        top = self._open[-1]
        if top.items is not None:
            top.items.append(entry)
        elif top.next_key is None:
            # An alias in the place of a key.
            raise self._stop(event, "a key must be a text, not an alias")
        elif top.next_key == "<<":
            top.merged.append(entry)
            top.next_key = None
        else:
            # A key that stands twice was told; the first one counts.
            top.entries.setdefault(top.next_key, entry)
            top.next_key = None

    def _place(self, event: Event) -> tuple[int, str]:
        """Line and path of the value that an event begins."""
        line = _line(event)
        if not self._open:
            return line, ""
        top = self._open[-1]
        if top.items is not None:
            return line, f"{top.key}[{len(top.items)}]"
        if top.next_key is None:
            return line, top.key
        return top.next_line, f"{top.key}.{top.next_key}" if top.key else top.next_key

    def _problem(self, event: Event, message: str, remedy: str = "") -> None:
        line, key = self._place(event)
        self._problems.append(Problem(self._file, line, key, message, remedy))

    def _stop(self, event: Event, message: str, remedy: str = "") -> ConfigError:
        column = event.start_mark.column + 1 if event.start_mark else 0
        stop = Problem(self._file, _line(event), "", message, remedy, column=column)
        return ConfigError([*self._problems, stop])

    def _syntax(self, error: yaml.MarkedYAMLError, text: str) -> ConfigError:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        began = error.context_mark.line + 1 if error.context_mark else 0
        message = f"no valid YAML: {error.problem or 'syntax error'}"
        if error.context:
            message += f" {error.context}"
            if began not in {0, line}:
                message += f" that began in line {began}"
        blamed, remedy = advice(error.problem or "", text.splitlines(), line, began)
        if blamed != line:
            line, column = blamed, 0
        return ConfigError(
            [*self._problems, Problem(self._file, line, "", message, remedy, column=column)]
        )
