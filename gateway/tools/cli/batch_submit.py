"""Prepares an input by the options of `batch submit`, and sends it: once, whatever is repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.tools.cli.batch_client import BatchClient, GatewayAway, Patience
from gateway.tools.cli.batch_input import (
    CHAT,
    FolderOptions,
    PreparedInput,
    Problems,
    RequestShape,
    TableOptions,
    kind_of,
    prepare_folder,
    prepare_lines,
    prepare_table,
)
from gateway.tools.cli.batch_options import InputKind
from gateway.tools.cli.batch_progress import UploadProgress
from gateway.tools.cli.batch_templates import (
    LONGEST_TEMPLATE,
    PromptTemplate,
    TemplateError,
    parse_template,
)
from gateway.tools.cli.terminal import CommandFailed, print_note

LONGEST_STEM = 100
"""Characters of an upload's name."""


@dataclass(frozen=True, slots=True)
class InputOptions:
    """What the command's user says of the input."""

    endpoint: str | None = None
    kind: InputKind | None = None
    template: str | None = None
    template_file: Path | None = None
    id_column: str | None = None
    delimiter: str | None = None
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    largest_text: int = 512 << 10
    strict: bool = False


def prepare(source: str, chosen: InputOptions, problems: Problems) -> PreparedInput:
    """The input as JSON lines, checked. Raises CommandFailed."""
    kind = kind_of(source, chosen.kind)
    if kind is InputKind.JSONL:
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
    if kind is InputKind.FOLDER:
        for name, value in (("--id-column", chosen.id_column), ("--delimiter", chosen.delimiter)):
            if value is not None:
                raise CommandFailed(f"{name}: a folder has no columns", status=2)
        options = FolderOptions(template, shape, chosen.largest_text, chosen.strict)
        return prepare_folder(source, options, problems)
    delimiter = chosen.delimiter or ("\t" if Path(source).suffix.lower() == ".tsv" else ",")
    if len(delimiter) != 1 or delimiter in '\r\n"':
        raise CommandFailed(f"--delimiter {delimiter!r}: must be one character", status=2)
    return prepare_table(
        source, TableOptions(template, shape, chosen.id_column, delimiter), problems
    )


def _template(chosen: InputOptions) -> PromptTemplate:
    if (chosen.template is None) == (chosen.template_file is None):
        raise CommandFailed(
            "a table or a folder needs --template 'Summarise: {text}', or --template-file",
            status=2,
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


def submit_input(
    client: BatchClient,
    found: PreparedInput,
    fields: Mapping[str, Any],
    key: str,
    patience: Patience,
) -> dict[str, Any]:
    """Upload the input and create its batch. Raises CommandFailed.

    An upload is found again by its name, which has a hash of its bytes, and a batch by its
    idempotency key: what is repeated after a lost answer makes nothing twice.
    """
    name = upload_name(found)
    is_repeated = not key.startswith("cli-")

    def upload() -> dict[str, Any]:
        nonlocal is_repeated
        if is_repeated and (earlier := client.find_upload(name, found.size)) is not None:
            return earlier
        is_repeated = True
        with UploadProgress(found.file, found.size) as progress:
            return client.upload(progress.file, name)

    uploaded = patience.call(upload)
    asked = {"input_file_id": uploaded.get("id"), "endpoint": found.endpoint, **fields}
    try:
        return patience.call(lambda: client.create(asked, key))
    except (GatewayAway, KeyboardInterrupt):
        print_note(
            f"whether the batch was made is not known; the same command with "
            f"--idempotency-key {key} makes no second one"
        )
        raise


def upload_name(found: PreparedInput) -> str:
    """The name of an upload: the same for the same bytes."""
    stem = "".join(c if c.isprintable() and c not in '"\\/' else "_" for c in found.stem)
    return f"{stem[:LONGEST_STEM]}-{found.sha256[:16]}.jsonl"
