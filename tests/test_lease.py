"""The messages to the scheduler are plain values, and a prompt's blocks the same everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import lease
from gateway.lease import (
    HASH_KEY_BYTES,
    AttemptCharge,
    AttemptReport,
    BatchRoom,
    ExpectedReading,
    Fault,
    KeyedHash,
    LeaseCaller,
    LeaseRequest,
    NodeError,
    PromptKey,
    QueuePosition,
    RequestSize,
    Tried,
    Usage,
    UsageReport,
    WantedNode,
    block_numbers,
)
from tests.forward.granted_lease import a_granted_lease, a_node_info
from tests.lease_requests import a_lease_request

KEY, OTHER_KEY = bytes(range(HASH_KEY_BYTES)), bytes(HASH_KEY_BYTES)
PARTS = st.lists(st.binary(max_size=80), max_size=12)
USAGE = Usage(12, 3, 40, {"prompt_n": 9, "predicted_ms": 812.5})
REQUEST = a_lease_request(
    prompt_key=PromptKey((1,), 1.0), resume_key=("model", None), time_limit=3.5
)
MESSAGES: list[Any] = [
    PromptKey((1, -2), 100.0, (200, 400), 410),
    REQUEST,
    REQUEST.caller,
    REQUEST.wanted,
    REQUEST.size,
    Tried().failed_on("a").refused_by("b").unsupported_by("c", "start it with --rerank"),
    QueuePosition("req_1", 3, 1.5),
    BatchRoom(16, 3, 2, 1, 4),
    a_node_info(silence_timeout=20.0, resume_key=("model", "Q4_0"), query="autoload=false"),
    a_granted_lease(fallback="gpu_full", seconds=2.5),
    ExpectedReading(40, 2.5, 30.0),
    NodeError(retry_after=2.0, lacks_endpoint=True, hint="start it with --embeddings"),
    AttemptReport(7, "reset", 200, True, False, True, Fault.NODE_OR_REQUEST),
    AttemptReport(8, "busy", 503, True, True, False, error=NodeError(is_loading=True)),
    USAGE,
    UsageReport(7, USAGE, None, 41),
    AttemptCharge(0.25, 12.5, 400, 100, 7),
]


def test_every_message_survives_a_wire_and_nobody_changes_it() -> None:
    for message in MESSAGES:
        received = msgspec.json.decode(msgspec.json.encode(message), type=type(message))
        assert msgspec.to_builtins(received) == msgspec.to_builtins(message)
        with pytest.raises((AttributeError, TypeError)):
            message.more = 1
    messages = {
        one
        for one in vars(lease).values()
        if isinstance(one, type) and (issubclass(one, msgspec.Struct) or one is Tried)
    }
    assert messages - {msgspec.Struct} == {type(message) for message in MESSAGES}
    # A node's connections ride along within a process alone.
    with pytest.raises(TypeError):
        msgspec.json.encode(a_node_info(connections=object()))


def test_a_lease_request_says_nothing_of_what_it_is_about() -> None:
    """Neither its path and headers nor its text: they are the proxy's."""
    parts = (LeaseRequest, LeaseCaller, WantedNode, RequestSize)
    fields = {one.name for part in parts for one in msgspec.structs.fields(part)}
    assert not fields & {"path", "header_lines", "body", "bodies", "prompt", "messages", "deadline"}


def test_what_was_tried_only_grows() -> None:
    tried = Tried().failed_on("a").refused_by("b").unsupported_by("c", "c lacks it")
    tried = tried.failed_on("d").unsupported_by("e", "e lacks it")
    assert tried.failed_nodes == {"a", "d"}
    assert tried.excluded_nodes == {"b"}
    assert tried.unsupported_nodes == {"c", "e"}
    assert tried.unsupported_hint == "e lacks it"


def test_only_a_request_to_a_model_of_a_router_has_a_query() -> None:
    plain, routed = a_node_info(), a_node_info("r1/a", query="autoload=false")
    assert plain.target("/props", "a") == b"/props"
    assert routed.target("/tokenize") == b"/tokenize?autoload=false"
    assert routed.target("/props", "a/ü&b") == b"/props?model=a%2F%C3%BC%26b&autoload=false"


# Keyed hashes.


@given(PARTS, PARTS)
def test_blocks_are_equal_as_far_as_the_parts_and_the_keys_are_and_no_further(
    one: list[bytes], other: list[bytes]
) -> None:
    keyed_hash = KeyedHash(KEY)
    first, second = (keyed_hash.chain(b"", parts) for parts in (one, other))
    equal = True
    for a, b, x, y in zip(one, other, first, second, strict=False):
        equal = equal and a == b
        assert (x == y) is equal
    assert not set(first) & set(KeyedHash(OTHER_KEY).chain(b"", one))


@given(PARTS, st.integers(0, 12))
def test_chains_and_digests_do_not_depend_on_how_their_bytes_come(
    parts: list[bytes], cut: int
) -> None:
    keyed_hash = KeyedHash(KEY)
    whole = keyed_hash.chain(b"model", parts)
    begun = keyed_hash.chain(b"model", parts[:cut])
    assert begun + keyed_hash.chain([b"model", *begun][-1], parts[cut:]) == whole
    assert keyed_hash.digest(map(memoryview, parts)) == keyed_hash.digest([b"".join(parts)])


def test_numbers_fit_into_64_bits_with_a_sign() -> None:
    numbers = block_numbers(KeyedHash(KEY).chain(b"", [bytes([n]) for n in range(200)]))
    assert all(-(1 << 63) <= number < 1 << 63 for number in numbers)
    assert min(numbers) < 0 < max(numbers)
    assert len(set(numbers)) == 200


ANOTHER_PROCESS = """
import json, sys
from gateway.lease import KeyedHash, block_numbers
from gateway.request.prompt_key import VolatileLines, build_prompt_key
from gateway.request.routes import ROUTES
key, body = bytes.fromhex(sys.argv[1]), sys.argv[2].encode()
found = build_prompt_key(body, ROUTES["/v1/chat/completions"], "m", VolatileLines(), KeyedHash(key))
print(json.dumps(found.blocks))
"""


def test_processes_with_one_key_make_the_same_blocks_of_a_prompt_and_each_has_its_own() -> None:
    message = {"role": "user", "content": "a prompt that is worth to be cached; " * 60}
    body = json.dumps({"messages": [message]})

    def blocks(key: bytes, seed: str) -> list[int]:
        command = [sys.executable, "-c", ANOTHER_PROCESS, key.hex(), body]
        done = subprocess.run(
            command, capture_output=True, env={"PYTHONHASHSEED": seed}, check=True, timeout=60
        )
        found: list[int] = json.loads(done.stdout)
        return found

    one, same, other = blocks(KEY, "1"), blocks(KEY, "2"), blocks(OTHER_KEY, "1")
    assert len(one) > 3
    assert one == same
    assert not set(one) & set(other)
    assert KeyedHash().key != KeyedHash().key
    assert len(KeyedHash().key) == HASH_KEY_BYTES
