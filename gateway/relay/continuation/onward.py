"""What the next node is to be asked, found out by asking it how it reads what was said."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gateway.relay.continuation import bodies, joining
from gateway.relay.continuation.bounds import is_greedy
from gateway.relay.continuation.joining import ChatFromNative, CompletionsFromNative, Joiner
from gateway.relay.continuation.said import Said, Value
from gateway.relay.continuation.seam import Ask, Seam, find_seam, pieces_of

NATIVE = "/completion"

_CLOSING = re.compile(r"\s*(<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\])")
"""A mark that ends reasoning, as a template writes it behind a thought."""
_OPENING = re.compile(r"<([^<>/\s]{1,40})>\s*$")
"""A mark that begins it, as a template leaves it open at the end of a prompt."""


class Unsound(Exception):  # noqa: N818 - not an error: the stream just ends
    """No sound continuation is possible, as only the next node could tell."""


@dataclass(slots=True)
class Onward:
    """The request that goes on, or what ends the answer without one."""

    seam: Seam
    joiner: Joiner
    path: str = ""
    body: Value | None = None
    ending: bytes | None = None
    """The end of an answer that lacks nothing else."""


@dataclass(slots=True)
class Wish:
    """What was asked and said, and how it is to be gone on with."""

    path: str
    body: Value
    said: Said
    step_back: bool = True
    """Whether text may be written again: not once that has come out differently."""
    raw: bool = False
    """Whether a chat goes on as a completion of the rendered prompt, its template refusing else."""


async def onward(ask: Ask, wish: Wish) -> Onward:
    """The way on. Raises: UpstreamError, Unsound."""
    said, body = wish.said, wish.body
    if said.ids and (found := await _by_ids(ask, wish)) is not None:
        return found
    if said.thought:
        return await _behind_a_thought(ask, wish)
    prompt = await _prompt(ask, wish)
    if prompt is None:
        return await _by_text_alone(ask, wish)
    seam = await find_seam(ask, prompt, said, greedy=wish.step_back and is_greedy(body))
    left = bodies.tokens_left(body, seam.kept_tokens)
    if (ended := _ended(wish, seam, left)) is not None:
        return ended
    if wish.raw:
        joiner = _from_native(wish, seam)
        return Onward(seam, joiner, NATIVE, bodies.native(body, prompt + seam.kept, left))
    joiner = joining.JOINERS[wish.path](said, seam)
    asked = bodies.chat if "messages" in body else bodies.completion
    return Onward(seam, joiner, wish.path, asked(body, seam.kept, left))


async def _by_ids(ask: Ask, wish: Wish) -> Onward | None:
    """On from the very tokens that were written; None: not all of them are known."""
    said, body = wish.said, wish.body
    told = await ask("/detokenize", {"tokens": said.ids})
    if told.get("content") != said.text or said.thought:
        # Where bytes are held back until they make a character, ids are missing.
        return None
    given = body.get("prompt") if "messages" not in body else None
    prompt = given if isinstance(given, list) else await _prompt(ask, wish)
    if prompt is None:
        return None
    ids = prompt if isinstance(prompt, list) else await ids_of(ask, prompt)
    if not all(isinstance(token, int) for token in ids):
        return None
    count = len(said.ids)
    seam = Seam(said.text, "", len(ids), count, count)
    left = bodies.tokens_left(body, count)
    if (ended := _ended(wish, seam, left)) is not None:
        return ended
    joiner = joining.Native(said, seam) if wish.path == NATIVE else _from_native(wish, seam)
    return Onward(seam, joiner, NATIVE, bodies.native(body, [*ids, *said.ids], left))


async def _behind_a_thought(ask: Ask, wish: Wish) -> Onward:
    """Reasoning is under way, or over: only the template knows how it is written."""
    said, body = wish.said, wish.body
    if wish.path != "/v1/chat/completions" or body.get("tools"):
        raise Unsound("its reasoning can't be written back")
    prompt = await _rendered(ask, body)
    written, closing = await _written_back(ask, body, said, prompt)
    before = len(await pieces_of(ask, prompt))
    total = len(await pieces_of(ask, written)) - before
    seam = Seam(written.removeprefix(prompt), "", before, total, total)
    left = bodies.tokens_left(body, total)
    if (ended := _ended(wish, seam, left)) is not None:
        return ended
    joiner = _from_native(wish, seam, None if said.text else closing)
    return Onward(seam, joiner, NATIVE, bodies.native(body, written, left))


async def _written_back(ask: Ask, body: Value, said: Said, prompt: str) -> tuple[str, str]:
    """The prompt with the thought and the answer so far behind it, and what closes a thought."""
    thought, text = said.thought, said.text
    last = {"role": "assistant", "reasoning_content": thought, "content": text}
    full = await _rendered(ask, body | {"messages": [*body["messages"], last]})
    place = full.rfind(thought.strip())
    if place >= _shared(full, prompt):
        end = place + len(thought.strip())
        closing = _CLOSING.match(full, end)
        answer = full.find(text, closing.end()) if closing is not None and text else -1
        if closing is not None and answer >= 0:
            return full[: answer + len(text)], closing[1]
        if closing is not None and not text:
            return full[:end] + thought[len(thought.rstrip()) :], closing[1]
    opening = _OPENING.search(prompt)
    if opening is None:
        raise Unsound("its template does not show how reasoning is written")
    closing_mark = f"</{opening[1]}>"
    if text:
        return f"{prompt}{thought}\n{closing_mark}\n\n{text}", closing_mark
    return prompt + thought, closing_mark


def _shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


async def _by_text_alone(ask: Ask, wish: Wish) -> Onward:
    """On from the text, where nothing but the next node's own dialect can render the prompt."""
    said, body = wish.said, wish.body
    if "messages" not in body:
        raise Unsound("the prompt is not one text")
    told = said.head.get("usage") or {}
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    before = sum(told[name] for name in names if isinstance(told.get(name), int))
    answer = await ask("/tokenize", {"content": said.text, "add_special": False})
    count = len(answer.get("tokens") or ())
    seam = Seam(said.text, "", before, count, count)
    left = bodies.tokens_left(body, count)
    if (ended := _ended(wish, seam, left)) is not None:
        return ended
    joiner = joining.JOINERS[wish.path](said, seam)
    return Onward(seam, joiner, wish.path, bodies.chat(body, said.text, left))


def _ended(wish: Wish, seam: Seam, left: int | None) -> Onward | None:
    """The end of an answer whose last token had gone out."""
    reason = wish.said.reason or ("length" if left == 0 else None)
    if reason is None:
        return None
    joiner = joining.JOINERS[wish.path](wish.said, seam)
    return Onward(seam, joiner, ending=joiner.ending(reason, usage=_wants_usage(wish.body)))


def _from_native(wish: Wish, seam: Seam, closing: str | None = None) -> Joiner:
    joiner: ChatFromNative | CompletionsFromNative
    if wish.path == "/v1/chat/completions" and not wish.body.get("tools"):
        joiner = ChatFromNative(wish.said, seam, closing)
    elif wish.path == "/v1/completions":
        joiner = CompletionsFromNative(wish.said, seam)
    else:
        raise Unsound("its template refuses a message that is begun")
    joiner.usage = _wants_usage(wish.body)
    return joiner


def _wants_usage(body: Value) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


async def _prompt(ask: Ask, wish: Wish) -> str | None:
    """The prompt as the model reads it; None: this can't be told."""
    body: Value | None = wish.body
    if "messages" not in wish.body:
        prompt = wish.body.get("prompt")
        return prompt if isinstance(prompt, str) else None
    if wish.path == "/v1/messages":
        body = plain_messages(wish.body)
    return None if body is None else await _rendered(ask, body)


async def _rendered(ask: Ask, body: Value) -> str:
    asked = {name: body[name] for name in _RENDERED if name in body}
    return str((await ask("/apply-template", asked)).get("prompt") or "")


_RENDERED = ("messages", "tools", "chat_template_kwargs", "reasoning_format")


def plain_messages(body: Value) -> Value | None:
    """Anthropic's messages as a chat's, where they are text alone; None: they are not."""
    if body.get("tools") or body.get("thinking"):
        return None
    messages: list[Any] = []
    system = body.get("system")
    if system:
        messages.append({"role": "system", "content": system})
    messages += body.get("messages") or ()
    chat = []
    for message in messages:
        text = _text_of(message.get("content")) if isinstance(message, dict) else None
        if text is None:
            return None
        chat.append({"role": message.get("role"), "content": text})
    return {"messages": chat}


def _text_of(content: object) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        texts.append(str(part.get("text") or ""))
    # llama.cpp gives several parts to the template as parts: what it makes of them is its own.
    return texts[0] if len(texts) == 1 else None


async def ids_of(ask: Ask, text: str) -> list[int]:
    """The tokens of a prompt."""
    told = await ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})
    return [token for token in told.get("tokens") or () if isinstance(token, int)]
