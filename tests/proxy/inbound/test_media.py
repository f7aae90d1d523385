"""Images and audio cost tokens by their size, read from the beginning of their base64."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.inbound.media import (
    AUDIO_CHUNK_TOKENS,
    MOST_IMAGE_TOKENS,
    SURE_IMAGE_TOKENS,
    UNREADABLE_IMAGE_TOKENS,
    MediaCost,
    measure_media,
)
from tests.each_case import each_case
from tests.proxy.pictures import bmp, data_url, gif, jpeg, png, wav, webp

IMAGES = [
    png(560, 280), gif(560, 280), bmp(560, 280), webp(b"VP8X", 560, 280), webp(b"VP8L", 560, 280),
    webp(b"VP8 ", 560, 280), jpeg(560, 280), jpeg(560, 280, before=1),
    jpeg(560, 280, before=60_000, marker=0xC0),
]  # fmt: skip


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def found(value: Any) -> MediaCost:
    return measure_media(json.dumps(value).encode())


@each_case("data", IMAGES)
def test_an_image_costs_a_token_per_patch(data: bytes) -> None:
    for padding in range(3):
        url = data_url(data + bytes(padding), "image/any")
        media = found([{"type": "image_url", "image_url": {"url": url}}])
        assert media.tokens == 20 * 10
        assert media.base64_bytes == len(url) - len("data:image/any;base64,")


@each_case(
    "part",
    [
        {"type": "image_url", "image_url": {"url": data_url(png(560, 280))}},
        {"type": "image_url", "image_url": data_url(png(560, 280))},
        {"type": "input_image", "image_url": data_url(png(560, 280))},
        {"source": {"type": "base64", "data": text_of(png(560, 280)), "media_type": "image/png"}},
        {"prompt_string": "see", "multimodal_data": [text_of(png(560, 280))]},
    ],
)
def test_images_are_found_in_every_apis_form(part: Any) -> None:
    assert found([part]).tokens == 200
    assert found({"content": [part, {"type": "text", "text": "and"}, part]}).tokens == 400


def test_all_images_of_a_list_count() -> None:
    images = [text_of(png(28, 28 * many)) for many in (10, 20, 30)]
    assert found({"multimodal_data": images}).tokens == 60
    assert measure_media(json.dumps({"data": images}, indent=1).encode()).tokens == 60


def test_escaped_slashes_hide_no_size() -> None:
    body = json.dumps({"url": data_url(gif(560, 280) + b"\xff" * 3000)}).replace("/", "\\/")
    assert measure_media(body.encode()).tokens == 200


def test_the_cost_is_bounded() -> None:
    assert found(data_url(png(100_000, 100_000))).tokens == MOST_IMAGE_TOKENS
    assert found(data_url(png(1, 1))).tokens == 8


@each_case(
    "data",
    [bytes(3000), b"\xff\xd8\xff" + bytes(3000), b"<svg>" + 99 * b"x", png(0, 0), b"\x89PNG"],
)
def test_an_image_of_unreadable_size_costs_a_usual_one(data: bytes) -> None:
    assert found(data_url(data)) == (len(text_of(data)), UNREADABLE_IMAGE_TOKENS, SURE_IMAGE_TOKENS)


def test_the_fewest_tokens_are_less() -> None:
    assert found(data_url(png(2000, 2000))).min_tokens == SURE_IMAGE_TOKENS
    assert found(data_url(png(56, 56))).min_tokens == 8


def test_audio_costs_by_its_length() -> None:
    for seconds, chunks in ((1, 1), (29, 1), (31, 2)):
        part = {"type": "input_audio", "input_audio": {"data": text_of(wav(seconds, 2000))}}
        assert found([part]).tokens == chunks * AUDIO_CHUNK_TOKENS
    assert found([{"data": text_of(b"ID3" + bytes(16_000 * 40))}]).tokens == 2 * AUDIO_CHUNK_TOKENS


def test_a_text_that_quotes_a_data_url_is_text() -> None:
    url = data_url(png(560, 280))
    assert found([{"text": f'<img src="{url}">'}]) == MediaCost()
    assert found([{"text": f"see {url}"}]) == MediaCost()
    assert found([{"text": json.dumps({"data": text_of(bytes(999))})}]) == MediaCost()


def test_other_data_is_no_image() -> None:
    assert found([{"data": "the quick brown fox jumps over the lazy dog " * 20}]) == MediaCost()
    assert found([{"data": {"type": "object"}}, {"data": "short"}]) == MediaCost()


@each_case(
    "body",
    [
        b";base64," * 500_000, b'"data:;base64,' * 300_000, b'"data"' + b" " * 4_000_000,
        b'"data":' * 500_000, b'"data":["' + b"A" * 64 + b'","' * 1_000_000,
        b'{"data":"' + b"A" * 4_000_000, b'{"data":"' + b"\\/" * 2_000_000 + b'"',
    ],
)  # fmt: skip
def test_measuring_takes_time_linear_in_the_length(body: bytes) -> None:
    began = time.process_time()
    measure_media(body)
    # Half a second; hours if the time grew with the square of the length.
    assert time.process_time() - began < 20


def test_a_jpeg_of_endless_segments_is_given_up() -> None:
    segments = b"\xff\xe1\x00\x02" * 100_000
    assert found(data_url(b"\xff\xd8" + segments)).tokens == UNREADABLE_IMAGE_TOKENS


@given(st.binary(max_size=300))
def test_any_bytes_cost_something_sane(data: bytes) -> None:
    for start in (b"", b"\xff\xd8\xff", b"RIFF", b"RIFF0000WEBPVP8 ", b"BM", b"\x89PNG\r\n\x1a\n"):
        media = found(data_url(start + data))
        assert 8 <= media.tokens <= max(MOST_IMAGE_TOKENS, 2 * AUDIO_CHUNK_TOKENS)
        assert 0 < media.min_tokens <= media.tokens


@given(st.text(max_size=400) | st.binary(max_size=400).map(lambda data: data.decode("latin-1")))
def test_any_text_can_be_measured(text: str) -> None:
    data = text.encode()
    assert 0 <= measure_media(data).base64_bytes <= len(data)
    assert (
        0
        <= measure_media(b'"data:;base64,' + data + b'","data":"' + data).base64_bytes
        <= 2 * len(data) + 30
    )
