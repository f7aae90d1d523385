"""The bodies of message batches: every cut gives the same lines, every fault an error."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from gateway.errors import GatewayError
from gateway.web.message_batches import MessageBatchBody
from tests.each_case import each_case

TEXTS = ["", "a", 'q"\\', "{[", "]}", "ä\u2028\x7f", "\\u0041", "\n\t", "x" * 300, '\\"', "😀"]


def split(*pieces: bytes, most_lines: int = 100, line_bytes: int = 4096) -> list[bytes]:
    written: list[bytes] = []
    body = MessageBatchBody(written.append, most_lines=most_lines, line_bytes=line_bytes)
    for piece in pieces:
        body.feed(piece)
    body.end()
    lines = b"".join(written).splitlines(keepends=True) if written else []
    assert body.count == b"".join(written).count(b"\n")
    return lines


def refused(*pieces: bytes, **bounds: int) -> str:
    with pytest.raises(GatewayError) as found:
        split(*pieces, **bounds)
    assert found.value.status == 400
    return found.value.message


def one(**fields: Any) -> bytes:
    return json.dumps({"requests": [fields]}).encode()


def test_requests_become_lines_of_files() -> None:
    given = b"""
    {"requests" : [ {"custom_id": "a-1", "params": {"max_tokens": 1.50e2,
        "messages": [ {"role": "user", "content": "Hi\\n \\u00e4 {["} ] } },
      {"params":{},"custom_id":"b"}] }
    """
    assert split(given) == [
        (
            b'{"custom_id":"a-1","method":"POST","url":"/v1/messages","body":{"max_tokens":1.50e2,'
            b'"messages":[{"role":"user","content":"Hi\\n \\u00e4 {["}]}}\n'
        ),
        b'{"custom_id":"b","method":"POST","url":"/v1/messages","body":{}}\n',
    ]


def test_fields_of_ours_are_kept_in_any_order() -> None:
    body = MessageBatchBody(lambda _: None, most_lines=2, line_bytes=100)
    body.feed(b'{"webhook_url":"http://x/\\u00e4","requests":[{"custom_id":"a","params":{}}],')
    body.feed(b'"completion_window":null}')
    body.end()
    assert body.fields == {"webhook_url": "http://x/ä", "completion_window": None}
    assert body.count == 1


def test_every_cut_gives_the_same_lines() -> None:
    given = b' {"requests": [{"custom_id":"a","params":{"x":"\\"}\\\\"}} , \n'
    given += b'{"custom_id":"b","params":{"y":[1,{"z":"]"}]}}],"webhook_url" : "u" } '
    whole = split(given)
    assert len(whole) == 2
    for first in range(len(given) + 1):
        for second in range(first, len(given) + 1):
            assert split(given[:first], given[first:second], given[second:]) == whole


def any_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 5 else 5)
    if kind == 5:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(TEXTS): any_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return (rng.choice(TEXTS), rng.choice(TEXTS), rng.randrange(-9, 10**12), True, None)[kind]


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(12)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@each_case("seed", range(300))
def test_any_requests_in_any_cuts_come_out_as_they_went_in(seed: int) -> None:
    rng = random.Random(seed)
    requests = [
        {"custom_id": f"id_{number}", "params": {"v": any_value(rng), "w": any_value(rng)}}
        for number in range(rng.randrange(1, 9))
    ]
    text = json.dumps(
        {"requests": requests},
        ensure_ascii=bool(rng.randrange(2)),
        indent=rng.choice([None, 0, 2, "\t"]),
    )
    lines = split(*cut(rng, text.encode()), line_bytes=1 << 20)
    found = [json.loads(line) for line in lines]
    assert [(line["custom_id"], line["body"]) for line in found] == [
        (request["custom_id"], request["params"]) for request in requests
    ]


@each_case("seed", range(300))
def test_broken_bytes_are_refused_where_json_is_and_in_every_cut_alike(seed: int) -> None:
    rng = random.Random(seed)
    requests = [{"custom_id": f"{number}", "params": {"v": any_value(rng)}} for number in range(3)]
    given = bytearray(json.dumps({"requests": requests}).encode())
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(given))
        given[at : at + rng.randrange(3)] = bytes(
            rng.choice(b'{}[]",:\\ 0ant\xff\n') for _ in range(rng.randrange(3))
        )

    def outcome(pieces: list[bytes]) -> list[bytes] | str:
        try:
            return split(*pieces)
        except GatewayError as error:
            return error.message

    whole = outcome([bytes(given)])
    for _ in range(5):
        assert outcome(cut(rng, bytes(given))) == whole
    if not isinstance(whole, str):
        parsed = msgspec.json.decode(bytes(given))
        assert [msgspec.json.decode(line)["body"] for line in whole] == [
            request["params"] for request in parsed["requests"]
        ]


@each_case(
    ("given", "message"),
    [
        (b"", "it ends too early"),
        (b"[]", "it must be an object"),
        (b'{"requests":[{"custom_id":"a","params":{}}]', "it ends too early"),
        (b'{"requests":[{"custom_id":"a","params":{}}]} x', "something follows its end"),
        (b'{"requests":[{"custom_id":"a","params":{}},]}', "Input should be a valid dictionary"),
        (b'{"requests":[{"custom_id":"a","params":{}}],}', "a key is expected"),
        (b'{"requests":[{"custom_id":"a","params":{}}] "x":1}', "',' or '}' is expected"),
        (b'{"requests":[{"custom_id":"a","params":{}} {}]}', "',' or ']' is expected"),
        (b'{"requests" [1]}', "':' is expected"),
        (b'{"requests":[],"requests":[]}', "twice"),
        (b'{"requests":[{"custom_id":"a","params":{]}]}', "requests.0 can't be read"),
        (b'{"requests":[{"custom_id":"a","params":{"a":"\xff"}}]}', "requests.0 can't be read"),
        (b'{"requests":[{"custom_id":"a","params":{"a":"\n"}}]}', "requests.0 can't be read"),
        (b'{"webhook_url":tru,"requests":[]}', "a field can't be read"),
        (b"{}", "requests: Field required"),
        (b'{"requests":[]}', "requests: List should have at least 1 item after validation, not 0"),
        (b'{"requests":{}}', "requests: Input should be a valid list"),
        (b'{"requests":[1]}', "requests.0: Input should be a valid dictionary"),
        (b'{"request":[]}', "request: Extra inputs are not permitted"),
        (one(params={}), "requests.0.custom_id: Field required"),
        (one(custom_id=1, params={}), "requests.0.custom_id: Input should be a valid string"),
        (
            one(custom_id="a b", params={}),
            "requests.0.custom_id: String should match pattern '^[a-zA-Z0-9_-]{1,64}$'",
        ),
        (one(custom_id="a\n", params={}), "should match pattern"),
        (one(custom_id="", params={}), "should match pattern"),
        (
            one(custom_id="a" * 65, params={}),
            "requests.0.custom_id: String should have at most 64 characters",
        ),
        (one(custom_id="a"), "requests.0.params: Field required"),
        (one(custom_id="a", params=[]), "requests.0.params: Input should be a valid dictionary"),
        (one(custom_id="a", params={}, x=1), "requests.0.x: Extra inputs are not permitted"),
        (
            b'{"requests":[{"custom_id":"dup","params":{}},{"custom_id":"dup","params":{}}]}',
            "requests: custom_id's must be unique within a batch. Duplicate custom_id found: dup",
        ),
        (
            b'{"requests":[{"custom_id":"a","params":' + b'{"a":' * 90000 + b"1" + b"}" * 90000
            + b"}]}",
            "requests.0 can't be read",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(given: bytes, message: str) -> None:
    told = refused(given, line_bytes=1 << 20)
    assert message in told
    pieces = [given[at : at + 1] for at in range(len(given))]
    assert refused(*pieces[:1000], given[1000:], line_bytes=1 << 20) == told


def test_what_is_too_long_is_refused_before_it_has_come() -> None:
    assert len(split(one(custom_id="a" * 64, params={}))) == 1
    begun = b'{"requests":[{"custom_id":"a","params":{"x":"'
    assert "requests.0: It is longer than 1000 bytes ('batches.line_bytes')" in refused(
        begun, *[b"x" * 100] * 11, line_bytes=1000
    )
    assert "webhook_url: It is longer" in refused(b'{"webhook_url":"', *[b"x" * 1000] * 5)
    assert "It is longer" in refused(b'{"', *[b"x" * 1000] * 5)
    requests = ",".join(f'{{"custom_id":"{n}","params":{{}}}}' for n in range(4))
    assert "requests: List should have at most 3 items" in refused(
        f'{{"requests":[{requests}]}}'.encode(), most_lines=3
    )
