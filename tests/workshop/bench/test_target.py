"""Questions to servers are asked in whole runs: `test_session.py`."""

from __future__ import annotations

import asyncio
import json
from itertools import takewhile

import pytest

from gateway.transport.pool import ConnectionPool, url_address
from gateway.workshop.bench.exchange import (
    CHAT,
    PROBE_WORDS,
    Baseline,
    Calibration,
    PromptWriter,
    RequestResult,
    RequestSender,
    describe_server,
    is_this_machine,
)
from gateway.workshop.simulate.simulation import TracePrompt
from tests.emulator import EmulatedNode
from tests.known import known
from tests.workshop.bench.measuring import STREAM_HEAD, answers, measure, odd_server, plain_answer


def test_an_address_keeps_a_prefix_and_has_the_key() -> None:
    address = url_address("http://epyc-a:8080/llm", "secret", None)
    assert (address.host, address.port, address.path_prefix) == ("epyc-a", 8080, b"/llm")
    assert address.header_lines == b"host: epyc-a:8080\r\nauthorization: Bearer secret\r\n"
    assert url_address("https://epyc-a", None, None).port == 443
    assert url_address("http://[::1]:80", None, None).host == "::1"


def test_only_own_addresses_are_this_machine() -> None:
    assert is_this_machine("127.0.0.1")
    assert is_this_machine("localhost")
    assert not is_this_machine("192.0.2.1")  # of no machine at all: RFC 5737
    assert not is_this_machine("no-such-host.invalid")
    assert not is_this_machine("a" * 300)


def test_a_request_alone_is_the_median_without_the_first_of_several() -> None:
    requests = [
        RequestResult(1, 0.0, first=first, last=first + 1, events=11, ended=first + 1)
        for first in (9.0, 1.0, 2.0, 3.0)
    ]
    assert Baseline.of(requests) == Baseline(2.0, 0.1, 3)
    assert Baseline.of(requests[:1]).ttft == 9.0
    requests[1].error = "reset"
    assert Baseline.of(requests).ttft == 2.5
    assert Baseline.of([]) == Baseline()


async def test_slots_context_and_distance_are_asked_for() -> None:
    async with EmulatedNode(slots=3, context=2048) as node:
        pool = ConnectionPool(url_address(node.url, None, None))
        found = await describe_server(RequestSender(pool, CHAT, 15.0), None)
        pool.close()
    assert (found.slots, found.context, found.model, found.ignores_eos) == (3, 2048, "demo", True)
    assert 0 < known(found.round_trip) < 1
    assert found.notes == []


async def test_nonsense_about_itself_is_not_believed() -> None:
    body = json.dumps(
        {
            "data": [{"id": 7}, "x", {"id": "real", "owned_by": ["a"]}],
            "total_slots": -4,
            "default_generation_settings": {"n_ctx": "many"},
        }
    ).encode()
    async with odd_server(answers(plain_answer(body))) as url:
        pool = ConnectionPool(url_address(url, None, None))
        found = await describe_server(RequestSender(pool, CHAT, 15.0), None)
        pool.close()
    assert (found.model, found.slots, found.context, found.ignores_eos) == (
        "real", None, None, False,
    )  # fmt: skip


async def test_without_usage_words_are_taken_for_tokens_and_that_is_said() -> None:
    seen: list[int] = []

    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if b"/chat/completions" in head:
            seen.append(len(json.loads(body)["messages"][0]["content"].split()))
            event = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
            writer.write(STREAM_HEAD + event)
        else:
            writer.write(plain_answer(b"{}"))
        await writer.drain()

    async with odd_server(answer) as url:
        report = await measure(url)
    assert report.client["prompt_lengths_by"] == "guessed: one token a word"
    assert seen[-4:] == [64] * 4
    for note in ("sends no usage", "tells no token counts"):
        assert any(note in one for one in report.notes)
    assert any("names no model" in note for note in report.server.notes)


def words(text: TracePrompt, seed: int = 1, calibration: Calibration | None = None) -> list[str]:
    return PromptWriter(seed, calibration or Calibration()).write(text).split()


def shared(one: list[str], other: list[str]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_a_prompt_has_as_many_words_as_the_calibration_says() -> None:
    calibration = Calibration.of(6 + 2 * PROBE_WORDS, 6 + 4 * PROBE_WORDS)
    assert (calibration.tokens_per_word, calibration.overhead) == (2.0, 6)
    for tokens in (30, 180, 1000):
        count = len(words(TracePrompt(1, tokens), calibration=calibration))
        assert 6 + count * 2 == pytest.approx(tokens, abs=1)
    assert len(words(TracePrompt(1, 1), calibration=calibration)) == 1


def test_a_calibration_needs_a_longer_prompt_with_more_tokens() -> None:
    assert Calibration.of(30, 30) == Calibration.of(30, None) == Calibration()


def test_the_seed_decides_the_words_and_two_texts_differ_from_the_first_words_on() -> None:
    assert words(TracePrompt(1, 500)) == words(TracePrompt(1, 500))
    assert words(TracePrompt(1, 500)) != words(TracePrompt(1, 500), seed=2)
    assert shared(words(TracePrompt(1, 500)), words(TracePrompt(2, 500))) < 5


def test_prompts_of_one_prefix_have_it_in_common_and_no_more() -> None:
    one, other = words(TracePrompt(1, 200, 7, 150)), words(TracePrompt(2, 300, 7, 150))
    assert 150 <= shared(one, other) < 155
    assert shared(one, words(TracePrompt(1, 200, 8, 150))) < 5
    # A prompt may be its prefix alone.
    assert words(TracePrompt(1, 100, 7, 100)) == words(TracePrompt(2, 100, 7, 100))


def test_a_later_turn_begins_with_all_of_the_earlier_one() -> None:
    calibration = Calibration(1.7, 9.0)
    earlier = words(TracePrompt(3, 400, 7, 150), calibration=calibration)
    later = words(TracePrompt(3, 700, 7, 150), calibration=calibration)
    assert later[: len(earlier)] == earlier
    assert len(later) > len(earlier)
