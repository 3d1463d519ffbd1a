"""The routes that make text: from a body to rows of the engine, and their answer."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_edge.serve.answers import Answer, ChatAnswer, CompletionAnswer, to_json
from moe_edge.serve.body import Body
from moe_edge.serve.call import Call
from moe_edge.serve.chat_body import ChatBody
from moe_edge.serve.chat_template import ChatTemplate
from moe_edge.serve.completion_body import CompletionBody
from moe_edge.serve.engine_thread import EngineThread
from moe_edge.serve.errors import ApiError, refusal
from moe_edge.serve.guards import read_body, until_gone
from moe_edge.serve.responses_answer import ResponsesAnswer
from moe_edge.serve.responses_body import ResponsesBody
from moe_edge.serve.served_model import ServedModel
from moe_edge.serve.workers import Workers

GONE = "client_gone"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # of proxies
]

_ANSWERS: dict[type[Body], type[Answer]] = {
    CompletionBody: CompletionAnswer,
    ChatBody: ChatAnswer,
    ResponsesBody: ResponsesAnswer,
}


def make_answer(call: Call, model: ServedModel) -> Answer:
    """The answer of a call, in the shape of its body."""
    return _ANSWERS[type(call.body)](call, model)


class Generation:
    """An ASGI application that answers requests for text.

    Args:
      read: (bytes, model) -> what they ask for.
      template: of conversations.
      readers, writers, compilers: of bodies, of answers and of grammars; apart, so that
        no answer waits for bodies, and no body for grammars.
      max_body_bytes, request_s: see `ServerOptions`.
    """

    def __init__(
        self,
        thread: EngineThread,
        model: ServedModel,
        template: ChatTemplate,
        read: Callable[[bytes, ServedModel], Body],
        readers: Workers,
        writers: Workers,
        compilers: Workers,
        max_body_bytes: int,
        request_s: float,
    ):
        self._thread, self._model, self._template = thread, model, template
        self._read = read
        self._readers, self._writers = readers, writers
        self._compilers = compilers
        self._max_body_bytes, self._request_s = max_body_bytes, request_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, thread = scope["path"], self._thread
        thread.check_open(endpoint)
        arrival_s = thread.clock()
        body = await read_body(scope, receive, self._max_body_bytes)
        with thread.coming(endpoint):
            if not self._readers.has_room(body):
                raise thread.refuse(endpoint, "queue_full")
            given = body, endpoint, arrival_s
            ready = await self._readers.read(receive, self._prepare, *given)
            if not isinstance(call := ready, Call):  # there is a grammar to compile
                read = self._compilers.read
                call = await read(receive, lambda _: ready(), body, is_short=False)
        thread.submit(call)
        gone = asyncio.create_task(until_gone(receive, lambda: call.lose(GONE)))
        try:
            answer = make_answer(call, self._model)
            if call.body.stream:
                await self._stream(answer, call, send)
            else:
                await self._whole(answer, call, scope, receive, send)
        finally:
            gone.cancel()
            thread.cancel(call)  # nothing, once it is over

    def _prepare(
        self, body: bytes, endpoint: str, arrival_s: float
    ) -> Call | Callable[[], Call]:
        """What a body asks for; where there is a grammar to compile, what makes it."""
        request, limit_s = self._read(body, self._model), self._request_s
        prompts = request.encode(self._model, self._template)
        if request.deadline_s is not None:
            limit_s = min(request.deadline_s, limit_s)
        request = dataclasses.replace(request, deadline_s=limit_s)
        given = request, prompts, self._model, endpoint, arrival_s
        if request.grammar or any(prompt.grammar for prompt in prompts):
            return functools.partial(Call, *given)
        return Call(*given)

    async def _whole(self, answer: Answer, call: Call, scope, receive, send) -> None:
        while not call.is_over:
            await _news(call)
        if call.lost is None:
            size = sum(map(answer.num_bytes, range(len(call.rows))))
            body = await self._writers.run(size, lambda: to_json(answer.body()))
            await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(self, answer: Answer, call: Call, send: Send) -> None:
        """Events as text comes; errors before the first are answers of their own."""
        news = await _news(call)
        if call.lost is not None:
            return
        await send(
            {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
        )
        lines = [answer.line(chunk) for chunk in answer.start()]
        try:
            while True:
                size = sum(map(answer.num_bytes, news))
                lines += await self._writers.run(size, _lines, answer, news)
                if lines:
                    await _send(send, lines)
                if call.is_over:
                    break
                news, lines = await _news(call), []
            last = answer.usage_chunk() if call.lost is None else None
            lines = [] if last is None else [answer.line(last)]
            lines += [answer.LAST] if call.lost is None else []
        except ApiError as error:
            lines = [answer.error_line(error)]
        await _send(send, lines, more=False)


async def _news(call: Call) -> dict[int, bool]:
    """Rows that have new text, and whether it is their last.

    Raises:
      ApiError: a row failed, or there will be no more.
    """
    news = await call.news()
    if call.lost is not None and call.lost != GONE:
        raise refusal(call.lost)
    for index in (index for index, is_over in news.items() if is_over):
        state, guide = call.rows[index].state, call.guides[index]
        if state == "failed":
            raise refusal("engine_error")
        # Rows of one deadline: where some had begun, the others are cut as these are.
        if state == "expired" and not call.has_begun:
            raise refusal("deadline_exceeded")
        if guide and guide.failure:
            raise guide.failure
    return news


def _lines(answer: Answer, news: dict[int, bool]) -> list[bytes]:
    lines = []
    for index, is_over in news.items():
        if is_over:
            lines += map(answer.line, answer.end(index))
        elif (line := answer.more_line(index)) is not None:
            lines.append(line)
    return lines


async def _send(send: Send, lines: Sequence[bytes], more: bool = True) -> None:
    body = b"".join(lines)
    await send({"type": "http.response.body", "body": body, "more_body": more})
