"""Writes the results of a batch: as JSON lines, as a table, or as a folder of texts.

Everything is written beside its place and put there when it is whole. Nothing that exists is
overwritten unless the user asks for it.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from gateway.config.errors import escape_json
from gateway.tools.cli.batch_client import ENDED, BatchClient, Patience
from gateway.tools.cli.options import Form
from gateway.tools.cli.terminal import CommandFailed

LONGEST_FILE_NAME = 200  # bytes; file systems allow 255
ERRORS_NAME = "errors.jsonl"  # in a folder of texts; all texts end in `.txt`


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
            if path is None or str(path) == "-":
                continue
            if not path.parent.is_dir():
                raise CommandFailed(f"{path}: there is no folder {path.parent}", status=2)
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


def places_for(stem: str, format_: Form, output: Path | None, *, force: bool) -> ResultPlaces:
    """The places for results of what is called `stem`; `output` as the user names it."""
    if format_ is Form.FOLDER:
        folder = output or Path(f"{stem}.out")
        if str(folder) == "-":
            raise CommandFailed("--output -: a folder can't go to stdout", status=2)
        return ResultPlaces(format_, folder, None, force)
    if format_ is Form.CSV:
        return ResultPlaces(format_, output or Path(f"{stem}.out.csv"), None, force)
    out = output or Path(f"{stem}.out.jsonl")
    if str(out) == "-":
        return ResultPlaces(format_, out, Path(f"{stem}.errors.jsonl"), force)
    base = out.name.removesuffix(".jsonl").removesuffix(".out")
    return ResultPlaces(format_, out, out.with_name(f"{base}.errors.jsonl"), force)


def fetch_results(
    client: BatchClient, batch: Mapping[str, Any], places: ResultPlaces, patience: Patience
) -> Fetched:
    """Write the results that there are so far. Raises CommandFailed."""
    with (
        _downloaded(client, batch, "output", patience) as (output, done),
        _downloaded(client, batch, "errors", patience) as (errors, failed),
    ):
        match places.format:
            case Form.JSONL:
                return _write_lines(output, done, errors, failed, places)
            case Form.CSV:
                _write_table(output, errors, places)
                return Fetched(places.output, None, done, failed)
            case Form.FOLDER:
                written = _write_folder(output, errors, places)
                return Fetched(places.output, written, done, failed)


@contextlib.contextmanager
def _downloaded(
    client: BatchClient, batch: Mapping[str, Any], which: str, patience: Patience
) -> Iterator[tuple[BinaryIO, int]]:
    """The lines of one kind in a temporary file, and their number."""
    file_id = batch.get("output_file_id" if which == "output" else "error_file_id")
    with tempfile.TemporaryFile(prefix="llama-gateway-batch-") as file:
        path = None
        if file_id is not None:
            path = f"/v1/files/{quote(str(file_id), safe='')}/content"
        elif batch.get("status") not in ENDED:
            path = f"/v1/batches/{quote(str(batch.get('id')), safe='')}/{which}"

        def download() -> None:
            # A download that broke off begins again.
            file.seek(0)
            file.truncate()
            assert path is not None
            client.download(path, file.write)

        if path is not None:
            patience.call(download)
        file.seek(0)
        lines = sum(1 for line in file if line.strip())
        file.seek(0)
        yield file, lines


# JSON lines.


def _write_lines(
    output: BinaryIO, done: int, errors: BinaryIO, failed: int, places: ResultPlaces
) -> Fetched:
    """Both files as they came."""
    if str(places.output) == "-":
        _to_stdout(output)
    elif done or not failed:
        write_whole(places.output, output, force=places.force)
    if failed:
        assert places.errors is not None
        write_whole(places.errors, errors, force=places.force)
    is_written = done or not failed
    return Fetched(
        places.output if is_written else None, places.errors if failed else None, done, failed
    )


def _to_stdout(source: BinaryIO) -> None:
    sys.stdout.flush()
    for line in source:
        sys.stdout.write(escape_json(line.decode()))
    sys.stdout.flush()


# Tables.


def _write_table(output: BinaryIO, errors: BinaryIO, places: ResultPlaces) -> None:
    rows = _rows(output, errors)
    if str(places.output) == "-":
        sys.stdout.writelines(rows)
    else:
        write_whole(places.output, (row.encode() for row in rows), force=places.force)


def _rows(output: BinaryIO, errors: BinaryIO) -> Iterator[str]:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")

    def row(*cells: str) -> str:
        text.seek(0)
        text.truncate()
        writer.writerow([_no_formula(cell) for cell in cells])
        return text.getvalue()

    yield row("custom_id", "text", "error")
    for line in itertools.chain(_lines(output), _lines(errors)):
        yield row(custom_id_of(line), text_of(line), error_of(line))


def _no_formula(text: str) -> str:
    """A text that no spreadsheet runs: models are told by anybody what to write."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


# Folders.


def _write_folder(output: BinaryIO, errors: BinaryIO, places: ResultPlaces) -> Path | None:
    """A text for each line with a result; the place of the lines with errors, if there are any."""
    folder = places.output
    try:
        folder.mkdir(exist_ok=places.force)
    except FileExistsError:
        raise _exists(folder) from None
    taken: set[str] = set()
    for line in _lines(output):
        custom_id = custom_id_of(line)
        name = file_name_of(custom_id)
        if name in taken:  # 'a' and 'a.txt'
            name = file_name_of(custom_id, is_taken=True)
        taken.add(name)
        # A model may write half a surrogate pair.
        text = text_of(line).encode(errors="replace")
        write_whole(folder / name, [text], force=True)
    if not errors.read(1):
        return None
    errors.seek(0)
    write_whole(folder / ERRORS_NAME, errors, force=True)
    return folder / ERRORS_NAME


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


# Lines.


def _lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    for number, data in enumerate(file, 1):
        if not data.strip():
            continue
        try:
            line = json.loads(data)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise CommandFailed(f"line {number} of the results is no JSON object")
        yield line


def custom_id_of(line: Mapping[str, Any]) -> str:
    """The line's `custom_id`; of a broken one without any, its number."""
    if isinstance(custom_id := line.get("custom_id"), str):
        return custom_id
    error = line.get("error")
    number = error.get("line") if isinstance(error, dict) else None
    return f"line {number}" if number is not None else ""


def text_of(line: Mapping[str, Any]) -> str:
    """The text that a result holds, of any endpoint; vectors as JSON."""
    response = line.get("response")
    if not isinstance(response, dict) or not 200 <= _number(response.get("status_code")) < 300:
        return ""
    body = response.get("body")
    if not isinstance(body, dict):
        return ""
    if isinstance(choices := body.get("choices"), list):
        first = choices[0] if choices and isinstance(choices[0], dict) else {}
        message = first.get("message")
        return _plain(message.get("content") if isinstance(message, dict) else first.get("text"))
    if isinstance(items := body.get("output"), list):
        return "".join(
            _plain(item.get("content"))
            for item in items
            if isinstance(item, dict) and item.get("type") == "message"
        )
    if "content" in body:
        return _plain(body["content"])
    if isinstance(data := body.get("data"), list):
        vectors = [one.get("embedding") for one in data if isinstance(one, dict)]
        return json.dumps(vectors[0] if len(vectors) == 1 else vectors)
    return ""


def error_of(line: Mapping[str, Any]) -> str:
    """Why a line has no result; empty, if it has one."""
    error = line.get("error")
    if error is None:
        response = line.get("response")
        if not isinstance(response, dict) or 200 <= _number(response.get("status_code")) < 300:
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


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


# Files.


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
    return CommandFailed(
        f"{path} is there already: name another place with --output, or use --force", status=2
    )
