"""Rows that a body asked for together: n of each of its prompts."""

import asyncio
from collections.abc import Sequence

from moe_edge.schedule.request import Request
from moe_edge.serve.body import Body, Encoded
from moe_edge.serve.grammar import RowGuide
from moe_edge.serve.served_model import ServedModel
from moe_edge.serve.text_ends import StopText, TextEnds


class Call:
    """What was asked of the engine's thread, and its news for the event loop.

    Of many rows or long texts it takes up to a second to make: do that in a thread.

    Args:
      body, prompts: a request, and its `encode`.
      endpoint: where it came.
      arrival_s: when, on the driver's clock; the deadline counts from it.
    Raises:
      ApiError: a grammar that cannot be enforced.
    Attributes:
      rows: prompt by prompt; texts, guides: of each (None: no grammar).
      num_left: rows that are not over.
      lost: why there will be no end (code of an error); None: there will be one.
    """

    def __init__(
        self,
        body: Body,
        prompts: Sequence[Encoded],
        model: ServedModel,
        endpoint: str,
        arrival_s: float,
    ):
        self.body, self.prompts = body, prompts
        self.endpoint, self.arrival_s = endpoint, arrival_s
        self.rows: list[Request] = []
        self.texts: list[TextEnds] = []
        self.guides: list[RowGuide | None] = []
        stop = [StopText(text) for text in body.stop]
        shared = body.grammar and model.grammars.compile(body.grammar)
        for prompt in prompts:
            reading = prompt.reading
            special = bool(reading and reading.needs_special(model.tokenizer))
            own = None if shared else prompt.grammar
            grammar = shared or (own and model.grammars.compile(own))
            new = body.new_tokens(prompt, model)
            for number in range(body.n):
                text = TextEnds(
                    model.tokenizer,
                    context=prompt.ids,
                    stop=stop,
                    eos_ids=model.eos_ids,
                    ignore_eos=body.ignore_eos,
                    with_tokens=body.top_logprobs is not None,
                    silent=body.max_new_tokens == 0,
                    special=special,
                    first=len(self.echo(len(self.rows))),
                )
                guide = grammar and grammar.guide(reading and reading.reasoning)
                deadline_s = body.deadline_s
                row = Request(
                    prompt=prompt.ids,
                    new_tokens=max(new, 1),
                    only_scored=not new,
                    floor=body.floor,
                    sampling=body.sampling(number),
                    top_logprobs=body.top_logprobs,
                    score_prompt=body.score_prompt,
                    deadline_s=None if deadline_s is None else arrival_s + deadline_s,
                    guide=guide,
                    ends=text,
                )
                self.rows.append(row)
                self.texts.append(text)
                self.guides.append(guide)
        self.lost: str | None = None
        self.num_left = len(self.rows)
        self._news: dict[int, bool] = {}  # row -> whether it is over
        self._changed = asyncio.Event()

    def prompt(self, index: int) -> Encoded:
        """Of a row."""
        return self.prompts[index // self.body.n]

    def echo(self, index: int) -> str:
        """What stands before the text of a row."""
        return (self.prompt(index).text or "") if self.body.echo else ""

    def ended_by(self, index: int) -> str | None:
        """`eos`, `stop`, `length` or `deadline`, once a row has finished."""
        row = self.rows[index]
        if row.state == "expired":  # other rows of its request had begun
            return "deadline"
        return "stop" if self.texts[index].stopped else row.ended_by

    @property
    def is_over(self) -> bool:
        """Whether every row has ended and all its news were read, or all is lost."""
        return self.lost is not None or not (self.num_left or self._news)

    @property
    def has_begun(self) -> bool:
        """Whether a step ran, or will at once, for any of its rows."""
        return any(row.admitted_s is not None for row in self.rows)

    async def news(self) -> dict[int, bool]:
        """Waits until rows have new tokens or are over: row -> whether it is over.

        Empty if the call is lost. News that are not read are not kept apart.
        """
        while not self._news and not self.is_over:
            self._changed.clear()
            await self._changed.wait()
        found, self._news = self._news, {}
        return found

    def tell(self, index: int, is_over: bool) -> None:
        """A row has news."""
        self.num_left -= is_over
        self._news[index] = is_over
        self._changed.set()

    def lose(self, code: str) -> None:
        """There will be no more news, unless all were there already."""
        if self.num_left:
            self.lost = self.lost or code
        self._changed.set()
