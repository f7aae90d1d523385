"""What the next node is to be asked, found out by asking it how it reads what was said."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.relay.continuation import bodies, joining
from gateway.relay.continuation.anthropic import as_chat
from gateway.relay.continuation.bounds import has_stops, is_greedy
from gateway.relay.continuation.from_native import (
    ChatFromNative,
    CompletionsFromNative,
    MessagesFromNative,
)
from gateway.relay.continuation.joining import Joiner
from gateway.relay.continuation.said import Said
from gateway.relay.continuation.seam import Ask, Seam, find_seam, pieces_of
from gateway.relay.continuation.thought import Closing, form_of
from gateway.relay.values import Value
from gateway.transport.errors import Errored

NATIVE = "/completion"


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
    """Whether a chat goes on as a completion of the rendered prompt, its node not doing else."""


async def onward(ask: Ask, wish: Wish) -> Onward:
    """The way on. Raises: UpstreamError, Unsound."""
    said, body = wish.said, wish.body
    if said.ids and (found := await _by_ids(ask, wish)) is not None:
        return found
    if said.thought:
        return await _behind_a_thought(ask, wish)
    begun = "messages" in body and bool(said.text) and not wish.raw
    if begun and not await _prefills(ask):
        _go_round(wish)
    prompt = await _prompt(ask, wish)
    if prompt is None:
        if wish.raw:
            raise Unsound("its template refuses a message that is begun")
        return await _by_text_alone(ask, wish)
    greedy, stops = wish.step_back and is_greedy(body), has_stops(body)
    seam = await find_seam(ask, prompt, said, greedy=greedy, stops=stops)
    left = bodies.tokens_left(body, seam.kept_tokens)
    if (ended := _ended(wish, seam, left)) is not None:
        return ended
    if wish.raw:
        if wish.path == "/v1/messages":
            _check_prompt(said, seam.prompt_tokens)
        joiner = _from_native(wish, seam)
        return Onward(seam, joiner, NATIVE, bodies.native(body, prompt + seam.kept, left))
    joiner = joining.JOINERS[wish.path](said, seam)
    asked = bodies.chat if "messages" in body else bodies.completion
    return Onward(seam, joiner, wish.path, asked(body, seam.kept, left))


async def _prefills(ask: Ask) -> bool:
    """Whether this node goes on with a last message of the assistant's.

    Else it begins another one behind it: where that is switched off, or its template is not used.
    """
    asked = [{"role": "user", "content": "."}, {"role": "assistant", "content": _BEGUN}]
    try:
        return (await _rendered(ask, {"messages": asked})).endswith(_BEGUN)
    except Errored:
        return True  # its template takes none; what it makes of the real one will be seen


_BEGUN = "begun"
_WRITTEN = frozenset({"/v1/chat/completions", "/v1/messages"})
"""Paths of messages whose events can be written from those of a completion."""


def _go_round(wish: Wish) -> None:
    """Let a chat go on as a completion. Raises: Unsound, where that can't be."""
    if wish.path not in _WRITTEN or wish.body.get("tools"):
        raise Unsound("its node does not go on with a message that is begun")
    wish.raw = True


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
    chat = body if wish.path == "/v1/chat/completions" else as_chat(body)
    if chat is None or body.get("tools"):
        raise Unsound("its reasoning can't be written back")
    prompt = await _rendered(ask, chat)
    before = len(await pieces_of(ask, prompt))
    if wish.path == "/v1/messages":
        _check_prompt(said, before)

    async def render(messages: list[Value]) -> str:
        return await _rendered(ask, chat | {"messages": messages})

    form = await form_of(render, chat["messages"], prompt)
    over = bool(said.text)
    if form is None or (form.closing is None and not over):
        raise Unsound("its template does not show how reasoning is written")
    fixed = form.over(said.thought) if over else form.before
    around = len(await pieces_of(ask, fixed))
    if not over:
        running = Said(content=said.reasoning, tokens=said.tokens)
    else:
        tokens = len(said.content)
        if said.tokens > len(said.reasoning) + tokens:
            # Some of its pieces are several tokens.
            tokens = len(await pieces_of(ask, fixed + said.text)) - around
        running = Said(content=said.content, tokens=tokens)
    greedy, stops = wish.step_back and is_greedy(body), has_stops(body)
    seam = await find_seam(ask, fixed, running, greedy=greedy, stops=stops)
    written = fixed + seam.kept
    more = around - before
    seam = replace(
        seam,
        kept=written.removeprefix(prompt),
        prompt_tokens=before,
        said_tokens=more + seam.said_tokens,
        kept_tokens=more + seam.kept_tokens,
    )
    left = bodies.tokens_left(body, seam.kept_tokens)
    if (ended := _ended(wish, seam, left)) is not None:
        return ended
    asked = bodies.native(body, written, left)
    if form.closing is not None:
        # Where the mark is a control token, nothing of it would be told.
        asked["preserved_tokens"] = [form.closing.mark]
    joiner = _from_native(wish, seam, None if over else form.closing)
    return Onward(seam, joiner, NATIVE, asked)


async def _by_text_alone(ask: Ask, wish: Wish) -> Onward:
    """On from the text, where nothing but the next node's own dialect can render the prompt."""
    said, body = wish.said, wish.body
    if "messages" not in body:
        raise Unsound("the prompt is not one text")
    before = _told_prompt(said)
    answer = await ask("/tokenize", {"content": said.text, "add_special": False})
    count = len(answer.get("tokens") or ())
    seam = Seam(said.text, "", before, count, count)
    left = bodies.tokens_left(body, count)
    if (ended := _ended(wish, seam, left)) is not None:
        return ended
    joiner = joining.JOINERS[wish.path](said, seam)
    return Onward(seam, joiner, wish.path, bodies.chat(body, said.text, left))


def _told_prompt(said: Said) -> int:
    """Tokens of the prompt, as Anthropic's first event tells them."""
    told = said.head.get("usage") or {}
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(told[name] for name in names if isinstance(told.get(name), int))


def _check_prompt(said: Said, rendered: int) -> None:
    """Whether a prompt of so many tokens is what its first node had read. Raises: Unsound."""
    if rendered != _told_prompt(said):
        raise Unsound("its prompt can't be rendered again")


def _ended(wish: Wish, seam: Seam, left: int | None) -> Onward | None:
    """The end of an answer whose last token had gone out."""
    reason = wish.said.reason or ("length" if left == 0 else None)
    if reason is None:
        return None
    joiner = joining.JOINERS[wish.path](wish.said, seam)
    return Onward(seam, joiner, ending=joiner.ending(reason, usage=_wants_usage(wish.body)))


def _from_native(wish: Wish, seam: Seam, closing: Closing | None = None) -> Joiner:
    usage = _wants_usage(wish.body)
    if wish.path == "/v1/completions":
        return CompletionsFromNative(wish.said, seam, usage=usage)
    if wish.path not in _WRITTEN or wish.body.get("tools"):
        raise Unsound("its template refuses a message that is begun")
    if wish.path == "/v1/messages":
        return MessagesFromNative(wish.said, seam, closing)
    return ChatFromNative(wish.said, seam, closing, usage=usage)


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
        body = as_chat(wish.body)
    return None if body is None else await _rendered(ask, body)


async def _rendered(ask: Ask, body: Value) -> str:
    asked = {name: body[name] for name in _RENDERED if name in body}
    return str((await ask("/apply-template", asked)).get("prompt") or "")


_RENDERED = ("messages", "tools", "chat_template_kwargs", "reasoning_format")


async def ids_of(ask: Ask, text: str) -> list[int]:
    """The tokens of a prompt."""
    told = await ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})
    return [token for token in told.get("tokens") or () if isinstance(token, int)]
