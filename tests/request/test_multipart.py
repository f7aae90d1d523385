"""A form names its model in one way only, and its bytes are forwarded unchanged."""

from __future__ import annotations

import contextlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.request.multipart import parse_multipart, with_model
from gateway.terms import Headers
from tests.each_case import each_case

HEADERS = [(b"content-type", b"multipart/form-data; boundary=b")]
FILE = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a \\"b\\".wav"; '
    b"filename*=UTF-8''a.wav\r\nContent-Type: audio/wav\r\n\r\n\x00\xff\r\n\r\n--\r\n"
)
END, CRLF2 = b"--b--\r\n", b"\r\n\r\n"


def model_of(body: bytes, headers: Headers = HEADERS) -> str | None:
    return parse_multipart(body, headers)[1].model


def field(value: bytes, name: bytes = b"model") -> bytes:
    return b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name, value)


def test_a_form_of_a_real_client_is_read() -> None:
    request = httpx.Request(
        "POST",
        "http://x",
        data={"model": "wh\u00e4le", "language": ""},
        files={"file": b"RIFF" * 9},
    )
    headers = [(name.lower(), value) for name, value in request.headers.raw]
    assert model_of(request.read(), headers) == "wh\u00e4le"


@each_case("fields", [field(b"m") + FILE, FILE + field(b"m")])
@each_case("new", ["m", "longer", "\u00e4", ""])
def test_only_the_name_is_changed(fields: bytes, new: str) -> None:
    body = fields + END
    assert model_of(body) == "m"
    assert parse_multipart(body, HEADERS)[0] == body
    assert (
        with_model(body, new)
        == fields.replace(b"\r\n\r\nm\r\n", b"\r\n\r\n%b\r\n" % new.encode()) + END
    )


def test_a_form_without_a_model_gets_one() -> None:
    assert model_of(FILE + END) is None
    assert model_of(field(b"") + END) is None
    assert model_of(with_model(FILE + END, "m")) == "m"


@each_case(
    "form",
    [
        b"text before, that nobody reads\r\n\r\n" + field(b"m") + FILE + END,
        b"\r\n" + field(b"m") + FILE + END,
        (field(b"m") + FILE).replace(b"--b", b"--b \t ") + END,
        (field(b"m") + FILE + END).replace(b"; ", b";\r\n\t"),
        field(b"m").replace(b'"model"', b"model") + FILE + END,
        field(b"m").replace(b'name="model"', b'x=y; NAME="model"') + FILE + END,
        b"text\r\n" + field(b"m") + FILE + END[:-2] + b"\t\r\ntext behind",
    ],
)
def test_a_form_that_few_servers_read_gets_the_shape_that_all_read(form: bytes) -> None:
    body, parsed = parse_multipart(form, HEADERS)
    assert parsed.model == "m"
    assert parse_multipart(body, HEADERS)[0] == body
    assert body.startswith(b'--b\r\nContent-Disposition: form-data; name="model"')
    assert body.endswith(FILE[FILE.index(b"\x00") :] + END)
    assert b'; name="file"; filename="a \\"b\\".wav"; filename*=UTF-8\'\'a.wav\r\n' in body
    assert model_of(with_model(body, "n")) == "n"


def test_a_form_of_usual_shape_stays_as_it_is() -> None:
    for body in (field(b"m") + FILE + END, FILE + END, field(b"m") + END + b"text behind"):
        assert parse_multipart(body, HEADERS)[0] is body
    for content_type in (
        b'Multipart/Form-Data;boundary="b"',
        b"multipart/form-data; a=b; boundary=b;",
    ):
        assert model_of(field(b"m") + END, [(b"content-type", content_type)]) == "m"


@each_case(
    "body",
    [
        b"", b"{}", b"--b", b"--b\r\n", END, field(b"m"), b"preamble" + field(b"m") + END,
        field(b"m") + END + field(b"n") + END, field(b"m").replace(b"--b", b"--bb") + END,
        field(b"m").replace(b"--b\r", b"--b" + b" " * 2000 + b"\r") + END,
        field(b"m").replace(b'"model"', b'"x";\r\n name="model"') + END,
        field(b"m") + field(b"n") + END, field(b"m") + field(b"n", b"MODEL") + END,
        field(b"m\r\nn") + END, field(b"\xff") + END, field(b"m" * 600) + END,
        field(b"m").replace(b"form-data", b"attachment") + END,
        field(b"m").replace(b'"model"', b'"x"; name="model"') + END,
        field(b"m").replace(b'name="model"', b"name*=UTF-8''model") + END,
        field(b"m").replace(CRLF2, b'\r\nContent-Disposition: form-data; name="x"' + CRLF2) + END,
        field(b"a").replace(CRLF2, b'\r\nX: y\nContent-Disposition: form-data; name="x"' + CRLF2)
        + END,
        field(b"m").replace(CRLF2, b"\r\nX: " + b"y" * 5000 + CRLF2) + END,
        field(b'x\n--b\nContent-Disposition: form-data; name="model"\n\nm', b"file") + END,
        b"".join(field(b"", b"x%d" % number) for number in range(70)) + END,
    ],
)  # fmt: skip
def test_a_form_that_parsers_read_in_two_ways_is_refused(body: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        parse_multipart(body, HEADERS)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")


@each_case(
    "content_type",
    [
        b"application/json", b"multipart/form-data", b"multipart/mixed; boundary=b",
        b"multipart/form-data; boundary=" + b"b" * 71, b"multipart/form-data; boundary",
        b"multipart/form-data; boundary=b; boundary=c", b'multipart/form-data; boundary="b "',
        b'multipart/form-data; x="boundary=c"; boundary=b',
    ],
)  # fmt: skip
def test_another_content_type_is_refused(content_type: bytes) -> None:
    with pytest.raises(GatewayError, match="multipart/form-data"):
        parse_multipart(field(b"m") + END, [(b"content-type", content_type)])
    with pytest.raises(GatewayError, match="multipart/form-data"):
        parse_multipart(field(b"m") + END, [])


@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_are_a_form_or_a_400(noise: bytes, at: int) -> None:
    body = field(b"m") + FILE + END
    body = body[:at] + noise + body[at:]
    with contextlib.suppress(GatewayError):
        plain, parsed = parse_multipart(body, HEADERS)
        assert model_of(with_model(plain, parsed.model or "")) == parsed.model
