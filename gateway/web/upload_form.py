"""A form with a file (multipart/form-data, RFC 7578), parsed while it arrives.

The file's bytes go on as they come; of the other fields only short values are kept. Parsing takes
the time of a search for the boundary, so it is done on the thread that writes the file.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway import errors
from gateway.errors import GatewayError
from gateway.proxy.inbound import multipart
from gateway.proxy.inbound.multipart import (
    LONGEST_FIELD_HEADERS,
    LONGEST_PADDING,
    MOST_FORM_FIELDS,
    form_error,
    parse_field_head,
)
from gateway.request import Headers

LONGEST_VALUE = 4 * 1024
"""Bytes of a field that is no file."""

LONGEST_NAME = 255
"""Characters of a file's name."""

FORM_BYTES = 64 * 1024
"""Bytes of a form besides its file."""

UNNAMED = "upload"
"""The name of a file whose client has sent none."""


def boundary_of(headers: Headers) -> bytes:
    """The boundary of a form. Raises: GatewayError 400, 415."""
    types = [value for name, value in headers if name == b"content-type"]
    value = types[0] if len(types) == 1 else b""
    if value.partition(b";")[0].strip().lower() != b"multipart/form-data":
        raise GatewayError(
            415,
            "unsupported_media_type",
            "Send a form: 'Content-Type: multipart/form-data', with the fields 'purpose' and "
            "'file'.",
            retryable=False,
        )
    boundary = multipart.boundary_of(value)
    if boundary is None:
        raise form_error("its Content-Type has no boundary")
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
        self._name: str | None = None
        """The field that is being read; None: its bytes are the file's."""
        self._value = bytearray()
        self._mark = b"\r\n--" + boundary
        self._pending = bytearray(b"\r\n")
        """What has come and was not understood yet; a boundary begins with the line end before."""
        self._step: Callable[[], bool] = self._skip_preamble
        """Reads on; returns False if it needs more bytes."""

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises: GatewayError 400, and what the callables raise."""
        self._pending += data
        while self._step():
            pass

    def end(self) -> None:
        """The body is complete. Raises: GatewayError 400, if the form is not."""
        if self._step != self._skip_epilogue:
            raise form_error("its last boundary is missing")
        if self.file_name is None:
            raise errors.invalid_request("The form has no field 'file'.", "file")

    def _take(self, size: int) -> bytes:
        taken = bytes(self._pending[:size])
        del self._pending[:size]
        return taken

    def _take_content(self) -> tuple[bytes, bool]:
        """What certainly precedes the next boundary; whether that follows, which is taken too."""
        at = self._pending.find(self._mark)
        if at < 0:
            return self._take(max(0, len(self._pending) - len(self._mark) + 1)), False
        content = self._take(at)
        self._take(len(self._mark))
        self._step = self._read_delimiter_end
        return content, True

    def _skip_preamble(self) -> bool:
        return self._take_content()[1]

    def _skip_epilogue(self) -> bool:
        self._pending.clear()
        return False

    def _read_delimiter_end(self) -> bool:
        """Read the rest of a boundary's line, but for its end."""
        line, found, _ = self._pending.partition(b"\r\n")
        if line.startswith(b"--"):
            self._step = self._skip_epilogue
            return True
        # A hyphen may become two, and a carriage return a line's end.
        if line.rstrip(b"\r").strip(b" \t-") or len(line) > LONGEST_PADDING:
            raise form_error("a boundary's line does not end with it")
        if not found:
            return False
        if line.strip(b" \t"):
            raise form_error("a boundary's line does not end with it")
        self._take(len(line))
        self._step = self._read_head
        return True

    def _read_head(self) -> bool:
        end = self._pending.find(b"\r\n\r\n", 0, LONGEST_FIELD_HEADERS)
        if end < 0:
            if len(self._pending) >= LONGEST_FIELD_HEADERS:
                raise form_error("a field has no headers, or too many")
            return False
        value = end + len(b"\r\n")
        if len(self._pending) < value + len(self._mark):
            return False
        # The empty line's end is the boundary's where there is no value.
        has_value = not self._pending.startswith(self._mark, value)
        head = self._take(end)[2:]
        self._take(4 if has_value else 2)
        self._begin_field(head)
        self._step = self._read_value
        return True

    def _begin_field(self, raw_head: bytes) -> None:
        self._count += 1
        if self._count > MOST_FORM_FIELDS:
            raise form_error(f"it has more than {MOST_FORM_FIELDS} fields")
        head = parse_field_head(raw_head)
        for line in head.lines:
            name, _, value = line.lower().partition(b":")
            if name == b"content-transfer-encoding" and value.strip() not in _PLAIN:
                raise form_error("a field has a Content-Transfer-Encoding")
        self._value.clear()
        self._name = head.name.decode("utf-8", "replace")
        if self._name != "file":
            if self._name in self.values:
                raise form_error(f"it has the field '{errors.truncate_echo(self._name)}' twice")
            return
        if self.file_name is not None:
            raise errors.invalid_request("The form has more than one file.", "file")
        self._name = None
        self.file_name = _clean_name(head.parameters.get(b"filename", b""))
        self._begin_file()

    def _read_value(self) -> bool:
        content, ended = self._take_content()
        if self._name is None:
            if content:
                self._write_file(content)
            return ended
        self._value += content
        if len(self._value) > LONGEST_VALUE:
            shown = errors.truncate_echo(self._name)
            raise form_error(f"the field '{shown}' is longer than {LONGEST_VALUE} bytes")
        if ended:
            self.values[self._name] = self._value.decode("utf-8", "replace")
        return ended


_PLAIN = frozenset({b"", b"7bit", b"8bit", b"binary"})


def _clean_name(raw: bytes) -> str:
    """The last part of a path, without what can't be shown."""
    text = raw.replace(b'\\"', b'"').decode("utf-8", "replace")
    text = text.replace("\\", "/").rpartition("/")[2]
    return "".join(one for one in text if one.isprintable())[:LONGEST_NAME] or UNNAMED
