"""What a YAML file holds, with the line of every key and item."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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

from gateway.config.errors import ConfigError, Problem

# A longer run of digits is a checksum or an id, not a number.
_LONGEST_NUMBER = 40

_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,4})?")

_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

_WORDS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}

ScalarValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class YamlScalar:
    """A single value. `text` is what a variable held where its value was typed."""

    value: ScalarValue
    raw_text: str | None = None
    value_count: int = 1
    depth: int = 1


def mapping_of(entries: Mapping[str, YamlEntry]) -> YamlMapping:
    """Build a mapping from entries that may come from several places."""
    return YamlMapping(entries, *_measure(entry.tree for entry in entries.values()))


def list_of(entries: Iterable[YamlEntry]) -> YamlList:
    """Build a list."""
    kept = tuple(entries)
    return YamlList(kept, *_measure(entry.tree for entry in kept))


def to_plain(tree: YamlTree) -> object:
    """Turn a tree into plain values."""
    match tree:
        case YamlScalar(value=value):
            return value
        case YamlList(entries=entries):
            return [to_plain(item.tree) for item in entries]
        case YamlMapping(entries=entries):
            return {key: to_plain(entry.tree) for key, entry in entries.items()}


def parse_scalar(text: str) -> ScalarValue:
    """Type a plain scalar as the core schema of YAML 1.2 does."""
    if len(text) > _LONGEST_NUMBER:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in {"0x", "0o"} else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _measure(trees: Iterable[YamlTree]) -> tuple[int, int]:
    size, depth = 1, 0
    for tree in trees:
        size += tree.value_count
        depth = max(depth, tree.depth)
    return size, depth + 1


# `$$`, a whole reference, or the beginning of one that is not closed.
_DOLLAR = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<inner>[^{}]*)(?P<close>\}?))")

_INNER = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)


class InterpolationError(ValueError):
    """A reference that can't be replaced. It never shows the value of a variable."""

    def __init__(self, message: str, remedy: str) -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message} ({remedy})")


def is_variable_reference(text: str) -> bool:
    """Tell whether a text is wholly one `${...}`."""
    found = _DOLLAR.fullmatch(text)
    return found is not None and found["inner"] is not None


def interpolate(text: str, env: Mapping[str, str]) -> str:
    """Replace each reference once; what a variable holds is not looked at again.

    `:-` gives the value for a variable that is missing or empty. Raises InterpolationError for
    a missing variable without a default, and for a reference that isn't well formed.
    """

    def replaced(found: re.Match[str]) -> str:
        if found["escaped"]:
            return "$"
        reference = _INNER.fullmatch(found["inner"]) if found["close"] else None
        if reference is None:
            raise InterpolationError(
                "a reference that isn't well formed",
                "${NAME} or ${NAME:-default}, not nested; $$ is a dollar sign",
            )
        name, default = reference["name"], reference["default"]
        value = env.get(name)
        if default is not None:
            return value or default
        if value is None:
            raise InterpolationError(
                f"the variable {name} is not set", f"set it, or write ${{{name}:-default}}"
            )
        return value

    return _DOLLAR.sub(replaced, text)


# A fleet of ten thousand nodes takes about 2 MiB and 200,000 values.
MOST_FILE_BYTES = 8 << 20

MOST_VALUES = 500_000

MOST_NESTING = 64

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


def read_yaml(path: Path, env: Mapping[str, str]) -> YamlDocument:
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
            content = file.read(MOST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        message = getattr(error, "strerror", None) or "not a path"
        raise ConfigError(
            [Problem(path, 0, "", f"can't be read: {message}", "check the path and its rights")]
        ) from None
    if len(content) > MOST_FILE_BYTES:
        limit = f"larger than {MOST_FILE_BYTES >> 20} MiB"
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


class _Builder:
    """Builds the tree from the parser's events: no recursion, so no depth can break it."""

    def __init__(self, file: Path, env: Mapping[str, str]) -> None:
        self._file = file
        self._env = env
        self._problems: list[Problem] = []
        self._open: list[_Open] = []
        # None: the anchor's value has not ended yet.
        self._anchors: dict[str, YamlTree | None] = {}
        self._values = 0
        self._root: YamlEntry | None = None

    def build(self, text: str) -> YamlDocument:
        try:
            for event in yaml.parse(text, Loader=_Loader):
                self._take(event)
        except yaml.MarkedYAMLError as error:
            raise self._syntax(error, text) from None
        except yaml.YAMLError as error:
            message = str(error).splitlines()[0]
            raise ConfigError([Problem(self._file, 0, "", f"no valid YAML: {message}")]) from None
        root = self._root or YamlEntry(YamlScalar(None), 1, "")
        return YamlDocument(self._file, root, tuple(self._problems), blank=not text.strip())

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
        if len(self._open) >= MOST_NESTING:
            raise self._stop(event, f"nested deeper than {MOST_NESTING} levels")
        line, key = self._place(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._open.append(_Open(key, line, event.anchor, None if mapping else []))

    def _end(self, event: Event) -> None:
        ended = self._open.pop()
        tree: YamlTree = (
            mapping_of(self._with_merged(ended)) if ended.items is None else list_of(ended.items)
        )
        if tree.depth > MOST_NESTING:
            raise self._stop(event, f"nested deeper than {MOST_NESTING} levels")
        self._add(event, tree, ended.anchor, (ended.line, ended.key))

    def _with_merged(self, ended: _Open) -> dict[str, YamlEntry]:
        """Put in what `<<` names; the mapping's own keys come first."""
        entries = dict(ended.entries)
        for merged in ended.merged:
            sources = merged.tree.entries if isinstance(merged.tree, YamlList) else (merged,)
            for source in sources:
                if isinstance(source.tree, YamlMapping):
                    for key, entry in source.tree.entries.items():
                        entries.setdefault(key, entry)
                else:
                    self._problems.append(self._no_mapping(merged, source))
        return entries

    def _no_mapping(self, merged: YamlEntry, source: YamlEntry) -> Problem:
        named = source.tree.value if isinstance(source.tree, YamlScalar) else None
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
        self._values += tree.value_count
        self._add(event, tree, None)

    def _scalar(self, event: ScalarEvent) -> None:
        top = self._open[-1] if self._open else None
        if top is not None and top.items is None and top.next_key is None:
            self._key(top, event)
            return
        tag, text = event.tag, event.value
        if tag is None and event.implicit[0]:
            tree = self._interpolated(event, parse_scalar(text))
        elif tag is None:
            tree = self._interpolated(event, text)
        elif tag in {"!", _TAG + "str"}:
            tree = self._interpolated(event, text)
            tree = tree if tree.raw_text is None else YamlScalar(tree.raw_text)
        else:
            tree = YamlScalar(parse_scalar(text))
            kind = tag.removeprefix(_TAG)
            if type(tree.value) not in _TAGGED.get(kind, ()):
                self._problem(event, "this tag is not supported here", "remove what follows the !")
        self._add(event, tree, event.anchor)

    def _key(self, top: _Open, event: ScalarEvent) -> None:
        line, name = _line(event), event.value
        top.next_key, top.next_line = name, line
        if event.anchor is not None:
            self._anchors[event.anchor] = YamlScalar(name)
        first = top.entries.get(name)
        if name == "<<" and top.merged:
            first = top.merged[0]
        if first is not None:
            self._problem(
                event, f"this key stands in line {first.line} already", "keep one of them"
            )

    def _interpolated(self, event: ScalarEvent, value: ScalarValue) -> YamlScalar:
        if not isinstance(value, str) or "$" not in value:
            return YamlScalar(value)
        try:
            text = interpolate(value, self._env)
        except InterpolationError as error:
            self._problem(event, error.message, error.remedy)
            return YamlScalar(value)
        if is_variable_reference(value):
            return YamlScalar(parse_scalar(text.strip()), text)
        return YamlScalar(text)

    def _add(
        self, event: Event, tree: YamlTree, anchor: str | None, place: tuple[int, str] | None = None
    ) -> None:
        self._values += 1
        if self._values > MOST_VALUES:
            raise self._stop(event, f"more than {MOST_VALUES} values, aliases expanded")
        if anchor is not None:
            self._anchors[anchor] = tree
        entry = YamlEntry(tree, *(place or self._place(event)))
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
        blamed, remedy = syntax_hint(error.problem or "", text.splitlines(), line, began)
        if blamed != line:
            line, column = blamed, 0
        return ConfigError(
            [*self._problems, Problem(self._file, line, "", message, remedy, column=column)]
        )


_KEY = re.compile(r"^(?P<indent> *(?:- +)*)(?P<key>[A-Za-z_][\w.-]*) *:(?: |$)")

_NO_SPACE = re.compile(r"^ *(?:- +)*(?P<key>[A-Za-z_][\w.-]*):\S")

# The words of libyaml and of the parser in Python.
_STRUCTURE = ("expected '-' indicator", "expected key", "expected <block end>", "mapping values")

QUOTE_HINT = "quote a value that holds ': ', ' #', '{' or '['"


def syntax_hint(problem: str, lines: Sequence[str], line: int, start_line: int) -> tuple[int, str]:
    """The line to blame, counted from 1, and what to do there.

    `problem`: the parser's words; `line`: where it stopped; `began`: where what it was reading
    began; 0: it does not say.
    """
    here = _at(lines, line)
    if "\t" in here[: len(here) - len(here.lstrip())]:
        return line, "indent with spaces, not with tabs"
    if "expected ':'" in problem and (found := _NO_SPACE.match(_at(lines, start_line))):
        return start_line, f"put a space after {found['key']}:"
    key = _KEY.match(here)
    plain = key is not None and "-" not in key["indent"] and ": " not in here[key.end() :]
    if key and plain and any(words in problem for words in _STRUCTURE):
        above = _key_above(lines, line)
        if above is not None and above[1] != len(key["indent"]):
            name, column = above
            return (
                line,
                f"indent {key['key']} by {column} spaces, as {name} above it; or {QUOTE_HINT}",
            )
    return line, QUOTE_HINT


def _at(lines: Sequence[str], line: int) -> str:
    return lines[line - 1] if 0 < line <= len(lines) else ""


def _key_above(lines: Sequence[str], line: int) -> tuple[str, int] | None:
    """The nearest key above a line, with the columns before it; None: it may hold this line."""
    for text in reversed(lines[: line - 1]):
        if (found := _KEY.match(text)) and text[found.end() :].strip():
            return found["key"], len(found["indent"])
        if text.strip() and not text.lstrip().startswith("#"):
            return None
    return None


@dataclass(frozen=True, slots=True)
class YamlList:
    """A list."""

    entries: tuple[YamlEntry, ...]
    value_count: int
    depth: int


@dataclass(frozen=True, slots=True)
class YamlMapping:
    """A mapping; its keys are texts, whatever they look like."""

    entries: Mapping[str, YamlEntry]
    value_count: int
    depth: int


YamlTree = YamlScalar | YamlList | YamlMapping


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """A value in its place: the line of its key or item, and its path, `nodes[2].timeouts`."""

    tree: YamlTree
    line: int
    key: str


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A file that has been read. The tree is whole even where problems were found in it."""

    file: Path
    root: YamlEntry
    problems: tuple[Problem, ...]
    blank: bool = False
    """Whether there is nothing in it, not even a comment."""


@dataclass(slots=True)
class _Open:
    """A collection whose end has not been read."""

    key: str  # path of the collection
    line: int
    anchor: str | None
    items: list[YamlEntry] | None  # None: a mapping
    entries: dict[str, YamlEntry] = field(default_factory=dict)
    merged: list[YamlEntry] = field(default_factory=list)
    next_key: str | None = None
    next_line: int = 0
