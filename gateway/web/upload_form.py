"""A form with a file (multipart/form-data, RFC 7578), parsed while it arrives.

The file's bytes go on as they come; of the other fields only short values are kept. Parsing takes
the time of a search for the boundary, so it is done on the thread that writes the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from gateway import errors
from gateway.errors import GatewayError
from gateway.request import Headers

MOST_FIELDS = 64

LONGEST_VALUE = 4 * 1024
"""Bytes of a field that is no file."""

LONGEST_HEADER = 4 * 1024
"""Bytes of a line of a field's head, which holds the file's name."""

LONGEST_NAME = 255
"""Characters of a file's name."""

FORM_BYTES = 64 * 1024
"""Bytes of a form besides its file."""

UNNAMED = "upload"
"""The name of a file whose client has sent none."""

# It warns of every form that it refuses, and quotes bytes of it.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


def boundary_of(headers: Headers) -> bytes:
    """The boundary of a form. Raises: GatewayError 400, 415."""
    types = [value for name, value in headers if name == b"content-type"]
    kind, options = parse_options_header(types[0] if len(types) == 1 else b"")
    if kind != b"multipart/form-data":
        raise GatewayError(
            415,
            "unsupported_media_type",
            "Send a form: 'Content-Type: multipart/form-data', with the fields 'purpose' and "
            "'file'.",
            retryable=False,
        )
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise _invalid("its Content-Type has no boundary")
    return boundary


class UploadForm:
    """A form of which `write_file` gets the bytes of the field `file`.

    `begin_file` is called before the first of them. Both may raise what they like.
    """

    def __init__(
        self,
        boundary: bytes,
        write_file: Callable[[bytes], None],
        begin_file: Callable[[], None] = lambda: None,
    ) -> None:
        self.values: dict[str, str] = {}
        """The fields that are no files, complete so far."""
        self.file_name: str | None = None
        """The name of the file; None: none has come."""
        self._write_file = write_file
        self._begin_file = begin_file
        self._count = 0
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._name: str | None = None
        """The field that is being read; None: its bytes are the file's."""
        self._value = bytearray()
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_end": self._on_end,
            },
            max_header_count=8,
            max_header_size=LONGEST_HEADER,
        )

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises: GatewayError 400, and what the callables raise."""
        try:
            self._parser.write(data)
        except FormParserError:
            raise _invalid("its boundaries or headers are broken") from None

    def end(self) -> None:
        """The body is complete. Raises: GatewayError 400, if the form is not."""
        if not self._ended:
            raise _invalid("its last boundary is missing")
        if self.file_name is None:
            raise errors.invalid_request("The form has no field 'file'.", "file")

    def _on_part_begin(self) -> None:
        self._count += 1
        if self._count > MOST_FIELDS:
            raise _invalid(f"it has more than {MOST_FIELDS} fields")
        self._disposition = b""
        self._value.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        name, value = self._header_name.lower(), self._header_value
        self._header_name = self._header_value = b""
        if name == b"content-disposition":
            if self._disposition:
                raise _invalid("a field has two Content-Dispositions")
            self._disposition = value
        elif name == b"content-transfer-encoding" and value.strip().lower() not in _PLAIN:
            raise _invalid("a field has a Content-Transfer-Encoding")

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if kind != b"form-data" or name is None:
            raise _invalid("a field has no name")
        self._name = name.decode("utf-8", "replace")
        if self._name != "file":
            if self._name in self.values:
                raise _invalid(f"it has the field '{errors.truncate_echo(self._name)}' twice")
            return
        if self.file_name is not None:
            raise errors.invalid_request("The form has more than one file.", "file")
        self._name = None
        self.file_name = _clean_name(options.get(b"filename", b""))
        self._begin_file()

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self._write_file(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > LONGEST_VALUE:
            shown = errors.truncate_echo(self._name)
            raise _invalid(f"the field '{shown}' is longer than {LONGEST_VALUE} bytes")

    def _on_part_end(self) -> None:
        if self._name is not None:
            self.values[self._name] = self._value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._ended = True


_PLAIN = frozenset({b"", b"7bit", b"8bit", b"binary"})


def _clean_name(raw: bytes) -> str:
    """The last part of a path, without what can't be shown."""
    text = raw.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(one for one in text if one.isprintable())[:LONGEST_NAME] or UNNAMED


def _invalid(problem: str) -> GatewayError:
    return errors.invalid_request(f"The form can't be read: {problem}.")
