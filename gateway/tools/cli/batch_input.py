"""What `batch submit` takes: JSON lines, or a table or a folder of texts with a prompt template.

Everything is checked here before a byte is sent, by the gateway's own reader of lines, and what is
not JSON lines yet is made into them in a temporary file. Memory is bounded: by one line, and by 16
bytes for each `custom_id`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import stat
import string
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, cast

from gateway.batches.line_reader import LineChecker, LineError, LineSpec, LineSplitter, RawLine
from gateway.tools.cli.options import Form
from gateway.tools.cli.terminal import CommandFailed, format_cell, print_note

if TYPE_CHECKING:
    from _csv import Reader

LONGEST_LINE = 16 << 20
"""Bytes of a line here; the gateway has a limit of its own (`batches.line_bytes`)."""

LARGEST_TEXT = 512 << 10  # bytes of a text of a folder, unless the user says otherwise
LARGEST_STDIN = 8 << 30  # bytes that are kept of stdin
PIECE_BYTES = 1 << 20
MOST_SHOWN = 20  # problems that are shown in full, unless checking is all that is asked for
LONGEST_TEMPLATE = 1 << 20  # characters
CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Problems:
    """Tells each problem of an input on stderr, up to `most_shown`, and counts all."""

    most_shown: int
    count: int = 0

    def add(self, where: str, message: str) -> None:
        """Tell what is wrong there."""
        self.count += 1
        if self.count <= self.most_shown:
            print_note(f"{where}: {message}")
        elif self.count == self.most_shown + 1:
            print_note("… and more: --check shows all of them")


@dataclass(slots=True)
class PreparedInput:
    """JSON lines, checked."""

    file: BinaryIO  # open for reading; its owner closes it
    stem: str  # what it is called, without an ending
    endpoint: str
    lines: int = 0  # that can be run
    size: int = 0  # bytes
    sha256: str = ""
    prompt_tokens: int = 0  # estimated
    models: set[str | None] = field(default_factory=set)
    skipped: int = 0  # files of a folder that are no texts


@dataclass(frozen=True, slots=True)
class InputOptions:
    """What the command's user says of the input."""

    endpoint: str | None = None
    kind: Form | None = None
    template: str | None = None
    template_file: Path | None = None
    id_column: str | None = None
    delimiter: str | None = None
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    largest_text: int = LARGEST_TEXT
    strict: bool = False


def prepare(source: str, chosen: InputOptions, problems: Problems) -> PreparedInput:
    """The input as JSON lines, checked. Raises CommandFailed."""
    kind = kind_of(source, chosen.kind)
    if kind is Form.JSONL:
        for name, value in (
            ("--template", chosen.template),
            ("--template-file", chosen.template_file),
            ("--id-column", chosen.id_column),
            ("--delimiter", chosen.delimiter),
            ("--model", chosen.model),
            ("--system", chosen.system),
            ("--max-tokens", chosen.max_tokens),
        ):
            if value is not None:
                raise CommandFailed(
                    f"{name}: JSON lines have their own bodies; it is for tables and folders "
                    "(--input csv or folder)",
                    status=2,
                )
        return prepare_lines(source, chosen.endpoint, problems)
    template = _template(chosen)
    endpoint = chosen.endpoint or CHAT
    shape = RequestShape(endpoint, chosen.model, chosen.system, chosen.max_tokens)
    shape.check()
    if kind is Form.FOLDER:
        for name, value in (("--id-column", chosen.id_column), ("--delimiter", chosen.delimiter)):
            if value is not None:
                raise CommandFailed(f"{name}: a folder has no columns", status=2)
        return prepare_folder(
            source, template, shape, problems, largest=chosen.largest_text, strict=chosen.strict
        )
    delimiter = chosen.delimiter or ("\t" if Path(source).suffix.lower() == ".tsv" else ",")
    if len(delimiter) != 1 or delimiter in '\r\n"':
        raise CommandFailed(f"--delimiter {delimiter!r}: must be one character", status=2)
    return prepare_table(
        source, template, shape, problems, id_column=chosen.id_column, delimiter=delimiter
    )


def _template(chosen: InputOptions) -> PromptTemplate:
    if (chosen.template is None) == (chosen.template_file is None):
        raise CommandFailed(
            "a table or a folder needs --template 'Summarise: {text}', or --template-file", status=2
        )
    text, option = chosen.template, "--template"
    if chosen.template_file is not None:
        option = f"--template-file {chosen.template_file}"
        try:
            with chosen.template_file.open(encoding="utf-8") as file:
                text = file.read(LONGEST_TEMPLATE + 1)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "is not UTF-8"
            raise CommandFailed(f"{option}: can't be read: {why}", status=2) from None
    assert text is not None
    try:
        return parse_template(text)
    except TemplateError as error:
        raise CommandFailed(f"{option}: {error}", status=2) from None


def create_fields(window: str, metadata: Sequence[str]) -> dict[str, Any]:
    """The fields of the request for a batch, but for its input. Raises CommandFailed."""
    fields: dict[str, Any] = {"completion_window": window}
    pairs: dict[str, str] = {}
    for pair in metadata:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise CommandFailed(f"--metadata {pair}: must be NAME=VALUE", status=2)
        if name in pairs:
            raise CommandFailed(f"--metadata {name}: is given twice", status=2)
        pairs[name] = text
    if pairs:
        fields["metadata"] = pairs
    return fields


def kind_of(path: str, named: Form | None) -> Form:
    """The form of this input."""
    if named is not None:
        return named
    if path != "-" and Path(path).is_dir():
        return Form.FOLDER
    return Form.CSV if Path(path).suffix.lower() in {".csv", ".tsv"} else Form.JSONL


def prepare_lines(path: str, endpoint: str | None, problems: Problems) -> PreparedInput:
    """Check a file of JSON lines, or stdin (`-`). Raises CommandFailed."""
    file = _stdin_file() if path == "-" else _open(Path(path))
    try:
        endpoint = endpoint or _endpoint_of(file)
        file.seek(0)
        stem = "stdin" if path == "-" else Path(path).name.removesuffix(".jsonl")
        found = PreparedInput(file, stem, endpoint)
        checker, splitter = LineChecker(endpoint, LONGEST_LINE), LineSplitter(LONGEST_LINE)
        digest = hashlib.sha256()
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            found.size += len(piece)
            for raw in splitter.feed(piece):
                _note_line(checker, raw, f"line {raw.number}", found, problems)
        if (last := splitter.end()) is not None:
            _note_line(checker, last, f"line {last.number}", found, problems)
        found.sha256 = digest.hexdigest()
    except BaseException:
        file.close()
        raise
    return found


def prepare_table(
    path: str,
    template: PromptTemplate,
    shape: RequestShape,
    problems: Problems,
    *,
    id_column: str | None = None,
    delimiter: str = ",",
) -> PreparedInput:
    """Make a table (CSV with a header) into JSON lines; `-` is stdin. Raises CommandFailed.

    Without `id_column` rows are called `row-1` and on.
    """
    binary = _stdin_file() if path == "-" else _open(Path(path))
    with io.TextIOWrapper(binary, "utf-8-sig", newline="") as text:
        stem = "stdin" if path == "-" else Path(path).stem
        csv.field_size_limit(LONGEST_LINE)
        reader = csv.reader(_bounded_lines(text), delimiter=delimiter, strict=True)
        rows = _rows(reader, path, template, shape, id_column, problems)
        return _spooled(stem, shape, rows, problems)


def prepare_folder(
    path: str,
    template: PromptTemplate,
    shape: RequestShape,
    problems: Problems,
    *,
    largest: int = LARGEST_TEXT,
    strict: bool = False,
) -> PreparedInput:
    """Make each text of a folder a JSON line; its name is the `custom_id`. Raises CommandFailed.

    A file that is no text is skipped; with `strict` it is a problem.
    """
    try:
        template.check(("text", "name"), "field of a text")
    except TemplateError as error:
        raise CommandFailed(f"--template: {error}", status=2) from None
    skipped = Problems(problems.most_shown)

    def texts() -> Iterator[tuple[str, bytes]]:
        try:
            names = sorted(one.name for one in Path(path).iterdir())
        except OSError as error:
            raise CommandFailed(f"{path}: can't be read: {error.strerror}", status=2) from None
        for name in names:
            try:
                text = _text_of(Path(path, name), largest)
            except _NoTextError as why:
                if strict:
                    problems.add(name, str(why))
                else:
                    skipped.add(name, f"skipped: {why}")
                continue
            yield name, shape.line(name, template.fill({"text": text, "name": name}))

    found = _spooled(Path(path).resolve().name or "texts", shape, texts(), problems)
    found.skipped = skipped.count
    return found


def _note_line(
    checker: LineChecker, raw: RawLine, where: str, found: PreparedInput, problems: Problems
) -> bool:
    """Check one line; whether it can be run."""
    line = checker.check(raw)
    if isinstance(line, LineError):
        called = "" if line.custom_id is None else f" ('{format_cell(line.custom_id)}')"
        problems.add(f"{where}{called}", line.message)
    elif isinstance(line, LineSpec):
        found.lines += 1
        found.prompt_tokens += line.prompt_tokens
        if len(found.models) < MOST_SHOWN:
            found.models.add(line.model)
        return True
    return False


def _spooled(
    stem: str, shape: RequestShape, lines: Iterator[tuple[str, bytes]], problems: Problems
) -> PreparedInput:
    """Write the lines that can be run into a temporary file; each comes with where it is from."""
    file = _temporary_file()
    try:
        found = PreparedInput(file, stem, shape.endpoint)
        checker, digest = LineChecker(shape.endpoint, LONGEST_LINE), hashlib.sha256()
        for number, (where, data) in enumerate(lines, 1):
            is_long = len(data) > LONGEST_LINE
            raw = RawLine(number, 0, len(data), None if is_long else data, data if is_long else b"")
            if not _note_line(checker, raw, where, found, problems):
                continue
            line = data + b"\n"
            file.write(line)
            digest.update(line)
            found.size += len(line)
        file.flush()
        found.sha256 = digest.hexdigest()
    except BaseException:
        file.close()
        raise
    return found


# Tables.


def _rows(
    reader: Reader,
    path: str,
    template: PromptTemplate,
    shape: RequestShape,
    id_column: str | None,
    problems: Problems,
) -> Iterator[tuple[str, bytes]]:
    """Yield each row as a line. Raises CommandFailed, where the table can't be read further."""
    try:
        columns = _columns(path, next(reader, None), template, id_column)
        number = 0
        for row in reader:
            if not row:
                continue
            number += 1
            where = f"line {reader.line_num}"
            if len(row) != len(columns):
                problems.add(
                    where,
                    f"has {len(row)} columns, and the header {len(columns)}: check its quotes",
                )
                continue
            fields = dict(zip(columns, row, strict=True))
            custom_id = f"row-{number}" if id_column is None else fields[id_column]
            if not custom_id:
                problems.add(where, f"the column '{id_column}' is empty")
                continue
            yield where, shape.line(custom_id, template.fill(fields))
    except csv.Error as error:
        raise CommandFailed(f"{path}: line {reader.line_num}: {error}", status=2) from None
    except UnicodeDecodeError:
        raise CommandFailed(
            f"{path}: near line {reader.line_num + 1}: is not UTF-8; save the table as UTF-8",
            status=2,
        ) from None


def _columns(
    path: str, header: list[str] | None, template: PromptTemplate, id_column: str | None
) -> list[str]:
    """Check the names of the columns. Raises CommandFailed."""
    if not header:
        raise CommandFailed(f"{path}: is empty: its first line must name the columns", status=2)
    double = next((name for name in header if header.count(name) > 1), None)
    if double is not None:
        raise CommandFailed(f"{path}: two columns are called '{format_cell(double)}'", status=2)
    try:
        template.check(header)
    except TemplateError as error:
        raise CommandFailed(f"{path}: line 1: {error}", status=2) from None
    if id_column is not None and id_column not in header:
        there = ", ".join(f"'{format_cell(one)}'" for one in header)
        raise CommandFailed(
            f"--id-column {id_column}: there is no such column: there is {there}", status=2
        )
    return header


def _bounded_lines(text: TextIO) -> Iterator[str]:
    while line := text.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE and not line.endswith("\n"):
            raise csv.Error(f"is longer than {LONGEST_LINE:,} characters")
        yield line


# Folders.


class _NoTextError(Exception):
    """A file of the folder is no text; why."""


def _text_of(path: Path, largest: int) -> str:
    """Read the text of a regular file. Raises _NoTextError."""
    try:
        path.name.encode()
        # No waiting for a named pipe's writer, and no link that leads elsewhere.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except UnicodeEncodeError:
        raise _NoTextError("its name is not UTF-8") from None
    except OSError as error:
        why = "is a link" if path.is_symlink() else f"can't be read: {error.strerror}"
        raise _NoTextError(why) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise _NoTextError("is a folder" if stat.S_ISDIR(mode) else "is no regular file")
    with os.fdopen(handle, "rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise _NoTextError(f"is larger than {largest:,} bytes (--largest-text)")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _NoTextError("is no text in UTF-8") from None
    if "\0" in text:
        raise _NoTextError("is no text: it holds zero bytes")
    return text


# Files.


def _open(path: Path) -> BinaryIO:
    try:
        # The same holds for an input as for a text: no waiting for a named pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CommandFailed(f"{path}: can't be read: {error.strerror}", status=2) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CommandFailed(
            f"{path}: is no regular file; '-' reads stdin, and a folder is named by its path",
            status=2,
        )
    return os.fdopen(handle, "rb")


def _stdin_file() -> BinaryIO:
    """Stdin in a temporary file: it is read twice, to check it and to send it."""
    source = getattr(sys.stdin, "buffer", None)
    file = _temporary_file()
    if source is None:
        file.write(sys.stdin.read().encode())
    else:
        left = LARGEST_STDIN
        while piece := source.read(PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise CommandFailed(f"stdin: more than {LARGEST_STDIN:,} bytes", status=2)
            file.write(piece)
    file.seek(0)
    return file


def _temporary_file() -> BinaryIO:
    """A new file without a name; its owner closes it."""
    return cast("BinaryIO", tempfile.TemporaryFile(prefix="llama-gateway-batch-"))


def _endpoint_of(file: BinaryIO) -> str:
    """The endpoint that the first line names; the one of chats, if it names none."""
    for _ in range(MOST_SHOWN):
        try:
            line = json.loads(file.readline(LONGEST_LINE).decode("utf-8-sig"))
        except (ValueError, RecursionError):
            continue
        url = line.get("url") if isinstance(line, dict) else None
        if isinstance(url, str) and url.startswith("/v1/"):
            return url
    return CHAT


# Templates: `{name}` stands for a field, `{{` and `}}` for braces, and nothing else is special. A
# template has no attributes, indexes, conversions or formats, so that neither it nor the text of a
# field can reach anything else.


class TemplateError(ValueError):
    """The template is wrong, or asks for a field that there is not."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A template, read."""

    pieces: tuple[tuple[str, str | None], ...]  # text, and the field that follows it

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its fields, each once."""
        return tuple(dict.fromkeys(name for _, name in self.pieces if name is not None))

    def check(self, known: Sequence[str], what: str = "column") -> None:
        """Check that there are all its fields. Raises TemplateError."""
        for name in self.fields:
            if name not in known:
                there = ", ".join(f"'{one}'" for one in known) or "none"
                raise TemplateError(
                    f"the template names '{{{name}}}', but there is no such {what}: "
                    f"there is {there}"
                )

    def fill(self, fields: Mapping[str, str]) -> str:
        """The prompt; all fields must be there."""
        return "".join(text if name is None else text + fields[name] for text, name in self.pieces)


def parse_template(text: str) -> PromptTemplate:
    """Read a template. Raises TemplateError."""
    if len(text) > LONGEST_TEMPLATE:
        raise TemplateError(f"the template has more than {LONGEST_TEMPLATE:,} characters")
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise TemplateError(
            f"the template can't be read ({str(error).lower()}): write {{{{ and }}}} for braces "
            "that are text"
        ) from None
    pieces: list[tuple[str, str | None]] = []
    for literal, name, spec, conversion in parsed:
        if conversion or spec:
            raise TemplateError(
                f"the template's '{{{name}' goes on with '!' or ':': a field is its name alone; "
                "write {{ and }} for braces that are text"
            )
        if name is not None and not name.strip():
            raise TemplateError(
                "the template has '{}' without a name: write {text}, or {{ and }} for braces "
                "that are text"
            )
        pieces.append((literal, name))
    return PromptTemplate(tuple(pieces))


# Requests.


@dataclass(frozen=True, slots=True)
class RequestShape:
    """How a prompt becomes a request's body."""

    endpoint: str
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None

    def check(self) -> None:
        """Raises CommandFailed, where the endpoint can't have what is asked for."""
        if self.endpoint not in SHAPES:
            raise CommandFailed(
                f"--endpoint {self.endpoint}: prompts can be made for {', '.join(SHAPES)}; "
                "for others write JSON lines",
                status=2,
            )
        if self.system is not None and self.endpoint in {"/v1/completions", "/v1/embeddings"}:
            raise CommandFailed(f"--system: {self.endpoint} has no system prompt", status=2)
        if self.max_tokens is not None and self.endpoint == "/v1/embeddings":
            raise CommandFailed("--max-tokens: embeddings have no answer to limit", status=2)
        if self.max_tokens is None and self.endpoint == "/v1/messages":
            raise CommandFailed("/v1/messages needs --max-tokens", status=2)

    def body(self, prompt: str) -> dict[str, Any]:
        """The body of the request for this prompt."""
        body: dict[str, Any] = {} if self.model is None else {"model": self.model}
        message = {"role": "user", "content": prompt}
        system = self.system
        match self.endpoint:
            case "/v1/completions":
                body["prompt"] = prompt
            case "/v1/embeddings":
                body["input"] = prompt
            case "/v1/responses":
                body |= {"input": prompt} | ({} if system is None else {"instructions": system})
            case "/v1/messages":
                body |= {"messages": [message]} | ({} if system is None else {"system": system})
            case _:
                first = [] if system is None else [{"role": "system", "content": system}]
                body["messages"] = [*first, message]
        if self.max_tokens is not None:
            body[SHAPES[self.endpoint]] = self.max_tokens
        return body

    def line(self, custom_id: str, prompt: str) -> bytes:
        """The line of input for this prompt."""
        line = {
            "custom_id": custom_id,
            "method": "POST",
            "url": self.endpoint,
            "body": self.body(prompt),
        }
        return json.dumps(line, ensure_ascii=False).encode()


SHAPES = {
    CHAT: "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    "/v1/embeddings": "",
}
"""The endpoints for which prompts are made, and how they name the longest answer."""
