"""Requests: who asks what, where and when; and how long they are in each domain."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    RequestError,
    check_count,
    check_from_zero,
    check_known,
)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and its answer.

    Attributes:
      id: position in the order of arrival, from 0.
      server: at which it arrives.
      arrival_s: seconds from the start.
      input_tokens, output_tokens: length of prompt and answer.
      domain: whose routing it follows.
    """

    id: int
    server: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    domain: str


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Log-normal token counts: mean and coefficient of variation, at least 1.

    Attributes:
      input_mean, input_cv: of prompts.
      output_mean, output_cv: of answers.
      most_output: longer answers are cut (Prism, section IV-A: 20 tokens).
    """

    input_mean: float
    input_cv: float
    output_mean: float
    output_cv: float
    most_output: int = 2**31 - 1

    def __post_init__(self):
        for field in dataclasses.fields(self)[:4]:
            check_from_zero(field.name, getattr(self, field.name))

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """int64 [count, 2]: input and output tokens."""
        inputs = _log_normal(self.input_mean, self.input_cv, count, rng)
        outputs = _log_normal(self.output_mean, self.output_cv, count, rng)
        return np.stack([inputs, np.minimum(outputs, self.most_output)], axis=1)


# Characters / 4 of the prompts and answers of the public samples of these sets, as
# rounded means and coefficients of variation. Answers are as long as the reference
# answer (BIG-bench, MMLU-Pro) or cut at 20 tokens (WikiText, TACO), as in Prism.
LENGTHS: Mapping[str, Lengths] = {
    "arithmetic": Lengths(8, 0.12, 2, 0.3),
    "ascii": Lengths(234, 1.12, 2, 0.3),
    "narrative": Lengths(210, 0.19, 9, 0.38),
    "mmlu_pro": Lengths(162, 0.84, 12, 1.2, 40),
    "wikitext": Lengths(157, 0.61, 20, 0.0, 20),
    "taco": Lengths(507, 0.40, 20, 0.0, 20),
}
OTHER = Lengths(128, 0.5, 64, 0.5)  # domains without a task of their own


def make_requests(
    domains: Sequence[str],
    arrivals: Sequence[np.ndarray],
    *,
    seed: int = 0,
    lengths: Mapping[str, Lengths] = LENGTHS,
) -> list[Request]:
    """Requests of every server in order of arrival.

    Args:
      domains: one a server.
      arrivals: for each server the seconds at which its requests come, rising.
      lengths: of each domain, drawn by `seed`; others take `OTHER`.
    """
    if len(domains) != len(arrivals):
        raise ConfigError(f"{len(arrivals)} arrivals for {len(domains)} domains")
    rows = []
    for server, (domain, times) in enumerate(zip(domains, arrivals, strict=True)):
        rng = np.random.default_rng([seed, server])
        sizes = lengths.get(domain, OTHER).draw(len(times), rng).tolist()
        rows += [
            (server, float(t), *size, domain)
            for t, size in zip(times, sizes, strict=True)
        ]
    rows.sort(key=lambda row: (row[1], row[0]))
    return [Request(number, *row) for number, row in enumerate(rows)]


def fixed_requests(
    domains: Sequence[str], arrivals: Sequence[np.ndarray], input_tokens, output_tokens
) -> list[Request]:
    """As `make_requests`, all of one length."""
    check_count("input_tokens", input_tokens)
    check_count("output_tokens", output_tokens)
    same = Lengths(input_tokens, 0.0, output_tokens, 0.0)
    return make_requests(domains, arrivals, lengths=dict.fromkeys(domains, same))


def check_requests(
    requests: Sequence[Request], num_servers: int, domains: Sequence[str]
) -> None:
    """Raises RequestError for what cannot be served, ConfigError for other domains."""
    if not requests:
        raise RequestError("no request to serve; expected at least one")
    before_s = 0.0
    for place, request in enumerate(requests):
        if request.id != place:
            raise RequestError(f"request {place} has id {request.id}; number from 0")
        if not (math.isfinite(request.arrival_s) and request.arrival_s >= before_s):
            raise RequestError(
                f"request {request.id} arrives at {request.arrival_s} s, expected "
                f"{before_s} s or later: sort the requests by arrival"
            )
        before_s = request.arrival_s
        if not 0 <= request.server < num_servers:
            raise RequestError(
                f"request {request.id} is for server {request.server}, expected 0 to "
                f"{num_servers - 1}"
            )
        if request.input_tokens < 1 or request.output_tokens < 1:
            raise RequestError(
                f"request {request.id} has {request.input_tokens} input and "
                f"{request.output_tokens} output tokens, expected at least 1 of each"
            )
        check_known("routing domain", request.domain, domains)


def _log_normal(mean: float, cv: float, count: int, rng) -> np.ndarray:
    sigma2 = math.log1p(cv**2)
    values = rng.lognormal(math.log(max(mean, 1)) - sigma2 / 2, sigma2**0.5, count)
    return np.maximum(np.rint(values), 1).astype(np.int64)
