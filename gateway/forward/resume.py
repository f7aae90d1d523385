"""Resuming a stream on another node when its node dies, so that the client sees one stream.

`Resumer` leases the next node and joins its stream to the first; `plan_resume` asks that node how
it reads the transcript, and so how to go on. What each API contributes is in its module
(`gateway.api`). docs/reliability.md says what is promised.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from gateway import errors
from gateway.api.json_values import InvalidJson, JsonObject, parse_object
from gateway.api.native import native_body
from gateway.api.outcome import (
    LeaseTooOld,
    fault_of,
    is_context_overflow,
    is_refused_request,
    router_failure,
)
from gateway.api.resuming import (
    EventRewriter,
    ReasoningEndMark,
    is_number,
    remaining_tokens,
    wants_usage,
)
from gateway.api.transcript import (
    OverlapMismatch,
    PostToNode,
    SplicePoint,
    Transcript,
    TranscriptRecorder,
    find_splice_point,
    tokenize_pieces,
)
from gateway.errors import GatewayError, drop_traceback
from gateway.events import SlotYielded, StreamResumed
from gateway.forward.context import MOST_POOL_OVERFLOWS, MOST_UNLOADED, ForwardContext, Retries
from gateway.forward.event_pipeline import EventPipeline
from gateway.forward.in_flight import Attempt, InFlightRequest
from gateway.lease import NOTHING_TRIED, Fault, GrantedLease, LeaseRequest, Tried
from gateway.request.body import FULL_PARSE_BYTES, Body, bytes_to_parse
from gateway.request.edits import NO_PROMPT_CACHE
from gateway.request.preparation import Request
from gateway.request.routes import NATIVE_ROUTE, ROUTES, Route
from gateway.transport.connection import LoopTimeout
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import (
    DECLINED,
    ConnectFailed,
    ConnectionReset,
    ConnectTimedOut,
    InvalidResponse,
    ModelNotLoaded,
    NodeReportedError,
    PoolFull,
    UpstreamError,
    UpstreamTimeout,
)


class NotResumable(Exception):  # noqa: N818 - not an error: the stream just ends
    """The replacement node cannot safely resume this stream."""

    outcome = "unsound"


@dataclass(slots=True)
class ResumePlan:
    """The request that continues a response, or the events that end it without one."""

    splice_point: SplicePoint
    rewriter: EventRewriter
    route: Route  # where the request goes
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

    async def splice(self, post: PostToNode, prompt: str, sent: Transcript) -> SplicePoint:
        """The splice point in what was sent behind this prompt. Raises: UpstreamError."""
        return await find_splice_point(
            post,
            prompt,
            sent,
            greedy=self.step_back and is_greedy(self.body),
            has_stop_words=bool(self.body.get("stop") or self.body.get("stop_sequences")),
        )

    def check_prompt(self, tokens: int) -> None:
        """Check that the prompt is as long as the first node read it. Raises: NotResumable."""
        reported = self.route.api.reported_prompt_tokens(self.transcript)
        if reported is not None and reported != tokens:
            raise NotResumable("the node renders the prompt in another way")

    def plan(
        self,
        splice_point: SplicePoint,
        prompt: str | list[int] | None = None,
        end_mark: ReasoningEndMark | None = None,
    ) -> ResumePlan:
        """How to go on from here, or to end a response whose last token had been sent.

        `prompt`: what `/completion` is to go on behind, up to the mark that ends the reasoning;
        None: the request's own API goes on. Raises: NotResumable.
        """
        body, transcript, route, api = self.body, self.transcript, self.route, self.route.api
        left, usage = remaining_tokens(body, splice_point.prefix_tokens), wants_usage(body)
        reason = transcript.finish_reason or ("length" if left == 0 else None)
        if reason is None and prompt is not None:
            self.check_prompt(splice_point.prompt_tokens)
            native = api.native_event_rewriter
            if native is None or (api.is_chat and body.get("tools")):
                raise NotResumable("the node's template refuses a begun message")
            rewriter = native(transcript, splice_point, end_mark, usage=usage)
            return ResumePlan(splice_point, rewriter, NATIVE_ROUTE, native_body(body, prompt, left))
        if api.event_rewriter is None:
            raise NotResumable("its API can't be resumed")
        rewriter = api.event_rewriter(transcript, splice_point, usage=usage)
        if reason is not None:
            return ResumePlan(
                splice_point, rewriter, route, final_events=rewriter.final_events(reason)
            )
        continued = api.continued_body(body, splice_point.prefix, left)
        return ResumePlan(splice_point, rewriter, route, continued)


async def plan_resume(post: PostToNode, resume: ResumeInput) -> ResumePlan:
    """Plan the continuation. Raises: UpstreamError, NotResumable."""
    transcript, api = resume.transcript, resume.route.api
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
    splice_point = await resume.splice(post, prompt, transcript)
    behind = prompt + splice_point.prefix if resume.as_completion else None
    return resume.plan(splice_point, behind)


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
    return resume.plan(splice_point, [*ids, *transcript.token_ids])


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
    splice_point = await resume.splice(post, fixed, running)
    written = fixed + splice_point.prefix
    between = fixed_tokens - prompt_tokens
    splice_point = dataclasses.replace(
        splice_point,
        prefix=written.removeprefix(prompt),
        prompt_tokens=prompt_tokens,
        sent_tokens=between + splice_point.sent_tokens,
        prefix_tokens=between + splice_point.prefix_tokens,
    )
    plan = resume.plan(splice_point, written, None if is_over else template.end_mark)
    if plan.body is not None and template.end_mark is not None:
        # If the mark is a control token, the node would leave it out.
        plan.body["preserved_tokens"] = [template.end_mark.mark]
    return plan


async def _from_text_alone(post: PostToNode, resume: ResumeInput) -> ResumePlan:
    """Continue from the text, where only the node's own API can render the prompt."""
    transcript, api = resume.transcript, resume.route.api
    if not api.is_chat:
        raise NotResumable("the prompt is not one text")
    prompt_tokens = api.reported_prompt_tokens(transcript) or 0
    reply = await post("/tokenize", {"content": transcript.text, "add_special": False})
    count = len(reply.get("tokens") or ())
    return resume.plan(SplicePoint(transcript.text, "", prompt_tokens, count, count))


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


# How a template writes reasoning.

# Renders these messages as a prompt. Raises: UpstreamError.
RenderTemplate = Callable[[list[JsonObject]], Awaitable[str]]
# A mark that ends reasoning, as a template writes it behind reasoning.
_END_MARK = re.compile(r"\s*(<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\])(\s*)")
# A mark that begins reasoning, as a template leaves it at the end of a prompt.
_START_MARK = re.compile(r"<([^<>/|\s]{1,40})>\s*$")
_SAMPLE_REASONING, _SAMPLE_CONTENT = "sample-of-reasoning", "sample-of-content"


@dataclass(frozen=True, slots=True)
class ReasoningTemplate:
    """The text that a template writes around reasoning."""

    before: str  # all text before the reasoning, the prompt included
    between: str  # the text between the reasoning and the content
    end_mark: ReasoningEndMark | None  # None: more than a mark ends the reasoning

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


MOST_RESUMES = 2  # resumptions of one stream
# Failures of a resumption that has given no node any work.
_NOT_REACHED = ConnectFailed | ConnectTimedOut | ModelNotLoaded


@dataclass(slots=True)
class Resumed:
    """How a stream continues: `first_bytes` are sent next; no attempt: they are its end."""

    first_bytes: bytes
    attempt: Attempt | None = None
    splice_point: SplicePoint | None = None
    """Of a response that needs no attempt, since its text is complete."""


class ResumeRefused(UpstreamError):  # noqa: N818 - as `StreamFailed`
    """The replacement node answered the resumed request with an error `status`."""

    outcome = "refused"

    def __init__(self, status: int) -> None:
        super().__init__(f"The node answered with status {status}")
        self.status = status


class ResumeFailed(NotResumable):
    """It could not be resumed this time."""


class OtherKindOfNode(Exception):  # noqa: N818 - not an error: another node is tried
    """The node has another model or build than the first one."""

    outcome = "other_kind"


class FailedStream(NamedTuple):
    """A stream or a resumption that failed, as the retry policy sees it."""

    reached_node: bool = True
    pool_full: bool = False  # whether its node had no room for the tokens of all its slots


class FirstRun(NamedTuple):
    """The attempt that a response began with."""

    model: str  # the name of the model, of those that the request may have
    node_kind: str | None  # `node_kind` of its node; None: unknown, so that any node will do
    resume_key: tuple[object, ...] | None = None
    """That of its node; None: it ran in another process."""


def node_kind(resume_key: tuple[object, ...]) -> str:
    """A word for `NodeInfo.resume_key` that may be written down."""
    return hashlib.sha256(repr(resume_key).encode()).hexdigest()[:16]


@dataclass(slots=True, eq=False, repr=False)
class Resumer:
    """Resumes the stream of one request from the transcript of what was sent.

    The first resumption is always granted. Each further one, whether the resumed stream has failed
    or the resumption itself, is a retry and needs the budget that all retries share. Those of
    streams that were cut because the slots of a node had no room left have a bound of their own.
    """

    _context: ForwardContext
    _in_flight: InFlightRequest
    _recorder: TranscriptRecorder
    _first_run: FirstRun
    _tried: Tried = NOTHING_TRIED
    """Nodes that failed this stream, or are of another kind; of what was tried before it began
    only what that shows of the request's size counts."""
    _request: Request = field(init=False)
    _lease_request: LeaseRequest = field(init=False)  # asked of the scheduler for the continuation
    _source: ResumeInput = field(init=False)  # what is resumed now, and how
    _met_other_kind: bool = False
    """Whether a node was of another kind than the one of another process."""
    _retries: Retries | None = None
    """Grants the resumptions after the first one; None: none was attempted."""
    _planned: tuple[str, ResumeInput, ResumePlan] | None = None
    """How a node is to continue it, whose lease became too old meanwhile."""
    _times_yielded: int = 0  # how often it has given up its slot to another request
    _unloaded: int = 0  # how often a node that was to resume it had not loaded the model

    def __post_init__(self) -> None:
        before, self._request = self._tried, self._in_flight.request
        self._tried = Tried(min_context=before.min_context, pool_overflows=before.pool_overflows)

    @property
    def pool_overflows(self) -> int:
        """How often the request has met a full pool so far, as in `Tried`."""
        return self._tried.pool_overflows

    def can_resume(self) -> bool:
        """Whether the stream could be resumed from what was sent so far."""
        return self._sound_input() is not None

    def owes_usage(self) -> bool:
        """Whether the client waits for the tokens of a response whose text is complete."""
        source = self._sound_input()
        return source is not None and wants_usage(source.body) and not source.transcript.usage_sent

    def _sound_input(self) -> ResumeInput | None:
        try:
            return self._resume_input()
        except NotResumable as error:
            drop_traceback(error)
            return None

    async def resume(
        self, failed: Attempt, *, yielded: bool = False, pool_full: bool = False
    ) -> Resumed | None:
        """The stream's continuation from another node; None: it can't be resumed.

        `yielded`: its node did not fail; it was cut for another request, waits for a slot of any
        node, and no retry is counted. `pool_full`: its node had no room for the tokens of all its
        slots, and may continue it. Raises: GatewayError, when the request was cancelled, is in
        quarantine or out of time; if it has yielded, also when it can't wait for a slot.
        """
        await ensure_task()
        node, tag, clock = failed.lease.node.name, self._request.x_request_id, self._context.clock
        began, tokens = clock(), self._recorder.transcript().token_count
        if yielded:
            self._times_yielded += 1
        elif pool_full:
            self._tried = self._tried.overflowed_on(node)
        elif failed.cut_by_router() is not None:
            # Its model's server is another one when the router has loaded it again.
            self._tried = self._tried.failed_on(node)
        else:
            self._exclude(node)
        resumed = resumed_on = None
        try:
            resumed = await self._resume(node, yielded=yielded, pool_full=pool_full)
            resumed_on = None if resumed.attempt is None else resumed.attempt.lease.node.name
        except NotResumable as error:
            drop_traceback(error)
            self._publish(node, None, str(error))
        finally:
            if yielded:
                goes_on = node if resumed is not None and resumed_on is None else resumed_on
                waited = clock() - began
                self._context.bus.publish(SlotYielded(tag, node, goes_on, tokens, waited))
        if resumed is not None and (yielded or resumed_on is not None):
            self._in_flight.record.resumed()
            if not yielded:
                self._publish(node, resumed_on, None)
        return resumed

    async def begin(self) -> Resumed:
        """The continuation of a response that an earlier process has begun.

        Raises: NotResumable, if no node can safely go on with it; GatewayError as `resume`, and
        502 if it could not be resumed this time.
        """
        await ensure_task()
        try:
            resumed = await self._resume("", yielded=True)
        except ResumeFailed as error:
            raise errors.node_failed(f"The response could not be resumed: {error}.") from None
        if resumed.splice_point is not None:
            point = resumed.splice_point
            self._in_flight.record.count_tokens(point.prompt_tokens, 0, point.sent_tokens)
        self._recorder.add(resumed.first_bytes)
        return resumed

    def _publish(self, failed_node: str, resumed_on: str | None, reason: str | None) -> None:
        tokens = self._recorder.transcript().token_count
        tag = self._in_flight.request.x_request_id
        self._context.bus.publish(StreamResumed(tag, failed_node, resumed_on, tokens, reason))

    async def _resume(
        self, failed_node: str, *, yielded: bool = False, pool_full: bool = False
    ) -> Resumed:
        """Resume as often as the retry policy grants. Raises: NotResumable, GatewayError.

        `yielded`: for the first time without asking it. `pool_full`: up to its own bound without.
        """
        self._source = self._resume_input()
        self._lease_request = self._resumed_lease_request(self._source.transcript)
        failure = FailedStream(pool_full=pool_full)
        while yielded or await self._is_granted(failure):
            result = await self._attempt(failed_node, yielded=yielded)
            if isinstance(result, Resumed):
                return result
            failure, yielded = result, False
        raise ResumeFailed(
            "the retry budget is used up"
            if self._retries is not None and self._retries.out_of_budget
            else "it has failed too often"
        )

    def _resume_input(self) -> ResumeInput:
        """The request and what was sent of its response. Raises: NotResumable."""
        transcript, route = self._recorder.transcript(), ROUTES[self._request.path]
        original: Body = self._request.bodies[self._first_run.model]
        body = parse_object(bytes_to_parse(original))
        if not self._request.stream:
            body |= route.api.streaming_fields or {}
        if not self._request.lease_request.wanted.prompt_cache:
            body |= NO_PROMPT_CACHE
        if len(original) > FULL_PARSE_BYTES:
            raise NotResumable("the request is too large to be resumed")
        if (reason := route.api.unresumable_reason(body, transcript)) is not None:
            raise NotResumable(reason)
        return ResumeInput(route, body, transcript)

    async def _is_granted(self, failure: FailedStream) -> bool:
        """Whether another resumption may follow `failure`; the first needs no budget."""
        if failure.pool_full:
            return self._tried.pool_overflows <= MOST_POOL_OVERFLOWS
        if self._retries is not None:
            return await self._retries.granted(reached_node=failure.reached_node)
        self._retries = self._context.retries(MOST_RESUMES)
        return True

    async def _attempt(  # noqa: PLR0912 - one story
        self, failed_node: str, *, yielded: bool
    ) -> Resumed | FailedStream:
        """One resumption; may take several leases where a node needs the request put differently.

        Raises: NotResumable, GatewayError.
        """
        while True:
            self._check_allowed(failed_node)
            try:
                lease = await self._lease(yielded=yielded)
            except GatewayError as error:
                if self._in_flight.cancel_error is not None:
                    raise
                if self._met_other_kind:
                    raise NotResumable("no node of the kind that began it is left") from None
                if yielded:
                    raise
                raise ResumeFailed(f"no node could resume it: {error.code}") from None
            node = lease.node.name
            try:
                return await self._exchange(lease)
            except OverlapMismatch:
                # Once more, from exactly the text that was sent.
                self._source = dataclasses.replace(self._source, step_back=False)
            except OtherKindOfNode:
                self._met_other_kind = self._first_run.resume_key is None
                self._exclude(node)
            except LeaseTooOld as failure:
                drop_traceback(failure)
            except UpstreamError as failure:
                drop_traceback(failure)
                if (
                    isinstance(failure, ResumeRefused)
                    and failure.status == 400
                    and not self._source.as_completion
                    and "messages" in self._source.body
                ):
                    # The node's template may refuse a message that has begun: go around it.
                    self._source = dataclasses.replace(self._source, as_completion=True)
                elif isinstance(failure, PoolFull):
                    self._tried = self._tried.overflowed_on(node)
                    return FailedStream(pool_full=True)
                elif (
                    isinstance(failure, ModelNotLoaded)
                    and not failure.is_gone
                    and self._unloaded < MOST_UNLOADED
                ):
                    self._unloaded += 1  # Wait until it is loaded, on this node or another.
                else:
                    self._exclude(node)
                    return FailedStream(reached_node=not isinstance(failure, _NOT_REACHED))

    async def _lease(self, *, yielded: bool) -> GrantedLease:
        """A lease on a node that may resume the stream. Raises: GatewayError."""
        leases, request, lease_request = self._context.leases, self._request, self._lease_request
        queued_at = self._context.clock()
        age = queued_at - request.received_at
        if yielded:
            # It waits from now on: an old request would be overdue, and take its slot back.
            limit = lease_request.caller.time_limit
            left = None if limit is None else max(0.0, limit - age)
            caller = msgspec.structs.replace(lease_request.caller, time_limit=left)
            lease_request, age = msgspec.structs.replace(lease_request, caller=caller), 0.0
        lease = leases.lease_now(lease_request, self._tried, age)
        if lease is not None:
            return lease
        try:
            return await leases.wait_for_lease(
                lease_request,
                self._tried,
                age,
                # The client has part of a stream, which no other request should displace.
                response_started=request.stream or self._in_flight.response_started,
            )
        finally:
            if yielded:
                self._in_flight.record.waited(self._context.clock() - queued_at)

    def _check_allowed(self, failed_node: str) -> None:
        """Check that the request may go to another node. Raises: GatewayError."""
        if self._in_flight.cancel_error is not None:
            raise self._in_flight.cancel_error
        try:
            self._context.check_quarantine(self._request)
        except GatewayError:
            self._publish(failed_node, None, "nodes died on this very request")
            raise

    def _exclude(self, node: str) -> None:
        """This node is not asked again."""
        self._tried = self._tried.failed_on(node).refused_by(node)

    def _resumed_lease_request(self, transcript: Transcript) -> LeaseRequest:
        """What is asked of the scheduler: the same model on a node of the same kind."""
        request, replace = self._request.lease_request, msgspec.structs.replace
        caller, size, tokens = request.caller, request.size, request.size.max_tokens
        return LeaseRequest(
            request.id,
            replace(
                caller,
                admitted=caller.admitted or self._times_yielded > 0,
                times_yielded=self._times_yielded,
            ),
            replace(
                request.wanted,
                model_names=(self._first_run.model,),
                llama_cpp_only=True,
                stream=True,
                resume_key=self._first_run.resume_key,
            ),
            replace(
                size,
                prompt_tokens=size.prompt_tokens + transcript.token_count,
                text_bytes=size.text_bytes + len(transcript.text) + len(transcript.reasoning_text),
                max_tokens=None if tokens is None else max(1, tokens - transcript.token_count),
            ),
        )

    async def _exchange(self, lease: GrantedLease) -> Resumed:
        """The continuation under this lease.

        Raises: UpstreamError, OtherKindOfNode, NotResumable, OverlapMismatch, GatewayError.
        """
        context, in_flight = self._context, self._in_flight
        attempt = Attempt(
            in_flight,
            lease,
            context.settings,
            context.leases,
            context.timeout_monitor,
            context.clock,
        )
        outcome, fault, unreachable = "client_closed", Fault.NOBODY, None
        try:
            resume_plan = await self._plan(attempt)
            if resume_plan.final_events is not None:
                outcome = "ok"
                return Resumed(resume_plan.final_events, splice_point=resume_plan.splice_point)
            in_flight.record.attempt_began(lease.node.name, lease.node.tier, lease.fallback)
            self._planned = lease.node.name, self._source, resume_plan
            resumed = await self._open(attempt, resume_plan)
            outcome, self._planned = "", None
            return resumed
        except (OtherKindOfNode, OverlapMismatch, NotResumable) as failure:
            outcome = failure.outcome
            raise
        except LeaseTooOld:
            outcome = ""
            context.ends.not_started(attempt)
            raise
        except UpstreamError as failure:
            outcome = failure.outcome
            fault = fault_of(outcome, request_took_time=self._request.deadline is not None)
            unreachable = str(failure) if isinstance(failure, ConnectFailed) else None
            if outcome == ConnectionReset.outcome:
                context.ends.node_lost(attempt)
            if isinstance(failure, UpstreamTimeout) and failure.limit == "total":
                raise errors.node_timeout(f"{failure}.") from failure
            raise
        finally:
            if outcome:
                self._planned = None
                context.ends.attempt_failed(
                    attempt, outcome, fault, unreachable=unreachable, resumes=True
                )

    async def _plan(self, attempt: Attempt) -> ResumePlan:
        """How this node continues the response. Raises: as `_exchange`."""
        planned, self._planned = self._planned, None
        if planned is not None and planned[0] == attempt.lease.node.name:
            _, source, plan = planned
            if source is self._source:
                return plan
        queries = NodeQueries(attempt)
        await self._check_kind(queries)
        return await plan_resume(queries.post, self._source)

    async def _check_kind(self, queries: NodeQueries) -> None:
        """Check that the node is still of the first one's kind; it may have been restarted.

        Raises: OtherKindOfNode, UpstreamError.
        """
        props = await queries.query(b"GET", "/props")
        resume_key = self._context.leases.resume_key_of(props)
        if self._first_run.resume_key is None:
            if self._first_run.node_kind not in {None, node_kind(resume_key)}:
                raise OtherKindOfNode
        elif resume_key != self._first_run.resume_key:
            raise OtherKindOfNode

    async def _open(self, attempt: Attempt, resume_plan: ResumePlan) -> Resumed:
        """The continuation, when its first new content has come.

        Raises: UpstreamError, NotResumable, OverlapMismatch.
        """
        route, body = resume_plan.route, resume_plan.body
        assert body is not None
        node = attempt.lease.node
        if "model" in body or node.query:
            body = body | {"model": attempt.lease.served_name}
        data = msgspec.json.encode(body)
        header_lines = self._in_flight.header_lines(attempt.lease.id)
        head = attempt.pool.address.request_head(
            b"POST", node.target(route.path), header_lines, len(data)
        )
        settings, clock = self._context.settings, self._context.clock
        events = EventPipeline(route.api, self._request, len(data), settings, clock)
        await attempt.open(route.api, head, data, events, resume_plan.splice_point)
        if attempt.status >= 300:
            endpoint = self._lease_request.wanted.endpoint
            if attempt.ended_by_full_pool(attempt.status, attempt.content):
                raise PoolFull("The node has no room for the tokens of its slots")
            if is_context_overflow(attempt.status, attempt.content, endpoint):
                raise NotResumable("no node has room for the response so far")
            refused = is_refused_request(attempt.status, attempt.content)
            raise ResumeRefused(400 if refused else attempt.status)
        if not attempt.is_sse:
            raise NodeReportedError("The node did not stream its answer")
        rewriter = resume_plan.rewriter
        first_bytes = rewriter.rewrite_events(attempt.content)
        while not rewriter.caught_up:
            chunk = await attempt.read()
            if not chunk:
                raise OverlapMismatch
            first_bytes += rewriter.rewrite_events(chunk)
        events.continue_stream(rewriter.rewrite_events, self._recorder.add)
        return Resumed(first_bytes, attempt)


# Seconds for one query. None of them takes a slot, or as long as a token; a server that sleeps
# wakes up first (`ExpectedReading.wake`).
QUERY_TIMEOUT = 10.0
# A prompt's tokens with their pieces are some 40 bytes each.
MOST_QUERY_RESPONSE_BYTES = 64 * 1024 * 1024
_JSON_HEADER_LINE = b"content-type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class NodeQueries:
    """Queries to one node. Its `post` is a `splice.PostToNode`."""

    _attempt: Attempt

    async def post(self, path: str, value: JsonObject) -> JsonObject:
        """Post JSON, get JSON. Raises: UpstreamError."""
        lease = self._attempt.lease
        if lease.node.query:
            value = value | {"model": lease.served_name}
        return await self.query(b"POST", path, msgspec.json.encode(value))

    async def query(self, method: bytes, path: str, body: bytes = b"") -> JsonObject:
        """Get JSON. Raises: UpstreamError."""
        attempt, lease = self._attempt, self._attempt.lease
        node, limit = lease.node, QUERY_TIMEOUT + lease.reading.wake
        target = node.target(path, "" if body else lease.served_name)
        head = attempt.pool.address.request_head(method, target, _JSON_HEADER_LINE, len(body))
        asked = attempt.pool.response(head, body, connect_timeout=attempt.connect_timeout)
        try:
            async with LoopTimeout(limit), asked as connection:
                answer = await connection.read_all(MOST_QUERY_RESPONSE_BYTES)
        except TimeoutError:
            message = f"{path} was not answered for {limit:.0f} s"
            raise UpstreamTimeout("first_byte", message) from None
        if node.query and (failure := router_failure(connection.status, answer)) is not None:
            raise failure
        if connection.status in DECLINED or connection.status == 429:
            raise ResumeRefused(connection.status)
        if connection.status != 200:
            raise NodeReportedError(f"The node answered {path} with status {connection.status}")
        try:
            return parse_object(answer)
        except InvalidJson:
            raise InvalidResponse(f"The node's answer to {path} is no JSON object") from None
