"""Reads a YAML file into a tree whose keys and items know their line and path.

The tree is built from the parser's events, with bounds on size and depth. `yaml.compose` has the
lines as well, but no bounds: 100,000 times `[` end the process (the C stack overflows), and 8 MiB
of `a,` take 1.2 GiB and 25 s (PyYAML 6.0 with libyaml).
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)
from yaml.reader import Reader

from gateway.config.errors import ConfigError, Problem
from gateway.config.fields import ConfigModel, description_of

# A fleet of ten thousand nodes takes about 2 MiB and 200,000 values.
MOST_FILE_BYTES = 8 << 20

MOST_VALUES = 500_000

MOST_NESTING = 64

ScalarValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class YamlScalar:
    """A single value. `raw_text`: the text of a variable whose value became `value`."""

    value: ScalarValue
    raw_text: str | None = None


@dataclass(frozen=True, slots=True)
class YamlList:
    """A list."""

    entries: tuple[YamlEntry, ...]


@dataclass(frozen=True, slots=True)
class YamlMapping:
    """A mapping; its keys are texts, whatever they look like."""

    entries: Mapping[str, YamlEntry]


YamlTree = YamlScalar | YamlList | YamlMapping


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """A value in its place: the line of its key or item, and its path, `nodes[2].timeouts`."""

    tree: YamlTree
    line: int
    key: str


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """The content of a file, and the problems found in it. The tree is whole in spite of them."""

    file: Path
    root: YamlEntry
    problems: tuple[Problem, ...]
    blank: bool = False
    """Whether the file is empty, without even a comment."""


def measure(tree: YamlTree) -> tuple[int, int]:
    """How many values are in a tree, itself included, and how deep they are nested."""
    if isinstance(tree, YamlScalar):
        return 1, 1
    entries = tree.entries if isinstance(tree, YamlList) else tree.entries.values()
    counts, depths = zip((1, 0), *(measure(one.tree) for one in entries), strict=True)
    return sum(counts), 1 + max(depths)


def to_plain(tree: YamlTree, longest: int | None = None) -> object:
    """Turn a tree into plain values; texts and keys are cut to `longest`."""
    match tree:
        case YamlScalar(value=value):
            return value[:longest] if isinstance(value, str) else value
        case YamlList(entries=entries):
            return [to_plain(item.tree, longest) for item in entries]
        case YamlMapping(entries=entries):
            return {key[:longest]: to_plain(one.tree, longest) for key, one in entries.items()}


def read_yaml(path: Path, env: Mapping[str, str], text: str | None = None) -> YamlDocument:
    """Read a YAML file of one document and replace each `${VAR}` by its value in `env`.

    `text`: what to read in place of the file's own. Raises ConfigError where there is no tree: no
    such file, not YAML, too large, too deep.
    """
    text = read_text(path) if text is None else text
    if bad := Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        column = bad.start() - text.rfind("\n", 0, bad.start())
        raise ConfigError(
            [Problem(path, line, "", "a control character", "remove it", column=column)]
        )
    return _TreeBuilder(path, env, text).build()


def read_text(path: Path, most: int = MOST_FILE_BYTES) -> str:
    """Read a file of text in UTF-8, of at most so many bytes. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:
        message = getattr(error, "strerror", None) or "not a path"
        raise ConfigError(
            [Problem(path, 0, "", f"can't be read: {message}", "check the path and its rights")]
        ) from None
    if len(content) > most:
        message = f"larger than {most >> 20} MiB"
        raise ConfigError([Problem(path, 0, "", message, "is this the right file?")])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            [Problem(path, line, "", "not UTF-8", "save the file as UTF-8")]
        ) from None


_TOO_DEEP = f"nested deeper than {MOST_NESTING} levels"

_TEXT_TAG, _NO_TAG = "tag:yaml.org,2002:str", "a tag but !!str is not supported"

_ANCHOR = re.compile(r"[\w-]{1,64}")


class _TreeBuilder:
    """Builds the tree of one file. It recurses at most MOST_NESTING levels deep."""

    def __init__(self, file: Path, env: Mapping[str, str], text: str) -> None:
        self._file = file
        self._env = env
        self._text = text
        self._events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self._problems: list[Problem] = []
        # None: the anchor's value has not ended yet.
        self._anchors: dict[str, YamlTree | None] = {}
        self._values = 0  # aliases expanded
        self._nesting = 0

    def build(self) -> YamlDocument:
        root: YamlEntry | None = None
        try:
            for event in self._events:
                match event:
                    case DocumentStartEvent() if root is not None:
                        remedy = "a file holds one; remove the ---"
                        raise self._fatal(event, "a second document", remedy)
                    case NodeEvent():
                        root = self._entry(event, _line(event), "")
        except yaml.MarkedYAMLError as error:
            problem = _syntax_problem(error, self._file, self._text)
            raise ConfigError([*self._problems, problem]) from None
        except yaml.YAMLError as error:
            message = f"no valid YAML: {str(error).splitlines()[0]}"
            raise ConfigError([Problem(self._file, 0, "", message)]) from None
        root = root or YamlEntry(YamlScalar(None), 1, "")
        blank = not self._text.strip()
        return YamlDocument(self._file, root, tuple(self._problems), blank)

    def _entry(self, event: NodeEvent, line: int, path: str) -> YamlEntry:
        """Read the value that an event begins."""
        if self._nesting == MOST_NESTING:
            raise self._fatal(event, _TOO_DEEP)
        tree: YamlTree
        match event:
            case AliasEvent():
                tree = self._alias(event)
            case CollectionStartEvent():
                tree = self._collection(event, line, path)
            case ScalarEvent():
                tree = self._scalar(event, line, path)
        self._values += 1
        if self._values > MOST_VALUES:
            raise self._fatal(event, f"more than {MOST_VALUES} values, aliases expanded")
        if event.anchor is not None:
            self._anchors[event.anchor] = tree
        return YamlEntry(tree, line, path)

    def _alias(self, event: AliasEvent) -> YamlTree:
        name = event.anchor
        if name not in self._anchors:
            raise self._fatal(event, f"the alias *{name} has no anchor before it")
        tree = self._anchors[name]
        if tree is None:
            raise self._fatal(event, f"the alias *{name} is inside of what it stands for")
        count, depth = measure(tree)
        self._values += count
        if self._nesting + depth > MOST_NESTING:
            raise self._fatal(event, _TOO_DEEP)
        return tree

    def _collection(self, event: CollectionStartEvent, line: int, path: str) -> YamlTree:
        if event.tag is not None:
            self._problem(line, path, _NO_TAG, "remove it")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._nesting += 1
        is_mapping = isinstance(event, MappingStartEvent)
        tree = self._mapping(path) if is_mapping else self._list(path)
        self._nesting -= 1
        return tree

    def _list(self, path: str) -> YamlList:
        items: list[YamlEntry] = []
        while isinstance(event := next(self._events), NodeEvent):
            items.append(self._entry(event, _line(event), f"{path}[{len(items)}]"))
        return YamlList(tuple(items))

    def _mapping(self, path: str) -> YamlMapping:
        entries: dict[str, YamlEntry] = {}
        while isinstance(event := next(self._events), NodeEvent):
            if not isinstance(event, ScalarEvent):
                found = "an alias" if isinstance(event, AliasEvent) else "a list or a mapping"
                raise self._fatal(event, f"a key must be a text, not {found}")
            key, line = event.value, _line(event)
            place = f"{path}.{key}" if path else key
            if event.anchor is not None:
                self._anchors[event.anchor] = YamlScalar(key)
            if first := entries.get(key):
                message = f"this key stands in line {first.line} already"
                self._problem(line, place, message, "keep one of them")
            entry = self._entry(cast("NodeEvent", next(self._events)), line, place)
            entries.setdefault(key, entry)
        if merge := entries.pop("<<", None):
            self._merge(merge, entries)
        return YamlMapping(entries)

    def _merge(self, merge: YamlEntry, entries: dict[str, YamlEntry]) -> None:
        """Add the entries of the mappings that `<<` names; a mapping's own keys come first."""
        for source in merge.tree.entries if isinstance(merge.tree, YamlList) else (merge,):
            if isinstance(source.tree, YamlMapping):
                for key, entry in source.tree.entries.items():
                    entries.setdefault(key, entry)
                continue
            named = source.tree.value if isinstance(source.tree, YamlScalar) else None
            name = named if isinstance(named, str) and _ANCHOR.fullmatch(named) else "NAME"
            remedy = f"write *{name}"
            if name not in self._anchors:
                remedy += f", and &{name} after the key of the mapping it stands for"
            self._problem(merge.line, merge.key, "must name mappings", remedy)

    def _scalar(self, event: ScalarEvent, line: int, path: str) -> YamlScalar:
        if event.tag not in {None, _TEXT_TAG}:
            self._problem(line, path, _NO_TAG, "remove it; quotes make a text of a value")
        value = parse_scalar(event.value) if event.implicit[0] else event.value
        if not isinstance(value, str) or "$" not in value:
            return YamlScalar(value)
        try:
            text = interpolate(value, self._env)
        except InterpolationError as error:
            self._problem(line, path, error.message, error.remedy)
            return YamlScalar(value)
        reference = _DOLLAR.fullmatch(value)
        if reference is None or reference["inner"] is None or event.tag == _TEXT_TAG:
            return YamlScalar(text)
        return YamlScalar(parse_scalar(text.strip()), text)

    def _problem(self, line: int, path: str, message: str, remedy: str) -> None:
        self._problems.append(Problem(self._file, line, path, message, remedy))

    def _fatal(self, event: Event, message: str, remedy: str = "") -> ConfigError:
        column = event.start_mark.column + 1 if event.start_mark else 0
        problem = Problem(self._file, _line(event), "", message, remedy, column=column)
        return ConfigError([*self._problems, problem])


def _line(event: Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


_WORDS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}

# A longer run of digits is a checksum or an id, not a number.
_LONGEST_NUMBER = 40

_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,4})?")

_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


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


# `$$`, a whole reference, or the beginning of one that is not closed.
_DOLLAR = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<inner>[^{}]*)(?P<close>\}?))")

_INNER = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)


class InterpolationError(ValueError):
    """A reference that can't be replaced. Its text never holds the value of a variable."""

    def __init__(self, message: str, remedy: str) -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message} ({remedy})")


def interpolate(text: str, env: Mapping[str, str]) -> str:
    """Replace each `${VAR}` once; references inside of a variable's value stay as they are.

    `${VAR:-default}` takes the default where the variable is missing or empty. Raises
    InterpolationError for a missing variable without a default, and for a malformed reference.
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


_KEY = re.compile(r"^(?P<indent> *(?:- +)*)(?P<key>[A-Za-z_][\w.-]*) *:(?: |$)")

_NO_SPACE = re.compile(r"^ *(?:- +)*(?P<key>[A-Za-z_][\w.-]*):\S")

# Parts of the messages of libyaml and of the parser in Python.
_STRUCTURE = ("expected '-' indicator", "expected key", "expected <block end>", "mapping values")

_QUOTE = "quote a value that holds ': ', ' #', '{' or '['"


def _syntax_problem(error: yaml.MarkedYAMLError, file: Path, text: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    began = error.context_mark.line + 1 if error.context_mark else 0
    message = f"no valid YAML: {error.problem or 'syntax error'}"
    if error.context:
        message += f" {error.context}"
        if began not in {0, line}:
            message += f" that began in line {began}"
    blamed, remedy = _syntax_remedy(error.problem or "", text.splitlines(), line, began)
    if blamed != line:
        line, column = blamed, 0
    return Problem(file, line, "", message, remedy, column=column)


def _syntax_remedy(problem: str, lines: Sequence[str], line: int, began: int) -> tuple[int, str]:
    """Find the line to blame, counted from 1, and the remedy.

    `problem`: the parser's message; `line`: where it stopped; `began`: where the construct that
    it was reading began, 0 for unknown.
    """
    here = _at(lines, line)
    if "\t" in here[: len(here) - len(here.lstrip())]:
        return line, "indent with spaces, not with tabs"
    if "expected ':'" in problem and (found := _NO_SPACE.match(_at(lines, began))):
        return began, f"put a space after {found['key']}:"
    key = _KEY.match(here)
    plain = key is not None and "-" not in key["indent"] and ": " not in here[key.end() :]
    if key and plain and any(words in problem for words in _STRUCTURE):
        above = _key_above(lines, line)
        if above is not None and above[1] != len(key["indent"]):
            name, column = above
            return line, f"indent {key['key']} by {column} spaces, as {name} above it; or {_QUOTE}"
    return line, _QUOTE


def _at(lines: Sequence[str], line: int) -> str:
    return lines[line - 1] if 0 < line <= len(lines) else ""


def _key_above(lines: Sequence[str], line: int) -> tuple[str, int] | None:
    """Find the nearest key above a line, and the columns before it.

    None: the line above is no key with a value, so it may hold this line.
    """
    for text in reversed(lines[: line - 1]):
        if (found := _KEY.match(text)) and text[found.end() :].strip():
            return found["key"], len(found["indent"])
        if text.strip() and not text.lstrip().startswith("#"):
            return None
    return None


ModelT = TypeVar("ModelT", bound=ConfigModel)

# Problems of one mapping that are reported.
MOST_PROBLEMS = 200

_BOUNDS = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})

_MESSAGES = {
    "missing": "is missing",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    "int_parsing_size": "must be a smaller number",
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    **dict.fromkeys(("dict_type", "mapping_type", "model_type"), "must be a mapping"),
    "model_attributes_type": "must be a mapping",
    **dict.fromkeys(("list_type", "tuple_type", "frozen_set_type"), "must be a list"),
}


def validate(
    model: type[ModelT], source: YamlDocument, entry: YamlEntry, env: Mapping[str, str]
) -> tuple[ModelT | None, list[Problem]]:
    """Build a model from an entry's mapping; None where it has problems.

    Relative paths start in the file's folder; `env` holds the variables that keys are read from.
    """
    context = {"folder": source.file.parent, "env": env}
    data, errors = to_plain(entry.tree), list[ErrorDetails]()
    for _ in range(2):
        try:
            return model.model_validate(data, context=context, by_alias=True, by_name=False), []
        except ValidationError as error:
            errors = error.errors(include_url=False)
        # `name: ${N}` with N=42: the value became a number, but this key needs its text.
        wanted = [error["loc"] for error in errors if error["type"] == "string_type"]
        found = ((loc, find_entry(entry, loc).tree) for loc in wanted)
        texts = {loc: tree.raw_text for loc, tree in found if isinstance(tree, YamlScalar)}
        if not any(text is not None for text in texts.values()):
            break
        for loc, text in texts.items():
            if text is not None:
                _put(data, loc, text)
    return None, [_problem(error, model, source.file, entry) for error in errors[:MOST_PROBLEMS]]


def unknown_key_remedy(key: str, known: Iterable[str]) -> str:
    """Name the key that was probably meant, and the allowed ones."""
    known = sorted(known)
    question = _did_you_mean(key, known)
    return f"{question} Allowed: {', '.join(known)}" if question else f"allowed: {', '.join(known)}"


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    by_small = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_small, n=1)
    return f"did you mean {by_small[near[0]]}?" if near else ""


def first_of_each_place(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems by line, and keep the first one of each place.

    A value that could not be read (its variable is missing) comes first; what validation reports
    for the same key on the same line follows from it.
    """
    first: dict[tuple[int, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.line, problem.key), problem)
    return sorted(first.values(), key=lambda problem: problem.line)


def find_duplicates(
    source: YamlDocument, items: Iterable[YamlEntry], key: str, noun: str
) -> list[Problem]:
    """Report list items that share the value of a key which must be unique, with both lines."""
    problems = []
    first: dict[str, YamlEntry] = {}
    for item in items:
        entry = item.tree.entries.get(key) if isinstance(item.tree, YamlMapping) else None
        if not entry or not isinstance(entry.tree, YamlScalar) or entry.tree.value in {None, ""}:
            continue
        value = entry.tree.raw_text or str(entry.tree.value)
        other = first.get(value)
        if other is None:
            first[value] = entry
            continue
        # By an alias, both items have the same entry: then only the item has its own place.
        place = item if other is entry else entry
        message = f"{noun} in line {other.line} has this {key} already"
        remedy = f"give each its own {key}"
        problems.append(Problem(source.file, place.line, place.key, message, remedy))
    return problems


def find_entry(entry: YamlEntry, loc: Iterable[str | int]) -> YamlEntry:
    """Follow pydantic's location as far as the file has it; parts that name a type are skipped."""
    for part in loc:
        match entry.tree, part:
            case YamlMapping(entries=entries), str() if part in entries:
                entry = entries[part]
            case YamlList(entries=items), int() if part < len(items):
                entry = items[part]
    return entry


def _put(data: Any, loc: tuple[str | int, ...], text: str) -> None:
    for part in loc[:-1]:
        # A list that stands for a mapping (`start: [...]`) lacks the key that the location names.
        if not (isinstance(data, list) and isinstance(part, str)):
            data = data[part]
    data[loc[-1]] = text


def _problem(
    error: ErrorDetails, model: type[ConfigModel], file: Path, entry: YamlEntry
) -> Problem:
    loc = error["loc"]
    if blamed := error.get("ctx", {}).get("key"):
        loc = (*loc[:-1], blamed)
    found = find_entry(entry, loc)
    parent = model_at_path(model, loc[:-1]) or model
    key = found.key
    if found is find_entry(entry, loc[:-1]) and loc and loc[-1] in keys_of(parent):
        # The file lacks this key: it is required, or its default does not fit the other keys.
        key = f"{key}.{loc[-1]}" if key else str(loc[-1])
    message, remedy = error_words(error, parent, loc)
    return Problem(file, found.line, key, message, remedy)


def error_words(
    error: ErrorDetails, parent: type[ConfigModel], loc: Sequence[str | int]
) -> tuple[str, str]:
    """What is wrong and the remedy; `parent` is the model that has the last key of `loc`."""
    context, kind = error.get("ctx", {}), error["type"]
    message, remedy = _MESSAGES.get(kind, ""), ""
    if kind == "config":
        message, remedy = context["message"], context["remedy"]
    elif kind == "missing":
        remedy = _add_remedy(str(loc[-1]), parent)
    elif kind == "extra_forbidden":
        message = "unknown key"
        remedy = _move_remedy(str(loc[-1]), parent) or unknown_key_remedy(
            str(loc[-1]), keys_of(parent)
        )
    elif kind == "literal_error":
        names = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        message = f"must be {'' if len(names) == 1 else 'one of: '}{', '.join(names)}"
        remedy = _did_you_mean(str(error["input"]), names)
    elif kind == "string_type" and isinstance(error["input"], (bool, int, float)):
        message, remedy = _MESSAGES[kind], "put it in quotes"
    elif not message:
        # pydantic's words for bounds and lengths: "Input should be greater than 0".
        message = error["msg"].replace("Input should", "must").replace("String should", "must")
        message = message[0].lower() + message[1:]
        if kind in _BOUNDS and isinstance(error["input"], (int, float)):
            remedy = f"it is {error['input']}"
    return message, remedy


def _add_remedy(key: str, model: type[ConfigModel]) -> str:
    field = keys_of(model).get(key)
    if field is None:
        return "add it"
    if field.examples:
        return f"add it, such as {key}: {field.examples[0]}"
    meaning = meaning_of(model, key)
    return f"add it: {meaning}" if meaning else "add it"


def _move_remedy(key: str, model: type[ConfigModel]) -> str:
    """Name the place of a key that is unknown here; empty: no mapping nearby has it."""
    if key in model.misplaced_keys:
        return model.misplaced_keys[key]
    sections = [
        name
        for name, field in keys_of(model).items()
        if isinstance(field.annotation, type)
        and issubclass(field.annotation, ConfigModel)
        and key in keys_of(field.annotation)
    ]
    return f"it is a key of {' and of '.join(sections)}: indent it below" if sections else ""


def keys_of(model: type[ConfigModel]) -> dict[str, FieldInfo]:
    """Return the fields of a mapping by the keys that the file uses."""
    return {
        field.validation_alias if isinstance(field.validation_alias, str) else name: field
        for name, field in model.model_fields.items()
        if not field.exclude
    }


def meaning_of(model: type[ConfigModel], key: str) -> str:
    """What a key of the file means; empty: nothing tells."""
    name = next(
        (name for name, field in model.model_fields.items() if field.validation_alias == key), key
    )
    return description_of(model, name)


def nested_model(annotation: Any) -> tuple[type[ConfigModel] | None, bool]:
    """The model in a type, and whether the type holds several of it, by index or by name."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return annotation, False
    origin = get_origin(annotation)
    parts = get_args(annotation)
    holds_several = origin not in {Annotated, Union, types.UnionType}
    if origin is Annotated:
        parts = parts[:1]
    elif holds_several and origin is not tuple and len(parts) == 2:  # a mapping
        parts = parts[1:]
    for part in parts:
        model, below = nested_model(part)
        if model is not None:
            return model, below or holds_several
    return None, False


def model_at_path(model: type[ConfigModel], path: Sequence[str | int]) -> type[ConfigModel] | None:
    """Find the model of the mapping at a place below another model."""
    current: type[ConfigModel] | None = model
    is_one_of_several = False  # the next part is an index or a free name, and no key of `current`
    for part in path:
        if is_one_of_several:
            is_one_of_several = False
        elif current is None or (field := keys_of(current).get(str(part))) is None:
            return None
        else:
            current, is_one_of_several = nested_model(field.annotation)
    return current
