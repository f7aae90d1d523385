"""The messages to the scheduler are plain values, and a prompt's blocks the same everywhere."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.lease import (
    HASH_KEY_BYTES,
    NOTHING_TRIED,
    KeyedHash,
    PromptKey,
    QueuePosition,
    Tried,
    block_numbers,
)
from gateway.request.preparation import Request
from tests.forward.granted_lease import a_node_info
from tests.lease_requests import a_lease_request

KEY, OTHER_KEY = bytes(range(HASH_KEY_BYTES)), bytes(HASH_KEY_BYTES)

REQUEST = a_lease_request(
    "req_1",
    "helper",
    model_names=("a", "b"),
    caller="key",
    fairness_key="key/anna",
    prompt_key=PromptKey((1, -2), 20.0, (40, 80), 80),
    time_limit=2.5,
    resume_key=("model.gguf", "Q4", None, "b1"),
)

PARTS = st.lists(st.binary(max_size=80), max_size=12)


# Messages.


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (REQUEST, "caller"),
        (REQUEST.caller, "priority"),
        (REQUEST.wanted, "model"),
        (REQUEST.size, "slots"),
        (REQUEST.size.prompt_key, "tokens"),
        (NOTHING_TRIED, "min_context"),
        (QueuePosition("req_1", 1, 0.5), "position"),
        (Request("req_1", "x", "/", 0.0, REQUEST), "stream"),
    ],
)
def test_nobody_changes_a_message(message: object, field: str) -> None:
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        setattr(message, field, 1)
    with pytest.raises((AttributeError, TypeError)):
        message.more = 1  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.sampled_from(["failed", "refused", "unsupported"]), st.text())))
def test_what_was_tried_only_grows(events: list[tuple[str, str]]) -> None:
    tried = NOTHING_TRIED
    for what, node in events:
        before = dataclasses.replace(tried)
        if what == "failed":
            after = tried.failed_on(node)
        elif what == "refused":
            after = tried.refused_by(node)
        else:
            after = tried.unsupported_by(node, f"{node} lacks it")
        assert tried == before
        for name in ("failed_nodes", "excluded_nodes", "unsupported_nodes"):
            assert getattr(tried, name) <= getattr(after, name)
        tried = after
    assert tried.failed_nodes == {node for what, node in events if what == "failed"}
    assert tried.excluded_nodes == {node for what, node in events if what == "refused"}
    hints = [f"{node} lacks it" for what, node in events if what == "unsupported"]
    assert tried.unsupported_hint == (hints[-1] if hints else None)
    assert Tried() == NOTHING_TRIED


# Keyed hashes.


@given(PARTS, PARTS)
def test_blocks_are_equal_as_far_as_the_parts_are_and_no_further(
    one: list[bytes], other: list[bytes]
) -> None:
    keyed_hash = KeyedHash(KEY)
    first, second = (keyed_hash.chain(b"", parts) for parts in (one, other))
    equal = True
    for a, b, x, y in zip(one, other, first, second, strict=False):
        equal = equal and a == b
        assert (x == y) is equal


@given(PARTS, st.integers(0, 12))
def test_a_chain_may_be_made_in_steps(parts: list[bytes], cut: int) -> None:
    keyed_hash = KeyedHash(KEY)
    whole = keyed_hash.chain(b"model", parts)
    begun = keyed_hash.chain(b"model", parts[:cut])
    assert begun + keyed_hash.chain([b"model", *begun][-1], parts[cut:]) == whole


@given(PARTS)
def test_a_digest_does_not_depend_on_how_its_bytes_are_cut(parts: list[bytes]) -> None:
    keyed_hash = KeyedHash(KEY)
    data = b"".join(parts)
    assert keyed_hash.digest(parts) == keyed_hash.digest([data])
    assert keyed_hash.digest(map(memoryview, parts)) == keyed_hash.digest([data])


@given(PARTS)
def test_another_key_makes_other_blocks(parts: list[bytes]) -> None:
    one, other = KeyedHash(KEY).chain(b"", parts), KeyedHash(OTHER_KEY).chain(b"", parts)
    assert not set(one) & set(other)


def test_only_a_request_to_a_model_of_a_router_has_a_query() -> None:
    plain, routed = a_node_info(), a_node_info("r1/a", query="autoload=false")
    assert plain.target("/props", "a") == b"/props"
    assert routed.target("/tokenize") == b"/tokenize?autoload=false"
    assert routed.target("/props", "a/ü&b") == b"/props?model=a%2F%C3%BC%26b&autoload=false"


def test_numbers_fit_into_64_bits_with_a_sign() -> None:
    numbers = block_numbers(KeyedHash(KEY).chain(b"", [bytes([n]) for n in range(200)]))
    assert all(-(1 << 63) <= number < 1 << 63 for number in numbers)
    assert min(numbers) < 0 < max(numbers)
    assert len(set(numbers)) == 200
    assert block_numbers([]) == ()


def test_each_process_has_a_key_of_its_own_unless_it_is_given_one() -> None:
    assert KeyedHash().key != KeyedHash().key
    assert len(KeyedHash().key) == HASH_KEY_BYTES
    assert KeyedHash(KEY).key == KEY


ANOTHER_PROCESS = """
import json, sys
from gateway.lease import KeyedHash, block_numbers
from gateway.request.prompt_key import VolatileLines, build_prompt_key
from gateway.request.routes import ROUTES
key, body = bytes.fromhex(sys.argv[1]), sys.argv[2].encode()
found = build_prompt_key(body, ROUTES["/v1/chat/completions"], "m", VolatileLines(), KeyedHash(key))
print(json.dumps(found.blocks))
"""


def test_processes_with_one_key_make_the_same_blocks_of_a_prompt() -> None:
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
