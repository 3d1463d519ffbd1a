"""What a load consists of: when requests come, how long they are, and their floors.

Open loop: requests come when they come, however far the target is with those before.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.core.checks import ConfigError, RequestError, check_count, check_positive
from moe_edge.workload.arrivals import (
    PREFIX_BLOCK_TOKENS,
    read_arrivals,
    read_prefix_blocks,
    trace_path,
)
from moe_edge.workload.requests import Lengths

LENGTHS_CV = 0.5  # of Poisson's prompts and answers, which are log-normal


@dataclasses.dataclass(frozen=True)
class Offered:
    """A request as it is offered.

    Attributes:
      id: position in the order of arrival, from 0.
      arrival_s: seconds from the start.
      prompt_tokens, new_tokens: lengths.
      floor: fewest experts a token; None: what the target takes by default.
      blocks: numbers of the blocks with which the prompt begins: prompts that begin
        with the same blocks begin with the same tokens; (): a prompt of its own.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    floor: int | None = None
    blocks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """When requests come, and how long they are.

    Attributes:
      poisson: requests a second, at random times; instead of a trace.
      trace: recorded arrivals: azure_conv, azure_code or mooncake (whose prompts share
        prefixes).
      duration_s: how long requests arrive; None: 60 s, or until the trace ends.
      speed: factor on the pace of a trace's arrivals.
      length_scale: factor on the lengths of prompts and answers.
      prompt_tokens: mean length of prompts, with `poisson`.
      output_tokens: mean length of answers, with `poisson`.
      floors: shares of the requests by the fewest experts a token that they accept,
        such as `8:1,16:1`; None: the target's default.
      data_dir: folder of the traces and of the text for prompts.
      seed: of everything random.
    """

    poisson: float | None = None
    trace: str | None = None
    duration_s: float | None = None
    speed: float = 1.0
    length_scale: float = 1.0
    prompt_tokens: int = 128
    output_tokens: int = 64
    floors: str | None = None
    data_dir: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError for what is no load."""
        if (self.poisson is None) == (self.trace is None):
            got = "neither" if self.trace is None else "both"
            raise ConfigError(f"give either --poisson or --trace, got {got}")
        for name in ("poisson", "duration_s"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name in ("speed", "length_scale"):
            check_positive(name, getattr(self, name))
        for name in ("prompt_tokens", "output_tokens"):
            check_count(name, getattr(self, name))
        if self.trace is not None:
            trace_path(self.trace, self.data_dir)
        elif self.speed != 1:
            raise ConfigError(
                f"speed {self.speed:g} is of a trace; with --poisson ask for another "
                "rate"
            )
        parse_floors(self.floors)


def parse_floors(text: str | None) -> dict[int, float]:
    """Share of each floor, from `8:1,16:1`; {} of None.

    Raises:
      ConfigError: another form.
    """
    shares: dict[int, float] = {}
    for part in text.split(",") if text is not None else ():
        floor, colon, share = part.partition(":")
        try:
            k, weight = int(floor), float(share) if colon else 1.0
        except ValueError:
            k, weight = 0, 0.0
        if k < 1 or not 0 < weight < math.inf or k in shares:
            raise ConfigError(
                f"floors {text!r}: {part!r} is no K:weight such as 8:1, each K once, "
                "from 1"
            )
        shares[k] = weight
    total = sum(shares.values())
    return {k: weight / total for k, weight in shares.items()}


def check_floors(text: str | None, own_k: int) -> None:
    """Raises ConfigError for a floor above the model's own K."""
    for floor in parse_floors(text):
        if floor > own_k:
            raise ConfigError(f"--floors asks for K {floor}, the model's is {own_k}")


def offered_requests(options: LoadOptions, max_context: int) -> list[Offered]:
    """The requests of a load, by arrival.

    Args:
      max_context: tokens of a prompt and its answer; longer ones are cut, the answer
        to half of it at most.
    Raises:
      RequestError: a bad trace, or no request in the time.
    """
    if options.trace is not None:
        times, lengths, blocks = _of_trace(options)
    else:
        times, lengths, blocks = _poisson(options)
    lengths = np.maximum(np.rint(lengths * options.length_scale), 1).astype(np.int64)
    outputs = np.minimum(lengths[:, 1], max(max_context // 2, 1))
    inputs = np.minimum(lengths[:, 0], np.maximum(max_context - outputs, 1))
    shares, rng = parse_floors(options.floors), np.random.default_rng([options.seed, 1])
    floors: list = [None] * len(times)
    if shares:
        floors = rng.choice(list(shares), len(times), p=list(shares.values())).tolist()
    sizes = inputs.tolist(), outputs.tolist()
    requests = zip(times.tolist(), *sizes, floors, blocks, strict=True)
    return [Offered(number, *each) for number, each in enumerate(requests)]


def in_whole_experts(requests: Sequence[Offered], subs: int) -> list[Offered]:
    """The same requests, whose floors were sub-experts, to a model of whole ones.

    Args:
      subs: sub-experts an expert; a floor becomes the next number of whole experts.
    """
    return [
        dataclasses.replace(each, floor=each.floor and -(-each.floor // subs))
        for each in requests
    ]


def block_tokens(options: LoadOptions) -> int:
    """Tokens of a block of prompts that share beginnings."""
    return max(round(PREFIX_BLOCK_TOKENS * options.length_scale), 1)


def _poisson(options: LoadOptions):
    rng, duration_s = np.random.default_rng([options.seed, 0]), options.duration_s or 60
    count, times = 2 * int(options.poisson * duration_s) + 20, np.zeros(1)
    while times[-1] < duration_s:
        gaps = rng.exponential(1 / options.poisson, count)
        times = np.concatenate([times, times[-1] + gaps.cumsum()])
    times = times[1:][times[1:] < duration_s]
    if not len(times):
        raise RequestError(
            f"no request comes within {duration_s:g} s at {options.poisson:g} a "
            "second; ask for a longer --duration_s"
        )
    sizes = Lengths(
        options.prompt_tokens, LENGTHS_CV, options.output_tokens, LENGTHS_CV
    )
    return times, sizes.draw(len(times), rng), [()] * len(times)


def _of_trace(options: LoadOptions):
    path = Path(trace_path(options.trace, options.data_dir))
    table = read_arrivals(path)
    times = table[:, 0] / options.speed
    blocks = read_prefix_blocks(path.with_suffix(".jsonl"), len(times))
    count = len(times)
    if options.duration_s is not None:
        count = int(np.searchsorted(times, options.duration_s))
        if not count:
            raise RequestError(
                f"no request of {options.trace} comes within {options.duration_s:g} s;"
                f" the first one comes after {times[0]:g} s"
            )
    return times[:count], table[:count, 1:], blocks[:count]
