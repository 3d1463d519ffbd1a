"""The routes that make text: from a body to rows of the engine, and their answer.

What takes long runs in threads of its own (`Workers`), so that the event loop goes on.
"""

import asyncio
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
from moe_edge.serve.guards import ClientGone, read_body, until_gone
from moe_edge.serve.responses_answer import ResponsesAnswer
from moe_edge.serve.responses_body import ResponsesBody
from moe_edge.serve.served_model import ServedModel

T = TypeVar("T")
GONE = "client_gone"
SHORT_BYTES = 2048  # of a body: a text of that takes the tokenizer a millisecond or two
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


class Workers:
    """Does what is short at once, all else in threads.

    The tokenizer leaves Python's lock alone meanwhile.

    Args:
      name: of the threads.
      most_bytes: of bodies that are read or wait for it: how long the last one waits
        goes by their size, not their number.
    """

    def __init__(self, name: str, threads: int, most_bytes: float = math.inf):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most_bytes, self._num_bytes = most_bytes, 0

    def has_room(self, body: bytes) -> bool:
        """Whether a body may be read, or wait for it."""
        if len(body) <= SHORT_BYTES:
            return True
        return self._num_bytes + len(body) <= self._most_bytes

    async def read(
        self,
        receive: Receive,
        do: Callable[..., T],
        body: bytes,
        *given,
        is_short: bool = True,
    ) -> T:
        """`do(body, *given)`; never begun if the client goes before.

        Args:
          is_short: whether a short body takes no time worth a thread.
        Raises:
          ApiError: queue_full: there is no room.
          ClientGone: before the end.
        """
        if is_short and len(body) <= SHORT_BYTES:
            return do(body, *given)
        size = max(len(body), SHORT_BYTES)
        if self._num_bytes + size > self._most_bytes:
            raise refusal("queue_full")
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, do, body, *given)
        gone = asyncio.create_task(until_gone(receive, work.cancel))
        self._num_bytes += size
        try:
            await asyncio.wait([work])
            if work.cancelled():
                raise ClientGone
            return work.result()
        finally:
            self._num_bytes -= size
            work.cancel()
            gone.cancel()

    async def run(self, size: int, do: Callable[..., T], *given) -> T:
        """`do(*given)`, which handles so many bytes."""
        if size <= SHORT_BYTES:
            return do(*given)
        return await asyncio.get_running_loop().run_in_executor(self._pool, do, *given)


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
