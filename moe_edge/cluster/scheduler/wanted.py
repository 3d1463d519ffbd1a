"""The requests of a run: from a prompts file, or made up by a task family a server."""

import dataclasses

import numpy as np

from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.roles import FIRST, MAIN
from moe_edge.cluster.scheduler.requests import ClusterRequest
from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import RequestError
from moe_edge.core.json_reader import json_objects
from moe_edge.engine.prompts import (
    Prompt,
    encode_prompts,
    read_prompts,
)
from moe_edge.training.generators import examples
from moe_edge.workload.arrivals import poisson_servers

PROMPTS = "prompts"  # the domain of a user's own texts


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Requests in order of arrival, and their texts."""

    asked: list[ClusterRequest]
    texts: list[Prompt]


def wanted_of(options: ClusterOptions, tokenizer: Tokenizer, limit: int) -> Wanted:
    """What a run is asked for.

    Args:
      limit: positions of the model.
    Raises:
      RequestError: a bad line of the prompts, or a server that is none.
      CapacityError: a prompt that exceeds the model's context.
    """
    if options.prompts is not None:
        wanted = from_prompts(options.prompts, options, tokenizer, limit)
    else:
        if options.one_home:  # the families take turns
            options = dataclasses.replace(options, servers=len(options.families))
        wanted = from_workload(options, tokenizer, limit)
    if not options.one_home:
        return wanted
    at_main = {"home": MAIN - FIRST, "arrival_s": 0.0}  # all at once
    asked = [dataclasses.replace(one, **at_main) for one in wanted.asked]
    return Wanted(asked, wanted.texts)


def from_prompts(path: str, options: ClusterOptions, tokenizer, limit: int) -> Wanted:
    """The prompts of a file, all at once.

    Raises:
      RequestError: a bad line, or a server that is none.
    """
    texts = read_prompts(path)
    homes = []
    for number, (where, row) in enumerate(json_objects(path, RequestError)):
        home = row.get("server", number % options.servers)
        if type(home) is not int or not 0 <= home < options.servers:
            raise RequestError(
                f"{where}: 'server' is {home!r}, expected 0 to {options.servers - 1}"
            )
        homes.append(home)
    rows = encode_prompts(tokenizer, texts, options.max_new_tokens, limit)
    asked = [
        ClusterRequest(i, text.id, home, PROMPTS, 0.0, row, options.max_new_tokens)
        for i, (text, home, row) in enumerate(zip(texts, homes, rows, strict=True))
    ]
    return Wanted(asked, texts)


def from_workload(
    options: ClusterOptions,
    tokenizer: Tokenizer,
    limit: int,
    *,
    purpose: str = "serve",
    interval_s: float | None = None,
) -> Wanted:
    """Questions of each server's task family, arriving as a Poisson process.

    Args:
      purpose: part of the seed, so that what placers are told before is other text.
      interval_s: instead of the options'; 0: all at once.
    """
    count = options.requests_per_server
    interval_s = options.interval_s if interval_s is None else interval_s
    times = [np.zeros(count)] * options.servers
    if interval_s:
        times = poisson_servers(interval_s, options.servers, count, options.seed)
    found = []
    for home, (family, arrivals) in enumerate(
        zip(options.families, times, strict=True)
    ):
        made = examples(family, f"cluster/{purpose}/{options.seed}/{home}", count)
        for number, (example, arrival_s) in enumerate(zip(made, arrivals, strict=True)):
            name = f"{family}/{home}/{number}"
            text = Prompt(name, f"{example.question}\nAnswer:")
            found.append((float(arrival_s), home, family, text))
    found.sort(key=lambda each: each[:2])
    texts = [text for *_, text in found]
    rows = encode_prompts(tokenizer, texts, options.output_tokens, limit)
    asked = [
        ClusterRequest(i, text.id, home, family, arrival_s, row, options.output_tokens)
        for i, ((arrival_s, home, family, text), row) in enumerate(
            zip(found, rows, strict=True)
        )
    ]
    return Wanted(asked, texts)
