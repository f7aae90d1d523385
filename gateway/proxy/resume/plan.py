"""What the next node is to be asked, found out by asking it how it reads what was said."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.proxy.json_values import JsonObject
from gateway.proxy.resume import event_rewriter
from gateway.proxy.resume.event_rewriter import (
    EventRewriter,
    NativeToChatRewriter,
    NativeToCompletionsRewriter,
    NativeToMessagesRewriter,
)
from gateway.proxy.resume.reasoning_template import ReasoningEndMark, find_reasoning_template
from gateway.proxy.resume.splice import PostToNode, SplicePoint, find_splice_point, tokenize_pieces
from gateway.proxy.resume.transcript import Transcript
from gateway.transport.errors import NodeReportedError

NATIVE_PATH = "/completion"


class NotResumable(Exception):  # noqa: N818 - not an error: the stream just ends
    """No sound continuation is possible, as only the next node could tell."""


@dataclass(slots=True)
class ResumePlan:
    """The request that goes on, or what ends the answer without one."""

    splice_point: SplicePoint
    rewriter: EventRewriter
    path: str = ""
    body: JsonObject | None = None
    final_events: bytes | None = None
    """The end of an answer that lacks nothing else."""


@dataclass(slots=True)
class ResumeInput:
    """What was asked and said, and how it is to be gone on with."""

    path: str
    body: JsonObject
    transcript: Transcript
    step_back: bool = True
    """Whether text may be written again: not once that has come out differently."""
    as_completion: bool = False
    """Whether a chat goes on as a completion of the rendered prompt, its node not doing else."""


async def plan_resume(post: PostToNode, resume: ResumeInput) -> ResumePlan:
    """The way on. Raises: UpstreamError, Unsound."""
    said, body = resume.transcript, resume.body
    if said.token_ids and (found := await _by_ids(post, resume)) is not None:
        return found
    if said.reasoning_text:
        return await _behind_a_thought(post, resume)
    begun = "messages" in body and bool(said.text) and not resume.as_completion
    if begun and not await _prefills(post):
        _go_round(resume)
    prompt = await _prompt(post, resume)
    if prompt is None:
        if resume.as_completion:
            raise NotResumable("its template refuses a message that is begun")
        return await _by_text_alone(post, resume)
    greedy, stops = resume.step_back and is_greedy(body), has_stop_words(body)
    seam = await find_splice_point(post, prompt, said, greedy=greedy, has_stop_words=stops)
    left = remaining_tokens(body, seam.prefix_tokens)
    if (ended := _ended(resume, seam, left)) is not None:
        return ended
    if resume.as_completion:
        if resume.path == "/v1/messages":
            _check_prompt(said, seam.prompt_tokens)
        joiner = _from_native(resume, seam)
        return ResumePlan(seam, joiner, NATIVE_PATH, native_body(body, prompt + seam.prefix, left))
    joiner = event_rewriter.REWRITERS[resume.path](said, seam)
    asked = chat_body if "messages" in body else completion_body
    return ResumePlan(seam, joiner, resume.path, asked(body, seam.prefix, left))


async def _prefills(ask: PostToNode) -> bool:
    """Whether this node goes on with a last message of the assistant's.

    Else it begins another one behind it: where that is switched off, or its template is not used.
    """
    asked = [{"role": "user", "content": "."}, {"role": "assistant", "content": _BEGUN}]
    try:
        return (await _rendered(ask, {"messages": asked})).endswith(_BEGUN)
    except NodeReportedError:
        return True  # its template takes none; what it makes of the real one will be seen


_BEGUN = "begun"

_WRITTEN = frozenset({"/v1/chat/completions", "/v1/messages"})
"""Paths of messages whose events can be written from those of a completion."""


def _go_round(wish: ResumeInput) -> None:
    """Let a chat go on as a completion. Raises: Unsound, where that can't be."""
    if wish.path not in _WRITTEN or wish.body.get("tools"):
        raise NotResumable("its node does not go on with a message that is begun")
    wish.as_completion = True


async def _by_ids(ask: PostToNode, wish: ResumeInput) -> ResumePlan | None:
    """On from the very tokens that were written; None: not all of them are known."""
    said, body = wish.transcript, wish.body
    told = await ask("/detokenize", {"tokens": said.token_ids})
    if told.get("content") != said.text or said.reasoning_text:
        # Where bytes are held back until they make a character, ids are missing.
        return None
    given = body.get("prompt") if "messages" not in body else None
    prompt = given if isinstance(given, list) else await _prompt(ask, wish)
    if prompt is None:
        return None
    ids = prompt if isinstance(prompt, list) else await tokenize_ids(ask, prompt)
    if not all(isinstance(token, int) for token in ids):
        return None
    count = len(said.token_ids)
    seam = SplicePoint(said.text, "", len(ids), count, count)
    left = remaining_tokens(body, count)
    if (ended := _ended(wish, seam, left)) is not None:
        return ended
    joiner = (
        event_rewriter.NativeRewriter(said, seam)
        if wish.path == NATIVE_PATH
        else _from_native(wish, seam)
    )
    return ResumePlan(seam, joiner, NATIVE_PATH, native_body(body, [*ids, *said.token_ids], left))


async def _behind_a_thought(ask: PostToNode, wish: ResumeInput) -> ResumePlan:
    """Reasoning is under way, or over: only the template knows how it is written."""
    said, body = wish.transcript, wish.body
    chat = body if wish.path == "/v1/chat/completions" else messages_as_chat(body)
    if chat is None or body.get("tools"):
        raise NotResumable("its reasoning can't be written back")
    prompt = await _rendered(ask, chat)
    before = len(await tokenize_pieces(ask, prompt))
    if wish.path == "/v1/messages":
        _check_prompt(said, before)

    async def render(messages: list[JsonObject]) -> str:
        return await _rendered(ask, chat | {"messages": messages})

    form = await find_reasoning_template(render, chat["messages"], prompt)
    over = bool(said.text)
    if form is None or (form.end_mark is None and not over):
        raise NotResumable("its template does not show how reasoning is written")
    fixed = form.before_answer(said.reasoning_text) if over else form.before
    around = len(await tokenize_pieces(ask, fixed))
    if not over:
        running = Transcript(content_pieces=said.reasoning_pieces, token_count=said.token_count)
    else:
        tokens = len(said.content_pieces)
        if said.token_count > len(said.reasoning_pieces) + tokens:
            # Some of its pieces are several tokens.
            tokens = len(await tokenize_pieces(ask, fixed + said.text)) - around
        running = Transcript(content_pieces=said.content_pieces, token_count=tokens)
    greedy, stops = wish.step_back and is_greedy(body), has_stop_words(body)
    seam = await find_splice_point(ask, fixed, running, greedy=greedy, has_stop_words=stops)
    written = fixed + seam.prefix
    more = around - before
    seam = replace(
        seam,
        prefix=written.removeprefix(prompt),
        prompt_tokens=before,
        sent_tokens=more + seam.sent_tokens,
        prefix_tokens=more + seam.prefix_tokens,
    )
    left = remaining_tokens(body, seam.prefix_tokens)
    if (ended := _ended(wish, seam, left)) is not None:
        return ended
    asked = native_body(body, written, left)
    if form.end_mark is not None:
        # Where the mark is a control token, nothing of it would be told.
        asked["preserved_tokens"] = [form.end_mark.mark]
    joiner = _from_native(wish, seam, None if over else form.end_mark)
    return ResumePlan(seam, joiner, NATIVE_PATH, asked)


async def _by_text_alone(ask: PostToNode, wish: ResumeInput) -> ResumePlan:
    """On from the text, where nothing but the next node's own dialect can render the prompt."""
    said, body = wish.transcript, wish.body
    if "messages" not in body:
        raise NotResumable("the prompt is not one text")
    before = _told_prompt(said)
    answer = await ask("/tokenize", {"content": said.text, "add_special": False})
    count = len(answer.get("tokens") or ())
    seam = SplicePoint(said.text, "", before, count, count)
    left = remaining_tokens(body, count)
    if (ended := _ended(wish, seam, left)) is not None:
        return ended
    joiner = event_rewriter.REWRITERS[wish.path](said, seam)
    return ResumePlan(seam, joiner, wish.path, chat_body(body, said.text, left))


def _told_prompt(said: Transcript) -> int:
    """Tokens of the prompt, as Anthropic's first event tells them."""
    told = said.first_event.get("usage") or {}
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(told[name] for name in names if isinstance(told.get(name), int))


def _check_prompt(said: Transcript, rendered: int) -> None:
    """Whether a prompt of so many tokens is what its first node had read. Raises: Unsound."""
    if rendered != _told_prompt(said):
        raise NotResumable("its prompt can't be rendered again")


def _ended(wish: ResumeInput, seam: SplicePoint, left: int | None) -> ResumePlan | None:
    """The end of an answer whose last token had gone out."""
    reason = wish.transcript.finish_reason or ("length" if left == 0 else None)
    if reason is None:
        return None
    joiner = event_rewriter.REWRITERS[wish.path](wish.transcript, seam)
    return ResumePlan(
        seam, joiner, final_events=joiner.final_events(reason, usage=_wants_usage(wish.body))
    )


def _from_native(
    wish: ResumeInput, seam: SplicePoint, closing: ReasoningEndMark | None = None
) -> EventRewriter:
    usage = _wants_usage(wish.body)
    if wish.path == "/v1/completions":
        return NativeToCompletionsRewriter(wish.transcript, seam, usage=usage)
    if wish.path not in _WRITTEN or wish.body.get("tools"):
        raise NotResumable("its template refuses a message that is begun")
    if wish.path == "/v1/messages":
        return NativeToMessagesRewriter(wish.transcript, seam, closing)
    return NativeToChatRewriter(wish.transcript, seam, closing, usage=usage)


def _wants_usage(body: JsonObject) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


async def _prompt(ask: PostToNode, wish: ResumeInput) -> str | None:
    """The prompt as the model reads it; None: this can't be told."""
    body: JsonObject | None = wish.body
    if "messages" not in wish.body:
        prompt = wish.body.get("prompt")
        return prompt if isinstance(prompt, str) else None
    if wish.path == "/v1/messages":
        body = messages_as_chat(wish.body)
    return None if body is None else await _rendered(ask, body)


async def _rendered(ask: PostToNode, body: JsonObject) -> str:
    asked = {name: body[name] for name in _RENDERED if name in body}
    return str((await ask("/apply-template", asked)).get("prompt") or "")


_RENDERED = ("messages", "tools", "chat_template_kwargs", "reasoning_format")


async def tokenize_ids(post: PostToNode, text: str) -> list[int]:
    """The tokens of a prompt."""
    told = await post("/tokenize", {"content": text, "add_special": True, "parse_special": True})
    return [token for token in told.get("tokens") or () if isinstance(token, int)]


_GRAMMAR = ("grammar", "json_schema")
"""Fields that bind the output to a grammar, whose state no other node knows."""

_SEVERAL = ("n", "n_cmpl", "best_of")

_MORE_THAN_TEXT = ("logprobs", "top_logprobs", "n_probs", "echo", "suffix", "audio")
"""Fields that ask for more than the text: what belongs to tokens of the first node is lost."""


def unresumable_reason(body: JsonObject, transcript: Transcript) -> str | None:
    """Why no sound continuation of this answer to that body is possible; None: it is.

    The words are for the log and the client; they hold nothing of either's text.
    """
    if transcript.unresumable is not None:
        return transcript.unresumable
    if any(_more_than_one(body.get(name)) for name in _SEVERAL):
        return "the request asks for several answers"
    if any(body.get(name) for name in _MORE_THAN_TEXT):
        return "the request asks for more than text"
    if any(body.get(name) for name in _GRAMMAR):
        return "the output is bound to a grammar"
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in {None, "text"}:
        return "the output is bound to a grammar"
    config = body.get("output_config")
    if body.get("output_format") or (isinstance(config, dict) and config.get("format")):
        return "the output is bound to a grammar"
    if body.get("tools") and _must_call(body.get("tool_choice")):
        return "the output is bound to a tool call"
    if transcript.reasoning_text and not transcript.text and _has_budget(body):
        return "the length of its reasoning is limited"
    prompt = body.get("prompt")
    if "messages" not in body and not isinstance(prompt, str) and not transcript.token_ids:
        return "the prompt is not one text"
    messages = body.get("messages")
    if isinstance(messages, list) and messages and _is_assistants(messages[-1]):
        return "the request itself continues a message"
    return None


def is_greedy(body: JsonObject) -> bool:
    """Whether the same prompt gives the same text: the most likely token is always taken."""
    temperature, top_k = body.get("temperature"), body.get("top_k")
    return (_is_number(temperature) and not temperature > 0) or (_is_number(top_k) and top_k == 1)  # type: ignore[operator]


def has_stop_words(body: JsonObject) -> bool:
    """Whether the answer ends at certain words."""
    return bool(body.get("stop") or body.get("stop_sequences"))


def _has_budget(body: JsonObject) -> bool:
    """Whether the server ends reasoning at a length, which no completion of a prompt does."""
    thinking = body.get("thinking")
    limits = [body.get("thinking_budget_tokens"), body.get("reasoning_budget_tokens")]
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        limits.append(thinking.get("budget_tokens"))
    return any(_is_number(limit) and limit >= 0 for limit in limits)  # type: ignore[operator]


def _more_than_one(value: object) -> bool:
    return _is_number(value) and value > 1  # type: ignore[operator]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _must_call(choice: object) -> bool:
    if isinstance(choice, dict):
        return choice.get("type") not in {"auto", "none"}
    return choice not in {None, "auto", "none"}


def _is_assistants(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


LENGTH_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")


def remaining_tokens(body: JsonObject, written: int) -> int | None:
    """Tokens that may still be written; None: no limit was asked for."""
    limits = [
        value
        for name in LENGTH_FIELDS
        if isinstance(value := body.get(name), int) and not isinstance(value, bool) and value >= 0
    ]
    return max(0, min(limits) - written) if limits else None


def chat_body(body: JsonObject, prefix: str, max_tokens: int | None) -> JsonObject:
    """A chat (or Anthropic's messages) that goes on with the assistant's last message."""
    messages = [*body["messages"]]
    if prefix:
        # Text that ends in white space must reach the template as it is.
        messages.append({"role": "assistant", "content": prefix})
    return _limited(body | {"messages": messages}, max_tokens)


def completion_body(body: JsonObject, prefix: str, max_tokens: int | None) -> JsonObject:
    """A completion whose prompt, one text, has the answer's text so far behind it."""
    return _limited(body | {"prompt": f"{body['prompt']}{prefix}"}, max_tokens)


def native_body(body: JsonObject, prompt: str | list[int], max_tokens: int | None) -> JsonObject:
    """llama.cpp's own completion of a prompt that the template has made already."""
    asked = {name: value for name, value in body.items() if name not in _OF_A_CHAT}
    stop = body.get("stop", body.get("stop_sequences"))
    if stop is not None:
        # It takes a list alone, and passes over a text in silence.
        asked["stop"] = [stop] if isinstance(stop, str) else stop
    if max_tokens is not None:
        asked["n_predict"] = max_tokens
    return asked | {"prompt": prompt, "stream": True}


_OF_A_CHAT = frozenset(
    {"messages", "system", "stop_sequences", "stream_options", "tools", "tool_choice",
     "response_format", "logprobs", "top_logprobs", "metadata", "thinking", *LENGTH_FIELDS}
)  # fmt: skip


def _limited(body: JsonObject, left: int | None) -> JsonObject:
    if left is None:
        return body
    named = [name for name in LENGTH_FIELDS if body.get(name) is not None]
    return body | dict.fromkeys(named, left)


def messages_as_chat(body: JsonObject) -> JsonObject | None:
    """The chat, where all of them are text and thoughts; None: they are not."""
    if body.get("tools"):
        return None
    messages: list[object] = []
    system = body.get("system")
    if system:
        messages.append({"role": "system", "content": system})
    messages += body.get("messages") or ()
    chat = []
    for message in messages:
        made = _message(message) if isinstance(message, dict) else None
        if made is None:
            return None
        chat.append(made)
    kwargs = body.get("chat_template_kwargs")
    return {"messages": chat} | ({"chat_template_kwargs": kwargs} if kwargs else {})


def _message(message: JsonObject) -> JsonObject | None:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        return None
    parts: dict[str, list[str]] = {"text": [], "thinking": []}
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in parts:
            return None
        parts[kind].append(str(part.get(kind) or ""))
    if len(parts["text"]) != 1 or len(parts["thinking"]) > 1:
        # llama.cpp gives several parts to the template as parts: what it makes of them is its own.
        return None
    made = {"role": role, "content": parts["text"][0]}
    thought = "".join(parts["thinking"])
    return made | {"reasoning_content": thought} if thought else made
