"""Plans how a replacement node continues a response, by asking it how it reads the transcript."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from gateway.proxy.api.native import native_body
from gateway.proxy.api.resuming import (
    EventRewriter,
    ReasoningEndMark,
    is_number,
    remaining_tokens,
    wants_usage,
)
from gateway.proxy.inbound.routes import NATIVE_ROUTE, Route
from gateway.proxy.json_values import JsonObject
from gateway.proxy.splice import PostToNode, SplicePoint, find_splice_point, tokenize_pieces
from gateway.proxy.transcript import Transcript
from gateway.transport.errors import NodeReportedError


class NotResumable(Exception):  # noqa: N818 - not an error: the stream just ends
    """The replacement node cannot safely resume this stream."""


@dataclass(slots=True)
class ResumePlan:
    """The request that continues a response, or the events that end it without one."""

    splice_point: SplicePoint
    rewriter: EventRewriter
    route: Route
    """Where the request goes."""
    body: JsonObject | None = None
    final_events: bytes | None = None
    """The end of a response whose text is complete; then there is no `body`."""


@dataclass(slots=True)
class ResumeInput:
    """The request, the transcript, and how the response may be continued."""

    route: Route
    body: JsonObject
    transcript: Transcript
    step_back: bool = True
    """Whether the splice point may step back: not after a mismatch of the overlap."""
    as_completion: bool = False
    """Whether a chat is continued by `/completion` of the rendered prompt, because the node does
    not continue a message."""

    def continue_as_completion(self) -> None:
        """Continue a chat by `/completion`. Raises: NotResumable, if that can't be."""
        if not self.route.api.is_chat or self.body.get("tools"):
            raise NotResumable("the node does not continue a begun message")
        self.as_completion = True

    def rewriter(self, splice_point: SplicePoint) -> EventRewriter:
        """Rewrites a continuation by the request's own API."""
        rewriter = self.route.api.event_rewriter
        if rewriter is None:
            raise NotResumable("its API can't be resumed")
        return rewriter(self.transcript, splice_point)

    def native_rewriter(
        self, splice_point: SplicePoint, end_mark: ReasoningEndMark | None = None
    ) -> EventRewriter:
        """Rewrites a continuation by `/completion`. Raises: NotResumable."""
        rewriter = self.route.api.native_rewriter(
            self.body, self.transcript, splice_point, end_mark
        )
        if rewriter is None:
            raise NotResumable("the node's template refuses a begun message")
        return rewriter

    def check_prompt(self, tokens: int) -> None:
        """Check that the prompt is as long as the first node read it. Raises: NotResumable."""
        reported = self.route.api.reported_prompt_tokens(self.transcript)
        if reported is not None and reported != tokens:
            raise NotResumable("the node renders the prompt in another way")

    def ended(self, splice_point: SplicePoint, tokens_left: int | None) -> ResumePlan | None:
        """The plan for a response whose last token had been sent; None: there is more to come."""
        reason = self.transcript.finish_reason or ("length" if tokens_left == 0 else None)
        if reason is None:
            return None
        rewriter = self.rewriter(splice_point)
        events = rewriter.final_events(reason, usage=wants_usage(self.body))
        return ResumePlan(splice_point, rewriter, self.route, final_events=events)


async def plan_resume(post: PostToNode, resume: ResumeInput) -> ResumePlan:
    """Plan the continuation. Raises: UpstreamError, NotResumable."""
    transcript, body, api = resume.transcript, resume.body, resume.route.api
    if transcript.token_ids and (found := await _from_token_ids(post, resume)) is not None:
        return found
    if transcript.reasoning_text:
        return await _from_reasoning(post, resume)
    if (
        api.is_chat
        and not resume.as_completion
        and (api.resumes_by_completion or (transcript.text and not await _continues_messages(post)))
    ):
        resume.continue_as_completion()
    prompt = await _rendered_prompt(post, resume)
    if prompt is None:
        if resume.as_completion:
            raise NotResumable("the node's template refuses a begun message")
        return await _from_text_alone(post, resume)
    splice_point = await find_splice_point(
        post,
        prompt,
        transcript,
        greedy=resume.step_back and is_greedy(body),
        has_stop_words=has_stop_words(body),
    )
    left = remaining_tokens(body, splice_point.prefix_tokens)
    if (ended := resume.ended(splice_point, left)) is not None:
        return ended
    prefix = splice_point.prefix
    if resume.as_completion:
        resume.check_prompt(splice_point.prompt_tokens)
        rewriter = resume.native_rewriter(splice_point)
        native = native_body(body, prompt + prefix, left)
        return ResumePlan(splice_point, rewriter, NATIVE_ROUTE, native)
    rewriter = resume.rewriter(splice_point)
    return ResumePlan(splice_point, rewriter, resume.route, api.continued_body(body, prefix, left))


async def _continues_messages(post: PostToNode) -> bool:
    """Whether this node continues a last message of the assistant's.

    Otherwise it begins another message behind it: that is switched off, or its template is not
    used.
    """
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": _BEGUN}]
    try:
        return (await _apply_template(post, {"messages": messages})).endswith(_BEGUN)
    except NodeReportedError:
        return True  # its template refuses these; the real messages will show


_BEGUN = "begun"


async def _from_token_ids(post: PostToNode, resume: ResumeInput) -> ResumePlan | None:
    """Continue from the tokens that were written; None: not all of their ids are known."""
    transcript, body = resume.transcript, resume.body
    detokenized = await post("/detokenize", {"tokens": transcript.token_ids})
    if detokenized.get("content") != transcript.text or transcript.reasoning_text:
        # Ids are missing where bytes are held back until they make a character.
        return None
    given = None if resume.route.api.is_chat else body.get("prompt")
    prompt = given if isinstance(given, list) else await _rendered_prompt(post, resume)
    if prompt is None:
        return None
    ids = prompt if isinstance(prompt, list) else await _tokenize_ids(post, prompt)
    if not all(isinstance(token, int) for token in ids):
        return None
    count = len(transcript.token_ids)
    splice_point = SplicePoint(transcript.text, "", len(ids), count, count)
    left = remaining_tokens(body, count)
    if (ended := resume.ended(splice_point, left)) is not None:
        return ended
    native = native_body(body, [*ids, *transcript.token_ids], left)
    return ResumePlan(splice_point, resume.native_rewriter(splice_point), NATIVE_ROUTE, native)


async def _from_reasoning(post: PostToNode, resume: ResumeInput) -> ResumePlan:
    """Continue reasoning, or the content behind it: only the template shows how it is written."""
    transcript, body = resume.transcript, resume.body
    chat = resume.route.api.chat_body(body)
    if chat is None or body.get("tools"):
        raise NotResumable("its reasoning can't be written into a prompt")
    prompt = await _apply_template(post, chat)
    prompt_tokens = len(await tokenize_pieces(post, prompt))
    resume.check_prompt(prompt_tokens)

    async def render(messages: list[JsonObject]) -> str:
        return await _apply_template(post, chat | {"messages": messages})

    template = await find_reasoning_template(render, chat["messages"], prompt)
    is_over = bool(transcript.text)
    if template is None or (template.end_mark is None and not is_over):
        raise NotResumable("the node's template does not show how reasoning is written")
    fixed = template.before_content(transcript.reasoning_text) if is_over else template.before
    fixed_tokens = len(await tokenize_pieces(post, fixed))
    if not is_over:
        running = Transcript(
            content_pieces=transcript.reasoning_pieces, token_count=transcript.token_count
        )
    else:
        tokens = len(transcript.content_pieces)
        if transcript.token_count > len(transcript.reasoning_pieces) + tokens:
            # Some of the pieces are several tokens.
            tokens = len(await tokenize_pieces(post, fixed + transcript.text)) - fixed_tokens
        running = Transcript(content_pieces=transcript.content_pieces, token_count=tokens)
    splice_point = await find_splice_point(
        post,
        fixed,
        running,
        greedy=resume.step_back and is_greedy(body),
        has_stop_words=has_stop_words(body),
    )
    written = fixed + splice_point.prefix
    between = fixed_tokens - prompt_tokens
    splice_point = replace(
        splice_point,
        prefix=written.removeprefix(prompt),
        prompt_tokens=prompt_tokens,
        sent_tokens=between + splice_point.sent_tokens,
        prefix_tokens=between + splice_point.prefix_tokens,
    )
    left = remaining_tokens(body, splice_point.prefix_tokens)
    if (ended := resume.ended(splice_point, left)) is not None:
        return ended
    native = native_body(body, written, left)
    if template.end_mark is not None:
        # If the mark is a control token, the node would leave it out.
        native["preserved_tokens"] = [template.end_mark.mark]
    rewriter = resume.native_rewriter(splice_point, None if is_over else template.end_mark)
    return ResumePlan(splice_point, rewriter, NATIVE_ROUTE, native)


async def _from_text_alone(post: PostToNode, resume: ResumeInput) -> ResumePlan:
    """Continue from the text, where only the node's own API can render the prompt."""
    transcript, body, api = resume.transcript, resume.body, resume.route.api
    if not api.is_chat:
        raise NotResumable("the prompt is not one text")
    prompt_tokens = api.reported_prompt_tokens(transcript) or 0
    reply = await post("/tokenize", {"content": transcript.text, "add_special": False})
    count = len(reply.get("tokens") or ())
    splice_point = SplicePoint(transcript.text, "", prompt_tokens, count, count)
    left = remaining_tokens(body, count)
    if (ended := resume.ended(splice_point, left)) is not None:
        return ended
    continued = api.continued_body(body, transcript.text, left)
    return ResumePlan(splice_point, resume.rewriter(splice_point), resume.route, continued)


async def _rendered_prompt(post: PostToNode, resume: ResumeInput) -> str | None:
    """The prompt as the model reads it; None: it can't be rendered."""
    api, body = resume.route.api, resume.body
    if not api.is_chat:
        prompt = body.get("prompt")
        return prompt if isinstance(prompt, str) else None
    chat = api.chat_body(body)
    return None if chat is None else await _apply_template(post, chat)


async def _apply_template(post: PostToNode, chat: JsonObject) -> str:
    fields = {name: chat[name] for name in _TEMPLATE_FIELDS if name in chat}
    return str((await post("/apply-template", fields)).get("prompt") or "")


_TEMPLATE_FIELDS = ("messages", "tools", "chat_template_kwargs", "reasoning_format")


async def _tokenize_ids(post: PostToNode, text: str) -> list[int]:
    reply = await post("/tokenize", {"content": text, "add_special": True, "parse_special": True})
    return [token for token in reply.get("tokens") or () if isinstance(token, int)]


def is_greedy(body: JsonObject) -> bool:
    """Whether the most likely token is always taken, so that a prompt always gives one text."""
    temperature, top_k = body.get("temperature"), body.get("top_k")
    return (is_number(temperature) and not temperature > 0) or (is_number(top_k) and top_k == 1)


def has_stop_words(body: JsonObject) -> bool:
    """Whether the response ends at certain words."""
    return bool(body.get("stop") or body.get("stop_sequences"))


# How a template writes reasoning.

RenderTemplate = Callable[[list[JsonObject]], Awaitable[str]]
"""Renders these messages as a prompt. Raises: UpstreamError."""

_END_MARK = re.compile(r"\s*(<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\])(\s*)")
"""A mark that ends reasoning, as a template writes it behind reasoning."""

_START_MARK = re.compile(r"<([^<>/|\s]{1,40})>\s*$")
"""A mark that begins reasoning, as a template leaves it at the end of a prompt."""

_SAMPLE_REASONING, _SAMPLE_CONTENT = "sample-of-reasoning", "sample-of-content"


@dataclass(frozen=True, slots=True)
class ReasoningTemplate:
    """The text that a template writes around reasoning."""

    before: str
    """All text before the reasoning, the prompt included."""
    between: str
    """The text between the reasoning and the content."""
    end_mark: ReasoningEndMark | None
    """None: more than a mark ends the reasoning."""

    def before_content(self, reasoning: str) -> str:
        """All text before the content, behind this reasoning."""
        # llama.cpp reports the white space before the mark; other servers may have removed it.
        reported = reasoning[-1:].isspace()
        return f"{self.before}{reasoning}{self.between.lstrip() if reported else self.between}"


async def find_reasoning_template(
    render: RenderTemplate, messages: list[JsonObject], prompt: str
) -> ReasoningTemplate | None:
    """Find how reasoning is written behind this prompt; None: the template does not show it.

    Raises: UpstreamError.
    """
    last = {"role": "assistant", "reasoning_content": _SAMPLE_REASONING, "content": _SAMPLE_CONTENT}
    before, reasoning, behind = (await render([*messages, last])).partition(_SAMPLE_REASONING)
    between, content, _ = behind.partition(_SAMPLE_CONTENT)
    start_mark = _START_MARK.search(prompt)
    if reasoning and content:
        mark = _END_MARK.fullmatch(between)
        end_mark = ReasoningEndMark(mark[1], mark[2]) if mark else None
        # The reasoning stood behind the mark that the prompt ends with.
        opened = start_mark is not None and f"</{start_mark[1]}>" in between
        return ReasoningTemplate(prompt if opened else before, between, end_mark)
    if start_mark is None:
        return None
    end_mark = ReasoningEndMark(f"</{start_mark[1]}>")
    return ReasoningTemplate(prompt, f"\n{end_mark.mark}{end_mark.whitespace}", end_mark)
