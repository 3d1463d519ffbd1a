"""The choices of a request: one row each, and its text."""

import dataclasses
from collections.abc import Sequence

from moe_edge.schedule.request import Request
from moe_edge.serve.grammar import RowGuide
from moe_edge.serve.served_model import ServedModel
from moe_edge.serve.text_ends import StopText, TextEnds
from moe_edge.serve.token_request import Encoded, TokenRequest


@dataclasses.dataclass(eq=False)
class Choice:
    """A row of a request, on its way.

    Attributes:
      index: among all choices of the request, prompt by prompt.
      number: among those of its prompt.
      echo: what stands before its text.
      guide: of its grammar, if it has one.
    """

    index: int
    number: int
    prompt: Encoded
    row: Request
    ends: TextEnds
    echo: str = ""
    guide: RowGuide | None = None

    @property
    def ended_by(self) -> str:
        """`eos`, `stop`, `length` or `deadline`, once it has finished."""
        if self.row.state == "expired":  # other rows of its request had begun
            return "deadline"
        return "stop" if self.ends.stopped else self.row.ended_by


def make_choices(
    request: TokenRequest,
    prompts: Sequence[Encoded],
    model: ServedModel,
    arrival_s: float,
) -> list[Choice]:
    """What to submit: n rows for each prompt.

    Of many rows or long texts it takes up to a second: call it in a thread.

    Args:
      prompts: of `request.encode`.
      arrival_s: on the driver's clock; the deadline counts from it.
    Raises:
      ApiError: a grammar that cannot be enforced.
    """
    deadline_s = None if request.deadline_s is None else arrival_s + request.deadline_s
    stop = [StopText(text) for text in request.stop]
    choices = []
    shared = request.grammar and model.grammars.compile(request.grammar)
    for prompt in prompts:
        echo, reading = prompt.text if request.echo else "", prompt.reading
        special = bool(reading and reading.needs_special(model.tokenizer))
        grammar = shared or (prompt.grammar and model.grammars.compile(prompt.grammar))
        for number in range(request.n):
            ends = TextEnds(
                model.tokenizer,
                context=prompt.ids,
                stop=stop,
                eos_ids=model.eos_ids,
                ignore_eos=request.ignore_eos,
                with_tokens=request.top_logprobs is not None,
                silent=request.max_new_tokens == 0,
                special=special,
                first=len(echo),
            )
            guide = grammar and grammar.guide(reading and reading.reasoning)
            new = request.new_tokens(prompt, model)
            row = Request(
                prompt=prompt.ids,
                new_tokens=max(new, 1),
                only_scored=not new,
                floor=request.floor,
                sampling=request.sampling(number),
                top_logprobs=request.top_logprobs,
                score_prompt=request.score_prompt,
                deadline_s=deadline_s,
                guide=guide,
                ends=ends,
            )
            choice = Choice(len(choices), number, prompt, row, ends, echo, guide)
            choices.append(choice)
    return choices
