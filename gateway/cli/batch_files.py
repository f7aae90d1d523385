"""Files of batches: what `batch submit` takes, and the results that it and `batch fetch` write.

An input is JSON lines, or a table or a folder of texts with a prompt template. It is checked here
before a byte is sent, by the gateway's own reader of lines, and what is not JSON lines yet is made
into them in a temporary file. Memory is bounded: by one line, and by 16 bytes for each `custom_id`.

Results are JSON lines, a table, or a folder of texts. They are written beside their place and put
there when they are whole; nothing that exists is overwritten unless the user asks for it.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import heapq
import io
import json
import os
import stat
import string
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import quote

from gateway.cli.client import ENDED, BatchClient, Patience, json_object
from gateway.cli.options import Form, InputFlags
from gateway.cli.terminal import CommandFailed, WrongUsage, failing_by, format_cell, print_note
from gateway.config.errors import escape_json, safe_cell
from gateway.stored.line_reader import LineChecker, LineError, LineSpec, RawLine, raw_lines

# Bytes of a line here; the gateway has a limit of its own (`batches.line_bytes`).
LONGEST_LINE = 16 << 20
LARGEST_STDIN = 8 << 30  # bytes that are kept of stdin
PIECE_BYTES = 1 << 20
MOST_SHOWN = 20  # problems that are shown in full, unless checking is all that is asked for
LONGEST_TEMPLATE = 1 << 20  # characters
LONGEST_FILE_NAME = 200  # bytes; file systems allow 255
CHAT = "/v1/chat/completions"

# The endpoints for which prompts are made, and how they name the longest answer.
SHAPES = {
    CHAT: "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    "/v1/embeddings": "",
}


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

    file: BinaryIO  # open for reading
    stem: str  # what it is called, without an ending
    endpoint: str
    lines: int = 0  # that can be run
    size: int = 0  # bytes
    sha256: str = ""
    prompt_tokens: int = 0  # estimated
    models: set[str | None] = field(default_factory=set)
    skipped: int = 0  # files of a folder that are no texts
    table: Table | None = None  # what it was made of


def _refuse(chosen: InputFlags, names: Sequence[str], why: str) -> None:
    """Raises CommandFailed, if one of these is given."""
    for name in names:
        if getattr(chosen, name) is not None:
            raise WrongUsage(f"--{name.replace('_', '-')}: {why}")


def check_request(chosen: InputFlags) -> None:
    """Raises CommandFailed, where the endpoint can't have what is asked for."""
    endpoint = chosen.endpoint or CHAT
    if endpoint not in SHAPES:
        raise WrongUsage(
            f"--endpoint {endpoint}: prompts can be made for {', '.join(SHAPES)}; "
            "for others write JSON lines"
        )
    without = {"/v1/completions": ["system"], "/v1/embeddings": ["system", "max_tokens"]}
    _refuse(chosen, without.get(endpoint, ()), f"{endpoint} has nothing like it")
    if endpoint == "/v1/messages" and chosen.max_tokens is None:
        raise WrongUsage("/v1/messages needs --max-tokens")


def request_body(chosen: InputFlags, prompt: str) -> dict[str, Any]:
    """The body of the request for this prompt."""
    endpoint, system = chosen.endpoint or CHAT, chosen.system
    body: dict[str, Any] = {} if chosen.model is None else {"model": chosen.model}
    message = {"role": "user", "content": prompt}
    match endpoint:
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
    if chosen.max_tokens is not None:
        body[SHAPES[endpoint]] = chosen.max_tokens
    return body


@contextlib.contextmanager
def prepare(source: str, chosen: InputFlags, problems: Problems) -> Iterator[PreparedInput]:
    """The input as JSON lines, checked, with its files open; `-` is stdin. Raises CommandFailed."""
    kind, columns = kind_of(source, chosen.kind), ("id_column", "delimiter")
    path = Path("stdin" if source == "-" else source)
    if kind == "jsonl":
        _refuse(
            chosen,
            ("template", "template_file", *columns, "model", "system", "max_tokens"),
            "JSON lines have their own bodies; it is for tables and folders "
            "(--input csv or folder)",
        )
        with _open(source) as file:  # they are sent as they are
            endpoint = chosen.endpoint or _endpoint_of(file)
            found = PreparedInput(file, path.name.removesuffix(".jsonl"), endpoint)
            file.seek(0)
            lines = ((f"line {raw.number}", raw) for raw in raw_lines(file, LONGEST_LINE))
            _check_lines(found, lines, problems)
            yield found
        return
    template = _template(chosen)
    check_request(chosen)
    left_out = problems if chosen.strict else Problems(problems.most_shown)
    with contextlib.ExitStack() as stack:
        if kind == "csv":
            table = stack.enter_context(open_table(source, chosen.id_column, chosen.delimiter))
            stem, prompts = path.stem, _prompts_of_rows(table, template, problems)
        else:
            _refuse(chosen, columns, "a folder has no columns")
            template.check(("text", "name"), "--template", "field of a text")
            table, stem = None, path.resolve().name or "texts"
            prompts = _prompts_of_folder(source, template, chosen.largest_text, left_out)
        file, endpoint = stack.enter_context(_temporary_file()), chosen.endpoint or CHAT
        found = PreparedInput(file, stem, endpoint, table=table)
        _check_lines(found, _made_lines(prompts, chosen, endpoint), problems, write=True)
        found.skipped = 0 if chosen.strict else left_out.count
        yield found


def kind_of(path: str, named: Form | None) -> Form:
    """The form of this input."""
    if named is not None:
        return named
    if path != "-" and Path(path).is_dir():
        return "folder"
    return "csv" if Path(path).suffix.lower() in {".csv", ".tsv"} else "jsonl"


def create_fields(window: str, metadata: Sequence[str]) -> dict[str, Any]:
    """The fields of the request for a batch, but for its input. Raises CommandFailed."""
    pairs: dict[str, str] = {}
    for pair in metadata:
        name, equals, text = pair.partition("=")
        if not equals or not name or name in pairs:
            raise WrongUsage(f"--metadata {pair}: must be NAME=VALUE, each name once")
        pairs[name] = text
    return {"completion_window": window} | ({"metadata": pairs} if pairs else {})


def _endpoint_of(file: BinaryIO) -> str:
    """The endpoint that the first line names; the one of chats, if it names none."""
    for _ in range(20):  # lines; those before it may be broken
        line = json_object(file.readline(LONGEST_LINE)) or {}
        url = line.get("url")
        if isinstance(url, str) and url.startswith("/v1/"):
            return url
    return CHAT


def _made_lines(
    prompts: Iterator[tuple[str, str, str]], chosen: InputFlags, endpoint: str
) -> Iterator[tuple[str, RawLine]]:
    """The line of each prompt, which comes with where it is from, and its `custom_id`."""
    for number, (where, custom_id, prompt) in enumerate(prompts, 1):
        line = {"custom_id": custom_id, "method": "POST", "url": endpoint}
        body = {"body": request_body(chosen, prompt)}
        data = json.dumps(line | body, ensure_ascii=False).encode()
        yield where, RawLine(number, 0, len(data), data if len(data) <= LONGEST_LINE else None)


def _check_lines(
    found: PreparedInput,
    lines: Iterator[tuple[str, RawLine]],
    problems: Problems,
    *,
    write: bool = False,
) -> None:
    """Check lines, each with where it is from; `write`: those that can be run to the file."""
    checker = LineChecker(found.endpoint, LONGEST_LINE)
    for where, raw in lines:
        line = checker.check(raw)
        if isinstance(line, LineError):
            called = "" if line.custom_id is None else f" ('{format_cell(line.custom_id)}')"
            problems.add(f"{where}{called}", line.message)
        elif isinstance(line, LineSpec):
            found.lines += 1
            found.prompt_tokens += line.prompt_tokens
            if len(found.models) < MOST_SHOWN:
                found.models.add(line.model)
            if write:
                found.file.write((raw.data or b"") + b"\n")
    found.file.seek(0)
    whole = cast("io.BufferedReader", found.file)
    found.sha256 = hashlib.file_digest(whole, "sha256").hexdigest()
    found.size = found.file.tell()


def _prompts_of_rows(
    table: Table, template: PromptTemplate, problems: Problems
) -> Iterator[tuple[str, str, str]]:
    rows = table.rows()
    columns = next(rows).cells
    template.check(columns, f"{table.path}: line 1", "column")
    for row in rows:
        if row.problem:
            problems.add(f"line {row.line}", row.problem)
        else:
            prompt = template.fill(dict(zip(columns, row.cells, strict=True)))
            yield f"line {row.line}", row.custom_id, prompt


class TableRow(NamedTuple):
    """A row of a table."""

    line: int  # of the file, where it ends
    cells: list[str]
    custom_id: str = ""
    problem: str = ""  # why it can't be a request; empty: it can


@dataclass(frozen=True, slots=True)
class Table:
    """A table (CSV with a header), which may be read several times."""

    path: str
    text: io.TextIOWrapper
    id_column: str | None
    delimiter: str

    def rows(self) -> Iterator[TableRow]:
        """Its header, then its rows from the first on. Raises CommandFailed."""

        def bounded_lines() -> Iterator[str]:
            while line := self.text.readline(LONGEST_LINE):
                if len(line) == LONGEST_LINE and not line.endswith("\n"):
                    raise csv.Error(f"is longer than {LONGEST_LINE:,} characters")
                yield line

        self.text.seek(0)
        csv.field_size_limit(LONGEST_LINE)
        reader = csv.reader(bounded_lines(), delimiter=self.delimiter, strict=True)
        try:
            columns = next(reader, [])
            if not columns or len(set(columns)) < len(columns):
                raise WrongUsage(f"{self.path}: its first line must name the columns, each once")
            if self.id_column is not None and self.id_column not in columns:
                there = ", ".join(f"'{format_cell(one)}'" for one in columns)
                raise WrongUsage(
                    f"--id-column {self.id_column}: there is no such column: there is {there}"
                )
            yield TableRow(reader.line_num, columns)
            for number, cells in enumerate(filter(None, reader), 1):
                custom_id, problem = f"row-{number}", ""
                if len(cells) != len(columns):
                    problem = (
                        f"has {len(cells)} columns, and the header {len(columns)}: check its quotes"
                    )
                elif self.id_column is not None:
                    custom_id = cells[columns.index(self.id_column)]
                    problem = "" if custom_id else f"the column '{self.id_column}' is empty"
                yield TableRow(reader.line_num, cells, custom_id, problem)
        except csv.Error as error:
            raise WrongUsage(f"{self.path}: line {reader.line_num}: {error}") from None
        except UnicodeDecodeError:
            raise WrongUsage(
                f"{self.path}: near line {reader.line_num + 1}: is not UTF-8; "
                "save the table as UTF-8"
            ) from None


@contextlib.contextmanager
def open_table(path: str, id_column: str | None, delimiter: str | None) -> Iterator[Table]:
    """Open a table; `-` is stdin. Raises CommandFailed."""
    chosen = delimiter or ("\t" if Path(path).suffix.lower() == ".tsv" else ",")
    if len(chosen) != 1 or chosen in '\r\n"':
        raise WrongUsage(f"--delimiter {chosen!r}: must be one character")
    with io.TextIOWrapper(_open(path), "utf-8-sig", newline="") as text:
        yield Table(path, text, id_column, chosen)


def _prompts_of_folder(
    path: str, template: PromptTemplate, largest: int, left_out: Problems
) -> Iterator[tuple[str, str, str]]:
    """A prompt of each text of a folder, whose name is the `custom_id`."""
    try:
        names = sorted(one.name for one in Path(path).iterdir())
    except OSError as error:
        raise WrongUsage(f"{path}: can't be read: {error.strerror}") from None
    for name in names:
        try:
            text = _text_of(Path(path, name), largest)
        except ValueError as why:
            left_out.add(name, f"skipped: {why}")
        else:
            yield name, name, template.fill({"text": text, "name": name})


def _text_of(path: Path, largest: int) -> str:
    """Read the text of a regular file. Raises ValueError: why it is none."""
    with _open_regular(path, os.O_NOFOLLOW) as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"is larger than {largest:,} bytes (--largest-text)")
    try:
        path.name.encode()
        text = data.decode("utf-8-sig")
    except UnicodeError:
        raise ValueError("is no text in UTF-8, or its name is none") from None
    if "\0" in text:
        raise ValueError("is no text: it holds zero bytes")
    return text


def _open_regular(path: Path, flags: int = 0) -> BinaryIO:
    """Open a regular file, without waiting for a named pipe's writer. Raises ValueError: why not.

    With O_NOFOLLOW a link is none.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except OSError as error:
        raise ValueError(f"can't be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("is no regular file")
    return os.fdopen(handle, "rb")


def _open(path: str) -> BinaryIO:
    """Open an input. Stdin becomes a temporary file: it is read twice, to check and to send it."""
    if path != "-":
        with failing_by(ValueError, before=f"{path}: ", status=2):
            return _open_regular(Path(path))
    file, left = _temporary_file(), LARGEST_STDIN
    while piece := sys.stdin.buffer.read(PIECE_BYTES):
        left -= len(piece)
        if left < 0:
            raise WrongUsage(f"stdin: more than {LARGEST_STDIN:,} bytes")
        file.write(piece)
    file.seek(0)
    return file


def _temporary_file() -> BinaryIO:
    return cast("BinaryIO", tempfile.TemporaryFile(prefix="llama-gateway-batch-"))


# Templates: `{name}` stands for a field, `{{` and `}}` for braces, and nothing else is special. A
# template has no attributes, indexes, conversions or formats, so that neither it nor the text of a
# field can reach anything else.


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A template, read."""

    pieces: tuple[tuple[str, str | None], ...]  # text, and the field that follows it

    def check(self, known: Sequence[str], where: str, what: str) -> None:
        """Check that there are all its fields. Raises CommandFailed."""
        for _, name in self.pieces:
            if name is not None and name not in known:
                there = ", ".join(f"'{one}'" for one in known) or "none"
                raise WrongUsage(
                    f"{where}: the template names '{{{name}}}', but there is no such {what}: "
                    f"there is {there}"
                )

    def fill(self, fields: Mapping[str, str]) -> str:
        """The prompt; all fields must be there."""
        return "".join(text if name is None else text + fields[name] for text, name in self.pieces)


def _template(chosen: InputFlags) -> PromptTemplate:
    text, option = chosen.template, "--template"
    if (text is None) == (chosen.template_file is None):
        raise WrongUsage(
            "a table or a folder needs --template 'Summarise: {text}', or --template-file"
        )
    if chosen.template_file is not None:
        option = f"--template-file {chosen.template_file}"
        try:
            with chosen.template_file.open(encoding="utf-8") as file:
                text = file.read(LONGEST_TEMPLATE + 1)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "is not UTF-8"
            raise WrongUsage(f"{option}: can't be read: {why}") from None
    with failing_by(ValueError, before=f"{option}: ", status=2):
        return parse_template(text or "")


def parse_template(text: str) -> PromptTemplate:
    """Read a template. Raises ValueError."""
    if len(text) > LONGEST_TEMPLATE:
        raise ValueError(f"the template has more than {LONGEST_TEMPLATE:,} characters")
    remedy = "a field is its name alone, as in {text}; write {{ and }} for braces that are text"
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"the template can't be read ({str(error).lower()}): {remedy}") from None
    for _, name, spec, conversion in pieces:
        if conversion or spec or (name is not None and not name.strip()):
            raise ValueError(f"the template has '{{{name}' that is no field: {remedy}")
    return PromptTemplate(tuple((literal, name) for literal, name, _, _ in pieces))


# Results.


@dataclass(frozen=True, slots=True)
class ResultPlaces:
    """Where results go."""

    format: Form
    output: Path
    errors: Path | None  # for the lines that failed; None: `output` has them, too
    force: bool = False

    def check(self) -> None:
        """Check before the work that nothing is in the way. Raises CommandFailed."""
        for path in (self.output, self.errors):
            if path is None or str(path) == "-" or path.parent == self.output:
                continue
            if not path.parent.is_dir():
                raise WrongUsage(f"{path}: there is no folder {path.parent}")
            if not self.force and (path.exists() or path.is_symlink()):
                raise _exists(path)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was written."""

    output: Path | None  # None: no line has a result
    errors: Path | None  # None: no line has an error, or `output` has them
    done: int
    failed: int


def stem_of(source: str) -> str:
    """What the results of this input are called, without an ending."""
    if source == "-":
        return "stdin"
    path = Path(source)
    return str(path.with_suffix("") if path.suffix.lower() in {".jsonl", ".csv", ".tsv"} else path)


def places_for(
    stem: str, format_: Form, output: Path | None, *, force: bool, as_json: bool
) -> ResultPlaces:
    """The places for results of what is called `stem`; `output` as the user names it."""
    if format_ == "folder" and str(output) == "-":
        raise WrongUsage("--output -: a folder can't go to stdout")
    if as_json and str(output) == "-":
        raise WrongUsage("--output - and --json: only one of them can go to stdout")
    ending = {"jsonl": ".out.jsonl", "csv": ".out.csv", "folder": ".out"}[format_]
    out = output or Path(stem + ending)
    errors: Path | None = None
    if format_ == "folder":
        errors = out / "errors.jsonl"  # all texts end in `.txt`
    elif format_ == "jsonl" and str(out) == "-":
        errors = Path(f"{stem}.errors.jsonl")
    elif format_ == "jsonl":
        base = out.name.removesuffix(".jsonl").removesuffix(".out")
        errors = out.with_name(f"{base}.errors.jsonl")
    return ResultPlaces(format_, out, errors, force)


def fetch_results(
    client: BatchClient,
    batch: Mapping[str, Any],
    places: ResultPlaces,
    patience: Patience,
    table: Table | None = None,
) -> Fetched:
    """Write the results that there are so far. Raises CommandFailed.

    `table`: what the batch was made of; a table of results has its columns and its order.
    """
    with (
        _downloaded(client, batch, "output", patience) as (output, done),
        _downloaded(client, batch, "errors", patience) as (errors, failed),
    ):
        is_table, errors_in = places.format == "csv", places.errors if failed else None
        is_written = places.format != "jsonl" or done > 0 or not failed
        lines = (line.decode() for line in output)
        texts = result_rows(output, errors, table) if is_table else lines
        if places.format == "folder":
            _write_folder(output, places)
        elif str(places.output) == "-":
            sys.stdout.writelines(texts if is_table else map(escape_json, texts))
            sys.stdout.flush()
        elif is_written:
            write_whole(places.output, (text.encode() for text in texts), force=places.force)
        if errors_in is not None:
            write_whole(errors_in, errors, force=places.force)
        return Fetched(places.output if is_written else None, errors_in, done, failed)


@contextlib.contextmanager
def _downloaded(
    client: BatchClient, batch: Mapping[str, Any], which: str, patience: Patience
) -> Iterator[tuple[BinaryIO, int]]:
    """The lines of one kind in a temporary file, and their number."""
    file_id = batch.get("output_file_id" if which == "output" else "error_file_id")
    with _temporary_file() as file:
        path = f"/v1/files/{quote(str(file_id), safe='')}/content"
        if file_id is None:
            path = f"/v1/batches/{quote(str(batch.get('id')), safe='')}/{which}"

        def download() -> None:
            # A download that broke off begins again.
            file.seek(0)
            file.truncate()
            client.download(path, file.write)

        if file_id is not None or batch.get("status") not in ENDED:
            patience.call(download)
        file.seek(0)
        lines = sum(1 for line in file if line.strip())
        file.seek(0)
        yield file, lines


def result_rows(output: BinaryIO, errors: BinaryIO, table: Table | None) -> Iterator[str]:
    """The results as the rows of a table: in the order of the input, with the columns that it had.

    Raises CommandFailed, if results are not of this table.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)  # It quotes only those ends of lines that its own have.

    def row(cells: Iterable[str]) -> str:
        text.seek(0)
        text.truncate()
        writer.writerow(cells)
        return text.getvalue().removesuffix("\r\n") + "\n"

    results = heapq.merge(_lines(output), _lines(errors), key=_line_number)
    if table is None:
        yield row(["custom_id", "text", "error"])
        for line in results:
            yield row(map(safe_cell, (custom_id_of(line), text_of(line), error_of(line))))
        return
    rows, result = table.rows(), next(results, None)
    columns = next(rows).cells
    added = (f"result_{name}" if name in columns else name for name in ("text", "error"))
    yield row([*columns, *added])
    for given in rows:
        # Its own cells are as the user has them. A row that could not be a request has no result.
        cells = [*given.cells, *[""] * len(columns)][: len(columns)]
        if result is not None and not given.problem and custom_id_of(result) == given.custom_id:
            yield row([*cells, safe_cell(text_of(result)), safe_cell(error_of(result))])
            result = next(results, None)
        else:
            yield row([*cells, "", given.problem and f"was not submitted: {given.problem}"])
    if result is not None:
        shown = format_cell(custom_id_of(result))
        raise WrongUsage(
            f"{table.path}: has no row for the result '{shown}', or not in this order: is it the "
            "table that the batch was made of, with the same --id-column?"
        )


def _line_number(line: Mapping[str, Any]) -> int:
    """The number of the input's line that this is the result of; 0: it does not tell."""
    number = str(line.get("id")).rpartition("_")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def _write_folder(output: BinaryIO, places: ResultPlaces) -> None:
    """Write a text for each line with a result."""
    try:
        places.output.mkdir(exist_ok=places.force)
    except FileExistsError:
        raise _exists(places.output) from None
    taken: set[str] = set()
    for line in _lines(output):
        custom_id = custom_id_of(line)
        name = file_name_of(custom_id)
        if name in taken:  # 'a' and 'a.txt'
            name = file_name_of(custom_id, is_taken=True)
        taken.add(name)
        # A model may write half a surrogate pair.
        text = text_of(line).encode(errors="replace")
        write_whole(places.output / name, [text], force=True)


def file_name_of(custom_id: str, *, is_taken: bool = False) -> str:
    """A file name for any `custom_id`; `is_taken`: another one than usual."""
    data = custom_id.encode(errors="surrogatepass")
    name = quote(data, safe=" ()+,=@") or "%"
    if name.startswith("."):
        name = "%2E" + name[1:]
    if is_taken or len(name) > LONGEST_FILE_NAME:
        digest = hashlib.sha256(data).hexdigest()[:16]
        name = f"{name[: LONGEST_FILE_NAME - 17]}-{digest}"
    return name if name.endswith(".txt") else f"{name}.txt"


def _lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    for number, data in enumerate(file, 1):
        if not data.strip():
            continue
        if (line := json_object(data)) is None:
            raise CommandFailed(f"line {number} of the results is no JSON object")
        yield line


def custom_id_of(line: Mapping[str, Any]) -> str:
    """The line's `custom_id`; of a broken one without any, its number."""
    match line:
        case {"custom_id": str(custom_id)}:
            return custom_id
        case {"error": {"line": int(number)}}:
            return f"line {number}"
    return ""


def text_of(line: Mapping[str, Any]) -> str:
    """The text that a result holds, of any endpoint; vectors as JSON."""
    response = line.get("response")
    body = response.get("body") if isinstance(response, dict) and _is_success(response) else None
    match body:
        case {"choices": [{"message": {"content": content}} | {"text": content}, *_]}:
            return _plain(content)
        case {"output": [*items]}:
            own = (one for one in items if isinstance(one, dict) and one.get("type") == "message")
            return "".join(_plain(one.get("content")) for one in own)
        case {"content": content}:
            return _plain(content)
        case {"data": [*data]}:
            vectors = [one.get("embedding") for one in data if isinstance(one, dict)]
            return json.dumps(vectors[0] if len(vectors) == 1 else vectors)
    return ""


def error_of(line: Mapping[str, Any]) -> str:
    """Why a line has no result; empty, if it has one."""
    error = line.get("error")
    if error is None:
        response = line.get("response")
        if not isinstance(response, dict) or _is_success(response):
            return ""
        body = response.get("body")
        error = body.get("error") if isinstance(body, dict) else None
        if error is None:
            return f"status {response.get('status_code')}"
    if isinstance(error, dict):
        return ": ".join(str(error[name]) for name in ("code", "message") if error.get(name))
    return str(error)


def _plain(content: object) -> str:
    """A content's text: a string, or parts that hold texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _is_success(response: Mapping[str, Any]) -> bool:
    status = response.get("status_code")
    return isinstance(status, int) and 200 <= status < 300


def write_whole(path: Path, pieces: Iterable[bytes], *, force: bool) -> None:
    """Write a new file, and put it at `path` when it is whole. Raises CommandFailed."""
    part = path.with_name(f".{path.name[:LONGEST_FILE_NAME]}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            file.writelines(pieces)
        if force:
            part.replace(path)
        else:
            # Unlike a rename it leaves alone what has come there meanwhile.
            try:
                os.link(part, path)
            except (PermissionError, NotImplementedError):  # a file system without links
                with path.open("xb"):
                    part.replace(path)
    except FileExistsError:
        raise _exists(path) from None
    finally:
        part.unlink(missing_ok=True)


def _exists(path: Path) -> CommandFailed:
    return WrongUsage(f"{path} is there already: name another place with --output, or use --force")
