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
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from gateway.batches.line_reader import LineChecker, LineError, LineSpec, LineSplitter, RawLine
from gateway.tools.cli.batch_options import InputKind
from gateway.tools.cli.batch_templates import PromptTemplate, TemplateError
from gateway.tools.cli.terminal import CommandFailed, format_cell, print_note

LONGEST_LINE = 16 << 20
"""Bytes of a line here; the gateway has a limit of its own (`batches.line_bytes`)."""

LARGEST_TEXT = 512 << 10
"""Bytes of a text of a folder, unless the user says otherwise."""

LARGEST_STDIN = 8 << 30
"""Bytes that are kept of stdin."""

PIECE_BYTES = 1 << 20

MOST_SHOWN = 20
"""Problems that are shown in full, unless checking is all that is asked for."""

CHAT = "/v1/chat/completions"


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

    file: BinaryIO
    """Open for reading; its owner closes it."""
    stem: str
    """What it is called, without an ending."""
    endpoint: str
    lines: int = 0
    """That can be run."""
    size: int = 0
    """Bytes."""
    sha256: str = ""
    prompt_tokens: int = 0
    """Estimated."""
    models: set[str | None] = field(default_factory=set)
    skipped: int = 0
    """Files of a folder that are no texts."""


def kind_of(path: str, named: InputKind | None) -> InputKind:
    """The form of this input."""
    if named is not None:
        return named
    if path != "-" and Path(path).is_dir():
        return InputKind.FOLDER
    return InputKind.CSV if Path(path).suffix.lower() in {".csv", ".tsv"} else InputKind.JSONL


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


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How a table becomes prompts."""

    template: PromptTemplate
    shape: RequestShape
    id_column: str | None = None
    """None: rows are called `row-1` and on."""
    delimiter: str = ","


def prepare_table(path: str, options: TableOptions, problems: Problems) -> PreparedInput:
    """Make a table (CSV with a header) into JSON lines; `-` is stdin. Raises CommandFailed."""
    binary = _stdin_file() if path == "-" else _open(Path(path))
    with io.TextIOWrapper(binary, "utf-8-sig", newline="") as text:
        stem = "stdin" if path == "-" else Path(path).stem
        return _spooled(stem, options.shape, _rows(text, path, options, problems), problems)


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """How texts of a folder become prompts."""

    template: PromptTemplate
    shape: RequestShape
    largest: int = LARGEST_TEXT
    strict: bool = False
    """What is no text is a problem, and not skipped."""


FOLDER_FIELDS = ("text", "name")


def prepare_folder(path: str, options: FolderOptions, problems: Problems) -> PreparedInput:
    """Make each text of a folder a JSON line; its name is the `custom_id`. Raises CommandFailed."""
    try:
        options.template.check(FOLDER_FIELDS, "field of a text")
    except TemplateError as error:
        raise CommandFailed(f"--template: {error}", status=2) from None
    skipped = Problems(problems.most_shown)
    found = _spooled(
        Path(path).resolve().name or "texts",
        options.shape,
        _texts(Path(path), options, problems if options.strict else skipped),
        problems,
    )
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
    text: TextIO, path: str, options: TableOptions, problems: Problems
) -> Iterator[tuple[str, bytes]]:
    """Each row as a line. Raises CommandFailed, where the table can't be read further."""
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader(_bounded_lines(text), delimiter=options.delimiter, strict=True)
    try:
        header = next(reader, None)
        columns = _columns(path, header, options)
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
            custom_id = f"row-{number}" if options.id_column is None else fields[options.id_column]
            if not custom_id:
                problems.add(where, f"the column '{options.id_column}' is empty")
                continue
            yield where, options.shape.line(custom_id, options.template.fill(fields))
    except csv.Error as error:
        raise CommandFailed(f"{path}: line {reader.line_num}: {error}", status=2) from None
    except UnicodeDecodeError:
        raise CommandFailed(
            f"{path}: near line {reader.line_num + 1}: is not UTF-8; save the table as UTF-8",
            status=2,
        ) from None


def _columns(path: str, header: list[str] | None, options: TableOptions) -> list[str]:
    """The names of the columns. Raises CommandFailed."""
    if not header:
        raise CommandFailed(f"{path}: is empty: its first line must name the columns", status=2)
    double = next((name for name in header if header.count(name) > 1), None)
    if double is not None:
        raise CommandFailed(f"{path}: two columns are called '{format_cell(double)}'", status=2)
    try:
        options.template.check(header)
    except TemplateError as error:
        raise CommandFailed(f"{path}: line 1: {error}", status=2) from None
    if options.id_column is not None and options.id_column not in header:
        there = ", ".join(f"'{format_cell(one)}'" for one in header)
        raise CommandFailed(
            f"--id-column {options.id_column}: there is no such column: there is {there}", status=2
        )
    return header


def _bounded_lines(text: TextIO) -> Iterator[str]:
    while line := text.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE and not line.endswith("\n"):
            raise csv.Error(f"is longer than {LONGEST_LINE:,} characters")
        yield line


# Folders.


def _texts(folder: Path, options: FolderOptions, refused: Problems) -> Iterator[tuple[str, bytes]]:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise CommandFailed(f"{folder}: can't be read: {error.strerror}", status=2) from None
    for name in names:
        text = _text_of(folder / name, options.largest)
        if isinstance(text, _NoText):
            refused.add(f"{name}", text.why if options.strict else f"skipped: {text.why}")
            continue
        fields: Mapping[str, str] = {"text": text, "name": name}
        yield name, options.shape.line(name, options.template.fill(fields))


@dataclass(frozen=True, slots=True)
class _NoText:
    why: str


def _text_of(path: Path, largest: int) -> str | _NoText:
    """The text of a regular file, or why it is none."""
    try:
        path.name.encode()
        # No waiting for a named pipe's writer, and no link that leads elsewhere.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except UnicodeEncodeError:
        return _NoText("its name is not UTF-8")
    except OSError as error:
        if path.is_symlink():
            return _NoText("is a link")
        return _NoText(f"can't be read: {error.strerror}")
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        return _NoText("is a folder" if stat.S_ISDIR(mode) else "is no regular file")
    with os.fdopen(handle, "rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        return _NoText(f"is larger than {largest:,} bytes (--largest-text)")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return _NoText("is no text in UTF-8")
    return _NoText("is no text: it holds zero bytes") if "\0" in text else text


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
        shutil.copyfileobj(_Bounded(source), file, PIECE_BYTES)
    file.seek(0)
    return file


def _temporary_file() -> BinaryIO:
    """A new file without a name; its owner closes it."""
    return cast("BinaryIO", tempfile.TemporaryFile(prefix="llama-gateway-batch-"))


class _Bounded:
    """Reads of a stream no more than `LARGEST_STDIN` bytes."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._left = LARGEST_STDIN

    def read(self, size: int = -1) -> bytes:
        piece = self._source.read(size)
        self._left -= len(piece)
        if self._left < 0:
            raise CommandFailed(f"stdin: more than {LARGEST_STDIN:,} bytes", status=2)
        return piece


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
