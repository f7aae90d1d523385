from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.web.files import UNNAMED, UploadForm, boundary_of

CRLF = b"\r\n"


def a_part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + CRLF


END = b"--XX--\r\n"


def parsed(body: bytes, cuts: list[int] | None = None) -> tuple[UploadForm, bytes]:
    """Feed the body cut at these places; returns the form and the file's bytes."""
    file = bytearray()

    def write(data: bytes) -> None:
        file.extend(data)

    form = UploadForm(b"XX", write)
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts or ())})
    for start, end in itertools.pairwise(places):
        form.feed(body[start:end])
    form.end()
    return form, bytes(file)


# Bytes that look like boundaries, and others.
NASTY = st.lists(
    st.sampled_from([b"\r", b"\n", b"-", b"--XX", b"\r\n--X", b"\r\n--", b"XX", b"a", b"\0"]),
    max_size=30,
).map(b"".join)


@given(NASTY, st.lists(st.integers(0, 10_000), max_size=20))
def test_the_file_comes_out_as_it_went_in_however_it_is_cut(
    content: bytes, cuts: list[int]
) -> None:
    if b"\r\n--XX" in CRLF + content:
        return  # No client chooses a boundary that is in the file.
    body = a_part("purpose", b"batch") + a_part("file", content, '; filename="f"') + END
    form, file = parsed(body, cuts)
    assert file == content
    assert (form.values, form.file_name) == ({"purpose": "batch"}, "f")


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_what_mime_allows_about_boundaries_is_read(cuts: list[int]) -> None:
    plain = a_part("purpose", b"batch") + a_part("file", b"\r\n-\r\n", '; filename="f"') + END
    for body in (
        b"text before\r\nthat nobody reads\r\n" + plain,
        CRLF + plain,
        plain.replace(b"--XX\r", b"--XX \t\r"),
        plain.replace(b"; ", b";\r\n ").replace(b"Content-D", b"CONTENT-D"),
        plain.replace(b'name="purpose"', b"name=purpose"),
        plain.replace(b'name="file"; filename="f"', b'FileName=f; name="file"'),
        plain.removesuffix(CRLF) + b" \r\ntext behind\r\n--XX\r\n",
        plain.removesuffix(CRLF),
    ):
        form, file = parsed(body, cuts)
        assert (file, form.values) == (b"\r\n-\r\n", {"purpose": "batch"}), body
        assert form.file_name == "f"
    form, file = parsed(plain.replace(b"\r\n\r\nbatch", b"\r\n"), cuts)  # a part without a body
    assert (file, form.values) == (b"\r\n-\r\n", {"purpose": ""})


@given(st.binary(max_size=300), st.lists(st.integers(0, 10_000), max_size=5))
def test_nothing_but_the_gateways_errors_comes_of_any_bytes(body: bytes, cuts: list[int]) -> None:
    for begin in (b"", b"--XX\r\n", a_part("file", b"x")):
        try:
            parsed(begin + body, cuts)
        except GatewayError as error:
            assert error.status == 400  # noqa: PT017


@pytest.mark.parametrize(
    ("given_name", "kept"),
    [
        ("a.jsonl", "a.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\dir\\a.txt", "a.txt"),
        ("Zeilen ä.jsonl", "Zeilen ä.jsonl"),
        ("a\tb\x7f.txt", "ab.txt"),
        ("", UNNAMED),
        ("..", ".."),
        ("n" * 300, "n" * 255),
    ],
)
def test_a_files_name_is_the_end_of_a_path_that_can_be_shown(given_name: str, kept: str) -> None:
    body = a_part("file", b"x", f'; filename="{given_name}"') + END
    assert parsed(body)[0].file_name == kept


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"XX\r\n",
        a_part("file", b"x"),
        a_part("purpose", b"batch") + END,
        a_part("file", b"x") + a_part("file", b"y") + END,
        a_part("purpose", b"a") + a_part("purpose", b"b") + a_part("file", b"x") + END,
        a_part("purpose", b"a" * 4097) + a_part("file", b"x") + END,
        b"".join(a_part(f"f{number}", b"") for number in range(65)) + a_part("file", b"x") + END,
        b"--XX\r\nContent-Type: text/plain\r\n\r\nx\r\n" + END,
        b'--XX\r\nContent-Disposition: attachment; name="file"\r\n\r\nx\r\n' + END,
        b"--XX\r\nContent-Transfer-Encoding: base64\r\n"
        b'Content-Disposition: form-data; name="file"\r\n\r\nx\r\n' + END,
        b"--XX\r\n" + b"a: b\r\n" * 900 + b"\r\nx\r\n" + END,
        b"text before" + a_part("file", b"x") + END,
        a_part("file", b"x").replace(b"XX\r", b"XX" + b" " * 2000 + b"\r") + END,
        a_part("file", b"x").replace(b"XX\r", b"XX-\r") + END,
        a_part("file", b"x").replace(b"XX\r", b"XX \r\r") + END,
    ],
)
def test_a_form_that_is_wrong_or_too_large_is_refused(body: bytes) -> None:
    with pytest.raises(GatewayError) as refused:
        parsed(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")


def test_the_file_is_announced_before_its_first_byte() -> None:
    seen: list[str] = []
    form = UploadForm(b"XX", lambda _: seen.append("bytes"), lambda: seen.append("begin"))
    file = a_part("file", b"x") + END
    form.feed(a_part("purpose", b"batch") + file[:10])
    assert (seen, form.values) == ([], {"purpose": "batch"})
    form.feed(file[10:])
    assert seen == ["begin", "bytes"]


def test_what_a_callable_raises_passes() -> None:
    def full(_: bytes) -> None:
        raise OSError

    form = UploadForm(b"XX", full)
    with pytest.raises(OSError):
        form.feed(a_part("file", b"x") + END)


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b"multipart/form-data; boundary=XX", None),
        (b'Multipart/Form-Data; charset=utf-8; boundary="XX"', None),
        (b"multipart/form-data;boundary=XX;", None),
        (b"multipart/form-data", 400),
        (b"multipart/form-data; boundary=", 400),
        (b"multipart/form-data; boundary=" + b"x" * 71, 400),
        (b"multipart/mixed; boundary=XX", 415),
        (b"application/json", 415),
        (b"", 415),
    ],
)
def test_the_boundary_is_that_of_the_content_type(value: bytes, status: int | None) -> None:
    headers = [(b"content-type", value)]
    if status is None:
        assert boundary_of(headers) == b"XX"
        return
    with pytest.raises(GatewayError) as refused:
        boundary_of(headers)
    assert refused.value.status == status
    with pytest.raises(GatewayError):
        boundary_of(headers * 2)
